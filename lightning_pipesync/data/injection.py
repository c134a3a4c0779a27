"""Randomized data injection: in each step a few random ranks share some rows of their batch with all others."""

from __future__ import annotations

import math
import random
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_pipesync.core.torch_private import tree_flatten, tree_unflatten


class Transfer(Protocol):
    """A send or receive in flight."""

    def wait(self) -> object:
        """Blocks until the tensor may be reused (send) or holds the message (receive); raises if that fails."""


class PointToPoint(Protocol):
    """The part of a transport that data injection needs.

    Tensors are contiguous CPU tensors. Messages between a pair of ranks arrive in the order in which they were sent.
    A rank posts the receives of a round before its sends, and waits for all of them before the next round.
    """

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def send(self, tensor: Tensor, dst: int) -> Transfer:
        """Starts sending ``tensor`` to rank ``dst``."""

    def recv(self, tensor: Tensor, src: int) -> Transfer:
        """Starts receiving a message from rank ``src`` into ``tensor``, which has its size."""


class DataInjection:
    """Appends rows from a few randomly chosen ranks to each rank's batch (SelSync III-E).

    With ``injection=(alpha, beta)`` the Trainer and ``prepare_train_loader`` make one. Use it directly in a loop whose
    batches do not come from a DataLoader, with any method of this package or without one::

        inject = DataInjection(0.5, 0.5, sync.transport)
        for batch in batches(adjusted_batch_size(32, 0.5, 0.5, world_size)):
            x, y = inject(batch)

    A batch is any nesting of lists, tuples and dicts of tensors of shape ``(rows, ...)``, of any type, on any device;
    the result is the same nesting of new tensors of shape ``(rows + received, ...)``, on the same devices. Rows are
    sent through the host as bytes, without a gradient. ``received`` is the number of rows from the other sharing ranks.

    In each call ceil(alpha*N) of the N ranks are drawn at random, the same on all ranks, and each of them sends the
    first round(beta*rows) rows of its batch, but at least one, to all other ranks. Shuffle the data, so that the first
    rows are a random choice. Numbers of rows may differ between ranks and steps; apart from that, the batches of all
    ranks must have the same leaves.

    A call is collective: every rank must make the same number of calls. If a rank raises, the others raise after the
    transport's timeout.

    Args:
        alpha: Fraction of the ranks that share in a step, from 0 to 1.
        beta: Fraction of its rows that a sharing rank sends, from 0 to 1. No traffic if ``alpha`` or ``beta`` is 0.
        transport: Point-to-point messages between the ranks.
        seed: Seed of the draw; must be equal on all ranks.

    Raises:
        ValueError: If ``alpha`` or ``beta`` is not a number from 0 to 1. A call raises more, see :meth:`__call__`.
    """

    def __init__(self, alpha: float, beta: float, transport: PointToPoint, seed: int = 0) -> None:
        _check_fraction("alpha", alpha)
        _check_fraction("beta", beta)
        self.alpha = alpha
        self.beta = beta
        self.seed = seed
        self._transport = transport
        self._step = 0

    def __call__(self, batch: Any) -> Any:
        """Returns the batch with the rows received in this step appended, in the order of the ranks they come from.

        Args:
            batch: Nested lists, tuples and dicts of tensors whose first dimension, the rows, is the same.

        Raises:
            TypeError: If a leaf is not a tensor.
            ValueError: If a leaf is 0-dim, the leaves differ in their number of rows, or a sharing rank's batch has
                another structure.
        """
        step = self._step
        self._step += 1
        if self.alpha == 0 or self.beta == 0:
            return batch
        leaves, spec = tree_flatten(batch)
        num_rows = _num_rows(leaves)
        layout = f"{' '.join(str(spec).split())} of " + ", ".join(_row_layout(leaf) for leaf in leaves)
        sharing = self.sharing_ranks(step)
        num_shared = max(1, round(self.beta * num_rows)) if self._transport.rank in sharing else 0
        received = self._exchange(sharing, [leaf[:num_shared] for leaf in leaves], layout)
        injected = [torch.cat([leaf, *rows]) for leaf, *rows in zip(leaves, *received, strict=True)]
        return tree_unflatten(injected, spec)

    def sharing_ranks(self, step: int) -> list[int]:
        """Returns the ranks that share their rows in a step, ascending; the same on every rank."""
        # Rounding first, because 0.07 * 100 is a little more than 7.
        num_sharing = math.ceil(round(self.alpha * self._transport.world_size, 9))
        # Not a torch.Generator: on the CPU it takes only 32 bits of its seed, too few for seed and step.
        draw = random.Random(f"{self.seed} {step}")
        return sorted(draw.sample(range(self._transport.world_size), num_sharing))

    def state_dict(self) -> dict[str, int]:
        """Returns the number of calls so far."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Resumes from a ``state_dict``."""
        self._step = state["step"]

    def _exchange(self, sharing: list[int], shared: list[Tensor], layout: str) -> list[list[Tensor]]:
        """Sends the shared rows if this rank shares, and receives those of the other sharing ranks.

        Two rounds: a header of three int64 numbers (rows, bytes in the payload, bytes of those that are the layout),
        then the payload, which is the layout in UTF-8 followed by each leaf's rows. Returns the rows of each leaf, for
        each other sharing rank in order.
        """
        rank = self._transport.rank
        sources = [source for source in sharing if source != rank]
        targets = [target for target in range(self._transport.world_size) if target != rank and rank in sharing]
        layout_bytes = torch.frombuffer(bytearray(layout, "utf-8"), dtype=torch.uint8)
        payload = torch.cat([layout_bytes, *(_to_bytes(rows) for rows in shared)])
        header = torch.tensor([len(shared[0]), len(payload), len(layout_bytes)])

        headers = [torch.empty_like(header) for _ in sources]
        self._round(sources, headers, targets, header)
        sizes = [theirs.tolist() for theirs in headers]
        payloads = [torch.empty(num_bytes, dtype=torch.uint8) for _, num_bytes, _ in sizes]
        self._round(sources, payloads, targets, payload)

        # After all messages are delivered, so that a mismatch leaves no sender waiting.
        received = []
        for source, (num_rows, _, num_layout_bytes), theirs in zip(sources, sizes, payloads, strict=True):
            their_layout, rows = theirs[:num_layout_bytes], theirs[num_layout_bytes:]
            if not torch.equal(their_layout, layout_bytes):
                raise ValueError(
                    f"data injection needs batches made up alike on all ranks, but rank {source} has "
                    f"{bytes(their_layout.tolist()).decode()} and rank {rank} has {layout}. Pad rows to a fixed shape, "
                    "and collate the batches of all ranks in the same way."
                )
            parts = rows.split([num_rows * leaf.element_size() * math.prod(leaf.shape[1:]) for leaf in shared])
            received.append([_from_bytes(part, num_rows, leaf) for part, leaf in zip(parts, shared, strict=True)])
        return received

    def _round(self, sources: list[int], buffers: list[Tensor], targets: list[int], message: Tensor) -> None:
        handles = [self._transport.recv(buffer, source) for source, buffer in zip(sources, buffers, strict=True)]
        handles += [self._transport.send(message, target) for target in targets]
        for handle in handles:
            handle.wait()


