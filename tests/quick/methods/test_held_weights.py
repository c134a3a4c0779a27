"""One rank's weights that changed by themselves: all ranks say so when weights are consolidated, and name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import DeAR, EAPipe
from lightning_pipesync.core.fingerprints import checksum
from lightning_pipesync.core.held_weights import REMEDY, HeldWeights, difference
from lightning_pipesync.training.registry import METHODS
from tests.conformance.shards import device_mesh, shard
from tests.conformance.training import Options
from tests.support.case_table import launch_cases
from tests.support.ea_pipe_runs import layers, train_on
from tests.support.harness import assert_raised, raised
from tests.support.models import OPTIMIZERS, Run, loss, seeded_mlp

STRUCK, RANKS = 1, 4
NAN = torch.full((3,), float("nan"))


def held(rank: int, *values: float | Tensor, part: int = 0) -> HeldWeights:
    """What a rank on host h holds: parameters a, b, ... with these values."""
    named = [(chr(ord("a") + number), torch.as_tensor(value)) for number, value in enumerate(values)]
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


@contextmanager
def changing() -> Iterator[None]:
    """On the rank that is struck, a bit of the last parameter changes in memory before ranks compare."""
    compare = HeldWeights.of_this_process

    def changed(own: int, named: Sequence[tuple[str, Tensor]], *part: int) -> HeldWeights:
        if dist.get_rank() == STRUCK:
            flip(named[-1][1])
        return compare(own, named, *part)

    with patch.object(HeldWeights, "of_this_process", changed):
        yield


def flip(tensor: Tensor) -> None:
    tensor.data.reshape(-1).view(torch.uint8)[2] ^= 0x10


def flushed(step: Callable[[int], object], sync: Any, flush: Callable[[], object] | None = None) -> dict[str, Any]:
    """Trains and flushes, goes on, and flushes when a bit has changed; returns what both flushes have raised."""
    flush = flush or sync.flush
    try:
        for number in range(3):
            step(number)
        first = raised(flush)
        if flush == sync.flush:
            sync.resume()
        step(3)
        with changing():
            return {"first": first, "second": raised(flush)}
    finally:
        sync.detach()


def train(name: str, **settings: Any) -> dict[str, Any]:
    run = Run(METHODS[name], timeout_s=60, **settings)
    return flushed(run.step, run.sync)


def train_sharded() -> dict[str, Any]:
    """Of two replicas with two ranks each: there is no majority."""
    module = shard(seeded_mlp(), device_mesh(Options(ranks=RANKS, ranks_per_replica=2))["shards"])
    optimizer = OPTIMIZERS["adamw"](module)
    sync = DeAR(module, optimizer, timeout_s=60)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(module, number, dist.get_rank()).backward()
        sync.step()

    return flushed(step, sync)


def train_pipeline(**settings: Any) -> dict[str, Any]:
    """The ranks of a pipeline hold the same when they have gathered all layers."""
    sgd = partial(torch.optim.SGD, lr=0.05)
    engine = EAPipe(layers(), nn.functional.cross_entropy, sgd, split="parameters", timeout_s=60, **settings)
    return flushed(lambda number: train_on(engine, range(number, number + 1)), engine, engine.gather)


INT8 = {"compression": "int8"}
CASES: dict[str, partial[dict[str, Any]]] = {
    "dear": partial(train, "dear"),
    "dear, sharded updates": partial(train, "dear", fusion="buffer", bucket_mb=1e-4, update="sharded", **INT8),
    "pipe_sgd": partial(train, "pipe_sgd", staleness=2),
    "selsync": partial(train, "selsync", delta=0.2, smoothing=0.5),
    "selsync, never in a step": partial(train, "selsync", delta=float("inf")),
    "local_sgd": partial(train, "local_sgd", period=3),
    "local_sgd, overlap": partial(train, "local_sgd", period=2, overlap_steps=1, outer_optimizer="nesterov", **INT8),
    "local_sgd, groups": partial(train, "local_sgd", period=2, ranks_per_replica=2),
    "sync": partial(train, "parameter_server", policy="sync"),
    "k_async": partial(train, "parameter_server", policy="k_async", servers=1),
    "easgd": partial(train, "parameter_server", policy="easgd"),
    "diloco": partial(train, "parameter_server", policy="diloco", k=1),
    "continues": partial(train, "parameter_server", policy="k_async", servers=1, on_lost_rank="continue", **INT8),
    "ea_pipe": partial(train_pipeline),
}
#: Only two ranks hold the same part: there is no majority.
IN_PAIRS = {"sharded": train_sharded, "pipelines": partial(train_pipeline, num_pipelines=2)}


def test_all_ranks_name_the_one_whose_weights_have_changed() -> None:
    """In each method, at the next flush; parameter servers have it from the coordinator's message."""
    outcomes = launch_cases({**CASES, **IN_PAIRS}, RANKS)
    for case in (*CASES, *IN_PAIRS):
        words = (f"Rank {STRUCK} (host ", "is at fault: its weights differ from those of rank 0, 2, 3, first in param")
        if case in IN_PAIRS:
            words = ("The ranks hold different weights, first in parameter ", f"rank {STRUCK} (host ")
        is_server = case in CASES and CASES[case].args == ("parameter_server",)
        for outcome in outcomes[case]:
            assert outcome["first"] is None, (case, outcome)
            assert_raised(outcome["second"], "RuntimeError" if is_server else "DifferentWeightsError", *words)
            assert outcome["second"][1].startswith(words[0]), (case, outcome)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 7, 18])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_a_checksum_is_of_the_bits_wherever_they_are(dtype: torch.dtype, numel: int, offset: int) -> None:
    values = torch.randint(0, 2, (numel + offset,), generator=torch.Generator().manual_seed(1)).to(dtype)[offset:]
    assert torch.equal(checksum(values), checksum(values.clone()))
    flipped = values.clone()
    data = flipped.view(torch.uint8)
    for place in range(data.numel()):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert not torch.equal(checksum(values), checksum(flipped)), (place, bit)
            data[place] ^= 1 << bit


def test_a_checksum_of_special_values_and_of_memory_that_is_freed() -> None:
    """NaN is itself, and zeros have a checksum, too; torch refuses to free memory that NumPy has seen."""
    nans = torch.full((9,), float("nan"))
    assert torch.equal(checksum(nans), checksum(nans.clone()))
    assert checksum(torch.zeros(8)).item() != 0
    assert not torch.equal(checksum(torch.zeros(8)), checksum(-torch.zeros(8)))
    matrix = torch.arange(12.0).view(3, 4)
    assert torch.equal(checksum(matrix.t()), checksum(matrix.t().contiguous()))
    values = torch.ones(100)
    checksum(values)
    checksum(values[1:])
    values.untyped_storage().resize_(0)
