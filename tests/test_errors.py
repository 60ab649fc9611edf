"""The exception tree, and the message for an unknown name."""

import pytest

from tfopt import errors


def test_one_root():
    raised = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    for kind in raised:
        assert issubclass(kind, errors.TfoptWarning if kind is errors.TfoptWarning else errors.TfoptError)
        assert kind.__doc__


def test_errors_are_also_what_python_calls_them():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.UnsupportedLayerError, errors.UnsupportedModelError)
    assert issubclass(errors.TfoptWarning, UserWarning)
    assert not issubclass(errors.TfoptWarning, errors.TfoptError)


@pytest.mark.parametrize(
    ("received", "end"),
    [
        ("taylr", "Expected one of: 'magnitude', 'random', 'taylor'. Did you mean 'taylor'?"),
        ("zzz", "Expected one of: 'magnitude', 'random', 'taylor'."),
        ("", "Expected one of: 'magnitude', 'random', 'taylor'."),
        ("it's", "Expected one of: 'magnitude', 'random', 'taylor'."),
    ],
)
def test_unknown_name_lists_what_is_known_and_the_nearest(received, end):
    error = errors.unknown_name("criterion", received, {"taylor": 1, "magnitude": 2, "random": 3})
    assert isinstance(error, errors.ConfigError)
    assert str(error) == f"Unknown criterion {received!r}. {end}"
