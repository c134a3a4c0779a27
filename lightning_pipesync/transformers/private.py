"""The only module that uses private names of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning_pipesync.core.private_names import missing, require, with_attributes


@contextmanager
def accelerator_of_transformers(make: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which transformers' Trainer creates its Accelerator by calling ``make``."""
    from transformers import trainer

    made = []

    def made_here(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    require(trainer, "Accelerator")
    with with_attributes(trainer, Accelerator=made_here):
        yield
    if not made:
        raise missing(trainer, "Accelerator")


def skipping_batches(skip: Callable[[Any, int], Any]) -> AbstractContextManager[None]:
    """Context manager in which transformers' Trainer calls ``skip(loader, number)`` to resume within an epoch."""
    from transformers import trainer

    require(trainer, "skip_first_batches")
    return with_attributes(trainer, skip_first_batches=skip)


def count_logs_from_here(trainer: Any) -> None:
    """Has a Trainer log the losses, and tell the speed, of its steps from the present one on."""
    require(trainer, "_globalstep_last_logged")
    trainer._globalstep_last_logged = trainer.state.global_step
    if hasattr(trainer, "_initial_global_step"):  # since transformers 5.19
        trainer._initial_global_step = trainer.state.global_step
