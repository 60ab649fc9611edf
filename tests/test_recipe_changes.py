"""Other forms of a recipe, files with a base, two recipes in one, their differences, and names of the user's code."""

import itertools

import keras
import pytest

import tfopt
from tfopt.data.config import DataConfig
from tfopt.data.sources import synthetic
from tfopt.errors import ConfigError
from tfopt.pruning import PruningConfig
from tfopt.quantization import QuantizationConfig
from tfopt.recipe import ModelConfig, Recipe, with_changes
from tfopt.recipes import FORMER_NAMES, RECIPES, compose, diff, find_recipe
from tfopt.tasks import TASKS
from tfopt.training import TrainingConfig

BASE = Recipe(
    name="base",
    model=ModelConfig(builder="mlp", arguments={"units": [8], "dropout": 0.1}),
    data=DataConfig(source="synthetic", arguments={"examples": 50, "input_shape": [4]}),
    training=TrainingConfig(epochs=9, checkpoint_dir="runs/base"),
    pruning=PruningConfig(target_sparsity=0.5),
    export_dir="out/base",
)


def build(input_shape, outputs, width=3):
    return tfopt.models.mlp(input_shape, outputs, units=[width])


def rows():
    return synthetic(examples=60, input_shape=(3,), num_classes=2)


TASK = TASKS["classification"]


def write(directory, **files):
    for name, text in files.items():
        (directory / f"{name}.toml").write_text(text)
    return directory


def test_changes_reach_every_depth_and_leave_the_rest():
    changed = with_changes(
        BASE, {"training": {"epochs": 3}, "pruning": False, "quantization": {}, "data": {"augment": {"crop": 2}}}
    )
    assert (changed.training.epochs, changed.training.checkpoint_dir) == (3, "runs/base")
    assert (changed.pruning, changed.quantization) == (None, QuantizationConfig())
    assert (changed.data.augment.crop, changed.data.source, changed.model) == (2, "synthetic", BASE.model)
    assert with_changes(BASE, {}) == BASE
    assert with_changes(BASE, {"pruning": None}).pruning is None
    assert with_changes(BASE, {"pruning": PruningConfig(epochs=2)}).pruning.epochs == 2


def test_a_stage_that_is_turned_off_is_off_in_every_form():
    recipe = with_changes(BASE, {"forms": {"full": {"training": {"epochs": 90}, "pruning": {"epochs": 4}}}})
    full = with_changes(recipe, {"pruning": False}).form("full")
    assert (full.pruning, full.training.epochs) == (None, 90)
    on = with_changes(recipe, {"pruning": False, "forms": {"full": {"pruning": {"epochs": 5}}}})
    assert (on.pruning, on.form("full").pruning.epochs) == (None, 5)
    assert with_changes(RECIPES["resnet_distilled"], {"distillation": None}).quick().distillation is None


def test_arguments_are_added_for_the_same_function_only():
    assert with_changes(BASE, {"model": {"arguments": {"dropout": 0.5}}}).model.arguments == {
        "units": [8],
        "dropout": 0.5,
    }
    same = with_changes(BASE, {"model": {"builder": "mlp", "arguments": {"dropout": 0.5}}})
    assert same.model.arguments == {"units": [8], "dropout": 0.5}
    other = with_changes(BASE, {"model": {"builder": "simple_cnn", "arguments": {"kernel_size": 3}}})
    assert other.model.arguments == {"kernel_size": 3}
    assert with_changes(BASE, {"data": {"source": "digits"}}).data.arguments == {}
    tuned = with_changes(BASE, {"training": {"optimizer": "sgd", "optimizer_arguments": {"momentum": 0.9}}})
    assert tuned.training.optimizer_arguments == {"momentum": 0.9}
    assert with_changes(tuned, {"training": {"optimizer": "adam"}}).training.optimizer_arguments == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainin": {}}, "Unknown setting 'trainin'.* Did you mean 'training'"),
        ({"training": {"epoch": 3}}, r"Unknown setting 'training\.epoch'.* Did you mean 'training\.epochs'"),
        ({"training": {"epochs": 0}}, r"training\.epochs must be a whole number of at least 1\. Received: epochs=0"),
        ({"data": {"augment": {"crop": -1}}}, r"data\.augment\.crop must be"),
        ({"training": 3}, r"training must be a table of settings\. Received: training=3"),
        ({"training": False}, r"training must be a table of settings\. Received: training=False"),
        ({"pruning": True}, r"pruning must be a table of settings, or False to turn it off\. Received: pruning=True"),
    ],
)
def test_wrong_changes_name_the_setting_with_its_path(changes, message):
    with pytest.raises(ConfigError, match=message):
        with_changes(BASE, changes)
    with pytest.raises(
        ConfigError, match=f"The form 'full' must hold valid settings. {message}.*The table \\[forms.full\\] has"
    ):
        Recipe(name="x", forms={"full": changes})


