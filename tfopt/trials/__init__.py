"""Trials: settings that optuna proposes, each tried in a process of its own, so that a crash costs one trial.

Start in study.py, which proposes; process.py runs a function in a process of its own, and child.py is that process.
"""
