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
from lightning_pipesync.methods.method import Method
from tests.support.case_table import Outcomes, launch_cases

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "dear": (DeAR, {"fusion": "none", "compression": "int8"}),
    "selsync": (SelSync, {"delta": 0.0}),
    "selsync, gradients": (SelSync, {"delta": 0.0, "aggregation": "gradients"}),
    "selsync, overlap": (SelSync, {"delta": 0.0, "overlap": "forward"}),
    "local_sgd": (LocalSGD, {"period": 1}),
    "pipe_sgd": (PipeSGD, {}),
    "parameter_server": (ParameterServer, {}),
}
#: What must be in the profile of the training thread, and of other threads.
EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    "dear": (
        {"wait for flags"},
        {
            "reduce_scatter bucket 1 (int8) start",
            "reduce_scatter bucket 1 (int8) finish",
            "all_gather bucket 0 (int8) finish",
            "update bucket 0 (int8)",
        },
    ),
    "selsync": (
        {"trigger", "start average of fragment 0", "apply average of fragment 0", "wait for all_reduce"},
        set(),
    ),
    "selsync, gradients": ({"trigger", "average gradients"}, set()),
    "selsync, overlap": ({"trigger"}, {"all_reduce bucket 0 start", "all_reduce bucket 0 finish"}),
    "local_sgd": ({"start average of fragment 0"}, set()),
    "pipe_sgd": ({"update", "wait for all_reduce"}, {"all_reduce bucket 0 finish"}),
    "parameter_server": (
        {"push to server 0", "push to server 1", "pull", "wait for weights"},
        {"send Push", "update of server"},
    ),
}


#: What must be in the profile of each stage of a pipeline: on rank 1 the first one, on rank 0 the second.
OF_STAGES: dict[str, list[tuple[set[str], set[str]]]] = {
    "ea_pipe": [
        (
            {"forward of mini-batch 3 in stage 2", "backward of mini-batch 3 in stage 2", "send gradients", "update"},
            {"recv activations start", "recv activations finish"},
        ),
        (
            {"forward of mini-batch 4 in stage 1", "backward of mini-batch 4 in stage 1", "send activations", "update"},
            {"recv gradients start", "recv gradients finish"},
        ),
    ],
    "1f1b": [
        ({"forward of micro-batch 3 in stage 2", "backward of micro-batch 3 in stage 2", "update"}, set()),
        ({"forward of micro-batch 1 in stage 1", "backward of micro-batch 1 in stage 1", "update"}, set()),
    ],
}


def ranges(name: str, everywhere: bool = True) -> tuple[set[str], set[str]]:
    """Returns the package's ranges in a profile of a method."""
    kind, settings = CASES[name]
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    sync = kind(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    return recorded(sync, lambda: step(model, sync.step), everywhere)


def ranges_of_stage(algorithm: str) -> tuple[set[str], set[str]]:
    """Returns the package's ranges in a profile of this rank's stage."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    settings = {} if algorithm == "ea_pipe" else {"micro_batches": 3}
    engine = EAPipe(
        layers, cross_entropy, partial(torch.optim.SGD, lr=0.1), algorithm=algorithm, split=(2,), **settings
    )
    return recorded(engine, lambda: engine.train_batch((torch.ones(6, 4), torch.zeros(6, dtype=torch.long))))


def recorded(sync: Method, train: Callable[[], object], everywhere: bool = True) -> tuple[set[str], set[str]]:
    """Returns the package's ranges in a profile of two steps: on this thread, and on others."""
    config = all_threads() if everywhere else None
    for _ in range(2):  # first without a profiler
        train()
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler, profiled("here"):
        for _ in range(2):
            train()
        sync.flush()
    sync.detach()
    own = {event.name: event.thread for event in profiler.events()}[PREFIX + "here"]
    found: tuple[set[str], set[str]] = set(), set()
    for event in profiler.events():
        if event.name.startswith(PREFIX):
            found[event.thread != own].add(event.name.removeprefix(PREFIX))
    return found


def step(model: nn.Module, update: Callable[[], object]) -> None:
    model.zero_grad()
    cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
    update()


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    cases: dict[str, Any] = {name: partial(ranges, name) for name in CASES}
    cases |= {name: partial(ranges_of_stage, name) for name in OF_STAGES}
    return launch_cases({**cases, "this thread": partial(ranges, "dear", everywhere=False)}, 2)


@pytest.mark.parametrize("name", CASES)
def test_work_has_its_name_on_the_thread_that_does_it(name: str, outcomes: Outcomes) -> None:
    of_training, of_others = EXPECTED[name]
    for training, others in outcomes[name]:
        assert of_training <= training, of_training - training
        assert of_others <= others, of_others - others


@pytest.mark.parametrize("name", OF_STAGES)
def test_passes_have_their_mini_batch_and_stage(name: str, outcomes: Outcomes) -> None:
    for expected, found in zip(OF_STAGES[name], outcomes[name], strict=True):
        for of_thread, found_there in zip(expected, found, strict=True):
            assert of_thread <= found_there, of_thread - found_there


def test_only_a_profile_of_all_threads_has_those_of_communication(outcomes: Outcomes) -> None:
    for training, others in outcomes["this thread"]:
        assert training
        assert not others


def test_without_a_profiler_no_range_is_made() -> None:
    with profiled("one") as first, profiled("two") as second:
        assert first is second is None
