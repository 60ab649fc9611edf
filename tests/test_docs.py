"""The Python in README and docs runs, block after block, in a process and a directory of its own."""

import inspect
import re
from pathlib import Path

import pytest

import tfopt

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


INDEX = ROOT / "docs" / "index.md"  # begins as README does


def test_the_index_has_no_python_of_its_own():
    own = blocks(INDEX, "python")
    assert own == blocks(ROOT / "README.md", "python")[: len(own)]


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page != INDEX], ids=lambda page: page.name
)
def test_python_blocks_run(page, tmp_path, fresh_python):
    fresh_python("-c", "\n".join(blocks(page, "python")), cwd=tmp_path, check=True)


def test_names_in_the_blocks_need_no_other_import_of_tfopt():
    """The blocks run where all of tfopt is imported, which would hide it."""
    for page in PAGES:
        code = re.sub(r"^ *(?:from|import) .*", "", "\n".join(blocks(page, "python")), flags=re.MULTILINE)
        for name, part in re.findall(r"\btfopt\.(\w+)(?:\.(\w+))?", code):
            assert name in tfopt.__all__, (page.name, name)
            package = getattr(tfopt, name)
            alone = inspect.ismodule(getattr(package, part, None)) and part not in package.__all__
            assert not alone, (page.name, name, part)


def test_toml_in_docs_is_a_recipe(tmp_path):
    from tfopt.recipe import Recipe

    (toml,) = blocks(ROOT / "docs" / "recipes.md", "toml")
    (tmp_path / "wide.toml").write_text(toml)
    recipe = Recipe.from_toml(tmp_path / "wide.toml")
    assert recipe.model.arguments["filters"] == [12, 32]
    assert recipe.pruning.target_sparsity == 0.9
    (toml,) = blocks(ROOT / "docs" / "pruning.md", "toml")
    (tmp_path / "small.toml").write_text(toml)
    assert Recipe.from_toml(tmp_path / "small.toml").shrink.target_flops == 0.5


def test_commands_in_the_docs_parse():
    """Each `tfopt` line of README and docs names a command that exists, with flags that exist."""
    from tfopt.cli import COMMANDS
    from tfopt.recipe import Recipe
    from tfopt.settings.flags import expand

    text = "\n".join((ROOT / name).read_text() for name in ("README.md", "docs/command_line.md"))
    lines = re.findall(r"^    tfopt ([a-z]+)(.*)$", text, re.MULTILINE)
    assert len(lines) >= 15
    for command, rest in lines:
        assert command in COMMANDS
        if command == "run":
            words = rest.partition("#")[0].split()[1:]
            expand(Recipe, [word for word in words if word not in ("--quick", "--full", "--allow-code")])


def test_the_page_of_commands_lists_every_command_and_every_exit_code():
    from tfopt.cli import COMMANDS, exit_codes

    text = (ROOT / "docs" / "command_line.md").read_text()
    assert set(re.findall(r"^\| `([a-z]+)\b", text, re.MULTILINE)) == set(COMMANDS)
    codes = {value for value in vars(exit_codes).values() if type(value) is int and value < 256}
    assert codes <= {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}


def anchors(page):
    """Returns the anchors that a page's headings have on GitHub and in mkdocs."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
            found = page.parent / target if target else page
            assert found.exists(), (page, target)
            assert not anchor or anchor in anchors(found), (page.name, target, anchor)


def test_the_index_lists_every_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", INDEX.read_text()))
    shown = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert linked | {"index.md"} == pages
    assert shown == pages


def test_the_first_pages_stay_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
    for name in ("training", "export", "quantization", "pruning"):
        assert len((ROOT / "docs" / f"{name}.md").read_text().split()) <= 900, name
