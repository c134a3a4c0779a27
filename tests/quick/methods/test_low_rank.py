"""Low-rank factors of gradients: all methods follow PowerSGD and ACP-SGD, bit for bit; checkpoints, bytes, refusals."""

from __future__ import annotations

import math
from collections import deque
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.dear import DeAR, DeARConfig
from lightning_pipesync.methods.gradients.low_rank import FactorizedGradient, LowRankBucket, LowRankGradients
from lightning_pipesync.methods.pipe_sgd import PipeSGD
from lightning_pipesync.methods.selsync import SelSync
from tests.references.low_rank_algorithms import ACPSGD, PowerSGD, mean
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, batch, loss, seeded_mlp, state

STEPS, RANK = 10, 2
ALGORITHMS = {"acp_sgd": ACPSGD, "power_sgd": PowerSGD}
BUCKETS = {"fusion": "buffer", "bucket_mb": 1e-4}
SEARCH = {"fusion": "random", "trial_steps": 4, "max_trials": 2, "search_mb": (1e-4, 1e-3)}
#: By method: how it is made, and its settings.
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dear": (DeAR, BUCKETS),
    "pipe_sgd": (PipeSGD, {"delay_compensation": "none"}),
    "selsync": (SelSync, {"delta": 0.0, "aggregation": "gradients"}),
}
#: By case: the method, further settings, and how the loop differs.
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    **{method: (method, {}, set()) for method in METHODS},
    **{f"{method}, missing gradients": (method, {}, {"missing"}) for method in METHODS},
    "dear, one bucket": ("dear", {"fusion": "buffer", "bucket_mb": 25.0}, set()),
    "dear, a search": ("dear", SEARCH, set()),
    "dear, without overlap": ("dear", {"overlap": "none"}, set()),
    "dear, accumulated": ("dear", {}, {"accumulated"}),
    "dear, clipped": ("dear", {}, {"clipped"}),
    "dear, bf16": ("dear", {}, {"bf16"}),
    "dear, without feedback": ("dear", {"error_feedback": False}, set()),
    "pipe_sgd, level 2, k=2": ("pipe_sgd", {"pipeline_level": 2, "segments": 2, "staleness": 2}, set()),
    "pipe_sgd, synchronous": ("pipe_sgd", {"staleness": 0}, {"accumulated", "clipped"}),
}


def made(loop: set[str]) -> nn.Module:
    return seeded_mlp().to(torch.bfloat16 if "bf16" in loop else torch.float32)


def loss_of(model: nn.Module, step: int, rank: int, loop: set[str]) -> Tensor:
    if "bf16" in loop:
        x, y = batch(step, rank)
        return nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
    if "missing" in loop and (step % 5 == 3 or (rank and step % 2)):  # of the last layer, on both ranks or on one
        assert isinstance(model, nn.Sequential)
        return model[0](batch(step, rank)[0]).square().mean()
    return loss(model, step, rank)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(case: str, low_rank_method: str) -> list[Tensor]:
    """Returns the weights after each step."""
    method, settings, loop = CASES[case]
    make, common = METHODS[method]
    model, rank = made(loop), dist.get_rank()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = make(model, optimizer, low_rank=RANK, low_rank_method=low_rank_method, **{**common, **settings})
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        if "accumulated" in loop:
            with sync.no_sync():
                loss_of(model, step + 100, rank, loop).backward()
        loss_of(model, step, rank, loop).backward()
        if "clipped" in loop:
            sync.clip_value(0.01)
        sync.step()
        sync.synchronize()
        weights.append(flat(model))
    sync.detach()
    return weights


@cache
def reference(case: str, low_rank_method: str, world_size: int) -> list[Tensor]:
    method, settings, loop = CASES[case]
    model = made(loop)
    optimizer, parameters = OPTIMIZERS["sgd"](model), list(model.parameters())
    feedback = settings.get("error_feedback", True)
    make = partial(ALGORITHMS[low_rank_method], rank=RANK, workers=world_size, feedback=feedback)
    algorithms = [make(p.shape) if p.dim() > 1 else None for p in parameters]
    staleness = settings.get("staleness", 1) if method == "pipe_sgd" else 0
    weights, in_flight = [], deque[list[Tensor | None]]()
    for step in range(STEPS):
        gradients = []
        for rank in range(world_size):
            optimizer.zero_grad()
            if "accumulated" in loop:
                loss_of(model, step + 100, rank, loop).backward()
            loss_of(model, step, rank, loop).backward()
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


