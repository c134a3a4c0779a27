"""Flushing and resuming, buffers, teachers, running averages, and uses of SelSync that would part the ranks."""

from __future__ import annotations

import math
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_pipesync.methods.replicas import trigger
from lightning_pipesync.methods.selsync import SelSync
from tests.references.selsync import mean
from tests.support.harness import assert_raised, on_ranks, raised
from tests.support.models import Run, assert_same, loss, seeded_mlp, state

FAR = 1e9  # a delta far above any change: after the first step every step stays local


def begin(model: nn.Module | None = None, lr: float = 0.05, **settings: Any) -> Run:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)

    return Run(SelSync, optimizer, model, **settings)


# --- flush and resume ---------------------------------------------------------------------------------------------


def step_while_flushed(aggregation: str) -> list[dict[str, Tensor]]:
    run = begin(seeded_mlp(batch_norm=True), delta=FAR, aggregation=aggregation)
    run.steps(range(3))
    run.sync.flush()
    states = [state(run.model)]
    run.step(3)
    states.append(state(run.model))
    run.sync.resume()
    states.append(state(run.model))
    return [*states, run.end()]


@pytest.mark.parametrize("aggregation", ["parameters", "gradients"])
def test_a_step_without_resume_goes_on_from_the_average(aggregation: str) -> None:
    outcomes = on_ranks(step_while_flushed, 2, aggregation)
    for rank, (flushed, stepped, resumed, last) in enumerate(outcomes):
        model = seeded_mlp(batch_norm=True)
        model.load_state_dict(flushed)
        loss(model, 3, rank).backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        for name, value in state(model).items():
            assert torch.equal(stepped[name], value)
            assert torch.equal(resumed[name], value), "there is nothing to go back to"
            both = [outcome[1][name] for outcome in outcomes]
            assert torch.equal(last[name], mean(both) if value.is_floating_point() else both[0])


def flush_before_the_step() -> tuple[bool, dict[str, Tensor]]:
    """As ``wait_for_everyone`` between clipping and the step does."""
    run = begin(delta=FAR)
    run.steps(range(3))
    run.backward(3)
    run.sync.clip(1.0)
    run.sync.flush()
    run.sync.step()
    return run.sync.diverged, run.end()


def test_a_step_after_a_flush_is_consolidated_again() -> None:
    (diverged, first), (_, second) = on_ranks(flush_before_the_step, 2)
    assert diverged
    assert_same(first, second)


def load_while_flushed() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = begin(seeded_mlp(batch_norm=True), delta=FAR)
    run.steps(range(3))
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
    return own, state(run.model)


def test_loading_a_state_ends_a_flush() -> None:
    for own, loaded in on_ranks(load_while_flushed, 2):
        assert_same(loaded, own)


# --- buffers ------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("aggregation", ["parameters", "gradients"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_constant_buffers_keep_their_bits_and_cost_nothing(world_size: int, aggregation: str) -> None:
    outcomes = on_ranks(train_masked, world_size, aggregation)
    expected = 0.0
    for _ in range(4):
        expected += 3.0 / world_size
    for before, after, changing, sent in outcomes:
        for name in ("lowest", "mask", "missing", "table", "sixteen", "codes", "roots", "small"):
            assert after[name] == before[name], name
        assert changing == outcomes[0][2] == [pytest.approx(expected)] * 4
        assert after["counter"][0] == 4
        # flag, 2 parameters and 2 buffers (each begins at a multiple of 64 bytes), and 11 marks of 4 bytes
        assert sent < 4 * 2 * (1 + (128 + 64) + (64 + 64) + 11 * 4)


# --- parameters that no optimizer has -----------------------------------------------------------------------------


