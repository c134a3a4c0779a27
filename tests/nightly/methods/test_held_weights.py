"""One rank's weights that changed by themselves: all ranks say so when weights are consolidated, and name it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_pipesync import DeAR, EAPipe, LocalSGD, ParameterServer, PipeSGD, SelSync
from lightning_pipesync.core.held_weights import REMEDY, HeldWeights, difference
from lightning_pipesync.lightning.sync import RIGHT_OR_WRONG
from lightning_pipesync.methods.servers.coordinator import Coordinator
from lightning_pipesync.methods.servers.messages import Request, SameWeights
from lightning_pipesync.methods.servers.policies import Sequencer, policies
from tests.nightly.shards.test_sharded_replicas import adamw, batch, device_mesh
from tests.support.case_table import launch_cases
from tests.support.ea_pipe_runs import layers, train_on
from tests.support.harness import raised
from tests.support.lightning_models import Classifier, make_strategy, train_loader, trainer, val_loader
from tests.support.models import Run

STRUCK, RANKS = 1, 4
NAN = torch.full((3,), float("nan"))


def held(rank: int, *values: float | Tensor, part: int = 0) -> HeldWeights:
    """What a rank on host h holds: parameters a, b, ... with these values."""
    tensors = [torch.as_tensor(value) for value in values]
    named = [(chr(ord("a") + number), tensor) for number, tensor in enumerate(tensors)]
    found = HeldWeights.of_this_process(rank, named, part)
    return HeldWeights(rank, "h", 10 + rank, found.part, found.names, found.sums)


@pytest.mark.parametrize(
    ("of_ranks", "said"),
    [
        ([held(0, 1.0, NAN), held(1, 1.0, NAN.clone())], None),
        ([held(0, 1.0, part=0), held(1, 2.0, part=1)], None),
        (
            [held(0, 1.0, 2.0), held(1, 1.0, 3.0), held(2, 1.0, 2.0)],
            "Rank 1 (host h, pid 11) is at fault: its weights differ from those of rank 0, 2, first in parameter b (",
        ),
        (
            [held(0, 9.0, 2.0), held(1, 1.0, 3.0), held(2, 1.0, 2.0), held(3, 1.0, 2.0), held(4, 1.0, 2.0)],
            "Ranks 0 (host h, pid 10), 1 (host h, pid 11) are at fault: their weights differ from those of rank 2, 3, "
            "4, first in parameter a (",
        ),
        (
            [held(0, 0.0, 2.0), held(1, -0.0, 2.0)],
            "The ranks hold different weights, first in parameter a, whose checksum is another one: rank 0 (host h, "
            "pid 10) has ",
        ),
        ([held(0, 1.0), held(1, 2.0), held(2, 3.0), held(3, 1.0)], "The ranks hold different weights, first in "),
        ([held(0, 1.0), held(1, 2.0), held(2, 1.0, part=1), held(3, 1.0, part=1)], "The ranks hold different weights"),
    ],
)
def test_who_differs_is_named(of_ranks: Sequence[HeldWeights], said: str | None) -> None:
    text = difference(of_ranks)
    if said is None:
        assert text == ""
        return
    assert text.startswith(said), text
    assert text.endswith(REMEDY)
    assert len({one.digest for one in of_ranks}) > 1


def test_a_digest_is_of_the_parameters_in_their_order() -> None:
    assert held(0, 1.0, 2.0).digest == held(1, 1.0, 2.0).digest
    assert held(0, 1.0, 2.0).digest != held(0, 2.0, 1.0).digest


# --- all methods ----------------------------------------------------------------------------------------------------


@contextmanager
def changing(rank: int, struck: int) -> Iterator[None]:
    """On the rank that is struck, a bit of the last parameter changes in memory before ranks compare."""
    compare = HeldWeights.of_this_process

    def changed(own: int, named: Sequence[tuple[str, Tensor]], *part: int) -> HeldWeights:
        if rank == struck:
            flip(named[-1][1])
        return compare(own, named, *part)

    with patch.object(HeldWeights, "of_this_process", changed):
        yield


def flip(tensor: Tensor) -> None:
    tensor.data.reshape(-1).view(torch.uint8)[2] ^= 0x10


def flushed(step: Callable[[int], object], sync: Any, struck: int = STRUCK) -> dict[str, Any]:
    """Trains and flushes, goes on, and flushes when a bit has changed; returns what both flushes have raised."""
    for number in range(3):
        step(number)
    first = raised(sync.flush)
    sync.resume()
    step(3)
    try:
        with changing(dist.get_rank(), struck):
            return {"first": first, "second": raised(sync.flush)}
    finally:
        sync.detach()


def train(method: type, **settings: Any) -> dict[str, Any]:
    run = Run(method, timeout_s=60, **settings)
    return flushed(run.step, run.sync)


def train_until_nan() -> dict[str, Any]:
    """Flushes weights that are NaN on all ranks."""
    run = Run(DeAR, timeout_s=60)
    run.step(0)
    for parameter in run.model.parameters():
        nn.init.constant_(parameter, float("nan"))
    run.step(1)
    outcome = raised(run.sync.flush)
    is_nan = all(bool(parameter.isnan().all()) for parameter in run.model.parameters())
    run.sync.detach()
    return {"first": outcome, "is_nan": is_nan}


def train_sharded() -> dict[str, Any]:
    """Of two replicas with two ranks each: there is no majority."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    fully_shard(module, mesh=device_mesh()["shards"])
    optimizer = adamw(module)
    sync = DeAR(module, optimizer, timeout_s=60)

    def step(number: int) -> None:
        inputs, targets = batch(dist.get_rank(), number)
        optimizer.zero_grad()
        (module(inputs) - targets).square().mean().backward()
        sync.step()

    return flushed(step, sync)


