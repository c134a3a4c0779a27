"""A replica's client of the lighthouse: it ends in order, and waits for no lighthouse that cannot be reached."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipesync.core.faults.lighthouse import Lighthouse, Standing

coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")


class CutOff:
    """A client whose connection is cut while a question waits for its answer: nobody tells it so."""

    def __init__(self) -> None:
        self.is_cut, self.ended, self.waited_out = threading.Event(), threading.Event(), False

    def __call__(self, *_: Any) -> CutOff:
        if self.is_cut.is_set():
            raise RuntimeError("transport error")
        return self

    def heartbeat(self, *_: Any) -> None:
        if self.is_cut.is_set():
            raise TimeoutError

    def quorum(self, *_: Any, **__: Any) -> None:
        self.is_cut.set()
        self.waited_out = not self.ended.wait(20)
        raise RuntimeError("transport error")


def test_a_lighthouse_that_cannot_be_reached_any_more_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    client = CutOff()
    monkeypatch.setattr(coordination, "LighthouseClient", client)
    replica = Lighthouse("there:1", [], timeout_s=2)
    try:
        with pytest.raises(RuntimeError, match="The lighthouse at there:1 has not answered for timeout_s=2"):
            replica.ask(Standing())
        assert not client.waited_out, "the question has waited until its own connection ended"
    finally:
        client.ended.set()
        replica.close()


def test_nobody_is_within_a_lighthouses_client_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that returns while the interpreter stops aborts the process."""
    begun = threading.Event()

    def beat(*_: object) -> None:
        begun.set()
        time.sleep(0.3)

    monkeypatch.setattr(coordination, "LighthouseClient", lambda *_: SimpleNamespace(heartbeat=beat))
    replica = Lighthouse("there:1", [], timeout_s=10)
    begun.wait(10)
    replica.close()
    assert "pipesync-lighthouse" not in {thread.name for thread in threading.enumerate()}
