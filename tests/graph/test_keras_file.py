import zipfile
from pathlib import Path

import pytest
from keras import Sequential, layers

from tfopt.errors import ArtifactError
from tfopt.graph.keras_file import load_keras


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("config.json", 2**30, r"config.json .* at most 64.0 MiB.*unpacks to 1.0 GiB"),
        ("model.weights.h5", 10**15, r"must fit into the free memory, .*unpacks to 909.5 TiB"),
    ],
)
def test_a_file_that_would_fill_the_memory_is_refused_before_it_is_unpacked(name, size, message, tmp_path):
    saved, file = tmp_path / "saved.keras", tmp_path / "bomb.keras"
    Sequential([layers.Input((3,)), layers.Dense(2)]).save(saved)
    with zipfile.ZipFile(saved) as whole, zipfile.ZipFile(file, "w") as archive:
        for each in whole.namelist():
            archive.writestr(each, whole.read(each))
        archive.getinfo(name).file_size = size  # what the directory at the end of the archive says
    with pytest.raises(ArtifactError, match=message):
        load_keras(file, trusted=False)
    assert load_keras(Path(saved), trusted=False).count_params() == 8
