"""The HTML report, read back with a parser: what a reader would see, and that nothing outside the file is needed."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest

from tfopt.report import Change, Decision, PassReport, Phase, Receipt, RunReport, Skip, Utilization
from tfopt.reporting.html_page import write_html
from tfopt.reporting.receipts import key_figures, receipt_table

HOSTILE = "<script>alert('x')</script> & \"$\\frac{\" url(https://evil.example/x)"


NO_CURVES = {"phases": (), "utilization": None}  # drawing them takes most of a page's time


def receipt(name, **fields):
    defaults = {
        "artifact": f"saved_models/digits_cnn/{name}",
        "precision": "float32",
        "parity_max_abs_error": 4.8e-7,
        "parity_relative_error": 1.1e-7,
        "accuracy": 0.9917,
        "bytes_on_disk": 250_412,
        "gzip_bytes": 230_118,
        "weight_count": 61_470,
        "zero_count": 0,
        "batch_size": 32,
        "latency_ms_median": 0.842,
        "latency_ms_p99": 1.207,
        "kernels": {"Conv2D": 2, "MatMul": 3},
        "tensorflow_version": "2.21.0",
        "device": "Intel Xeon, 2 cores",
        "unavailable": dict.fromkeys(
            ("baseline", "baseline_accuracy", "agreement", "speedup"), "it is compared with nothing"
        ),
    }
    return Receipt(**(defaults | fields))


def sample_report():
    """A run as `digits_cnn` makes it."""
    compared = {"baseline": "saved_models/digits_cnn/float32", "baseline_accuracy": 0.9917, "unavailable": {}}
    fit = [1 - math.exp(-(epoch + 1) / 4) for epoch in range(30)]
    prune = [0.985 + 0.0008 * epoch for epoch in range(10)]
    seconds = [0.5 * sample for sample in range(60)]
    wave = [55 + 35 * math.sin(sample / 5) for sample in range(60)]
    return RunReport(
        recipe="digits_cnn",
        description="The classic two-convolution network on scikit-learn's handwritten digits: pruned, then int8.",
        created="2026-01-31 12:00 UTC",
        environment={"TensorFlow": "2.21.0", "Keras": "3.15.0", "Python": "3.12.4", "Device": "Intel Xeon, 2 cores"},
        plan=(
            Decision(setting="precision", value="float32", reason="no GPU with bfloat16 or float16 matrix units"),
            Decision(setting="jit_compile", value="False", reason="XLA on a CPU compiles for longer than it saves"),
            Decision(setting="strategy", value="default", reason="one device"),
            Decision(setting="steps_per_execution", value="8", reason="a step takes 4 ms, of which 1 ms is dispatch"),
        ),
        phases=(
            Phase(
                name="train",
                history={
                    "loss": [2.3 * (1 - 0.99 * value) for value in fit],
                    "val_loss": [2.2 * (1 - 0.96 * value) for value in fit],
                    "accuracy": [0.1 + 0.899 * value for value in fit],
                    "val_accuracy": [0.12 + 0.87 * value for value in fit],
                },
            ),
            Phase(
                name="prune",
                history={
                    "loss": [0.12 - 0.008 * epoch for epoch in range(10)],
                    "val_loss": [0.14 - 0.006 * epoch for epoch in range(10)],
                    "accuracy": prune,
                    "val_accuracy": [value - 0.006 for value in prune],
                    "sparsity": [0.75 * (1 - (1 - (epoch + 1) / 10) ** 3) for epoch in range(10)],
                },
            ),
        ),
        utilization=Utilization(
            source="psutil (no NVIDIA GPU found)",
            seconds=seconds,
            series={
                "process_cpu_percent": [2 * value for value in wave],
                "system_cpu_percent": [None if 20 <= sample < 25 else value for sample, value in enumerate(wave)],
                "process_memory_bytes": [6e8 + 4e6 * sample for sample in range(60)],
            },
        ),
        passes=(
            PassReport(
                name="prune",
                changed=tuple(
                    Change(name=name, kind=kind, detail="75.0% zeros")
                    for name, kind in (("conv1", "Conv2D"), ("conv2", "Conv2D"), ("dense1", "Dense"))
                ),
                skipped=(Skip(name="logits", kind="Dense", reason="the output layer is left dense"),),
                metrics={"sparsity": 0.75},
            ),
            PassReport(
                name="quantize",
                changed=(Change(name="simple_cnn/conv1/convolution", kind="Conv2D", detail="int8, per channel"),),
            ),
        ),
        receipts={
            "float32": receipt("float32"),
            "pruned": receipt(
                "pruned",
                accuracy=0.9889,
                gzip_bytes=80_204,
                zero_count=46_102,
                agreement=0.9944,
                speedup=0.97,
                **compared,
            ),
            "int8": receipt(
                "int8",
                precision="int8",
                accuracy=0.9889,
                bytes_on_disk=70_112,
                gzip_bytes=31_009,
                zero_count=46_311,
                agreement=0.9917,
                latency_ms_median=0.41,
                latency_ms_p99=0.66,
                speedup=2.05,
                kernels={"_QuantizedConv2D": 2, "_QuantizedMatMul": 3},
                **compared,
            ),
        },
    )


class Page(HTMLParser):
    """What the tests ask of a page."""

    def __init__(self, text):
        super().__init__()
        self.source, self.tags, self.words, self.rows, self.in_cell = text, [], [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data):
        if not self.words or data.strip():
            self.words.append(data.strip())
        if self.in_cell:
            self.rows[-1][-1] += data.strip()

    @property
    def text(self):
        return " ".join(self.words)

    def attributes(self, name, tag=None):
        return [attrs[name] for found, attrs in self.tags if name in attrs and tag in (None, found)]

    def row(self, heading):
        return next(row[1:] for row in self.rows if row[0] == heading)

    def figure(self, start):
        """The SVG of the figure whose summary begins so."""
        return re.search(rf'aria-label="{re.escape(start)}[^>]*>(<svg.*?</svg>)', self.source, re.DOTALL)[1]


@pytest.fixture
def render(tmp_path):
    return lambda report: Page(write_html(report, tmp_path / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def sample_page(tmp_path_factory):
    """The page of the sample report, drawn once."""
    file = write_html(sample_report(), tmp_path_factory.mktemp("page") / "report.html")
    return Page(file.read_text(encoding="utf-8"))


def test_every_part_of_the_run_is_on_the_page(sample_page):
    page = sample_page
    titles = [label.split(":")[0] for label in page.attributes("aria-label")]
    assert titles == [
        *("Accuracy, difference to float32", "Size on disk", "Size as .tar.gz", "Median latency"),
        *("Loss, logarithmic over 40 epochs", "Accuracy over 40 epochs", "Sparsity over epochs 31 to 40"),
        *("Percent over time", "Bytes over time"),
    ]
    assert [tag for tag, _ in page.tags].count("svg") == len(titles)
    assert page.row("Accuracy") == ["99.17%", "98.89%", "98.89%"]
    assert page.row("jit_compile") == ["False", "XLA on a CPU compiles for longer than it saves"]
    assert page.row("logits") == ["Dense", "skipped: the output layer is left dense"]
    assert page.row("_QuantizedConv2D") == ["0", "0", "2"]
    assert "psutil (no NVIDIA GPU found)" in page.text
    assert "Problems" not in page.text


def test_the_page_needs_nothing_but_itself(sample_page):
    page = sample_page
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    references = [value for name in ("src", "href", "xlink:href", "srcset") for value in page.attributes(name)]
    references += re.findall(r"url\(([^)]*)\)", page.source)
    assert all(reference.startswith("#") for reference in references)
    assert "@import" not in page.source
    assert "://" not in page.source


def test_ids_are_unique_and_every_reference_has_its_target(sample_page):
    page = sample_page
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    references = {value[1:] for value in page.attributes("xlink:href")}
    references |= set(re.findall(r"url\(#([^)]*)\)", page.source))
    references |= set(page.attributes("aria-labelledby"))
    assert references <= set(ids)


def test_tables_and_figures_can_be_read_without_seeing_them(sample_page):
    page = sample_page
    assert all("scope" in attrs for tag, attrs in page.tags if tag == "th")
    assert all(attrs.get("aria-label") for _, attrs in page.tags if attrs.get("role") == "img")
    assert page.attributes("lang", "html") == ["en"]
    labels = page.attributes("aria-label")
    assert "Accuracy, difference to float32: float32 99.17%, pruned -0.28 points, int8 -0.28 points" in labels


def test_figures_follow_the_theme_of_the_page(sample_page):
    drawn = sample_page.figure("Loss")
    assert {"var(--muted)", "var(--rule)"} <= set(re.findall(r"var\(--\w+\)", drawn))
    assert "<text" in drawn


def test_hostile_words_are_shown_and_not_obeyed(render):
    report = sample_report()
    hostile = RunReport(
        recipe=HOSTILE,
        description=HOSTILE,
        created=HOSTILE,
        environment={HOSTILE: HOSTILE},
        plan=(Decision(setting=HOSTILE, value=HOSTILE, reason=HOSTILE),),
        phases=(
            Phase(name=HOSTILE, history={HOSTILE: [1.0, 2.0]}),
            Phase(name="$x_{$", history={HOSTILE: [1.0, 2.0]}),
        ),
        utilization=Utilization(source=HOSTILE, seconds=[0.0, 1.0], series={HOSTILE: [1.0, 2.0]}),
        passes=(PassReport(name=HOSTILE, skipped=(Skip(name=HOSTILE, kind=HOSTILE, reason=HOSTILE),)),),
        receipts={HOSTILE: replace(report.receipts["int8"], device=HOSTILE, problems=(HOSTILE,), kernels={HOSTILE: 1})},
    )
    page = render(hostile)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script" not in page.source
    assert page.row("Device") == [HOSTILE]
    assert page.row(HOSTILE) == [HOSTILE, HOSTILE]
    assert HOSTILE in page.attributes("data-name")


def test_an_unknown_value_gives_its_reason_and_no_bar(render):
    report = sample_report()
    unlabelled = {
        name: replace(entry, accuracy=None, unavailable={**entry.unavailable, "accuracy": "no labels were given"})
        for name, entry in report.receipts.items()
    }
    page = render(replace(report, receipts=unlabelled, **NO_CURVES))
    assert page.row("Accuracy") == ["\N{EN DASH}1"] * 3
    assert page.row("Speed against float32") == ["\N{EN DASH}2", "0.97x", "2.05x"]
    assert page.text.count("no labels were given") == 2  # the headline and one footnote
    assert page.text.count("it is compared with nothing") == 1
    assert "Accuracy: float32 unavailable, pruned unavailable, int8 unavailable" in page.attributes("aria-label")
    assert key_figures(unlabelled)[0].note == "no labels were given"


def test_the_headline_compares_the_last_artifact_with_the_first():
    accuracy, size, gzip, speed = key_figures(sample_report().receipts)
    assert (accuracy.value, accuracy.marked) == ("98.89%", False)
    assert accuracy.note == "-0.28 points: float32 99.17% → pruned 98.89% → int8 98.89%"
    assert (size.value, size.note) == ("3.6x smaller", "250 kB → 70.1 kB")
    assert gzip.value == "7.4x smaller"
    assert (speed.value, speed.note) == ("2.05x faster", "0.41 ms median, batch 32")


def test_one_reference_is_stated_above_the_headline(render, sample_page):
    page = sample_page
    assert "int8 against float32" in page.text
    alone = {"float32": sample_report().receipts["float32"]}
    assert "against" not in render(replace(sample_report(), receipts=alone, **NO_CURVES)).attributes("class")


def test_a_speed_against_another_baseline_than_the_sizes_names_it():
    receipts = sample_report().receipts
    int8 = replace(receipts["int8"], baseline=receipts["pruned"].artifact)
    assert key_figures({**receipts, "int8": int8})[-1].note == "0.41 ms median, batch 32, against pruned"


def test_about_even_is_what_stands_large():
    receipts = sample_report().receipts
    speed = key_figures({**receipts, "int8": replace(receipts["int8"], speedup=1.02)})[-1]
    assert (speed.value, speed.note) == ("about even", "0.41 ms median, batch 32, 1.02x")


def test_numbers_stand_at_the_right_of_their_columns(sample_page):
    page = sample_page
    row = page.source[page.source.index(">Bytes on disk<") :]
    cells = re.findall(r'<td [^>]*class="([^"]*)"[^>]*>', row[: row.index("</tr>")])
    assert [cell.split()[0] for cell in cells] == ["number"] * 3
    assert re.search(r"td\.number \{ text-align: right", page.source)


def test_what_is_the_same_for_all_is_told_once(render, sample_page):
    page = sample_page
    headings = [row[0] for row in page.rows if row]
    assert not {"Device", "TensorFlow", "Weights", "Batch size of the timed calls", "Baseline"} & set(headings)
    assert page.text.count("61,470") == 1
    assert "batch size of the timed calls 32" in page.text
    other = replace(sample_report().receipts["int8"], batch_size=8)
    changed = render(replace(sample_report(), receipts={**sample_report().receipts, "int8": other}, **NO_CURVES))
    assert changed.row("Batch size of the timed calls") == ["32", "32", "8"]


def test_paths_are_relative_to_the_page_and_break_at_slashes_only():
    receipts = {
        "float32": receipt("float32", artifact="/home/me/out/float32"),
        "int8": receipt("int8", artifact="/home/me/out/int8", baseline="/home/me/models/float"),
    }
    table = receipt_table(receipts, Path("/home/me/out"))
    assert "Artifact" not in table.rows  # float32 and int8, which are the heads of the columns
    assert [cell.text for cell in table.rows["Baseline"]] == ["\N{EN DASH}", "../models/float"]
    table = receipt_table(receipts, Path("/home/me"))
    assert [cell.text for cell in table.rows["Artifact"]] == ["out/float32", "out/int8"]


def test_a_path_may_break_behind_a_slash(render, tmp_path):
    receipts = {"float32": receipt("float32", artifact=str(tmp_path / "a" / "float32"))}
    page = render(replace(sample_report(), receipts=receipts, **NO_CURVES))
    assert "a/<wbr>float32" in page.source
    assert page.row("Artifact") == ["a/float32"]


def test_a_narrow_screen_gets_cards_with_the_name_of_each_artifact(sample_page):
    page = sample_page
    assert [tag for tag, attrs in page.tags if "cards" in attrs.get("class", "")] == ["table"] * 5
    assert {"float32", "pruned", "int8"} == set(page.attributes("data-name", "td"))
    assert "content: attr(data-name)" in page.source


def test_a_loss_of_over_a_point_is_marked(render):
    report = replace(sample_report(), **NO_CURVES)
    page = render(replace(report, receipts={**report.receipts, "int8": receipt("int8", accuracy=0.9816)}))
    marked = [attrs for tag, attrs in page.tags if "marked" in attrs.get("class", "").split()]
    assert [attrs.get("data-name", "headline") for attrs in marked] == ["headline", "int8"]
    assert not [attrs for _, attrs in render(report).tags if "marked" in attrs.get("class", "").split()]


def test_accuracies_are_drawn_from_0_where_that_shows_the_difference(render):
    report = replace(sample_report(), **NO_CURVES)
    page = render(replace(report, receipts={**report.receipts, "int8": receipt("int8", accuracy=0.85)}))
    assert "Accuracy: float32 99.17%, pruned 98.89%, int8 85.00%" in page.attributes("aria-label")


def test_the_source_is_no_gpu_and_the_percentages_are_defined(render):
    report = replace(sample_report(), phases=())
    source = "psutil (no NVIDIA GPU can be read: NVML Shared Library Not Found)"
    usage = replace(report.utilization, source=source)
    page = render(replace(report, utilization=usage, environment={"GPU": "none"}))
    assert "psutil (no GPU)" in page.text
    assert "NVML" not in page.text
    assert "100% is one core kept busy" in page.text
    broken = render(replace(report, utilization=usage, environment={"GPU": "NVIDIA H200"}))
    assert "NVML Shared Library Not Found" in broken.text


def test_a_loss_that_spans_no_decades_has_a_linear_axis(render):
    steady = Phase(name="train", history={"loss": [2.0, 1.0, 0.5]})
    page = render(replace(sample_report(), utilization=None, phases=(steady,)))
    assert "Loss over 3 epochs: training from 2 to 0.5" in page.attributes("aria-label")
    negative = Phase(name="train", history={"loss": [2.0, -1.0, 0.001]})
    page = render(replace(sample_report(), utilization=None, phases=(negative,)))
    assert "Loss over 3 epochs" in str(page.attributes("aria-label"))


def test_worse_than_the_baseline_is_said():
    float32 = receipt("float32")
    worse = receipt("int8", bytes_on_disk=2 * float32.bytes_on_disk, speedup=0.82, baseline=float32.artifact)
    _, size, gzip, speed = key_figures({"float32": float32, "int8": worse})
    assert size.value == "2.00x larger"
    assert gzip.value == "230 kB"
    assert (speed.value, speed.note) == ("0.82x, slower", "0.842 ms median, batch 32")


def test_problems_come_before_everything_that_was_measured(render):
    report = replace(sample_report(), **NO_CURVES)
    broken = replace(report.receipts["int8"], problems=("accuracy fell by 3.1 points",))
    text = render(replace(report, receipts={**report.receipts, "int8": broken})).text
    assert 0 < text.index("Problems") < text.index("accuracy fell by 3.1 points") < text.index("98.89%")


def test_phases_share_one_axis_with_a_marked_boundary(render, sample_page):
    page = sample_page
    for metric in ("Loss", "Accuracy over"):
        assert page.figure(metric).count('phase-boundary"') == 1
    assert "phase-boundary" not in page.figure("Sparsity")  # it begins with the phase that prunes
    assert ">prune</text>" in page.figure("Sparsity")
    assert ">31</text>" in page.figure("Sparsity")
    assert ">train</text>" in page.figure("Loss")
    alone = replace(sample_report(), phases=sample_report().phases[:1], utilization=None)
    assert "phase-boundary" not in render(alone).source


def test_samples_that_could_not_be_read_are_gaps(render):
    def strokes(samples):
        usage = Utilization(source="NVML", seconds=list(range(len(samples))), series={"gpu_percent": samples})
        drawn = render(replace(sample_report(), utilization=usage, phases=(), receipts={})).figure("Percent")
        path = re.search(r'<path d="([^"]*)"[^>]*stroke: #3b7dd8', drawn)
        return (path[1].count("M") if path else 0), drawn.count("<use") - drawn.count("xtick") - drawn.count("ytick")

    whole, _ = strokes([1.0, 2.0, 3.0, 4.0, 5.0])
    broken, _ = strokes([1.0, 2.0, None, 4.0, 5.0])
    assert (whole, broken) == (1, 2)
    assert strokes([1.0, None, 3.0, 4.0])[1] == strokes([1.0, 2.0, 3.0, 4.0])[1] + 1  # the lone sample is a dot


def test_a_series_without_any_sample_is_listed_as_unavailable(render):
    series = {"gpu0_power_watts": [None, None], "gpu1_power_watts": [None, None]}
    why = {"gpu1_power_watts": "Not Supported"}
    notes = ["clocks lowered by gpu0: temperature in 2 samples"]
    usage = Utilization(source="NVML", seconds=[0.0, 1.0], series=series, unavailable=why, notes=notes)
    page = render(replace(sample_report(), utilization=usage, phases=()))
    assert (
        "Watts over time: gpu0 power unavailable (no sample could be read), gpu1 power unavailable (Not Supported)"
    ) in page.attributes("aria-label")
    assert "NVML; clocks lowered by gpu0: temperature in 2 samples" in page.text


def test_series_are_grouped_by_unit(render):
    series = {"gpu_utilization_percent": [1.0], "cpu_percent": [2.0], "pcie_received_bytes_per_second": [3.0]}
    usage = Utilization(source="NVML", seconds=[0.0], series=series)
    labels = render(replace(sample_report(), utilization=usage, phases=())).attributes("aria-label")
    assert labels[-2:] == [
        "Percent over time: gpu utilization mean 1, cpu mean 2",
        "Bytes per second over time: pcie received mean 3 B/s",
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("missing", "absent"),
    [
        ({"passes": ()}, "Passes"),
        ({"utilization": None}, "Percent over time"),
        ({"plan": ()}, "Reason"),
        ({"phases": ()}, "Training"),
        ({"phases": (Phase(name="train", history={}),)}, "Training"),
        ({"receipts": {}}, "Artifacts"),
    ],
)
def test_what_did_not_run_is_left_out(render, sample_page, missing, absent):
    assert absent in sample_page.source
    report = sample_report()
    usage = replace(report.utilization, series={"process_cpu_percent": [1.0] * 60})
    phases = (Phase(name="train", history={"loss": [2.0, 1.0]}),)
    page = render(replace(report, **{"phases": phases, "utilization": usage, **missing}))
    assert absent not in page.source
    assert "digits_cnn" in page.text
    assert ("unavailable (nothing was sampled during this run)" in page.text) == ("utilization" in missing)


def test_a_float_run_alone_states_its_figures_without_ratios(render):
    report = sample_report()
    page = render(replace(report, passes=(), receipts={"float32": report.receipts["float32"]}, **NO_CURVES))
    assert "smaller" not in page.text
    assert [figure.value for figure in key_figures({"float32": report.receipts["float32"]})] == [
        *("99.17%", "250 kB", "230 kB", "0.842 ms")
    ]


def test_two_hundred_epochs_one_epoch_and_diverged_losses(render):
    long = Phase(name="train", history={"loss": [1 / (epoch + 1) for epoch in range(200)]})
    report = replace(sample_report(), utilization=None, receipts={})
    page = render(replace(report, phases=(long,)))
    assert "Loss, logarithmic over 200 epochs: training from 1 to 0.005" in page.attributes("aria-label")
    assert page.figure("Loss").count('id="curve-0-xtick_') < 12

    single = render(replace(report, phases=(Phase(name="train", history={"loss": [0.5]}),)))
    assert "stroke: #3b7dd8" in single.figure("Loss")

    diverged = Phase(name="train", history={"loss": [1.0, math.inf, math.nan], "accuracy": [math.nan] * 3})
    labels = render(replace(report, phases=(diverged,))).attributes("aria-label")
    assert "Loss over 3 epochs: training from 1 to 1" in labels
    assert not any(label.startswith("Accuracy over") for label in labels)


def test_the_file_is_replaced_whole_and_global_settings_stay(tmp_path):
    before = dict(matplotlib.rcParams.copy())
    path = tmp_path / "report.html"
    write_html(replace(sample_report(), recipe="before", **NO_CURVES), path)
    assert write_html(sample_report(), path) == path
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert path.stat().st_size < 500_000
    assert dict(matplotlib.rcParams.copy()) == before
