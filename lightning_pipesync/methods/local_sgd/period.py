"""The period of local SGD: steps, a share of an epoch, or whenever the gradient decides."""

from __future__ import annotations

import re
from typing import Annotated

#: ``period`` that leaves it to SelSync's trigger.
BY_GRADIENT = "selsync"

_WORDS = f"a whole number of steps of at least 1, a share of an epoch such as '0.25 epoch', or {BY_GRADIENT!r}"
Period = Annotated[int | str, _WORDS]

_EPOCHS = re.compile(r"(\d+|\d*\.\d+) ?epochs?")


def epochs_of(period: int | str) -> float | None:
    """Returns the share of an epoch, or the number of epochs, that a period such as ``"0.25 epoch"`` asks for.

    Returns:
        None if the period is a number of steps, or ``"selsync"``.

    Raises:
        ValueError: it is none of these.
    """
    if period == BY_GRADIENT:
        return None
    if isinstance(period, str):
        match = _EPOCHS.fullmatch(period)
        if match and float(match[1]) > 0:
            return float(match[1])
    elif period >= 1:
        return None
    raise ValueError(f"period must be {_WORDS}, got {period!r}.")


def steps_of(period: int | str, steps_per_epoch: int | None) -> int:
    """Returns the steps of a period that is not ``"selsync"``.

    Args:
        period: as the user has set it.
        steps_per_epoch: the number of steps of an epoch; None if it is not known.

    Raises:
        ValueError: the period is a share of an epoch, whose steps are not known.
    """
    epochs = epochs_of(period)
    if epochs is None:
        return int(period)
    if steps_per_epoch is None:
        raise ValueError(
            f"period={period!r} needs to know how many steps an epoch has: give the training loader to "
            "prepare_train_loader(); if its data set has no length, set a number of steps."
        )
    return max(1, round(epochs * steps_per_epoch))
