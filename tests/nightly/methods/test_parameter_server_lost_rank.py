"""Parameter servers continue without a learner that is lost, and without one that is only frozen."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.methods.servers.config import ParameterServerConfig, PolicyName
from lightning_pipesync.methods.servers.coordinator import Coordinator
from lightning_pipesync.methods.servers.messages import Decision, Gradient, Push, PushArrived, Request, UpdateSettings
from lightning_pipesync.methods.servers.policies import Policy, Sequencer
from tests.references.parameter_server import replay, replay_shards
from tests.support.harness import DIED, assert_raised, launch, on_ranks, raised
from tests.support.lost_ranks import die, wait_for
from tests.support.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.support.server_runs import ServedRun, assert_weights

STEPS, LOST_AT, TIMEOUT_S = 12, 5, 15
CONTINUES: dict[str, Any] = {"servers": 1, "on_lost_rank": "continue", "timeout_s": TIMEOUT_S}
SERVES: dict[str, Any] = {"policy": "async", "servers": 1, "dedicated_servers": True}
SHARDS: dict[str, Any] = {"servers": 2, "independent_shards": True}


@contextmanager
def told() -> Iterator[list[str]]:
    """What this rank is warned of, as it comes."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        texts: list[str] = []
        warnings.showwarning = lambda message, *_: texts.append(str(message))
        yield texts


def freeze(until: Path) -> None:
    """Stops this process; a child of it wakes it up when a file exists."""
    process = os.getpid()
    if os.fork() == 0:
        with suppress(AssertionError):
            wait_for(until.exists)
        os.kill(process, signal.SIGCONT)
        os._exit(0)
    os.kill(process, signal.SIGSTOP)