class Student(nn.Module):
    """A network, and a teacher that follows it as in BYOL and MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = seeded_mlp(), seeded_mlp(seed=1)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x)

    @torch.no_grad()
    def follow(self, how: str) -> None:
        for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            if how == "in place":
                old.lerp_(new, 0.5)
            elif how == "data in place":
                old.data.lerp_(new.data, 0.5)
            else:
                old.data = old.data * 0.5 + new.data * 0.5


def train_student(how: str, delta: float) -> list[dict[str, Tensor]]:
    model = Student()
    run = begin(model, delta=delta)
    states = []
    for i in range(4):
        run.sync.resume()  # before every batch, as the Lightning adapter does
        run.step(i)
        states.append(state(model))
        model.follow(how)
    return [*states, run.end()]


@pytest.mark.parametrize("how", ["in place", "data in place", "new data"])
def test_a_teacher_is_averaged_with_its_student(how: str) -> None:
    """However it is written to: at each synchronized step, and at the flush."""
    for delta in (0.0, FAR):
        first, second = on_ranks(train_student, 2, how, delta)
        for i, (mine, theirs) in enumerate(zip(first, second, strict=True)):
            if delta == 0.0 or i in (0, 4):
                assert all(torch.equal(mine[name], theirs[name]) for name in mine), (delta, i)
        assert not torch.equal(first[4]["teacher.0.weight"], first[0]["teacher.0.weight"])
        assert torch.equal(first[3]["student.0.weight"], second[3]["student.0.weight"]) == (delta == 0.0)


# --- running averages ---------------------------------------------------------------------------------------------


def train_followed(aggregation: str, optimizers: int) -> list[dict[str, Tensor]]:
    """Steps 2 and 3 stay local, all others are synchronized."""
    model = seeded_mlp()
    parts = [model] if optimizers == 1 else [model[0], model[2]]
    chosen = [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]
    sync = SelSync(model, chosen, delta=0.5, aggregation=aggregation)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    sync.follow(ema)
    followed = []
    for i in range(6):
        for j, optimizer in enumerate(chosen):
            optimizer.zero_grad()
            loss(model, i, dist.get_rank()).backward()
            tracked = sync._units[j].policy.algorithm.tracker
            tracked.update = lambda _, i=i, j=j: 0.0 if i in (2, 3) and j == 0 else math.inf  # type: ignore[method-assign]
            sync.step(optimizer=optimizer)
        ema.update_parameters(model)
        if i in (1, 5):
            sync.flush()
            followed.append(state(ema.module))
            sync.resume()
    sync.detach()
    return followed


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("aggregation", ["parameters", "gradients"])
def test_a_running_average_is_the_same_on_all_ranks(aggregation: str, optimizers: int) -> None:
    """Also where the last step was synchronized, and an earlier one was not."""
    first, second = on_ranks(train_followed, 2, aggregation, optimizers)
    for mine, theirs in zip(first, second, strict=True):
        assert_same(mine, theirs)


# --- what would part the ranks ------------------------------------------------------------------------------------


def step_directly() -> tuple[str, str] | None:
    run = begin(delta=0.3)
    run.step(0)
    before = state(run.model)
    loss(run.model, 1, dist.get_rank()).backward()
    outcome = raised(run.optimizer.step)
    assert_same(state(run.model), before)
    run.sync.detach()
    run.optimizer.step()  # it is the user's again
    return outcome


def test_an_optimizer_stepped_directly_is_an_error() -> None:
    for outcome in on_ranks(step_directly, 2):
        assert_raised(outcome, "RuntimeError", "SGD.step() was called directly")


def start_badly(frozen: bool = False) -> tuple[str, str] | None:
    model = nn.Sequential(nn.Embedding(4, 4, sparse=dist.get_rank() == 1), nn.Linear(4, 2))
    if frozen:
        optimizer = torch.optim.SGD([{"params": []}])
        return raised(lambda: SelSync(seeded_mlp(), optimizer))
    return raised(lambda: begin(model, timeout_s=20))


def test_what_one_rank_refuses_all_refuse() -> None:
    """None waits for the one that has raised."""
    for rank, outcome in enumerate(on_ranks(start_badly, 3, timeout_s=60)):
        assert_raised(outcome, "ValueError", "sparse=True")
        assert outcome is not None
        assert outcome[1].startswith("0 has" if rank == 1 else "Rank 1 cannot train: 0 has")


def test_nothing_to_train() -> None:
    for outcome in on_ranks(start_badly, 2, True):
        assert outcome == ("ValueError", "There is nothing to train: no optimizer has a parameter.")


def stay_local(delta: float) -> list[str]:
    run = begin(lr=0.001, delta=delta)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(trigger, "MANY_LOCAL_STEPS", 5):
        warnings.simplefilter("always")
        run.steps(range(12))
    run.sync.detach()
    return [str(warning.message) for warning in caught if "local steps" in str(warning.message)]


def test_a_delta_out_of_reach_is_said_once() -> None:
    rank_0, rank_1 = on_ranks(stay_local, 2, FAR)
    assert len(rank_0) == 1
    assert "delta=1e+09" in rank_0[0]
    assert rank_1 == []
    assert on_ranks(stay_local, 2, math.inf)[0] == [], "it was asked for"
    assert on_ranks(stay_local, 2, 0.0)[0] == []


def averaged_gradients_after_a_flush() -> tuple[dict[str, Tensor], list[bool]]:
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
    return run.end(), synchronized


def test_a_flush_averages_what_states_of_its_own_have_moved_apart() -> None:
    (weights, synchronized), (others, _) = on_ranks(averaged_gradients_after_a_flush, 2)
    assert synchronized == [True, False, False, True]
    assert_same(others, weights)


# --- checkpoints of earlier versions ------------------------------------------------------------------------------


def in_former_form(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state as the version before the engine of replicas wrote it."""
    units = [
        {
            "optimizer": unit["optimizer"],
            "states_diverged": unit["states_diverged"],
            "trigger": {name: unit["trigger"][name] for name in ("tracker", "threshold")},
            "replicas": unit["fragments"]["replicas"],
            "gradients": unit["trigger"].get("gradients", {}),
        }
        for unit in state["units"]
    ]
    [[num_steps, num_local_steps]] = [unit["steps"] for unit in state["units"]]
    return {**state, "units": units, "steps": [num_local_steps, num_steps - num_local_steps]}


