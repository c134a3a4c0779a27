"""Objects and states, which ranks exchange seldom."""

from __future__ import annotations

import io
import pickle
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, serialization

from lightning_pipesync.core.comm.messages import Messages, ranks_of
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.faults.failure import PeerWatch

#: What a NumPy number in a state, such as a learning rate, is made of.
NUMPY_NUMBERS: list[Any] = [
    np.float64(0).__reduce__()[0],
    np.dtype,
    *(type(np.dtype(kind)) for kind in (np.float64, np.float32, np.float16, np.int64, np.int32, np.bool_)),
]


class Objects:
    """Exchanges objects and states among the ranks of a Gloo group, in ``range(world_size)``.

    Attributes:
        ranks: what they are in the default process group.
    """

    def __init__(self, group: dist.ProcessGroup, watch: PeerWatch, traffic: Traffic) -> None:
        self._group, self._messages = group, Messages(group, 0, watch)
        self._watch, self._traffic = watch, traffic
        self.rank, self.world_size = self._messages.rank, self._messages.world_size
        self.ranks = ranks_of(group)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Returns every rank's ``obj`` (picklable and small), by rank, on all ranks; blocks. Bytes are not counted."""
        if self.world_size == 1:
            return [obj]
        wire = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        with self._traffic.waiting("objects"), self._watch.waiting("the objects of all ranks"):
            sizes = [int(size) for size in self._gather(torch.tensor([wire.numel()]))]
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: wire.numel()] = wire
            wires = [each[:size] for each, size in zip(self._gather(padded), sizes, strict=True)]
        return [pickle.loads(each.numpy().tobytes()) for each in wires]

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """Returns the ``obj`` (picklable and small) of rank ``src`` on all ranks; blocks. Bytes are not counted."""
        if self.world_size == 1:
            return obj
        wire = torch.frombuffer(bytearray(pickle.dumps(obj if self.rank == src else None)), dtype=torch.uint8)
        sender = None if self.rank == src else self.ranks[src]  # who sends waits for all others
        with self._traffic.waiting("objects"), self._watch.waiting("an object", sender):
            size = torch.tensor([wire.numel()])
            self._group.broadcast(size, src).wait()
            if self.rank != src:
                wire = torch.empty(int(size), dtype=torch.uint8)
            self._group.broadcast(wire, src).wait()
        return pickle.loads(wire.numpy().tobytes())

    def greatest(self, number: int) -> int:
        """Returns the greatest of all ranks' numbers, on all ranks; blocks, and is cheap enough for each step."""
        if self.world_size == 1:
            return number
        with self._traffic.waiting("objects"), self._watch.waiting("the numbers of all ranks"):
            return int(max(self._gather(torch.tensor([number]))))

    def collect_states(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Returns every rank's ``state`` on rank 0, by rank, as :meth:`receive_state`, and None elsewhere; blocks."""
        if self.rank != 0:
            self.send_state(state, 0)
            return None
        # The own one, too, is a copy.
        return [_read(_written(state), 0), *(self.receive_state(rank) for rank in range(1, self.world_size))]

    def send_state(self, state: dict[str, Any], dst: int) -> None:
        """Sends a state to rank ``dst``, which calls :meth:`receive_state`; blocks."""
        wire = _written(state)
        for message in (torch.tensor([wire.numel()]), wire):
            self._traffic.count("send", message.nbytes, in_steps=False)
            with self._traffic.waiting("send"):
                self._messages.wait_sent(self._messages.start_sending(message, dst), dst)

    def receive_state(self, src: int) -> dict[str, Any]:
        """Returns a state from rank ``src``, with tensors on the CPU; blocks.

        Raises:
            TypeError: it holds an object that ``torch.load(weights_only=True)`` does not read from a checkpoint either.
        """
        with self._messages.awaiting(src):
            size = self._receive(torch.empty(1, dtype=torch.int64), src)
            wire = self._receive(torch.empty(int(size), dtype=torch.uint8), src)
        return _read(wire, src)

    def _gather(self, own: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        self._group.allgather([gathered], [own]).wait()
        return gathered

    def _receive(self, message: Tensor, src: int) -> Tensor:
        self._traffic.count("recv", 0)
        with self._traffic.waiting("recv"):
            self._messages.wait_received(self._messages.start_receiving(message, src), src)
        return message


def _written(state: dict[str, Any]) -> Tensor:
    buffer = io.BytesIO()
    serialization.save(state, buffer)  # not torch.save, which users may replace to count or redirect files
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _read(wire: Tensor, rank: int) -> dict[str, Any]:
    try:
        with serialization.safe_globals(NUMPY_NUMBERS):
            state: dict[str, Any] = serialization.load(
                io.BytesIO(wire.numpy().tobytes()), map_location="cpu", weights_only=True
            )
    except UnpicklingError as error:
        raise TypeError(
            f"The state of rank {rank} holds an object that a checkpoint cannot have, since "
            f"torch.load(weights_only=True) would not read it: leave it out of the optimizer's state, or make it a "
            f"tensor or a number. {error}"
        ) from error
    return state
