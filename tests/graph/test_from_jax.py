"""A .keras file that was trained on JAX is a model here: its outputs, and the state of its training."""

import json
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

from tfopt.errors import ArtifactError
from tfopt.graph import freeze

FILE = Path(__file__).with_name("from_jax.keras")  # written by write_from_jax.py, which printed what follows
OUTPUTS = [[0.5095410943031311, 0.4904589354991913], [0.5367686748504639, 0.4632313549518585]]
MOMENTUM = 0.0007709678611718118


def test_the_outputs_are_those_of_jax():
    (outputs,) = freeze(FILE).predict(np.linspace(-1, 1, 20, dtype="float32").reshape(2, 5, 2)).values()
    np.testing.assert_allclose(outputs, OUTPUTS, atol=1e-6)


def test_the_training_continues_where_jax_ended():
    model = keras.models.load_model(FILE)
    assert int(model.optimizer.iterations) == 4
    assert float(np.sum(model.optimizer.variables[-1])) == pytest.approx(MOMENTUM, rel=1e-5)
    model.run_eagerly = True
    model.fit(np.zeros((4, 5, 2)), np.zeros(4), batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 5


def renamed(tmp_path, old, new):
    """Returns the file with a part of its config replaced."""
    target = tmp_path / "other.keras"
    with zipfile.ZipFile(FILE) as file, zipfile.ZipFile(target, "w") as other:
        for name in file.namelist():
            content = file.read(name)
            if name == "config.json":
                assert old.encode() in content
                content = content.replace(old.encode(), new.encode())
                json.loads(content)
            other.writestr(name, content)
    return target


def test_a_function_of_jax_is_named_with_the_remedy(tmp_path):
    silu = (
        '{"module": "jaxlib._jax", "class_name": "PjitFunction", "config": "silu", "registered_name": "PjitFunction"}'
    )
    file = renamed(tmp_path, '"activation": "softmax"', f'"activation": {silu}')
    with pytest.raises(ArtifactError, match=r"readable \.keras file.*PjitFunction of jaxlib.*keras\.ops"):
        freeze(file)


def test_a_layer_that_is_not_registered_is_named_with_the_remedy(tmp_path):
    dropout = '"module": "keras.layers", "class_name": "Dropout"'
    file = renamed(tmp_path, dropout, '"module": null, "class_name": "MyDrop"')
    with pytest.raises(ArtifactError, match=r"Could not locate class 'MyDrop'.*Import the code that registers it"):
        freeze(file)


def test_a_layer_of_a_package_that_is_not_installed_names_the_package(tmp_path):
    dropout = '"module": "keras.layers", "class_name": "Dropout"'
    file = renamed(tmp_path, dropout, '"module": "keras_cv.src.layers", "class_name": "DropPath"')
    with pytest.raises(ArtifactError, match=r"No module named 'keras_cv'\)\. Install the package keras_cv\.$"):
        freeze(file)


def test_a_layer_that_is_not_registered_is_named_with_its_module(tmp_path):
    dropout = '"module": "keras.layers", "class_name": "Dropout"'
    file = renamed(tmp_path, dropout, '"module": "mine.layers", "class_name": "MyDrop"')
    with pytest.raises(
        ArtifactError,
        match=r"Import .*, in mine\.layers \(--import of the command\), which must",
    ):
        freeze(file)
