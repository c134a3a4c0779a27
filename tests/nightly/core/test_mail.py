"""Mail: messages among all ranks at any time."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_pipesync.core.comm.handle import Worker
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.transport import Transport
from tests.support.case_table import launch_cases
from tests.support.harness import assert_raised, kill_stopped_siblings, launch, on_ranks
from tests.support.lost_ranks import be_patient


class Recorder:
    """Mail of this rank, whose messages and losses a test takes one by one."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.transport = Transport(timeout_s=timeout_s)
        self.rank = self.transport.rank
        self.arrived: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.lost: queue.Queue[tuple[int, str]] = queue.Queue()
        self.mail = self.transport.mail()
        self.mail.start(
            lambda rank, message: self.arrived.put((rank, message)),
            lambda rank, error: self.lost.put((rank, str(error))),
            lambda rank: self.arrived.put((rank, "ended")),
        )

    def next(self) -> tuple[int, Any]:
        return self.arrived.get(timeout=60)

    def close(self, timeout_s: float = 60.0) -> None:
        self.mail.close(timeout_s)
        self.transport.close()

    def close_after(self, error: Exception) -> None:
        """Closes while an exception is being handled."""
        with suppress(type(error)):
            try:
                raise error
            finally:
                self.close(1.0)


def everyone_to_everyone() -> dict[int, list[Any]]:
    recorder = Recorder()
    ranks = range(recorder.transport.world_size)
    for number in range(3):
        for peer in ranks:
            tensors = [torch.full((1000,), float(recorder.rank)), torch.empty(0)]
            recorder.mail.send(peer, {"number": number, "tensors": tensors})
    received: dict[int, list[Any]] = {peer: [] for peer in ranks}
    while sum(map(len, received.values())) < 3 * len(ranks):
        peer, message = recorder.next()
        if message != "ended":  # a rank that has them all ends before another one's messages arrive
            values, empty = message["tensors"]
            received[peer].append((message["number"], values.unique().tolist(), len(empty)))
    recorder.close()
    return received


def answered_at_once() -> Any:
    """Rank 0 tells all others what it gets, as a server does, while its mail is still starting."""
    transport, got = Transport(timeout_s=60), queue.SimpleQueue[Any]()
    mail, rank = transport.mail(), transport.rank

    def deliver(_: int, message: Any) -> None:
        for peer in range(1, transport.world_size) if rank == 0 else ():
            mail.send(peer, message)
        got.put(message)

    def start_slowly(*args: Any, **kwargs: Any) -> Worker:
        time.sleep(0.3)
        return Worker(*args, **kwargs)

    with patch("lightning_pipesync.core.comm.mail.Worker", start_slowly if rank == 0 else Worker):
        mail.start(deliver, lambda *_: None, lambda _: None)
        if rank == 1:
            mail.send(0, "hello")
    found = got.get(timeout=60)
    mail.close(60.0)
    transport.close()
    return found


def idle(timeout_s: float) -> list[Any]:
    """Returns what arrives after a silence, and how many were lost."""
    recorder = Recorder(timeout_s)
    time.sleep(1.5 * timeout_s)
    recorder.mail.send(1 - recorder.rank, "still here")
    arrived = recorder.next()[1]
    lost = recorder.lost.qsize()
    recorder.close()
    return [arrived, lost]


def end_after_a_message() -> list[Any]:
    recorder = Recorder()
    if recorder.rank == 1:
        recorder.mail.send(0, "last")
    arrived = [] if recorder.rank == 1 else [recorder.next() for _ in range(2)]
    recorder.close()
    return [arrived, recorder.lost.qsize()]


def ask_one_that_has_closed() -> list[Any]:
    """Rank 0 closes its mail at once, and still answers, when it has told itself; returns what this rank is told."""
    recorder = Recorder()
    if recorder.rank == 1:
        told = [recorder.next()]
        recorder.mail.send(0, "question")
        told += [recorder.next()]
    else:
        closing = threading.Thread(target=recorder.mail.close, args=[60.0])
        closing.start()
        told = [recorder.next()]
        recorder.mail.send(0, "note")
        told += [recorder.next()]
        recorder.mail.send(1, "answer")
        closing.join()
    recorder.close()
    return told


def test_messages_arrive_in_order() -> None:
    for received in on_ranks(everyone_to_everyone, 3):
        assert received == {peer: [(number, [float(peer)], 0) for number in range(3)] for peer in range(3)}


def test_a_message_may_be_answered_while_the_mail_starts() -> None:
    assert on_ranks(answered_at_once, 3) == ["hello"] * 3


def test_silence_is_no_loss_and_an_end_comes_after_all_messages_and_answers() -> None:
    cases = {"idle": partial(idle, 10.0), "end": end_after_a_message, "closed": ask_one_that_has_closed}
    outcomes = launch_cases(cases, 2)
    assert outcomes["idle"] == [["still here", 0]] * 2
    assert outcomes["end"][0] == [[(1, "last"), (1, "ended")], 0]
    assert outcomes["closed"] == [[(1, "question"), (0, "note")], [(0, "ended"), (0, "answer")]]


def lose(how: int) -> tuple[int, str] | None:
    be_patient()
    recorder = Recorder(timeout_s=60.0 if how == signal.SIGKILL else 10.0)
    rank = recorder.rank
    if rank == 2:
        os.kill(os.getpid(), how)
    lost = recorder.lost.get(timeout=60)
    recorder.mail.send(1 - rank, "alive")
    assert recorder.next() == (1 - rank, "alive"), "the others can still talk"
    recorder.mail.close(600.0)  # longer than a test may take: it does not wait for the lost one
    if how == signal.SIGSTOP and rank == 0:
        kill_stopped_siblings()
    return lost


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named_and_the_others_go_on(how: int) -> None:
    for rank, message in launch(lose, 3, int(how), may_die=(2,))[:2]:
        assert rank == 2
        assert_raised(("", message), "", "Rank 2 ", "at fault")


def end_with_an_error() -> tuple[int, str] | None:
    recorder = Recorder()
    if recorder.rank == 1:
        recorder.close_after(KeyError("a bug"))
        return None
    lost = recorder.lost.get(timeout=60)
    recorder.close(1.0)
    return lost


def send_with_a_bug() -> tuple[int, str]:
    """Returns what rank 0 is told when its thread cannot send."""
    recorder = Recorder()
    if recorder.rank == 0:
        with patch.object(Messages, "start_sending", side_effect=MemoryError("none is left")):
            recorder.mail.send(1, "message")
            lost = recorder.lost.get(timeout=60)
        recorder.close_after(MemoryError(lost[1]))
        return lost
    lost = recorder.lost.get(timeout=60)
    recorder.close(1.0)
    return lost


def test_who_ends_with_an_error_is_lost() -> None:
    """So is a rank whose thread cannot send: otherwise the message is lost, and all others wait for it."""
    assert on_ranks(end_with_an_error, 2)[0][0] == 1
    of_0, of_1 = on_ranks(send_with_a_bug, 2)
    assert of_0 == (0, "none is left")
    assert of_1[0] == 0
