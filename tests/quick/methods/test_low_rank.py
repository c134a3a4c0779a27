"""Low-rank factors of gradients: all methods follow PowerSGD and ACP-SGD, bit for bit; bytes, values, refusals."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.gradients.low_rank import LowRankBucket, LowRankGradients
from lightning_pipesync.training.registry import METHODS
from tests.references.low_rank_algorithms import ACPSGD, PowerSGD, mean
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, raised
from tests.support.method_runs import FACTORIZED, SMALL, begin
from tests.support.models import OPTIMIZERS, batch, loss, seeded_mlp

STEPS, RANK = 10, 2
ALGORITHMS = {"acp_sgd": ACPSGD, "power_sgd": PowerSGD}
SEARCH = {"fusion": "random", "trial_steps": 4, "max_trials": 2, "search_mb": (1e-4, 1e-3)}
#: By case: the method, further settings, and how the loop differs.
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    **{method: (method, {}, set()) for method in FACTORIZED},
    **{f"{method}, missing gradients": (method, {}, {"missing"}) for method in FACTORIZED},
    "dear, one bucket": ("dear", {"fusion": "buffer", "bucket_mb": 25.0}, set()),
    "dear, a search": ("dear", SEARCH, set()),
    "dear, without overlap": ("dear", {"overlap": "none"}, set()),
    "dear, accumulated": ("dear", {}, {"accumulated"}),
    "dear, clipped": ("dear", {}, {"clipped"}),
    "dear, bf16": ("dear", {}, {"bf16"}),
    "dear, without feedback": ("dear", {"error_feedback": False}, set()),
    "dear, full rank": ("dear", {"low_rank": 6, "fusion": "none"}, set()),
    "pipe_sgd, level 2, k=2": ("pipe_sgd", {"pipeline_level": 2, "segments": 2, "staleness": 2}, set()),
    "pipe_sgd, synchronous": ("pipe_sgd", {"staleness": 0}, {"accumulated", "clipped"}),
}


def made(loop: set[str]) -> nn.Module:
    return seeded_mlp().to(torch.bfloat16 if "bf16" in loop else torch.float32)


def backward(model: nn.Module, step: int, rank: int, loop: set[str]) -> None:
    if "bf16" in loop:
        x, y = batch(step, rank)
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
    elif "missing" in loop and (step % 5 == 3 or (rank and step % 2)):  # of the last layer, on both ranks or on one
        model.get_submodule("0")(batch(step, rank)[0]).square().mean().backward()
    else:
        loss(model, step, rank).backward()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(case: str, low_rank_method: str) -> list[Tensor]:
    """Returns the weights after each step."""
    method, settings, loop = CASES[case]
    run = begin(method, "sgd", made(loop), **{"low_rank": RANK, "low_rank_method": low_rank_method, **settings})
    weights, rank = [], dist.get_rank()
    for step in range(STEPS):
        run.optimizer.zero_grad()
        if "accumulated" in loop:
            with run.sync.no_sync():
                backward(run.model, step + 100, rank, loop)
        backward(run.model, step, rank, loop)
        if "clipped" in loop:
            run.sync.clip_value(0.01)
        run.sync.step()
        run.sync.synchronize()
        weights.append(flat(run.model))
    run.sync.detach()
    return weights


def reference(case: str, low_rank_method: str, world_size: int) -> list[Tensor]:
    method, settings, loop = CASES[case]
    model = made(loop)
    optimizer, parameters = OPTIMIZERS["sgd"](model), list(model.parameters())
    feedback, low_rank = settings.get("error_feedback", True), settings.get("low_rank", RANK)
    make = partial(ALGORITHMS[low_rank_method], rank=low_rank, workers=world_size, feedback=feedback)
    # Factors that are not smaller than the gradient are not made.
    algorithms = [make(p.shape) if p.dim() > 1 and low_rank * sum(p.shape) < p.numel() else None for p in parameters]
    staleness = settings.get("staleness", 1) if method == "pipe_sgd" else 0
    weights, in_flight = [], deque[list[Tensor | None]]()
    for step in range(STEPS):
        gradients = []
        for rank in range(world_size):
            optimizer.zero_grad()
            if "accumulated" in loop:
                backward(model, step + 100, rank, loop)
            backward(model, step, rank, loop)
            gradients.append([p.grad for p in parameters])
        in_flight.append([aggregated(algorithms[i], [own[i] for own in gradients]) for i in range(len(parameters))])
        if len(in_flight) > staleness:
            for parameter, gradient in zip(parameters, in_flight.popleft(), strict=True):
                parameter.grad = gradient
            if "clipped" in loop:
                nn.utils.clip_grad_value_(parameters, 0.01)
            optimizer.step()
        weights.append(flat(model))
    return weights


def aggregated(algorithm: PowerSGD | None, gradients: list[Tensor | None]) -> Tensor | None:
    """The mean gradient; None if no rank has one. Then factors of zero are summed."""
    shape, dtype = next(((g.shape, g.dtype) for g in gradients if g is not None), (None, None))
    if algorithm is not None:
        whole = algorithm.aggregate(gradients)
        return None if shape is None else whole.view(shape).to(dtype)
    if shape is None:
        return None
    return mean([torch.zeros(shape) if g is None else g.float() for g in gradients]).to(dtype)


def assert_follows(rows: Sequence[tuple[str, str]], world_size: int) -> None:
    """Asserts that each rank has the reference's weights after each step: of cases, each with an algorithm."""
    outcomes = launch_cases({row: partial(train, *row) for row in rows}, world_size)
    for row in rows:
        expected = reference(*row, world_size)
        for outcome in outcomes[row]:
            for step, (weights, other) in enumerate(zip(outcome, expected, strict=True)):
                assert torch.equal(weights, other), f"{row}, step {step}: off by {(weights - other).abs().max()}"


