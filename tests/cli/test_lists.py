"""`tfopt models` and `tfopt recipes`: lists with stored costs, and the cost of one model."""

import json
from pathlib import Path

import pytest
from costs import count_model, count_recipe

from tfopt.cli import main
from tfopt.cli.lists import cost_texts, stored_costs
from tfopt.models import BUILDERS
from tfopt.models.table import PUBLISHED_MODELS
from tfopt.recipe import Recipe
from tfopt.recipes import RECIPES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def printed(capsys, words):
    assert main(words.split()) == 0
    return capsys.readouterr().out


def test_every_published_model_and_recipe_has_a_stored_cost():
    costs = stored_costs()
    words = "Run benchmarks/costs.py --only-new, and commit what it writes."
    assert list(costs["models"]) == list(PUBLISHED_MODELS), words
    assert list(costs["recipes"]) == list(RECIPES), words
    for name, recipe in RECIPES.items():
        assert list(costs["recipes"][name]["forms"]) == list(recipe.forms), words


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_stored_costs_equal_the_published_figures(name):
    entry, cost = PUBLISHED_MODELS[name], stored_costs()["models"][name]
    assert entry.parameters is None or cost["parameters"] == entry.parameters
    if entry.multiply_adds is not None:
        assert cost["multiply_adds"] == pytest.approx(entry.multiply_adds, rel=0.02)


def test_the_stated_error_of_the_memory_is_the_measured_one():
    measured = json.loads((BENCHMARKS / "results" / "training_memory.json").read_text())
    assert stored_costs()["memory_error"] == {"median": measured["median_error"], "largest": measured["largest_error"]}


def test_the_list_of_models_names_builders_arguments_and_costs(capsys):
    shown = printed(capsys, "models")
    for name in (*BUILDERS, *PUBLISHED_MODELS):
        assert name in shown
    assert "filters=(6, 16)" in shown
    assert "4.09 G" in shown
    listed = json.loads(printed(capsys, "models --json"))
    assert listed["builders"]["mlp"]["dropout"] == 0.0
    assert listed["models"]["resnet50"]["parameters"] == 25_557_032


def test_the_costs_fit_a_terminal_of_80_columns():
    longest = max(len(name) for name in PUBLISHED_MODELS) + 2
    assert longest + max(map(len, cost_texts(stored_costs()["models"]))) <= 80


def test_the_list_of_recipes_names_descriptions_and_costs(capsys):
    shown = printed(capsys, "recipes")
    for name, recipe in RECIPES.items():
        assert f"{name} " in shown
        assert recipe.description in shown
    listed = json.loads(printed(capsys, "recipes --json"))
    assert Recipe.from_dict(listed["recipes"]["digits_cnn"]) == RECIPES["digits_cnn"]
    assert listed["costs"]["digits_cnn"]["parameters"] == 97_598


def test_one_recipe_shows_its_settings_and_cost(capsys, tmp_path):
    shown = printed(capsys, "recipes digits_cnn")
    assert "97.6 k parameters" in shown
    (tmp_path / "copy.toml").write_text(shown)
    assert Recipe.from_toml(tmp_path / "copy.toml") == RECIPES["digits_cnn"]  # the costs are comments
    (tmp_path / "mine.toml").write_text('[model]\nbuilder = "mlp"\n')
    assert 'builder = "mlp"' in printed(capsys, f"recipes {tmp_path}/mine.toml")
    assert json.loads(printed(capsys, "recipes digits_cnn --json"))["cost"]["batch_size"] == 32


def test_one_model_is_built_and_counted(capsys):
    shown = printed(capsys, "models lenet5")
    assert "61,706" in shown
    assert "417 k per example" in shown
    words = (
        "models mlp --arguments units=[32] --input-shape 8 --outputs 3 --batch-size 4 --precision mixed_bfloat16 --json"
    )
    counted = json.loads(printed(capsys, words))
    assert counted["parameters"] == 8 * 32 + 32 + 32 * 3 + 3
    assert counted["multiply_adds"] == 8 * 32 + 32 * 3
    assert counted["memory"]["batch_size"] == 4
    assert counted["memory"]["precision"] == "mixed_bfloat16"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("models lenet", "Did you mean 'lenet5'"),
        ("models lenet5 --arguments dept=3", "dept"),
        ("models lenet5 --batch-size 0", "batch_size must be"),
        ("models keras:DenseNet121", "--input-shape"),
        ("recipes digits", "'digits_cnn'"),
    ],
)
def test_wrong_words_are_one_line(words, expected, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1


@pytest.mark.slow
def test_stored_costs_are_what_is_counted():
    """Of two; benchmarks/costs.py counts all."""
    stored, model, recipe = stored_costs(), "keras:MobileNetV2", "digits_cnn"
    assert json.loads(json.dumps(count_model(model))) == stored["models"][model]
    assert json.loads(json.dumps(count_recipe(RECIPES[recipe]))) == stored["recipes"][recipe]
