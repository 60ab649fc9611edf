"""Recipes as data: the round trip through TOML, and what is refused with which words."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt.data import synthetic
from tfopt.data.config import DataConfig
from tfopt.errors import ConfigError
from tfopt.models import mlp
from tfopt.pruning import PruningConfig
from tfopt.quantization import QuantizationConfig
from tfopt.recipe import QUICK_EPOCHS, QUICK_EXAMPLES, ModelConfig, Recipe
from tfopt.recipes import RECIPES
from tfopt.terminal import DIRECTIONS, HIDDEN
from tfopt.training import TrainingConfig


def through_toml(recipe, directory):
    file = directory / "file.toml"
    file.write_bytes(recipe.to_toml().encode())
    return Recipe.from_toml(file)


def refused(values):
    with pytest.raises(ConfigError) as caught:
        Recipe.from_dict({"name": "x", **values})
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_named_recipe_survives_toml(name, tmp_path):
    assert through_toml(RECIPES[name], tmp_path) == RECIPES[name]
    assert RECIPES[name].name == name
    assert RECIPES[name].description
    assert RECIPES[name].export_dir == f"saved_models/{name}"


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
fractions = st.floats(min_value=0, max_value=0.999)
recipes = st.builds(
    Recipe,
    name=st.text(st.characters(exclude_categories=HIDDEN, exclude_characters=DIRECTIONS), max_size=20),
    description=words,
    model=st.one_of(
        st.builds(
            ModelConfig,
            builder=st.just("mlp"),
            arguments=st.fixed_dictionaries(
                {}, optional={"units": st.lists(st.integers(1, 2**40), max_size=4), "dropout": fractions}
            ),
        ),
        st.builds(ModelConfig),
    ),
    data=st.builds(
        DataConfig,
        source=st.just("synthetic"),
        arguments=st.fixed_dictionaries({}, optional={"noise": numbers, "seed": st.integers(0, 2**62)}),
        random_shift=st.integers(0, 9),
        max_examples=st.none() | st.integers(1, 2**31),
    ),
    training=st.builds(
        TrainingConfig,
        epochs=st.integers(1, 2**31),
        global_batch_size=st.integers(1, 2**31),
        optimizer=st.sampled_from(["adam", "sgd", "AdamW"]),
        learning_rate=st.floats(min_value=1e-300, max_value=1e300),
        decay=st.sampled_from(["cosine", "constant"]),
        precision=st.sampled_from(["auto", "float32", "mixed_bfloat16", "mixed_float16"]),
        jit_compile=st.sampled_from(["auto", True, False]),
        strategy=st.sampled_from(["auto", "none", "mirrored"]),
        steps_per_execution=st.just("auto") | st.integers(1, 1000),
        prefetch=st.just("auto") | st.integers(1, 1000),
        seed=st.integers(0, 2**32 - 1),
    ),
    pruning=st.none()
    | st.builds(
        PruningConfig,
        target_sparsity=st.floats(min_value=0.5, max_value=0.999),
        scope=st.sampled_from(["layer", "global"]),
        initial_sparsity=st.floats(min_value=0, max_value=0.5),
        end_step=st.none() | st.integers(1, 2**31),
        learning_rate=st.none() | st.floats(min_value=1e-9, max_value=1),
        exclude=st.lists(words, max_size=3).map(tuple),
    ),
    quantization=st.none() | st.builds(QuantizationConfig, exclude=st.lists(words, max_size=3).map(tuple)),
    export_dir=st.none() | words.filter(bool),
)


@given(recipe=recipes)
@settings(max_examples=15, deadline=None)
def test_any_recipe_survives_toml(recipe, tmp_path_factory):
    assert through_toml(recipe, tmp_path_factory.mktemp("recipe")) == recipe


def test_what_the_file_leaves_out_has_the_defaults_and_its_name_is_the_file_s(tmp_path):
    (tmp_path / "my recipe.toml").write_text("[training]\nepochs = 3\n[pruning]\n")
    recipe = Recipe.from_toml(tmp_path / "my recipe.toml")
    assert recipe == Recipe(name="my recipe", training=TrainingConfig(epochs=3), pruning=PruningConfig())
    assert recipe.quantization is None


def test_none_is_off_and_left_out():
    recipe = Recipe(name="x")
    assert (recipe.pruning, recipe.quantization, recipe.export_dir) == (None, None, None)
    assert "pruning" not in recipe.to_dict()
    assert "pruning" not in recipe.to_toml()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"epochs": 3}, "Unknown setting 'epochs'."),
        ({"trainig": {}}, "Unknown setting 'trainig'. Did you mean 'training'?"),
        ({"training": {"epoch": 3}}, "Unknown setting 'training.epoch'. Did you mean 'training.epochs'?"),
        (
            {"pruning": {"target_sparsty": 0.5}},
            "Unknown setting 'pruning.target_sparsty'. Did you mean 'pruning.target_sparsity'?",
        ),
        (
            {"quantization": {"observers": "minmax"}},
            "Unknown setting 'quantization.observers'. Did you mean 'quantization.observer'?",
        ),
        ({"model": {"args": {}}}, "Unknown setting 'model.args'."),
        ({"model": {"builder": "simple_cn"}}, "Unknown builder 'simple_cn'. Did you mean 'simple_cnn'?"),
        ({"data": {"source": "digit"}}, "Unknown source 'digit'. Did you mean 'digits'?"),
        ({"training": {"optimizer": "adamm"}}, "Unknown optimizer 'adamm'. Did you mean 'adam'?"),
    ],
)
def test_an_unknown_name_is_told_with_its_path_and_the_nearest(values, expected):
    message = refused(values)
    first, _, rest = expected.partition(" Did")
    assert message.startswith(f"{first} Expected one of: ")
    assert message.endswith(f"Did{rest}" if rest else message[-1:])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": 5}, "name must be a string. Received: name=5."),
        ({"training": 5}, "training must be a table. Received: training=5. Write the settings below [training]."),
        ({"pruning": True}, "pruning must be a table. Received: pruning=True. Write the settings below [pruning]."),
        ({"model": {"arguments": 5}}, "model.arguments must be a table. Received: model.arguments=5."),
        ({"model": {"builder": 5}}, "model.builder must be a name or a function. Received: model.builder=5."),
        *(
            (
                {"training": {"epochs": value}},
                f"training.epochs must be a whole number of at least 1. Received: training.epochs={value!r}.",
            )
            for value in ("many", "5", True, 1.5)
        ),
        (
            {"training": {"learning_rate": "0.1"}},
            "training.learning_rate must be a positive number. Received: training.learning_rate='0.1'.",
        ),
        (
            {"training": {"jit_compile": "yes"}},
            "training.jit_compile must be 'auto', True or False. Received: training.jit_compile='yes'.",
        ),
        (
            {"training": {"steps_per_execution": "ten"}},
            "training.steps_per_execution must be 'auto' or a whole number of at least 1. "
            "Received: training.steps_per_execution='ten'.",
        ),
        (
            {"training": {"precision": "fp16"}},
            "Unknown precision 'fp16'. Expected one of: 'auto', 'float32', 'mixed_bfloat16', 'mixed_float16'.",
        ),
        (
            {"training": {"strategy": 5}},
            "strategy must be a name or an instance of Strategy. Received: strategy=5. "
            "The names are 'auto', 'mirrored', 'multi_worker', 'none', 'pipeline'.",
        ),
        (
            {"pruning": {"exclude": "conv1"}},
            "pruning.exclude must be a tuple of strings or functions. Received: pruning.exclude='conv1'. "
            "Did you mean ('conv1',)?",
        ),
        (
            {"pruning": {"end_step": "x"}},
            "pruning.end_step must be a whole number or None. Received: pruning.end_step='x'.",
        ),
        ({"export_dir": False}, "export_dir must be a string that is not empty or None. Received: export_dir=False."),
    ],
)
def test_a_wrong_type_is_told_with_its_path(values, message):
    assert refused(values) == message


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda: PruningConfig(target_sparsity=90), {"pruning": {"target_sparsity": 90}}),
        (lambda: PruningConfig(begin_step=9, end_step=3), {"pruning": {"begin_step": 9, "end_step": 3}}),
        (lambda: TrainingConfig(epochs=0), {"training": {"epochs": 0}}),
        (lambda: TrainingConfig(prefetch=0), {"training": {"prefetch": 0}}),
        (lambda: QuantizationConfig(calibration_examples=0), {"quantization": {"calibration_examples": 0}}),
        (lambda: DataConfig(random_shift=-1), {"data": {"random_shift": -1}}),
        (lambda: DataConfig(max_examples=0), {"data": {"max_examples": 0}}),
        (lambda: ModelConfig(arguments={"filtres": [6]}), {"model": {"arguments": {"filtres": [6]}}}),
    ],
)
def test_a_value_out_of_range_gives_the_config_s_own_error(make, values):
    """In TOML the setting has the name of its table before its own."""
    with pytest.raises(ConfigError) as caught:
        make()
    (table,) = values
    assert refused(values).replace(f"{table}.", "") == str(caught.value)


def test_a_recipe_needs_a_name():
    with pytest.raises(ConfigError, match="name must be given"):
        Recipe.from_dict({})


@pytest.mark.parametrize("values", [[1], "text", None])
def test_what_is_no_mapping_is_refused(values):
    with pytest.raises(ConfigError, match="must be a mapping"):
        Recipe.from_dict(values)


def test_an_object_among_plain_values_is_refused():
    with pytest.raises(ConfigError, match="plain values"):
        Recipe.from_dict({"name": "x", "model": {"builder": mlp}})


@pytest.mark.parametrize("content", [b"name = ", b"epochs 3", b"[training]\n[training]", b'name = "\xff"', b"\x00"])
def test_a_malformed_file_is_refused(content, tmp_path):
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"must be valid TOML. Received: .*bad.toml \(.+\)"):
        Recipe.from_toml(tmp_path / "bad.toml")


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must be readable. Received: .*none.toml \(No such file or directory\)"):
        Recipe.from_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"Is a directory"):
        Recipe.from_toml(tmp_path)


def build(input_shape, outputs, width=3):
    return mlp(input_shape, outputs, units=[width])


@pytest.mark.parametrize(
    ("recipe", "path"),
    [
        (lambda: Recipe(name="x", model=ModelConfig(builder=lambda shape, outputs: None)), "model.builder"),
        (lambda: Recipe(name="x", data=DataConfig(source=functools.partial(synthetic))), "data.source"),
        (lambda: Recipe(name="x", training=TrainingConfig(optimizer=keras.optimizers.SGD())), "training.optimizer"),
        (lambda: Recipe(name="x", pruning=PruningConfig(schedule=lambda step: 0.5)), "pruning.schedule"),
        (lambda: Recipe(name="x", pruning=PruningConfig(criterion=lambda weights: weights)), "pruning.criterion"),
        (
            lambda: Recipe(name="x", model=ModelConfig(builder=build, arguments={"width": None})),
            "model.arguments.width",
        ),
    ],
)
def test_objects_have_no_name_in_toml(recipe, path):
    with pytest.raises(ConfigError) as caught:
        recipe().to_toml()
    assert f"Received: {path}=" in str(caught.value)
    assert "registered name" in str(caught.value)


def test_builder_and_source_may_be_functions():
    model = ModelConfig(builder=build, arguments={"width": 7}).build((4,), 2)
    assert model.get_layer("dense1").units == 7
    source = functools.partial(synthetic, input_shape=(3,), num_classes=2)
    assert DataConfig(source=source, arguments={"examples": 20}).load().x_train.shape == (16, 3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ModelConfig(builder=build, arguments={"widht": 7}), ["takes: width.", "'widht': 7"]),
        (
            lambda: ModelConfig(builder=lambda: None),
            ["a function of (input_shape, outputs, **arguments)", "which takes ()"],
        ),
        (lambda: ModelConfig(builder=5), ["builder must be a name or a function", "builder=5"]),
        (lambda: DataConfig(source=None), ["source must be a name or a function", "source=None"]),
        (
            lambda: DataConfig(arguments={"imagesize": 3}),
            ["image_size, test_fraction, validation_fraction, seed", "imagesize"],
        ),
        (
            lambda: ModelConfig(builder="mlp", arguments={"units": 5}).build((4,), 2),
            ["units must be a tuple", "units=5"],
        ),
        (lambda: ModelConfig().build((8, 8, 1), 2), ["'simple_cnn'", "(8, 8, 1)"]),
        (lambda: DataConfig(arguments={"image_size": 0}).load(), ["image_size=0"]),
        (lambda: Recipe(name="x", model="mlp"), ["model must be a ModelConfig", "model='mlp'"]),
        (lambda: Recipe(name="x", training=None), ["training must be a TrainingConfig", "training=None"]),
        (lambda: Recipe(name="x", pruning=0.75), ["pruning must be a PruningConfig", "pruning=0.75"]),
    ],
)
def test_what_a_recipe_cannot_be_made_of(make, words):
    with pytest.raises(ConfigError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_max_examples_limits_both_parts():
    examples = DataConfig(source="synthetic", max_examples=9).load()
    assert (len(examples.x_train), len(examples.x_test)) == (9, 9)


def test_recipes_are_frozen():
    recipe = RECIPES["digits_cnn"]
    for record in (recipe, recipe.model, recipe.data, recipe.training, recipe.pruning, recipe.quantization):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, dataclasses.fields(record)[0].name, "other")


def test_quick_cuts_epochs_examples_and_exports_elsewhere():
    full = dataclasses.replace(RECIPES["digits_cnn"], forms={})  # with a form "quick" it is that form
    quick = full.quick()
    assert (quick.training.epochs, quick.pruning.epochs) == (QUICK_EPOCHS, QUICK_EPOCHS)
    assert quick.data.max_examples == QUICK_EXAMPLES
    assert quick.export_dir == "saved_models/digits_cnn_quick"
    assert (quick.model, quick.quantization, quick.training.seed) == (full.model, full.quantization, full.training.seed)


def test_quick_never_adds():
    small = Recipe(
        name="x",
        data=DataConfig(max_examples=10),
        training=TrainingConfig(epochs=1),
        pruning=PruningConfig(epochs=1),
    )
    assert small.quick() == dataclasses.replace(small, name="x (quick run)")  # its name says so in the report
    assert Recipe(name="x", export_dir="out/x/").quick().export_dir == "out/x_quick"


def test_numpy_numbers_lists_and_paths_become_plain_values(tmp_path):
    training = TrainingConfig(epochs=np.int64(3), steps_per_execution=np.int32(2), learning_rate=np.float32(0.5))
    assert [type(value) for value in (training.epochs, training.steps_per_execution)] == [int, int]
    assert PruningConfig(exclude=["a"]) == PruningConfig(exclude=("a",))
    assert hash(PruningConfig(exclude=["a"])) == hash(PruningConfig(exclude=("a",)))
    recipe = Recipe(name="x", training=training, pruning=PruningConfig(exclude=["a"]), export_dir=tmp_path)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert through_toml(recipe, tmp_path) == recipe


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainingConfig(learning_rate=np.True_), "a positive number. Received: learning_rate=True"),
        (lambda: TrainingConfig(remat=["activations"]), "Unknown remat"),
        (lambda: TrainingConfig(decay=5), "decay must be 'cosine' or 'constant'. Received: decay=5."),
        (lambda: TrainingConfig(epochs=np.zeros(1000)), "whole number of at least 1. Received: epochs=array"),
        (lambda: PruningConfig(target_sparsity=np.float32(90)), "target_sparsity=90.0. .* did you mean 0.9"),
        (lambda: PruningConfig(learning_rate=float("inf")), "a positive number or None"),
        (lambda: PruningConfig(schedule=dict), "must be a name or a function. .* 'constant', 'cyclic'"),
        (lambda: QuantizationConfig(freeze_ranges_after=0), "Set training=True"),
        (lambda: ModelConfig(builder=keras.Sequential()), "builder must be a name or a function"),
        (lambda: Recipe(name="x", export_dir=""), "a string that is not empty or None"),
    ],
)
def test_wrong_values_of_unusual_kinds_are_refused_in_one_short_line(make, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_quick_neither_resumes_the_real_training_nor_saves_into_it():
    real = Recipe(name="x", training=TrainingConfig(checkpoint_dir="runs/x/"))
    assert real.quick().training.checkpoint_dir == "runs/x_quick"