def adjusted_batch_size(batch_size: int, alpha: float, beta: float, world_size: int) -> int:
    """Returns the batch size b' to load so that a batch after injection has about ``batch_size`` rows (SelSync Eq. 3).

    Args:
        batch_size: The number of rows b that a rank trains on in a step.
        alpha: Fraction of the ranks that share in a step, from 0 to 1.
        beta: Fraction of its rows that a sharing rank sends, from 0 to 1.
        world_size: Number of ranks N.

    Returns:
        b / (1 + alpha*beta*N), rounded to the nearest integer, at least 1.

    Raises:
        ValueError: If ``alpha`` or ``beta`` is not from 0 to 1, or ``batch_size`` or ``world_size`` is below 1.
    """
    _check_fraction("alpha", alpha)
    _check_fraction("beta", beta)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be at least 1.")
    return max(1, round(batch_size / (1 + alpha * beta * world_size)))


def _check_fraction(name: str, value: float) -> None:
    # Also refuses NaN, which compares false.
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must be a number from 0 to 1.")


def _num_rows(leaves: list[Any]) -> int:
    """Returns the number of rows of a batch, after checking its leaves."""
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"data injection takes nested lists, tuples and dicts of tensors, but leaf {position} of the batch is "
                f"of type {type(leaf).__name__}."
            )
        if leaf.dim() == 0:
            raise ValueError(
                f"data injection needs rows as the first dimension, but leaf {position} of the batch is a 0-dim "
                f"{type(leaf).__name__} of {leaf.dtype}."
            )
    rows = [len(leaf) for leaf in leaves]
    if len(set(rows)) != 1:
        raise ValueError(f"the leaves of a batch must have the same number of rows, but have {rows}.")
    return rows[0]


def _row_layout(leaf: Tensor) -> str:
    """Describes a row of a leaf, as ``float32[3, 32, 32]``."""
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape[1:])}"


def _to_bytes(rows: Tensor) -> Tensor:
    """Returns the bytes of rows, of shape ``(num_bytes,)``, on the CPU."""
    # Not contiguous(), which keeps the stride of a single row, and view refuses it.
    return rows.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _from_bytes(part: Tensor, num_rows: int, leaf: Tensor) -> Tensor:
    """Returns bytes as rows of the leaf's shape and type, on its device."""
    # A copy, because a part of a payload may not be aligned to the dtype.
    return part.clone().view(leaf.dtype).view(num_rows, *leaf.shape[1:]).to(leaf.device)
