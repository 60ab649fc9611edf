"""What the builders return: shapes, parameter counts against the literature, and that every argument counts."""

import functools
import inspect
from dataclasses import replace

import keras
import numpy as np
import pytest

from tfopt.errors import ConfigError
from tfopt.models import BUILDERS, convnext, find_builder, mlp, resnet_cifar, simple_cnn, unet, vit
from tfopt.models.table import PUBLISHED_MODELS, SMALL_MODELS


def layer(model, name):
    return model.get_layer(name)


def small_vit(**arguments):
    return vit((16, 16, 3), 3, **{"patch_size": 4, "width": 16, "depth": 1, "heads": 2, **arguments})


def small_convnext(**arguments):
    return convnext((16, 16, 3), 3, **{"patch_size": 2, "widths": (8, 16), "depths": (1, 1), **arguments})


@functools.cache
def small_model(name, policy="float32"):
    """Returns the small model of a builder, built once; nobody changes it."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return SMALL_MODELS[name].build()
    finally:
        keras.config.set_dtype_policy(before)


# Seconds to build. mobilenet_v2 has a head of its own and blocks as the other two.
DEEP = ("efficientnet_v2", "mobilenet_v2", "mobilenet_v3")


def all_but(deep):
    return [pytest.param(name, marks=pytest.mark.slow) if name in deep else name for name in sorted(SMALL_MODELS)]


def batch_for(entry, size=2):
    """Returns inputs of a model of the table: values in [0, 1], or tokens that every vocabulary has."""
    shape = (size, *(8 if side is None else side for side in entry.input_shape))
    generator = np.random.default_rng(0)
    return (
        generator.integers(0, 2, shape, "int32") if entry.input_dtype == "int32" else generator.random(shape, "float32")
    )


def test_every_builder_has_a_small_model():
    assert sorted(SMALL_MODELS) == sorted(BUILDERS)
    assert all(entry.builder is BUILDERS[name] for name, entry in SMALL_MODELS.items())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", all_but(DEEP[::2]))
def test_every_builder_goes_from_examples_to_logits(name):
    check_outputs(small_model(name), SMALL_MODELS[name])


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(SMALL_MODELS))
def test_every_builder_has_as_many_outputs_as_asked(name):
    entry = replace(SMALL_MODELS[name], outputs=7, input_shape=list(SMALL_MODELS[name].input_shape))
    check_outputs(entry.build(), entry)


def check_outputs(model, entry):
    assert model.input_shape == (None, *entry.input_shape)
    assert model.output_shape[-1] == entry.outputs
    logits = model(batch_for(entry)).numpy()
    assert np.isfinite(logits).all()
    assert logits.shape[0] == 2
    assert model.layers[-1].name == "logits"
    assert model.layers[-1].activation is keras.activations.linear


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", all_but(DEEP))
def test_outputs_are_float32_in_half_precision(name):
    policy = "mixed_float16"
    model = small_model(name, policy)
    assert model(batch_for(SMALL_MODELS[name])).dtype == "float32"
    assert {layer.compute_dtype for layer in model.layers if layer.weights} >= {policy.removeprefix("mixed_")}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*all_but(DEEP), "keras:MobileNet"])
def test_a_builder_builds_the_same_whatever_the_layout_in_the_settings_of_keras(name):
    def built():
        if name in SMALL_MODELS:
            return SMALL_MODELS[name].build()
        return find_builder(name)((32, 32, 3), 10, alpha=0.25)

    expected = [layer.output.shape for layer in (small_model(name) if name in SMALL_MODELS else built()).layers]
    keras.config.set_image_data_format("channels_first")
    try:
        model = built()
        assert keras.config.image_data_format() == "channels_first"
        again = keras.models.clone_model(model)  # its config says all
    finally:
        keras.config.set_image_data_format("channels_last")
    assert [layer.output.shape for layer in model.layers] == expected
    assert [layer.output.shape for layer in again.layers] == expected


@pytest.mark.parametrize("name", all_but(DEEP))
def test_layer_names_last(name):
    """Two models name their layers alike, so that patterns and saved masks find theirs."""
    one, other = small_model(name), small_model(name, "mixed_float16")
    assert [layer.name for layer in one.layers] == [layer.name for layer in other.layers]


# A model of every builder. tests/profiling/cost/test_flops.py counts those of the others, and test_text_models.py two.
PUBLISHED = (
    "lenet5",
    "bert_small",
    "vit_tiny",
    "convnext_tiny",
    "unet",
    "resnet50",
    "mobilenet_v2",
    "mobilenet_v3_small",
)


SECONDS_TO_BUILD = ("efficientnet_v2_b0", "keras:MobileNetV2", "mobilenet_v2", "mobilenet_v3_small", "resnet50")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in PUBLISHED if name not in SECONDS_TO_BUILD),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SECONDS_TO_BUILD),
    ],
)
def test_a_published_model_has_the_published_parameters(name):
    model = PUBLISHED_MODELS[name].build()
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert trained == PUBLISHED_MODELS[name].parameters


def test_simple_cnn_is_lenet_5():
    model = simple_cnn((32, 32, 1), 10)
    assert model.count_params() == 61_706
    by_layer = {layer.name: layer.count_params() for layer in model.layers if layer.count_params()}
    assert by_layer == {"conv1": 156, "conv2": 2416, "dense1": 48120, "dense2": 10164, "logits": 850}


@pytest.mark.parametrize(("depth", "published"), [(20, 0.27e6), pytest.param(56, 0.85e6, marks=pytest.mark.slow)])
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


@pytest.mark.one_in(3)
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
        (lambda: small_vit(patch_size=8), lambda m: layer(m, "patches").kernel.shape, (8, 8, 3, 16)),
        (lambda: small_vit(patch_size=8), lambda m: layer(m, "positions").length, 5),
        (lambda: small_vit(depth=3), lambda m: len([each for each in m.layers if "attention_add" in each.name]), 3),
        (lambda: small_vit(heads=4), lambda m: layer(m, "block1_attention").key_dim, 4),
        (lambda: small_vit(), lambda m: layer(m, "block1_dense1").units, 64),
        (lambda: small_vit(mlp_units=24), lambda m: layer(m, "block1_dense1").units, 24),
        (lambda: small_vit(pool="mean"), lambda m: (layer(m, "positions").length, layer(m, "mean").name), (16, "mean")),
        (lambda: small_vit(dropout=0.2), lambda m: layer(m, "positions_dropout").rate, 0.2),
        (
            lambda: small_vit(depth=3, drop_path=0.2),
            lambda m: [each.rate for each in m.layers if each.name.endswith("attention_drop_path")],
            [0.1, 0.2],
        ),
        (lambda: small_convnext(depths=(1, 2)), lambda m: len([e for e in m.layers if "add" in e.name]), 3),
        (lambda: small_convnext(widths=(8, 24)), lambda m: layer(m, "stage2_conv").kernel.shape, (2, 2, 8, 24)),
        (lambda: small_convnext(patch_size=4), lambda m: layer(m, "stem_conv").output.shape, (None, 4, 4, 8)),
        (lambda: small_convnext(kernel_size=3), lambda m: layer(m, "stage1_block1_depthwise").kernel_size, (3, 3)),
        (lambda: small_convnext(layer_scale=0.5), lambda m: layer(m, "stage1_block1_scale").initial, 0.5),
        (
            lambda: small_convnext(depths=(2, 1), drop_path=0.2),
            lambda m: [each.rate for each in m.layers if each.name.endswith("drop_path")],
            [0.1, 0.2],
        ),
        (lambda: unet((16, 16, 3), 2, width=8, depth=1), lambda m: layer(m, "bottom_conv1").kernel.shape[-1], 16),
        (
            lambda: unet((16, 16, 3), 2, width=8, depth=1, norm_momentum=0.9),
            lambda m: {each.momentum for each in m.layers if isinstance(each, keras.layers.BatchNormalization)},
            {0.9},
        ),
        (lambda: unet((16, 16, 3), 2, width=8, depth=3), lambda m: layer(m, "bottom_relu2").output.shape[1], 2),
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


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: small_vit(patch_size=5), "patch_size must divide height and width. Received: patch_size=5"),
        (lambda: vit((None, None, 3), 10), "patch_size=16 for NonexNone images. Resize them."),
        (lambda: small_vit(heads=3), "Received: width=16, heads=3. The nearest width is 15."),
        (lambda: small_vit(pool="wide_and_deep"), "Unknown pool 'wide_and_deep'. Expected one of: 'mean', 'token'."),
        (lambda: small_vit(dropout=10), "dropout must be in [0, 1). Received: dropout=10."),
        (lambda: vit((16, 16), 3), "Received: input_shape=(16, 16). It is (height, width, channels)."),
        (lambda: small_convnext(depths=(1,)), "Received: depths=(1,), widths=(8, 16)."),
        (lambda: convnext((16, 16, 3), 10), "An image must have at least 32x32 pixels for 4 stages"),
        (lambda: unet((44, 100, 3), 2), "The nearest are 48 and 96."),
        (lambda: unet((None, 100, 3), 2), "The nearest are any and 96."),
    ],
)
def test_a_wrong_argument_is_named_with_a_remedy(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert message in str(caught.value)


def test_the_class_token_reads_every_patch():
    model = small_vit()
    assert layer(model, "token").output.shape == (None, 1, 16)
    image = np.zeros((1, 16, 16, 3), "float32")
    changed = image.copy()
    changed[0, 15, 15] = 1  # the last patch
    assert np.abs(model(image) - model(changed)).max() > 1e-4


def test_unet_gives_the_class_of_every_pixel_at_any_size():
    model = unet((None, None, 1), 3, width=8, depth=2)
    assert model(np.zeros((1, 8, 20, 1), "float32")).shape == (1, 8, 20, 3)


RELOAD = """
import sys, keras, numpy as np
if sys.argv[1] == "tfopt":
    import tfopt
