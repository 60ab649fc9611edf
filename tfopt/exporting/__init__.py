"""Exporting: artifacts that need only TensorFlow, and what they are measured to be."""

from tfopt.exporting.config import ExportConfig
from tfopt.exporting.process import SavedModelProcess, time_in_turns
from tfopt.exporting.saved_model import Artifact, export
from tfopt.exporting.verify import verify, verify_together

__all__ = ["Artifact", "ExportConfig", "SavedModelProcess", "export", "time_in_turns", "verify", "verify_together"]
