"""Tasks to train to a target quality, with data that needs no download."""

from collections.abc import Callable

from lightning_pipesync.lab.bench.tasks.digits import digits
from lightning_pipesync.lab.bench.tasks.mnist1d import mnist1d
from lightning_pipesync.lab.bench.tasks.signals import signals
from lightning_pipesync.lab.bench.tasks.task import Task, evaluations
from lightning_pipesync.lab.bench.tasks.topics import topics

__all__ = ["EVALUATED_ON", "TASK_NAMES", "Task", "build_task", "evaluations"]

_TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "mnist1d": mnist1d, "signals": signals, "topics": topics}

#: The names for :func:`build_task`.
TASK_NAMES = tuple(_TASKS)
#: The sets that the quality can be measured on.
EVALUATED_ON = ("test", "validation")


def build_task(name: str, evaluate_on: str = "test") -> Task:
    """Returns a task.

    Args:
        name: one of ``TASK_NAMES``.
        evaluate_on: ``test``, or ``validation``: a part of the training data, see :meth:`Task.with_validation`.

    Raises:
        ValueError: the name is unknown.
        ModuleNotFoundError: the package with its data is not installed.
    """
    if name not in _TASKS:
        raise ValueError(f"task={name!r} is not known; there are {', '.join(TASK_NAMES)}.")
    task = _TASKS[name]()
    return task if evaluate_on == "test" else task.with_validation()
