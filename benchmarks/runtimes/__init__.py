"""Runtimes that int8_savedmodel.py compares tfopt with: each a worker process in an environment of its own."""
