"""The exception tree, and the message for an unknown name."""

import ast
from pathlib import Path

import keras
import numpy as np
import pytest

import tfopt
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


def test_every_warning_of_tfopt_goes_through_warn():
    """Only that finds the user's line, whatever calls lie between."""
    package = Path(tfopt.__file__).parent
    calls = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        if "import warnings" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr in ("warn", "warn_explicit")
        and isinstance(node.value, ast.Name)
        and node.value.id == "warnings"
    ]
    assert [call.split(":")[0] for call in calls] == ["errors.py"] * len(calls)


def test_a_warning_points_at_the_users_line_past_tfopt_and_keras():
    source, found = Path(__file__).read_text(encoding="utf-8").splitlines(), []
    plan = tfopt.plan(tfopt.TrainingConfig(precision="mixed_bfloat16", global_batch_size=4, stop_on_nan=False))
    with plan.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.warns(errors.TfoptWarning, match="half precision") as caught:
        tfopt.compile(model, plan, loss="mse")  # the user's line of a direct call
    found.append((caught[0], "the user's line of a direct call"))
    prune = tfopt.PruningSchedule(model, tfopt.PruningConfig(target_sparsity=0.5, begin_step=0, end_step=9))
    with pytest.warns(errors.TfoptWarning, match="end_step=9 lies beyond") as caught:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=[prune])  # the user's line of a fit
    found.append((caught[0], "the user's line of a fit"))
    for warning, words in found:
        assert warning.filename == __file__
        assert f"# {words}" in source[warning.lineno - 1]
