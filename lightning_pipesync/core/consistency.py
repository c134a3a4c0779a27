"""Checks, before training, that all ranks train the same model with the same settings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import dense_strides
from lightning_pipesync.core.comm.objects import Objects
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.dtensors import LocalShard
from lightning_pipesync.core.fingerprints import digest
from lightning_pipesync.core.guarded_states import at_hand
from lightning_pipesync.core.parameters import NamedParameter, check_values, collect_parameters
from lightning_pipesync.core.sharding import copies_of, place_of

T = TypeVar("T")

#: Of the differences between two ranks, how many a message names.
NAMED_DIFFERENCES = 5


def raise_on_all_ranks(transport: Transport | Objects, problem: ValueError | None) -> None:
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


def on_all_ranks(transport: Transport | Objects | None, function: Callable[[], T]) -> T:
    """Returns the result of ``function``; a ``ValueError`` of one rank is raised on all of them; a collective call.

    Without a transport there are no other ranks.
    """
    if transport is None:
        return function()
    try:
        result = function()
    except ValueError as error:
        raise_on_all_ranks(transport, error)
        raise
    raise_on_all_ranks(transport, None)
    return result


def collect_consistent_parameters(
    transport: Transport, settings: Any, module: nn.Module, optimizers: Sequence[Optimizer]
) -> list[NamedParameter]:
    """Returns :func:`collect_parameters`, after checking that it is the same on all ranks; a collective call.

    So must be the settings, the model's tensors, and the classes and hyper-parameters of the optimizers.

    Raises:
        ValueError: on every rank: a parameter cannot be trained, there is none, or the ranks differ.
    """

    def collect() -> list[NamedParameter]:
        parameters = collect_parameters(module, optimizers, transport.ranks_of_replica)
        check_values(module)
        if not any(parameter.group for parameter in parameters):
            raise ValueError("There is nothing to train: no optimizer has a parameter.")
        return parameters

    parameters = on_all_ranks(transport, collect)
    if transport.shards is not None:  # the ranks of a replica differ in their shards only
        check_same(transport.job, _described_settings(settings))
    check_same(transport, describe(settings, parameters, module))
    check_optimizers(transport.job, optimizers)
    return parameters


def _described_settings(settings: Any) -> list[tuple[str, str]]:
    return [("settings", type(settings).__name__), *((name, repr(value)) for name, value in vars(settings).items())]


def describe(settings: Any, parameters: Sequence[NamedParameter], module: nn.Module) -> list[tuple[str, str]]:
    """Returns the settings, a dataclass, and the model's tensors as pairs of a name and a description."""
    described = _described_settings(settings)
    for parameter in parameters:
        tensor = parameter.tensor
        text = f"{_layout(tensor)} requires_grad={tensor.requires_grad} group={parameter.group}"
        described.append((f"parameter {parameter.name}", text))
    for name, buffer in module.named_buffers():
        described.append((f"buffer {name}", _layout(buffer)))
    return described