@cache
def trained(world_size: int) -> Outcomes:
    rows = {(case, kind): partial(train, case, kind) for case in CASES for kind in ALGORITHMS}
    return launch_cases(rows, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("low_rank_method", ALGORITHMS)
@pytest.mark.parametrize("case", CASES)
def test_follows_the_algorithm(case: str, low_rank_method: str, world_size: int) -> None:
    """Bit for bit, at every step, on every rank."""
    expected = reference(case, low_rank_method, world_size)
    for outcome in trained(world_size)[case, low_rank_method]:
        for step, (weights, other) in enumerate(zip(outcome, expected, strict=True)):
            assert torch.equal(weights, other), f"step {step}: off by {(weights - other).abs().max()}"


def test_the_cases_differ() -> None:
    """Or the test above would compare nothing."""
    last = {(case, kind): reference(case, kind, 2)[-1] for case in CASES for kind in ALGORITHMS}
    synchronous = {"dear", "selsync", "dear, one bucket", "dear, a search", "dear, without overlap"}
    alike = [synchronous, {"dear, missing gradients", "selsync, missing gradients"}]
    for (first, kind), one in last.items():
        for (second, other_kind), other in last.items():
            same = first == second or any({first, second} <= cases for cases in alike)
            equal = torch.equal(one.float(), other.float())
            assert equal == (same and kind == other_kind), (first, kind, second, other_kind)


def arranged(method: str, low_rank_method: str, topology: str) -> Tensor:
    make, settings = METHODS[method]
    model, rank = seeded_mlp(), dist.get_rank()
    optimizer = OPTIMIZERS["sgd"](model)
    sync = make(model, optimizer, low_rank=RANK, low_rank_method=low_rank_method, topology=topology, **settings)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        sync.step()
    sync.flush()
    return flat(model)


def test_on_a_torus_and_on_trees_the_weights_are_those_in_a_ring() -> None:
    """Of four ranks; but for the order of sums."""
    rows = list(product(METHODS, ALGORITHMS, ("flat", "torus2d", "tree")))
    outcomes = launch_cases({row: partial(arranged, *row) for row in rows}, 4)
    for method, kind, topology in rows:
        everyones = outcomes[method, kind, topology]
        assert all(torch.equal(one, everyones[0]) for one in everyones)
        torch.testing.assert_close(everyones[0], outcomes[method, kind, "flat"][0], rtol=1e-3, atol=1e-5)


def interrupted(method: str, low_rank_method: str, resumes: bool) -> dict[str, Tensor]:
    make, settings = METHODS[method]
    run = Run(make, "adamw", low_rank=RANK, low_rank_method=low_rank_method, **settings)
    run.steps(range(5))
    if resumes:
        run = run.resumed(seeded_mlp(1))
    else:
        run.sync.flush()
        run.sync.resume()
    run.steps(range(5, 10))
    return run.end()


@cache
def resumed() -> Outcomes:
    rows = [(method, kind, resumes) for method in METHODS for kind in ALGORITHMS for resumes in (False, True)]
    return launch_cases({row: partial(interrupted, *row) for row in rows}, 2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("low_rank_method", ALGORITHMS)
def test_a_resumed_run_has_factors_and_residuals(method: str, low_rank_method: str) -> None:
    """After an odd number of steps, so that the other factor is next."""
    outcomes = (resumed()[method, low_rank_method, resumes] for resumes in (False, True))
    for whole, other in zip(*outcomes, strict=True):
        assert_same(other, whole)


def with_rank(method: str, low_rank: int | None) -> dict[str, Tensor]:
    make, settings = METHODS[method]
    run = Run(make, low_rank=low_rank, **{**settings, "fusion": "none"} if method == "dear" else settings)
    run.steps(range(STEPS))
    return run.end()


def test_full_rank_is_exact() -> None:
    """Factors that are not smaller than the gradient are not made: the weights are those without, bit for bit."""
    for method in METHODS:
        for whole, other in zip(*(on_ranks(with_rank, 2, method, rank) for rank in (None, 6)), strict=True):
            assert_same(other, whole, method)


def clip_both(fusion: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Trains with two optimizers, both of whose gradients are averaged before one steps."""
    model = seeded_mlp()
    layers = [layer for layer in model.children() if list(layer.parameters())]
    optimizers = [SGD(layer.parameters(), lr=0.05, momentum=0.9) for layer in layers]
    sync = DeAR(model, optimizers, low_rank=1, **fusion)
    weights = []
    for step in range(60):
        model.zero_grad()
        loss(model, step, dist.get_rank()).backward()
        for optimizer in optimizers:
            sync.clip_value(0.05, optimizer)
        for optimizer in optimizers:
            sync.step(optimizer=optimizer)
        sync.synchronize()
        weights.append(flat(model))
    tried = len(sync.trials)
    sync.detach()
    return weights, tried


def test_buckets_do_not_change_under_averaged_gradients() -> None:
    """A search changes them in the first reduction of a step only: the weights are those without one."""
    plain, searched = (on_ranks(clip_both, 2, one) for one in (BUCKETS, SEARCH))
    assert searched[0][1] > 0, "rank 0 has measured"
    for (expected, _), (found, _) in zip(plain, searched, strict=True):
        for step, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(one, other), step


def factorized(shape: tuple[int, int], rank: int, gradient: Tensor) -> FactorizedGradient:
    one = FactorizedGradient(torch.zeros(shape), rank, error_feedback=True)
    one.add(gradient)
    return one


def half_of(one: FactorizedGradient, rows: int, orthonormal: bool) -> Tensor:
    part = torch.empty(rows, one.rank)
    one.take_factor(orthonormal)
    one.project(part)
    return part


def approximation(one: FactorizedGradient) -> Tensor:
    approximated = torch.empty(one.shape)
    one.approximate(approximated)
    return approximated


def test_factors_of_full_rank_are_the_gradient() -> None:
    """But for rounding; nothing remains."""
    gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    one = factorized((5, 8), 5, gradient)
    one.receive(half_of(one, 5, orthonormal=False))
    part = half_of(one, 8, orthonormal=True)
    one.subtract(part)
    one.receive(part)
    torch.testing.assert_close(approximation(one), gradient)
    torch.testing.assert_close(one.residual, torch.zeros(5, 8), rtol=0, atol=1e-5)
    square = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    one = factorized((6, 6), 6, square)
    part = half_of(one, 6, orthonormal=True)
    one.receive(part)
    torch.testing.assert_close(approximation(one), square)


@pytest.mark.parametrize("low_rank_method", ALGORITHMS)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_nothing_remains_of_values_that_were_not_finite(low_rank_method: str, special: float) -> None:
    parameter = nn.Parameter(torch.zeros(12, 9))
    settings = DeARConfig(low_rank=2, low_rank_method=low_rank_method)
    gradients = LowRankGradients([NamedParameter("weight", parameter, "", (0, 0))], settings)
    bucket, generator = LowRankBucket(gradients, [parameter], 1), torch.Generator().manual_seed(0)
    for step in range(8):
        view = torch.randn(12, 9, generator=generator)
        if step in (3, 4):
            view[2, 5] = special
        for round_ in range(bucket.num_rounds):
            bucket.start(round_, [view], [True])
            bucket.finish(round_, [view])
        assert bool(view.isfinite().all()) == (step not in (3, 4)), "and a loss scaler sees it"
    assert view.count_nonzero() == view.numel()
    assert gradients.state_dict()["weight"]["residual"].isfinite().all()


@pytest.mark.parametrize("low_rank_method", ALGORITHMS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_step_within_autocast_multiplies_factors_as_one_without(
    low_rank_method: str, memory_format: torch.memory_format
) -> None:
    def averaged(autocast: bool) -> list[Tensor]:
        parameter = nn.Parameter(torch.zeros(12, 4, 3, 3).to(memory_format=memory_format))
        settings = DeARConfig(low_rank=2, low_rank_method=low_rank_method)
        gradients = LowRankGradients([NamedParameter("weight", parameter, "", (0, 0))], settings)
        bucket, generator = LowRankBucket(gradients, [parameter], 1), torch.Generator().manual_seed(0)
        views = [torch.randn(12, 4, 3, 3, generator=generator).to(memory_format=memory_format) for _ in range(4)]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for view, round_ in product(views, range(bucket.num_rounds)):
                bucket.start(round_, [view], [True])
                bucket.finish(round_, [view])
        return [*views, gradients.state_dict()["weight"]["residual"]]

    for one, other in zip(averaged(autocast=True), averaged(autocast=False), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("low_rank_method", ALGORITHMS)
def test_a_matrix_that_is_used_in_turns_is_trained_in_all_directions(low_rank_method: str) -> None:
    """As that of one of two heads, every other step: a factor of zeros would leave the next one the first columns."""
    parameter, generator = nn.Parameter(torch.zeros(12, 9)), torch.Generator().manual_seed(1)
    gradient = torch.randn(12, 9, generator=generator)
    settings = DeARConfig(low_rank=2, low_rank_method=low_rank_method)
    gradients = LowRankGradients([NamedParameter("weight", parameter, "", (0, 0))], settings)
    bucket, applied = LowRankBucket(gradients, [parameter], 1), torch.zeros(12, 9)
    for step in range(200):
        view, is_used = gradient.clone(), step % 2 == 0
        for round_ in range(bucket.num_rounds):
            bucket.start(round_, [view], [is_used])
            bucket.finish(round_, [view])
        applied += view if is_used else 0
    left = gradients.state_dict()["weight"]["residual"]
    torch.testing.assert_close(applied + left, 100 * gradient, rtol=1e-4, atol=1e-3)
    assert left.norm() < 25 * gradient.norm(), "what is left does not grow with the number of steps: it would be 88"


def sent_in_a_step(low_rank: int | None, low_rank_method: str) -> int:
    model = nn.Linear(64, 64)
    settings = {"low_rank": low_rank, "low_rank_method": low_rank_method, "overlap": "none", **BUCKETS}
    sync = DeAR(model, SGD(model.parameters(), lr=0.1), **settings)
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


def arrive(method: str, settings: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 3))
    make, common = METHODS[method]
    return Run(make, lambda model: SGD(model.parameters(), lr=0.05), model, **{**common, **settings}).arrive(150)


@pytest.mark.parametrize("method", METHODS)
def test_rank_4_arrives_where_it_does_uncompressed(method: str) -> None:
    rows = {"none": {}, **{kind: {"low_rank": 4, "low_rank_method": kind} for kind in ALGORITHMS}}
    outcomes = launch_cases({name: partial(arrive, method, row) for name, row in rows.items()}, 2)
    for kind in ALGORITHMS:
        (weights, final), (others, _) = outcomes[kind]
        assert_same(weights, others, kind)
        assert final == pytest.approx(outcomes["none"][0][1], rel=0.15), kind


def two_passes() -> list[tuple[str, str] | None]:
    run = Run(DeAR, low_rank=RANK, **BUCKETS)
    run.steps(range(2))
    run.backward(2)
    outcome = raised(lambda: loss(run.model, 3, dist.get_rank()).backward())
    run.sync.detach()
    return [outcome]


def test_a_gradient_that_was_factorized_is_not_changed() -> None:
    for [outcome] in on_ranks(two_passes, 2):
        assert_raised(outcome, "RuntimeError", "low_rank=2", "no_sync()")


def lose_a_rank(method: str) -> tuple[str, str]:
    """Rank 1 raises between two steps, and lives on."""
    make, settings = METHODS[method]
    run = Run(make, low_rank=RANK, low_rank_method="power_sgd", timeout_s=300, **settings)
    try:
        for step in range(100):
            if step == 3 and dist.get_rank() == 1:
                raise KeyError("a bug")
            run.step(step)
    except Exception as error:
        run.sync.detach(timeout_s=1.0)
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("method", METHODS)
def test_nobody_waits_for_a_lost_rank(method: str) -> None:
    other, lost = on_ranks(lose_a_rank, 2, method)
    assert_raised(other, "RuntimeError", "rank 1")
    assert_raised(lost, "KeyError", "a bug")


REFUSED = [
    (DeAR, {"low_rank": 0}, ["low_rank must be an integer of at least 1, got 0"]),
    (DeAR, {"low_rank": 4, "low_rank_method": "svd"}, ["low_rank_method", "'svd'", "acp_sgd"]),
    (DeAR, {"low_rank": 4, "update": "sharded"}, ["low_rank=4", "update='sharded'", "update='replicated'"]),
    (SelSync, {"low_rank": 4}, ["low_rank=4", "aggregation='parameters'", "aggregation='gradients'"]),
    *(
        (method, {"low_rank": 4, "compression": "int8", **({"aggregation": "gradients"} if method is SelSync else {})},
         ["low_rank=4", "compression='int8'", "compression='none'"])
        for method in (DeAR, PipeSGD, SelSync)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings", "words"), REFUSED)
def test_what_does_not_go_with_it_is_refused(method: Any, settings: dict[str, Any], words: list[str]) -> None:
    assert_raised(raised(lambda: method.config_type(**settings)), "ValueError", *words)


@pytest.mark.parametrize("method", [DeAR, PipeSGD, SelSync])
def test_residuals_need_as_many_ranks(method: Any) -> None:
    settings = {"aggregation": "gradients"} if method is SelSync else {}
    assert method.config_type(low_rank=2, **settings).needs_as_many_ranks


def other_settings() -> tuple[str, str] | None:
    run = Run(DeAR, low_rank=RANK, **BUCKETS)
    run.steps(range(2))
    run.sync.flush()
    saved = run.sync.state_dict()
    run.sync.detach()
    other = Run(DeAR, **BUCKETS)
    outcome = raised(lambda: other.sync.load_state_dict(saved))
    other.sync.detach()
    return outcome


def test_a_checkpoint_of_another_rank_is_refused() -> None:
    for outcome in on_ranks(other_settings, 2):
        assert_raised(outcome, "ValueError", "low_rank", "Use the same settings")


def test_state_is_by_name() -> None:
    parameters = dict(seeded_mlp().named_parameters())
    named = [NamedParameter(name, tensor, "", (0, 0)) for name, tensor in parameters.items()]
    saved = LowRankGradients(named, DeARConfig(low_rank=2)).state_dict()
    assert list(saved) == ["0.weight", "2.weight"], "and no biases"
    assert state(seeded_mlp()).keys() == parameters.keys()
