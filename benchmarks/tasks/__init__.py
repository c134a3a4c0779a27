"""Tasks to train to a target quality: with data that packages ship, and with the papers' data, of the user's disk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.tasks import cifar, recipes, words
from benchmarks.tasks import imagenet as image_files
from benchmarks.tasks.digits import digits, resnet_digits
from benchmarks.tasks.layout import Layout
from benchmarks.tasks.mnist1d import mnist1d
from benchmarks.tasks.recipes import Recipe
from benchmarks.tasks.signals import signals
from benchmarks.tasks.task import DEVICES, Task, evaluations
from benchmarks.tasks.tiny_llama import tiny_llama
from benchmarks.tasks.topics import topics
from benchmarks.tasks.topics_muon import topics_muon

__all__ = [
    "EVALUATED_ON",
    "READ_TASKS",
    "RECIPES",
    "TASKS",
    "Task",
    "build_task",
    "check_choice",
    "check_data",
    "evaluations",
]

#: How the papers train each of their models, by the task's name and the model's.
RECIPES = recipes.RECIPES
#: The tasks by name.
TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "resnet_digits": resnet_digits,
    "topics": topics,
    "words": words.words,
    "mnist1d": mnist1d,
    "signals": signals,
    "tiny_llama": tiny_llama,
    "topics_muon": topics_muon,
}
#: By name the tasks of the papers, which read their data from a folder, with its layout.
READ_TASKS: dict[str, tuple[Callable[[Path, Recipe], Task], Layout]] = {
    "cifar10": (cifar.cifar10, cifar.CIFAR10_LAYOUT),
    "cifar100": (cifar.cifar100, cifar.CIFAR100_LAYOUT),
    "imagenet": (image_files.imagenet, image_files.LAYOUT),
    "wikitext": (words.wikitext, words.LAYOUT),
}
#: The sets that the quality can be measured on.
EVALUATED_ON = ("test", "validation")


def build_task(
    name: str,
    evaluate_on: str = "test",
    data: Path | str | None = None,
    model: str | None = None,
    workers: int = 0,
    device: str = "cpu",
) -> Task:
    """Returns the task of a name; with ``evaluate_on="validation"``, that of :meth:`Task.with_validation`.

    Args:
        name: in :data:`TASKS` or :data:`READ_TASKS`.
        evaluate_on: in :data:`EVALUATED_ON`.
        data: the folder with the data set, for :data:`READ_TASKS`.
        model: the model of a paper, in :data:`RECIPES`; None: the first one.
        workers: number of processes that load the samples of each rank.
        device: in :data:`DEVICES`.

    Raises:
        ValueError: the name or the model is unknown, or the data set is not in the folder.
        ModuleNotFoundError: the package with its data is not installed.
    """
    check_choice(name, data, model, workers, device)
    if name in TASKS:
        task = TASKS[name]()
    else:
        read, _ = READ_TASKS[name]
        task = read(Path(data or ""), RECIPES[name][model or next(iter(RECIPES[name]))])
    task = replace(task, workers=workers, device=device)
    return task if evaluate_on == "test" else task.with_validation()


def check_choice(name: str, data: Path | str | None, model: str | None, workers: int, device: str) -> None:
    """Raises ValueError if there is no such task, or the other options are not for it; reads nothing."""
    if name not in TASKS and name not in READ_TASKS:
        raise ValueError(f"task={name!r} is not known; there are {', '.join([*TASKS, *READ_TASKS])}.")
    for option, value in (("data", data), ("model", model)):
        if name in TASKS and value is not None:
            raise ValueError(
                f"{option}={str(value)!r} has no effect on task={name!r}, which has data and a model of its own: leave "
                f"it out, or choose a task of {', '.join(READ_TASKS)}."
            )
    if workers < 0:
        raise ValueError(f"workers must be at least 0, got {workers!r}.")
    if device not in DEVICES:
        raise ValueError(f"device={device!r} must be one of {', '.join(DEVICES)}.")
    if name in READ_TASKS:
        if data is None:
            _, layout = READ_TASKS[name]
            raise ValueError(f"task={name!r} needs data=FOLDER. {layout.expected}")
        if model is not None and model not in RECIPES[name]:
            raise ValueError(f"model={model!r} is not one of task={name!r}: {', '.join(RECIPES[name])}.")


def check_data(name: str, data: Path | str | None) -> None:
    """Raises ValueError if a file of the task's data set is missing; reads none."""
    if name in READ_TASKS:
        READ_TASKS[name][1].check(Path(data or ""))
