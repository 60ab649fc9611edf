from .scores import SCORES, BitsPerByte, MeanAbsoluteError, MeanIoU, Score
from .task import TASKS, Task

__all__ = [
    "TASKS",
    "Task",
    "SCORES",
    "Score",
    "MeanIoU",
    "BitsPerByte",
    "MeanAbsoluteError",
]
