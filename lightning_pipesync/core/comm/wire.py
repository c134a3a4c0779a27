"""The wire format of nested tensors and small values: a header of fixed size, which describes them, and tensors.

[Note: no pickles]
The description is JSON, see :mod:`lightning_pipesync.core.plain`. Objects of the model's own, which a stage of a
pipeline sends to the next, may be anything: only a receiver with ``objects`` reads a pickle, which could run code.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.comm.host_copies import HostCopies
from lightning_pipesync.core.comm.messages import Messages
from lightning_pipesync.core.plain import decode, dtype_of, encode
from lightning_pipesync.core.torch_private import map_tensors, tree_flatten, tree_unflatten

#: Bytes of a header. The first eight are the size of the description; a longer description follows as a message.
HEADER_BYTES = 1024

#: The first byte of a description, see [Note: no pickles]. A line in JSON follows: the shape and dtype of each tensor,
#: and, unless they are the same and False, the dtype on the wire, and whether it requires a gradient. Then the
#: containers, in which the tensors are numbers.
_JSON, _PICKLE = b"J", b"P"


@dataclass(frozen=True)
class _Number:
    """Stands for a tensor in a pickle."""

    index: int


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
    tensors: list[Tensor] = []

    def numbered(tensor: Tensor) -> int:
        tensors.append(tensor)
        return len(tensors) - 1

    try:
        kind, containers = _JSON, encode(tree, numbered).encode()
    except TypeError:
        if not objects:
            raise
        tensors.clear()
        kind, containers = _PICKLE, pickle.dumps(map_tensors(lambda tensor: _Number(numbered(tensor)), tree))
    described, wires = [], []
    for tensor in tensors:
        wire = narrow(tensor.detach(), wire_dtype).contiguous()
        # The tensor may be a parameter, which may be updated before it is delivered.
        wires.append(wire.clone() if isinstance(tensor, nn.Parameter) else wire)
        dtype, sent_as = (str(one.dtype).removeprefix("torch.") for one in (tensor, wire))
        differs = dtype != sent_as or tensor.requires_grad
        described.append([list(tensor.shape), dtype, *([sent_as, tensor.requires_grad] if differs else [])])
    line = json.dumps(described, separators=(",", ":")).encode()
    on_host, copied = copies.start([wire for wire in wires if wire.numel()])
    return Parcel([*_framed(kind + line + b"\n" + containers), *on_host], copied)


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
    line, _, containers = body.numpy().tobytes().partition(b"\n")
    kind, described = line[:1], [(*one, one[1], False)[:4] for one in json.loads(line[1:])]
    if kind != _JSON and not (objects and kind == _PICKLE):
        raise ValueError(f"Rank {peer} has sent a message of kind {kind!r}, which is not expected.")
    wires = [
        torch.empty(shape, dtype=dtype_of(wire_dtype), pin_memory=pin_memory) for shape, _, wire_dtype, _ in described
    ]
    works = [messages.start_receiving(wire, peer) for wire in wires if wire.numel()]

    def finish() -> Any:
        for work in works:
            messages.wait_received(work, peer)
        tensors = [
            wire.to(device, non_blocking=pin_memory).to(dtype_of(dtype)).requires_grad_(requires_grad)
            for wire, (_, dtype, _, requires_grad) in zip(wires, described, strict=True)
        ]
        if kind == _JSON:
            return decode(containers.decode(), tensors.__getitem__)
        leaves, spec = tree_flatten(pickle.loads(containers))
        return tree_unflatten([tensors[leaf.index] if isinstance(leaf, _Number) else leaf for leaf in leaves], spec)

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
