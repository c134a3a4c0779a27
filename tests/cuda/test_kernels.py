"""The Triton kernels of codecs on a device: what torch operations on the CPU make, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.codecs.shards import Shards, shards_of
from tests.cuda.device import DEVICE, needs_cuda, no_synchronization
from tests.nightly.core.test_kernels import DTYPES, SHAPES, compare_shards, same_values
from tests.quick.core.test_codecs import every_codec

pytestmark = [
    needs_cuda,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability(DEVICE) < (8, 0),
        reason="Triton compiles from compute capability 8 on",
    ),
]


@every_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_make_what_torch_operations_make_on_the_cpu(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    for special in {False, shape[2] > 1000}:
        for what, both in compare_shards(get_codec(name), dtype, *shape, special, DEVICE).items():
            assert same_values(*both), what


@every_codec
def test_the_same_bits_every_time(name: str) -> None:
    """Also with more programs than the device runs at once."""
    codec, generator = get_codec(name), torch.Generator(DEVICE).manual_seed(0)
    flat = torch.randn(4_000_003, generator=generator, device=DEVICE)

    def results() -> list[Tensor]:
        shards, source, residual = shards_of(codec, 1_000_001, flat), flat.clone(), torch.zeros_like(flat)
        assert type(shards) is not Shards
        wires, own, decoded = shards.wires(4).zero_(), torch.empty(1_000_001, device=DEVICE), torch.empty_like(flat)
        shards.encode(source, wires, residual)
        shards.decode(wires, decoded)
        shards.sum(wires, own, 4)
        return [wires, own, decoded, residual]

    first = results()  # compiles, for which the host may wait
    with no_synchronization():
        again = [results() for _ in range(5)]
    assert all(torch.equal(one, other) for others in again for one, other in zip(first, others, strict=True))
