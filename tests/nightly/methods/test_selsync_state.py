"""SelSync that is flushed, loaded and written to; buffers, teachers and running averages: all ranks agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_pipesync import SelSync
from tests.support.case_table import launch_cases
from tests.support.models import Run, assert_same, loss, seeded_mlp, state

FAR = 1e9  # a delta far above any change: after the first step every step stays local
AGGREGATIONS = ("parameters", "gradients")


def begin(model: nn.Module | None = None, lr: float = 0.05, **settings: Any) -> Run:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)

    return Run(SelSync, optimizer, model, **settings)


def local(steps: int = 3, **settings: Any) -> Run:
    """Returns a run whose replicas differ."""
    run = begin(seeded_mlp(batch_norm=True), delta=FAR, **settings)
    run.steps(range(steps))
    return run


# --- flush and resume -------------------------------------------------------------------------------------------------


def write_while_flushed() -> list[dict[str, Tensor]]:
    run = local()
    own = state(run.model)
    run.sync.flush()
    with torch.no_grad():
        run.model[0].bias.fill_(7.0)
    run.sync.resume()
    run.sync.detach()
    return [own, state(run.model)]


def flush_before_the_step() -> list[dict[str, Tensor]]:
    """As ``wait_for_everyone`` between clipping and the step does."""
    run = local()
    run.backward(3)
    run.sync.clip(1.0)
    run.sync.flush()
    run.sync.step()
    assert run.sync.diverged
    return [run.end()]


def load_while_flushed() -> list[dict[str, Tensor]]:
    run = local()
    run.sync.flush()
    consolidated, saved = state(run.model), run.sync.state_dict()
    run.sync.resume()
    own = state(run.model)
    run.step(3)
    run.sync.flush()
    run.model.load_state_dict(consolidated)
    run.sync.load_state_dict(saved)
    run.sync.resume()
    run.sync.detach()
    return [own, state(run.model)]


def flush_with_states_apart() -> list[dict[str, Tensor]]:
    """After local steps the ranks' optimizers have states of their own, which the same gradient moves elsewhere."""
    run = Run(SelSync, "adamw", delta=0.5, aggregation="gradients", partition="defdp")
    synchronized = []
    for i, scale in enumerate((1.0, 1.0, 1.0, 100.0)):
        if i == 3:
            run.sync.flush()  # training goes on from the average
        run.optimizer.zero_grad()
        (loss(run.model, 0, dist.get_rank()) * scale).backward()
        run.sync.step()
        synchronized.append(run.sync.last.synchronized)
    assert synchronized == [True, False, False, True]
    return [run.end()]


def test_flushes_of_all_kinds() -> None:
    cases: dict[str, Callable[[], list[dict[str, Tensor]]]] = {
        "written to": write_while_flushed,
        "before the step": flush_before_the_step,
        "loaded": load_while_flushed,
        "states apart": flush_with_states_apart,
    }
    outcomes = launch_cases(cases, 2)
    for own, resumed in outcomes["written to"]:
        assert resumed["0.bias"].unique().tolist() == [7.0]
        assert torch.equal(resumed["0.weight"], own["0.weight"])
    for own, resumed in outcomes["loaded"]:
        assert_same(resumed, own)
    for name in ("before the step", "states apart"):
        assert_same(outcomes[name][0][0], outcomes[name][1][0], name)


# --- buffers, and parameters that no optimizer has --------------------------------------------------------------------


