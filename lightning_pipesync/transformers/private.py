"""The only place that touches a private name of transformers, so that an upgrade breaks one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_pipesync.core.private_names import missing, require


@contextmanager
def accelerator_of_transformers(make: Callable[..., Any]) -> Iterator[None]:
    """Within it a Trainer of transformers makes its Accelerator by calling ``make``.

    Raises:
        RuntimeError: it has made one in another way.
    """
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
