"""The pages say what benchmarks/results says: a table or a figure that was changed, or has no source, is found."""

import json
import re

import builders_page
import compatibility_page
import front_door
import layers_page
import pytest
from page_figures import FIGURE, problems, visible
from page_tables import ROOT, read
from write_pages import PAGES, PARTS

from tfopt.cli.lists import stored_costs

# Figures that are no measurements of ours: settings, limits, examples, and figures of others with their source.
NOT_MEASURED = (
    # versions and addresses
    "Python 3.11 to 3.13",
    "TensorFlow 2.21",
    "Triton's server, version 2.51",
    "127.0.0.1",
    # published counts, with their sources in the sentence
    "ResNet-50 (4.09 G multiply-adds in torchvision; 3.8 G for the first version",
    "MobileNetV2 (300 M, Sandler et al. 2018)",
    "BERT-base (22.5 GFLOP for 128 tokens, Jiao et al. 2020)",
    "ViT-B/16 (17.6 G, and 55.4 G at 384 pixels, Liu et al. 2021)",
    "| GPU, compute capability 8.0 or more |",
    "| GPU, 7.0 to 7.5 |",
    "NVML takes 20 ms for it",
    # figures of GPUs, from their datasheets and from TensorFlow's build
    "for Linux was built for the compute capabilities 6.0, 7.0, 8.0, 8.9 and 9.0",
    "the A10 with 8.6 runs that for 8.0",
    "A100 with 80 GB",
    "1 GiB for TensorFlow",
    "on a GPU with 80 GB such as the A100",
    # sizes of data sets, from their publishers
    "1,797 handwritten digits of scikit-learn",
    "70,000 grey images",
    "60,000 colour images",
    "50,000 film reviews",
    # tolerances that the tests check
    "agree with published ones within 2%",
    "a tolerance of 1%",
    "differ from the step by more than 10%",
    # settings, limits and definitions
    "above 100%, caches",
    "If both are below 20%",
    "kernels that wait for memory all give 100%",
    "two cycles of 5 ms for each step",
    "From 16,384 samples on, which is 2.3 hours",
    "after 0.1 seconds and then less often",
    "95% interval",
    "by Fieller's method at 95%",
    "would become 1 - 8 * (1 - 0.9), which is 0.2",
    "saves less than 5% of the step is not advised",
    "files above 4 GiB",
    "whose description unpacks to over 64 MiB",
    "every model above 2 GiB",
    "0.005 is half a point",
    "MLPerf has gates of 99% and 99.9%",
    "The trials train on its first 8,192 examples",
    "files of about 128 MiB",
    "first 64 KiB of each file",
    "chunks of about 64 MiB",
    "arrays above 256 MiB",
    "of which 80% may be used",
    "more than 80% of the free memory",
    "4.25 bits with groups of 64",
    "so one digit is 0.11 or 0.22 points",
    "One digit is 0.28 points",
    "further than 30% of their scale",
    "at least 98% of the decisions",
    "if the difference is over 5%",
    "its largest tensor for 8 steps exceeds 8 MiB",
    "the inputs of all steps exceed 64 MiB",
    "float16 has 11 bits, and ends at 65,504",
    "| GPU of compute capability 8.0 and later |",
    "| GPU of compute capability 7.0 and 7.5 |",
    "at most 95% of float32's time",
    "as they are stored, of 32 KiB or more",
    '"int8 in 10 of 21 products"',
    "(yes above 0.5)",
    "yes above 0.5 |",
    "from 0 to 1, bytes",
    "smaller than 2 GiB, the limit of a protobuf",
    "drops up to 30% of the kept weights",
    "beyond 99.9% of the others",
    "fewer than 1,024 values",
    "7 of 8 bits",
    "| 0.5, where the expected error halves |",
    "or 1% of another score",
    "0.01 is one point of mean IoU, or 0.01 bits per byte",
    "which is 0.004 for adamw",
    "After 2,000 good steps",
    "calls a layer 8 times: 4 times on each replica",
    "the state changes 4 times on each replica",
    "at temperature 0.5",
    "is a difference of less than 5%",
    "within 5% of the",
    "Above 1x the step",
    "Below 1x, tfopt's step",
    "(accuracy, mean IoU) or 1%",
)
WHOLE = {
    builders_page.PAGE: lambda: builders_page.page(json.loads(builders_page.RESULTS.read_text()), stored_costs()),
    compatibility_page.PAGE: lambda: compatibility_page.page(
        json.loads(compatibility_page.RESULTS.read_text()), json.loads(compatibility_page.MODELS.read_text())
    ),
}


def wrong(page, text):
    if page in WHOLE:
        return [] if text == WHOLE[page]() else ["run the benchmark with --page-only"]
    return problems(text, PARTS, NOT_MEASURED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_is_what_its_source_says(page):
    assert wrong(page, page.read_text()) == []


def false_figures(text):
    """Yields what is changed, and the page with it: one figure in each line of prose, tables and outputs."""
    fence = r"(?:<!-- an example of the output -->\n)?^```\w*\n.*?^```$"
    hidden = rf"{fence}|(?<=\n\n)(?: {{4}}[^\n]*\n)+|<!--.*?-->|`[^`\n]*`|\]\([^)]*\)"

    def blanked(match):
        return match[0] if match[0].startswith("```text") else re.sub(r"\S", "_", match[0])

    shown = re.sub(hidden, blanked, text, flags=re.DOTALL | re.MULTILINE)
    start = 0
    for line in shown.splitlines(keepends=True):
        if matches := list(FIGURE.finditer(line)):
            digit = next(match.start() for match in re.finditer(r"\d", line[matches[-1].start() :]))
            at = start + matches[-1].start() + digit
            yield line.strip(), f"{text[:at]}{(int(text[at]) + 1) % 10}{text[at + 1 :]}"
        start += len(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_false_figure_is_found(page):
    assert [line for line, changed in false_figures(page.read_text()) if wrong(page, changed) == []] == []


def test_every_exception_is_still_on_a_page():
    text = " ".join(visible(page.read_text()) for page in PAGES)
    assert [phrase for phrase in NOT_MEASURED if phrase not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_claim_without_a_source_is_found(page):
    text = page.read_text()
    for claim in ("It is 1.37x as fast.", "It takes 12.5 ms.", "It loses 0.3% of the accuracy."):
        assert wrong(page, f"{text}\n\n{claim}\n") != [], claim


def test_each_layer_that_takes_longer_than_its_operations_has_a_reason():
    assert layers_page.unexplained() == []
    assert set(layers_page.REASONS) <= set(read("layer_sweep")["layers"])


def test_the_readme_shows_what_its_blocks_printed():
    assert front_door.readme_blocks() == read("front_door")["code"], "run benchmarks/front_door.py"


def test_the_index_begins_as_the_readme():
    readme, index = (ROOT / name for name in ("README.md", "docs/index.md"))
    first = readme.read_text().partition("## What it buys")[0].replace("(docs/", "(")
    assert index.read_text().startswith(first)
