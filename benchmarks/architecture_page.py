"""The tree of packages in docs/architecture.md: what each says of itself in the first line of its docstring."""

from __future__ import annotations

import ast

from page_tables import ROOT

OTHERS = {
    "recipes/": "runnable scripts, one for each recipe",
    "benchmarks/": "side-by-side measurements; results/ is the source of every figure in README and docs",
    "docs/": "these pages; cluster/ has files for Slurm and Kubernetes",
    "saved_models/": "where exports go",
    "tests/": "mirrors tfopt/",
}


def packages() -> str:
    """The folders, each package with the first paragraph of its docstring."""
    rows = [("tfopt/", "")]
    for path in sorted((ROOT / "tfopt").glob("*/**/__init__.py")):
        folder = path.parent.relative_to(ROOT / "tfopt")
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        indent = "  " * len(folder.parts)
        rows.append((f"{indent}{folder.name}/", " ".join(words.split("\n\n")[0].split()).rstrip(".")))
    rows += OTHERS.items()
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(["```text", *(f"{name:{width}}{words}".rstrip() for name, words in rows), "```"])


TABLES = {"packages": packages}
