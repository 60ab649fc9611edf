"""The tree of tfopt: packages, each of which says what is inside and where to start, as the README does."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "tfopt").glob("*/**/__init__.py"))
INNER = [path.parent.relative_to(ROOT / "tfopt") for path in FILES]


def readme_tree():
    """Returns what the README's tree says of each package of tfopt, by the package's path."""
    text = (ROOT / "README.md").read_text()
    block = text.split("\n    tfopt/\n")[1].split("\n    recipes/ ")[0]
    found, outer = {}, ""
    for indent, name, words in re.findall(r"^( +)(\w+)/ +(.+)$", block, re.MULTILINE):
        outer = outer if len(indent) > 6 else name
        found[Path(outer, name) if len(indent) > 6 else Path(name)] = words
    return found


@pytest.mark.parametrize("package", INNER, ids=str)
def test_a_package_says_what_is_inside_and_where_to_start(package):
    folder = ROOT / "tfopt" / package
    words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    first, start = words.split("\n\n")[:2]
    assert first.rstrip(".") == readme_tree()[package], "the README's tree must say the same"
    files = re.findall(r"[\w/]+\.py\b", start)
    assert start.startswith("Start in ")
    assert files
    assert [name for name in files if not (folder / name).is_file() and not (ROOT / name).is_file()] == []


def test_the_readme_lists_every_package_and_no_other():
    assert sorted(readme_tree()) == sorted(INNER)
