"""The simulations run as the ranks do: on one thread, so that sums are made in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """What trains in the tests' own process leaves a process group and threads there: `launch` is for that."""
    yield
    assert torch.get_num_threads() == 1
    assert not torch.distributed.is_initialized()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a benchmark on this machine are forked: starting them anew takes longer than what they measure."""
    # Imported here, as the process that only hands out the tests needs neither.
    from lightning_pipesync.lab.bench import job, worker
    from tests.harness import launch

    def run_here(command: list[str], num_ranks: int, on_line: Callable[[int, str], object]) -> int:
        launch(worker.main, num_ranks, *command[3:], init=False)  # after python -m MODULE
        return 0

    monkeypatch.setattr(job, "_run_here", run_here)


@pytest.fixture(scope="session")
def machine() -> None:
    """Skips where the README says that hosts cannot be emulated; what goes wrong elsewhere is a failure."""
    from lightning_pipesync.lab.netlab import network

    try:
        network.check_requirements()
    except RuntimeError as error:
        pytest.skip(str(error))
