"""What the checker reports of a few operations, and what it does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.streams.memory import record_stream
from tests.streams.streams import Event, Stream, Wait, current_stream, stream
from tests.streams.trainings import checked


def values(device: torch.device | str = "cuda") -> torch.Tensor:
    return torch.ones(8, device=device)


def write_behind_a_wait() -> None:
    tensor, side = values(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        tensor.add_(1)
    current_stream().wait_event(side.record_event())
    tensor.mul_(2)


def write_on_two_streams() -> None:
    tensor, side = values(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        tensor.add_(1)
    tensor.mul_(2)


def read_on_two_streams() -> None:
    tensor, side = values(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        tensor + 1
    tensor + 2


def write_to_other_bytes() -> None:
    tensor, side = values(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        tensor[:4].add_(1)
    tensor[4:].mul_(2)


def wait_for_an_event_of_before() -> None:
    tensor, side = values(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        before = side.record_event()
        tensor.add_(1)
    current_stream().wait_event(before)
    tensor.mul_(2)


def read_by_the_host() -> None:
    tensor, side = values(), Stream()
    with stream(side):
        other = values().sum()
        other.item()  # the host has waited, and so has what it enqueues next
    tensor.copy_(other)


def free_while_another_stream_reads() -> None:
    tensor, side = values(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        tensor + 1
    del tensor
    values()


def free_what_is_recorded() -> None:
    tensor, side = values(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        tensor + 1
    record_stream(tensor, side)
    del tensor
    values()


def free_and_wait() -> None:
    tensor, side = values(), Stream()
    side.wait_stream(current_stream())
    with stream(side):
        tensor + 1
    del tensor
    current_stream().wait_stream(side)
    values()


def read_what_is_being_copied() -> None:
    on_host = torch.empty(8, pin_memory=True)
    on_host.copy_(values(), non_blocking=True)
    on_host.sum()


def read_what_was_copied() -> None:
    on_host = torch.empty(8, pin_memory=True)
    on_host.copy_(values(), non_blocking=True)
    event = Event()
    event.record(current_stream())
    event.synchronize()
    on_host.sum()


def copy_and_read() -> None:
    values().cpu().sum()
    values().tolist()


def write_gradients_behind_the_forward_pass() -> None:
    side = Stream()
    with stream(side):
        weights = values().requires_grad_()
        (weights * 2).sum().backward()
        assert weights.grad is not None
        weights.grad.add_(1)


def add_a_tensor_of_the_host() -> None:
    values() + values("cpu")


def use_the_device_of_another_rank() -> None:
    values("cuda:1")


def measure_what_has_not_come() -> None:
    events = [Event(enable_timing=True) for _ in range(2)]
    for event in events:
        values()
        event.record(current_stream())
    events[0].elapsed_time(events[1])


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (write_on_two_streams, "race"),
        (wait_for_an_event_of_before, "race"),
        (free_while_another_stream_reads, "release"),
        (read_what_is_being_copied, "race"),
        (add_a_tensor_of_the_host, "device"),
        (use_the_device_of_another_rank, "device"),
        (measure_what_has_not_come, "events"),
    ],
)
def test_it_reports(run: Callable[[], None], kind: str) -> None:
    reports, _ = checked(run, ())
    assert [report.split(":")[0] for report in reports] == [kind]


@pytest.mark.parametrize(
    "run",
    [
        write_behind_a_wait,
        read_on_two_streams,
        write_to_other_bytes,
        read_by_the_host,
        free_what_is_recorded,
        free_and_wait,
        read_what_was_copied,
        copy_and_read,
        write_gradients_behind_the_forward_pass,
    ],
)
def test_it_does_not_report(run: Callable[[], None]) -> None:
    assert checked(run, ()) == ({}, 0)


def test_a_removed_wait_is_that_of_one_place() -> None:
    here = Wait("wait_stream", "test_checker.py", "write_behind_a_wait")
    reports, reached = checked(write_behind_a_wait, (), here)
    assert reports
    assert reached == 1
    assert checked(read_on_two_streams, (), here) == ({}, 0)
