"""The Triton kernels of codecs, without a GPU: interpreted, they make what torch operations make; and they compile."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipesync.core.codecs import Codec, get_codec
from lightning_pipesync.core.codecs.shards import Shards, compiles_on, shards_of
from lightning_pipesync.core.comm.nccl import NcclExchange
from tests.quick.core.test_codecs import NAMES as CODEC_NAMES
from tests.quick.core.test_codecs import random
from tests.quick.core.test_nccl import CPU, exchange_all_kinds, nccl_on_the_host
from tests.support.harness import launch

pytest.importorskip("triton", reason="torch for CUDA and the extra [test] on Linux bring Triton")

SHAPES = [(1, 0, 0), (3, 1, 2), (4, 1025, 2080), (2, 5003, 10006)]  #: shards, size of each, values in all
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Not finite, one NaN with all bits set, and a value that a codec may take for infinity.
SPECIAL = [math.nan, -math.inf, 3e38, torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()]
NAMES = [name for name in CODEC_NAMES if name != "topk"]  #: of the codecs that have kernels
#: What top-k has encoded has many equal magnitudes, which it may encode otherwise the next time.
WITHOUT_TIES = [name for name in NAMES[1:] if "topk" not in name]
RUNS_TRITON = "lightning_pipesync.core.codecs.shards.runs_triton"


def compare_with_torch() -> dict[str, bool]:
    """Returns by their names which results of kernels are those of torch operations."""
    same = {
        f"{name}, {dtype}, {number} shards of {size}, special {special}, {what}": same_values(*both)
        for name in NAMES
        for dtype in DTYPES
        for number, size, numel in SHAPES
        for special in {False, numel > 1000}
        for what, both in compare_shards(get_codec(name), dtype, number, size, numel, special).items()
    }
    return same | {
        "equal magnitudes in chunked_topk": first_of_equal_magnitudes("chunked_topk", 4000, 64),
    }


def first_of_equal_magnitudes(codec: str | Codec, size: int, num_kept: int) -> bool:
    """Returns whether top-k keeps the first ones, where more are equal than it keeps."""
    flat = torch.arange(size) % 3 - 1.0
    with patch(RUNS_TRITON, lambda _: True):
        shards = shards_of(get_codec(codec), size, flat)
    wires, decoded = shards.wires(1), torch.empty_like(flat)
    shards.encode(flat, wires, None)
    shards.decode(wires, decoded)
    expected = torch.zeros_like(flat)
    kept = flat.nonzero()[:num_kept]
    expected[kept] = flat[kept]
    return torch.equal(decoded, expected)


def compare_shards(
    codec: Codec, dtype: torch.dtype, number: int, size: int, numel: int, special: bool, device: torch.device = CPU
) -> dict[str, tuple[Tensor, Tensor]]:
    results: list[dict[str, Tensor]] = []
    for feedback in (True, False):
        for use_kernels in (False, True):
            flat, residual = random(numel, dtype), random(numel, seed=1)
            if "topk" in codec.name:
                flat = without_ties(numel, dtype)
                residual = flat.float() * residual.sign() * 2**-14  # the sums have no ties either
            if special:
                flat[numel // 2 :: 300][: len(SPECIAL)] = torch.tensor(SPECIAL)
            if use_kernels:
                flat, residual = flat.to(device), residual.to(device)
            with patch(RUNS_TRITON, lambda _, use_kernels=use_kernels: use_kernels):
                shards = shards_of(codec, size, flat)
            assert use_kernels == (type(shards) is not Shards)
            wires, target, total = (
                shards.wires(number).fill_(99),
                flat.new_full([number * size], 7),
                flat.new_ones(size),
            )
            shards.encode(flat, wires, residual if feedback else None)
            shards.decode(wires, target[:numel])
            shards.sum(wires, total[: (numel - 1) % size + 1 if size else 0], 3)  # as the last shard that has values
            result = {"decoded, and what is behind": target, "sum, and what is behind": total}
            if not special and "topk" not in codec.name:  # whose indices are in no particular order
                result["wires"] = wires[:, : shards.wire_bytes]
            if feedback:
                result["residual"] = residual
                if numel == number * size:  # torch operations need a padded copy otherwise
                    result["encoded"] = flat
            results.append({f"{what}, feedback {feedback}": value for what, value in result.items()})
    expected, actual = {**results[0], **results[2]}, {**results[1], **results[3]}
    return {what: (expected[what], actual[what].cpu()) for what in expected}


def without_ties(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns values whose magnitudes differ, also in 16 bits: which of equal magnitudes are kept is unspecified."""
    generator = torch.Generator().manual_seed(0)
    high, low, sign = torch.randperm(numel, generator=generator) + 0x2000, random(numel), random(numel, seed=1) < 0
    if dtype == torch.float32:
        bits = (high.to(torch.int32) << 16) + low.view(torch.int32) % 2**16
    else:
        bits = high.to(torch.int16)
    return torch.where(sign, -1, 1).to(dtype) * bits.view(dtype)