for name in sys.argv[2:]:
    x = np.load(f"{name}_x.npy")
    np.save(f"{name}.npy", np.asarray(keras.saving.load_model(f"{name}.keras")(x)))
assert sys.argv[1] == "tfopt" or "tfopt" not in sys.modules
"""


@pytest.mark.slow
def test_saved_models_reload(tmp_path, fresh_python):
    """Keras alone loads a .keras file of its own layers, with the same outputs. The others need `import tfopt`."""
    models = {name: small_model(name) for name in SMALL_MODELS}
    outputs = {}
    for name, model in models.items():
        x = batch_for(SMALL_MODELS[name], 3)
        np.save(tmp_path / f"{name}_x.npy", x)
        model.save(tmp_path / f"{name}.keras")
        outputs[name] = np.asarray(model(x))
    own = [
        name
        for name, model in models.items()
        if any(type(each).__module__.startswith("tfopt") for each in model.layers)
    ]
    for needed, names in {"tfopt": own, "keras": sorted(models.keys() - own)}.items():
        fresh_python("-I", "-c", RELOAD, needed, *names, imported="keras", cwd=tmp_path, check=True)
    for name, expected in outputs.items():
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "settings", "words"),
    [
        ("simple_cnn", 32, {}, "input_shape must be a tuple"),
        ("simple_cnn", (32, 32, 1), {"filters": 5}, "filters must be a tuple"),
        ("mlp", (8,), {"units": 5}, "units must be a tuple"),
        ("mlp", (0,), {}, "input_shape must be a tuple of whole numbers of at least 1"),
        ("resnet_cifar", (0, 32, 1), {}, "input_shape must be"),
        ("mobilenet_v2", (32, 32, 3), {"alpha": 0}, "alpha must be a positive number"),
        ("efficientnet_v2", (32, 32, 3), {"alpha": -1}, "alpha must be a positive number"),
        ("tcn", (20, 3), {"blocks": 0}, "blocks must be a whole number of at least 1"),
        ("lstm", (20, 3), {"vocabulary": 50}, "the number of tokens"),
        ("gpt", (0,), {}, "input_shape must be"),
    ],
)
def test_wrong_arguments_are_refused_with_their_name(name, shape, settings, words):
    with pytest.raises(ConfigError, match=words):
        BUILDERS[name](shape, 10, **settings)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("outputs", [0, 2.0])
def test_outputs_are_a_whole_number_of_at_least_one(name, outputs):
    with pytest.raises(ConfigError, match=r"outputs must be a whole number of at least 1\. Received: outputs="):
        BUILDERS[name](SMALL_MODELS[name].input_shape, outputs, **SMALL_MODELS[name].arguments)
