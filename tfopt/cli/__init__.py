"""The command `tfopt`: its subcommands, their options and its exit codes.

Start in entry.py, which runs one command. commands.py, artifacts.py, bench.py, lists.py, data.py and programs.py have a
function for each command; costs.json holds the costs of the lists, and the folder new_project what `tfopt init` writes.
"""

from tfopt.cli.entry import COMMANDS, HELP, main

__all__ = ["COMMANDS", "HELP", "main"]
