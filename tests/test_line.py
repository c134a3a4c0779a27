"""A line's stores: whether the process of one lives."""

from __future__ import annotations

import pytest

from lightning_pipesync.core.comm import line
from lightning_pipesync.core.comm.line import is_open, open_store
from tests.harness import free_port


def test_a_store_that_accepts_a_connection_is_open() -> None:
    store = open_store()
    assert is_open([f"127.0.0.1:{free_port()}", f"127.0.0.1:{store.port}"])


def test_those_of_processes_that_have_died_are_not() -> None:
    assert not is_open([f"127.0.0.1:{free_port()}", "no-such-host.invalid:1"])


def test_many_hosts_that_do_not_answer_are_not_waited_for_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], []

    def connect(address: tuple[str, int], timeout_s: float) -> None:
        asked.append(address)
        clock[0] += timeout_s
        raise TimeoutError

    monkeypatch.setattr(line.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(line.socket, "create_connection", connect)
    assert not is_open([f"host{number}:1" for number in range(100)])
    assert len(asked) <= line.CONNECT_S / line.ANSWER_S + 1
