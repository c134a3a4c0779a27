"""What the strategies of Fabric and of the Trainer do alike: settings, the watch of a job, and what a rank loads."""

from __future__ import annotations

import os
import zipfile
from abc import abstractmethod
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_pipesync.core.faults.failure import PeerWatch, waits_for_all
from lightning_pipesync.core.faults.meeting import watch_job
from lightning_pipesync.core.files import check_undamaged
from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.fabric.distribution import TorchCheckpointIO
from lightning_pipesync.methods.settings import Settings
from lightning_pipesync.training.registry import make_config
from lightning_pipesync.training.state import CHECKPOINT_KEY
from lightning_pipesync.training.strategies import check_interactive, settings_in

if TYPE_CHECKING:

    class _Base:
        """What Fabric's and the Trainer's DDPStrategy have in common."""

        checkpoint_io: Any

        def __init__(self, **arguments: Any) -> None: ...

        @property
        def root_device(self) -> torch.device: ...

        @property
        def global_rank(self) -> int: ...

        @property
        def world_size(self) -> int: ...

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]: ...

        def _configure_launcher(self) -> None: ...

        def setup_environment(self) -> None: ...

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]: ...

        def teardown(self) -> None: ...
else:
    _Base = object


@waits_for_all("_watch", "barrier", "broadcast", "all_gather")
class JobMixin(ChecksOverrides, _Base):
    """Base of all strategies; precedes ``DDPStrategy`` in the bases.

    Attributes:
        name: the name under which the strategy is registered.
        config: the method's settings.
    """

    name: str
    config: Settings
    _job_watch: PeerWatch | None = None

    def __init__(self, **arguments: Any) -> None:
        settings = settings_in(arguments)
        self.config = make_config(self.name, settings)
        self._check_settings(settings)
        super().__init__(timeout=timedelta(seconds=self.config.timeout_s), **arguments)

    @abstractmethod
    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raises a ValueError if one of the settings that are given cannot be set under this framework."""

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        check_interactive(self)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._job_watch = watch_job(timedelta(seconds=self.config.timeout_s))

    @property
    def _watch(self) -> PeerWatch | None:
        return self._job_watch

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        check_undamaged(path)
        if type(self.checkpoint_io) is TorchCheckpointIO:  # not a user's own
            self.checkpoint_io = RankCheckpointIO()
        return super().load_checkpoint(path, *args, **kwargs)

    @override
    def teardown(self) -> None:
        if self._job_watch is not None:
            self._job_watch.close()
            self._job_watch = None
        super().teardown()


class RankCheckpointIO(TorchCheckpointIO):
    """Loads of the states of the ranks, each of which may be as large as the model, only this rank's into memory."""

    @override
    def load_checkpoint(
        self,
        path: Any,
        map_location: Callable[[Tensor, str], Tensor] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        if not (os.path.isfile(path) and zipfile.is_zipfile(path)):
            return super().load_checkpoint(path, map_location, weights_only)
        mapped = torch.load(path, map_location, weights_only=weights_only, mmap=True)  # type: ignore[arg-type]
        drop_other_ranks(mapped)
        return deepcopy(mapped)  # the mapping ends: another checkpoint may be written to the file


def drop_other_ranks(checkpoint: Any) -> None:
    """Removes the states of the other ranks from a checkpoint."""
    ranks = checkpoint.get(CHECKPOINT_KEY, {}).get("ranks", {}) if isinstance(checkpoint, Mapping) else {}
    for rank in set(ranks) - {dist.get_rank() if dist.is_initialized() else 0}:
        del ranks[rank]
