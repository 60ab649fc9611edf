"""Files and directories that appear whole or not at all, and replace only what tfopt wrote.

Start in files.py, which writes a single file. directories.py replaces a whole artifact. scratch.py makes
temporary directories that do not outlive their process.
"""
