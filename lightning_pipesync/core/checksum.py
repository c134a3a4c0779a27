"""Checksums of the bits of tensors, as fast as memory can be read."""

from __future__ import annotations

import torch
from torch import Tensor

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
