"""Models whose weights are the rows of a matrix: a pass of many workers is one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector
from torch.utils.data import Subset, TensorDataset

from benchmarks.tasks import Task

#: Rows that are computed at once: more do not fit into a processor's cache.
ROWS = 64


class StackedModel:
    """The model of a task, computed for many rows of weights and buffers at once.

    A row has all parameters one after the other, ``[size]``; buffers are the floating-point ones, ``[buffer_size]``.
    """

    def __init__(self, task: Task) -> None:
        self._task, self._module = task, task.build_module()
        self._shapes = [(name, p.shape, p.numel()) for name, p in self._module.named_parameters()]
        self._of_buffers = [(n, b.shape, b.numel()) for n, b in self._module.named_buffers() if b.is_floating_point()]
        self.size = sum(numel for *_, numel in self._shapes)
        self.buffer_size = sum(numel for *_, numel in self._of_buffers)

    def initial(self, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the weights ``[size]`` and buffers ``[buffer_size]`` with which a training of this seed begins."""
        torch.manual_seed(seed)
        module = self._task.build_module()
        buffers = [b.flatten() for b in module.buffers() if b.is_floating_point()]
        return parameters_to_vector(module.parameters()).detach(), torch.cat([torch.empty(0), *buffers])

    def layers(self, number: int, divide: Callable[[list[int], int], list[list[int]]]) -> list[slice]:
        """Returns the columns of ``number`` fragments; ``divide`` divides layers of so many bytes, in order."""
        names = [name.rpartition(".")[0] for name, *_ in self._shapes]
        first = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
        ends = [sum(numel for *_, numel in self._shapes[:end]) for end in [*first, len(names)]]
        sizes = [4 * (end - begin) for begin, end in pairwise(ends)]
        return [slice(ends[part[0]], ends[part[-1] + 1]) for part in divide(sizes, number)]

    def gradients(self, weights: Tensor, buffers: Tensor, batch: Sequence[Tensor]) -> Tensor:
        """Returns the gradients of the loss ``[rows, size]``; the buffers change in place.

        Args:
            weights: ``[rows, size]``.
            buffers: ``[rows, buffer_size]``.
            batch: tensors ``[rows, samples, ...]``.
        """
        self._module.train()
        compute = vmap(grad(self._loss, has_aux=True), randomness="different")
        found = []
        for rows in _blocks(len(weights)):
            with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for many rows
                of_rows, after = compute(weights[rows], buffers[rows], tuple(tensor[rows] for tensor in batch))
            buffers[rows] = after
            found.append(of_rows)
        return torch.cat(found)

    @torch.no_grad()
    def scores(self, weights: Tensor, buffers: Tensor, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        """Returns the sums of the scores of each row, ``[rows]``, on one batch ``[samples, ...]``; and their number."""
        self._module.eval()
        numbers: list[int] = []

        def score(row: Tensor, of_buffers: Tensor) -> Tensor:
            total, number = self._task.score(self._module_with(row, of_buffers)[0], tuple(batch))
            numbers.append(number)
            return total

        with sdpa_kernel(SDPBackend.MATH):
            return vmap(score)(weights, buffers), numbers[0]

    def _loss(self, row: Tensor, buffers: Tensor, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        module, own = self._module_with(row, buffers)
        loss = self._task.loss(module, batch)
        return loss, torch.cat([buffers[:0], *(b.flatten() for b in own.values() if b.is_floating_point())])

    def _module_with(self, row: Tensor, buffers: Tensor) -> tuple[Any, dict[str, Tensor]]:
        """Returns a function like the module with these weights, and its buffers, which it changes."""
        values_of = {**dict(self._module.named_buffers()), **_views(buffers, self._of_buffers)}
        own = {name: value.clone() for name, value in values_of.items()}
        values = {**_views(row, self._shapes), **own}

        def module(*arguments: Any) -> Any:
            return functional_call(self._module, values, arguments)

        return module, own


def _views(row: Tensor, shapes: Sequence[tuple[str, torch.Size, int]]) -> dict[str, Tensor]:
    parts = row.split([numel for *_, numel in shapes]) if shapes else ()
    return {name: part.view(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}


def _blocks(number: int) -> list[slice]:
    return [slice(begin, begin + ROWS) for begin in range(0, number, ROWS)]


def tensors_of(data: Any) -> tuple[Tensor, ...]:
    """Returns all samples of a data set of tensors, or of a part of one, as tensors ``[samples, ...]``."""
    if isinstance(data, Subset):
        return tuple(tensor[torch.as_tensor(data.indices)] for tensor in tensors_of(data.dataset))
    if not isinstance(data, TensorDataset):
        raise ValueError(f"Virtual workers train on a TensorDataset, not on a {type(data).__name__}.")
    return data.tensors
