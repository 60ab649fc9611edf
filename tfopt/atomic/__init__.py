"""Files and directories that appear whole or not at all, also when a process is killed.

Start in files.py, which writes a single file. directories.py replaces a whole artifact.
"""
