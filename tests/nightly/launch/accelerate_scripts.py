"""The test scripts that ship with Accelerate, with our Accelerator in place of theirs."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import accelerate
import accelerate.accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from lightning_pipesync import PipeSyncAccelerator

SCRIPTS = "accelerate.test_utils.scripts"


def script(name: str) -> ModuleType:
    """The module of a script, which finds our Accelerator where it looks for theirs."""
    accelerate.Accelerator = accelerate.accelerator.Accelerator = PipeSyncAccelerator
    return importlib.import_module(f"{SCRIPTS}.{name}")


def checks() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The checks by name, as the scripts' own ``main`` calls them."""
    yield "test_script", script("test_script").main
    yield "test_ops", script("test_ops").main
    sync = script("test_sync")
    yield "test_sync.dataloader_break", sync.test_dataloader_break
    yield "test_sync.distributed_sync", lambda: sync.test_distributed_sync(PipeSyncAccelerator())
    yield "test_sync.multiple_fwd", lambda: sync.test_distributed_sync_multiple_fwd(PipeSyncAccelerator())
    flags = list(itertools.product((False, True), repeat=2))
    for sync_each_batch in (False, True):
        for kind in ("gradient_accumulation", "gradient_accumulation_with_opt_and_scheduler"):
            run = partial(getattr(sync, f"test_{kind}"), sync_each_batch=sync_each_batch)
            yield f"test_sync.{kind}, sync_each_batch={sync_each_batch}", lambda run=run: [run(*one) for one in flags]
    # The others of external_deps load data and metrics from the network.
    with patch.dict(sys.modules, evaluate=Mock(), datasets=Mock()):
        metrics = script("external_deps.test_metrics")
    yield (
        "test_metrics.torch_metrics",
        lambda: [metrics.test_torch_metrics(PipeSyncAccelerator(), num_samples) for num_samples in (99, 128)],
    )
    for kind in ("with_non_tensor_objects_iterable_dataset", "with_iterable_dataset", "drop_last"):
        yield f"test_metrics.{kind}", getattr(metrics, f"test_gather_for_metrics_{kind}")


def run() -> dict[str, str]:
    """Runs the checks, and returns what each raised; nothing for those that passed."""
    PartialState.destroy_process_group = lambda *_: None  # each script would end the processes of the next
    outcomes = {}
    for name, check in checks():
        for state in (AcceleratorState, GradientState):
            state._reset_state()
        try:
            check()
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        else:
            outcomes[name] = ""
    return outcomes
