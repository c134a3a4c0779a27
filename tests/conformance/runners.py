"""One training on every framework, by a method or, without one, by DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.conformance import trainer
from tests.conformance.loops import AccelerateLoop, FabricLoop, Loop, PlainLoop, run_loop
from tests.conformance.methods import Method
from tests.conformance.pipelines import AcceleratePipelineLoop, PipelineLoop, VirtualPipelineLoop
from tests.conformance.shards import ShardedAccelerateLoop, ShardedFabricLoop, ShardedPlainLoop
from tests.conformance.training import Checkpoint, Options, Result

LOOPS: dict[str, type[Loop]] = {"plain": PlainLoop, "fabric": FabricLoop, "accelerate": AccelerateLoop}
PIPELINE_LOOPS: dict[str, type[Loop]] = {"plain": PipelineLoop, "accelerate": AcceleratePipelineLoop}
SHARDED_LOOPS: dict[str, type[Loop]] = {
    "plain": ShardedPlainLoop,
    "fabric": ShardedFabricLoop,
    "accelerate": ShardedAccelerateLoop,
}


def train(
    framework: str,
    method: Method | None,
    settings: dict[str, Any],
    options: Options,
    *,
    save: Checkpoint | None = None,
    resume: Checkpoint | None = None,
) -> Result:
    """Trains on this rank.

    Args:
        framework: one of FRAMEWORKS.
        method: None: DistributedDataParallel in the same framework.
        settings: the method's.
        options: see :class:`Options`.
        save: the checkpoint is ``path`` with the number of steps appended.
        resume: what to go on from.
    """
    if framework == "lightning":
        return trainer.fit(method, settings, options, save, resume)
    return run_loop(
        _loop(framework, method, options.ranks_per_replica > 1), method, settings, options, save=save, resume=resume
    )


def train_plainly(method: Method, settings: dict[str, Any], options: Options, batches: list[list[int]]) -> Result:
    """Trains by the same method on given batches in a plain loop; a pipeline on virtual stages, in this process."""
    loop = VirtualPipelineLoop if method.pipeline else PlainLoop
    return run_loop(loop, method, settings, options, batches)


def saved_weights(framework: str, method: Method | None, path: Path) -> Tensor:
    """Returns the weights in a checkpoint, which can be loaded with ``weights_only=True``."""
    if framework == "lightning":
        return trainer.saved_weights(path)
    return _loop(framework, method).saved_weights(path)


def _loop(framework: str, method: Method | None, sharded: bool = False) -> type[Loop]:
    if sharded:
        return SHARDED_LOOPS[framework]
    return (PIPELINE_LOOPS if method is not None and method.pipeline else LOOPS)[framework]
