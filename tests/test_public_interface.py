"""What users write and read stays as it is recorded, until somebody changes it on purpose."""

import difflib
from pathlib import Path

RECORD = Path(__file__).with_name("public_interface.txt")


def test_names_commands_toml_and_the_manifest_are_those_recorded(tmp_path, fresh_python):
    # In a process of its own: the width of the terminal, and which modules are loaded, would show.
    script = tmp_path / "public_interface.py"
    script.write_text(RECORD.with_suffix(".py").read_text())
    fresh_python(script, imported="keras", check=True)
    now, recorded = script.with_suffix(".txt").read_text(), RECORD.read_text()
    changes = list(difflib.unified_diff(recorded.splitlines(), now.splitlines(), "recorded", "now", n=0, lineterm=""))
    words = "If users shall see this change, run tests/public_interface.py and commit what it writes.\n"
    assert not changes, words + "\n".join(changes)
