"""Several versions of the same tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_pipesync.core.buckets import Bucket
from lightning_pipesync.core.torch_private import version


class Versions:
    """Versions of some tensors, of which these hold one at a time; each in one flat buffer for every dtype.

    The tensors' data are exchanged, not copied: a graph that was made with one version needs that version again for
    its backward pass. Version 0 begins with what the tensors hold, and so do all others.

    Args:
        tensors: on one device.
        count: how many versions.
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
                bucket = Bucket([views[i] for i in members], strided=True)
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
        """Has the tensors be version ``index``."""
        for tensor, view in zip(self._tensors, self._views[index], strict=True):
            tensor.data = view
        self._loaded = index

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Begins to watch whether somebody writes to some of the tensors."""
        self._watched = [(tensor, version(tensor), tensor.data_ptr()) for tensor in tensors]

    def written(self) -> bool:
        """Returns whether somebody has written to what is watched, or replaced its data, since :meth:`watch`."""
        return any((version(tensor), tensor.data_ptr()) != (mark, place) for tensor, mark, place in self._watched)

    @torch.no_grad()
    def keep(self) -> None:
        """Takes over what somebody has written to the tensors."""
        for tensor, view in zip(self._tensors, self._views[self._loaded], strict=True):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        self.load(self._loaded)

    def floating(self, index: int) -> list[Tensor]:
        """Returns the flat buffers of version ``index`` that hold floating-point numbers, 1-D."""
        return [flat for flat, dtype in zip(self._flats[index], self._dtypes, strict=True) if dtype.is_floating_point]

    @torch.no_grad()
    def copy(self, source: int, target: int) -> None:
        """Makes version ``target`` what version ``source`` is."""
        for one, other in zip(self._flats[target], self._flats[source], strict=True):
            one.copy_(other)

    @torch.no_grad()
    def pull(self, index: int, master: int, elastic_force: float) -> None:
        """Pulls version ``index`` and the master to each other (Eq. 1). Whole numbers become those of the replica."""
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
        """Takes over what :meth:`state` returned."""
        for flats, saved in zip(self._flats, state, strict=True):
            for flat, values in zip(flats, saved, strict=True):
                flat.copy_(values)
