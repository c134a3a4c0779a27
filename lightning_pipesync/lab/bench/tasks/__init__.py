"""Tasks to train to a target quality, with data that needs no download."""

from lightning_pipesync.lab.bench.tasks.build import EVALUATED_ON, TASK_NAMES, build_task
from lightning_pipesync.lab.bench.tasks.task import Task, evaluations

__all__ = ["EVALUATED_ON", "TASK_NAMES", "Task", "build_task", "evaluations"]
