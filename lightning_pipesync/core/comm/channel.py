"""Channels: ordered messages of nested tensors from one pipeline stage to the next.

[Note: receives are posted first]
Gloo transfers a tensor only once the receiver has posted its receive, which needs the header of the message: so a
thread waits for the header while the stage computes.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.comm.handle import Handle, Promise, Worker
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.wire import HostCopies, Parcel, narrow, packed, start_unpacking
from lightning_pipesync.core.profiling import profiled
from lightning_pipesync.core.torch_private import map_tensors, tensors_in


class LocalChannel:
    """Both ends of a channel within one process.

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

    def close(self, _: float) -> None:
        pass

    def _copy(self, tensor: Tensor) -> Tensor:
        narrowed = narrow(tensor.detach(), self._wire_dtype).to(tensor.dtype, copy=True)
        return narrowed.requires_grad_(tensor.requires_grad)


class MessageSender:
    """The sending end of a channel to another rank, see :meth:`Transport.channel_to`.

    With tensors of a CUDA device a thread sends, once they are on the host: the caller does not wait for them.
    """

    def __init__(
        self,
        messages: Messages,
        peer: int,
        device: torch.device,
        name: str,
        traffic: Traffic,
        wire_dtype: torch.dtype | None,
        window: int,
        what: str,
    ) -> None:
        self._messages, self._peer, self._traffic, self._what = messages, peer, traffic, what
        self._wire_dtype, self._window = wire_dtype, window
        self._copies = HostCopies(device)
        self._worker = Worker(name, device=device) if device.type == "cuda" else None
        self._sent: deque[Handle[list[dist.Work]]] = deque()

    def send(self, tree: Any) -> None:
        """Starts sending nested containers of tensors and small picklable objects; the tensors must not change.

        Waits only for the delivery of the oldest message, if ``window`` are in flight.
        """
        while len(self._sent) >= self._window:
            self._wait_for_oldest()
        with profiled("send", self._what):
            parcel = packed(tree, self._copies, self._wire_dtype, objects=True)
            self._traffic.count("send", parcel.nbytes)
            if self._worker is None:
                works = self._start(parcel)
                self._sent.append(Handle(lambda: works))
                return
            sent: Promise[list[dist.Work]] = Promise()
            self._worker.submit(lambda: sent.run(lambda: self._start(parcel)))
            self._sent.append(sent)

    def finish(self) -> None:
        """Blocks until all messages are delivered."""
        while self._sent:
            self._wait_for_oldest()

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after ``timeout_s`` seconds at most."""
        if self._worker is not None:
            self._worker.close(timeout_s)

    def _start(self, parcel: Parcel) -> list[dist.Work]:
        return [self._messages.start_sending(part, self._peer) for part in parcel.wait()]

    def _wait_for_oldest(self) -> None:
        with self._traffic.waiting("send"):
            for work in self._sent.popleft().wait():
                self._messages.wait_sent(work, self._peer)


class MessageReceiver:
    """The receiving end of a channel from another rank. Messages arrive in the order in which they were sent."""

    def __init__(
        self, messages: Messages, peer: int, device: torch.device, name: str, traffic: Traffic, what: str
    ) -> None:
        self._messages, self._peer, self._device, self._what = messages, peer, device, what
        self._queue = CommQueue(name, device, traffic)
        self._expected: deque[Handle[Any]] = deque()

    def expect(self) -> None:
        """Starts receiving the next message in the background."""
        self._expected.append(self._queue.submit("recv", self._start, what=self._what))
        self._queue.start_finishing()  # its tensors must arrive before the thread waits for the next header

    def receive(self) -> Any:
        """Returns the next message. Its tensors are new, on ``device``; they require a gradient if the sent ones did.

        Raises:
            RuntimeError: the other rank is lost.
        """
        if not self._expected:
            self.expect()
        with self._messages.awaiting(self._peer):
            message = self._expected.popleft().wait()
        for tensor in tensors_in(message):
            if tensor.is_cuda:  # allocated on the queue's stream, used on this one
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return message

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after the messages in flight or after ``timeout_s`` seconds."""
        self._queue.close(timeout_s)

    def _start(self) -> Handle[Any]:
        pin_memory = self._device.type == "cuda"
        return Handle(start_unpacking(self._messages, self._peer, self._device, objects=True, pin_memory=pin_memory))


#: The ends of a channel, whose methods :class:`MessageSender` and :class:`MessageReceiver` describe.
Sender: TypeAlias = "LocalChannel | MessageSender"
Receiver: TypeAlias = "LocalChannel | MessageReceiver"
