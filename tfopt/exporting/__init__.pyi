from .config import ExportConfig
from .export import Artifact, export
from .processing.config import PostprocessingConfig, PreprocessingConfig
from .publishing.publish import PublishedVersion, publish
from .verification.process import SavedModelProcess, time_in_turns
from .verification.verify import verify, verify_together

__all__ = [
    "Artifact",
    "ExportConfig",
    "PostprocessingConfig",
    "PreprocessingConfig",
    "PublishedVersion",
    "SavedModelProcess",
    "export",
    "publish",
    "time_in_turns",
    "verify",
    "verify_together",
]
