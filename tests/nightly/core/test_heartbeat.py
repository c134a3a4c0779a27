"""The heartbeat goes on whatever is in the store, and says what it cannot read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch.distributed as dist

from lightning_pipesync.core.faults.heartbeat import Beat, Fault, Heartbeat

#: Values that no rank writes: no text, no JSON, another shape, other types.
BAD_VALUES = ("\x00\xff", "no json", "[]", "{}", '{"number": "many"}', '{"rank": 0, "kind": 3}')


def read_twice(store: dist.Store) -> tuple[list[Beat], list[Beat], Fault | None]:
    """Returns the beats of two ranks, and again after some more of the first one's, and the fault."""
    heartbeat = Heartbeat(store, 0, 2, 0.01, lambda number: Beat(number, exchanges=7))
    try:
        first = heartbeat.read()
        while Heartbeat.last_beat(store, 0).number < first[0].number + 3:
            time.sleep(0.01)
        return first, heartbeat.read(), heartbeat.fault
    finally:
        heartbeat.close()


@pytest.mark.parametrize("value", BAD_VALUES)
@pytest.mark.parametrize("key", ["pipesync/fault", "pipesync/beat/1"])
@pytest.mark.filterwarnings("always")
def test_a_bad_value_in_the_store_does_not_end_it(key: str, value: str) -> None:
    store = dist.HashStore()
    store.set(key, value)
    with pytest.warns(UserWarning, match=f"store has .* under '{key}'"):
        first, second, fault = read_twice(store)
    assert second[0].number > first[0].number
    assert second[0].exchanges == 7
    assert second[1] == Beat(), "as of a rank that has published nothing"
    assert fault is None


@pytest.mark.parametrize("store_is_gone", [False, True])
def test_a_call_while_the_thread_ends_is_answered(store_is_gone: bool) -> None:
    ends, is_queued = Event(), Event()

    def describe(number: int) -> Beat:
        if number > 1:  # the last one
            ends.set()
            is_queued.wait()
            if store_is_gone:
                raise RuntimeError
        return Beat(number)

    heartbeat = Heartbeat(dist.HashStore(), 0, 1, 60, describe)
    with ThreadPoolExecutor() as threads:
        closed = threads.submit(heartbeat.close)
        ends.wait()
        answer = threads.submit(heartbeat.call, lambda: 7)
        while heartbeat._jobs.empty():
            time.sleep(0.001)
        is_queued.set()
        assert answer.result() == 7
        closed.result()
    with pytest.raises(RuntimeError, match="any more"):
        heartbeat.call(lambda: 7)
