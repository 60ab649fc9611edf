"""Diagnosis of a training: where the time of a step goes, and which setting changes it.

Start in diagnose.py; watch.py times the steps of a fit, experiments.py the step alone, and rules/ has the causes.
"""
