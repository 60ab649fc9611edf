"""The command `tfopt`: its subcommands, their options and its exit codes.

Start in entry.py, which runs one command; commands.py has a function for each.
"""

from tfopt.cli.commands import COMMANDS
from tfopt.cli.entry import HELP, main

__all__ = ["COMMANDS", "HELP", "main"]
