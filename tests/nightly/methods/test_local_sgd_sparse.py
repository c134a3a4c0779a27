"""SparseLoCo, as local SGD composes it, on real processes against its one page, bit for bit; and what it refuses."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from lightning_pipesync import LocalSGD
from lightning_pipesync.core.codecs import ChunkedTopK
from lightning_pipesync.core.comm.transport import Transport
from tests.references.sparse_loco import quantized_top_k, simulate
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import Run, assert_same, state

STEPS, RESUMED = 11, 5
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]

#: Settings beside those of the paper, and what the reference is told of them.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it is": ({}, {}),
    "with an outer learning rate": ({"outer_optimizer": "sgd", "outer_lr": 0.7}, {"outer_lr": 0.7}),
    "with another decay": ({"residual_decay": 0.5}, {"decay": 0.5}),
    "with another k": ({"compression": ChunkedTopK(k=32)}, {"k": 32}),
    "in fragments": ({"fragments": 2}, {"fragments": [NAMES[:2], NAMES[2:]]}),
}


def network(seed: int = 0) -> nn.Module:
    """Several chunks of values, of which the last is shorter."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(x) - x.roll(1, dims=1)).square().mean()


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01)


def train(settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], float]:
    """Returns this rank's weights, its residuals and the MiB that it has sent; resumed within a round."""

    def begin(model: nn.Module) -> tuple[nn.Module, AdamW, LocalSGD]:
        optimizer = adamw(model)
        given = {"period": 3, "lr_scale": 1.0, "compression": "chunked_topk", **settings}
        return model, optimizer, LocalSGD(model, optimizer, **given)

    model, optimizer, sync = begin(network())
    for step in range(STEPS):
        if step == RESUMED:
            sync.flush()
            weights, saved = state(model), copy.deepcopy(sync.state_dict())
            sync.detach()
            model, optimizer, sync = begin(network(1))
            model.load_state_dict(weights)
            sync.load_state_dict(saved)
        before = sync.metrics()["mib_sent"]
        optimizer.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        sync.step()
        if step == 2:
            sent = sync.metrics()["mib_sent"] - before
    residuals = sync.state_dict()["units"][0]["fragments"]["replicas"]["feedback"]
    own = state(model)
    sync.detach()
    return own, residuals, sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_follows_the_paper(world_size: int) -> None:
    """Weights and residuals; each rank sends what it has encoded to each other rank, once a round."""
    outcomes = launch_cases({name: partial(train, settings) for name, (settings, _) in CASES.items()}, world_size)
    for name, (settings, told) in CASES.items():
        told = {"fragments": [NAMES], **told}
        shape = {"world_size": world_size, "num_steps": STEPS, "period": 3}
        replicas, errors = simulate(network(), adamw, loss, **shape, **told)
        for rank, (own, residuals, sent) in enumerate(outcomes[name]):
            assert_same(own, replicas[rank].state_dict(), f"{name}, rank {rank}")
            for residual, error in zip(residuals, errors[rank], strict=True):
                assert residual.keys() == {"contribution"}, "values are encoded once"
                assert torch.equal(residual["contribution"], -error), f"{name}: of movements, not of gradients"
            if "fragments" not in settings:
                codec = ChunkedTopK(told.get("k", 64))
                wire = codec.wire_bytes(errors[rank][0].numel(), torch.float32)
                flags = world_size - 1  # a byte to each rank, that it has taken as many steps
                assert sent * 2**20 == pytest.approx((world_size - 1) * wire + flags, abs=16)


def sums(numel: int) -> list[Tensor]:
    """Returns the sums of values whose order of summation shows, under way at once, and with a topology of hosts."""
    transport = Transport(timeout_s=60)
    flats = [random(numel, dtype) for dtype in (torch.float32, torch.bfloat16)]
    handles = [transport.all_reduce(flat, codec="chunked_topk", background=bool(i)) for i, flat in enumerate(flats)]
    for handle in handles:
        handle.wait()
    refusal = raised(lambda: transport.all_reduce(flats[0], codec="chunked_topk", shard_hook=lambda own: own))
    assert_raised(refusal, "ValueError", "ChunkedTopK", "shard_hook")
    transport.close()
    return flats


