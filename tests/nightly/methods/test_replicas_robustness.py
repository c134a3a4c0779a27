"""Weights that are loaded, swapped or consolidated at an awkward moment: all ranks agree, or an error says why not."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync import LocalSGD, SelSync
from tests.quick.methods.test_local_sgd import CASES, FRAGMENTS, STEPS, for_reference
from tests.references.local_sgd import average_where_different, simulate
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import OPTIMIZERS, Run, assert_same, loss, seeded_mlp, state

STREAMING: dict[str, Any] = {"period": 4, "overlap_steps": 3, "outer_optimizer": "nesterov", "compression": "int8"}


def global_weights(sync: LocalSGD) -> Tensor:
    return torch.cat([bucket.global_flat for bucket in sync._replicas[0].averages.buckets])


# --- a flush that is not undone ---------------------------------------------------------------------------------------


def go_on_without_resume(name: str, flush_after: int) -> dict[str, Tensor]:
    optimizer, settings = CASES[name]
    run = Run(LocalSGD, optimizer, seeded_mlp(batch_norm=True), bucket_mb=1e-4, lr_scale=1.0, **settings)
    run.steps(range(flush_after))
    run.sync.flush()
    run.steps(range(flush_after, STEPS))
    return run.end()


def test_goes_on_after_a_flush_that_is_not_undone() -> None:
    """At the start of averages, while they are under way, and between: those are applied, and the outer step once."""
    names = [name for name, (_, settings) in CASES.items() if "EASGD" not in name and "neighbors" not in settings]
    kinds = list(product(names, (4, 5, 6)))
    outcomes = launch_cases({kind: partial(go_on_without_resume, *kind) for kind in kinds}, 3)
    for name, flush_after in kinds:
        optimizer, settings = CASES[name]
        given = for_reference(settings, 3, FRAGMENTS)
        given["goes_on_after"] = flush_after - given.get("warmup_steps", 0)
        model, make_optimizer = seeded_mlp(batch_norm=True), OPTIMIZERS[optimizer]
        replicas, _ = simulate(model, make_optimizer, loss, world_size=3, num_steps=STEPS, **given)
        average_where_different(replicas)
        for rank, weights in enumerate(outcomes[name, flush_after]):
            assert_same(weights, state(replicas[0]), f"{name}, rank {rank}, flushed after {flush_after}")


# --- weights that are loaded ------------------------------------------------------------------------------------------

#: By name: method and settings.
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SelSync": (SelSync, {"delta": 0.0, "outer_momentum": 0.5}),
    "SelSync, compressed": (SelSync, {"delta": 0.0, "compression": "int8"}),
    "local SGD": (LocalSGD, {"period": 2, "outer_optimizer": "nesterov"}),
    "streaming": (LocalSGD, {"period": 3, "outer_optimizer": "nesterov", "overlap_steps": 2}),
}


def load(name: str, after_attaching: bool) -> dict[str, Tensor]:
    """Trains from the weights of another model, which are loaded before the method is attached, or afterwards."""
    method, settings = METHODS[name]
    run = Run(method, "sgd", seeded_mlp(seed=3 if after_attaching else 7), **settings)
    if after_attaching:
        run.model.load_state_dict(state(seeded_mlp(seed=7)))
    run.steps(range(7))
    return run.end()


def load_on_one_rank(name: str) -> tuple[str, str] | None:
    method, settings = METHODS[name]
    run = Run(method, **settings, timeout_s=10)

    def train() -> None:
        run.step(0)
        if dist.get_rank() == 1:
            run.model.load_state_dict(state(seeded_mlp(seed=7)))
        run.steps(range(1, 4))

    outcome = raised(train)
    run.sync.detach(timeout_s=1.0)
    dist.barrier()
    return outcome


def test_training_goes_on_from_loaded_weights() -> None:
    """Bit for bit as if they had been there when the method was attached; one rank alone may not load any."""
    kinds = list(product(METHODS, (False, True)))
    outcomes = launch_cases(
        {
            **{kind: partial(load, *kind) for kind in kinds},
            **{name: partial(load_on_one_rank, name) for name in ("SelSync", "local SGD")},
        },
        3,
    )
    for name in METHODS:
        for before, after in zip(outcomes[name, False], outcomes[name, True], strict=True):
            assert_same(after, before, name)
    for name in ("SelSync", "local SGD"):
        for outcome in outcomes[name]:
            assert_raised(outcome, "RuntimeError", "Rank 1 has loaded weights")


def load_under_an_average() -> tuple[Tensor, Tensor]:
    run = Run(LocalSGD, **STREAMING, mixing_factor=0.0)
    run.steps(range(4))
    run.model.load_state_dict(state(seeded_mlp(seed=7)))
    run.steps(range(4, 7))
    own, loaded = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in (run.model, seeded_mlp(seed=7)))
    assert (own - loaded).abs().max() < 0.2, "they replace it, and are three steps away"
    outcome = global_weights(run.sync).clone()
    run.sync.detach()
    return outcome, outcome


class WithTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = seeded_mlp(), seeded_mlp(seed=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)  # type: ignore[no-any-return]


def load_a_teacher() -> tuple[Tensor, Tensor]:
    """Without a message."""
    model, settings = WithTeacher(), {"period": 50, "outer_optimizer": "nesterov"}
    run = Run(LocalSGD, lambda model: OPTIMIZERS["sgd"](model.student), model, **settings)
    before = run.sync.metrics()["mib_sent"]
    for i in range(5):
        run.step(i)
        model.teacher.load_state_dict(model.student.state_dict())
    assert run.sync.metrics()["mib_sent"] == before
    weights = torch.nn.utils.parameters_to_vector(run.end().values())
    return weights, weights


def swap_within_a_validation() -> tuple[Tensor, Tensor]:
    """Weights that are swapped in a validation, and back, change nothing."""
    weights = []
    for swaps in (False, True):
        run = Run(LocalSGD, period=6, outer_optimizer="nesterov")
        run.steps(range(4))
        run.sync.flush()
        if swaps:
            before = state(run.model)
            run.model.load_state_dict(state(seeded_mlp(seed=5)))
            run.model.load_state_dict(before)
        run.sync.resume()
        run.steps(range(4, 9))
        run.sync.detach()
        weights.append(torch.nn.utils.parameters_to_vector(run.model.parameters()).detach())
    assert torch.equal(*weights)
    return torch.zeros(0), torch.zeros(0)  # the weights are each rank's own


# --- states that are loaded -------------------------------------------------------------------------------------------


def resume_with(**settings: Any) -> tuple[Tensor, Tensor]:
    """Saves after five steps, resumes with other settings, or is refused, and trains on."""
    run = Run(LocalSGD, **STREAMING)
    run.steps(range(5))
    run.sync.flush()
    saved, own = state(run.model), copy.deepcopy(run.sync.state_dict())
    run.sync.detach()
    run = Run(LocalSGD, "sgd", seeded_mlp(1), **{**STREAMING, **settings})
    run.model.load_state_dict(saved)
    refused = raised(lambda: run.sync.load_state_dict(own))
    if "warmup_steps" in settings:
        assert_raised(refused, "ValueError", "warmup_steps")
    else:
        assert refused is None
    run.steps(range(5, 13))
    run.sync.flush()
    agreed = global_weights(run.sync).clone()
    run.sync.detach()
    return agreed, torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()


def rewind_into_the_warm_up() -> tuple[Tensor, Tensor]:
    run = Run(LocalSGD, period=3, warmup_steps=4, outer_optimizer="nesterov", compression="int8")
    run.steps(range(2))
    run.sync.flush()
    saved, own = state(run.model), copy.deepcopy(run.sync.state_dict())
    run.sync.resume()
    run.steps(range(2, 9))
    run.sync.flush()
    run.model.load_state_dict(saved)
    run.sync.load_state_dict(own)
    run.steps(range(2, 4))
    assert not run.sync.diverged, "it is synchronous again"
    in_warm_up = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    run.steps(range(4, 10))
    agreed = global_weights(run.sync).clone()
    run.sync.detach()
    return in_warm_up, agreed


def consolidate_in_inference_mode(settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    run = Run(LocalSGD, **settings)
    for first in (0, 5, 10):
        run.steps(range(first, first + 5))
        with torch.inference_mode():
            run.sync.flush()
        run.sync.resume()
    weights = torch.nn.utils.parameters_to_vector(run.end().values())
    return weights, weights


def test_all_ranks_agree() -> None:
    cases = {
        "loaded under an average": load_under_an_average,
        "a teacher": load_a_teacher,
        "swapped": swap_within_a_validation,
        "other overlap_steps": partial(resume_with, overlap_steps=0),
        "another period": partial(resume_with, period=3),
        "another warm-up": partial(resume_with, warmup_steps=8),
        "rewound": rewind_into_the_warm_up,
        "inference mode": partial(consolidate_in_inference_mode, {"period": 8}),
        "inference mode, streaming": partial(consolidate_in_inference_mode, STREAMING),
    }
    outcomes = launch_cases(cases, 2)
    for name in cases:
        for mine, others in zip(*outcomes[name], strict=True):
            assert torch.equal(mine, others), name


def save(folder: Path) -> None:
    run = Run(LocalSGD, period=3)
    run.steps(range(5))
    torch.save(run.sync.state_dict(), folder / f"{dist.get_rank()}.pt")
    run.end()


def load_saved(folder: Path) -> tuple[str, str] | None:
    run = Run(LocalSGD, period=3)
    saved = torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)
    outcome = raised(lambda: run.sync.load_state_dict(saved))
    run.end()
    return outcome


def test_a_state_of_more_ranks_is_refused(tmp_path: Path) -> None:
    on_ranks(save, 3, tmp_path)
    for rank, outcome in enumerate(on_ranks(load_saved, 2, tmp_path)):
        assert_raised(outcome, "ValueError", f"of rank {rank} of 3, and there are 2", "resume with as many")


# --- ranks that differ ------------------------------------------------------------------------------------------------


def drift_apart(evaluates: bool, neighbors: str) -> tuple[str, str] | None:
    """Rank 1 takes a step more than the others before a validation, or validates while they train."""
    run = Run(LocalSGD, neighbors=neighbors, period=4, timeout_s=10)

    def diverge() -> None:
        run.steps(range(3 if evaluates else 2))
        if dist.get_rank() == 1 and not evaluates:
            run.step(3)
        if dist.get_rank() == 1 or not evaluates:
            run.sync.flush()
        run.step(4)

    outcome = raised(diverge)
    run.sync.detach(timeout_s=1.0)
    dist.barrier()
    return outcome


def thaw_in_the_warm_up() -> tuple[str, str] | None:
    model = seeded_mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    sync = LocalSGD(model, optimizer, warmup_steps=5)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    loss(model, 0, dist.get_rank()).backward()
    outcome = raised(sync.step)
    sync.detach()
    return outcome


def test_ranks_that_differ_are_named() -> None:
    """On all, also on those that are no neighbors of theirs; and layers that are thawed in the warm-up are refused."""
    kinds = list(product((False, True), ("all", "ring", "random_pairs")))
    cases: dict[Any, Any] = {kind: partial(drift_apart, *kind) for kind in kinds}
    outcomes = launch_cases({**cases, "thawed": thaw_in_the_warm_up}, 4)
    for kind in kinds:
        for outcome in outcomes[kind]:
            assert_raised(outcome, "RuntimeError", "ank 1")
    for outcome in outcomes["thawed"]:
        assert_raised(outcome, "RuntimeError", "warmup_steps=0")
