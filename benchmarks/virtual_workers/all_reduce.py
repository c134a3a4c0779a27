"""All-reduces among virtual workers, with a codec as the real ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import shard_numel
from lightning_pipesync.core.codecs import Codec
from lightning_pipesync.core.codecs.shards import Shards


class AllReduce:
    """Averages values over the workers of some trainings, with residuals as :class:`ErrorFeedback` has them.

    Args:
        codec: encodes what each worker sends.
        error_feedback: whether its error is added to the next values.
        num_trainings: number of trainings.
        num_workers: workers of each.
        numel: number of values.
    """

    def __init__(self, codec: Codec, error_feedback: bool, num_trainings: int, num_workers: int, numel: int) -> None:
        self._codec, self._shape, self._numel = codec, (num_trainings, num_workers), numel
        whole = codec.gathered
        self._size = numel if whole else shard_numel(numel, num_workers)
        self._width = self._size * (1 if whole else num_workers)  # of a worker's values, with padding
        self._contributions = self._sums = None
        if error_feedback:
            self._contributions = torch.zeros(num_trainings * num_workers * self._width)
            self._sums = None if whole else torch.zeros(num_trainings * self._width)

    def decay(self, factor: float) -> None:
        """Multiplies the residuals, as :meth:`ErrorFeedback.decay`."""
        for residual in (self._contributions, self._sums):
            if residual is not None:
                residual.mul_(factor)

    def mean(self, values: Tensor, hook: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Returns the means that all workers get, ``[trainings, numel]``, of ``[trainings, workers, numel]``.

        ``hook`` returns what the owners of the means send in place of them, of the same shape.
        """
        if self._codec.lossless:
            mean = values.sum(dim=1) / values.shape[1]
            return mean if hook is None else hook(mean)
        padded = values.new_zeros(*self._shape, self._width)
        padded[..., : self._numel] = values
        arrived = self._through_wire(padded.flatten(), self._contributions).view(padded.shape)
        mean = arrived.sum(dim=1) / values.shape[1]
        if self._codec.gathered:
            return mean if hook is None else hook(mean)
        if hook is not None:
            mean[:, : self._numel] = hook(mean[:, : self._numel])
        return self._through_wire(mean.flatten(), self._sums).view(mean.shape)[:, : self._numel]

    def _through_wire(self, flat: Tensor, residual: Tensor | None) -> Tensor:
        for each in (flat, residual):
            if each is not None:  # the padding would decide about scales, and what top-k keeps
                each.view(-1, self._width)[:, self._numel :] = 0
        shards = Shards(self._codec, self._size, flat)
        wires = shards.wires(flat.numel() // self._size)
        shards.encode(flat, wires, residual)
        shards.decode(wires, flat)
        return flat
