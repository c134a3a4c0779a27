"""Operations of a communication queue: in order, few at a time, and nobody waits for ever after an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lightning_pipesync.core.comm.comm_queue import IN_FLIGHT, CommQueue
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.traffic import Traffic
from tests.support.harness import raised


class Operations:
    """Operations that finish when they are told to; notes what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.may_finish = [threading.Event() for _ in range(4)]

    def start(self, number: int) -> Handle[int]:
        self.events.append(f"start {number}")

        def wait() -> int:
            assert self.may_finish[number].wait(60)
            self.events.append(f"end {number}")
            return number

        return Handle(wait)


@pytest.fixture
def queue() -> CommQueue:
    return CommQueue("test", torch.device("cpu"), Traffic())


def test_in_order_and_few_at_a_time(queue: CommQueue) -> None:
    operations, after = Operations(), []
    handles = [queue.submit("sum", lambda i=i: operations.start(i), after.append) for i in range(4)]
    for number, handle in enumerate(handles):
        if number == 3:
            queue.start_finishing()
        operations.may_finish[number].set()
        assert handle.wait() == number
        assert after == list(range(number + 1)), "what is to be done after it is done when it has been waited for"
    assert IN_FLIGHT == 2
    assert operations.events == ["start 0", "start 1", "end 0", "start 2", "end 1", "start 3", "end 2", "end 3"]
    queue.close(60)


@pytest.mark.parametrize(("requires", "events"), [(None, ["start 0", "start 1"]), (0, ["start 0", "end 0", "start 1"])])
def test_an_operation_that_requires_another(queue: CommQueue, requires: int | None, events: list[str]) -> None:
    """It starts when the other is complete; otherwise both are in flight at the same time."""
    operations = Operations()
    first = queue.submit("sum", lambda: operations.start(0))
    second = queue.submit("sum", lambda: operations.start(1), requires=None if requires is None else first)
    assert not second.done
    for event in operations.may_finish:
        event.set()
    queue.wait_all()
    assert first.done
    assert operations.events[: len(events)] == events
    queue.close(60)


class WatchedTraffic(Traffic):
    """Tells when somebody has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        with super().waiting(kind):
            self.has_begun.set()
            yield


def test_wait_all() -> None:
    operations, traffic = Operations(), WatchedTraffic()
    queue = CommQueue("test", torch.device("cpu"), traffic)
    queue.submit("sum", lambda: operations.start(0))

    def let_it_finish() -> None:
        traffic.has_begun.wait()
        time.sleep(0.1)
        operations.may_finish[0].set()

    threading.Thread(target=let_it_finish).start()
    queue.wait_all()
    assert operations.events == ["start 0", "end 0"]
    assert traffic.seconds_waited["sum"] >= 0.1
    queue.close(60)


def test_an_error_is_everybodys(queue: CommQueue) -> None:
    operations = Operations()

    def fail() -> Handle[int]:
        raise RuntimeError("a peer is lost")

    failed = queue.submit("sum", fail)
    later = queue.submit("sum", lambda: operations.start(0))
    queue.start_finishing()
    for wait in (failed.wait, later.wait, later.wait, queue.wait_all):
        assert raised(wait) == ("RuntimeError", "a peer is lost")
    assert operations.events == []
    queue.close(60)
    assert raised(lambda: queue.submit("sum", fail)) is not None
