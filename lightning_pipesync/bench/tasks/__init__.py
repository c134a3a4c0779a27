"""What is trained to a target: data that needs no download, a model, and how good it is."""

from lightning_pipesync.bench.tasks.build import EVALUATED_ON, TASK_NAMES, build_task
from lightning_pipesync.bench.tasks.task import Task, evaluations

__all__ = ["EVALUATED_ON", "TASK_NAMES", "Task", "build_task", "evaluations"]