def same_values(expected: Tensor, actual: Tensor) -> bool:
    """Returns whether values are equal where both are finite, and not finite at the same places."""
    finite = expected.isfinite()
    return torch.equal(finite, actual.isfinite()) and torch.equal(expected[finite], actual[finite])


def exchange_with_kernels() -> dict[str, bool]:
    with nccl_on_the_host(), patch(RUNS_TRITON, lambda _: True):
        return exchange_all_kinds(NcclExchange(dist.new_group(backend="gloo"), CPU), CPU, [1001], WITHOUT_TIES)


@pytest.fixture
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads this when it is imported, so kernels are interpreted in processes that start anew."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.usefixtures("_interpreted")
def test_kernels_make_what_torch_operations_make() -> None:
    """Bit for bit; also with short and with empty last shards, and with values that are not finite."""
    [same] = launch(compare_with_torch, 1, init=False, spawn=True, timeout_s=300)
    assert not [name for name, equal in same.items() if not equal]


@pytest.mark.usefixtures("_interpreted")
def test_the_exchange_with_kernels_makes_what_gloo_makes() -> None:
    for same in launch(exchange_with_kernels, 2, spawn=True, timeout_s=300):
        assert not [name for name, equal in same.items() if not equal]


def launches_of(name: str, dtype: torch.dtype, feedback: bool, size: int) -> list[Any]:
    """Returns the calls that launch a codec's kernels for shards of this size: the object, the kernel, and so on."""
    from lightning_pipesync.core.codecs.kernels.kernel import KernelShards

    flat = torch.zeros(2 * size, dtype=dtype)
    with patch(RUNS_TRITON, lambda _: True), patch.object(KernelShards, "_launch", autospec=True) as launched:
        shards = shards_of(get_codec(name), size, flat)
        wires = shards.wires(2)
        shards.encode(flat, wires, torch.zeros(2 * size) if feedback else None)
        shards.decode(wires, flat)
        shards.sum(wires, flat[:size], 2)
    return launched.call_args_list


def compiled(
    kernel: Any, args: Sequence[Any], constants: dict[str, Any], options: dict[str, Any], capability: int
) -> Any:
    """Compiles a kernel as a launch with these arguments does on a GPU of this compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import mangle_type

    from lightning_pipesync.core.codecs.kernels.kernel import in_memory

    values = dict(zip((param.name for param in kernel.params), args, strict=False))
    values = {name: in_memory(value) if isinstance(value, Tensor) else value for name, value in values.items()}
    # A launch makes a constant of a size that is 1, too.
    constant = [name for name, value in values.items() if value is None or (isinstance(value, int) and value == 1)]
    constants = constants | {name: values[name] for name in constant}
    signature = {name: mangle_type(value) for name, value in values.items()} | dict.fromkeys(constants, "constexpr")
    ordered = {param.name: signature[param.name] for param in kernel.params}
    source = ASTSource(kernel, ordered, constants)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_and_round_as_the_cpu_does(name: str) -> None:
    """To machine code, by the compiler that comes with Triton: no product is contracted, and no subnormal is zero."""
    variants = [(torch.float32, 8192, True, 80), (torch.bfloat16, 1, True, 90), (torch.float16, 5000, False, 90)]
    for dtype, size, feedback, capability in variants:
        for (shards, kernel, _, _, *args), constants in launches_of(name, dtype, feedback, size):
            code = compiled(kernel, args, constants, shards.OPTIONS, capability).asm
            assert code["cubin"]
            assert not re.findall(r"\bfma\.|\.ftz|div\.(?:full|approx)", code["ptx"])


def test_without_a_compiler_torch_operations_encode() -> None:
    with pytest.warns(UserWarning, match="cannot compile on cpu.*a C compiler.*torch operations"):
        assert not compiles_on(CPU)  # a device for which Triton does not compile at all
