"""Diagnosis of a training: where the time of a step goes, and which setting changes it.

Start in diagnose.py; watching/ times the steps of a fit, experiments.py the step alone, and rules/ has the causes.
"""

from tfopt.diagnosis.diagnose import diagnose, observe_fit, profile, report
from tfopt.diagnosis.watching.observation import Observation

__all__ = ["Observation", "diagnose", "observe_fit", "profile", "report"]
