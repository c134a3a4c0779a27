"""8-bit floating point (e4m3) in kernels, on devices without an instruction for it, too."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_e4m3(values):
    """Returns the bits of fp32 values, of magnitudes that round to 448 at most or are NaN, rounded half to even."""
    bits = values.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    # The exponent's bias changes from 127 to 7; 20 bits of the mantissa are rounded away.
    normal = ((magnitudes + 0x7FFFF + ((magnitudes >> 20) & 1)) >> 20) - 960
    # Below 2**-6 a number is a multiple of 2**-9. Beyond 2**23 fp32 has whole numbers only.
    multiples = (tl.abs(values) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    codes = tl.where(magnitudes < 0x3C800000, multiples, normal)
    codes = tl.where(values == values, codes, 127)
    return codes | ((bits >> 24) & 128)


@triton.jit
def from_e4m3(codes):
    """Returns the fp32 values of these bits, whose other bits do not count."""
    magnitudes = codes.to(tl.int32) & 127
    normal = ((magnitudes + 960) << 20).to(tl.float32, bitcast=True)
    values = tl.where(magnitudes < 8, magnitudes.to(tl.float32) * 0.001953125, normal)
    values = tl.where(magnitudes == 127, float("nan"), values)
    return tl.where((codes.to(tl.int32) & 128) != 0, -values, values)
