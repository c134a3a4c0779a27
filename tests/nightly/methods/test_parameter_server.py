"""Parameter servers: whatever the timing was, the log of a run explains its weights bit for bit."""

from __future__ import annotations

import random
import time
import warnings
from collections import Counter
from functools import cache, partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipesync import LocalSGD, ParameterServer
from lightning_pipesync.methods.servers.messages import Update
from tests.references.parameter_server import replay, replay_diloco, replay_downpour, replay_easgd
from tests.support.case_table import Outcomes, launch_cases
from tests.support.harness import on_ranks, raised
from tests.support.lost_ranks import wait_for
from tests.support.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.support.server_runs import ServedRun, assert_weights

STEPS = 8
#: A squared distance that some updates exceed, and some do not.
BOUND = 1e-3

POLICIES: dict[str, dict[str, Any]] = {
    "sync": {"policy": "sync"},
    "k_sync": {"policy": "k_sync", "k": 2},
    "k_batch_sync": {"policy": "k_batch_sync", "k": 2},
    "k_async": {"policy": "k_async", "k": 2},
    "k_batch_async": {"policy": "k_batch_async"},
    "async": {"policy": "async"},
    "n_softsync": {"policy": "n_softsync", "n": 2, "staleness_lr": "mean"},
    "by gradient": {"policy": "async", "staleness_lr": "gradient"},
    "ssp": {"policy": "ssp", "staleness_bound": 1},
    "dc_asgd": {"policy": "async", "delay_compensation": "dc_asgd", "dc_lambda": 2.0},
    "dc_asgd, several": {"policy": "k_batch_async", "k": 2, "delay_compensation": "dc_asgd", "dc_lambda": 2.0},
    "distance": {"policy": "async", "staleness_lr": "distance", "distance_bound": BOUND, "servers": 1},
    "distance, several": {
        "policy": "k_batch_async",
        "k": 2,
        "staleness_lr": "distance",
        "distance_bound": BOUND,
        "delay_compensation": "momentum",
    },
    "predicted": {"policy": "async", "delay_compensation": "momentum"},
    "predicted, by half": {"policy": "k_batch_async", "k": 2, "delay_compensation": "momentum", "staleness_lr": "mean"},
    "one server": {"policy": "k_batch_async", "k": 2, "servers": 1},
    "two servers": {"policy": "k_async", "k": 2, "servers": 2},
}
#: By number of ranks the optimizer, and the policies that are trained. On four ranks more gradients make an update.
TRAINED = {
    3: ("sgd", tuple(POLICIES)),
    4: (
        "adamw",
        (
            *("sync", "k_sync", "k_batch_sync", "k_async", "n_softsync", "ssp", "two servers"),
            *("dc_asgd, several", "distance, several", "predicted, by half"),
        ),
    ),
}
#: Number of ranks, optimizer and settings.
DOWNPOUR: list[tuple[int, str, dict[str, Any]]] = [
    (2, "sgd", {"n_push": 1, "n_fetch": 1}),
    (2, "adamw", {"n_push": 2, "n_fetch": 3, "servers": 1}),
    (4, "adamw", {"n_push": 1, "n_fetch": 1}),
    (4, "sgd", {"n_push": 3, "n_fetch": 1}),
]
#: And the elastic force.
EASGD: list[tuple[int, str, dict[str, Any], float]] = [
    (2, "sgd", {"period": 1}, 0.45),
    (3, "adamw", {"period": 3, "servers": 1}, 0.3),
    (4, "sgd", {"period": 2, "elastic_force": 0.5}, 0.5),
]
#: Of asynchronous DiLoCo.
DILOCO: list[tuple[int, str, dict[str, Any]]] = [
    (2, "sgd", {"period": 2, "k": 1, "outer_momentum": 0.0, "outer_lr": 0.5}),
    (3, "adamw", {"period": 3, "k": 2, "servers": 1}),
    (4, "sgd", {"period": 2, "k": 1, "grace_s": 0.02, "staleness_lr": "gradient"}),
    (2, "adamw", {"period": 3, "k": 1, "overlap_steps": 2}),
    (3, "sgd", {"period": 2, "k": 2, "overlap_steps": 2, "servers": 1}),
    (4, "adamw", {"period": 3, "overlap_steps": 1}),
]


