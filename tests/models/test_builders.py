"""What the builders return: shapes, parameter counts against the literature, and that every argument counts."""

import inspect
import subprocess
import sys

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError
from tfopt.models import BUILDERS, mlp, resnet_cifar, simple_cnn


def layer(model, name):
    return model.get_layer(name)


@pytest.mark.parametrize("builder", sorted(BUILDERS))
@pytest.mark.parametrize("input_shape", [(32, 32, 3), [28, 28, 1]])
@pytest.mark.parametrize("outputs", [2, 10])
def test_every_builder_goes_from_images_to_logits(builder, input_shape, outputs):
    model = BUILDERS[builder](input_shape, outputs)
    assert model.input_shape == (None, *input_shape)
    assert model.output_shape == (None, outputs)
    logits = model(np.random.default_rng(0).random((2, *input_shape), "float32")).numpy()
    assert np.isfinite(logits).all()
    assert logits.shape == (2, outputs)
    assert model.layers[-1].name == "logits"
    assert model.layers[-1].activation is keras.activations.linear


@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_layer_names_last(builder):
    """Two models name their layers alike, so that patterns and saved masks find theirs."""
    one, other = (BUILDERS[builder]((32, 32, 1), 3) for _ in range(2))
    assert [layer.name for layer in one.layers] == [layer.name for layer in other.layers]


def test_simple_cnn_is_lenet_5():
    model = simple_cnn((32, 32, 1), 10)
    assert model.count_params() == 61_706
    by_layer = {layer.name: layer.count_params() for layer in model.layers if layer.count_params()}
    assert by_layer == {"conv1": 156, "conv2": 2416, "dense1": 48120, "dense2": 10164, "logits": 850}


@pytest.mark.parametrize(("depth", "published"), [(20, 0.27e6), (32, 0.46e6), (44, 0.66e6), (56, 0.85e6), (110, 1.7e6)])
def test_resnet_has_the_published_parameters(depth, published):
    """He et al., table 6, counts weights of option A, whose shortcuts have none; ours adds two 1x1 convolutions."""
    model = resnet_cifar((32, 32, 3), 10, depth=depth)
    shortcuts = sum(each.count_params() for each in model.layers if "shortcut" in each.name)
    assert shortcuts == 16 * 32 + 32 * 64 + 4 * (32 + 64)
    statistics = sum(int(np.prod(weight.shape)) for weight in model.non_trainable_weights)
    ours = model.count_params() - shortcuts - statistics
    assert ours == pytest.approx(published, rel=0.025)
    weighted = [each for each in model.layers if isinstance(each, (keras.layers.Conv2D, keras.layers.Dense))]
    assert len([each for each in weighted if "shortcut" not in each.name]) == depth


def test_resnet_halves_twice_and_adds_what_it_skipped():
    model = resnet_cifar((32, 32, 3), 10, depth=8)
    assert model.get_layer("pool").input.shape == (None, 8, 8, 64)
    # With the residual branch silenced a block passes on its input.
    norm = model.get_layer("stage1_block1_2_norm")
    norm.gamma.assign(keras.ops.zeros_like(norm.gamma))
    both = keras.Model(model.input, [model.get_layer("stem_relu").output, model.get_layer("stage1_block1_out").output])
    stem, out = both(np.random.default_rng(0).random((2, 32, 32, 3), "float32"))
    np.testing.assert_allclose(stem, out, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "where", "expected"),
    [
        (lambda: mlp((4,), 3, units=[7, 5]), lambda m: [layer(m, f"dense{n}").units for n in (1, 2)], [7, 5]),
        (lambda: mlp((4,), 3, units=[]), lambda m: m.count_params(), 4 * 3 + 3),
        (lambda: mlp((4,), 3, dropout=0.5), lambda m: [layer(m, f"dropout{n}").rate for n in (1, 2)], [0.5, 0.5]),
        (
            lambda: simple_cnn((32, 32, 1), 3, filters=[3, 4, 5], kernel_size=3),
            lambda m: [layer(m, f"conv{n}").kernel.shape for n in (1, 2, 3)],
            [(3, 3, 1, 3), (3, 3, 3, 4), (3, 3, 4, 5)],
        ),
        (lambda: simple_cnn((32, 32, 1), 3, units=[9]), lambda m: layer(m, "logits").kernel.shape, (9, 3)),
        (lambda: simple_cnn((32, 32, 1), 3, dropout=0.25), lambda m: layer(m, "dropout").rate, 0.25),
        (
            lambda: resnet_cifar((32, 32, 3), 3, depth=8, width=6),
            lambda m: [layer(m, f"stage{n}_block1_1_conv").filters for n in (1, 2, 3)],
            [6, 12, 24],
        ),
        (
            lambda: resnet_cifar((32, 32, 3), 3, depth=14),
            lambda m: [each.name for each in m.layers if each.name.endswith("_out")][-1],
            "stage3_block2_out",
        ),
    ],
)
def test_every_argument_takes_effect(build, where, expected):
    assert where(build()) == expected


@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_builders_take_their_settings_by_keyword(builder):
    parameters = list(inspect.signature(BUILDERS[builder]).parameters.values())
    assert [parameter.name for parameter in parameters[:2]] == ["input_shape", "outputs"]
    assert {parameter.kind for parameter in parameters[2:]} == {inspect.Parameter.KEYWORD_ONLY}
    assert all(parameter.default is not inspect.Parameter.empty for parameter in parameters[2:])


@pytest.mark.parametrize(("depth", "nearest"), [(18, 20), (19, 20), (21, 20), (2, 8), (0, 8), (-4, 8), (112, 110)])
def test_a_depth_that_is_not_6n_plus_2_is_refused_with_the_nearest(depth, nearest):
    with pytest.raises(ConfigError) as caught:
        resnet_cifar((32, 32, 3), 10, depth=depth)
    assert f"Received: depth={depth}. The nearest is {nearest}." in str(caught.value)


RELOAD = """
import sys, keras, numpy as np
x = np.load("x.npy")
for name in sys.argv[1:]:
    np.save(f"{name}.npy", keras.saving.load_model(f"{name}.keras").predict(x, verbose=0))
assert "tfopt" not in sys.modules
"""


@pytest.mark.slow
def test_saved_models_reload_where_there_is_no_tfopt(tmp_path):
    """A plain .keras file: keras alone loads it, with the same outputs."""
    x = np.random.default_rng(0).random((3, 32, 32, 1), "float32")
    np.save(tmp_path / "x.npy", x)
    outputs = {}
    for name, build in BUILDERS.items():
        model = build((32, 32, 1), 4, **({"depth": 8} if name == "resnet_cifar" else {"dropout": 0.1}))
        model.save(tmp_path / f"{name}.keras")
        outputs[name] = model.predict(x, verbose=0)
    done = subprocess.run(
        [sys.executable, "-I", "-c", RELOAD, *BUILDERS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for name, expected in outputs.items():
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), expected, atol=1e-5)
