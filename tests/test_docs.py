"""The Python in README and docs runs, block after block, in a process and a directory of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks(page, "python"))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_toml_in_docs_is_a_recipe(tmp_path):
    from tfopt.recipe import Recipe

    (toml,) = blocks(ROOT / "docs" / "recipes.md", "toml")
    (tmp_path / "wide.toml").write_text(toml)
    recipe = Recipe.from_toml(tmp_path / "wide.toml")
    assert recipe.model.arguments["filters"] == [12, 32]
    assert recipe.pruning.target_sparsity == 0.9


def test_commands_in_readme_parse():
    """Each `tfopt` line of the README names a command that exists, with flags that exist."""
    from tfopt.cli import COMMANDS
    from tfopt.recipe import Recipe
    from tfopt.settings.flags import expand

    lines = re.findall(r"^    tfopt (\w+)(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) >= 5
    for command, rest in lines:
        assert command in COMMANDS
        if command == "run":
            words = rest.partition("#")[0].split()[1:]
            expand(Recipe, [word for word in words if word not in ("--quick", "--full", "--allow-code")])


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page, target)
