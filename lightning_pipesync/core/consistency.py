"""Checks, before training, that all ranks train the same model with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_pipesync.core.parameters import NamedParameter, collect_parameters
from lightning_pipesync.core.transport import Transport

#: Of the differences between two ranks, how many a message names.
NAMED_DIFFERENCES = 5


def raise_on_all_ranks(transport: Transport, problem: ValueError | None) -> None:
    """Raises if any rank has a ``problem``, on all ranks; a collective call.

    Raises:
        ValueError: ``problem`` itself on its rank; on other ranks, an error with its message.
    """
    problems = transport.gather_objects(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text is not None:
            raise ValueError(f"Rank {rank} cannot train: {text}")


def collect_consistent_parameters(
    transport: Transport, settings: Any, module: nn.Module, optimizers: Sequence[Optimizer]
) -> list[NamedParameter]:
    """Returns :func:`collect_parameters`, after checking that it is the same on all ranks; a collective call.

    Raises:
        ValueError: on every rank: a parameter cannot be trained, there is none, or the ranks differ.
    """
    parameters: list[NamedParameter] = []
    problem: ValueError | None = None
    try:
        parameters = collect_parameters(module, optimizers)
        if not any(parameter.group for parameter in parameters):
            problem = ValueError("There is nothing to train: no optimizer has a parameter.")
    except ValueError as error:
        problem = error
    raise_on_all_ranks(transport, problem)
    check_consistency(transport, settings, parameters, module)
    return parameters


def check_consistency(
    transport: Transport, settings: Any, parameters: Sequence[NamedParameter], module: nn.Module
) -> None:
    """Compares the settings and the model's tensors over the ranks; a collective call.

    Raises:
        ValueError: on every rank; the message names what differs, and its value on two ranks.
    """
    check_same(transport, describe(settings, parameters, module))


def describe(settings: Any, parameters: Sequence[NamedParameter], module: nn.Module) -> list[tuple[str, str]]:
    """Returns the settings, a dataclass, and the model's tensors as pairs of a name and a description."""
    described = [("settings", type(settings).__name__)]
    described += [(name, repr(value)) for name, value in vars(settings).items()]
    for parameter in parameters:
        tensor = parameter.tensor
        text = f"{tuple(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad} group={parameter.group}"
        described.append((f"parameter {parameter.name}", text))
    for name, buffer in module.named_buffers():
        described.append((f"buffer {name}", f"{tuple(buffer.shape)} {buffer.dtype}"))
    return described


def check_same(transport: Transport, described: Sequence[tuple[str, str]]) -> None:
    """Compares pairs of a name and a description, and their order, over the ranks; a collective call.

    Raises:
        ValueError: as :func:`check_consistency`.
    """
    everyone = transport.gather_objects(described)
    for rank, other in enumerate(everyone):
        raise_if_different(everyone[0], other, rank)


def raise_if_different(first: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]], rank: int) -> None:
    """Compares the pairs of rank 0 with those of another rank.

    Raises:
        ValueError: they differ; the message names what differs, and both values.
    """
    if other == first:
        return
    ours, theirs = dict(first), dict(other)
    differences = [
        f"{what}: rank 0 has {ours.get(what, 'none')}, rank {rank} has {theirs.get(what, 'none')}"
        for what in dict.fromkeys([*ours, *theirs])
        if ours.get(what) != theirs.get(what)
    ]
    if not differences:
        raise ValueError(f"Rank {rank} registers the parameters in another order than rank 0.")
    named, more = differences[:NAMED_DIFFERENCES], len(differences) - NAMED_DIFFERENCES
    if more > 0:
        named.append(f"and {more} more")
    raise ValueError(f"The ranks differ in {'; '.join(named)}.")
