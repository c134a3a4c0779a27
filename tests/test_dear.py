"""DeAR on real processes against DistributedDataParallel."""

from __future__ import annotations

import time
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.storage import unshare_storage
from lightning_pipesync.methods.dear import DeAR
from tests.case_table import Outcomes, launch_cases
from tests.harness import assert_refused, launch, raised
from tests.models import OPTIMIZERS, batch, loss, seeded_mlp, state, train_ddp

STEPS = 12


def train(optimizer_name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    model = seeded_mlp(seed=dist.get_rank())  # rank 0's weights count
    optimizer = OPTIMIZERS[optimizer_name](model)
    sync = DeAR(model, optimizer, **settings)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
    sync.flush()
    assert sync.flushed
    sync.detach()
    return state(model)


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], exact: bool = True) -> None:
    for name, value in expected.items():
        if exact:
            assert torch.equal(actual[name], value), f"{name}: off by {(actual[name] - value).abs().max()}"
        else:
            torch.testing.assert_close(actual[name], value)


@cache
def trained_with_ddp(world_size: int, optimizer: str) -> dict[str, Tensor]:
    return launch(train_ddp, world_size, optimizer, STEPS)[0]


UPDATES = ("sharded", "replicated")
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *product(["sgd", "adamw"], [2, 4], [{}]),
    *product(["sgd"], [1, 3], [{}]),
    *product(["adamw"], [2], [{"bucket_mb": 1e-4}, {"fusion": "none"}, {"fusion": "layers", "num_layers": 1}]),
]


@cache
def trained(world_size: int) -> Outcomes:
    """By optimizer, fusion and update."""
    cases = {
        (optimizer, str(fusion), update): partial(train, optimizer, {"update": update, **fusion})
        for update, (optimizer, ranks, fusion) in product(UPDATES, CASES)
        if ranks == world_size
    }
    return launch_cases(cases, world_size)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(("optimizer", "world_size", "fusion"), CASES)
def test_is_ddp(optimizer: str, world_size: int, fusion: dict[str, Any], update: str) -> None:
    """Bit for bit where dividing by the number of ranks is exact; DDP does it before the sum, DeAR after it."""
    expected = trained_with_ddp(world_size, optimizer)
    outcomes = trained(world_size)[optimizer, str(fusion), update]
    for outcome in outcomes:
        assert_same_state(outcome, expected, exact=world_size in (1, 2))
        assert_same_state(outcome, outcomes[0])


