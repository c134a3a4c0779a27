"""Ranks that part with Pipe-SGD are named, by what they have done, before a timeout."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync.methods.pipe_sgd import PipeSGD
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, launch, on_ranks, raised
from tests.support.models import Run, assert_same, batch, loss, seeded_mlp, state


def flush_after_different_segments() -> dict[str, Tensor]:
    """At level 2 a rank has begun more segments than another when it is to wait: each uses a layer of its own."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(6, 6), "0": nn.Linear(6, 6), "1": nn.Linear(6, 6), "head": nn.Linear(6, 3)}
    model, rank = nn.ModuleDict(layers), dist.get_rank()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = PipeSGD(model, optimizer, pipeline_level=2, segments=3, timeout_s=10)
    for i in range(4):
        x, y = batch(i, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model["head"](model[str(rank)](model["first"](x))), y).backward()
        if i == 2:
            sync.flush()
            sync.resume()
        sync.step()
    sync.flush()
    sync.detach()
    return state(model)


def test_ranks_that_have_begun_different_segments_do_not_wait_for_each_other() -> None:
    weights, others = on_ranks(flush_after_different_segments, 2)
    assert_same(weights, others)


def train_more_on_one_rank(when: str) -> tuple[str, str] | None:
    """Rank 0 alone adds the first layer to the optimizer, before a step or before a state is loaded."""
    model = seeded_mlp()
    optimizer = SGD(model[2].parameters(), lr=0.05)
    sync = PipeSGD(model, optimizer, timeout_s=600)
    saved = sync.state_dict()

    def train_on() -> None:
        for number in range(6):
            optimizer.zero_grad()
            loss(model, number, dist.get_rank()).backward()
            if number == 3 and dist.get_rank() == 0:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            if number == 3 and when == "load":
                sync.load_state_dict(saved)
            sync.step()

    error = raised(train_on)
    sync.detach(timeout_s=0)
    return error


def skip_and_leave_out_a_pass(settings: dict[str, Any]) -> tuple[str, str] | None:
    """All ranks skip a step that has begun; rank 1 has no backward pass for the next one."""
    run = Run(PipeSGD, timeout_s=600, **settings)

    def train_on() -> None:
        run.steps(range(3))
        run.backward(3)
        run.sync.clip(1.0)
        if dist.get_rank() == 0:
            run.backward(4)
        run.sync.step()
        run.steps(range(5, 9))
        run.sync.flush()

    error = raised(train_on)
    run.sync.detach(timeout_s=1)
    return error


def test_ranks_that_part_are_named_without_a_timeout() -> None:
    """With parameters that one rank alone has added, or a step that others have skipped."""
    kinds: list[dict[str, Any]] = [{}, {"staleness": 2}, {"pipeline_level": 2}]
    cases: dict[str, Any] = {when: partial(train_more_on_one_rank, when) for when in ("step", "load")}
    cases |= {str(settings): partial(skip_and_leave_out_a_pass, settings) for settings in kinds}
    outcomes = launch_cases(cases, 2, launch=launch)  # collectives are left behind that nobody else joins
    for case in cases:
        for error in outcomes[case]:
            if case in ("step", "load"):
                assert_raised(error, "ValueError", "rank 0", "not on rank 1")
            else:
                assert_raised(error, "RuntimeError", "have not skipped the same steps of SGD")
