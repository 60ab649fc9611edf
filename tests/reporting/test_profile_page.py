"""What the page shows of a step, its diagnosis, its operators and the timeline; also in a browser if there is one."""

import re
from dataclasses import fields, replace

import chromium
import pytest
from test_html_page import HOSTILE, Page, sample_report
from test_saved_report import BREAKDOWN, DIAGNOSIS, TRACE, full_report

from tfopt.report import Diagnosis, DiagnosisReport, OperatorTime, Utilization
from tfopt.reporting import figures
from tfopt.reporting.comparison import write_comparison_html
from tfopt.reporting.figures import MOST_POINTS
from tfopt.reporting.html_page import write_diagnosis_html, write_html


@pytest.fixture
def render(tmp_path):
    def page(diagnosis, **options):
        return Page(write_diagnosis_html(diagnosis, tmp_path / "report.html", **options).read_text(encoding="utf-8"))

    return page


def widths(svg):
    """The lengths of the bars of a stack, row by row, in the units of the drawing."""
    paths = re.findall(r'<path d="M ([\d.]+) [\d.]+ *\n?L ([\d.]+) [^"]*z\s*"[^>]*style="fill: #', svg)
    return [float(right) - float(left) for left, right in paths]


def test_a_step_is_a_stack_in_proportion_with_a_legend(render):
    page = render(DIAGNOSIS)
    summary = "Milliseconds per step: 10 ms, input 6 ms (60%), host 1 ms (10%), compute 3 ms (30%)"
    assert summary in page.attributes("aria-label")
    bars = widths(page.figure(summary))
    assert [round(width / sum(bars), 3) for width in bars] == [0.6, 0.1, 0.3]
    assert "communication" not in page.text
    assert "input 6 ms, 60%" in page.text


def test_before_and_after_are_two_stacks(render):
    after = replace(DIAGNOSIS, breakdown=replace(BREAKDOWN, step_ms=5, input_ms=1), diagnoses=())
    page = render(DIAGNOSIS, after=after)
    (summary,) = [label for label in page.attributes("aria-label") if label.startswith("Milliseconds")]
    assert "before 10 ms, input 6 ms (60%)" in summary
    assert "after 5 ms, input 1 ms (20%)" in summary
    bars = widths(page.figure(summary))
    assert len(bars) == 6
    assert bars[0] == pytest.approx(6 * bars[1], rel=0.01)
    assert "No rule found anything" in page.text


def test_a_finding_is_a_card_with_everything_that_is_known(render):
    page = render(DIAGNOSIS)
    for words in ("The input is slow", "Saves about 60% of the step", "It waits 6 ms.", "Source: the guide"):
        assert words in page.text
    assert "<pre><code>dataset.prefetch(2)</code></pre>" in page.source
    assert "<code>data.prefetch = 2</code>" in page.source
    assert page.row("retraces") == ["none"]
    assert page.row("throttled") == ["no GPU"]
    unknown = replace(DIAGNOSIS, diagnoses=[replace(DIAGNOSIS.diagnoses[0], gain=None)])
    assert "Gain unknown" in render(unknown).text


def test_operators_of_a_trace_are_a_table(render):
    page = render(DIAGNOSIS)
    assert page.row("sm80_gemm<float>") == ["MatMul", "2 ms", "100.0%", "4", "yes"]
    assert "40.0% of the time of all kernels" in page.text
    reason = {"tensor_core_share": "no GPU", "copy_ms_per_step": "no GPU"}
    on_host = replace(TRACE, tensor_core_share=None, copy_ms_per_step=None, unavailable=reason, operators=())
    assert "unavailable (no GPU)" in render(replace(DIAGNOSIS, trace=on_host)).text


def test_hostile_words_of_a_diagnosis_are_shown_and_not_obeyed(render):
    words = {each.name: HOSTILE for each in fields(Diagnosis) if each.name not in ("gain", "settings")}
    operator = OperatorTime(name=HOSTILE, kind=HOSTILE, ms_per_step=1, share=1, calls_per_step=1, on_device=True)
    hostile = DiagnosisReport(
        name=HOSTILE,
        breakdown=BREAKDOWN,
        diagnoses=[Diagnosis(**words, gain=0.1, settings={HOSTILE: HOSTILE})],
        absent={HOSTILE: HOSTILE},
        unchecked={HOSTILE: HOSTILE},
        trace=replace(TRACE, directory=HOSTILE, operators=[operator]),
    )
    page = render(hostile, after=hostile)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script" not in page.source
    assert page.row(HOSTILE)


