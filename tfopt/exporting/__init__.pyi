from .config import ExportConfig
from .export import Artifact, export, export_formats
from .inspection.inspect import inspect
from .inspection.record import Inspection
from .processing.config import PostprocessingConfig, PreprocessingConfig
from .publishing.publish import PublishedVersion, publish
from .verification.bench import benchmark
from .verification.process import SavedModelProcess, time_in_turns
from .verification.tune_serving import tune_serving
from .verification.verify import verify, verify_together

__all__ = [
    "Artifact",
    "ExportConfig",
    "SavedModelProcess",
    "export",
    "export_formats",
    "benchmark",
    "Inspection",
    "inspect",
    "PostprocessingConfig",
    "PreprocessingConfig",
    "PublishedVersion",
    "publish",
    "time_in_turns",
    "tune_serving",
    "verify",
    "verify_together",
]