def test_follows_the_algorithm() -> None:
    """Each method on two ranks, and each way of a loop."""
    others = ("dear, missing gradients", "dear, accumulated", "dear, full rank", "pipe_sgd, synchronous")
    assert_follows([*product(FACTORIZED, ALGORITHMS), *((case, "acp_sgd") for case in others)], 2)


def averaged(
    low_rank_method: str, gradients: Sequence[Tensor | None], shape: Tensor, autocast: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Returns what one rank makes of gradients of a parameter like ``shape`` in turn, and what remains to be sent."""
    parameter = nn.Parameter(torch.zeros_like(shape))
    settings = DeARConfig(low_rank=2, low_rank_method=low_rank_method)
    factors = LowRankGradients([NamedParameter("weight", parameter, "", (0, 0))], settings)
    bucket, views = LowRankBucket(factors, [parameter], 1), []
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        for gradient in gradients:
            view = torch.zeros_like(shape) if gradient is None else gradient.clone()
            for round_ in range(bucket.num_rounds):
                bucket.start(round_, [view], [gradient is not None])
                bucket.finish(round_, [view])
            views.append(view)
    return views, factors.state_dict()["weight"]["residual"]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("low_rank_method", ALGORITHMS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_step_within_autocast_multiplies_factors_as_one_without(
    low_rank_method: str, memory_format: torch.memory_format
) -> None:
    gradients = [drawn(12, 4, 3, 3, seed=seed).to(memory_format=memory_format) for seed in range(4)]
    (views, left), (others, other) = (averaged(low_rank_method, gradients, gradients[0], on) for on in (True, False))
    assert all(map(torch.equal, [*views, left], [*others, other]))


@pytest.mark.parametrize("low_rank_method", ALGORITHMS)
def test_a_matrix_that_is_used_in_turns_is_trained_in_all_directions(low_rank_method: str) -> None:
    """As that of one of two heads, every other step: a factor of zeros would leave the next one the first columns."""
    gradient = drawn(12, 9, seed=1)
    views, left = averaged(low_rank_method, [gradient, None] * 100, gradient)
    torch.testing.assert_close(sum(views[::2]) + left, 100 * gradient, rtol=1e-4, atol=1e-3)
    assert left.norm() < 25 * gradient.norm(), "what is left does not grow with the number of steps: it would be 88"


def sent_in_a_step(low_rank: int | None, low_rank_method: str) -> int:
    model = nn.Linear(64, 64)
    settings = {"low_rank": low_rank, "low_rank_method": low_rank_method, "overlap": "none", "fusion": "buffer"}
    sync = DeAR(model, SGD(model.parameters(), lr=0.1), **settings, **SMALL)
    for step in range(3):
        before = sync.transport.traffic.total_bytes_sent
        model(torch.full((2, 64), 1.0 + step)).square().mean().backward()
        sync.step()
        sync.synchronize()
    sent = sync.transport.traffic.total_bytes_sent - before
    sync.detach()
    return sent


def test_bytes_are_those_of_the_factors() -> None:
    """On two ranks each sends half of what it has, and half of the average: 64 x 64 weights and 64 biases, or less."""
    rows = {"none": (None, "acp_sgd"), "acp_sgd": (2, "acp_sgd"), "power_sgd": (2, "power_sgd")}
    outcomes = launch_cases({name: partial(sent_in_a_step, *row) for name, row in rows.items()}, 2)
    sent = {name: outcomes[name][0] for name in rows}
    assert sent["none"] - sent["acp_sgd"] == 4 * (64 * 64 - 2 * 64)
    assert sent["power_sgd"] - sent["acp_sgd"] == 4 * 2 * 64


BOTH = {"low_rank": 4, "compression": "int8"}


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("dear", {"low_rank": 4, "low_rank_method": "svd"}, ["low_rank_method", "'svd'", "acp_sgd"]),
        ("dear", {"low_rank": 4, "update": "sharded"}, ["low_rank=4", "update='sharded'", "update='replicated'"]),
        ("selsync", {"low_rank": 4}, ["low_rank=4", "aggregation='parameters'", "aggregation='gradients'"]),
        ("dear", BOTH, ["low_rank=4", "compression='int8'", "compression='none'"]),
        ("pipe_sgd", BOTH, ["low_rank=4", "compression='int8'", "compression='none'"]),
        ("selsync", {**BOTH, "aggregation": "gradients"}, ["low_rank=4", "compression='int8'", "compression='none'"]),
    ],
)
def test_what_does_not_go_with_it_is_refused(method: str, settings: dict[str, Any], words: list[str]) -> None:
    assert_raised(raised(lambda: METHODS[method].config_type(**settings)), "ValueError", *words)
