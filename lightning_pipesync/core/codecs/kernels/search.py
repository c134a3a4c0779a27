"""The search for the largest magnitudes, digit by digit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitudes_of(values):
    """Returns magnitudes as whole numbers in the same order; a NaN's is the largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def count_digits(magnitudes, searched, smallest, STEP: tl.constexpr):
    """Counts the next 8 bits of magnitudes, from the highest, of those whose bits before are those of ``smallest``."""
    if STEP > 0:
        searched = searched & ((magnitudes >> (32 - 8 * STEP)) == (smallest >> (32 - 8 * STEP)))
    return tl.histogram((magnitudes >> (24 - 8 * STEP)) & 255, 256, mask=searched)


@triton.jit
def add_digit(smallest, missing, counts, STEP: tl.constexpr):
    """Adds a digit to the smallest magnitude that is kept; of those that begin as it does, ``missing`` are kept."""
    digits = tl.arange(0, 256)
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    digit = tl.max(tl.where(at_least >= missing, digits, 0), axis=0)
    missing -= tl.sum(tl.where(digits > digit, counts, 0), axis=0)
    return smallest | (digit << (24 - 8 * STEP)), missing


@triton.jit
def ranks_of_kept(magnitudes, searched, smallest, missing):
    """Returns which are kept, of equal ones the first; how many up to each place; and which are equal to `smallest`."""
    is_equal = searched & (magnitudes == smallest)
    kept = is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= missing)
    kept = kept | (searched & (magnitudes > smallest))
    return kept, tl.cumsum(kept.to(tl.int32), axis=0), is_equal
