"""An Accelerator that consolidates the weights before they are read or saved, and saves and loads checkpoints."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from lightning_pipesync.accelerate.checkpoint import RankStates, load_models, read_rank_states, save_rank_states
from lightning_pipesync.accelerate.elastic import elastic_loaders
from lightning_pipesync.accelerate.optimizer import synchronized_optimizers
from lightning_pipesync.accelerate.plugin import PipeSyncPlugin
from lightning_pipesync.accelerate.private import prepared_models
from lightning_pipesync.accelerate.sharding import shards_by_fsdp2
from lightning_pipesync.accelerate.watched import WatchedAccelerator
from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.core.files import check_undamaged
from lightning_pipesync.core.storage import unshare_storage
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.session import Sessions
from lightning_pipesync.training.sharded_state import whole_state


class SavingAccelerator(WatchedAccelerator):
    """An Accelerator that consolidates the weights before they are saved."""

    pipesync: PipeSyncPlugin | None
    warns_of_own_weights: ClassVar[bool] = True  # where a model is unwrapped that may be saved next
    data_seed: int | None = None  # of the order of the training data, once its loader is prepared
    _sessions: Sessions

    @abstractmethod
    def _attach(self) -> None:
        """Attaches a method to prepared models and optimizers; a collective call."""

    def consolidate(self) -> None:
        """Makes the weights the method's consolidated ones, the same on all ranks, until the training continues.

        A collective call. ``model.eval()``, :meth:`wait_for_everyone` and all calls that save call it themselves.
        """
        self._sessions.consolidate()

    def synchronize(self) -> None:
        """Waits for weights that are on their way after a step, before they are read or written.

        Not a collective call. Forward passes and all calls that save wait by themselves.
        """
        self._sessions.synchronize()

    @contextmanager
    def optimizers_given_back(self) -> Iterator[None]:
        """Context manager in which optimizers of models that FSDP2 has sharded are as Accelerate's functions need them.

        Within it they have the model's parameters and their own steps: these functions look parameters up in the model,
        and take a step with a learning rate of 0 to create the states. A collective call.
        """
        with ExitStack() as stack:
            if shards_by_fsdp2(self):
                for session in self._sessions.sessions:
                    stack.enter_context(session.method.given_back())
                for optimizer in synchronized_optimizers(self):
                    stack.enter_context(optimizer.plain())
            yield

    @override
    def wait_for_everyone(self) -> None:
        """Waits for all ranks, and consolidates the weights, which one rank may save afterwards."""
        super().wait_for_everyone()
        self.consolidate()

    @override
    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Returns the user's model; where ranks train different weights, they are this rank's unless consolidated."""
        if isinstance(model, SyncedModule):
            if model.method is not None:
                model.method.synchronize()
                if model.method.diverged and self.warns_of_own_weights:
                    warnings.warn(
                        "unwrap_model() has returned a model with the weights of this process alone. Before they are "
                        "saved or evaluated, call accelerator.wait_for_everyone() on all processes.",
                        stacklevel=2,
                    )
            model = model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the consolidated weights under the names of the user's model; a collective call."""
        self.consolidate()
        if shards_by_fsdp2(self) and isinstance(model, SyncedModule):
            model = model.module
        state = super().get_state_dict(model, unwrap)
        return unshare_storage(state if shards_by_fsdp2(self) else whole_state(model, state))

    @override
    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Saves Accelerate's checkpoint, and each rank's state to resume bit for bit; a collective call."""
        self.consolidate()
        with self.optimizers_given_back():
            folder = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        self.save_rank_states(folder)
        return folder

    def save_rank_states(self, folder: str | Path) -> None:
        """Writes each rank's state besides the consolidated weights and the optimizers; a collective call.

        With ``checkpoint_replicas=False`` nothing is written.
        """
        wanted = self.pipesync is None or self.pipesync.config.checkpoint_replicas
        states = RankStates(
            [method.state_dict() for method in self._sessions.methods] if wanted else [],
            [loader.state_dict() for loader in elastic_loaders(self)],
            None if self.scaler is None else self.scaler.state_dict(),
            self.data_seed,
        )
        name = "" if self.pipesync is None else self.pipesync.method
        save_rank_states(folder, states, name, self.process_index, self.num_processes, prepared_models(self))

    @override
    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Resumes from a checkpoint of this method, of another one or of plain Accelerate; a collective call.

        Raises:
            ValueError: it is of other models, settings, or another number of processes.
            RuntimeError: each of several processes has a pipeline with all stages.
        """
        self._sessions.check_resumable(self.num_processes)
        folders: list[str] = []

        def before_loading(models: list[nn.Module], folder: str) -> None:
            folders.append(folder)
            for file in sorted(Path(folder).glob("*")):
                check_undamaged(file)
            if not shards_by_fsdp2(self) and any(map(is_sharded, models)):  # of which Accelerate loads whole ones only
                load_models(models, folder)
                models.clear()

        hook = self.register_load_state_pre_hook(before_loading)
        # A method reads weights and optimizer states when it is attached, so they are loaded without one.
        self._sessions.return_optimizer_states()
        self._sessions.detach()
        if load_kwargs is not None:  # which Accelerate 1.3 does not have
            load_model_func_kwargs["load_kwargs"] = load_kwargs
        try:
            with self.optimizers_given_back():
                super().load_state(input_dir, **load_model_func_kwargs)
        finally:
            hook.remove()
            self._attach()
        self.load_rank_states(folders[0])

    def load_rank_states(self, folder: str | Path) -> None:
        """Resumes from the states that :meth:`save_rank_states` has written for this method; a collective call."""
        methods = self._sessions.methods
        if self.pipesync is None or not methods:
            return
        transport, name, config = methods[0].transport, self.pipesync.method, self.pipesync.config
        saved = read_rank_states(folder, len(methods), transport, name, prepared_models(self), config)
        for method, state in zip(methods, saved.methods, strict=False):
            method.load_state_dict(state)
        for loader, place in zip(elastic_loaders(self), saved.places, strict=False):
            loader.load_state_dict(place)
        if self.scaler is not None and saved.scaler is not None:
            self.scaler.load_state_dict(saved.scaler)
        if None not in (saved.data_seed, self.data_seed) and saved.data_seed != self.data_seed and self.is_main_process:
            warnings.warn(
                "The training data have another order than in the run that is resumed: its seed was "
                f"{saved.data_seed}, and is {self.data_seed} now. To go on at the same batch, pass "
                f"DataLoaderConfiguration(data_seed={saved.data_seed}), or call set_seed() before loaders are prepared "
                "in both runs.",
                stacklevel=2,
            )
