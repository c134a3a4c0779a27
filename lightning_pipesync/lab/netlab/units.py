"""Parsers of rates, durations, shares, and of what befalls packets on their way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0}
#: The range of the kernel's token bucket, in bits per second: below it, the time of one burst overflows 32 bits; above
#: it, the bytes per second do.
SLOWEST, FASTEST = 100 * 10**3, 32 * 10**9


def bits_per_second(text: str) -> int:
    """Returns the bits per second of a rate such as ``"200mbit"`` or ``"2.5gbit"``; units are decimal."""
    return round(_parse(text, _BITS, "rate", "kbit, mbit or gbit (per second), as in 200mbit"))


def parse_rate(text: str) -> int:
    """Returns :func:`bits_per_second` of a rate that the kernel can emulate."""
    rate = bits_per_second(text)
    if not SLOWEST <= rate <= FASTEST:
        raise ValueError(f"The rate {text!r} is out of range: 100kbit to 32gbit can be emulated.")
    return rate


def parse_seconds(text: str) -> float:
    """Returns the seconds of a duration such as ``"10s"``, ``"500ms"``, ``"2min"`` or ``"10"``."""
    return _parse(text, _SECONDS, "duration", "ms, s or min, as in 10s")


def parse_share(text: str) -> float:
    """Returns the fraction of a share such as ``"50%"``: more than 0 and less than 1."""
    number, unit = _split(text)
    if unit != "%" or not 0 < number < 100:
        raise ValueError(f"{text!r} is not a share: write more than 0% and less than 100%, as in 50%.")
    return number / 100


class Way(NamedTuple):
    """What befalls packets on their way between two places, in one direction."""

    delay_s: float = 0.0
    jitter_s: float = 0.0  #: by how much a packet's delay is more or less, at most
    loss: float = 0.0  #: share of packets


def parse_way(delay: str | None, jitter: str | None, loss: str | None, prefix: str = "") -> Way:
    """Returns delay, jitter and loss, each 0 if it is None; ``prefix`` is that of the options' names.

    Raises:
        ValueError: one of them is malformed, or the jitter is more than the delay; the message has the option's name.
    """
    delay_s, jitter_s = parse_delay(f"{prefix}delay", delay), parse_delay(f"{prefix}jitter", jitter)
    if jitter_s > delay_s:
        raise ValueError(
            f"{prefix}jitter={jitter!r} is more than {prefix}delay={delay!r}: packets would arrive before they are "
            "sent. Give a smaller jitter, or a longer delay."
        )
    if loss is None:
        return Way(delay_s, jitter_s)
    try:
        return Way(delay_s, jitter_s, parse_share(loss))
    except ValueError as error:
        raise ValueError(f"{prefix}loss: {error}") from error


def parse_delay(name: str, text: str | None) -> float:
    """Returns the seconds of a delay such as ``"40ms"``, whose unit must be given; ValueError with the option's name.

    None is no delay.
    """
    return 0.0 if text is None else _parse(text, _DELAYS, "delay", "us, ms or s, as in 40ms", f"{name}: ")


def _parse(text: str, units: Mapping[str, float], what: str, expected: str, prefix: str = "") -> float:
    number, unit = _split(text)
    if unit not in units:
        raise ValueError(f"{prefix}{text!r} is not a {what}: write a number and {expected}.")
    return number * units[unit]


def _split(text: str) -> tuple[float, str]:
    """Returns the number and the unit in lower case; an unknown unit if there is no number."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([a-z%]*)", text.strip().lower())
    return (float(match[1]), match[2]) if match else (0.0, "no number")
