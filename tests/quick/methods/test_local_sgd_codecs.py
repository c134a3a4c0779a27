"""SparseLoCo and MuLoCo, as local SGD, codecs and Muon compose them, on real processes against a page each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from lightning_pipesync import LocalSGD
from lightning_pipesync.core.codecs import ChunkedTopK
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.training.presets import PRESETS
from tests.references import muloco, sparse_loco
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.models import Run, assert_same, state

STEPS, RESUMED, PERIOD = 11, 5, 3
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]

#: Settings beside those of SparseLoCo, and what its reference is told of them.
SPARSE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
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


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.01)]


def train(
    optimizers_of: Callable[[nn.Module], list[Optimizer]], settings: dict[str, Any], num_steps: int = STEPS
) -> tuple[dict[str, Tensor], list[Tensor], list[float], float]:
    """Returns this rank's weights, residuals, factors on learning rates, and MiB of a round; resumed within a round."""

    def begin(model: nn.Module) -> tuple[nn.Module, list[Optimizer], LocalSGD]:
        optimizers = optimizers_of(model)
        return model, optimizers, LocalSGD(model, optimizers, **settings)

    model, optimizers, sync = begin(network())
    sent = [0.0]
    for step in range(num_steps):
        if step == RESUMED:
            sync.flush()
            weights, saved = state(model), sync.state_dict()
            sync.detach()
            model, optimizers, sync = begin(network(1))
            model.load_state_dict(weights)
            sync.load_state_dict(saved)
        loss(model, step, dist.get_rank()).backward()
        before = sync.metrics()["mib_sent"]
        for optimizer in optimizers:
            sync.step(optimizer=optimizer)
            optimizer.zero_grad()
        sent.append(sync.metrics()["mib_sent"] - before)
    buckets = sync.state_dict()["replicas"][0]["weights"]["buckets"]
    residuals = [bucket["feedback"] for bucket in buckets if "feedback" in bucket]
    scales = [replica.lr_scale for replica in sync._replicas]
    sync.detach()
    return state(model), [tensor for kept in residuals for tensor in kept.values()], scales, sent[PERIOD]


@pytest.mark.parametrize("world_size", [2, 3])
def test_sparse_loco_follows_the_paper(world_size: int) -> None:
    """Weights and residuals; each rank sends what it has encoded, and that is once, to each other rank in a round."""
    given = {"period": PERIOD, "lr_scale": 1.0, "compression": "chunked_topk"}
    cases = {name: partial(train, adamw, {**given, **settings}) for name, (settings, _) in SPARSE.items()}
    outcomes = launch_cases(cases, world_size)
    for name, (settings, told) in SPARSE.items():
        told = {"fragments": [NAMES], "world_size": world_size, "num_steps": STEPS, "period": PERIOD, **told}
        replicas, errors = sparse_loco.simulate(network(), lambda model: adamw(model)[0], loss, **told)
        for rank, (own, residuals, _, sent) in enumerate(outcomes[name]):
            assert_same(own, replicas[rank].state_dict(), f"{name}, rank {rank}")
            for residual, error in zip(residuals, errors[rank], strict=True):
                assert torch.equal(residual, -error), f"{name}: of movements, not of gradients"
            if "fragments" not in settings:
                wire = ChunkedTopK(told.get("k", 64)).wire_bytes(errors[rank][0].numel(), torch.float32)
                flags = world_size - 1  # a byte to each rank, that it has taken as many steps
                assert sent * 2**20 == pytest.approx((world_size - 1) * wire + flags, abs=16)


@pytest.mark.parametrize("world_size", [2, 3])
def test_muloco_follows_the_paper(world_size: int) -> None:
    cases = {
        "preset": partial(train, muloco.muon_and_adamw, {**PRESETS["muloco"].settings, "period": PERIOD}),
        "scales": partial(train, muloco.muon_and_adamw, {"period": 100}, 20),
    }
    outcomes = launch_cases(cases, world_size)
    replicas = muloco.simulate(network(), loss, world_size=world_size, num_steps=STEPS, period=PERIOD)
    for rank, (own, *_) in enumerate(outcomes["preset"]):
        assert_same(own, replicas[rank].state_dict(), f"rank {rank}")
    for _, _, (of_muon, of_adamw), _ in outcomes["scales"]:  # Muon's steps are as long on a rank alone
        assert of_muon == 1
        assert 1 < of_adamw <= world_size**0.5 + 1e-9


def sums(numel: int) -> list[Tensor]:
    """Returns the sums of values whose order of summation shows, under way at once."""
    transport = Transport(timeout_s=60)
    flats = [values_of(numel, dtype, dist.get_rank()) for dtype in (torch.float32, torch.bfloat16)]
    handles = [transport.all_reduce(flat, codec="chunked_topk", background=bool(i)) for i, flat in enumerate(flats)]
    for handle in handles:
        handle.wait()
    refusal = raised(lambda: transport.all_reduce(flats[0], codec="chunked_topk", shard_hook=lambda own: own))
    assert_raised(refusal, "ValueError", "ChunkedTopK", "shard_hook")
    transport.close()
    return flats


def values_of(numel: int, dtype: torch.dtype, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator) * 10 ** (4 * torch.rand(numel, generator=generator))
    return values.to(dtype)


def train_from_loaded(loads: bool, codec: str) -> dict[str, Tensor]:
    """Trains from the initial weights; before, others were trained for some rounds, and given up."""
    run = Run(LocalSGD, lambda model: SGD(model.parameters(), lr=0.05), period=2, compression=codec)
    initial = state(run.model)
    if loads:
        run.steps(range(20, 26))
        run.model.load_state_dict(initial)
    run.steps(range(8))
    return run.end()


def test_what_a_sparse_codec_sums_and_keeps() -> None:
    """All ranks sum in the same order, that of the ranks; wires of the last size travel in a ring.

    Nothing remains of weights that were given up: of what was not sent of their movements, which a codec keeps.
    """
    sizes = (0, 1, 4096, 10_000, 4096 * 2500)
    outcomes = launch_cases(
        {
            **{numel: partial(sums, numel) for numel in sizes},
            **{(codec, loads): partial(train_from_loaded, loads, codec) for codec in CODECS for loads in (True, False)},
        },
        3,
    )
    for numel in sizes:
        for flats in outcomes[numel]:
            assert all(map(torch.equal, flats, outcomes[numel][0])), numel
        if 64 <= numel < 10**6:
            of_ranks = [sparse_loco.quantized_top_k(values_of(numel, torch.float32, rank), 64) for rank in range(3)]
            assert torch.equal(outcomes[numel][0][0], of_ranks[0] + of_ranks[1] + of_ranks[2])
    for codec in CODECS:
        for loaded, anew in zip(outcomes[codec, True], outcomes[codec, False], strict=True):
            assert_same(loaded, anew, codec)


CODECS = ("chunked_topk", "int2")


@pytest.mark.parametrize("k", [0, 3, 48, 8192, -4])
def test_k_is_a_power_of_two(k: int) -> None:
    with pytest.raises(ValueError, match=rf"k={k} of compression='chunked_topk'.*from 4 to 4096"):
        ChunkedTopK(k=k)