def test_a_form_has_a_name_and_directories_of_its_own():
    recipe = with_changes(
        BASE, {"forms": {"full": {"training": {"epochs": 90}}, "elsewhere": {"export_dir": "there", "training": {}}}}
    )
    full = recipe.form("full")
    assert (full.name, full.training.epochs, full.export_dir) == ("base (full run)", 90, "out/base_full")
    assert full.training.checkpoint_dir == "runs/base_full"
    assert full.forms == {}
    assert recipe.form("elsewhere").export_dir == "there"
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(ConfigError, match=r"Unknown form 'ful'.* Did you mean 'full'"):
        recipe.form("ful")


def test_a_form_named_quick_is_the_quick_run():
    recipe = with_changes(BASE, {"forms": {"quick": {"training": {"epochs": 4}}}})
    assert recipe.quick() == recipe.form("quick")
    assert recipe.quick().training.epochs == 4
    assert recipe.quick().data.max_examples is None


def test_every_form_of_every_recipe_of_tfopt_is_valid_and_goes_through_toml(tmp_path):
    for recipe in RECIPES.values():
        for form in (recipe, *(recipe.form(name) for name in recipe.forms)):
            (tmp_path / "form.toml").write_text(form.to_toml())
            assert Recipe.from_toml(tmp_path / "form.toml") == form


def test_a_file_changes_its_base(tmp_path):
    write(
        tmp_path,
        first='base = "digits_cnn"\n[training]\nepochs = 3\n[model.arguments]\ndropout = 0.5',
        second='base = "first.toml"\nname = "mine"\npruning = false\n[training]\nseed = 7',
    )
    first, second = Recipe.from_toml(tmp_path / "first.toml"), find_recipe(tmp_path / "second.toml")
    digits = RECIPES["digits_cnn"]
    assert first.name == "first"
    assert (first.training.epochs, first.training.learning_rate) == (3, digits.training.learning_rate)
    assert (first.model.arguments["dropout"], first.pruning) == (0.5, digits.pruning)
    assert (second.name, second.pruning, second.training.epochs, second.training.seed) == ("mine", None, 3, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('base = "digit_cnn"', "Unknown recipe 'digit_cnn'.* Did you mean 'digits_cnn'"),
        ('base = "none.toml"', r"must be readable\. Received: .*none\.toml"),
        ('base = "loop.toml"', r"base must not lead back to the file itself\. Received: base='loop\.toml'"),
        ('base = "other.toml"', r"base must not lead back to the file itself\. Received: base='loop\.toml'"),
        ("base = 3", "Unknown recipe '3'"),
        ('base = "digits_cnn"\n[training]\nepochs = "many"', r"training\.epochs must be a whole number"),
    ],
)
def test_a_wrong_base_is_an_error(tmp_path, text, message):
    write(tmp_path, loop=text, other='base = "loop.toml"')
    with pytest.raises(ConfigError, match=message):
        Recipe.from_toml(tmp_path / "loop.toml")


