"""The start of a project of the user's own: a script and a TOML file that run as they are written.

Start in write.py; the files beside it are the texts that it writes.
"""

from tfopt.recipe.new_project.write import write_project

__all__ = ["write_project"]
