from . import data, models, recipes, tasks
from .advisor.audit import audit
from .clustering import ClusteringConfig, cluster
from .compression import CompressedModel, CompressionConfig, CompressionReport, compress
from .data.config import DataConfig
from .diagnosis.diagnose import diagnose, profile
from .distillation import CachedTeacher, DistillationConfig, FeaturePair, cache_teacher, distill, end_distillation
from .errors import (
    ArtifactError,
    ConfigError,
    ExportError,
    TfoptError,
    TfoptWarning,
    TrainingError,
    UnsupportedLayerError,
    UnsupportedModelError,
)
from .exporting.config import ExportConfig
from .exporting.export import Artifact, export, export_formats
from .exporting.inspection.inspect import inspect
from .exporting.inspection.record import Inspection
from .exporting.processing.config import PostprocessingConfig, PreprocessingConfig
from .exporting.publishing.publish import PublishedVersion, publish
from .exporting.verification.bench import benchmark
from .exporting.verification.tune_serving import tune_serving
from .exporting.verification.verify import verify
from .hardware import Hardware
from .models.float32_outputs import float32_outputs
from .models.keras_2.from_tf_keras import from_tf_keras
from .profiling.cost import FlopCount, ModelCost, TrainingMemory, count_flops, model_cost, training_memory
from .profiling.monitoring.callback import GpuMonitor
from .profiling.tensor_cores import tensor_core_alignment
from .pruning import (
    PruningConfig,
    PruningSchedule,
    ShrinkSchedule,
    StructuredPruningConfig,
    keep_zeros,
    prune,
    shrink,
)
from .pruning.sensitivity import sensitivity
from .pruning.sensitivity_curves import Sensitivity
from .quantization import QuantizationConfig, QuantizedModel, WeightOnlyConfig, quantization_report, quantize
from .recipe import ModelConfig, Recipe
from .report import Audit, BenchmarkReport, DiagnosisReport, PassReport, Receipt, ServingReport, StepBreakdown
from .runner import RunResult, run
from .training import (
    Ledger,
    NoiseScale,
    Plan,
    TrainingConfig,
    compile,
    ledger,
    plan,
)
from .tuning import BatchSizeConfig, BatchSizeReport, TuneConfig, TuneReport, find_batch_size, tune

__version__: str

__all__ = [
    # recipes
    "Recipe",
    "ModelConfig",
    "DataConfig",
    "RunResult",
    "run",
    "models",
    "recipes",
    "tasks",
    "data",
    # training
    "TrainingConfig",
    "Plan",
    "plan",
    "compile",
    "ledger",
    "Ledger",
    "find_batch_size",
    "BatchSizeConfig",
    "BatchSizeReport",
    "tune",
    "TuneConfig",
    "TuneReport",
    "float32_outputs",
    "tensor_core_alignment",
    "GpuMonitor",
    "NoiseScale",
    "diagnose",
    "profile",
    "DiagnosisReport",
    "StepBreakdown",
    "count_flops",
    "FlopCount",
    "training_memory",
    "TrainingMemory",
    "model_cost",
    "ModelCost",
    "Hardware",
    "audit",
    "Audit",
    # passes
    "from_tf_keras",
    "PruningConfig",
    "PruningSchedule",
    "StructuredPruningConfig",
    "ShrinkSchedule",
    "prune",
    "keep_zeros",
    "shrink",
    "sensitivity",
    "Sensitivity",
    "ClusteringConfig",
    "cluster",
    "DistillationConfig",
    "FeaturePair",
    "cache_teacher",
    "CachedTeacher",
    "distill",
    "end_distillation",
    "CompressionConfig",
    "CompressionReport",
    "CompressedModel",
    "compress",
    "QuantizationConfig",
    "QuantizedModel",
    "WeightOnlyConfig",
    "quantize",
    "quantization_report",
    # artifacts
    "ExportConfig",
    "PreprocessingConfig",
    "PostprocessingConfig",
    "Artifact",
    "export",
    "export_formats",
    "verify",
    "benchmark",
    "inspect",
    "Inspection",
    "publish",
    "tune_serving",
    "PublishedVersion",
    # records and errors
    "PassReport",
    "Receipt",
    "BenchmarkReport",
    "ServingReport",
    "TfoptError",
    "TfoptWarning",
    "ConfigError",
    "ArtifactError",
    "ExportError",
    "TrainingError",
    "UnsupportedModelError",
    "UnsupportedLayerError",
]
