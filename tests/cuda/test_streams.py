"""Streams and events: work is ordered by the device, and the host waits for none of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.clock import Clock
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.parameters import SquaredNorm
from lightning_pipesync.core.rng import rng_states, seeded, set_rng_states
from tests.cuda.device import DEVICE, needs_cuda, recorded, sleep

pytestmark = needs_cuda


@pytest.fixture
def queue() -> Iterator[CommQueue]:
    queue = CommQueue("test", DEVICE, Traffic())
    yield queue
    queue.close(10)
    torch.cuda.synchronize()


@pytest.fixture
def values() -> Tensor:
    values = torch.ones(100_000, device=DEVICE)
    sleep()  # with all that the tests run then: a kernel is loaded at its first use, for which the host may wait
    (values.fill_(1).mul_(3).clone() + 1).sum().item()
    torch.cuda.synchronize()
    return values.zero_()


class SlowFill:
    """An operation that sleeps, and then fills a tensor with ones, on the stream that starts it.

    Attributes:
        end: the event at its end; None before it has started.
        stream: the stream that it runs on.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self.end: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None

    def start(self) -> Handle[Tensor]:
        sleep()
        self._values.fill_(1)
        self.end, self.stream = recorded(), torch.cuda.current_stream()
        return Handle(lambda: self._values)

    @property
    def running(self) -> bool:
        assert self.end is not None
        return not self.end.query()


def test_an_operation_starts_after_the_callers_work(queue: CommQueue, values: Tensor) -> None:
    """It reads what was enqueued before it was submitted, on another stream, and its host does not wait for that."""
    sleep()
    values.fill_(1)
    filled = recorded()
    operation = queue.submit("copy", lambda: Handle(values.clone))
    queue.start_finishing()
    copy = operation.wait()
    assert not filled.query(), "the host has waited for the caller's work"
    torch.cuda.current_stream().synchronize()
    assert torch.equal(copy, torch.ones_like(copy))


def test_it_does_not_wait_for_work_that_follows(queue: CommQueue, values: Tensor) -> None:
    operation = queue.submit("copy", lambda: Handle(values.clone))
    sleep()
    later = recorded()
    queue.start_finishing()
    operation.wait()
    queue._stream.synchronize()  # type: ignore[union-attr]
    assert not later.query(), "the operation has waited for what was enqueued after it"


def test_waiting_makes_the_stream_wait_and_not_the_host(queue: CommQueue, values: Tensor) -> None:
    slow = SlowFill(values)
    operation = queue.submit("fill", slow.start)
    queue.start_finishing()
    result = operation.wait()
    assert slow.running
    assert slow.stream != torch.cuda.current_stream()
    after = result + 1  # on this stream, which waits
    torch.cuda.current_stream().synchronize()
    assert not slow.running
    assert torch.equal(after, torch.full_like(after, 2))


def test_training_goes_on_while_an_operation_runs(queue: CommQueue, values: Tensor) -> None:
    slow = SlowFill(values)
    operation = queue.submit("fill", slow.start)
    queue.start_finishing()
    trained = torch.ones(1000, device=DEVICE).sum()
    torch.cuda.current_stream().synchronize()
    while slow.end is None:  # the thread may not have come to it yet
        pass
    assert slow.running, "training has waited for an operation that nobody waits for"
    assert trained.item() == 1000
    operation.wait()


def test_what_follows_an_operation_is_part_of_it(queue: CommQueue, values: Tensor) -> None:
    """An update on the queue's thread, which waiting for the handle includes."""
    slow = SlowFill(values)
    operation = queue.submit("fill", slow.start, after=lambda filled: filled.mul_(3))
    queue.start_finishing()
    result = operation.wait() + 1
    assert slow.running
    torch.cuda.current_stream().synchronize()
    assert torch.equal(result, torch.full_like(result, 4))


@pytest.mark.parametrize("how", ["wait_all", "close"])
def test_the_stream_waits_for_all_operations(how: str, values: Tensor) -> None:
    """Also when the queue is closed: weights that are still on their way are about to be copied out of its buffers."""
    queue, slow = CommQueue("test", DEVICE, Traffic()), SlowFill(values)
    queue.submit("fill", slow.start)
    queue.start_finishing()
    if how == "wait_all":
        queue.wait_all()
    else:
        queue.close(10)
    copy = values.clone()
    assert slow.running
    torch.cuda.current_stream().synchronize()
    assert torch.equal(copy, torch.ones_like(copy))
    queue.close(10)


def test_a_norm_waits_for_the_gradient_alone() -> None:
    gradients = [torch.zeros(1000, device=DEVICE), torch.zeros(10, dtype=torch.bfloat16, device=DEVICE)]
    SquaredNorm(gradients).item()
    sleep()
    for gradient in gradients:
        gradient.fill_(2)
    computed = recorded()
    norm = SquaredNorm(gradients)
    assert not computed.query(), "the host has waited where the norm is only started"
    sleep()
    later = recorded()
    assert norm.item() == pytest.approx(4 * 1010)
    assert not later.query(), "the host has waited for work that follows the gradient"
    torch.cuda.synchronize()


def test_the_norm_of_nothing() -> None:
    assert SquaredNorm([]).item() == 0


def test_a_clock_tells_the_devices_time_without_blocking() -> None:
    clock = Clock(DEVICE)
    moments = [clock.now()]
    sleep()
    moments.append(clock.now())
    sleep()
    sleep()
    moments.append(clock.now())
    last = moments[-1]
    assert isinstance(last, torch.cuda.Event)
    assert not last.query()
    short, long = (clock.seconds_between(moments[i], moments[i + 1]) for i in range(2))
    assert last.query()
    assert 0 < short < long


def test_random_numbers_of_a_pass_are_its_own() -> None:
    """And the generators of both devices continue as if nothing had been drawn."""
    states = rng_states(DEVICE)
    expected = torch.rand(3), torch.rand(3, device=DEVICE)
    set_rng_states(states, DEVICE)
    drawn = []
    for _ in range(2):
        with seeded(0, 5, 1, DEVICE):
            drawn.append((torch.rand(3), torch.rand(3, device=DEVICE)))
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))
    assert torch.equal(torch.rand(3), expected[0])
    assert torch.equal(torch.rand(3, device=DEVICE), expected[1])
