"""Example data in files: what is read, and what is said of files that cannot be."""

import numpy as np
import pytest

from tfopt.data.by_name import load_examples
from tfopt.errors import ConfigError


def test_arrays_come_back(tmp_path):
    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "xy.npz", x=x, y=y)
    np.testing.assert_array_equal(load_examples(str(tmp_path / "x.npy"), training=True), x)
    for part, expected in zip(load_examples(str(tmp_path / "xy.npz"), training=True), (x, y), strict=True):
        np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "packed.npz"])
@pytest.mark.parametrize("share", [0, 0.05, 0.5, 0.99])
def test_files_cut_short_are_refused(name, share, tmp_path):
    """As a full disk or a copy that broke off leaves them."""
    x = np.random.default_rng(0).random((100, 8))
    save = {"x.npy": np.save, "x.npz": np.savez, "packed.npz": np.savez_compressed}[name]
    save(tmp_path / name, x) if save is np.save else save(tmp_path / name, x=x)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(share * len(content))])
    with pytest.raises(ConfigError, match=rf"must be a readable NumPy file. Received: '.*{name}' .*Write it again"):
        load_examples(str(tmp_path / name), training=True)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_changed_byte_is_noticed(save, tmp_path):
    save(tmp_path / "x.npz", x=np.random.default_rng(0).random((100, 8)))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ConfigError, match="must be a readable NumPy file"):
        load_examples(str(tmp_path / "x.npz"), training=True)