def train_row_by_row(settings: dict[str, Any] | None) -> dict[str, Tensor]:
    """Trains on one sample at a time, with DeAR or, without settings, with DDP."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 27), nn.Tanh(), nn.Linear(27, 9), nn.Tanh(), nn.Linear(9, 3))
    optimizer = OPTIMIZERS["sgd"](model)
    trained = DistributedDataParallel(model) if settings is None else model
    sync = None if settings is None else DeAR(model, optimizer, **settings)
    for i in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(i, dist.get_rank(), size=1)
        nn.functional.cross_entropy(trained(x), y).backward()
        optimizer.step() if sync is None else sync.step()
    if sync is not None:
        sync.flush()
        sync.detach()
    return state(model)


def test_is_ddp_where_memory_decides_how_products_round() -> None:
    """Products with a single row round by the address of the weights on some processors, which are views of buffers."""
    expected = launch(train_row_by_row, 2, None)[0]
    for outcome in launch(train_row_by_row, 2, {"fusion": "buffer"}):
        assert_same_state(outcome, expected)


def interchange(optimizer_name: str, world: str) -> dict[str, Any]:
    """Trains half of the steps with DDP and half with DeAR, or the other way round, and all of them with DDP."""
    rank = dist.get_rank()

    def run(model: Any, optimizer: Any, step: Any, steps: range) -> None:
        for i in steps:
            optimizer.zero_grad()
            loss(model, i, rank).backward()
            step()

    def begin() -> tuple[Any, Any]:
        model = seeded_mlp()
        return model, OPTIMIZERS[optimizer_name](model)

    model, optimizer = begin()
    run(DistributedDataParallel(model), optimizer, optimizer.step, range(STEPS))
    expected = {"model": state(model), "optimizer": optimizer.state_dict()}
    model, optimizer = begin()
    if world == "to ddp":
        sync = DeAR(model, optimizer, bucket_mb=1e-4)
        run(model, optimizer, sync.step, range(STEPS // 2))
        sync.flush()
        weights, saved = state(model), sync.optimizer_state_dict()
        assert not optimizer.state, "the shards are all there is"
        sync.detach()
        model, optimizer = begin()
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        run(DistributedDataParallel(model), optimizer, optimizer.step, range(STEPS // 2, STEPS))
        return {"expected": expected, "model": state(model), "optimizer": optimizer.state_dict()}
    run(DistributedDataParallel(model), optimizer, optimizer.step, range(STEPS // 2))
    sync = DeAR(model, optimizer, bucket_mb=1e-4)
    run(model, optimizer, sync.step, range(STEPS // 2, STEPS))
    sync.flush()
    saved = sync.optimizer_state_dict()
    sync.detach()
    return {"expected": expected, "model": state(model), "optimizer": saved}


@pytest.mark.parametrize("world", ["to ddp", "from ddp"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_optimizer_state_is_that_of_ddp(optimizer: str, world: str) -> None:
    for outcome in launch(interchange, 2, optimizer, world):
        assert_same_state(outcome["model"], outcome["expected"]["model"])
        expected, actual = outcome["expected"]["optimizer"], outcome["optimizer"]
        assert actual["param_groups"] == expected["param_groups"]
        assert actual["state"].keys() == expected["state"].keys()
        for index, kept in expected["state"].items():
            assert list(actual["state"][index]) == list(kept)
            assert_same_state(actual["state"][index], kept)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("codec", ["bf16", "fp16", "truncate16", "int8", "topk"])
def test_compression_keeps_the_ranks_together(codec: str, update: str) -> None:
    expected = trained_with_ddp(2, "sgd")
    outcomes = launch(train, 2, "sgd", {"update": update, "compression": codec, "bucket_mb": 1e-4})
    for outcome in outcomes:
        assert_same_state(outcome, outcomes[0])
        if codec != "topk":
            for name, value in expected.items():
                torch.testing.assert_close(outcome[name], value, rtol=0.05, atol=0.02)


def saved_without_waiting() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = DeAR(model, optimizer)
    for i in range(3):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
    saved = unshare_storage(model.state_dict())
    sync.synchronize()
    flushed = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert len({value.untyped_storage().data_ptr() for value in saved.values()}) == len(saved), (
        "each has its own memory"
    )
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
    sync.detach()
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == len(saved)
    assert not model._forward_pre_hooks
    return saved, flushed


def test_a_state_dict_is_up_to_date() -> None:
    for saved, flushed in launch(saved_without_waiting, 2):
        assert_same_state(saved, flushed)


def backward_begins(i: int, events: list[str], *_: Any) -> None:
    time.sleep(0.05)  # the other thread's turn
    events.append(f"backward {i}")


def order_of_events() -> list[str]:
    """Three layers of one bucket each, in three steps."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = DeAR(model, optimizer, fusion="layers", num_layers=1)
    events: list[str] = []
    transport = sync.transport
    names = {}

    def recording(kind: str, start: Any) -> Any:
        def run(flat: Tensor, **settings: Any) -> Any:
            events.append(f"{kind} {names.get(flat.untyped_storage().data_ptr())}")
            return start(flat, **settings)

        return run

    transport.reduce_scatter = recording("reduce_scatter", transport.reduce_scatter)  # type: ignore[method-assign]
    transport.all_gather = recording("all_gather", transport.all_gather)  # type: ignore[method-assign]
    for step in range(3):
        if step == 2:
            sync.synchronize()
            events.clear()
            for i, layer in enumerate(model):
                bucket = sync._fused.buckets[sync._fused.index_of[id(layer.weight)]]
                assert {id(member.tensor) for member in bucket.members} == {id(p) for p in layer.parameters()}
                names[bucket.gradients.flat.untyped_storage().data_ptr()] = i
                names[bucket.values.flat.untyped_storage().data_ptr()] = i
                layer.register_full_backward_pre_hook(partial(backward_begins, i, events))
        optimizer.zero_grad()
        model(torch.ones(2, 64).requires_grad_()).sum().backward()
        events.append("step")
        sync.step()
    sync.flush()
    sync.detach()
    return events


