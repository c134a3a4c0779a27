"""Mail: messages among all ranks at any time."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.transport import Transport
from tests.support.harness import kill_stopped_siblings, launch, on_ranks
from tests.support.lost_ranks import be_patient


class Recorder:
    """Mail of this rank, whose messages and losses a test takes one by one."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.transport = Transport(timeout_s=timeout_s)
        self.arrived: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.lost: queue.Queue[tuple[int, str]] = queue.Queue()
        self.mail = self.transport.mail()
        self.mail.start(
            lambda rank, message: self.arrived.put((rank, message)),
            lambda rank, error: self.lost.put((rank, str(error))),
            lambda rank: self.arrived.put((rank, "ended")),
        )

    def close(self, timeout_s: float = 60.0) -> None:
        self.mail.close(timeout_s)
        self.transport.close()


def everyone_to_everyone() -> dict[int, list[Any]]:
    recorder = Recorder()
    rank, world_size = recorder.transport.rank, recorder.transport.world_size
    for number in range(3):
        for peer in range(world_size):
            recorder.mail.send(peer, {"number": number, "tensors": [torch.full((1000,), float(rank)), torch.empty(0)]})
    received: dict[int, list[Any]] = {peer: [] for peer in range(world_size)}
    while sum(map(len, received.values())) < 3 * world_size:
        peer, message = recorder.arrived.get(timeout=60)
        if message != "ended":  # a rank that has them all ends before another one's messages arrive
            values, empty = message["tensors"]
            received[peer].append((message["number"], values.unique().tolist(), len(empty)))
    recorder.close()
    return received


def test_messages_arrive_in_order() -> None:
    for received in on_ranks(everyone_to_everyone, 3):
        assert received == {peer: [(number, [float(peer)], 0) for number in range(3)] for peer in range(3)}


def idle(timeout_s: float) -> list[Any]:
    """Returns what arrives after a silence, how many were lost, and whether both ways have different groups."""
    recorder = Recorder(timeout_s)
    peer = 1 - recorder.transport.rank
    time.sleep(1.5 * timeout_s)
    recorder.mail.send(peer, "still here")
    arrived = recorder.arrived.get(timeout=60)[1]
    lost = recorder.lost.qsize()
    (inbox,) = recorder.mail._inboxes
    different = recorder.mail._outboxes[peer]._messages._group is not inbox._messages._group
    recorder.close()
    return [arrived, lost, different]


def test_silence_is_no_loss() -> None:
    """And both ways have connections: otherwise two ranks that send large tensors would take turns, see mail.py."""
    assert on_ranks(idle, 2, 10.0) == [["still here", 0, True]] * 2


def lose(how: int) -> tuple[int, str] | None:
    be_patient()
    recorder = Recorder(timeout_s=60.0 if how == signal.SIGKILL else 10.0)
    rank = recorder.transport.rank
    if rank == 2:
        os.kill(os.getpid(), how)
    lost = recorder.lost.get(timeout=60)
    recorder.mail.send(1 - rank, "alive")
    assert recorder.arrived.get(timeout=60) == (1 - rank, "alive"), "the others can still talk"
    recorder.mail.close(600.0)  # longer than a test may take: it does not wait for the lost one
    if how == signal.SIGSTOP and rank == 0:
        kill_stopped_siblings()
    return lost


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_and_the_others_go_on(how: int) -> None:
    outcomes = launch(lose, 3, int(how), may_die=(2,))
    for outcome in outcomes[:2]:
        assert outcome[0] == 2
        assert "Rank 2 " in outcome[1]
        assert "at fault" in outcome[1]


def lose_two() -> list[tuple[int, list[float]]] | None:
    """Freezes ranks 1 and 2; returns on rank 0 which was lost, and when each was heard of, as it was known then."""
    be_patient()
    recorder = Recorder(timeout_s=10.0)
    if recorder.transport.rank > 0:
        time.sleep(3.0 * (recorder.transport.rank - 1))  # so that they are not named at once
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    found = Messages.failed_receive

    def slowly(messages: Messages, error: Exception, peer: int) -> RuntimeError:
        time.sleep(4.0)  # longer than the interval of signs of life, as where no store answers
        return found(messages, error, peer)

    losses = []
    with patch.object(Messages, "failed_receive", slowly):
        for _ in range(2):
            lost, _ = recorder.lost.get(timeout=60)
            losses.append((lost, [inbox.heard for inbox in recorder.mail._inboxes]))
    recorder.mail.close(1.0)
    kill_stopped_siblings()
    return losses


def test_who_names_one_lost_rank_for_long_does_not_forget_how_long_another_is_silent() -> None:
    (first, heard), (second, still) = launch(lose_two, 3, may_die=(1, 2))[0]
    assert {first, second} == {1, 2}
    assert heard == still


def end_with_an_error() -> tuple[int, str] | None:
    recorder = Recorder()
    if recorder.transport.rank == 1:
        with suppress(KeyError):
            try:
                raise KeyError("a bug")
            finally:
                recorder.close(1.0)
        return None
    return recorder.lost.get(timeout=60)


def test_who_ends_with_an_error_is_lost() -> None:
    """Who ends without one is not: see the other tests."""
    outcome = on_ranks(end_with_an_error, 2)[0]
    assert outcome[0] == 1


def send_with_a_bug() -> tuple[int, str] | None:
    """Returns what rank 0 is told when its thread cannot send."""
    recorder = Recorder()
    lost = None
    if recorder.transport.rank == 0:
        with patch.object(Messages, "start_sending", side_effect=MemoryError("none is left")):
            recorder.mail.send(1, "message")
            lost = recorder.lost.get(timeout=60)
        with suppress(MemoryError):
            try:
                raise MemoryError(lost[1])
            finally:
                recorder.close(1.0)
        return lost
    lost = recorder.lost.get(timeout=60)
    recorder.close(1.0)
    return lost


def test_an_error_of_a_thread_that_sends_is_one_of_its_rank() -> None:
    """Otherwise the message is lost, and all others wait for it."""
    of_0, of_1 = on_ranks(send_with_a_bug, 2)
    assert of_0 == (0, "none is left")
    assert of_1[0] == 0


def end_after_a_message() -> list[Any]:
    recorder = Recorder()
    rank = recorder.transport.rank
    if rank == 1:
        recorder.mail.send(0, "last")
    arrived = [] if rank == 1 else [recorder.arrived.get(timeout=60) for _ in range(2)]
    recorder.close()
    return [arrived, recorder.lost.qsize()]


def test_the_end_of_a_rank_is_told_after_its_messages() -> None:
    assert on_ranks(end_after_a_message, 2)[0] == [[(1, "last"), (1, "ended")], 0]


def ask_one_that_has_closed() -> list[Any]:
    """Rank 0 closes its mail at once, and still answers, when it has told itself; returns what this rank is told."""
    recorder = Recorder()
    rank, told = recorder.transport.rank, []
    if rank == 1:
        told = [recorder.arrived.get(timeout=60)]
        recorder.mail.send(0, "question")
        told += [recorder.arrived.get(timeout=60)]
    else:
        closing = threading.Thread(target=recorder.mail.close, args=[60.0])
        closing.start()
        told = [recorder.arrived.get(timeout=60)]
        recorder.mail.send(0, "note")
        told += [recorder.arrived.get(timeout=60)]
        recorder.mail.send(1, "answer")
        closing.join()
    recorder.close()
    return told


def test_who_has_closed_still_answers() -> None:
    assert on_ranks(ask_one_that_has_closed, 2) == [[(1, "question"), (0, "note")], [(0, "ended"), (0, "answer")]]