def train_pipeline(struck: int = STRUCK, **settings: Any) -> dict[str, Any]:
    """The ranks of a pipeline hold the same when they have gathered all layers."""
    model = layers()
    engine = EAPipe(
        model,
        nn.functional.cross_entropy,
        lambda parameters: torch.optim.SGD(parameters, lr=0.05),
        split="parameters",
        timeout_s=60,
        **settings,
    )
    train_on(engine, range(3))
    first = raised(engine.gather)
    train_on(engine, range(3, 5))
    try:
        with changing(dist.get_rank(), struck):
            return {"first": first, "second": raised(engine.gather)}
    finally:
        engine.detach()


CASES: dict[str, partial[dict[str, Any]]] = {
    "dear": partial(train, DeAR),
    "dear, sharded updates": partial(
        train, DeAR, fusion="buffer", bucket_mb=1e-4, update="sharded", compression="int8"
    ),
    "pipe_sgd": partial(train, PipeSGD, staleness=2),
    "selsync": partial(train, SelSync, delta=0.2, smoothing=0.5),
    "selsync, never in a step": partial(train, SelSync, delta=float("inf")),
    "local_sgd": partial(train, LocalSGD, period=3),
    "local_sgd, overlap": partial(
        train, LocalSGD, period=2, overlap_steps=1, outer_optimizer="nesterov", compression="int8"
    ),
    "local_sgd, groups": partial(train, LocalSGD, period=2, ranks_per_replica=2),
    "sync": partial(train, ParameterServer, policy="sync"),
    "k_async": partial(train, ParameterServer, policy="k_async", servers=1),
    "easgd": partial(train, ParameterServer, policy="easgd"),
    "diloco": partial(train, ParameterServer, policy="diloco", k=1),
    "continues after a loss": partial(
        train, ParameterServer, policy="k_async", servers=1, on_lost_rank="continue", compression="int8"
    ),
    "ea_pipe": partial(train_pipeline),
}
SHARDED = {
    "sharded": train_sharded,
    "pipelines": partial(train_pipeline, num_pipelines=2),
}


def kind_of(case: str) -> str:
    """Returns the class of the error: parameter servers have it from the coordinator's message."""
    return "RuntimeError" if CASES[case].args == (ParameterServer,) else "DifferentWeightsError"


def test_all_ranks_name_the_one_whose_weights_have_changed() -> None:
    """In each method, at the next flush."""
    outcomes = launch_cases({**CASES, **SHARDED, "nan": train_until_nan}, RANKS)
    for case in CASES:
        for outcome in outcomes[case]:
            assert outcome["first"] is None, (case, outcome)
            kind, message = outcome["second"] or ("", "")
            assert kind == kind_of(case), (case, outcome)
            assert message.startswith(f"Rank {STRUCK} (host "), (case, message)
            assert "is at fault: its weights differ from those of rank 0, 2, 3, first in parameter " in message
    for case in SHARDED:
        for outcome in outcomes[case]:
            assert outcome["first"] is None, (case, outcome)
            kind, message = outcome["second"] or ("", "")
            assert kind == "DifferentWeightsError"
            assert message.startswith("The ranks hold different weights, first in parameter "), (case, outcome)
            assert f"rank {STRUCK} (host " in message
    for outcome in outcomes["nan"]:
        assert outcome == {"first": None, "is_nan": True}


def test_the_coordinator_does_not_wait_for_who_is_lost() -> None:
    """Whether one is lost before it has told what it holds, or after it."""
    sent: list[tuple[int, Any]] = []
    sequencer = Sequencer(policies(3, 2, 1, 1)["k_async"], range(4))
    coordinator = Coordinator(sequencer, lambda *what: sent.append(what), range(4), [0], keep_log=False)
    for rank in range(4):
        coordinator.request(rank, Request.RETIRE)
    for rank in (3, 0, 2):
        coordinator.compare_weights(held(rank, 1.0 if rank < 3 else 2.0))
    coordinator.forget_rank(3)
    coordinator.compare_weights(held(3, 2.0))
    assert SameWeights() not in [message for _, message in sent]
    coordinator.forget_rank(1)
    assert [rank for rank, message in sent if message == SameWeights()] == [0, 2]


# --- before a checkpoint is written ---------------------------------------------------------------------------------


class Flips(pl.Callback):
    """After the third step, a bit of a weight of one rank changes."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == STRUCK:
            trainer.strategy.method.synchronize()
            flip(next(module.parameters()))


def fit(directory: Path) -> dict[str, Any]:
    saves = ModelCheckpoint(directory / "saved", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    strategy = make_strategy({"name": "dear", "timeout_s": 60})
    callbacks = [Flips(), saves, OnExceptionCheckpoint(directory / "after", "error")]
    run = trainer(strategy, int(os.environ["WORLD_SIZE"]), directory, callbacks=callbacks, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        outcome = raised(lambda: run.fit(Classifier(), train_loader(), val_loader()))
    return {
        "outcome": outcome,
        "said": [str(one.message) for one in said if "after an error" in str(one.message)],
        "saved": sorted(path.name for path in (directory / "saved").glob("*.ckpt")),
    }


def test_no_checkpoint_is_written(tmp_path: Path) -> None:
    """But one that is saved after an error, which says so."""
    outcomes = launch_cases({"fit": partial(fit, tmp_path)}, 3)["fit"]
    assert any(RIGHT_OR_WRONG in text for text in outcomes[0]["said"]), outcomes[0]["said"]
    for outcome in outcomes:
        kind, message = outcome["outcome"]
        assert kind == "DifferentWeightsError"
        assert message.splitlines()[-1].startswith(f"Rank {STRUCK} (host "), message
        assert outcome["saved"] == ["step=2.ckpt"]
