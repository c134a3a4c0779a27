"""Why there is no ``Fabric(strategy="ea_pipe")``."""

from __future__ import annotations

from typing import NoReturn


def refuse_ea_pipe() -> NoReturn:
    """EA-Pipe cannot be a strategy of Fabric.

    Raises:
        ValueError: always; the message says what to do instead.
    """
    raise ValueError(
        "strategy='ea_pipe' cannot run under Fabric, whose loop makes the backward pass of one mini-batch at a time; a "
        "pipeline has several on their way. Use Fabric(strategy='ddp') and, after launch(), "
        "lightning_pipesync.EAPipe(layers, loss, optimizer_factory) with train_batch(batch) in the loop, in place of "
        "fabric.setup(); or Trainer(strategy='ea_pipe')."
    )