def test_ids_are_unique_and_nothing_outside_is_needed(tmp_path):
    page = Page(write_html(full_report(), tmp_path / "report.html").read_text())
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert set(page.attributes("aria-labelledby")) <= set(ids)
    assert "://" not in page.source


def test_throttled_time_is_marked_in_every_plot():
    samples = {"gpu0_power_watts": [1.0] * 10, "gpu0_memory_used_bytes": [5.0] * 10}
    throttled = {"gpu0_throttled": [0, 1, 1, 0, 0, None, 0, 0, 0, 0], "gpu1_throttled": [0, 0, 0, 0, 0, 0, 0, 0, 0, 1]}
    load = Utilization(source="NVML", seconds=list(range(10)), series=samples | throttled)
    plots = figures.utilization(load)
    assert [plot.summary.partition(",")[2] for plot in plots] == [" throttled 30% of the time"] * 2
    assert [plot.svg.count('throttled"') for plot in plots] == [2, 2]
    assert "var(--alarm)" in plots[0].svg
    calm = replace(load, series=samples)
    assert "throttled" not in "".join(plot.svg + plot.summary for plot in figures.utilization(calm))


def test_more_gpus_than_colours_are_drawn_figure_by_figure():
    names = [f"gpu{gpu}_{name}_percent" for gpu in range(8) for name in ("gpu_utilization", "sm_active")]
    plots = figures.utilization(Utilization(source="NVML", seconds=[0, 1], series={name: [1.0, 3.0] for name in names}))
    assert [plot.title for plot in plots] == ["Gpu utilization, percent", "Sm active, percent"]
    assert [[line.label for line in plot.legend] for plot in plots] == [[f"gpu{gpu}" for gpu in range(8)]] * 2


def test_a_long_timeline_is_thinned_and_its_mean_is_exact():
    count = 20 * MOST_POINTS
    values = [float(index % 2) for index in range(count)]
    (plot,) = figures.utilization(Utilization(source="NVML", seconds=range(count), series={"gpu0_power_watts": values}))
    assert plot.legend[0].note == "mean 0.5"
    assert len(plot.svg) < 40_000


WIDTHS, THEMES = (360, 1440), {"light": "rgb(253, 253, 252)", "dark": "rgb(21, 23, 26)"}


@pytest.mark.slow
@pytest.mark.skipif(chromium.CHROMIUM is None, reason="no Chromium or Chrome is installed")
def test_a_browser_shows_the_pages_at_both_widths_in_both_themes(tmp_path):
    long_name = "kernel_" * 40
    operators = [replace(TRACE.operators[0], name=long_name, kind="FusedBatchNormV3")]
    wide = replace(DIAGNOSIS.diagnoses[0], advice="x" * 300, evidence="y" * 300)
    diagnosis = replace(DIAGNOSIS, diagnoses=[wide], trace=replace(TRACE, operators=operators))
    report = replace(full_report(), diagnosis=diagnosis)
    pages = [
        write_html(report, tmp_path / "run.html"),
        write_diagnosis_html(diagnosis, tmp_path / "diagnosis.html", after=DIAGNOSIS),
        write_comparison_html({"first": report, long_name: sample_report()}, tmp_path / "comparison.html"),
    ]
    with chromium.running(tmp_path / "profile") as browser:
        for page in pages:
            for width, (theme, paper) in zip(WIDTHS, THEMES.items(), strict=True):
                browser.open(page, width, theme)
                assert browser.problems == []
                assert browser.value("innerWidth") == width
                assert browser.value("document.documentElement.scrollWidth") <= width
                assert browser.value("getComputedStyle(document.body).backgroundColor") == paper
                # Each chart has a size, and lines or bars inside it.
                assert browser.value(
                    "document.querySelectorAll('svg').length > 0 && [...document.querySelectorAll('svg')].every("
                    "svg => svg.clientWidth > 200 && svg.clientHeight > 20 && svg.querySelectorAll('path').length)"
                )
