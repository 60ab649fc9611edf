"""Writes every table of README and docs that has a source: the recorded results, and the docstrings of packages.

python benchmarks/write_pages.py
"""

from __future__ import annotations

import architecture_page
import clustering_page
import compression_page
import distillation_page
import efficiency_page
import export_page
import formats_page
import gpu_page
import layers_page
import profiling_page
import pruning_page
import quantization_page
import recipes_page
import reliability_page
import serving_page
import training_page
import tuning_page
from page_tables import ROOT, filled

from tfopt.atomic.files import write_text

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = (
    architecture_page,
    clustering_page,
    compression_page,
    distillation_page,
    efficiency_page,
    export_page,
    formats_page,
    gpu_page,
    layers_page,
    profiling_page,
    pruning_page,
    quantization_page,
    recipes_page,
    reliability_page,
    serving_page,
    training_page,
    tuning_page,
)
PARTS = {name: part for module in MODULES for name, part in module.TABLES.items()}


def write_pages() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (written := filled(text, PARTS)) != text:
            write_text(page, written)


if __name__ == "__main__":
    write_pages()
