"""Codecs and error feedback on a device: what the CPU computes, without a host synchronization."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.feedback import encode_with_feedback
from tests.cuda.device import DEVICE, no_synchronization
from tests.quick.core.test_codecs import SIZES, chunk_scales, encoded, every_codec, every_dtype, random, round_trip


def assert_same_values(name: str, source: Tensor, decoded: Tensor, expected: Tensor) -> None:
    """Asserts that two devices decode the same values, bit for bit where a device rounds as the CPU does."""
    if name == "int8" and source.numel():
        # CUDA divides by a number as it multiplies by its reciprocal, so that the last bit of a scale may differ.
        assert ((decoded.cpu() - source.float()).abs() <= chunk_scales(source) * 0.50002).all()
    elif name == "fp8" and source.numel():
        scales = chunk_scales(source, 1024, 448)
        bound = torch.maximum(source.float().abs() * 2**-4, scales * 2**-10) * 1.0001
        assert ((decoded.cpu() - source.float()).abs() <= bound).all()
    elif name == "int4" and source.numel():
        assert ((decoded.cpu() - source.float()).abs() <= chunk_scales(source, 256, 7) * 0.50002).all()
    elif name == "int2" and source.numel():
        assert ((decoded.cpu() - source.float()).abs() <= chunk_scales(source, 256, 3) * 1.0001).all()
    elif name in ("topk", "chunked_topk"):  # which of equal magnitudes are kept is unspecified
        assert torch.equal(decoded.abs().sort().values.cpu(), expected.abs().sort().values)
    else:
        assert torch.equal(decoded.cpu(), expected)


@every_codec
@pytest.mark.parametrize("numel", SIZES)
@every_dtype
def test_decodes_what_the_cpu_decodes(name: str, numel: int, dtype: torch.dtype) -> None:
    codec, source = get_codec(name), random(numel, dtype)
    on_device = source.to(DEVICE)
    with no_synchronization():
        decoded = round_trip(codec, on_device, torch.float32)
    assert_same_values(name, source, decoded, round_trip(codec, source, torch.float32))


@every_codec
@pytest.mark.parametrize("numel", SIZES)
@every_dtype
def test_decode_add_is_decode_and_add(name: str, numel: int, dtype: torch.dtype) -> None:
    codec, source, accumulator = get_codec(name), random(numel, dtype).to(DEVICE), random(numel, seed=1).to(DEVICE)
    with no_synchronization():
        wire = encoded(codec, source)
        decoded = torch.empty_like(accumulator)
        codec.decode(wire, decoded, dtype)
        expected = accumulator + decoded
        codec.decode_add(wire, accumulator, dtype)
    assert torch.equal(accumulator, expected)


@every_codec
@every_dtype
def test_the_same_bits_every_time(name: str, dtype: torch.dtype) -> None:
    codec, source = get_codec(name), random(100_003, dtype).to(DEVICE)
    assert torch.equal(round_trip(codec, source), round_trip(codec, source))


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_feedback_is_that_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    """Bit for bit with the codecs that round alike; otherwise nothing is lost but the last residual."""
    codec, numel, devices = get_codec(name), 5003, (torch.device("cpu"), DEVICE)
    residuals = [torch.zeros(numel, device=device) for device in devices]
    received = [torch.zeros(numel, dtype=torch.float64, device=device) for device in devices]
    sent = torch.zeros(numel, dtype=torch.float64)
    for step in range(10):
        source = random(numel, dtype, step)
        sent += source
        for device, residual, total in zip(devices, residuals, received, strict=True):
            values = source.to(device, copy=True)
            wire = torch.empty(codec.wire_bytes(numel, dtype), dtype=torch.uint8, device=device)
            with no_synchronization():
                encode_with_feedback(codec, values, wire, residual)
                codec.decode_add(wire, total, dtype)
    (on_cpu, on_device), (cpu_total, device_total) = residuals, received
    torch.testing.assert_close(device_total.cpu() + on_device.cpu(), sent, rtol=0, atol=2e-4)
    if name not in ("fp8", "int8", "int4", "int2", "topk", "chunked_topk"):
        assert torch.equal(on_device.cpu(), on_cpu)
        assert torch.equal(device_total.cpu(), cpu_total)
