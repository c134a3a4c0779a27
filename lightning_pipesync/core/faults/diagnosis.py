"""Finds the rank at fault when a wait times out, from the heartbeats of all ranks.

[Note: the first fault]
A lost rank brings down the others: a rank that waits for it gives up, and is then lost to the ranks that wait for it.
So the rank at fault is the first one that raised an exception which no other rank caused, or that fell silent; a silent
rank may have lived for one more beat. If there is none, it is the rank at the end of the chain of waiting ranks, which
waits for no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lightning_pipesync.core.faults.heartbeat import Beat, Fault

#: The description of each kind of fault; ``ago`` is the number of seconds since it happened.
SENTENCES = {
    "raised": "it raised {detail}, {ago:.0f} s ago",
    "silent": "it has died, is frozen or cut off: last heard from {ago:.0f} s ago, after {detail}",
    "missing": "it never attached a method: it has raised or died, hangs, or is too slow; look at its output",
    "ended": "it has ended without an error {ago:.0f} s ago, after {detail}",
    "ahead": "{detail}, and others have not, {ago:.0f} s ago at the latest",
    "absent": "it is alive, and has not joined, after {detail}: it computes, hangs or is too slow",
    "unconnected": "it is alive, and waits, too, after {detail}: their connection is lost, or they "
    "exchange different things",
}


def find_fault(beats: Sequence[Beat], silent: Collection[int], rank: int, interval: float) -> Fault | str:
    """Returns the rank at fault, see [Note: the first fault]; if the beats do not tell, in words who may be.

    Args:
        beats: the last beat of each rank, ``interval`` seconds apart.
        silent: the ranks whose beats have stopped.
        rank: whose wait has timed out.
    """
    gone = [peer for peer in silent if beats[peer].number and beats[peer].blames is None]
    suspects = [(beats[peer].at + interval, "silent", peer) for peer in gone]
    suspects += [(beat.at, "raised", peer) for peer, beat in enumerate(beats) if has_raised(beat) and peer != rank]
    if suspects:
        _, kind, peer = min(suspects)
        return fault_of(kind, peer, beats[peer])
    if missing := [peer for peer in sorted(silent) if not beats[peer].number]:
        if len(missing) == 1:
            return fault_of("missing", missing[0], beats[missing[0]])
        return f" (not heard from yet: ranks {', '.join(map(str, missing))})"
    # One that is ahead may have given up first: it has waited for longer.
    blameless = [
        peer for peer, beat in enumerate(beats) if peer not in silent and (beat.left is None or beat.lost_peer)
    ]
    ahead = [peer for peer in blameless if beats[peer].ahead is not None]
    if len(ahead) == 1 < len(blameless):
        return fault_of("ahead", ahead[0], beats[ahead[0]])
    reached = _reached(beats, rank)
    absent = [peer for peer in sorted(reached) if beats[peer].left is None and not list(_awaited(beats, peer))]
    if absent:
        fewest = min(beats[peer].exchanges for peer in absent)
        behind = [peer for peer in absent if beats[peer].exchanges == fewest]
        if len(behind) == 1:
            return fault_of("absent", behind[0], beats[behind[0]])
        # A rank in an operation of another library publishes no wait.
        return f" (alive, and waiting for nobody: ranks {', '.join(map(str, absent))})"
    ended = [(beats[peer].at, peer) for peer in reached if beats[peer].left == "" and beats[peer].blames is None]
    if ended:
        return fault_of("ended", min(ended)[1], beats[min(ended)[1]])
    peers = [peer for peer in beats[rank].awaits if peer is not None and beats[peer].left is None]
    return fault_of("unconnected", peers[0], beats[peers[0]]) if peers else ""


def fault_of(kind: str, rank: int, beat: Beat) -> Fault:
    """Returns the fault of a rank with this last beat."""
    details = {"raised": beat.left, "ahead": beat.ahead}
    detail = details.get(kind) or f"{beat.exchanges} exchanges"
    return Fault(kind, rank, beat.host, beat.pid, detail, beat.at)


def has_raised(beat: Beat) -> bool:
    """Returns whether a rank has ended with an exception that no other rank caused."""
    return bool(beat.left) and not beat.lost_peer and beat.blames is None


def _reached(beats: Sequence[Beat], rank: int) -> set[int]:
    """Returns the ranks for which ``rank`` waits, directly or through others."""
    reached, to_follow = {rank}, [rank]
    for waiting in to_follow:
        to_follow += [peer for peer in dict.fromkeys(_awaited(beats, waiting)) if peer not in reached]
        reached.update(to_follow)
    return reached - {rank}


def _awaited(beats: Sequence[Beat], rank: int) -> Iterator[int]:
    """Yields the ranks for which ``rank`` waits, or the one that it has found at fault."""
    beat = beats[rank]
    for awaited in beat.awaits:
        yield from (peer for peer in range(len(beats)) if peer != rank and awaited in (None, peer))
    if not beat.awaits and beat.blames is not None:
        yield beat.blames
