"""Records in a notebook: well-formed, escaped, the figures of the terminal, and what IPython takes."""

from html.parser import HTMLParser
from pathlib import Path

import keras
import pytest

import tfopt
from tfopt.report import Change, PassReport, Receipt, Skip
from tfopt.report.sheet import MARKED, PROBLEM, Table
from tfopt.runner import RunResult

VOID = {"br", "meta"}
RECEIPT = Receipt(
    artifact="out/<int8>",
    precision="int8",
    scores={"accuracy": 0.9833},
    bytes_on_disk=12_345,
    gzip_bytes=10_000,
    weight_count=100,
    zero_count=75,
    batch_size=1,
    latency_ms_median=0.5,
    latency_ms_p99=0.75,
    tensorflow_version="2.21.0",
    device="any processor",
    problems=("the outputs differ & are wrong",),
)


class Texts(HTMLParser):
    """Checks that tags close in order, and collects the text."""

    def __init__(self):
        super().__init__()
        self.open, self.texts = [], []

    def handle_starttag(self, tag, attributes):
        assert tag in {"div", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"}
        assert {name for name, _ in attributes} <= {"style"}, "no script, no link, no style sheet"
        assert all("url(" not in value for _, value in attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def texts(shown):
    parser = Texts()
    parser.feed(shown)
    assert parser.open == []
    return parser.texts


def records():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)], name="four")
    changed = (Change(name="<conv>", kind="Conv2D", detail="75.0% zeros"),)
    skipped = (Skip(name="logits", kind="Dense", reason="the output layer is left dense"),)
    plan = tfopt.plan(tfopt.TrainingConfig(precision="float32", strategy="none"))
    return {
        "report": (PassReport(name="prune", changed=changed, skipped=skipped), ["<conv>", "75.0% zeros", "logits"]),
        "receipt": (RECEIPT, ["out/<int8>", "98.33%", "12,345", "the outputs differ & are wrong"]),
        "plan": (plan, [decision.reason for decision in plan.decisions]),
        "recipe": (tfopt.recipes.RECIPES["digits_cnn"], ["digits_cnn", "simple_cnn", "0.75"]),
        "count": (tfopt.count_flops(model), ["MatMul", "32"]),
        "memory": (tfopt.training_memory(model, 16), ["weights", "144 B"]),
        "cost": (tfopt.model_cost(model), ["four", "36"]),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["report", "receipt", "plan", "recipe", "count", "memory", "cost"])
def test_a_record_shows_its_figures_in_a_notebook_and_in_the_terminal(name):
    record, expected = records()[name]
    shown = texts(record._repr_html_())
    assert [text for text in expected if text not in shown] == []
    assert [text for text in expected if text not in str(record)] == []


def test_a_result_shows_its_artifacts_side_by_side():
    from tfopt.report import Decision, Phase, RunReport

    report = RunReport(
        recipe="mine",
        description="a <small> model",
        created="",
        environment={},
        plan=[Decision(setting="precision", value="float32", reason="no GPU")],
        phases=[Phase(name="train", history={}, step_time_ms=1.5)],
        utilization=None,
        passes=[],
        receipts={},
    )
    receipts = {"float32": RECEIPT, "int8": RECEIPT}
    result = RunResult(model=None, plan=None, report=report, receipts=receipts, export_dir=Path("out"))
    shown = texts(result._repr_html_())
    for text in ("mine", "a <small> model", "float32", "int8", "12,345", "no GPU", "the outputs differ & are wrong"):
        assert text in shown
    assert "the outputs differ & are wrong" in str(result)


def test_a_long_table_is_folded():
    rows = [("layer", str(number)) for number in range(50)]
    assert "<details>" in Table(rows=rows).html()
    assert "<details>" not in Table(rows=rows, folded="").html()
    assert Table(rows=[]).html() == ""


def test_columns_of_figures_are_aligned_on_the_right_and_a_problem_is_marked():
    table = Table(head=("layer", "weights"), rows=[("conv", "9"), ("dense", "1,000"), (PROBLEM, "lost")], figures={1})
    assert str(table).splitlines() == ["layer    weights", "conv           9", "dense      1,000", "problem     lost"]
    assert table.html().count("text-align:right") == 4
    assert table.html().count(MARKED) == 1


def test_ipython_takes_the_html():
    formatters = pytest.importorskip("IPython.core.formatters")
    for record, _ in records().values():
        data, _ = formatters.DisplayFormatter().format(record)
        assert data["text/html"] == record._repr_html_()
        assert "text/plain" in data


def test_a_printed_recipe_is_toml_of_what_differs_from_the_defaults(tmp_path):
    for recipe in tfopt.recipes.RECIPES.values():
        file = tmp_path / "recipe.toml"
        file.write_text(str(recipe))
        assert tfopt.Recipe.from_toml(file) == recipe
        assert len(str(recipe).splitlines()) < len(recipe.to_toml().splitlines())


def test_a_printed_recipe_names_the_functions_of_the_user():
    def my_model(input_shape, outputs):
        raise AssertionError

    recipe = tfopt.Recipe(name="mine", model=tfopt.ModelConfig(builder=my_model))
    assert 'builder = "my_model"' in str(recipe)
    assert "my_model" in texts(recipe._repr_html_())
