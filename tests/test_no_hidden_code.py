"""tfopt calls no eval, pickle or shell, except in the places listed here, each with its reason."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "tfopt"
BY_NAME = {"eval", "exec", "__import__"}
OF_MODULES = {
    ("os", "system"),
    ("os", "popen"),
    *(("pickle", name) for name in ("load", "loads", "Unpickler")),
    *(("marshal", name) for name in ("load", "loads")),
    *((name, "load") for name in ("joblib", "dill", "cloudpickle")),
}
ALLOWED = {
    ("scripts/run_script.py", "exec"),  # the user's own script, which the command was given to run
}


def test_no_eval_pickle_or_shell():
    found = set()
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = str(file.relative_to(ROOT))
            function = node.func
            if isinstance(function, ast.Name) and function.id in BY_NAME:
                found.add((name, function.id))
            if isinstance(function, ast.Attribute) and (ast.unparse(function.value), function.attr) in OF_MODULES:
                found.add((name, ast.unparse(function)))
            for keyword in node.keywords:
                is_on = not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                if keyword.arg in ("shell", "allow_pickle") and is_on:
                    found.add((name, keyword.arg))
    assert found == ALLOWED
