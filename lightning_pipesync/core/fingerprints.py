"""Whether values have changed, or differ between ranks, without a copy of them and without sending them.

[Note: what counts as changed]
Parameters may be many, and are compared by autograd's version counter and by their norm, since ``p.data.copy_(...)``
does not change the counter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import foreach_norm, version

Version = tuple[int, int]  # autograd's counter, and where the values lie

#: Added to each sum, so that memory full of zeros is not the checksum of zeros.
_SALT = -0x61C8864680B583EB

#: Bytes that are copied at a time, where a tensor does not begin at a multiple of 8 bytes: they stay in a cache.
_COPIED = 2**22


def checksum(tensor: Tensor) -> Tensor:
    """Returns the wrapping sum of a tensor's 64-bit words, shape ``[1]``, int64, on its device.

    Any one bit that differs changes it, and of other differences all but one of 2^64. It depends on the bits alone,
    so that NaN equals itself, and not on where in memory they are. Words that have changed places are not seen.
    """
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // torch.int64.itemsize * torch.int64.itemsize
    words, rest = data[:whole], data[whole:]
    total = rest.sum() + _SALT
    if words.storage_offset() % torch.int64.itemsize:
        for part in words.split(_COPIED):
            total = total + part.clone().view(torch.int64).sum()
    else:
        total = total + words.view(torch.int64).sum()
    return total.reshape(1)


def checksums_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the checksums of tensors, with one copy from each device."""
    sums = [checksum(tensor) for tensor in tensors]
    found = torch.zeros(len(sums), dtype=torch.int64)
    for device in {one.device for one in sums}:
        places = [place for place, one in enumerate(sums) if one.device == device]
        found[places] = torch.cat([sums[place] for place in places]).cpu()
    return found.tolist()


def digest(value: Any) -> str:
    """Returns 128 bits, as hexadecimal digits, of a tensor, or of nested containers with tensors and plain values.

    Of a tensor the values, the shape and the dtype count, bit for bit, not where and in which strides it is. A state
    has the same digest after ``torch.save`` and ``torch.load(weights_only=True)``. It finds accidents, and is no proof
    against an attacker, who could replace the digest, too.
    """
    found = hashlib.blake2b(digest_size=16)
    _add(found, value)
    return found.hexdigest()


def _add(found: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous().reshape(-1)
        found.update(f"tensor {tuple(value.shape)} {value.dtype};".encode())
        found.update(values.view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)};".encode())
        for key in sorted(value, key=repr):
            _add(found, key)
            _add(found, value[key])
    elif isinstance(value, (list, tuple)):
        found.update(f"sequence {len(value)};".encode())
        for item in value:
            _add(found, item)
    elif isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
        found.update(f"{value!r};".encode())
    else:  # its text may be an address in memory
        found.update(f"{type(value).__name__};".encode())


def marks_of(tensors: Sequence[Tensor]) -> list[tuple[int, str]]:
    """Returns version and norm of each tensor, see [Note: what counts as changed]."""
    floating = [tensor.detach() for tensor in tensors if can_be_averaged(tensor)]
    norms = iter(torch.stack(foreach_norm(floating)).tolist() if floating else [])
    return [(version(tensor), float(next(norms)).hex() if can_be_averaged(tensor) else "") for tensor in tensors]


def versions_of(tensors: Sequence[Tensor]) -> list[Version]:
    return [(version(tensor), tensor.data_ptr()) for tensor in tensors]


def written_since(versions: Sequence[Version], tensors: Sequence[Tensor], own_writes: int = 0) -> list[int]:
    """Returns the indices of tensors that were written to since :func:`versions_of`; none if ``versions`` is empty.

    Args:
        own_writes: how often each was written to by who asks.

    Other memory for ``tensor.data`` is a write. Values that are written through it are not seen.
    """
    pairs = zip(versions, versions_of(tensors), strict=True) if versions else ()  # asked before each forward pass
    return [
        index
        for index, ((before, place), (now, place_now)) in enumerate(pairs)
        if now != before + own_writes or place_now != place
    ]


def can_be_averaged(tensor: Tensor) -> bool:
    """Returns whether the values are real numbers of 16 bits or more. 8-bit floats are codes, as integers may be."""
    return tensor.is_floating_point() and tensor.element_size() > 1