def random(numel: int, dtype: torch.dtype, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    values = torch.randn(numel, generator=generator) * 10 ** (4 * torch.rand(numel, generator=generator))
    return values.to(dtype)


def test_all_ranks_sum_in_the_same_order() -> None:
    """In that of the ranks, of values of all sizes; wires of the last size travel in a ring."""
    sizes = (0, 1, 4096, 10_000, 4096 * 2500)
    outcomes = launch_cases({numel: partial(sums, numel) for numel in sizes}, 4)
    for numel in sizes:
        for place, dtype in enumerate((torch.float32, torch.bfloat16)):
            if 64 <= numel < 10**6:
                of_ranks = [quantized_top_k(random(numel, dtype, rank).float(), 64) for rank in range(4)]
                expected = ((of_ranks[0] + of_ranks[1]) + of_ranks[2] + of_ranks[3]).to(dtype)
                assert torch.equal(outcomes[numel][0][place], expected) or dtype == torch.bfloat16, numel
            for flats in outcomes[numel]:
                assert torch.equal(flats[place], outcomes[numel][0][place]), numel


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"outer_optimizer": "nesterov"}, ["residual_decay", "outer_optimizer='nesterov'", "set outer_optimizer='sgd'"]),
    ({"outer_optimizer": "adam"}, ["outer_optimizer='adam'", "compression='int4'"]),
    ({"outer_optimizer": "elastic"}, ["outer_optimizer='elastic'", "compression='int4'"]),
    ({"outer_optimizer": "sgd", "outer_momentum": 0.4}, ["outer_momentum=0.4", "set outer_momentum=0.0"]),
    ({"participation": 0.5}, ["participation=0.5", "chunked_topk"]),
    ({"neighbors": "ring"}, ["neighbors='ring'", "chunked_topk"]),
    ({"residual_decay": 0.0}, ["residual_decay", "0.0"]),
    ({"residual_decay": 1.5}, ["residual_decay", "1.5"]),
    ({"residual_decay": "paper"}, ["residual_decay", "'paper'", "'auto'"]),
]


def refusals() -> list[tuple[str, str] | None]:
    def begin(settings: dict[str, Any]) -> None:
        model = network()
        LocalSGD(model, adamw(model), compression="chunked_topk", **settings)

    return [raised(lambda settings=settings: begin(settings)) for settings, _ in REFUSED]


def test_bad_input_is_named_on_every_rank() -> None:
    for of_rank in launch_cases({"": refusals}, 2)[""]:
        for outcome, (_, words) in zip(of_rank, REFUSED, strict=True):
            assert_raised(outcome, "ValueError", *words)


@pytest.mark.parametrize("k", [0, 3, 48, 8192, -4])
def test_k_is_a_power_of_two(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k={k} of compression='chunked_topk'.*from 4 to 4096"):
        ChunkedTopK(k=k)


def train_from_loaded(loads: bool, codec: str) -> dict[str, Tensor]:
    """Trains from the initial weights; before, others were trained for some rounds, and given up."""
    run = Run(LocalSGD, lambda model: SGD(model.parameters(), lr=0.05), period=2, compression=codec)
    initial = state(run.model)
    if loads:
        run.steps(range(20, 26))
        run.model.load_state_dict(initial)
    run.steps(range(8))
    return run.end()


@pytest.mark.parametrize("codec", ["chunked_topk", "int2"])
def test_nothing_remains_of_weights_that_were_given_up(codec: str) -> None:
    """Of what was not sent of their movements, which a codec keeps."""
    for loaded, anew in zip(*(on_ranks(train_from_loaded, 2, loads, codec) for loads in (True, False)), strict=True):
        assert_same(loaded, anew)