def train(settings: dict[str, Any], fate: str, folder: Path) -> dict[str, Any]:
    """Trains with a last rank that is lost before its sixth step, and evaluates after that."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with told() as said:
        run = ServedRun(**{**CONTINUES, "keep_log": settings["policy"] not in ("easgd", "diloco"), **settings})
        try:
            for i in range(0 if run.sync.only_serves else STEPS):
                if rank == last and i == LOST_AT:
                    if fate == "ends":
                        break
                    die() if fate == "dies" else freeze(folder / "continued")
                run.step(i)
            if fate != "ends" or rank != last:
                run.sync.flush()
            (folder / "continued").touch()
            if fate == "freezes" and rank == 0:
                wait_for((folder / "told").exists)
            weights, slices = state(run.model), run.slices
        finally:
            run.sync.detach(timeout_s=3.0)
    return {"weights": weights, "log": run.sync.log, "said": said, "slices": slices}


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "k_sync", "k": 3},
        {"policy": "ssp", "staleness_bound": 1},
        {"policy": "sync", "servers": 2},
        {"policy": "easgd", "servers": 2},
        {"policy": "diloco", "servers": 2, "period": 2, "overlap_steps": 2},
        SERVES,
        {**SERVES, "policy": "diloco"},
        {**SHARDS, "policy": "async"},
        {**SHARDS, "policy": "downpour"},
    ],
    ids=str,
)
def test_the_others_continue_without_a_rank_that_dies(settings: dict[str, Any], tmp_path: Path) -> None:
    """They use the same gradients, whichever server a learner had reached when it died; the log explains the weights.

    Where each shard has its own order, a gradient that only one server has is used by that one.
    """
    *others, lost = launch(train, 4, settings, "dies", tmp_path, may_die=(3,), mostly_wait=True)
    assert lost == DIED
    assert_weights([outcome["weights"] for outcome in others], others[0]["weights"])
    (said,) = (text for outcome in others for text in outcome["said"] if "Lost rank 3" in text)
    assert f"continues on rank {'1, 2' if 'dedicated_servers' in settings else '0, 1, 2'}." in said
    if settings["policy"] in ("easgd", "diloco"):
        return
    logs = [outcome["log"] for outcome in others[: 2 if "independent_shards" in settings else 1]]
    given = seeded_mlp(), OPTIMIZERS["sgd"], loss
    expected = replay_shards(*given, logs, others[0]["slices"]) if len(logs) == 2 else replay(*given, logs[0])[-1]
    assert_weights([others[0]["weights"]], state(expected))
    for log in logs:
        used = [gradient.rank for update in log for gradient in update.gradients]
        if settings["policy"] == "k_sync":  # later passes may have been cancelled
            assert all(used.count(rank) > LOST_AT for rank in (0, 1))
        else:
            first = 0 if "dedicated_servers" in settings else STEPS
            assert [used.count(rank) for rank in range(3)] == [first, STEPS, STEPS]
        assert used.count(3) <= LOST_AT


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_nobody_waits_for_one_that_ends_without_a_flush(policy: str, tmp_path: Path) -> None:
    *others, _ = on_ranks(train, 3, {"policy": policy, "timeout_s": 600}, "ends", tmp_path)
    log = others[0]["log"]
    last = replay(seeded_mlp(), OPTIMIZERS["sgd"], loss, log)[-1]
    assert_weights([outcome["weights"] for outcome in others], state(last))
    used = [gradient.rank for update in log for gradient in update.gradients]
    assert [used.count(rank) for rank in range(3)] == [STEPS, STEPS, LOST_AT]


def train_frozen(folder: Path) -> Any:
    given = {"policy": "async"}, "freezes", folder
    if dist.get_rank() < 2:
        return train(*given)
    outcome = raised(lambda: train(*given))
    (folder / "told").touch()
    return outcome


def test_a_frozen_rank_is_told_that_the_others_continued(tmp_path: Path) -> None:
    *others, frozen = on_ranks(train_frozen, 3, tmp_path)
    assert sum(len(update.gradients) for update in others[0]["log"]) == 2 * STEPS + LOST_AT
    assert_weights([outcome["weights"] for outcome in others], others[0]["weights"])
    assert_raised(frozen, "RuntimeError", "Rank 2 was not heard of in time, and counts as lost")


def freeze_in_a_wait(folder: Path) -> tuple[str, str] | None:
    """Takes a step in which rank 2 waits, frozen, and the others come when it is lost; returns what the step raises."""
    with told() as said:
        run = ServedRun(policy="sync", **CONTINUES)
        if run.rank == 2:
            threading.Timer(1.0, freeze, [folder / "lost"]).start()
        if run.rank == 0:
            wait_for(lambda: any("Lost rank 2" in text for text in said))
            (folder / "lost").touch()
    if run.rank == 1:
        wait_for((folder / "lost").exists)
    outcome = raised(lambda: run.step(0))
    if run.rank == 2:
        (folder / "told").touch()
    if run.rank == 0:
        wait_for((folder / "told").exists)
    run.sync.detach(timeout_s=3.0)
    return outcome


def test_a_rank_that_was_frozen_in_a_wait_is_told_without_asking(tmp_path: Path) -> None:
    *others, frozen = on_ranks(freeze_in_a_wait, 3, tmp_path)
    assert others == [None, None]
    assert_raised(frozen, "RuntimeError", "Rank 2 was not heard of in time, and counts as lost")


def outlive_ranks_that_end(ended: tuple[int, ...], settings: dict[str, Any]) -> list[str]:
    """Trains on, or serves, after some ranks have ended and the system has closed their connections; what is warned."""
    with told() as said:
        run = ServedRun(policy="async", **{**CONTINUES, "timeout_s": 20.0, **settings})
        run.train(range(STEPS))
        run.sync.flush()
        if run.rank not in ended:
            time.sleep(12.0)  # two messages, at least, that say that this rank is alive
            run.sync.resume()
            run.train(range(STEPS))
            run.sync.flush()
            assert run.sync.optimizer_state_dict(run.optimizer)["state"]
        run.sync.detach(timeout_s=1.0)
    return [text for text in said if "rank" in text]


@pytest.mark.parametrize(("ended", "settings"), [((2,), {}), ((1, 2), {"dedicated_servers": True})])
def test_a_rank_that_has_ended_is_not_lost_later(ended: tuple[int, ...], settings: dict[str, Any]) -> None:
    for said in on_ranks(outlive_ranks_that_end, 3, ended, settings):
        assert not said


def save_while_others_train(folder: Path) -> list[Any]:
    """Returns this rank's optimizer state after a flush, which rank 0 reads when the others have continued."""
    run = ServedRun(policy="async", servers=2, timeout_s=TIMEOUT_S)
    for step in range(2):
        run.step(step)
        if step == 0:
            run.sync.flush()
            before = run.sync.optimizer_state_dict()["state"] if run.rank else {}
    if run.rank:
        (folder / str(run.rank)).touch()
    wait_for(lambda: all((folder / str(peer)).exists() for peer in (1, 2)))
    states = before or run.sync.optimizer_state_dict()["state"]
    dist.barrier()
    run.sync.detach()
    return [state["momentum_buffer"] for state in states.values()]


