"""Replicas that are jobs of their own refuse what they cannot do, by name, and wait for nobody for ever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from lightning_pipesync import EAPipe, LocalSGD, LocalSGDConfig, PipeSyncPlugin, SelSync
from lightning_pipesync.accelerate.launched import check_method
from lightning_pipesync.core import extras
from lightning_pipesync.core.faults.lighthouse import Lighthouse, Quorum, Standing
from tests.support.harness import assert_raised, free_port, on_ranks, raised
from tests.support.models import OPTIMIZERS, loss, seeded_mlp
from tests.support.replica_jobs import TIMEOUT_S, become_replica, launch_replicas, lighthouse, logged, wait_for

THERE = "host0:29510"


@pytest.mark.parametrize("address", ["host0", "host0:", ":29510", "host0:port"])
def test_a_lighthouse_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ValueError, match=r"lighthouse.*host:port") as refused:
        LocalSGDConfig(lighthouse=address)
    assert repr(address) in str(refused.value)


@pytest.mark.parametrize(
    "settings", [{"injection": (0.5, 0.5)}, {"partition": "seldp"}, {"warmup_steps": 3}, {"period": "selsync"}]
)
def test_settings_that_need_all_replicas_all_the_time_are_refused(settings: dict[str, Any]) -> None:
    [(name, value)] = settings.items()
    with pytest.raises(ValueError, match=f"lighthouse='{THERE}' is for replicas that") as refused:
        LocalSGDConfig(lighthouse=THERE, **settings)
    assert f"{name}={value!r}" in str(refused.value)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "torchft")
    with pytest.raises(ModuleNotFoundError, match=rf"lighthouse='{THERE}' needs torchft.*\[torchft\]"):
        Lighthouse(THERE, [], timeout_s=1)


def test_other_methods_refuse_to_be_launched_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPESYNC_LIGHTHOUSE", THERE)
    model = seeded_mlp()
    for method, make in {
        "SelSync": lambda: SelSync(model, OPTIMIZERS["sgd"](model)),
        "SelSync ": lambda: check_method(PipeSyncPlugin("selsync")),  # of an Accelerator that attaches nothing
        "EAPipe": lambda: EAPipe(model, None, lambda parameters: SGD(parameters, lr=0.1)),
    }.items():
        with pytest.raises(ValueError, match=rf"PIPESYNC_LIGHTHOUSE={THERE} is set.*{method.strip()} needs all ranks"):
            make()
    with pytest.raises(ValueError, match=r"and no method: set PIPESYNC_METHOD=local_sgd"):
        check_method(None)


def begin_badly(address: str, nobody: str) -> dict[str, Any]:
    """Returns what is raised without join(), by too few replicas, and without a lighthouse."""
    outcomes: dict[str, Any] = {}
    model = seeded_mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    become_replica(address, 0, number=2)
    sync = LocalSGD(model, optimizer, timeout_s=1)

    def step() -> None:
        loss(model, 0, 0).backward()
        sync.step()

    outcomes["not joined"] = raised(step)
    outcomes["too few"] = raised(sync.join)
    sync.detach()
    elastic: dict[str, Any] = {"outer_optimizer": "elastic", "elastic_force": 0.8}
    outcomes["too much force"] = raised(lambda: LocalSGD(model, optimizer, **elastic))
    become_replica(nobody, 0, number=2)
    outcomes["no lighthouse"] = raised(lambda: LocalSGD(model, optimizer, timeout_s=1))
    return outcomes


def test_a_replica_that_cannot_begin_says_why() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    with lighthouse() as address:
        [outcomes] = on_ranks(begin_badly, 1, address, nobody, init=False)
    assert_raised(outcomes["not joined"], "RuntimeError", "call join() before the first forward pass")
    assert_raised(outcomes["too few"], "RuntimeError", "num_replicas=2", "timeout_s=1 there are 1: replica 0 (host ")
    assert_raised(outcomes["too much force"], "ValueError", "elastic_force=0.8", "to 2 replicas", "set 0.5 at most")
    assert_raised(outcomes["no lighthouse"], "RuntimeError", nobody, "timeout_s=1", "pipesync lighthouse")


def train_in_a_job_of_two(address: str) -> Any:
    become_replica(address, 0, number=2)
    model = seeded_mlp()
    return raised(lambda: LocalSGD(model, OPTIMIZERS["sgd"](model)))


def test_a_job_has_one_replica() -> None:
    for outcome in on_ranks(train_in_a_job_of_two, 2, "127.0.0.1:1"):
        assert_raised(outcome, "ValueError", "lighthouse='127.0.0.1:1'", "this job has 2")


def begin_with(replica: int, differs: str) -> tuple[tuple[str, str] | None, int]:
    """Begins with another learning rate than the other replica, or other batches; returns the number of rounds, too."""
    model = seeded_mlp()
    optimizer = SGD(model.parameters(), lr=0.1 + replica * (differs == "rate"))
    sync = LocalSGD(model, optimizer, period=2, timeout_s=20 if differs == "rate" else TIMEOUT_S)

    def train() -> None:
        sync.join()
        size = 4 + 4 * replica * (differs == "data")
        for _ in zip(range(4), sync.prepare_train_loader(DataLoader(range(40), batch_size=size)), strict=False):
            optimizer.zero_grad()
            loss(model, sync.num_steps, replica).backward()
            sync.step()

    outcome = raised(train), sync.num_rounds
    sync.detach()
    return outcome


def test_replicas_that_begin_have_the_same_data_and_hyperparameters() -> None:
    """One with other data is refused at the first round, and the first goes on."""
    first, refused = launch_replicas(begin_with, 2, "data")
    assert first == (None, 2)
    assert_raised(refused[0], "ValueError", "with batch_size=8, and the others with batch_size=4")
    assert refused[1] == 0
    (alone, _), (refused, _) = launch_replicas(begin_with, 2, "rate")
    assert_raised(refused, "ValueError", "The ranks differ in lr of group 0 of SGD: rank 0 has 0.1, rank 1 has 1.1")
    assert_raised(alone, "RuntimeError", "Training begins with num_replicas=2", "there are 1")


def come_with_too_much_force(replica: int, folder: Path) -> tuple[list[str], list[float]]:
    """Trains with a force for one replica; another one comes. Returns what is said, and by round the center."""
    if replica:
        wait_for(folder / "0")
    weight = nn.Parameter(torch.tensor([1.0]))
    settings: dict[str, Any] = {"outer_optimizer": "elastic", "elastic_force": 0.8, "timeout_s": TIMEOUT_S}
    with logged() as said:
        sync = LocalSGD(nn.ParameterList([weight]), SGD([weight], lr=0.0), period=1, **settings)
        (folder / str(replica)).touch()
        sync.join()
        centers = []
        while sync.num_steps < 8:
            if sync.num_steps == 1:
                wait_for(folder / "1")
            if sync.num_steps == 4:
                weight.data.fill_(1.0 + replica)
            weight.sum().backward()
            sync.step()
            sync.flush()
            centers.append(weight.item())
            sync.resume()
    sync.detach()
    return said, centers


def test_the_force_is_never_too_large_for_those_who_have_come(tmp_path: Path) -> None:
    """The center is between the replicas, and they come together."""
    outcomes = launch_replicas(come_with_too_much_force, 2, tmp_path, num_replicas=1)
    for said, centers in outcomes:
        assert any("elastic_force=0.8" in each and "2 replicas" in each and "set 0.5" in each for each in said), said
        assert all(1.0 <= center <= 2.0 for center in centers[-4:]), centers
    assert outcomes[0][1][-1] == pytest.approx(4 / 3, abs=0.05)


def test_a_lighthouse_that_was_started_again_does_not_divide_replicas() -> None:
    """It knows of nobody at first, and would answer the first that asks that it is alone."""
    port = free_port()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        first = stack.enter_context(ExitStack())
        address = first.enter_context(lighthouse(port))
        replicas = [Lighthouse(address, [], TIMEOUT_S) for _ in range(2)]
        for replica in replicas:
            stack.callback(replica.close)

        def meet(replica: Lighthouse) -> None:
            while len(replica.ask(Standing()).members) < len(replicas):
                pass  # the other one has not yet told that it lives

        def ask(replica: Lighthouse, after_s: float) -> Quorum:
            time.sleep(after_s)
            return replica.ask(Standing())

        ids = sorted(replica.id for replica in replicas)
        list(pool.map(meet, replicas))
        first.close()
        again = threading.Timer(1.0, lambda: stack.enter_context(lighthouse(port)))
        again.start()
        quorums = list(pool.map(ask, replicas, (0.0, 1.5)))
        again.join()
    for quorum in quorums:
        assert [member.id for member in quorum.members] == ids
