"""Batches from a work queue beside a dedicated server, and after a checkpoint; frameworks have tests of their own."""

from __future__ import annotations

import time
import warnings
from functools import partial

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.case_table import launch_cases
from tests.support.harness import on_ranks
from tests.support.models import state
from tests.support.server_runs import ServedRun


def train_beside_a_server(timeout_s: float, pause_s: float) -> list[int]:
    run = ServedRun(servers=1, dedicated_servers=True, partition="work_queue", timeout_s=timeout_s)
    seen: list[int] = []
    for (indices,) in run.sync.prepare_train_loader(DataLoader(TensorDataset(torch.arange(24)), batch_size=4)):
        seen += indices.tolist()
        run.step(len(seen), [pause_s])
    run.end()
    return seen


def test_only_learners_take_batches_from_the_queue() -> None:
    """The server waits for longer than the timeout, as the learners are alive."""
    serving, *learning = on_ranks(train_beside_a_server, 3, 10.0, 4.0)
    assert serving == []
    assert sorted(index for seen in learning for index in seen) == list(range(24))
    assert all(learning)


def resume(how: str) -> tuple[int, list[str]]:
    """Trains on from a checkpoint after three epochs; returns the batches of the next one, and what is warned of."""
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = ServedRun(policy="async", partition="work_queue")
        train_loader = run.sync.prepare_train_loader(loader)
        for _ in range(3):
            run.train(number for number, _ in enumerate(train_loader))
        run.sync.flush()
        saved = state(run.model), run.sync.state_dict(), train_loader.state_dict()
        run.sync.detach()
        run = ServedRun(policy="async", partition="work_queue")
        train_loader = run.sync.prepare_train_loader(loader)
        run.model.load_state_dict(saved[0])
        time.sleep(0.0 if run.rank else 0.3)  # rank 1 resumes first, and asks rank 0
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
    outcomes = launch_cases({how: partial(resume, how) for how in hows}, 2)
    for how, num_batches in hows.items():
        (first, warned), (second, elsewhere) = outcomes[how]
        assert first + second == num_batches
        assert elsewhere == []
        assert len(warned) == (how in ("nothing", "2"))
        begins = 2 if how == "2" else 0
        assert all(f"begins with epoch {begins}" in text and "until epoch 2" in text for text in warned)