def test_a_saved_state_is_that_of_the_last_flush(tmp_path: Path) -> None:
    first, *others = on_ranks(save_while_others_train, 3, tmp_path)
    for states in others:
        assert all(map(torch.equal, first, states))


# --- losses without which no training continues -----------------------------------------------------------------------


def lose_one_after_the_other(folder: Path) -> Any:
    """Trains until ranks 3 and 2 are lost, independently, and then rank 0."""
    run = ServedRun(policy="async", **CONTINUES)
    with told() as said:
        for lost in (3, 2):
            if run.rank == lost:
                die()
            if run.rank == 0:
                wait_for(lambda lost=lost: any(f"Lost rank {lost}" in text for text in said))
                (folder / f"{lost}.tmp").write_text(said[-1])
                (folder / f"{lost}.tmp").rename(folder / str(lost))
            wait_for((folder / str(lost)).exists)
    lost_to_this_rank = run.sync.transport.watch._heartbeat._forgotten
    if run.rank == 1:
        wait_for(lambda: {2, 3} <= lost_to_this_rank)
        (folder / "missed").touch()
    wait_for((folder / "missed").exists)
    if run.rank == 0:
        die()
    return raised(lambda: [run.sync.step() for _ in range(STEPS)])


def test_each_loss_names_the_lost_rank(tmp_path: Path) -> None:
    """That of the server, too, without which all raise."""
    _, last, *_ = launch(lose_one_after_the_other, 4, tmp_path, may_die=(0, 2, 3), mostly_wait=True)
    for lost in (3, 2):
        said = (tmp_path / str(lost)).read_text()
        assert said.startswith(f"Lost rank {lost} after 0 updates: ")
        assert f"Rank {lost} (host " in said
    assert_raised(last, "RuntimeError", "ank 0")
    assert "rank 3" not in last[1].lower()
    assert "rank 2" not in last[1].lower()


