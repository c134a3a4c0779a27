"""Checksums of tensors on a CUDA device are those of the same bits on the host."""

from __future__ import annotations

import pytest
import torch

from lightning_pipesync.core.fingerprints import checksum
from tests.cuda.device import DEVICE


@pytest.mark.parametrize("offset", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_the_host_and_the_device_have_the_same_checksum(dtype: torch.dtype, offset: int) -> None:
    """Also where words are not aligned, which a GPU cannot load."""
    values = torch.randint(0, 100, (5_000_003,), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert checksum(values.to(DEVICE)[offset:]).item() == checksum(values[offset:]).item()
