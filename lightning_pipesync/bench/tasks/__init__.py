"""What is trained to a target: data that needs no download, a model, and how good it is."""

from lightning_pipesync.bench.tasks.build import TASK_NAMES, build_task
from lightning_pipesync.bench.tasks.task import Task

__all__ = ["TASK_NAMES", "Task", "build_task"]