def test_composition_adds_what_differs_from_the_defaults():
    sparse = Recipe(name="sparse", pruning=PruningConfig(target_sparsity=0.9), training=TrainingConfig(seed=3))
    both = compose(BASE, sparse)
    assert both.pruning == PruningConfig(target_sparsity=0.9)
    assert both.training == TrainingConfig(epochs=9, seed=3, checkpoint_dir="runs/base")
    assert (both.name, both.export_dir, both.model) == ("base+sparse", "out/base+sparse", BASE.model)
    assert compose(BASE, Recipe(name="int8", quantization=QuantizationConfig())).quantization == QuantizationConfig()
    three = compose("digits_cnn", sparse, Recipe(name="long", training=TrainingConfig(epochs=99)))
    assert (three.training.epochs, three.training.seed, three.name) == (99, 3, "digits_cnn+sparse+long")


def test_all_settings_of_a_file_count_in_a_composition(tmp_path):
    write(
        tmp_path,
        plain="pruning = false\n[training]\nepochs = 30",
        based='base = "digits_cnn"\nname = "b"\nquantization = false',
    )
    assert TrainingConfig().epochs == 30
    both = compose(BASE, tmp_path / "plain.toml")
    assert (both.training.epochs, both.pruning, both.name) == (30, None, "base+plain")
    based = compose(BASE, Recipe(name="q", quantization=QuantizationConfig()), tmp_path / "based.toml")
    assert (based.name, based.quantization) == ("base+q+b", None)
    assert based.pruning.epochs == RECIPES["digits_cnn"].pruning.epochs
    assert based.pruning.target_sparsity == 0.5, "0.75 is a default of digits_cnn, so it does not count"
    assert based.model == RECIPES["digits_cnn"].model, "arguments count together with their builder"
    assert Recipe.from_toml(tmp_path / "plain.toml").pruning is None


def test_a_file_with_a_base_has_a_directory_of_its_own(tmp_path):
    write(tmp_path, plain='base = "digits_cnn"\nquantization = false', own='base = "digits_cnn"\nexport_dir = "there"')
    assert Recipe.from_toml(tmp_path / "plain.toml").export_dir == "saved_models/plain"
    assert Recipe.from_toml(tmp_path / "own.toml").export_dir == "there"


def test_forms_are_added_to_the_others(tmp_path):
    more = with_changes(RECIPES["digits_cnn"], {"forms": {"long": {"training": {"epochs": 99}}}})
    assert set(more.forms) == {"quick", "full", "long"}
    assert more.form("long").training.epochs == 99
    write(tmp_path, mine='base = "digits_cnn"\n[forms.quick.training]\nepochs = 1')
    mine = Recipe.from_toml(tmp_path / "mine.toml")
    assert mine.form("full").training.epochs > 1
    assert mine.quick().training.epochs == 1


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf[training]\nepochs = 3\n")
    assert Recipe.from_toml(tmp_path / "mine.toml").training.epochs == 3


@pytest.mark.parametrize("changes", [[], None, "training"])
def test_changes_are_a_table(changes):
    with pytest.raises(ConfigError, match="changes must be a table of settings"):
        with_changes(BASE, changes)


# 2:4 has half zeros in every layer, and nothing else. Classes teach no regression.
APART = {
    ("resnet_sparse", "resnet_2_4"): "pattern",
    ("mlp", "resnet_distilled"): "loss='kl' of distillation",
    ("mlp", "vit_distilled"): "loss='kl' of distillation",
}


@pytest.mark.parametrize(
    "name", ["digits_cnn", *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES if name != "digits_cnn")]
)
def test_any_two_recipes_can_be_composed(name):
    """Each two once, in one order or the other."""
    names = list(RECIPES)
    for place, other in enumerate(names[names.index(name) :]):
        first, second = (name, other) if place % 2 else (other, name)
        if not {(first, second), (second, first)} & set(APART):
            assert compose(first, second).model.builder == RECIPES[second].model.builder


