"""The memory of a process: which bytes each party reads and writes, and what is not ordered.

[Note: what is reported]
- A race: two accesses to a byte, of which one writes, by parties that nothing orders. An allocation counts as a write
  of the stream on which it is made, since the allocator may give what earlier operations of that stream still use.
- A release: memory returns to the stream on which it was allocated, and that stream's next operation, which may be
  given it, does not follow what another one does with it, unless it was recorded for that one
  (``Tensor.record_stream``).
- A device: an operation on the wrong one, which a GPU would refuse, or on another rank's.
- Events: a time that is asked for too early.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tests.streams.streams import LOCK, Party, Stream, current_stream, is_removed, place, reports

_real_resize = torch.UntypedStorage.resize_


class Access(NamedTuple):
    party: Party
    number: int
    writes: bool
    begin: int
    end: int
    place: str

    def __str__(self) -> str:
        return f"{'written' if self.writes else 'read'} by the {self.party.name} in {self.place}"


@dataclass
class Memory:
    """The memory of a storage: ``stream`` is that on which it was allocated; None: on the host."""

    stream: Stream | None
    place: str
    accesses: list[Access] = field(default_factory=list)
    recorded: set[int] = field(default_factory=set)

    def access(self, party: Party, writes: bool, begin: int, end: int, place: str) -> None:
        new, kept = Access(party, party.clock[party.number], writes, begin, end, place), []
        for earlier in self.accesses:
            overlaps = earlier.begin < end and begin < earlier.end
            ordered = party.knows(earlier.party.number, earlier.number)
            if overlaps and (writes or earlier.writes) and not ordered:
                reports[f"race: {new}; {earlier}"] += 1
            covered = begin <= earlier.begin and earlier.end <= end
            if not (ordered and covered and (writes or (earlier.party is party and not earlier.writes))):
                kept.append(earlier)
        kept.append(new)
        self.accesses = kept

    def check_release(self) -> None:
        """Reports what its stream does not follow; called before the first operation on the stream since it is free."""
        assert self.stream is not None
        for access in self.accesses:
            recorded = access.party.number in self.recorded
            if not recorded and not self.stream.knows(access.party.number, access.number):
                reports[f"release: allocated on the {self.stream.name} in {self.place}; {access}"] += 1


_memories: dict[int, Memory] = {}
_released: deque[Memory] = deque()  # what no operation of its stream has followed yet


def memory_of(tensor: Tensor, stream: Stream | None = None) -> Memory:
    """Returns the memory of ``tensor``; one that is not known yet is on the host, or is allocated on ``stream``."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    memory = _memories.get(key)
    if memory is None:
        memory = _memories[key] = Memory(stream, place())
        weakref.finalize(storage, _release, key).atexit = False
    return memory


def _release(key: int) -> None:
    memory = _memories.pop(key, None)
    if memory is not None and memory.stream is not None:
        _released.append(memory)


def check_released(stream: Stream) -> None:
    """Checks the memory that an operation of ``stream`` may be given, which is about to run."""
    for _ in range(len(_released)):
        memory = _released.popleft()
        if memory.stream is stream:
            memory.check_release()
        else:
            _released.append(memory)


def forget() -> None:
    """Forgets all memory, before another training."""
    _memories.clear()
    _released.clear()


def access(party: Party, tensor: Tensor, writes: bool, where: str) -> None:
    if tensor.numel():
        size = tensor.element_size()
        begin = int(tensor.storage_offset()) * size
        last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory_of(tensor).access(party, writes, begin, begin + (last + 1) * size, where)


def resize(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
    """``UntypedStorage.resize_``: what the storage had is released, and other memory made on the present stream."""
    with LOCK:
        before = _memories.get(storage._cdata)
        if before is not None and before.stream is not None:
            _released.append(before)
            stream = current_stream(before.stream.device)
            stream.begin()
            check_released(stream)
            made = _memories[storage._cdata] = Memory(stream, place())
            made.access(stream, True, 0, num_bytes, made.place)
    return _real_resize(storage, num_bytes)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """``Tensor.record_stream``."""
    if not is_removed("record_stream"):
        with LOCK:
            memory_of(tensor).recorded.add(stream.number)
