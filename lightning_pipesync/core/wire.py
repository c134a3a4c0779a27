"""The wire format of nested tensors and small objects: a header of fixed size, which describes them, and tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.messages import Messages
from lightning_pipesync.core.torch_private import map_tensors, tree_flatten, tree_unflatten

#: Bytes of a header. The first eight are the size of the description; a longer description follows as a message.
HEADER_BYTES = 1024


@dataclass(frozen=True)
class _Described:
    """The description of a tensor in a header."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    wire_dtype: torch.dtype
    requires_grad: bool


def packed(tree: Any, wire_dtype: torch.dtype | None = None) -> list[Tensor]:
    """Returns the tensors to send, one after the other, for nested containers with tensors and picklable objects.

    Args:
        tree: its tensors must not be changed until they are delivered; parameters are copied.
        wire_dtype: the dtype that wider floating-point tensors are sent in; None: their own.
    """
    wires = []

    def described(tensor: Tensor) -> _Described:
        wire = narrow(tensor.detach(), wire_dtype).cpu().contiguous()
        # The tensor may be a parameter, which may be updated before it is delivered.
        wires.append(wire.clone() if isinstance(tensor, nn.Parameter) else wire)
        return _Described(tuple(tensor.shape), tensor.dtype, wires[-1].dtype, tensor.requires_grad)

    header = _framed(pickle.dumps(map_tensors(described, tree)))
    return [*header, *(wire for wire in wires if wire.numel())]


def start_unpacking(messages: Messages, peer: int, device: torch.device) -> Callable[[], Any]:
    """Receives the header of the next message from ``peer``, and starts to receive its tensors.

    Returns:
        A function that waits for the tensors and returns the message. They are new ones, on ``device``, and require a
        gradient if the sent ones did.
    """

    def read(buffer: Tensor) -> Tensor:
        messages.wait_received(messages.start_receiving(buffer, peer), peer)
        return buffer

    frame = read(torch.empty(HEADER_BYTES, dtype=torch.uint8))
    size = int(frame[:8].view(torch.int64))
    text = frame[8 : 8 + size] if size <= HEADER_BYTES - 8 else read(torch.empty(size, dtype=torch.uint8))
    leaves, spec = tree_flatten(pickle.loads(text.numpy().tobytes()))
    wires = {
        i: torch.empty(leaf.shape, dtype=leaf.wire_dtype)
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, _Described)
    }
    works = [messages.start_receiving(wire, peer) for wire in wires.values() if wire.numel()]

    def finish() -> Any:
        for work in works:
            messages.wait_received(work, peer)
        for i, wire in wires.items():
            leaves[i] = wire.to(device, leaves[i].dtype).requires_grad_(leaves[i].requires_grad)
        return tree_unflatten(leaves, spec)

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