def lose_learners(lost: tuple[int, ...], settings: dict[str, Any]) -> Any:
    """Returns what a rank raises that trains, or serves dedicatedly, while some die, or end before a flush."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = ServedRun(**SERVES, timeout_s=TIMEOUT_S, **settings)

        def steps() -> None:
            for i in range(0 if run.sync.only_serves else 50):
                if i == 4 and run.rank in lost:
                    die()
                run.step(i)
            run.sync.flush()

        outcome = raised(steps)
        run.sync.detach(timeout_s=1.0)
    return outcome


def test_a_dedicated_server_names_lost_learners() -> None:
    """If it may not continue, or nobody is left."""
    *others, dead = launch(lose_learners, 3, (2,), {"on_lost_rank": "raise"}, may_die=(2,), mostly_wait=True)
    assert dead == DIED
    for outcome in others:
        assert_raised(outcome, "RuntimeError", "Rank 2 (host ")
    outcome, *_ = launch(lose_learners, 3, (1, 2), {}, may_die=(1, 2), mostly_wait=True)
    assert_raised(outcome, "RuntimeError", "is at fault")


def end_without_a_flush() -> tuple[str, str] | None:
    run = ServedRun(**SERVES, on_lost_rank="raise", timeout_s=10)
    outcome = raised(run.sync.flush) if run.sync.only_serves else raised(lambda: run.step(0))
    run.sync.detach(timeout_s=1.0)
    return outcome


def test_a_dedicated_server_does_not_wait_for_ever_for_a_learner_that_has_ended() -> None:
    assert_raised(on_ranks(end_without_a_flush, 2)[0], "RuntimeError", "Rank 1 (host ")


# --- what the coordinator makes of a loss -----------------------------------------------------------------------------


def test_half_a_gradient_is_not_used() -> None:
    """A gradient counts once all servers have it; so do its learner's later messages."""
    sent: list[tuple[int, Any]] = []
    sequencer = Sequencer(Policy(1, waits=False), range(3))
    given = (lambda rank, letter: sent.append((rank, letter.message)), range(3), range(2))
    coordinator = Coordinator(sequencer, *given, ParameterServerConfig(keep_log=True), num_reporting=1)
    whole, half, late = (Gradient(2, step, version=0) for step in (1, 2, 3))
    coordinator.deliver(1, PushArrived(whole))
    coordinator.deliver(2, Push(whole, UpdateSettings([]), [], []))
    coordinator.deliver(2, Push(half, UpdateSettings([]), [], []))
    for rank in range(3):
        coordinator.deliver(rank, Request.RETIRE)
    assert [gradient for update in coordinator.log for gradient in update.gradients] == [whole]
    assert not any(isinstance(what, Decision) and what.whole for _, what in sent), "its learner has not retired"
    coordinator.forget_rank(2)
    coordinator.deliver(1, PushArrived(late))
    told = [what for rank, what in sent if rank == 1 and isinstance(what, Decision)]
    assert [what.dropped for what in told if what.dropped is not None] == [half, late]
    assert any(what.whole for what in told)
    assert len(coordinator.log) == 1


def test_what_arrives_while_a_loss_is_declared_is_not_used() -> None:
    """A message is taken by one thread, and the loss of its sender by another."""
    sequencer = Sequencer(Policy(2, waits=True), range(3))
    coordinator = Coordinator(
        sequencer, lambda *message: None, range(3), range(1), ParameterServerConfig(keep_log=True)
    )
    assert not coordinator.is_evicted(2)
    coordinator.forget_rank(2)
    coordinator.deliver(2, Push(Gradient(2, 1, version=0), UpdateSettings([]), [], []))
    coordinator.deliver(2, Request.RETIRE)
    coordinator.deliver(0, Push(Gradient(0, 1, version=0), UpdateSettings([]), [], []))
    coordinator.deliver(1, Push(Gradient(1, 1, version=0), UpdateSettings([]), [], []))
    (update,) = coordinator.log
    assert [gradient.rank for gradient in update.gradients] == [0, 1]


def test_settings_with_which_training_cannot_continue_are_refused() -> None:
    for servers in (None, 4):
        with pytest.raises(ValueError, match=f"servers={servers} all of the 4 ranks serve: set servers=1"):
            ParameterServerConfig(on_lost_rank="continue", servers=servers).roles(4)
    with pytest.raises(ValueError, match="on_lost_rank='continue' is for plain loops"):
        ParameterServerConfig(on_lost_rank="continue", servers=1).for_framework()


def test_only_asynchronous_policies_continue_by_default() -> None:
    for policy in get_args(PolicyName):
        waits = policy in ("sync", "k_sync", "k_batch_sync", "ssp")
        settings = ParameterServerConfig(policy=policy, servers=2)
        assert settings.roles(4).survives_loss != waits
        assert not settings.roles(2).survives_loss, "all serve"
        assert not settings.for_framework().roles(4).survives_loss
