"""The heartbeat goes on whatever is in the store, and says what it cannot read."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from lightning_pipesync.core.faults.heartbeat import Beat, Fault, Heartbeat

#: Values that no rank writes: no text, no JSON, another shape, other types.
BAD_VALUES = ("\x00\xff", "no json", "[]", "{}", '{"number": "many"}', '{"rank": 0, "kind": 3}')


def read_twice(store: dist.Store) -> tuple[list[Beat], list[Beat], Fault | None]:
    """Returns the beats of two ranks, and again after some more of the first one's, and the fault."""
    heartbeat = Heartbeat(store, 0, 2, 0.01, lambda number: Beat(number, exchanges=7))
    try:
        first = heartbeat.read(timeout_s=10)
        while Heartbeat.last_beat(store, 0).number < first[0].number + 3:
            time.sleep(0.01)
        return first, heartbeat.read(timeout_s=10), heartbeat.fault
    finally:
        heartbeat.close(timeout_s=10)


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