def _layout(tensor: Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" strides={dense_strides(tensor)}"
    part = ""
    if isinstance(tensor, LocalShard):
        whole: Any = tensor.sharded
        part = f" of {tuple(whole.shape)} {whole.placements} at {whole.device_mesh.get_coordinate()}"
    return f"{tuple(tensor.shape)}{part} {tensor.dtype}{strides}"


def check_optimizers(transport: Transport | Objects, optimizers: Sequence[Optimizer]) -> None:
    """Compares the classes and hyper-parameters of the optimizers over the ranks, as :func:`check_same`."""
    classes, hyperparameters = describe_optimizers(optimizers)
    check_same(transport, classes)
    check_same(transport, hyperparameters)


def describe_optimizers(optimizers: Sequence[Optimizer]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the classes of the optimizers, and their hyper-parameters, as pairs of a name and a description."""
    classes, hyperparameters = [], []
    for index, optimizer in enumerate(optimizers):
        cls, of_several = type(optimizer), f" {index}" if len(optimizers) > 1 else ""
        classes.append((f"the class of the optimizer{of_several}", f"{cls.__module__}.{cls.__qualname__}"))
        for number, group in enumerate(optimizer.param_groups):
            for field in sorted(group.keys() - {"params", "param_names"}):  # whose names are the parameters'
                what = f"{field} of group {number} of {_name(optimizers, index)}"
                hyperparameters.append((what, _described(group[field])))
    return classes, hyperparameters


def check_same_values(
    transport: Transport, parameters: Sequence[tuple[str, Tensor]], optimizers: Sequence[Optimizer], weights: bool
) -> None:
    """Compares the states of the optimizers, and with ``weights`` the weights, as :func:`check_same`."""
    described = [(name, f"digest {digest(tensor)}") for name, tensor in parameters if weights]
    for index, optimizer in enumerate(optimizers):
        updated = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        with at_hand(optimizer) as states:
            for name, tensor in parameters:
                if id(tensor) in updated:
                    state = states.get(tensor)
                    text = f"digest {digest(state)}" if state else "none"
                    described.append((f"{_name(optimizers, index)}'s state of {name}", text))
    check_same(transport, described, "Load the same on all ranks.")


def check_copies(transport: Transport, parameters: Sequence[tuple[str, Tensor]]) -> None:
    """Compares the copies of parameters within each replica; a collective call.

    Raises:
        ValueError: on every rank: ranks of a replica have different values in what they hold in common.
    """
    if transport.shards is None:
        return
    copies = [(name, tensor) for name, tensor in parameters if copies_of(tensor) > 1]
    described = {(transport.rank, name, place_of(tensor)): digest(tensor) for name, tensor in copies}
    first: dict[Hashable, tuple[int, str]] = {}
    for rank, of_rank in enumerate(transport.job.gather_objects(described)):
        for which, value in of_rank.items():
            holder, known = first.setdefault(which, (rank, value))
            if known != value:
                raise ValueError(
                    f"Parameter {which[1]} differs between the ranks {holder} and {rank} of a replica, which hold "
                    "copies of it: initialize it with the same seed, and load the same, on all ranks of a replica."
                )


def check_same(transport: Transport | Objects, described: Sequence[tuple[str, str]], remedy: str = "") -> None:
    """Compares pairs of a name and a description, and their order, over the ranks; a collective call.

    Large models have many parameters, and jobs many ranks: only two ranks that differ send more than a digest.

    Raises:
        ValueError: on every rank: they differ; the message names what differs, its value on two ranks, and ``remedy``.
    """
    digests = transport.gather_objects(digest(described))
    differs = next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
    if differs is not None:
        first, other = (transport.broadcast_object(described, rank) for rank in (0, differs))
        raise_if_different(first, other, transport.ranks[differs], remedy, transport.ranks[0])


def raise_if_different(
    first: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]], rank: int, remedy: str = "", first_rank: int = 0
) -> None:
    """Compares the pairs of rank 0, or ``first_rank``, with those of another rank; raises as :func:`check_same`."""
    if other == first:
        return
    ours, theirs = dict(first), dict(other)
    differences = [
        f"{what}: rank {first_rank} has {ours.get(what, 'none')}, rank {rank} has {theirs.get(what, 'none')}"
        for what in dict.fromkeys([*ours, *theirs])
        if ours.get(what) != theirs.get(what)
    ]
    if not differences:
        raise ValueError(f"Rank {rank} registers the parameters in another order than rank {first_rank}.")
    named, more = differences[:NAMED_DIFFERENCES], len(differences) - NAMED_DIFFERENCES
    if more > 0:
        named.append(f"and {more} more")
    raise ValueError(f"The ranks differ in {'; '.join(named)}. {remedy}".rstrip())


def _name(optimizers: Sequence[Optimizer], index: int) -> str:
    name = type(optimizers[index]).__name__
    return f"{name} (optimizer {index})" if len(optimizers) > 1 else name


def _described(value: Any) -> str:
    """Returns the text of a hyper-parameter, the same on all ranks that have the same; an object's is its class."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.tolist()}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_described, value))})"
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return repr(value)
    return f"a {type(value).__qualname__}"  # whose text may be an address in memory
