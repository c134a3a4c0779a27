"""Tasks to train to a target quality, with data that needs no download."""

from collections.abc import Callable

from lightning_pipesync.lab.bench.tasks.digits import digits
from lightning_pipesync.lab.bench.tasks.task import Task, evaluations
from lightning_pipesync.lab.bench.tasks.topics import topics

__all__ = ["EVALUATED_ON", "TASKS", "Task", "build_task", "evaluations"]

#: The tasks by name.
TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "topics": topics}
#: The sets that the quality can be measured on.
EVALUATED_ON = ("test", "validation")


def build_task(name: str, evaluate_on: str = "test") -> Task:
    """Returns the task of a name; with ``evaluate_on="validation"``, that of :meth:`Task.with_validation`.

    Raises:
        ValueError: the name is unknown.
        ModuleNotFoundError: the package with its data is not installed.
    """
    if name not in TASKS:
        raise ValueError(f"task={name!r} is not known; there are {', '.join(TASKS)}.")
    task = TASKS[name]()
    return task if evaluate_on == "test" else task.with_validation()
