"""Times and rates as a person would write them."""

from __future__ import annotations

import math

#: The digits of a round number: 2 Tbit/s rather than 2.18.
_ROUND = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10)


def milliseconds(seconds: float) -> str:
    """Returns a time in ms, such as ``383 ms``, ``24 ms``, ``4.2 ms`` or ``0.35 ms``."""
    return f"{number_of_ms(seconds)} ms"


def number_of_ms(seconds: float) -> str:
    """Returns a time as a number of ms, with two digits or more."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def rate(bytes_per_second: float) -> str:
    """Returns a rate in Mbit/s, Gbit/s or Tbit/s, with three digits at most."""
    bits = 8 * bytes_per_second
    for unit, name in ((1e12, "Tbit/s"), (1e9, "Gbit/s")):
        if bits >= 0.9995 * unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits / 1e6:.3g} Mbit/s"


def round_rate(bytes_per_second: float) -> str:
    """Returns a rate as a round number, as a threshold is told."""
    bits = 8 * bytes_per_second
    power = 10.0 ** math.floor(math.log10(bits))
    nearest = min(_ROUND, key=lambda digits: abs(math.log(digits * power / bits)))
    return rate(nearest * power / 8)
