"""Who is at fault follows from what each rank has published last, and who is silent from what its listener hears."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipesync.core.faults.diagnosis import find_fault
from lightning_pipesync.core.faults.errors import is_connection_error
from lightning_pipesync.core.faults.failure import PeerWatch
from lightning_pipesync.core.faults.heartbeat import Beat, Heartbeat, Neighbor
from tests.support.harness import on_ranks


def waiting_for(peer: int, **of_beat: Any) -> Beat:
    return Beat(number=9, at=9.0, awaits=[peer], **of_beat)


@pytest.mark.parametrize(
    ("beats", "silent", "fault"),
    [
        # 0 waits for 2, that for 1, and that for nobody
        ([waiting_for(2), waiting_for(0), waiting_for(1)], {1}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 9.0), waiting_for(1)], set(), ("absent", 1)),
        ([waiting_for(2), Beat(9, 8.0, left=""), waiting_for(1)], set(), ("ended", 1)),
        ([waiting_for(2), Beat(9, 8.0, left="KeyError: 0"), waiting_for(1)], set(), ("raised", 1)),
        # the first one counts, and who has given up is not at fault
        ([waiting_for(2), Beat(9, 3.0), Beat(9, 7.0, awaits=[None])], {1, 2}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 3.0), Beat(9, 7.0, left="KeyError: 0")], {1}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 7.0), Beat(9, 7.0, left="KeyError: 0")], {1}, ("raised", 2)),
        ([waiting_for(2), Beat(9, 7.0), Beat(9, 3.0, left="gloo", lost_peer=True)], {1}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 7.0), Beat(9, 3.0, blames=1)], {1, 2}, ("silent", 1)),
        ([waiting_for(2), Beat(9, 7.0), Beat(9, 3.0, blames=1)], set(), ("absent", 1)),
        # who waits for any rank does not wait for one that waits for him
        ([Beat(9, 9.0, awaits=[None]), Beat(9, 9.0), Beat(9, 9.0, awaits=[None])], set(), ("absent", 1)),
        ([waiting_for(1), waiting_for(0), Beat(9, 9.0)], set(), ("unconnected", 1)),
        # nobody is blamed again who has been lost before
        ([waiting_for(1), Beat(left="", blames=1), Beat(9, 9.0)], set(), ""),
        # who has ended its epoch alone
        ([waiting_for(2), waiting_for(0, ahead="it has ended"), waiting_for(1)], set(), ("ahead", 1)),
        ([waiting_for(1), Beat(9, 8.0, left="gloo", lost_peer=True, ahead="it has ended")], set(), ("ahead", 1)),
        ([waiting_for(1, ahead="it has ended"), waiting_for(0, ahead="it has ended")], set(), ("unconnected", 1)),
        # of those that wait for nobody, who has done least; two that have done as much do not tell who it is
        ([Beat(9, 9.0, awaits=[None]), Beat(9, 9.0, exchanges=5), Beat(9, 9.0, exchanges=4)], set(), ("absent", 2)),
        ([Beat(9, 9.0, awaits=[None]), *[Beat(9, 9.0)] * 2], set(), " (alive, and waiting for nobody: ranks 1, 2)"),
        ([waiting_for(2), Beat(), Beat()], {1, 2}, " (not heard from yet: ranks 1, 2)"),
    ],
)
def test_who_is_at_fault(beats: list[Beat], silent: set[int], fault: tuple[str, int] | str) -> None:
    found = find_fault(beats, silent, 0, interval=1.0)
    assert (found if isinstance(found, str) else (found.kind, found.rank)) == fault


@pytest.mark.parametrize(
    "message",
    [
        "[/root/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer",
        "Gloo connectFullMesh failed with [/root/gloo/transport/tcp/pair.cc:144] Connect timeout",
        "Application timeout caused pair closure",
    ],
)
def test_gloos_errors_are_connection_errors(message: str) -> None:
    assert is_connection_error(RuntimeError(message))
    assert not is_connection_error(RuntimeError(f"a bug: {message}"))


def heard(neighbor: Neighbor, numbers: list[int], step: float = 1.0) -> list[bool]:
    return [neighbor.hear(Beat(number, pid=1), step * time_) for time_, number in enumerate(numbers)]


def test_a_rank_is_lost_once_it_was_silent_for_the_timeout() -> None:
    """The time in which this process was frozen itself does not count."""
    assert heard(Neighbor(0, 3, 8.0), [1, 2, *[3] * 9]) == [*[False] * 10, True]
    assert not any(heard(Neighbor(0, 3, 8.0), [number // 7 for number in range(40)]))
    assert heard(Neighbor(0, 3, 8.0), [0] * 9)[-1], "or has never published a beat"
    assert not any(heard(Neighbor(0, 2, 8.0), [1, 1, 2], step=1000.0))


def test_each_listens_to_the_next_that_has_not_ended() -> None:
    """Now and then."""
    neighbor = Neighbor(1, 4, 8.0)
    heard_ranks = []
    for now in range(4):
        heard_ranks.append(neighbor.rank)
        neighbor.hear(Beat(5, left=""), float(now))
    assert heard_ranks == [2, 3, 0, 1]
    assert not Neighbor(0, 1, 8.0).is_due(0.0), "nobody is there"
    neighbor = Neighbor(0, 2, 8.0)
    neighbor.hear(Beat(1), 0.0)
    assert [neighbor.is_due(now) for now in (0.5, 1.0)] == [False, True]


@pytest.mark.parametrize("text", ["no JSON", '"a"', '{"of": "another version"}'])
def test_what_no_rank_has_written_is_reported_and_ignored(text: str, recwarn: pytest.WarningsRecorder) -> None:
    store = dist.HashStore()
    for key in ("pipesync/1/pipesync/beat/1", "pipesync/1/pipesync/fault"):
        store.set(key, text)
    heartbeat = Heartbeat(store, 0, 2, 8.0, Beat, lambda: None, lambda *_: None)
    assert heartbeat.read()[1] == Beat()
    heartbeat.close()
    assert heartbeat.fault is None
    said = {str(warning.message).partition(",")[0] for warning in recwarn}
    assert said == {f"The job's store has {text.encode()!r} under 'pipesync/{key}'" for key in ("beat/1", "fault")}


def survive_a_loss() -> dict[int, Any]:
    """Returns what a rank publishes as its waits after an error that was named outside of a wait."""
    watch = PeerWatch(timedelta(seconds=5))
    watch.failed_wait("a message", 1, RuntimeError("no sign of life"))
    return watch.waits


def test_who_survives_the_loss_of_a_rank_does_not_seem_to_wait_for_it() -> None:
    """It would never be found to hang."""
    assert on_ranks(survive_a_loss, 1) == [{}]