def resume_from_former_state(aggregation: str, resumes: bool) -> dict[str, Tensor]:
    settings = {"delta": 0.3, "smoothing": 0.3, "aggregation": aggregation, "compression": "int8"}
    run = begin(**settings)
    run.steps(range(5))
    run.sync.flush()
    weights, saved = state(run.model), in_former_form(run.sync.state_dict())
    run.sync.resume()
    if resumes:
        run.sync.detach()
        run = begin(seeded_mlp(seed=1), **settings)
        run.model.load_state_dict(weights)
        run.sync.load_state_dict(saved)
    run.steps(range(5, 10))
    run.sync.detach()
    return {**state(run.model), "lssr": torch.tensor(run.sync.lssr)}


@pytest.mark.parametrize("aggregation", ["parameters", "gradients"])
def test_a_state_of_an_earlier_version_resumes(aggregation: str) -> None:
    whole, resumed = (on_ranks(resume_from_former_state, 2, aggregation, resumes) for resumes in (False, True))
    for expected, actual in zip(whole, resumed, strict=True):
        assert 0 < expected["lssr"] < 1
        assert_same(actual, expected)


def resume_in_double_precision() -> bool:
    """NAdam keeps a float32 product for weights of float64, which its own ``load_state_dict`` would cast."""
    outcomes = []
    for resumes in (False, True):
        model = nn.Linear(4, 2).double()
        nn.init.constant_(model.weight, 0.1)
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
        sync = SelSync(model, optimizer, delta=FAR)
        for i in range(8):
            if i == 4 and resumes:
                sync.flush()
                weights, saved = state(model), sync.state_dict()
                sync.detach()
                model = nn.Linear(4, 2).double()
                model.load_state_dict(weights)
                optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
                sync = SelSync(model, optimizer, delta=FAR)
                sync.load_state_dict(saved)
            optimizer.zero_grad()
            model(torch.full((3, 4), float(i + dist.get_rank()), dtype=torch.float64)).sum().backward()
            sync.step()
        outcomes.append(model.weight.detach().clone())
        sync.detach()
    return torch.equal(*outcomes)


def test_a_run_in_double_precision_resumes_bit_for_bit() -> None:
    assert on_ranks(resume_in_double_precision, 2) == [True] * 2