@pytest.mark.parametrize("names", APART)
def test_two_recipes_that_contradict_each_other_cannot_be_composed(names):
    for first, second in itertools.permutations(names):
        with pytest.raises(ConfigError, match=APART[names]):
            compose(first, second)


def test_differences_name_each_setting():
    other = with_changes(BASE, {"name": "other", "pruning": False, "model": {"arguments": {"dropout": 0.2}}})
    found = {each.setting: (each.first, each.second) for each in diff(BASE, other)}
    assert found.pop("name") == ("base", "other")
    assert found.pop("model.arguments.dropout") == (0.1, 0.2)
    assert found.pop("pruning") == ("on", None)
    assert found.pop("pruning.target_sparsity") == (0.5, None)
    assert {name.partition(".")[0] for name in found} == {"pruning"}
    assert diff(BASE, BASE) == []


@pytest.mark.parametrize("stage", ["shrink", "pruning", "quantization"])
def test_differences_say_that_a_stage_is_on(stage):
    off = Recipe(name="base")
    found = {each.setting: (each.first, each.second) for each in diff(off, with_changes(off, {stage: {}}))}
    assert found.pop(stage) == (None, "on")
    assert all(name.startswith(f"{stage}.") for name in found)


def test_former_names_find_the_recipe():
    assert {find_recipe(name).name for name in FORMER_NAMES} <= set(RECIPES)


def test_own_code_by_name_in_python():
    recipe = Recipe(
        name="own",
        model=ModelConfig(builder=f"{__name__}:build", arguments={"width": 5}),
        data=DataConfig(source=f"{__name__}:rows"),
        task=f"{__name__}:TASK",
    )
    assert recipe.model.build((3,), 2).get_layer("dense1").units == 5
    assert recipe.data.load().size("train") == 48
    assert recipe.find_task() is TASK


def test_own_code_goes_out_to_toml_and_comes_in_only_if_allowed(tmp_path):
    own = Recipe(name="own", model=ModelConfig(builder=build), data=DataConfig(source=rows), task="regression")
    text = own.to_toml()
    assert f'builder = "{__name__}:build"' in text
    assert 'builder = "mlp"' in Recipe(name="x", model=ModelConfig(builder=tfopt.models.mlp)).to_toml()
    write(tmp_path, own=text, based=f'base = "digits_cnn"\ntask = "{__name__}:TASK"')
    for file, setting in (("own", "model.builder"), ("based", "task")):
        with pytest.raises(ConfigError, match=rf"{setting} must be a registered name unless .* Received: {setting}="):
            Recipe.from_toml(tmp_path / f"{file}.toml")
    allowed = Recipe.from_toml(tmp_path / "own.toml", allow_code=True)
    assert isinstance(allowed.model.build(allowed.data.load().input_shape, 2), keras.Model)
    assert Recipe.from_toml(tmp_path / "based.toml", allow_code=True).find_task() is TASK
    with pytest.raises(ConfigError, match=r"forms\.full\.model\.builder must be a registered name"):
        Recipe.from_dict({"name": "x", "forms": {"full": {"model": {"builder": "os:system"}}}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:build", r"builder must name a module that Python can import.*no_such_module"),
        (f"{__name__}:nothing", r"builder must name .* Received: builder='.*:nothing' \(.*no attribute 'nothing'\)"),
        (f"{__name__}:BASE", "builder must be a name or a function"),
        (
            f"{__name__}:rows",
            r"builder must be a function of \(input_shape, outputs, .* Received: builder='.*:rows', which takes \(\)",
        ),
    ],
)
def test_wrong_code_is_an_error_before_anything_is_built(name, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(builder=name).build((4,), 2)


def test_a_task_by_name_must_be_a_task():
    with pytest.raises(ConfigError, match=r"task must name a tfopt\.tasks\.Task\. Received: task='.*:build'"):
        Recipe(name="x", task=f"{__name__}:build").find_task()
