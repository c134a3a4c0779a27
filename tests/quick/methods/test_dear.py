"""DeAR on real processes against DistributedDataParallel."""

from __future__ import annotations

import copy
from functools import cache, partial
from itertools import product
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.storage import unshare_storage
from lightning_pipesync.methods.dear import DeAR
from tests.support.harness import assert_refused, on_ranks, raised
from tests.support.lost_ranks import wait_for
from tests.support.models import OPTIMIZERS, Run, assert_same, batch, loss, seeded_mlp, state, train_ddp

STEPS = 12


def train(optimizer_name: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    run = Run(DeAR, optimizer_name, seeded_mlp(seed=dist.get_rank()), **settings)  # rank 0's weights count
    run.steps(range(STEPS))
    run.sync.flush()
    assert run.sync.flushed
    return run.end()


@cache
def trained_with_ddp(world_size: int, optimizer: str) -> dict[str, Tensor]:
    return on_ranks(train_ddp, world_size, optimizer, STEPS)[0]


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize(
    ("optimizer", "world_size", "fusion"),
    [
        *product(["sgd", "adamw"], [2, 4], [{}]),
        *product(["sgd"], [1, 3], [{}]),
        *product(["adamw"], [2], [{"bucket_mb": 1e-4}, {"fusion": "none"}, {"fusion": "layers", "num_layers": 1}]),
    ],
)
def test_is_ddp(optimizer: str, world_size: int, fusion: dict[str, Any], update: str) -> None:
    """Bit for bit where dividing by the number of ranks is exact; DDP does it before the sum, DeAR after it."""
    expected = trained_with_ddp(world_size, optimizer)
    outcomes = on_ranks(train, world_size, optimizer, {"update": update, **fusion})
    for outcome in outcomes:
        assert_same(outcome, expected, exact=world_size in (1, 2))
        assert_same(outcome, outcomes[0])


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
        (sync or optimizer).step()
    if sync is not None:
        sync.flush()
        sync.detach()
    return state(model)


def test_is_ddp_where_memory_decides_how_products_round() -> None:
    """Products with a single row round by the address of the weights on some processors, which are views of buffers."""
    expected = on_ranks(train_row_by_row, 2, None)[0]
    for outcome in on_ranks(train_row_by_row, 2, {"fusion": "buffer"}):
        assert_same(outcome, expected)


def train_in_turn(optimizer_name: str, methods: tuple[str, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Trains half of the steps with each method; DDP continues from what is saved, and DeAR in what DDP has trained."""
    saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None
    for half, method in enumerate(methods):
        if method == "ddp" or saved is None:
            model = seeded_mlp()
            optimizer = OPTIMIZERS[optimizer_name](model)
        if method == "ddp" and saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        sync = None if method == "ddp" else DeAR(model, optimizer, bucket_mb=1e-4)
        called = model if sync else DistributedDataParallel(model)
        for i in range(half * STEPS // 2, (half + 1) * STEPS // 2):
            optimizer.zero_grad()
            loss(called, i, dist.get_rank()).backward()
            (sync or optimizer).step()
        if sync is not None:
            sync.flush()
            assert not optimizer.state, "the shards are all there is"
        saved = state(model), copy.deepcopy((sync.optimizer_state_dict if sync else optimizer.state_dict)())
        if sync is not None:
            sync.detach()
    assert saved is not None
    return saved


@pytest.mark.parametrize("methods", [("dear", "ddp"), ("ddp", "dear")])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_optimizer_state_is_that_of_ddp(optimizer: str, methods: tuple[str, str]) -> None:
    weights, expected = on_ranks(train_in_turn, 2, optimizer, ("ddp", "ddp"))[0]
    for of_rank, actual in on_ranks(train_in_turn, 2, optimizer, methods):
        assert_same(of_rank, weights)
        assert actual["param_groups"] == expected["param_groups"]
        assert actual["state"].keys() == expected["state"].keys()
        for index, kept in expected["state"].items():
            assert list(actual["state"][index]) == list(kept)
            assert_same(actual["state"][index], kept)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(torch.cat([(one[name] - value).flatten() for name, value in other.items()]).norm())


#: The largest relative error of a value with each codec.
ROUNDING = {"bf16": 2**-8, "fp16": 2**-11, "truncate16": 2**-7}


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("codec", ROUNDING)
def test_weights_with_a_codec_are_near_ddps(codec: str, update: str) -> None:
    """To half a rounding of the way that they have moved, as what a step drops is sent in the next one."""
    expected = trained_with_ddp(2, "sgd")
    moved = distance(state(seeded_mlp()), expected)
    for outcome in on_ranks(train, 2, "sgd", {"update": update, "compression": codec, "bucket_mb": 1e-4}):
        assert 0 < distance(outcome, expected) < ROUNDING[codec] / 2 * moved


def saved_without_waiting() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = Run(DeAR)
    model = run.model
    run.steps(range(3))
    saved = unshare_storage(model.state_dict())
    run.sync.synchronize()
    flushed = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert len({value.untyped_storage().data_ptr() for value in saved.values()}) == len(saved), (
        "each has its own memory"
    )
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
    run.sync.detach()
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == len(saved)
    assert not model._forward_pre_hooks
    return saved, flushed


def test_a_state_dict_is_up_to_date() -> None:
    for saved, flushed in on_ranks(saved_without_waiting, 2):
        assert_same(saved, flushed)


def backward_begins(i: int, events: list[str], *_: Any) -> None:
    if i == 0:
        wait_for(lambda: "reduce_scatter 2" in events)
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
    for events in on_ranks(order_of_events, 2):
        assert events.index("reduce_scatter 2") < events.index("backward 0")
        assert [event for event in events if event.startswith("reduce")] == [f"reduce_scatter {i}" for i in (2, 1, 0)]
        gathers = [event for event in events if event.startswith("all_gather")]
        assert gathers == [f"all_gather {i}" for i in (0, 1, 2)]
        assert events.index("reduce_scatter 0") < events.index("all_gather 0")
        assert events.index("step") < events.index("all_gather 0")


def gathered_in_step(overlap: str) -> list[bool]:
    """Returns after each step whether all weights have arrived; with an overlap none does before."""
    run = Run(DeAR, overlap=overlap, fusion="none")
    sync = run.sync
    all_gather = sync.transport.all_gather
    num_ended, may_arrive = 0, Event()

    def slow(flat: Tensor, **settings: Any) -> Handle[Tensor]:
        gathered = all_gather(flat, **settings)

        def wait() -> Tensor:
            nonlocal num_ended
            assert may_arrive.wait(60)
            result = gathered.wait()
            num_ended += 1
            return result

        return Handle(wait)

    sync.transport.all_gather = slow
    have_arrived = []
    for i in range(4):
        num_ended = 0
        may_arrive.clear() if overlap == "forward" else may_arrive.set()
        run.step(i)
        have_arrived.append(num_ended == len(sync._fused.buckets))
        may_arrive.set()
        sync.synchronize()
    sync.detach()
    return have_arrived


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_without_overlap_weights_have_arrived_when_step_returns(overlap: str) -> None:
    for have_arrived in on_ranks(gathered_in_step, 2, overlap):
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
    for outcomes in on_ranks(misuse, 2):
        assert_refused(outcomes)
