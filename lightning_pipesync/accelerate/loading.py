"""An Accelerator that prepares the training loader as a method needs it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_pipesync.accelerate import loaders
from lightning_pipesync.accelerate.elastic import ElasticLoader, divided_anew
from lightning_pipesync.accelerate.epochs import rest_of_epoch
from lightning_pipesync.accelerate.joining import JoiningAccelerator
from lightning_pipesync.accelerate.private import add_prepared_loader, is_prepared, mark_prepared
from lightning_pipesync.data.loaders import num_batches
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.pipeline import PipelineSettings


class LoadingAccelerator(JoiningAccelerator):
    """An Accelerator that knows which loader is the training loader."""

    #: What a training loader that is divided among jobs becomes.
    elastic_loader_type: ClassVar[type[ElasticLoader]] = ElasticLoader

    _loader_checked = _loader_is_for_training = False
    _train_loader: Any = None  # the last one that was prepared
    _accumulated = 1  # batches that the caller of `preparing_train_loader` accumulates by itself

    @override
    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepares a loader of other than training data, or of training data in Accelerate's order.

        In pipelines all ranks load the same batches.
        """
        if self._loader_is_for_training:
            return self.prepare_train_loader(data_loader)
        if self._synchronizes and self._pipelined is not None and not is_prepared(data_loader):
            return loaders.for_pipeline(self, data_loader, loaders.shared_seed(self))
        return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def prepare_train_loader(self, data_loader: DataLoader[Any]) -> Any:
        """Prepares the training loader, in the order of ``partition`` and with data injection if that is set.

        Pipelines side by side divide it; the ranks of each load the same batches.

        Its order depends on the epoch only, so a run can resume within an epoch at the same batch:
        ``loader.set_epoch(epoch)``, then ``accelerator.skip_first_batches(loader, num_batches)``. Jobs that come and go
        divide it anew, see :class:`ElasticLoader`.

        Raises:
            ValueError: the data set has fewer samples than there are ranks, or these have different numbers of batches;
                data injection is set and the loader has no batches; or the replicas are jobs, and a setting of the
                loaders excludes that.
        """
        self._loader_checked, self._loader_is_for_training = True, False
        if is_prepared(data_loader):
            raise ValueError(
                "The loader was prepared before, and would be divided twice: pass the original loader to "
                "prepare_train_loader(), and not to prepare()."
            )
        if self._synchronizes and (plugin := self._pipelined) is not None:
            config = cast("PipelineSettings", plugin.config)
            part = config.data_part(self.process_index, self.num_processes)
            return loaders.for_pipeline(self, data_loader, self._shared_seed(), *part)
        if (plugin := self._synced) is None:
            return self.prepare_data_loader(data_loader)
        if self.is_job:
            counted = divided_anew(self, data_loader, plugin.config, loaders.shared_seed(self), self._end_if_left)
            prepared: Any = self.elastic_loader_type(counted, self.join)
            mark_prepared(prepared)
            add_prepared_loader(self, prepared)
            self._meet_others()
        else:
            seed = self._shared_seed()
            prepared = loaders.for_training(self, data_loader, plugin.config, lambda: self._training_data, seed)
            if not loaders.uses_work_queue(prepared):
                loaders.check_even(prepared)
        self._train_loader = prepared
        return prepared

    @contextmanager
    def preparing_train_loader(self, batches_per_step: int = 1) -> Iterator[None]:
        """Context manager in which the next loader that is prepared is the training loader.

        Args:
            batches_per_step: batches that the caller accumulates by itself, besides ``gradient_accumulation_steps``.
        """
        self._loader_is_for_training, self._accumulated = True, batches_per_step
        try:
            yield
        finally:
            self._loader_is_for_training = False

    @override
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Returns the loader without its first batches, to resume within an epoch."""
        if isinstance(dataloader, (loaders.InjectedLoader, ElasticLoader)):
            return dataloader.skip_first_batches(num_batches)
        if loaders.uses_work_queue(dataloader):  # the queue resumes where it was
            return dataloader
        return rest_of_epoch(dataloader, num_batches)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _shared_seed(self) -> int:
        self.data_seed = loaders.shared_seed(self)
        return self.data_seed

    @property
    def batches_per_step(self) -> int:
        return self._accumulated * self.gradient_accumulation_steps

    def _steps_per_epoch(self) -> int | None:
        number = None if self._train_loader is None else num_batches(self._train_loader)
        return None if number is None else math.ceil(number / self.batches_per_step)

    @property
    def _training_data(self) -> TrainingData:
        """The training data of the only, or of the first, method.

        Raises:
            RuntimeError: no model and optimizer are prepared.
        """
        if not self._sessions.sessions:
            raise RuntimeError(
                "The settings of the training data need a prepared model: call prepare(model, optimizer) before "
                "prepare_train_loader(), with data injection before iterating."
            )
        return self._sessions.sessions[0].method.data
