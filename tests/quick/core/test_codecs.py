"""Codecs: round trips, error bounds, special values, and error feedback."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_pipesync.core.codecs import (
    BF16,
    FP8,
    FP16,
    ChunkedTopK,
    Codec,
    Int2,
    Int4,
    Int8,
    NoCompression,
    TopK,
    Truncate16,
    blocks,
    get_codec,
    sparse,
)
from lightning_pipesync.core.codecs.scaled import ScaledChunks
from lightning_pipesync.core.feedback import encode_with_feedback

NAMES = ["none", "bf16", "fp16", "truncate16", "fp8", "int8", "int4", "int2", "topk", "chunked_topk"]
LOSSY = NAMES[1:]
SIZES = [0, 1, 2, 1023, 1024, 1025, 4096, 100003]
FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TINY = torch.finfo(torch.float32).tiny

every_codec = pytest.mark.parametrize("name", NAMES)
every_dtype = pytest.mark.parametrize("dtype", FLOATING, ids=str)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the largest size span many blocks."""
    monkeypatch.setattr(blocks, "BLOCK_PER_THREAD", 4096)


def random(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Values of both signs over a few orders of magnitude, within the range of fp16."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
    return values.to(dtype)


def encoded(codec: Codec, source: Tensor) -> Tensor:
    # Filled with ones, so that a byte that encode forgets shows.
    wire = torch.full((codec.wire_bytes(source.numel(), source.dtype),), 255, dtype=torch.uint8, device=source.device)
    codec.encode(source, wire)
    return wire


def round_trip(codec: Codec, source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    target = torch.full_like(source, 7, dtype=dtype or source.dtype)
    codec.decode(encoded(codec, source), target, source.dtype)
    return target


def chunk_scales(source: Tensor, chunk_size: int = 1024, levels: float = 127) -> Tensor:
    """The scale of each value's chunk, in plain Python loops."""
    parts = [chunk.abs().max().expand(chunk.numel()) / levels for chunk in source.float().split(chunk_size)]
    return torch.cat(parts).clamp(min=TINY)


# --- every codec ---


#: By codec the largest error, from magnitudes and, where chunks have scales, from these.
BOUNDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda exact, source: exact * 0,
    "bf16": lambda exact, source: exact * 2**-8,
    "fp16": lambda exact, source: exact * 2**-11 + 2**-25,
    "truncate16": lambda exact, source: exact * 2**-7 + 1e-45,
    "fp8": lambda exact, source: torch.maximum(exact * 2**-4, chunk_scales(source, 1024, 448) * 2**-10) * 1.0001,
    "int8": lambda exact, source: chunk_scales(source) * 0.50002,
    "int4": lambda exact, source: chunk_scales(source, 256, 7) * 0.50002,
    "int2": lambda exact, source: chunk_scales(source, 256, 1.5) * 0.50002,
}


@every_codec
@every_dtype
def test_every_size_and_dtype_keeps_what_matters(name: str, dtype: torch.dtype) -> None:
    for numel in SIZES:
        source = random(numel, dtype)
        before = source.clone()
        decoded = round_trip(get_codec(name), source, torch.float64)
        assert torch.equal(source, before)
        assert decoded.isfinite().all()
        if name in BOUNDS and numel:
            assert ((decoded - source.double()).abs() <= BOUNDS[name](source.double().abs(), source)).all()
        elif name == "chunked_topk" and numel:
            for chunk, values in zip(decoded.split(4096), source.double().split(4096), strict=True):
                kept = chunk.nonzero().view(-1)
                assert kept.numel() == min(64, chunk.numel())
                assert values[kept].abs().min() >= values.abs().sort().values[-kept.numel()]
                assert torch.equal(chunk[kept].sign(), values[kept].sign())
                assert chunk[kept].abs().unique().numel() <= 2
                assert chunk.abs().sum() == pytest.approx(values[kept].abs().sum().item(), rel=1e-5)
        elif name == "topk" and numel:
            k = math.ceil(0.01 * numel)
            assert torch.equal(decoded.abs().sort().values[-k:], source.float().double().abs().sort().values[-k:])
            assert decoded.count_nonzero() == k


@pytest.mark.parametrize(
    ("codec", "numel", "dtype", "num_bytes"),
    [
        (NoCompression(), 1025, torch.float32, 4100),
        (NoCompression(), 1025, torch.float64, 8200),
        (NoCompression(), 1025, torch.bfloat16, 2050),
        (NoCompression(), 1025, torch.int8, 1025),
        (BF16(), 1025, torch.float32, 2050),
        (FP16(), 1025, torch.float64, 2050),
        (Truncate16(), 1025, torch.bfloat16, 2050),
        (FP8(), 1025, torch.bfloat16, 8 + 1025),
        (Int8(), 1024, torch.float32, 4 + 1024),
        (Int8(), 1025, torch.float32, 8 + 1025),
        (Int4(), 256, torch.float32, 4 + 128),
        (Int4(), 257, torch.float32, 8 + 129),
        (Int2(), 256, torch.float32, 4 + 64),
        (Int2(), 257, torch.float32, 8 + 65),
        (ChunkedTopK(), 8192, torch.float32, 2 * (8 + 96 + 16)),
        (ChunkedTopK(), 5, torch.float32, 8 + 96 + 16),
        (ChunkedTopK(k=16), 4097, torch.float32, 2 * (8 + 24 + 4)),
        (TopK(), 1, torch.float32, 8),
        (TopK(), 101, torch.float32, 16),
        (TopK(ratio=0.25), 1000, torch.float16, 2000),
        (TopK(ratio=1.0), 1000, torch.float32, 8000),
        *((get_codec(name), 0, torch.float32, 0) for name in NAMES),
    ],
)
def test_wire_bytes(codec: Codec, numel: int, dtype: torch.dtype, num_bytes: int) -> None:
    assert codec.wire_bytes(numel, dtype) == num_bytes


@every_codec
@every_dtype
def test_decode_add_is_decode_and_add(name: str, dtype: torch.dtype) -> None:
    codec = get_codec(name)
    for numel in SIZES:
        source, accumulator = random(numel, dtype), random(numel, seed=1)
        expected = accumulator + round_trip(codec, source, torch.float32)
        codec.decode_add(encoded(codec, source), accumulator, dtype)
        assert torch.equal(accumulator, expected)


@every_codec
@every_dtype
@pytest.mark.parametrize("in_blocks", [True, False], ids=["in blocks", "at once, as on CUDA"])
def test_rows_are_encoded_one_by_one(
    name: str, dtype: torch.dtype, in_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = get_codec(name)
    for numel in SIZES:
        rows = random(3 * numel, dtype).view(3, numel)
        num_bytes = codec.wire_bytes(numel, dtype)
        wires = torch.full([3, max(1, -(-num_bytes // 16)) * 16], 255, dtype=torch.uint8)[:, :num_bytes]
        accumulator, decoded = random(3 * numel, seed=1).view(3, numel), torch.full([3, numel], 7.0)
        each_decoded = torch.stack([round_trip(codec, row, torch.float32) for row in rows])
        expected = accumulator + each_decoded
        with monkeypatch.context() as patched:
            for module in (blocks, sparse):
                patched.setattr(module, "works_in_blocks", lambda _: in_blocks)
            codec.encode(rows, wires)
            codec.decode(wires, decoded, dtype)
            codec.decode_add(wires, accumulator, dtype)
        assert torch.equal(decoded, each_decoded)
        assert torch.equal(accumulator, expected)
        if name != "topk":  # whose values are in no particular order
            assert torch.equal(wires, torch.stack([encoded(codec, row) for row in rows]))


@every_codec
@every_dtype
def test_decodes_to_any_dtype(name: str, dtype: torch.dtype) -> None:
    codec, source = get_codec(name), random(3000)
    expected = round_trip(codec, source)
    assert torch.equal(round_trip(codec, source, dtype), expected.to(dtype))
    accumulator = torch.ones(3000, dtype=dtype)
    codec.decode_add(encoded(codec, source), accumulator, torch.float32)
    error = (accumulator.double() - (1 + expected.double())).abs()
    assert (error <= torch.finfo(dtype).eps * (1 + expected.abs())).all()


@every_codec
@every_dtype
def test_not_finite_stays_not_finite(name: str, dtype: torch.dtype) -> None:
    size = {"fp8": 1024, "int8": 1024, "int4": 256, "int2": 256}.get(name, 1)
    for special, position in product((math.nan, math.inf, -math.inf), (0, 1500, 2999)):
        source = random(3000, dtype)
        source[position] = special
        decoded = round_trip(get_codec(name), source, torch.float32)
        assert not decoded[position].isfinite()
        spoilt = (~decoded.isfinite()).sum().item()
        if name == "chunked_topk":
            assert spoilt <= 64
        else:
            assert spoilt == min(size, 3000 - position // size * size)


@every_codec
def test_zeros_and_values_that_have_not_moved_stay(name: str) -> None:
    """But for int2, which has no level for the latter."""
    for dtype in FLOATING:
        assert round_trip(get_codec(name), torch.zeros(2500, dtype=dtype)).count_nonzero() == 0
    for moved in (1, 20, 63, 64, 65, 3000):
        source = torch.zeros(6000)
        source[:moved] = random(moved)
        has_stayed = not round_trip(get_codec(name), source)[moved:].any()
        assert has_stayed or (name == "int2" and moved % 256)


@every_codec
@pytest.mark.parametrize("largest", [1e-45, 3e-43, 1e-40, TINY, 1e-36])
def test_subnormals_are_numbers(name: str, largest: float) -> None:
    source = random(2500)
    source *= largest / source.abs().max()
    error = (round_trip(get_codec(name), source).double() - source.double()).abs().max()
    shares = {"fp16": 1.0, "topk": 1.0, "chunked_topk": 1.0, "int4": 1 / 13, "int2": 1 / 3, "fp8": 1 / 16}
    assert error <= max(largest, 1e-45) * shares.get(name, 1 / 127) + TINY


@every_codec
def test_largest_number_stays_huge_or_becomes_infinity(name: str) -> None:
    largest = torch.finfo(torch.float32).max
    codec = TopK(ratio=1) if name == "topk" else get_codec(name)
    decoded = round_trip(codec, torch.tensor([largest, -largest, 1.0]))
    assert decoded[0] >= 0.99 * largest
    assert decoded[1] <= -0.99 * largest


@every_codec
def test_deterministic_whatever_the_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, source = get_codec(name), random(100003)
    wire = encoded(codec, source)
    assert torch.equal(encoded(codec, source), wire)
    monkeypatch.setattr(blocks, "BLOCK_PER_THREAD", 2**17)
    assert torch.equal(encoded(codec, source), wire)


@every_codec
def test_one_codec_in_two_threads(name: str) -> None:
    codec = get_codec(name)
    sources = [random(50000, dtype, seed) for seed in range(4) for dtype in (torch.float32, torch.bfloat16)]
    expected = [round_trip(codec, source, torch.float32) for source in sources]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(5):
            found = threads.map(lambda source: round_trip(codec, source, torch.float32), sources)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_codec
@every_dtype
def test_never_reads_a_value_on_the_host(name: str, dtype: torch.dtype) -> None:
    # Meta tensors have no values: anything that needs one (item, nonzero, a boolean index) raises.
    codec, source = get_codec(name), torch.empty(5000, dtype=dtype, device="meta")
    round_trip(codec, source, torch.float32)
    codec.decode_add(encoded(codec, source), source.float(), dtype)
    encode_with_feedback(codec, source, encoded(codec, source), source.float())


# --- one codec ---


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_none_carries_integers(dtype: torch.dtype) -> None:
    codec, source = get_codec("none"), torch.arange(1025).to(dtype)
    assert torch.equal(round_trip(codec, source), source)
    accumulator = torch.ones_like(source)
    codec.decode_add(encoded(codec, source), accumulator, dtype)
    assert torch.equal(accumulator, source + 1)


@pytest.mark.parametrize("name", LOSSY)
def test_integers_are_refused(name: str) -> None:
    assert get_codec("none").lossless
    assert not get_codec(name).lossless
    with pytest.raises(ValueError, match=f"compression='{name}'.*torch.int64.*'none'"):
        get_codec(name).wire_bytes(10, torch.int64)


def test_fp16_overflows_to_infinity() -> None:
    decoded = round_trip(FP16(), torch.tensor([65504.0, 65520.0, -1e6]))
    assert decoded.tolist() == [65504.0, math.inf, -math.inf]


@pytest.mark.parametrize("numel", [*SIZES, 3, 7, 8, 9, 1000])
def test_truncate16_sends_the_high_halves(numel: int) -> None:
    source = random(numel)
    bits = source.numpy().view(np.uint32)
    assert np.array_equal(encoded(Truncate16(), source).numpy().view(np.uint16), bits >> 16)
    assert np.array_equal(round_trip(Truncate16(), source).numpy().view(np.uint32), bits & 0xFFFF0000)


def test_truncate16_of_a_nan_with_only_low_bits_is_no_number() -> None:
    source = torch.tensor([0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert source.isnan().all()
    assert not round_trip(Truncate16(), source).isfinite().any()


def test_fp8_wire_is_scales_and_then_values_in_e4m3() -> None:
    source = torch.cat([torch.full((1024,), -896.0), torch.tensor([448.0, 1.0625, -0.0625, 2**-10, 3 * 2**-10])])
    wire = encoded(FP8(), source)
    assert wire[:8].view(torch.float32).tolist() == [2.0, 1.0]
    # The sign, 4 bits of exponent and 3 of mantissa; halves round to even, also below the smallest normal number.
    assert wire[8:].tolist() == [0b1_1111_110] * 1024 + [0b0_1111_110, 0b0_0111_000, 0b1_0011_000, 0, 0b0_0000_010]


def test_int8_wire_is_scales_and_then_values() -> None:
    source = torch.cat([torch.full((1024,), -254.0), torch.tensor([127.0, 1.0, -0.4])])
    wire = encoded(Int8(), source)
    assert wire[:8].view(torch.float32).tolist() == [2.0, 1.0]
    assert wire[8:].view(torch.int8).tolist() == [-127] * 1024 + [127, 1, 0]


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-40, TINY, 100 * TINY])
def test_int8_scale_is_never_subnormal(largest: float) -> None:
    # Its reciprocal would be infinite, and what int8 makes of infinities and NaNs is not defined.
    wire = encoded(Int8(), torch.tensor([largest, -largest]))
    assert wire[:4].view(torch.float32).item() == TINY
    assert wire[4:].view(torch.int8).tolist() == [round(largest / TINY), -round(largest / TINY)]


def test_fp8_decodes_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127]  # NaNs, which come from the scale
    for scale in (1.0, 3.0, TINY):
        wire = torch.cat([torch.tensor([scale]).view(torch.uint8), codes])
        decoded = torch.empty(254)
        FP8().decode(wire, decoded, torch.float32)
        assert torch.equal(decoded, codes.view(torch.float8_e4m3fn).float() * scale)


@pytest.mark.parametrize("codec", [FP8(), Int8(), Int4(), Int2()], ids=repr)
def test_products_with_scales_are_exact(codec: ScaledChunks) -> None:
    """So it does not matter whether a processor rounds them before it adds them."""
    source = random(5000)
    scales = encoded(codec, source)[: 4 * -(-5000 // codec.CHUNK)].view(torch.float32)
    assert not (scales.view(torch.int32) & 127).any()
    numbers = round_trip(codec, source).double() / scales.double().repeat_interleave(codec.CHUNK)[:5000]
    assert numbers.abs().max() == codec.LEVELS
    assert torch.equal(numbers * 512, (numbers * 512).round())


def test_int4_wire_is_scales_and_then_halves_of_chunks() -> None:
    source = torch.zeros(256 + 130)
    source[[0, 1, 127, 128, 129, 255]] = torch.tensor([14.0, -6.0, 2.0, 0.0, -14.0, 3.0])
    source[[256, 383, 384, 385]] = torch.tensor([7.0, -1.0, -7.0, 1.0])
    wire = encoded(Int4(), source)
    assert wire[:8].view(torch.float32).tolist() == [2.0, 1.0]
    numbers = wire[8:].view(torch.int8)
    assert numbers[[0, 1, 127]].tolist() == [7 + 16 * 0, -3 + 16 * -7, 1 + 16 * 2]  # 1.5 is rounded to even
    assert numbers[[128, 129, 255]].tolist() == [7 + 16 * -7, 0 + 16 * 1, -1]


def test_int2_wire_is_scales_and_then_quarters_of_chunks() -> None:
    source = torch.zeros(256 + 256)
    source[[0, 64, 128, 192, 1, 65, 129, 193]] = torch.tensor([3.0, -3.0, 1.9, 2.1, 0.1, -0.1, -1.9, -2.1])
    wire = encoded(Int2(), source)
    assert wire[:8].view(torch.float32).tolist() == [1.0, 0.0], "a chunk of zeros has no other scale"
    assert wire[8:10].tolist() == [3 | 0 << 2 | 2 << 4 | 3 << 6, 2 | 1 << 2 | 1 << 4 | 0 << 6]
    decoded = round_trip(Int2(), source)
    assert decoded[[0, 64, 128, 192]].tolist() == [3.0, -3.0, 1.0, 3.0]
    assert decoded[[1, 65, 129, 193]].tolist() == [1.0, -1.0, -1.0, -3.0]


@pytest.mark.parametrize("numel", SIZES[1:])
def test_topk_keeps_exactly_the_k_largest(numel: int) -> None:
    sources = random(numel), torch.arange(1.0, numel + 1), torch.arange(numel) % 3 - 1.0  # the last one with ties
    for source, ratio in product(sources, (0.001, 0.01, 0.1, 0.3, 0.5, 1.0)):
        k = max(1, math.ceil(ratio * numel))
        indices, values = encoded(TopK(ratio), source).view(torch.int32).long().split(k)
        assert indices.unique().numel() == k
        values = values.int().view(torch.float32)
        assert torch.equal(values, source[indices])
        assert torch.equal(values.abs().sort().values, source.abs().sort().values[numel - k :])


def test_topk_keeps_not_finite_values_first() -> None:
    source = random(1000)
    source[10], source[500], source[-1] = math.nan, -math.inf, math.inf
    decoded = round_trip(TopK(ratio=0.003), source)
    assert decoded.nonzero().flatten().tolist() == [10, 500, 999]


def test_topk_refuses_a_ratio_outside_its_range_and_more_values_than_int32_counts() -> None:
    for ratio in (0.0, -0.1, 1.01, math.nan, "0.1", None):
        with pytest.raises(ValueError, match=r"ratio=.*\(0, 1\]"):
            TopK(ratio=ratio)  # type: ignore[arg-type]
    TopK().wire_bytes(2**31 - 1, torch.float32)
    with pytest.raises(ValueError, match="2147483648"):
        TopK().wire_bytes(2**31, torch.float32)


def test_get_codec() -> None:
    assert [get_codec(name).name for name in NAMES] == NAMES
    codec = TopK(ratio=0.5)
    assert get_codec(codec) is codec
    with pytest.raises(ValueError, match="compression='zip'.*" + ", ".join(map(repr, NAMES))):
        get_codec("zip")


# --- error feedback ---


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_feedback_loses_nothing_but_the_last_residual(name: str, dtype: torch.dtype) -> None:
    codec, numel = get_codec(name), 5003
    residual = torch.zeros(numel)
    sent, received = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(50):
        source = random(numel, dtype, step)
        sent += source
        wire = torch.empty(codec.wire_bytes(numel, dtype), dtype=torch.uint8)
        encode_with_feedback(codec, source, wire, residual)
        codec.decode_add(wire, received, dtype)
    torch.testing.assert_close(received + residual, sent, rtol=0, atol=2e-4)
    assert residual.count_nonzero() == 0 or not codec.lossless


def test_feedback_encodes_source_plus_residual() -> None:
    source, residual = torch.tensor([1.0, 0.25]), torch.tensor([0.5, 0.0])
    wire = torch.empty(8, dtype=torch.uint8)
    encode_with_feedback(TopK(ratio=0.5), source, wire, residual)
    assert source.tolist() == [1.5, 0.25]
    assert residual.tolist() == [0.0, 0.25]
    assert wire.view(torch.int32)[0] == 0
    assert wire.view(torch.float32)[1] == 1.5


@every_codec
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 1e6])
def test_feedback_is_not_poisoned(name: str, special: float) -> None:
    codec, residual = get_codec(name), torch.zeros(5003)
    source = random(5003)
    source[3] = special
    wire = encoded(codec, source)
    encode_with_feedback(codec, source, wire, residual)
    assert residual.isfinite().all()
    encode_with_feedback(codec, random(5003, seed=1), wire, residual)
    decoded = torch.empty(5003)
    codec.decode(wire, decoded, torch.float32)
    assert decoded.isfinite().all()


def test_the_settings_of_a_codec_are_its_text() -> None:
    """Ranks compare their settings as text, in which an address in memory would differ."""
    for name in NAMES:
        assert " at 0x" not in repr(get_codec(name))
        assert repr(get_codec(name)) == repr(type(get_codec(name))())
    assert repr(TopK(ratio=0.5)) == repr(TopK(ratio=0.5)) != repr(TopK())
