"""SelSync where it is flushed, written to, skipped or misused: all ranks agree afterwards, or an error says why not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lightning_pipesync import SelSync
from lightning_pipesync.methods.replicas import trigger
from tests.references.selsync import mean
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, raised
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


def step_while_flushed(aggregation: str) -> list[dict[str, Tensor]]:
    run = local(aggregation=aggregation)
    run.sync.flush()
    states = [state(run.model)]
    run.step(3)
    states.append(state(run.model))
    run.sync.resume()
    states.append(state(run.model))
    return [*states, run.end()]


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
        **{aggregation: partial(step_while_flushed, aggregation) for aggregation in AGGREGATIONS},
        "written to": write_while_flushed,
        "before the step": flush_before_the_step,
        "loaded": load_while_flushed,
        "states apart": flush_with_states_apart,
    }
    outcomes = launch_cases(cases, 2)
    for aggregation, rank in product(AGGREGATIONS, range(2)):
        flushed, stepped, resumed, last = outcomes[aggregation][rank]
        model = seeded_mlp(batch_norm=True)  # a step without resume goes on from the average
        model.load_state_dict(flushed)
        loss(model, 3, rank).backward()
        torch.optim.SGD(model.parameters(), lr=0.05).step()
        assert_same(stepped, state(model))
        assert_same(resumed, stepped, "there is nothing to go back to")
        for name, value in stepped.items():
            both = [of_rank[1][name] for of_rank in outcomes[aggregation]]
            assert torch.equal(last[name], mean(both) if value.is_floating_point() else both[0])
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


# --- steps that are skipped -------------------------------------------------------------------------------------------

SKIPPED = (0, 4, 5, 9)


def skip(way: str, aggregation: str) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    """Steps SKIPPED are skipped in a way, or (accumulated) their gradients are added to the next ones."""
    run = Run(SelSync, delta=0.2, smoothing=0.3, window=3, aggregation=aggregation)
    if way == "late flags":  # as on CUDA, where they are sent with the update
        run.sync.transport.device = torch.device("cuda")
    changes, synchronized = [], []
    for i in range(14):
        if i in SKIPPED and way == "not measured":
            continue
        loss(run.model, i, dist.get_rank()).backward()
        for _ in range(1 + (i in SKIPPED)):  # it may well be clipped twice
            run.sync.clip(1.0)
        if i not in SKIPPED:
            run.sync.step()
            changes.append(run.sync.last.relative_change)
            synchronized.append(run.sync.last.synchronized)
        if i not in SKIPPED or way != "accumulated":
            run.optimizer.zero_grad(set_to_none=way != "set to zero")
    own = state(run.model)
    run.end()
    return changes, synchronized, own


def test_a_step_that_all_ranks_skip_was_never_measured() -> None:
    """The same decisions and the same weights, bit for bit; only what is accumulated is another gradient."""
    ways = ("not measured", "set to None", "set to zero", "accumulated", "late flags")
    kinds = list(product(ways, AGGREGATIONS))
    outcomes = launch_cases({kind: partial(skip, *kind) for kind in kinds}, 2)
    for way, aggregation in kinds[2:]:
        for rank, (changes, synchronized, weights) in enumerate(outcomes[way, aggregation]):
            expected = outcomes["not measured", aggregation][rank]
            assert 1 < sum(expected[1]) < len(expected[1]), "the test must see both kinds of step"
            if way == "accumulated":
                assert changes != expected[0], "the sum is measured"
                assert synchronized == outcomes[way, aggregation][0][1]
            else:
                assert (changes, synchronized) == expected[:2], way
                assert_same(weights, expected[2], way)


def named(aggregation: str, delta: float, late: bool) -> bool:
    """Returns whether ranks can still talk when one of them has skipped a step."""
    return aggregation == "gradients" or delta > 0 or late


def skip_alone(aggregation: str, delta: float, late: bool, then: str) -> tuple[Any, int]:
    """Rank 1 skips a step; the first one was synchronized."""
    run = Run(SelSync, delta=delta, aggregation=aggregation, timeout_s=60 if named(aggregation, delta, late) else 5)
    if late:
        run.sync.transport.device = torch.device("cuda")

    def train_on() -> None:
        for i in range(2 if then == "flush" else 8):
            run.backward(i)
            run.sync.clip(1.0)
            if i != 1 or dist.get_rank() != 1:
                run.sync.step()
        run.sync.flush()

    outcome = raised(train_on)
    run.sync.detach(0.1)
    dist.barrier()
    return outcome, run.sync.num_local_steps + run.sync.num_synchronized_steps


def test_a_step_that_one_rank_skips_is_an_error_on_all() -> None:
    """Named where ranks can still talk; after timeout_s where one waits for an average that the other has skipped."""
    kinds = [*product(AGGREGATIONS, (0.0, FAR), (False,), ("step", "flush")), ("parameters", 0.0, True, "step")]
    outcomes = launch_cases({kind: partial(skip_alone, *kind) for kind in kinds}, 2)  # type: ignore[arg-type]
    for kind in kinds:
        words = "have not skipped the same steps of SGD" if named(*kind[:3]) else ""
        for outcome, steps in outcomes[kind]:
            assert_raised(outcome, "RuntimeError", words)
            assert steps <= 2


def measure_twice(within: bool) -> tuple[tuple[str, str] | None, bool]:
    """Measures a gradient twice: by a closure that is evaluated twice, or with nothing in between."""
    run = Run(SelSync, delta=math.inf)

    def evaluate_twice() -> None:
        for i in range(2):
            if within or i == 0:
                loss(run.model, i, 0).backward()
            run.sync.reduce()

    outcome = raised(lambda: run.sync.step(evaluate_twice) if within else evaluate_twice())
    loss(run.model, 0, 0).backward()
    run.sync.step()
    run.sync.detach()
    return outcome, math.isinf(run.sync.last.relative_change)


# --- what would part the ranks ----------------------------------------------------------------------------------------


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


def start_sparse() -> tuple[str, str] | None:
    """None waits for the one that has raised."""
    model = nn.Sequential(nn.Embedding(4, 4, sparse=dist.get_rank() == 1), nn.Linear(4, 2))
    return raised(lambda: begin(model, timeout_s=20))


def start_frozen() -> tuple[str, str] | None:
    return raised(lambda: SelSync(seeded_mlp(), torch.optim.SGD([{"params": []}])))


def set_delta(first: float) -> tuple[Any, list[float], int]:
    """What is raised where delta is set during training; deltas after resumptions; and synchronized steps then."""
    run = Run(SelSync, delta=first)
    run.steps(range(4))
    before = run.sync.state_dict()
    refused = raised(lambda: setattr(run.sync, "delta", 0.0))
    run = run.resumed(seeded_mlp(seed=1))
    deltas, synchronized = [run.sync.delta], run.sync.num_synchronized_steps
    run.steps(range(4, 8))
    synchronized = run.sync.num_synchronized_steps - synchronized
    run.sync.load_state_dict(before)
    saved = run.sync.state_dict()
    run.sync.detach()
    other = Run(SelSync, delta=5.0)
    other.sync.load_state_dict(saved)
    deltas += [run.sync.delta, other.sync.delta]
    other.sync.detach()
    return refused, deltas, synchronized


def resume_with_another_delta(before: Any, after: Any) -> tuple[str, str] | None:
    saved, resumed = (Run(SelSync, "adamw", delta=delta) for delta in (before, after))
    refused = raised(lambda: resumed.sync.load_state_dict(saved.sync.state_dict()))
    saved.sync.detach()
    resumed.sync.detach()
    return refused


def stay_local(delta: float) -> list[str]:
    run = begin(lr=0.001, delta=delta)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(trigger, "MANY_LOCAL_STEPS", 5):
        warnings.simplefilter("always")
        run.steps(range(12))
    run.sync.detach()
    return [str(warning.message) for warning in caught if "local steps" in str(warning.message)]


def test_misuse_is_named() -> None:
    outcomes = launch_cases(
        {
            "within": partial(measure_twice, True),
            "between": partial(measure_twice, False),
            "directly": step_directly,
            "sparse": start_sparse,
            "frozen": start_frozen,
            "set": partial(set_delta, FAR),
            "set after no flags": partial(set_delta, math.inf),
            "auto": partial(resume_with_another_delta, 0.3, "auto"),
            "given": partial(resume_with_another_delta, "auto", 0.3),
            **{delta: partial(stay_local, delta) for delta in (FAR, math.inf, 0.0)},
        },
        2,
    )
    for rank in range(2):
        assert_raised(outcomes["within"][rank][0], "RuntimeError", "evaluate a closure only once")
        assert outcomes["between"][rank] == (None, True), "the measurement of the gradient that was added to is undone"
        assert_raised(outcomes["directly"][rank], "RuntimeError", "SGD.step() was called directly")
        assert_raised(outcomes["sparse"][rank], "ValueError", "sparse=True", *(["Rank 1 "] if rank == 0 else []))
        assert_raised(outcomes["frozen"][rank], "ValueError", "nothing to train")
        assert outcomes["set"][rank] == (None, [0.0, FAR, 5.0], 4), "resumed, unless the setting is another"
        refused, deltas, _ = outcomes["set after no flags"][rank]
        assert_raised(refused, "ValueError", "delta=0.0", "delta=inf")
        assert deltas == [math.inf, math.inf, 5.0]
        for name in ("auto", "given"):  # only one of them has an outer momentum
            assert_raised(outcomes[name][rank], "ValueError", "'outer_momentum': [0.3]", "'outer_momentum': [0.0]")
    [said], nothing = outcomes[FAR]
    assert "delta=1e+09" in said, "out of reach: told once, by one rank"
    assert nothing == []
    assert outcomes[math.inf] == outcomes[0.0] == [[], []]