def train(optimizer_name: str, settings: dict[str, Any]) -> tuple[list[Update], dict[str, Tensor], dict[str, float]]:
    """Trains with delays at random, other ones in each run; one rank takes fewer steps."""
    run = ServedRun(optimizer_name, keep_log=True, **settings)
    rank, model, optimizer, sync = run.rank, run.model, run.optimizer, run.sync
    delays = random.Random()

    for i in range(STEPS - 2 * (rank == 1)):

        def closure(i: int = i) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, i, rank)
            time.sleep(delays.choice([0.0, 0.0, 0.01, 0.03]))
            value.backward()
            if settings["policy"] in ("easgd", "diloco"):
                sync.reduce()
            return value

        sync.step(lambda: optimizer.step(closure))
        if i == STEPS // 2:
            sync.flush()
            sync.resume()
    sync.flush()
    sync.resume()
    sync.flush()  # no step is between, as after a validation at the end
    metrics = sync.metrics()
    sync.detach()
    return sync.log, state(model), metrics


@cache
def trained(world_size: int) -> Outcomes:
    optimizer, policies = TRAINED.get(world_size, ("", ()))
    cases: dict[Any, Any] = {policy: partial(train, optimizer, POLICIES[policy]) for policy in policies}
    for number, name, given in DOWNPOUR:
        if number == world_size:
            cases["downpour", name] = partial(train, name, {"policy": "downpour", **given})
    for number, name, given, _ in EASGD:
        if number == world_size:
            cases["easgd"] = partial(train, name, {"policy": "easgd", **given})
    for number, name, given in DILOCO:
        if number == world_size:
            cases["diloco", name] = partial(train, name, {"policy": "diloco", **given})
    return launch_cases(cases, world_size)


@pytest.mark.parametrize(
    ("world_size", "policy"), [(number, policy) for number, (_, policies) in TRAINED.items() for policy in policies]
)
def test_the_log_explains_the_weights(world_size: int, policy: str) -> None:
    outcomes, optimizer = trained(world_size)[policy], TRAINED[world_size][0]
    log = outcomes[0][0]
    given = {name: POLICIES[policy].get(name, 0.0) for name in ("dc_lambda", "distance_bound")}
    versions = replay(seeded_mlp(), OPTIMIZERS[optimizer], loss, log, **given)
    if policy == "distance":
        ignored = replay(seeded_mlp(), OPTIMIZERS[optimizer], loss, log)
        assert not all(map(torch.equal, ignored[-1].parameters(), versions[-1].parameters())), "the rate has changed"
    assert_weights([weights for _, weights, _ in outcomes], state(versions[-1]))
    assert all(metrics["updates"] == len(log) for *_, metrics in outcomes)
    check_log(policy, log, world_size)


@pytest.mark.parametrize(("world_size", "optimizer", "settings"), DOWNPOUR)
def test_the_log_explains_downpour(world_size: int, optimizer: str, settings: dict[str, Any]) -> None:
    outcomes, n_fetch = trained(world_size)["downpour", optimizer], settings["n_fetch"]
    log = outcomes[0][0]
    expected = state(replay_downpour(seeded_mlp(), OPTIMIZERS[optimizer], loss, log)[-1])
    assert_weights([weights for _, weights, _ in outcomes], expected)
    for rank in range(world_size):
        of_rank = [update.gradients[0] for update in log if update.gradients[0].rank == rank]
        last = STEPS - 2 * (rank == 1)
        assert [gradient.accrued.first_step for gradient in of_rank] == [1, *(one.step + 1 for one in of_rank[:-1])]
        assert of_rank[-1].step == last, "nothing that was accrued is lost"
        fetches = [fetch for gradient in of_rank for fetch in gradient.accrued.fetches if not fetch.before_pass]
        assert {fetch.step % n_fetch for fetch in fetches} == {1 % n_fetch}


