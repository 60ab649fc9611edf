"""A recipe: the model, the data and the settings of every stage, as plain data that TOML can hold.

Start in recipe.py; model.py has its model, changes.py lays other settings over a recipe, tables.py makes tables of its
settings. The settings of the stages are here too, so that a file with a recipe imports all its words from one place.
"""

from tfopt.clustering.config import ClusteringConfig
from tfopt.data.config import DataConfig
from tfopt.distillation.config import TeacherConfig
from tfopt.pruning import PruningConfig, StructuredPruningConfig
from tfopt.quantization import QuantizationConfig
from tfopt.recipe.changes import with_changes
from tfopt.recipe.model import ModelConfig
from tfopt.recipe.recipe import QUICK_EPOCHS, QUICK_EXAMPLES, QUICK_STEPS, Recipe, read_changes
from tfopt.recipe.tables import Difference, differences
from tfopt.training import TrainingConfig

__all__ = [
    "ClusteringConfig", "DataConfig", "Difference", "ModelConfig", "PruningConfig", "QUICK_EPOCHS", "QUICK_EXAMPLES",
    "QUICK_STEPS", "QuantizationConfig", "Recipe", "StructuredPruningConfig", "TeacherConfig", "TrainingConfig",
    "differences", "read_changes", "with_changes",
]  # fmt: skip