class Masked(nn.Module):
    """Holds constants whose sum over the ranks would overflow or be rounded, and one buffer that rank 1 changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("lowest", torch.full((50,), torch.finfo(torch.float32).min))
        self.register_buffer("mask", torch.full((50,), -math.inf))
        self.register_buffer("missing", torch.full((50,), math.nan))
        self.register_buffer("table", torch.linspace(0.1, 0.9, 50))
        self.register_buffer("sixteen", torch.full((50,), 60_000.0, dtype=torch.float16))
        self.register_buffer("codes", torch.ones(50).to(torch.float8_e4m3fn))
        self.register_buffer("roots", torch.full((50,), 1j))
        self.register_buffer("small", torch.full((50,), 7, dtype=torch.int16))
        self.register_buffer("changing", torch.zeros(4))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.counter += 1
        if dist.get_rank() == 1:
            self.changing += 3.0
        return self.layer(x)


def buffer_bytes(model: nn.Module) -> dict[str, list[int]]:
    return {name: buffer.reshape(-1).view(torch.uint8).tolist() for name, buffer in model.named_buffers()}


def train_masked(aggregation: str) -> tuple[dict[str, list[int]], dict[str, list[int]], list[float], int]:
    torch.manual_seed(0)
    model = Masked()
    before = buffer_bytes(model)
    run = begin(model, delta=0.0, aggregation=aggregation)
    traffic = run.sync.transport.traffic
    start_bytes = traffic.total_bytes_sent
    run.steps(range(4))
    sent = traffic.total_bytes_sent - start_bytes
    run.end()
    return before, buffer_bytes(model), model.changing.tolist(), sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_constant_buffers_keep_their_bits_and_cost_nothing(world_size: int) -> None:
    outcomes = launch_cases(
        {aggregation: partial(train_masked, aggregation) for aggregation in AGGREGATIONS}, world_size
    )
    expected = 0.0
    for _ in range(4):
        expected += 3.0 / world_size
    for before, after, changing, sent in (one for aggregation in AGGREGATIONS for one in outcomes[aggregation]):
        for name in ("lowest", "mask", "missing", "table", "sixteen", "codes", "roots", "small"):
            assert after[name] == before[name], name
        assert changing == outcomes["gradients"][0][2] == [pytest.approx(expected)] * 4
        assert after["counter"][0] == 4
        # flag, 2 parameters and 2 buffers (each begins at a multiple of 64 bytes), and 11 marks of 4 bytes
        assert sent < 4 * 2 * (1 + (128 + 64) + (64 + 64) + 11 * 4)


class Student(nn.Module):
    """A network, and a teacher that follows it as in BYOL and MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = seeded_mlp(), seeded_mlp(seed=1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    @torch.no_grad()
    def follow(self, how: str) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if how == "new data":
                old.data = old.data * 0.5 + new.data * 0.5
            else:
                (old if how == "in place" else old.data).lerp_(new.data, 0.5)


def train_student(how: str, delta: float) -> list[dict[str, Tensor]]:
    run = begin(Student(), delta=delta)
    states = []
    for i in range(4):
        run.sync.resume()  # before every batch, as the Lightning adapter does
        run.step(i)
        states.append(state(run.model))
        run.model.follow(how)
    return [*states, run.end()]


def test_a_teacher_is_averaged_with_its_student() -> None:
    """However it is written to: at each synchronized step, and at the flush."""
    kinds = list(product(("in place", "data in place", "new data"), (0.0, FAR)))
    outcomes = launch_cases({kind: partial(train_student, *kind) for kind in kinds}, 2)
    for how, delta in kinds:
        first, second = outcomes[how, delta]
        for i, (mine, theirs) in enumerate(zip(first, second, strict=True)):
            if delta == 0.0 or i in (0, 4):
                assert_same(mine, theirs, (how, delta, i))
        assert not torch.equal(first[4]["teacher.0.weight"], first[0]["teacher.0.weight"])
        assert torch.equal(first[3]["student.0.weight"], second[3]["student.0.weight"]) == (delta == 0.0)


# --- running averages -------------------------------------------------------------------------------------------------


def train_followed(aggregation: str, optimizers: int) -> list[dict[str, Tensor]]:
    """Steps 2 and 3 of the first optimizer stay local, all others are synchronized."""
    model = seeded_mlp()
    parts = [model] if optimizers == 1 else [model[0], model[2]]
    chosen = [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]
    sync = SelSync(model, chosen, delta=0.0, aggregation=aggregation)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    sync.follow(ema)
    followed = []
    for i in range(6):
        for j, optimizer in enumerate(chosen):
            optimizer.zero_grad()
            loss(model, i, dist.get_rank()).backward()
            sync.delta = FAR if i in (2, 3) and j == 0 else 0.0
            sync.step(optimizer=optimizer)
        ema.update_parameters(model)
        if i in (1, 5):
            sync.flush()
            followed.append(state(ema.module))
            sync.resume()
    assert sync.num_local_steps == 2
    sync.detach()
    return followed


def test_a_running_average_is_the_same_on_all_ranks() -> None:
    """Also where the last step was synchronized, and an earlier one was not."""
    kinds = list(product(AGGREGATIONS, (1, 2)))
    outcomes = launch_cases({kind: partial(train_followed, *kind) for kind in kinds}, 2)
    for kind in kinds:
        for mine, theirs in zip(*outcomes[kind], strict=True):
            assert_same(mine, theirs, kind)
