"""Parameter servers continue without a learner that is lost, and without one that is only frozen."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from lightning_pipesync.methods.servers.config import ParameterServerConfig, PolicyName
from lightning_pipesync.methods.servers.coordinator import Coordinator
from lightning_pipesync.methods.servers.messages import Decision, Gradient, Request, UpdateSettings
from lightning_pipesync.methods.servers.policies import Policy, Sequencer
from tests.references.parameter_server import replay
from tests.support.harness import DIED, launch, on_ranks, raised
from tests.support.lost_ranks import wait_for
from tests.support.models import OPTIMIZERS, loss, seeded_mlp, state
from tests.support.server_runs import ServedRun, assert_weights

STEPS, LOST_AT, TIMEOUT_S = 12, 5, 15

#: The policies whose updates are not of gradients.
OWN_OPTIMIZERS = ("easgd", "diloco")
POLICIES: dict[str, dict[str, Any]] = {
    "sync": {},
    "k_sync": {"k": 3},
    "k_batch_sync": {"k": 2},
    "k_async": {"k": 3},
    "k_batch_async": {},
    "async": {},
    "n_softsync": {"n": 2},
    "ssp": {"staleness_bound": 1},
}


CONTINUES: dict[str, Any] = {"servers": 1, "on_lost_rank": "continue", "timeout_s": TIMEOUT_S}


def freeze(until: Path) -> None:
    """Stops this process; a child of it wakes it up when a file exists."""
    process = os.getpid()
    if os.fork() == 0:
        with suppress(AssertionError):
            wait_for(until.exists)
        os.kill(process, signal.SIGCONT)
        os._exit(0)
    os.kill(process, signal.SIGSTOP)


def train(policy: str, settings: dict[str, Any], fate: str, folder: Path) -> dict[str, Any]:
    """Trains with a last rank that is lost before its sixth step, and evaluates after that."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = ServedRun(batch_norm=True, policy=policy, **{**CONTINUES, "keep_log": True, **settings})
        sync = run.sync
        for i in range(0 if sync.only_serves else STEPS):
            if rank == last and i == LOST_AT:
                if fate == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                freeze(folder / "continued")
            run.step(i)
        sync.flush()
    (folder / "continued").touch()
    saved = sync.optimizer_state_dict()
    while fate == "freezes" and rank == 0 and not (folder / "told").exists():
        time.sleep(0.1)
    sync.detach()
    return {"weights": state(run.model), "log": sync.log, "said": [str(one.message) for one in said], "saved": saved}


