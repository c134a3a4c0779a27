"""All tasks, by name."""

from __future__ import annotations

from collections.abc import Callable

from lightning_pipesync.bench.tasks.digits import digits
from lightning_pipesync.bench.tasks.task import Task
from lightning_pipesync.bench.tasks.topics import topics

_TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "topics": topics}

#: What :func:`build_task` knows.
TASK_NAMES = tuple(_TASKS)


def build_task(name: str) -> Task:
    """Returns a task.

    Raises:
        ValueError: the name is unknown.
        ModuleNotFoundError: its data come with a package that is not installed.
    """
    if name not in _TASKS:
        raise ValueError(f"task={name!r} is not known; there are {', '.join(TASK_NAMES)}.")
    return _TASKS[name]()
