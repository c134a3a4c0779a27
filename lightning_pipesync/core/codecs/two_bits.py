"""Numbers of two bits, four in a byte."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_two_bits(numbers: Tensor, packed: Tensor) -> None:
    """Writes numbers from 0 to 3, uint8, to bytes, the first of four in the lowest bits; zeros follow the last."""
    if missing := -numbers.shape[-1] % 4:
        numbers = torch.nn.functional.pad(numbers, (0, missing))
    first, second, third, fourth = (numbers[..., place::4] << 2 * place for place in range(4))
    torch.bitwise_or(first | second, third | fourth, out=packed)


def unpack_two_bits(packed: Tensor) -> Tensor:
    """Returns the numbers in these bytes, uint8, four of each."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts).flatten(-2) & 3
