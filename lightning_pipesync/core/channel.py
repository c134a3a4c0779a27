"""Channels: ordered messages of nested tensors from one pipeline stage to the next.

[Note: receives are posted first]
A message is a header of fixed size, which describes the tensors, and the tensors. Gloo transfers a tensor only once the
receiver has posted its receive, which needs the header: so a thread waits for the header while the stage computes.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipesync.core.comm_queue import CommQueue
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.messages import Messages
from lightning_pipesync.core.torch_private import map_tensors, tensors_in, tree_flatten, tree_unflatten
from lightning_pipesync.core.traffic import Traffic

#: Bytes of a header. The first eight are the size of the description; a longer description follows as a message.
HEADER_BYTES = 1024


class Sender(ABC):
    """The sending end of a channel."""

    @abstractmethod
    def send(self, tree: Any) -> None:
        """Starts sending tensors in nested containers, with small picklable objects among them; does not wait.

        The tensors must not be changed afterwards.
        """

    @abstractmethod
    def finish(self) -> None:
        """Blocks until all messages are delivered."""


class Receiver(ABC):
    """The receiving end of a channel. Messages arrive in the order in which they were sent."""

    @abstractmethod
    def expect(self) -> None:
        """Starts receiving the next message in the background."""

    @abstractmethod
    def receive(self) -> Any:
        """Returns the next message. Its tensors are new; they require a gradient if the sent ones did.

        Raises:
            RuntimeError: the other rank is lost.
        """

    def close(self, timeout_s: float) -> None:  # noqa: B027 - not all have a thread
        """Ends the thread, after the messages in flight or after ``timeout_s`` seconds."""


class LocalChannel(Sender, Receiver):
    """A channel within one process.

    Args:
        wire_dtype: the dtype that wider floating-point tensors are rounded to; None: no rounding.
    """

    def __init__(self, wire_dtype: torch.dtype | None = None) -> None:
        self._wire_dtype = wire_dtype
        self._messages: deque[Any] = deque()

    def send(self, tree: Any) -> None:
        self._messages.append(map_tensors(self._copy, tree))

    def finish(self) -> None:
        pass

    def expect(self) -> None:
        pass

    def receive(self) -> Any:
        return self._messages.popleft()

    def _copy(self, tensor: Tensor) -> Tensor:
        narrowed = narrow(tensor.detach(), self._wire_dtype).to(tensor.dtype, copy=True)
        return narrowed.requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class _Described:
    """The description of a tensor in a header."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    requires_grad: bool


class MessageSender(Sender):
    """Sends to another rank.

    Args:
        messages: with a tag that no other messages in flight have.
        peer: rank of the receiver.
        traffic: counts the bytes sent, and the seconds that training waits for deliveries.
        wire_dtype: the dtype that wider floating-point tensors are sent in; None: their own.
        window: the most messages in flight; the next one waits for the delivery of the oldest.
    """

    def __init__(
        self, messages: Messages, peer: int, traffic: Traffic, wire_dtype: torch.dtype | None, window: int
    ) -> None:
        self._messages, self._peer, self._traffic = messages, peer, traffic
        self._wire_dtype, self._window = wire_dtype, window
        self._sent: deque[list[dist.Work]] = deque()

    def send(self, tree: Any) -> None:
        while len(self._sent) >= self._window:
            self._wait_for_oldest()
        wires = []

        def described(tensor: Tensor) -> _Described:
            wires.append(self._wire(tensor))
            return _Described(tuple(tensor.shape), tensor.dtype, wires[-1].dtype, tensor.requires_grad)

        header = _framed(pickle.dumps(map_tensors(described, tree)))
        parts = [*header, *(wire for wire in wires if wire.numel())]
        self._traffic.count("send", sum(part.nbytes for part in parts))
        self._sent.append([self._messages.start_sending(part, self._peer) for part in parts])

    def finish(self) -> None:
        while self._sent:
            self._wait_for_oldest()

    def _wire(self, tensor: Tensor) -> Tensor:
        wire = narrow(tensor.detach(), self._wire_dtype).cpu().contiguous()
        # The tensor may be a parameter, which may be updated before it is delivered.
        return wire.clone() if isinstance(tensor, nn.Parameter) else wire

    def _wait_for_oldest(self) -> None:
        with self._traffic.waiting("send"):
            for work in self._sent.popleft():
                self._messages.wait_sent(work, self._peer)


class MessageReceiver(Receiver):
    """Receives from another rank.

    Args:
        messages: with a tag that no other messages in flight have.
        peer: rank of the sender.
        device: the device of the received tensors.
        name: the thread's name.
        traffic: counts the seconds that training waits for messages.
    """

    def __init__(self, messages: Messages, peer: int, device: torch.device, name: str, traffic: Traffic) -> None:
        self._messages, self._peer, self._device = messages, peer, device
        self._queue = CommQueue(name, device, traffic)
        self._expected: deque[Handle[Any]] = deque()

    def expect(self) -> None:
        self._expected.append(self._queue.submit("recv", self._start))
        self._queue.flush()  # its tensors must arrive before the thread waits for the next header

    def receive(self) -> Any:
        if not self._expected:
            self.expect()
        with self._messages.awaiting(self._peer):
            message = self._expected.popleft().wait()
        for tensor in tensors_in(message):
            if tensor.is_cuda:  # allocated on the queue's stream, used on this one
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return message

    def close(self, timeout_s: float) -> None:
        self._queue.close(timeout_s)

    def _start(self) -> Handle[Any]:
        frame = self._read(torch.empty(HEADER_BYTES, dtype=torch.uint8))
        size = int(frame[:8].view(torch.int64))
        text = frame[8 : 8 + size] if size <= HEADER_BYTES - 8 else self._read(torch.empty(size, dtype=torch.uint8))
        leaves, spec = tree_flatten(pickle.loads(text.numpy().tobytes()))
        wires = {
            i: torch.empty(leaf.shape, dtype=leaf.wire_dtype)
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, _Described)
        }
        works = [self._messages.start_receiving(wire, self._peer) for wire in wires.values() if wire.numel()]

        def finish() -> Any:
            for work in works:
                self._messages.wait_received(work, self._peer)
            for i, wire in wires.items():
                leaves[i] = wire.to(self._device, leaves[i].dtype).requires_grad_(leaves[i].requires_grad)
            return tree_unflatten(leaves, spec)

        return Handle(finish)

    def _read(self, buffer: Tensor) -> Tensor:
        self._messages.wait_received(self._messages.start_receiving(buffer, self._peer), self._peer)
        return buffer


def narrow(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Casts a floating-point tensor to ``dtype`` if that has fewer bits; any other, and a 0-dim one, stays as it is."""
    single = tensor.dim() == 0  # such as a squared norm: little to save, and fp16 may overflow
    if dtype is None or single or not tensor.is_floating_point() or tensor.element_size() <= dtype.itemsize:
        return tensor
    return tensor.to(dtype)


def _framed(text: bytes) -> list[Tensor]:
    """Returns the header with ``text`` in it, or, if it is too long, a header with its size, and ``text``."""
    frame = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
    frame[:8].view(torch.int64)[0] = len(text)
    body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if len(text) > HEADER_BYTES - 8:
        return [frame, body]
    frame[8 : 8 + len(text)] = body
    return [frame]
