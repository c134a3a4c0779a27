"""torch.profiler shows what the package does by name, also on its threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from lightning_pipesync import DeAR, EAPipe, LocalSGD, ParameterServer, PipeSGD, SelSync
from lightning_pipesync.core.profiling import PREFIX, profiled
from lightning_pipesync.core.torch_private import all_threads
from tests.support.case_table import Outcomes, launch_cases

Names = tuple[set[str], set[str]]

#: By name a method and its settings, and what must be in the profile of the training thread, and of other threads; of
#: a pipeline, on rank 0 and on rank 1, which has the first stage.
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[Names]]] = {
    "dear": (
        DeAR,
        {"fusion": "none", "compression": "int8"},
        [
            (
                {"wait for flags"},
                {
                    *(f"reduce_scatter bucket 1 (int8) {what}" for what in ("start", "finish")),
                    *("all_gather bucket 0 (int8) finish", "update bucket 0 (int8)"),
                },
            )
        ],
    ),
    "selsync": (
        SelSync,
        {"delta": 0.0},
        [({"trigger", "start average of fragment 0", "apply average of fragment 0", "wait for all_reduce"}, set())],
    ),
    "selsync, gradients": (
        SelSync,
        {"delta": 0.0, "aggregation": "gradients"},
        [({"trigger", "average gradients"}, set())],
    ),
    "selsync, overlap": (
        SelSync,
        {"delta": 0.0, "overlap": "forward"},
        [({"trigger"}, {"all_reduce bucket 0 start", "all_reduce bucket 0 finish"})],
    ),
    "local_sgd": (LocalSGD, {"period": 1}, [({"start average of fragment 0"}, set())]),
    "pipe_sgd": (PipeSGD, {}, [({"update", "wait for all_reduce"}, {"all_reduce bucket 0 finish"})]),
    "parameter_server": (
        ParameterServer,
        {},
        [({"push to server 0", "push to server 1", "pull", "wait for weights"}, {"send Push", "update of server"})],
    ),
    "ea_pipe": (
        EAPipe,
        {"algorithm": "ea_pipe"},
        [
            (
                {*(f"{way} of mini-batch 3 in stage 2" for way in ("forward", "backward")), "send gradients", "update"},
                {"recv activations start", "recv activations finish"},
            ),
            (
                {*(f"{way} of mini-batch 4 in stage 1" for way in ("forward", "backward")), "send activations"},
                {"recv gradients start", "recv gradients finish"},
            ),
        ],
    ),
    "1f1b": (
        EAPipe,
        {"algorithm": "1f1b", "micro_batches": 3},
        [
            ({"forward of micro-batch 3 in stage 2", "backward of micro-batch 3 in stage 2", "update"}, set()),
            ({"forward of micro-batch 1 in stage 1", "backward of micro-batch 1 in stage 1", "update"}, set()),
        ],
    ),
}


def ranges(name: str, everywhere: bool = True) -> Names:
    """Returns the package's ranges in a profile of two steps: on this thread, and on others."""
    kind, settings, _ = CASES[name]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    make, data = partial(torch.optim.SGD, lr=0.1), (torch.ones(6, 4), torch.zeros(6, dtype=torch.long))
    if kind is EAPipe:
        sync = kind(model, cross_entropy, make, split=(2,), **settings)
        train = partial(sync.train_batch, data)
    else:
        sync = kind(model, make(model.parameters()), **settings)

        def train() -> None:
            model.zero_grad()
            cross_entropy(model(data[0]), data[1]).backward()
            sync.step()

    for _ in range(2):  # first without a profiler
        train()
    config = all_threads() if everywhere else None
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler, profiled("here"):
        for _ in range(2):
            train()
        sync.flush()
    sync.detach()
    own = {event.name: event.thread for event in profiler.events()}[PREFIX + "here"]
    found: Names = (set(), set())
    for event in profiler.events():
        if event.name.startswith(PREFIX):
            found[event.thread != own].add(event.name.removeprefix(PREFIX))
    return found


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases = {name: partial(ranges, name) for name in CASES}
    return launch_cases({**cases, "this thread": partial(ranges, "dear", everywhere=False)}, 2)


@pytest.mark.parametrize("name", CASES)
def test_work_has_its_name_on_the_thread_that_does_it(name: str, outcomes: Outcomes) -> None:
    expected = CASES[name][2]
    for of_rank, found in zip(expected * (2 // len(expected)), outcomes[name], strict=True):
        for names, found_there in zip(of_rank, found, strict=True):
            assert names <= found_there, names - found_there


def test_only_a_profile_of_all_threads_has_those_of_communication(outcomes: Outcomes) -> None:
    assert all(training and not others for training, others in outcomes["this thread"])
    with profiled("one") as first, profiled("two") as second:
        assert first is second is None, "without a profiler no range is made"
