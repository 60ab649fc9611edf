"""The plain records that passes, plans, measurements and verifications return.

Start in record.py, the base of all. A record holds only numbers and text, prints as a short table and becomes JSON.
This package does not import TensorFlow. An unknown value is `None`, and `unavailable` gives the reason.
"""

from tfopt.report.audit import Audit, OpWithoutKernel
from tfopt.report.benchmark import BenchmarkedModel, BenchmarkReport, CallTimes, Fastest
from tfopt.report.profile import Diagnosis, DiagnosisReport, OperatorTime, StepBreakdown, TraceSummary
from tfopt.report.receipt import MARKED_LOSS, Receipt, lost_score, score_change, score_names
from tfopt.report.record import Change, Decision, PassReport, Record, Skip
from tfopt.report.run_report import Phase, RunReport, Utilization
from tfopt.report.serving import ManyRequests, ServingTimes, ThreadTimes
from tfopt.report.serving_report import FastestServed, ServedModel, ServingReport
from tfopt.report.tuned_serving import BatchSpeed, TunedServing

__all__ = [
    "Audit",
    "BatchSpeed",
    "BenchmarkReport",
    "BenchmarkedModel",
    "CallTimes",
    "Change",
    "Decision",
    "Diagnosis",
    "DiagnosisReport",
    "Fastest",
    "FastestServed",
    "MARKED_LOSS",
    "ManyRequests",
    "OpWithoutKernel",
    "OperatorTime",
    "PassReport",
    "Phase",
    "Receipt",
    "Record",
    "RunReport",
    "ServedModel",
    "ServingReport",
    "ServingTimes",
    "Skip",
    "StepBreakdown",
    "ThreadTimes",
    "TraceSummary",
    "TunedServing",
    "Utilization",
    "lost_score",
    "score_change",
    "score_names",
]