@pytest.mark.parametrize(("world_size", "optimizer", "settings", "force"), EASGD)
def test_the_log_explains_easgd(world_size: int, optimizer: str, settings: dict[str, Any], force: float) -> None:
    """With momentum in the learners' optimizers it is EAMSGD."""
    outcomes = trained(world_size)["easgd"]
    log = outcomes[0][0]
    expected = state(replay_easgd(seeded_mlp(), OPTIMIZERS[optimizer], loss, log, force)[-1])
    assert_weights([weights for _, weights, _ in outcomes], expected)
    assert len(log) == sum((STEPS - 2 * (rank == 1)) // settings["period"] for rank in range(world_size))
    assert all(metrics["updates"] == len(log) for *_, metrics in outcomes)


@pytest.mark.parametrize(("world_size", "optimizer", "settings"), DILOCO)
def test_the_log_explains_diloco(world_size: int, optimizer: str, settings: dict[str, Any]) -> None:
    outcomes = trained(world_size)["diloco", optimizer]
    log, period = outcomes[0][0], settings["period"]
    outer = {name: settings[name] for name in ("outer_lr", "outer_momentum") if name in settings}
    expected = state(replay_diloco(seeded_mlp(), OPTIMIZERS[optimizer], loss, log, **outer)[-1])
    assert_weights([weights for _, weights, _ in outcomes], expected)
    for rank in range(world_size):
        of_rank = [each for update in log for each in update.gradients if each.rank == rank]
        assert [each.accrued.first_step for each in of_rank] == [1, *(one.step + 1 for one in of_rank[:-1])]
        assert of_rank[-1].step == STEPS - 2 * (rank == 1), "a flush loses no step"
        assert max(each.num_steps for each in of_rank) == period
        under = [fetch.step - one.accrued.first_step + 1 for one in of_rank for fetch in one.accrued.fetches]
        assert all(0 < steps <= settings["overlap_steps"] for steps in under), "a flush takes them earlier"
        assert bool(under) == ("overlap_steps" in settings)
    for update in log:  # each counts by its steps, and by its staleness
        by_staleness = [max(1, number) if "staleness_lr" in settings else 1 for number in update.staleness]
        counts = [each.num_steps / number for each, number in zip(update.gradients, by_staleness, strict=True)]
        assert update.weights == pytest.approx([count * len(counts) / sum(counts) for count in counts])


def train_in_rounds(method: type[Any], settings: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights before a flush at the end of a round, and after it."""
    model = seeded_mlp()
    optimizer = OPTIMIZERS["adamw"](model)
    sync = method(model, optimizer, timeout_s=60, **settings)
    for i in range(12):
        optimizer.zero_grad()
        loss(model, i, dist.get_rank()).backward()
        sync.step()
    weights = {name: value.clone() for name, value in state(model).items()}
    sync.flush()
    flushed = state(model)
    sync.detach()
    return weights, flushed


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_quorum_of_all_is_diloco(overlap_steps: int) -> None:
    """With an overlap until a flush, which takes what is under way."""
    shared = {"period": 4, "overlap_steps": overlap_steps}
    cases = {
        "servers": partial(train_in_rounds, ParameterServer, {"policy": "diloco", **shared}),
        "rounds": partial(train_in_rounds, LocalSGD, {"outer_optimizer": "nesterov", "lr_scale": 1.0, **shared}),
    }
    outcomes = launch_cases(cases, 2)
    for (served, _), (expected, _) in zip(outcomes["servers"], outcomes["rounds"], strict=True):
        assert_weights([served], expected)
    if not overlap_steps:
        assert_weights([flushed for _, flushed in outcomes["servers"]], outcomes["rounds"][0][1])


def train_replica(policy: str, resumed: bool, resumes: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains with one learner, so that timing plays no part; saved and resumed in the middle of a period."""

    def begin(seed: int) -> ServedRun:
        return ServedRun("adamw", seed=seed, policy=policy, period=3)

    run = begin(0)
    for i in range(12):
        if i == 7:
            run.sync.flush()
            center, saved = state(run.model), run.sync.state_dict()
            if resumed:
                run.sync.detach()
                run = begin(1)
                run.model.load_state_dict(center)
                run.sync.load_state_dict(saved)
            elif resumes:
                run.sync.resume()
        run.step(i)
    run.sync.flush()
    weights = state(run.model)
    run.sync.resume()
    own = state(run.model)
    run.sync.detach()
    return weights, own


def test_easgd_resumes_with_its_replicas() -> None:
    cases = [(False, True), (True, True), (False, False)]
    outcomes = launch_cases({case: partial(train_replica, "easgd", *case) for case in cases}, 1)
    ((weights, own),), ((resumed, resumed_own),), ((from_center, _),) = (outcomes[case] for case in cases)
    assert_weights([resumed], weights)
    assert_weights([resumed_own], own)
    assert any(not torch.equal(from_center[name], value) for name, value in weights.items())


def test_diloco_resumes_with_the_states_of_its_optimizers() -> None:
    cases = {resumed: partial(train_replica, "diloco", resumed, False) for resumed in (False, True)}
    outcomes = launch_cases(cases, 1)
    ((weights, own),), ((resumed, resumed_own),) = outcomes[False], outcomes[True]
    assert_weights([resumed], weights)
    assert_weights([own, resumed_own], weights)


def load_in_midst(settings: dict[str, Any]) -> dict[str, Tensor]:
    run = ServedRun(**settings)
    run.steps(range(5))
    run.model.load_state_dict(seeded_mlp(1).state_dict())
    return run.end()


def test_training_continues_from_loaded_weights() -> None:
    """Gradients that were pushed or accrued before, and weights that were requested, have no effect."""
    cases: dict[str, dict[str, Any]] = {
        "downpour": {"policy": "downpour", "n_push": 2},
        "easgd": {"policy": "easgd", "period": 2},
        "diloco": {"policy": "diloco", "period": 3, "k": 1},
        "on their way": {"policy": "diloco", "period": 4, "k": 2, "overlap_steps": 3},
        "k_sync": {"policy": "k_sync", "k": 2},
        "k_batch_async": {"policy": "k_batch_async", "k": 2},
    }
    outcomes = launch_cases({name: partial(load_in_midst, settings) for name, settings in cases.items()}, 3)
    for name in cases:
        assert_weights(outcomes[name], seeded_mlp(1).state_dict())


def stay_at_loaded() -> dict[str, Tensor]:
    run = ServedRun(policy="diloco", compression="topk", period=2, outer_momentum=0.0)
    run.steps(range(5))
    run.model.load_state_dict(seeded_mlp(1).state_dict())
    for optimizer in run.sync.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    run.steps(range(4))
    return run.end()


def test_what_was_not_sent_of_other_weights_is_dropped() -> None:
    """Residuals are of the weights before those that were loaded, from which nothing moves here."""
    assert_weights(on_ranks(stay_at_loaded, 2), seeded_mlp(1).state_dict())


def load_on_some(settings: dict[str, Any]) -> tuple[str, str] | None:
    """Loads weights on rank 1 alone during a training; returns what a rank raises."""
    run = ServedRun(**settings, timeout_s=600)

    def steps() -> None:
        for i in range(0 if run.sync.only_serves else 6):
            if run.rank == 1 and i == 3:
                run.model.load_state_dict(seeded_mlp(1).state_dict())
            run.step(i)
        run.sync.flush()

    outcome = raised(steps)
    run.sync.detach(timeout_s=3.0)
    return outcome


def test_weights_that_some_ranks_load_are_refused_on_all() -> None:
    """Rank 1 waits in its next step until the others come to theirs, or to a flush: not for the timeout."""
    cases: dict[str, dict[str, Any]] = {
        "sync": {"policy": "sync"},
        "async": {"policy": "async"},
        "downpour": {"policy": "downpour", "n_push": 2},
        "dedicated": {"policy": "async", "servers": 1, "dedicated_servers": True, "on_lost_rank": "raise"},
    }
    outcomes = launch_cases({name: partial(load_on_some, settings) for name, settings in cases.items()}, 3)
    for name in cases:
        for outcome in outcomes[name]:
            assert outcome is not None
            assert outcome[0] == "RuntimeError"
            assert "were loaded on rank 1 and not on rank 0, 2: load them on all ranks" in outcome[1]


def check_log(policy: str, log: list[Update], world_size: int) -> None:
    """Asserts what the policy promises."""
    used = [(gradient.rank, gradient.step) for update in log for gradient in update.gradients]
    assert len(used) == len(set(used)), "no gradient is used twice"
    assert [update.version for update in log] == list(range(1, len(log) + 1))
    most = max(len(update.gradients) for update in log)
    if policy in ("sync", "k_sync", "k_batch_sync"):
        assert {one for update in log for one in update.staleness} == {0}
    if policy not in ("k_sync", "k_batch_sync"):
        assert len(used) == world_size * STEPS - 2, "no gradient is lost"
    if policy in ("sync", "k_sync", "k_async", "two servers"):  # distinct learners
        assert all(len({gradient.rank for gradient in update.gradients}) == len(update.gradients) for update in log)
    if policy in ("sync", "k_batch_async"):
        assert most == world_size
    if policy in ("k_sync", "k_batch_sync", "k_async"):
        assert most == 2
    if "predicted" in policy:
        assert any(gradient.ahead for update in log for gradient in update.gradients)
    if policy in ("async", "ssp", "by gradient", "predicted", "dc_asgd"):
        assert most == 1
    if policy == "n_softsync":
        assert most == world_size // 2
    if policy == "by gradient":
        assert all(update.lr_factor == 1 / max(1, update.staleness[0]) for update in log)


def train_unevenly(settings: dict[str, Any], folder: Path, awaited: int) -> list[Update]:
    """Trains with a rank 1 that takes its step `awaited` only when the others have ended, or are held up."""
    run = ServedRun(keep_log=True, **settings)
    if run.rank == 0 and settings["policy"] == "ssp":
        ahead = settings["staleness_bound"] + 1
        Thread(target=tell_of_lead, args=(run.sync.log, ahead, folder / "held up")).start()
    for i in range(STEPS):
        if run.rank == 1 and i == awaited:
            wait_for(lambda: (folder / "held up").exists() or len(list(folder.iterdir())) == 2)
            time.sleep(0.5)  # in which nobody may get further ahead
        run.step(i)
    (folder / str(run.rank)).touch()
    run.end()
    return run.sync.log


def tell_of_lead(log: list[Update], ahead: int, file: Path) -> None:
    """Touches a file when a log of a training on 3 ranks has one that is so many steps ahead of another."""

    def lead() -> int:
        clocks = Counter({0: 0, 1: 0, 2: 0})
        clocks.update(gradient.rank for update in list(log) for gradient in update.gradients)
        return max(clocks.values()) - min(clocks.values())

    wait_for(lambda: lead() == ahead)
    file.touch()


@pytest.mark.parametrize("bound", [0, 2])
def test_nobody_is_further_ahead_than_the_bound(bound: int, tmp_path: Path) -> None:
    log = on_ranks(train_unevenly, 3, {"policy": "ssp", "staleness_bound": bound}, tmp_path, 3)[0]
    clocks, furthest = [0, 0, 0], 0
    for update in log:
        clocks[update.gradients[0].rank] += 1
        furthest = max(furthest, max(clocks) - min(clocks))
    assert clocks == [STEPS] * 3
    assert furthest == bound + 1, "the step that is under way, and those ahead"


@pytest.mark.parametrize("policy", [{"policy": "async"}, {"policy": "n_softsync"}])
def test_a_slow_rank_does_not_stop_the_others(policy: dict[str, Any], tmp_path: Path) -> None:
    """They end while it is in its fifth step."""
    log = on_ranks(train_unevenly, 3, policy, tmp_path, 4)[0]
    of_rank_1 = [(update.version, gradient) for update in log for gradient in update.gradients if gradient.rank == 1]
    last = max(update.version for update in log for gradient in update.gradients if gradient.rank != 1)
    late = [version for version, gradient in of_rank_1 if gradient.step >= 5]
    assert len(late) == STEPS - 4
    assert min(late) >= last


def test_a_slow_ranks_gradient_is_dropped(tmp_path: Path) -> None:
    log = on_ranks(train_unevenly, 3, {"policy": "k_sync", "k": 2}, tmp_path, 0)[0]
    used = [[(gradient.rank, gradient.step) for gradient in update.gradients] for update in log]
    together = [[(0, step), (2, step)] for step in range(1, STEPS + 1)]
    alone = [[(1, step)] for step in range(2, STEPS + 1)]
    assert used == together + alone, "its first one was of the first weights"


def train_from_a_work_queue(delay_s: float, num_workers: int) -> tuple[list[list[int]], float]:
    """Trains two epochs of batches from a work queue, with a slow rank 1, saved and resumed in between."""
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_size=4, shuffle=True, num_workers=num_workers)
    seen: list[list[int]] = []
    saved: dict[str, Any] = {}
    for attempt in range(2):
        run = ServedRun(policy="async", partition="work_queue")
        train_loader = run.sync.prepare_train_loader(loader, seed=1)
        if attempt:
            run.model.load_state_dict(saved["model"])
            run.sync.load_state_dict(saved["sync"])
            train_loader.load_state_dict(saved["loader"])
        for number, (indices,) in enumerate(train_loader):
            seen.append(indices.tolist())
            run.step(number, [delay_s * run.rank])
        run.sync.flush()
        saved = {"sync": run.sync.state_dict(), "loader": train_loader.state_dict(), "model": state(run.model)}
        updates = run.sync.metrics()["updates"]
        run.sync.detach()
    return seen, updates


def test_each_rank_takes_its_next_batch_from_the_queue() -> None:
    """Each sample once an epoch, more of them to the fast rank; in another order in the next epoch."""
    outcomes = launch_cases({workers: partial(train_from_a_work_queue, 0.1, workers) for workers in (0, 1)}, 2)
    for (fast, updates), (slow, _) in (outcomes[0], outcomes[1]):
        everything = sorted(index for batch in (*fast, *slow) for index in batch)
        assert everything == sorted([*range(50), *range(50)])
        assert len(fast) > len(slow) > 0
        assert updates == len(fast) + len(slow) == 2 * 13
        assert len({tuple(batch) for batch in (*fast, *slow)}) == 2 * 13, "batches of the second epoch are other ones"


def resume_a_work_queue(how: str) -> tuple[int, list[str]]:
    """Trains on from a checkpoint after three epochs; returns the batches of the next one, and what is warned of."""
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = ServedRun(policy="async", partition="work_queue")
        train_loader = run.sync.prepare_train_loader(loader)
        for _ in range(3):
            for number, _ in enumerate(train_loader):
                run.step(number)
        run.sync.flush()
        saved = state(run.model), run.sync.state_dict(), train_loader.state_dict()
        run.sync.detach()
        run = ServedRun(policy="async", partition="work_queue")
        train_loader = run.sync.prepare_train_loader(loader)
        run.model.load_state_dict(saved[0])
        run.sync.load_state_dict(saved[1])
        if how == "the loader's state":
            train_loader.load_state_dict(saved[2])
        elif how != "nothing":
            train_loader.set_epoch(int(how))
        num_batches = 0
        for number, _ in enumerate(train_loader):
            run.step(number)
            num_batches += 1
        run.end()
    return num_batches, [str(one.message) for one in caught if "work queue" in str(one.message)]


def test_a_resumed_work_queue_warns_of_epochs_that_were_handed_out() -> None:
    """They give no batches, or begin again: the run goes on with the loader's own state, or with ``set_epoch``."""
    hows = {"the loader's state": 5, "3": 5, "nothing": 5, "2": 0}
    outcomes = launch_cases({how: partial(resume_a_work_queue, how) for how in hows}, 2)
    for how, num_batches in hows.items():
        (first, warned), (second, elsewhere) = outcomes[how]
        assert first + second == num_batches
        assert elsewhere == []
        assert len(warned) == (how in ("nothing", "2"))
        begins = 2 if how == "2" else 0
        assert all(f"begins with epoch {begins}" in text and "until epoch 2" in text for text in warned)


def with_teacher(**settings: Any) -> dict[str, Tensor]:
    """Each rank's teacher follows the weights that it gets itself; nobody changes the frozen layer."""
    model = torch.nn.ModuleDict({"student": seeded_mlp(), "teacher": seeded_mlp(), "frozen": seeded_mlp(1)})
    for name in ("teacher", "frozen"):
        model[name].requires_grad_(False)
    optimizer = OPTIMIZERS["sgd"](model["student"])
    sync = ParameterServer(model, optimizer, policy="async", timeout_s=60, **settings)
    for step in () if sync.only_serves else range(STEPS + dist.get_rank()):
        optimizer.zero_grad()
        loss(model["student"], step, dist.get_rank()).backward()
        sync.step()
        with torch.no_grad():
            for own, other in zip(model["teacher"].parameters(), model["student"].parameters(), strict=True):
                own.lerp_(other, 0.5)
    before = state(model["teacher"])
    sync.flush()
    after = {**state(model), **{f"before.{name}": value for name, value in before.items()}}
    sync.detach()
    return after


@pytest.mark.parametrize("first_learner", [0, 1])
def test_a_teacher_becomes_that_of_the_first_learner(first_learner: int) -> None:
    """It has no optimizer, and each rank another one; rank 0, which only serves, has none but the initial one."""
    settings = {"servers": 1, "dedicated_servers": True} if first_learner else {}
    outcomes = on_ranks(partial(with_teacher, **settings), 3)
    for name, value in outcomes[first_learner].items():
        kind, _, rest = name.partition(".")
        for outcome in outcomes:
            assert kind == "before" or torch.equal(outcome[name], value), name
        if kind == "teacher":
            before = [outcome[f"before.{rest}"] for outcome in outcomes]
            assert torch.equal(value, before[first_learner])
            assert not torch.equal(before[1], before[2]), "or nothing is shown"
