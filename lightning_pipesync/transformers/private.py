"""The only module that uses private names of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_pipesync.core.private_names import missing, require


@contextmanager
def accelerator_of_transformers(make: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which transformers' Trainer creates its Accelerator by calling ``make``."""
    from transformers import trainer

    made = []

    def made_here(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    require(trainer, "Accelerator")
    theirs = trainer.Accelerator
    trainer.Accelerator = made_here
    try:
        yield
    finally:
        trainer.Accelerator = theirs
    if not made:
        raise missing(trainer, "Accelerator")