@pytest.mark.parametrize("policy", ["k_sync", "k_batch_sync", "n_softsync", "ssp"])
def test_the_others_continue_without_a_rank_that_dies(policy: str, tmp_path: Path) -> None:
    """K is bounded by who lives, and the log still explains the weights."""
    outcomes = launch(train, 3, policy, POLICIES[policy], "dies", tmp_path, may_die=(2,))
    assert outcomes.pop() == DIED
    log = outcomes[0]["log"]
    versions = replay(seeded_mlp(batch_norm=True), OPTIMIZERS["sgd"], loss, log)
    expected = dict(versions[-1].named_parameters())
    assert_weights([outcome["weights"] for outcome in outcomes], {**outcomes[0]["weights"], **expected})
    used = [(gradient.rank, gradient.step) for update in log for gradient in update.gradients]
    assert max((step for rank, step in used if rank == 2), default=0) <= LOST_AT
    for rank in (0, 1):
        last = max(step for one, step in used if one == rank)
        if policy in ("k_sync", "k_batch_sync"):
            assert last > LOST_AT, "later passes may have been cancelled"
        else:
            assert last == STEPS
    (said,) = (text for text in outcomes[0]["said"] if "Lost" in text)
    assert said.startswith("Lost rank 2 after ")
    assert "training continues on rank 0, 1." in said
    for outcome in outcomes:
        assert len(outcome["saved"]["state"]) == len(expected)
        for index, saved in outcome["saved"]["state"].items():
            momentum = outcomes[0]["saved"]["state"][index]["momentum_buffer"]
            assert torch.equal(saved["momentum_buffer"], momentum), "all ranks can save checkpoints"


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        *((policy, {"servers": 2}) for policy in ("k_batch_async", "sync", "easgd", "diloco")),
        *((policy, {"servers": 1, "dedicated_servers": True}) for policy in ("async", "easgd", "diloco")),
        ("diloco", {"servers": 2, "period": 2, "overlap_steps": 2}),
    ],
    ids=str,
)
def test_several_servers_continue(policy: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """They use the same gradients, whichever of them a learner had reached when it died."""
    given = {**POLICIES.get(policy, {}), **settings, "keep_log": policy not in OWN_OPTIMIZERS}
    *others, lost = launch(train, 4, policy, given, "dies", tmp_path, may_die=(3,))
    assert lost == DIED
    assert_weights([outcome["weights"] for outcome in others], others[0]["weights"])
    (said,) = (text for text in others[0]["said"] if "Lost" in text)
    assert f"continues on rank {'1, 2' if settings['servers'] == 1 else '0, 1, 2'}." in said
    if policy in OWN_OPTIMIZERS:
        return
    log = others[0]["log"]
    last = replay(seeded_mlp(batch_norm=True), OPTIMIZERS["sgd"], loss, log)[-1]
    assert_weights([others[0]["weights"]], dict(last.named_parameters()))
    used = [gradient.rank for update in log for gradient in update.gradients]
    assert [used.count(rank) for rank in range(3)] == [0 if settings["servers"] == 1 else STEPS, STEPS, STEPS]


def lose_all_learners() -> Any:
    run = ServedRun(policy="async", servers=1, dedicated_servers=True, timeout_s=TIMEOUT_S)
    if not run.sync.only_serves:
        os.kill(os.getpid(), signal.SIGKILL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return raised(run.sync.flush)


def test_a_dedicated_server_raises_when_all_learners_are_lost() -> None:
    outcome, *_ = launch(lose_all_learners, 3, may_die=(1, 2))
    assert outcome[0] == "RuntimeError"
    assert "is at fault" in outcome[1]


def save_while_others_train(folder: Path) -> list[Any]:
    """Returns this rank's optimizer state after a flush, which rank 0 reads when the others have continued."""
    run = ServedRun(policy="async", servers=2, timeout_s=TIMEOUT_S)
    rank, sync = run.rank, run.sync
    for step in range(2):
        run.step(step)
        if step == 0:
            sync.flush()
            before = sync.optimizer_state_dict()["state"] if rank else {}
    if rank:
        (folder / str(rank)).touch()
    while not all((folder / str(peer)).exists() for peer in (1, 2)):
        time.sleep(0.05)
    states = before or sync.optimizer_state_dict()["state"]
    dist.barrier()
    sync.detach()
    return [state["momentum_buffer"] for state in states.values()]


def test_a_saved_state_is_that_of_the_last_flush(tmp_path: Path) -> None:
    first, *others = on_ranks(save_while_others_train, 3, tmp_path)
    for states in others:
        for one, other in zip(first, states, strict=True):
            assert torch.equal(one, other)


def test_half_a_gradient_is_not_used() -> None:
    """A gradient counts once all servers have it; so do its learner's later messages."""
    sent: list[tuple[int, Any]] = []
    sequencer = Sequencer(Policy(1, waits=False), range(3))
    given = (lambda *message: sent.append(message), range(3), range(2))
    coordinator = Coordinator(sequencer, *given, keep_log=True, num_reporting=1)
    whole, half, late = (Gradient(2, step, version=0) for step in (1, 2, 3))
    coordinator.arrived(whole)
    coordinator.push(whole, UpdateSettings([]))
    coordinator.push(half, UpdateSettings([]))
    for rank in range(3):
        coordinator.request(rank, Request.RETIRE)
    assert [gradient for update in coordinator.log for gradient in update.gradients] == [whole]
    assert not any(isinstance(what, Decision) and what.whole for _, what in sent), "its learner has not retired"
    coordinator.forget_rank(2)
    coordinator.arrived(late)
    told = [what for rank, what in sent if rank == 1 and isinstance(what, Decision)]
    assert [what.dropped for what in told if what.dropped is not None] == [half, late]
    assert any(what.whole for what in told)
    assert len(coordinator.log) == 1


def train_frozen(folder: Path) -> Any:
    if dist.get_rank() < 2:
        return train("async", {}, "freezes", folder)
    outcome = raised(lambda: train("async", {}, "freezes", folder))
    (folder / "told").touch()
    return outcome


def test_a_frozen_rank_is_told_that_the_others_continued(tmp_path: Path) -> None:
    *others, frozen = on_ranks(train_frozen, 3, tmp_path)
    assert sum(len(update.gradients) for update in others[0]["log"]) == 2 * STEPS + LOST_AT
    assert_weights([outcome["weights"] for outcome in others], others[0]["weights"])
    assert frozen is not None
    assert "Rank 2 was not heard of in time, and counts as lost" in frozen[1]


def freeze_in_a_wait(folder: Path) -> tuple[str, str] | None:
    """Takes a step in which rank 2 waits, frozen, and the others come when it is lost; returns what the step raises."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = ServedRun(policy="sync", **CONTINUES)
        rank = run.rank
        if rank == 2:
            threading.Timer(1.0, freeze, [folder / "lost"]).start()
        while rank == 0 and not any("Lost rank 2" in str(one.message) for one in said):
            time.sleep(0.1)
    if rank == 0:
        (folder / "lost").touch()
    while rank == 1 and not (folder / "lost").exists():
        time.sleep(0.1)
    outcome = raised(lambda: run.step(0))
    if rank == 2:
        (folder / "told").touch()
    while rank == 0 and not (folder / "told").exists():
        time.sleep(0.1)
    run.sync.detach(timeout_s=3.0)
    return outcome


def test_a_rank_that_was_frozen_in_a_wait_is_told_without_asking(tmp_path: Path) -> None:
    *others, frozen = on_ranks(freeze_in_a_wait, 3, tmp_path)
    assert others == [None, None]
    assert frozen is not None
    assert "Rank 2 was not heard of in time, and counts as lost" in frozen[1]


def test_what_arrives_while_a_loss_is_declared_is_not_used() -> None:
    """A message is taken by one thread, and the loss of its sender by another."""
    sent: list[tuple[int, Any]] = []
    sequencer = Sequencer(Policy(2, waits=True), range(3))
    coordinator = Coordinator(sequencer, lambda *message: sent.append(message), range(3), range(1), keep_log=True)
    assert not coordinator.is_evicted(2)
    coordinator.forget_rank(2)
    coordinator.push(Gradient(2, 1, version=0), UpdateSettings([]))
    coordinator.request(2, Request.RETIRE)
    coordinator.push(Gradient(0, 1, version=0), UpdateSettings([]))
    coordinator.push(Gradient(1, 1, version=0), UpdateSettings([]))
    (update,) = coordinator.log
    assert [gradient.rank for gradient in update.gradients] == [0, 1]


def train_and_end_early(policy: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains with a rank 2 that ends without an error and without a flush; the timeout is longer than the test's."""
    run = ServedRun(policy=policy, **{**CONTINUES, "keep_log": True, "timeout_s": 600, **settings})
    for i in range(LOST_AT if run.rank == 2 else STEPS):
        run.step(i)
    if run.rank != 2:
        run.sync.flush()
    run.sync.detach(timeout_s=3.0)
    return {"weights": state(run.model), "log": run.sync.log}


@pytest.mark.parametrize("policy", ["sync", "k_async", "async", "ssp"])
def test_nobody_waits_for_one_that_ends_without_a_flush(policy: str) -> None:
    *others, _ = on_ranks(train_and_end_early, 3, policy, POLICIES[policy])
    log = others[0]["log"]
    last = replay(seeded_mlp(), OPTIMIZERS["sgd"], loss, log)[-1]
    assert_weights([outcome["weights"] for outcome in others], dict(last.named_parameters()))
    used = [gradient.rank for update in log for gradient in update.gradients]
    assert [used.count(rank) for rank in range(3)] == [STEPS, STEPS, LOST_AT]


def outlive_ranks_that_end(ended: tuple[int, ...], settings: dict[str, Any]) -> list[str]:
    """Trains on, or serves, after some ranks have ended and the system has closed their connections; what is warned."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
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
    return [str(one.message) for one in said if "rank" in str(one.message)]


@pytest.mark.parametrize(("ended", "settings"), [((2,), {}), ((1, 2), {"dedicated_servers": True})])
def test_a_rank_that_has_ended_is_not_lost_later(ended: tuple[int, ...], settings: dict[str, Any]) -> None:
    for said in on_ranks(outlive_ranks_that_end, 3, ended, settings):
        assert not said


def lose_one_after_the_other(folder: Path) -> Any:
    """Trains until ranks 3 and 2 are lost, independently, and then rank 0."""
    run = ServedRun(policy="async", **CONTINUES)
    rank = run.rank
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for lost in (3, 2):
            if rank == lost:
                os.kill(os.getpid(), signal.SIGKILL)
            while rank == 0 and not any(f"Lost rank {lost}" in str(one.message) for one in said):
                time.sleep(0.1)
            if rank == 0:
                (folder / str(lost)).write_text(str(said[-1].message))
            while not (folder / str(lost)).exists():
                time.sleep(0.1)
    lost_to_this_rank = run.sync.transport.watch._heartbeat._forgotten
    if rank == 1:
        wait_for(lambda: {2, 3} <= lost_to_this_rank)
        (folder / "missed").touch()
    wait_for((folder / "missed").exists)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(lambda: [run.sync.step() for _ in range(STEPS)])


def test_each_loss_names_the_lost_rank(tmp_path: Path) -> None:
    _, last, *_ = launch(lose_one_after_the_other, 4, tmp_path, may_die=(0, 2, 3))
    for lost in (3, 2):
        said = (tmp_path / str(lost)).read_text()
        assert said.startswith(f"Lost rank {lost} after 0 updates: ")
        assert f"Rank {lost} (host " in said
    assert last[0] == "RuntimeError"
    assert "rank 3" not in last[1].lower()
    assert "rank 2" not in last[1].lower()


def lose_the_server() -> Any:
    run = ServedRun(policy="async", **CONTINUES)
    if run.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return raised(lambda: [run.sync.step() for _ in range(STEPS)])


def test_without_the_server_all_raise() -> None:
    outcomes = launch(lose_the_server, 3, may_die=(0,))
    assert outcomes[0] == DIED
    for outcome in outcomes[1:]:
        assert outcome[0] == "RuntimeError"
        assert "ank 0" in outcome[1]


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
