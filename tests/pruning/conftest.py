"""Imports tfmot once. It sets TF_USE_LEGACY_KERAS for good, which subprocesses of other tests would inherit."""

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TF_USE_LEGACY_KERAS", "1")
    import tensorflow_model_optimization  # noqa: F401
