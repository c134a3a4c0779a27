"""The wire format of nested tensors and small values: a header of fixed size, which describes them, and tensors.

[Note: plain values]
A pickle could run code of the sender's. Between parameter servers only plain values are written and read: numbers,
texts, bytes, lists, tuples, sets, dicts, tensors, dtypes, devices, shapes, and members of enumerations and dataclasses
of this package. NumPy's numbers become Python's. A reader makes nothing else, as with ``weights_only=True``.
Objects of the model's own, which a stage of a pipeline sends to the next, may be anything: only a receiver with
``objects`` reads them.

[Note: who waits]
A copy of a device's tensor starts after what the caller has enqueued, and delays neither the caller nor its stream: the
thread that sends the copies waits for them, once for all tensors of a message. The memory is pinned; a copy to other
memory would block. From pinned memory a copy to the device needs no wait at all: the allocator keeps it until the copy
is complete.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipesync.core.comm.messages import Messages

#: Bytes of a header. The first eight are the size of the description; a longer description follows as a message.
HEADER_BYTES = 1024

#: What the modules begin with whose enumerations and dataclasses are plain.
PACKAGE = f"{__name__.partition('.')[0]}."


def _tensor(index: int) -> Tensor:
    """Stands for a tensor in a pickle: a reader returns that of this index."""
    raise NotImplementedError


def _number(value: complex) -> complex:
    return value


#: What else is plain, or makes what is plain.
_PLAIN = {_tensor, _number, complex, torch.dtype, torch.device, torch.Size}


class _Pickler(pickle.Pickler):
    """Writes containers; ``tensors`` are those in them, in order."""

    def __init__(self, file: io.BytesIO, objects: bool) -> None:
        super().__init__(file, protocol=5)
        self._objects = objects
        self.tensors: list[Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _tensor, (len(self.tensors) - 1,)
        if isinstance(value, np.generic) and type(value.item()) in (int, float, bool, complex):
            return _number, (value.item(),)
        if not (self._objects or _is_plain(value if isinstance(value, type | FunctionType) else type(value))):
            raise TypeError(f"A value of type {type(value).__module__}.{type(value).__qualname__} is not plain.")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Reads what a :class:`_Pickler` has written, with ``tensors`` in their places."""

    def __init__(self, file: io.BytesIO, objects: bool, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__(file)
        self._objects, self._tensors = objects, tensors

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _tensor.__name__):
            return self._tensors.__getitem__
        if self._objects or module in sys.modules:  # it imports others
            found = super().find_class(module, name)
            if self._objects or isinstance(found, torch.dtype) or _is_plain(found):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} makes no plain value")


def _is_plain(kind: Any) -> bool:
    """Returns whether a class is one of plain values, or a function makes some."""
    is_of_package = isinstance(kind, type) and kind.__module__.startswith(PACKAGE)
    return kind in _PLAIN or (is_of_package and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum)))


def pickled(tree: Any, *, objects: bool = False) -> tuple[bytes, list[Tensor]]:
    """Returns nested containers as a pickle, and the tensors among them, in whose places it has numbers.

    Raises:
        TypeError: a value is not plain, and there must be no other ``objects``; the message names its type.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, objects)
    pickler.dump(tree)
    return file.getvalue(), pickler.tensors


def unpickled(file: io.BytesIO, tensors: Sequence[Tensor] = (), *, objects: bool = False) -> Any:
    """Returns what :func:`pickled` has got, from the position of a file on, with these tensors in their places.

    Raises:
        ValueError: it is not such a pickle, or has other ``objects``.
    """
    try:
        return _Unpickler(file, objects, tensors).load()
    except Exception as error:  # of any type, since a pickle is a program
        raise ValueError(f"These are no plain values: {type(error).__name__}: {error}") from error


class HostCopies:
    """Copies tensors of ``device`` to the host, on a stream of their own, see [Note: who waits]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """Returns the tensors on the host, and the event after which they are there; None: they are.

        Args:
            tensors: contiguous, and not to be changed before that event.
        """
        on_device = [tensor for tensor in tensors if tensor.is_cuda]
        if not on_device or self._stream is None:
            return list(tensors), None
        copied = torch.cuda.Event(blocking=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [_copied(tensor) if tensor.is_cuda else tensor for tensor in tensors]
            copied.record(self._stream)
        for tensor in on_device:  # the caller may free it
            tensor.record_stream(self._stream)
        return copies, copied


def _copied(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


@dataclass(frozen=True)
class Parcel:
    """The tensors to send, one after the other, and the event after which those of a device are on the host."""

    parts: list[Tensor]
    copied: torch.cuda.Event | None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def wait(self) -> list[Tensor]:
        """Blocks until :attr:`parts` may be sent, and returns them."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.parts


def packed(tree: Any, copies: HostCopies, wire_dtype: torch.dtype | None = None, *, objects: bool = False) -> Parcel:
    """Packs nested containers with tensors and plain values; does not wait for the device.

    Args:
        tree: its tensors must not be changed until they are delivered; parameters are copied.
        copies: copies tensors of a device.
        wire_dtype: see :func:`narrow`.
        objects: whether other picklable objects may be among the values.

    Raises:
        TypeError: a value is not plain.
    """
    containers, tensors = pickled(tree, objects=objects)
    described, wires = [], []
    for tensor in tensors:
        wire = narrow(tensor.detach(), wire_dtype).contiguous()
        # The tensor may be a parameter, which may be updated before it is delivered.
        wires.append(wire.clone() if isinstance(tensor, nn.Parameter) else wire)
        described.append((tuple(tensor.shape), tensor.dtype, wire.dtype, tensor.requires_grad))
    on_host, copied = copies.start([wire for wire in wires if wire.numel()])
    return Parcel([*_framed(pickled(described)[0] + containers), *on_host], copied)


def start_unpacking(
    messages: Messages, peer: int, device: torch.device, *, objects: bool = False, pin_memory: bool = False
) -> Callable[[], Any]:
    """Receives the header of the next message from ``peer``, and starts to receive its tensors.

    Args:
        messages: those of :func:`packed`.
        objects: whether other objects than plain values are accepted, which may run code of the sender's.
        pin_memory: whether tensors are received in pinned memory, from where copies to a device need no wait.

    Returns:
        A function that waits for the tensors and returns the message. They are new ones, on ``device``, and require a
        gradient if the sent ones did.

    Raises:
        ValueError: the message is not of this format.
    """

    def read(buffer: Tensor) -> Tensor:
        messages.wait_received(messages.start_receiving(buffer, peer), peer)
        return buffer

    frame = read(torch.empty(HEADER_BYTES, dtype=torch.uint8))
    size = int(frame[:8].view(torch.int64))
    body = frame[8 : 8 + size] if size <= HEADER_BYTES - 8 else read(torch.empty(size, dtype=torch.uint8))
    file = io.BytesIO(body.numpy().tobytes())
    described = unpickled(file)
    wires = [torch.empty(shape, dtype=dtype, pin_memory=pin_memory) for shape, _, dtype, _ in described]
    works = [messages.start_receiving(wire, peer) for wire in wires if wire.numel()]

    def finish() -> Any:
        for work in works:
            messages.wait_received(work, peer)
        tensors = [
            wire.to(device, non_blocking=pin_memory).to(dtype).requires_grad_(requires_grad)
            for wire, (_, dtype, _, requires_grad) in zip(wires, described, strict=True)
        ]
        return unpickled(file, tensors, objects=objects)

    return finish


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
