"""Several versions of a set of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.torch_private import version


class Versions:
    """Versions of tensors, one of which is loaded; each is in one flat buffer per dtype.

    Loading swaps the tensors' data instead of copying: the backward pass of a graph needs the version of its forward
    pass. All versions start with the tensors' current values.

    Args:
        tensors: tensors on one device.
        count: the number of versions.
    """

    def __init__(self, tensors: Sequence[Tensor], count: int) -> None:
        self._tensors = list(tensors)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(self._tensors):
            by_dtype.setdefault(tensor.dtype, []).append(i)
        self._dtypes = list(by_dtype)
        self._flats: list[list[Tensor]] = []
        self._views: list[list[Tensor]] = []
        for _ in range(count):
            views: list[Tensor] = [tensor.data for tensor in self._tensors]
            flats = []
            for members in by_dtype.values():
                bucket = Bucket([views[i] for i in members])
                bucket.pack([views[i] for i in members])
                flats.append(bucket.flat)
                for i, view in zip(members, bucket.views, strict=True):
                    views[i] = view
            self._flats.append(flats)
            self._views.append(views)
        self._forces = [torch.empty_like(flat) for flat in self._flats[0]] if count > 1 else []
        self._loaded = 0
        self.load(0)

    def load(self, index: int) -> None:
        """Loads version ``index`` into the tensors."""
        for tensor, view in zip(self._tensors, self._views[index], strict=True):
            tensor.data = view
        self._loaded = index

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Starts watching some of the tensors for writes."""
        self._watched = [(tensor, version(tensor), tensor.data_ptr()) for tensor in tensors]

    def written(self) -> bool:
        """Returns whether a watched tensor has been written to, or its data replaced, since :meth:`watch`."""
        return any((version(tensor), tensor.data_ptr()) != (mark, place) for tensor, mark, place in self._watched)

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the tensors' current values into the loaded version."""
        for tensor, view in zip(self._tensors, self._views[self._loaded], strict=True):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        self.load(self._loaded)

    def floating(self, index: int) -> list[Tensor]:
        """Returns the floating-point flat buffers of version ``index``, 1-D."""
        return [flat for flat, dtype in zip(self._flats[index], self._dtypes, strict=True) if dtype.is_floating_point]

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Copies version ``source`` to version ``target``."""
        for one, other in zip(self._flats[target], self._flats[source], strict=True):
            one.copy_(other)

    @torch.no_grad()
    def pull(self, index: int, master: int, elastic_force: float) -> None:
        """Pulls version ``index`` and the master together (Eq. 1). The master takes the replica's integers."""
        for replica, center, force in zip(self._flats[index], self._flats[master], self._forces, strict=True):
            if replica.is_floating_point():
                torch.sub(replica, center, out=force).mul_(elastic_force)
                replica.sub_(force)
                center.add_(force)
            else:
                center.copy_(replica)

    def state(self) -> list[list[Tensor]]:
        """Returns copies of the flat buffers, by version and dtype."""
        return [[flat.cpu().clone() for flat in flats] for flats in self._flats]

    @torch.no_grad()
    def load_state(self, state: list[list[Tensor]]) -> None:
        """Loads the result of :meth:`state`."""
        for flats, saved in zip(self._flats, state, strict=True):
            for flat, values in zip(flats, saved, strict=True):
                flat.copy_(values)
