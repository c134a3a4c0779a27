"""The simulations run as the ranks do: on one thread, so that sums are made in the same order."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from tests.support.progress import Progress

torch.set_num_threads(1)
gc.disable()  # until all is imported, which makes hundreds of thousands of objects that stay


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="skip each test when it starts another process")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Progress(config))
    if config.getoption("--fast"):
        sys.addaudithook(skip_if_a_process_starts)
        BaseProcess.start = lambda process: skip_if_a_process_starts("multiprocessing")  # raises no audit event


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def skip_if_a_process_starts(event: str, args: object = ()) -> None:
    starts = event in {"multiprocessing", "subprocess.Popen", "os.fork", "os.posix_spawn"}
    if starts and "PYTEST_CURRENT_TEST" in os.environ:
        pytest.skip("starts another process")


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What trains in the tests' own process leaves a process group and threads there: `launch` is for that.

    A processor that flushes denormals also spoils the tests that follow.
    """
    yield
    assert torch.get_num_threads() == 1
    assert torch.tensor([1e-40]).mul(1).item() > 0  # else denormals are flushed
    assert not torch.distributed.is_initialized()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a benchmark on this machine are forked: starting them anew takes longer than what they measure."""
    # Imported here, as the process that only hands out the tests needs neither.
    from lightning_pipesync.lab.bench import benchmark
    from tests.support.harness import on_ranks

    def run_here(command: list[str], num_ranks: int, on_line: Callable[[int, str], object]) -> int:
        on_ranks(benchmark.main, num_ranks, *command[3:], init=False)  # after python -m MODULE
        return 0

    monkeypatch.setattr(benchmark, "_run_here", run_here)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the trainings of a file write to, and its tests read."""
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips where the README says that hosts cannot be emulated; what goes wrong elsewhere is a failure."""
    from lightning_pipesync.lab.netlab import network

    try:
        network.check_requirements()
    except RuntimeError as error:
        pytest.skip(str(error))
