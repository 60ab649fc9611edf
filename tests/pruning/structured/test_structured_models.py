"""Whole networks: every builder, and three of keras.applications. benchmarks/structured_models.py has ten, exported."""

import keras
import pytest
from masked_parent import assert_equals_masked_parent, examples, give_statistics, outputs

import tfopt
from tfopt.pruning import StructuredPruningConfig, shrink

CONFIG = StructuredPruningConfig(ratio=0.5)

# For each builder: the arguments, and how many groups shrink. A layer that is no longer followed lowers the number.
BUILDERS = {
    "simple_cnn": (((28, 28, 1), 10), {}, 3),
    "resnet_cifar": (((16, 16, 1), 10), {"depth": 8}, 5),
    "resnet50": (((32, 32, 3), 10), {}, 37),
    "mobilenet_v2": (((32, 32, 3), 10), {}, 25),
    "mobilenet_v3": (((32, 32, 3), 10), {}, 26),
    "efficientnet_v2": (((32, 32, 3), 10), {}, 44),
    "convnext": (((32, 32, 3), 10), {"depths": (2, 2), "widths": (32, 64), "patch_size": 2}, 4),
    "unet": (((32, 32, 1), 2), {}, 22),
    "vit": (((32, 32, 1), 10), {"patch_size": 8, "width": 64, "depth": 1, "heads": 2}, 2),
    "mlp": (((20,), 4), {}, 2),
    "lstm": (((20, 3), 4), {}, 1),
    "tcn": (((20, 3), 4), {}, 9),
    "text_encoder": (((16,), 4), {"vocabulary": 64, "width": 32, "depth": 1, "heads": 2, "units": 64}, 3),
    "gpt": (((16,), 64), {"width": 64, "depth": 1, "heads": 2}, 2),
}

DEEP = ("resnet50", "mobilenet_v2", "mobilenet_v3", "efficientnet_v2")  # a training step takes long to trace
FAST = ("simple_cnn", "mlp", "resnet_cifar", "vit")

# Those whose structure no builder has.
APPLICATIONS = {"ResNet50V2": 37, "DenseNet121": 120, "Xception": 28}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in BUILDERS]
)
def test_builders(name, tmp_path):
    arguments, options, groups = BUILDERS[name]
    keras.utils.set_random_seed(0)
    model = getattr(tfopt.models, name)(*arguments, **options)
    give_statistics(model)
    result = shrink(model, CONFIG)
    assert len(result.report.changed) == groups
    assert_equals_masked_parent(model, result)
    if name not in DEEP:
        assert_trains_and_reloads(result.model, tmp_path / "model.keras")


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications(name):
    keras.utils.set_random_seed(0)
    model = getattr(keras.applications, name)(weights=None, input_shape=(96, 96, 3), classifier_activation=None)
    give_statistics(model)
    result = shrink(model, CONFIG)
    assert len(result.report.changed) == APPLICATIONS[name]
    assert_equals_masked_parent(model, result)


def assert_trains_and_reloads(model, path):
    inputs = examples(model, 2)
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(1e-5), "mse")
    model.train_on_batch(inputs[0], outputs(model, inputs)[0] + 1)
    assert any((one != other).any() for one, other in zip(before, model.get_weights(), strict=True))
    model.save(path)
    (expected,), (reloaded,) = outputs(model, inputs), outputs(keras.saving.load_model(path), inputs)
    assert abs(expected - reloaded).max() <= 1e-5 * abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_shrunk_model_exports(precision, tmp_path):
    keras.utils.set_random_seed(0)
    model = tfopt.models.resnet_cifar((16, 16, 1), 10, depth=8)
    smaller = shrink(model, CONFIG).model
    data = examples(smaller, 8)
    config = tfopt.ExportConfig(precision=precision)
    tfopt.export(smaller, tmp_path / "artifact", config, calibration_data=data)
    assert tfopt.verify(tmp_path / "artifact").ok