def test_both_pipes() -> None:
    """BackPipe reduces a layer under the backward pass of the one before it; FeedPipe gathers the first layer first."""
    for events in launch(order_of_events, 2):
        assert events.index("reduce_scatter 2") < events.index("backward 0")
        assert [event for event in events if event.startswith("reduce")] == [f"reduce_scatter {i}" for i in (2, 1, 0)]
        gathers = [event for event in events if event.startswith("all_gather")]
        assert gathers == [f"all_gather {i}" for i in (0, 1, 2)]
        assert events.index("reduce_scatter 0") < events.index("all_gather 0")
        assert events.index("step") < events.index("all_gather 0")


def gathered_in_step(overlap: str) -> list[bool]:
    """Returns after each step but the first whether all weights have arrived; the network is slow."""
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = DeAR(model, optimizer, overlap=overlap, fusion="none")
    all_gather = sync.transport.all_gather
    num_ended = 0

    def slow(flat: Tensor, **settings: Any) -> Handle[Tensor]:
        gathered = all_gather(flat, **settings)

        def wait() -> Tensor:
            nonlocal num_ended
            time.sleep(0.02)
            result = gathered.wait()
            num_ended += 1
            return result

        return Handle(wait)

    sync.transport.all_gather = slow  # type: ignore[method-assign]
    have_arrived = []
    for i in range(4):
        num_ended = 0
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
        have_arrived.append(num_ended == len(sync._fused.buckets))
        sync.synchronize()
    sync.detach()
    return have_arrived


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_without_overlap_weights_have_arrived_when_step_returns(overlap: str) -> None:
    for have_arrived in launch(gathered_in_step, 2, overlap):
        assert have_arrived == [overlap == "none"] * 4


def misuse() -> dict[str, tuple[str, str] | None]:
    """Returns, by the word that the message must hold, what is raised."""
    model = seeded_mlp()
    sgd = OPTIMIZERS["sgd"](model)

    class Normalized(torch.optim.SGD):
        """Not element-wise, for all we know."""

    outcomes = {
        "update": raised(lambda: DeAR(model, sgd, update="half")),
        "fusion": raised(lambda: DeAR(model, sgd, fusion="some")),
        "bucket_mb": raised(lambda: DeAR(model, sgd, bucket_mb=0)),
        "num_layers": raised(lambda: DeAR(model, sgd, fusion="layers", num_layers=0)),
        "zip": raised(lambda: DeAR(model, sgd, compression="zip")),
        "timeout_s": raised(lambda: DeAR(model, sgd, timeout_s=0)),
        "LBFGS": raised(lambda: DeAR(model, torch.optim.LBFGS(model.parameters()))),
        "'replicated'": raised(lambda: DeAR(model, Normalized(model.parameters()), update="sharded")),
        "bucket_mb: rank 0 has 1.0, rank 1 has 2.0": raised(lambda: DeAR(model, sgd, bucket_mb=1.0 + dist.get_rank())),
    }
    sync = DeAR(model, Normalized(model.parameters()))
    outcomes["SGD is not"] = raised(lambda: sync.step(optimizer=sgd))
    assert (raised(sync.optimizers[0].step) or ("", ""))[1].startswith("Normalized.step() was called directly")
    sync.detach()
    DeAR(model, Normalized(model.parameters()), update="sharded", elementwise=(Normalized,)).detach()
    return outcomes


def test_misuse_is_named_on_all_ranks() -> None:
    for outcomes in launch(misuse, 2):
        assert_refused(outcomes)
