"""The tree of tfopt: packages, each of which says what is inside and where to start."""

import ast
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tfopt").glob("*/**/__init__.py"))
INNER = [path.parent.relative_to(ROOT / "tfopt") for path in FILES]


@pytest.mark.parametrize("package", INNER, ids=str)
def test_a_package_says_what_is_inside_and_where_to_start(package):
    folder = ROOT / "tfopt" / package
    words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    first, start = words.split("\n\n")[:2]
    assert first
    files = re.findall(r"[\w/]+\.py\b", start)
    assert start.startswith("Start in ")
    assert files
    assert [name for name in files if not (folder / name).is_file() and not (ROOT / name).is_file()] == []


def test_the_files_that_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:tfopt|recipes|benchmarks)/[\w/]*(?:\.pyi?)?)`", text))
    assert len(named) > 15
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    for name, file in re.findall(r"`([A-Z_]+)` in `([\w/.]+)`", text):
        assert re.search(rf"^{name}\b.* = ", (ROOT / file).read_text(), re.MULTILINE), (name, file)


def test_no_script_hides_a_package_of_python():
    # A script's folder comes first on its path. Python 3.14 has "compression", which jax imports where it can.
    scripts = {path.stem for folder in ("benchmarks", "recipes") for path in (ROOT / folder).glob("*")}
    assert "gpu_training" in scripts
    assert scripts & (sys.stdlib_module_names | {"compression", "annotationlib"}) == set()


def test_the_time_limit_of_gpu_tests_is_theirs_alone():
    # It ends the process, which a slow test elsewhere must not: conftest.py of tests/gpu would keep this file then.
    assert not Path(tempfile.gettempdir(), f"tfopt-gpu-tests-{os.getpid()}.txt").exists()
