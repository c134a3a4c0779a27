"""Who is there, as a lighthouse tells replicas, also one that was started again."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from lightning_pipesync.core.faults.lighthouse import Lighthouse, Quorum, Standing
from tests.support.harness import free_port
from tests.support.replica_jobs import TIMEOUT_S, lighthouse


def test_nobody_is_within_its_client_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that returns while the interpreter stops aborts the process."""
    begun = threading.Event()

    def beat(*_: object) -> None:
        begun.set()
        time.sleep(0.3)

    coordination = pytest.importorskip("torchft.coordination")
    monkeypatch.setattr(coordination, "LighthouseClient", lambda *_: SimpleNamespace(heartbeat=beat))
    replica = Lighthouse("host0:29510", [], TIMEOUT_S)
    begun.wait(TIMEOUT_S)
    replica.close()
    assert "pipesync-lighthouse" not in {thread.name for thread in threading.enumerate()}


def test_one_that_was_started_again_does_not_divide_replicas() -> None:
    """It knows of nobody at first, and would answer the first that asks that it is alone."""
    port = free_port()
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        first = stack.enter_context(ExitStack())
        address = first.enter_context(lighthouse(port))
        replicas = [Lighthouse(address, [], TIMEOUT_S) for _ in range(2)]
        for replica in replicas:
            stack.callback(replica.close)

        def meet(replica: Lighthouse) -> None:
            while len(replica.ask(Standing()).members) < len(replicas):
                pass  # the other one has not yet told that it lives

        def ask(replica: Lighthouse, after_s: float) -> Quorum:
            time.sleep(after_s)
            return replica.ask(Standing())

        ids = sorted(replica.id for replica in replicas)
        list(pool.map(meet, replicas))
        first.close()
        again = threading.Timer(1.0, lambda: stack.enter_context(lighthouse(port)))
        again.start()
        quorums = list(pool.map(ask, replicas, (0.0, 1.5)))
        again.join()
    for quorum in quorums:
        assert [member.id for member in quorum.members] == ids
