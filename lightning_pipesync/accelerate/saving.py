"""What reads, saves and loads the weights that a method trains."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn
from typing_extensions import override

from lightning_pipesync.accelerate import checkpoint
from lightning_pipesync.accelerate.plugin import PipeSyncPlugin
from lightning_pipesync.accelerate.private import prepared_models
from lightning_pipesync.core.private_names import Overriding
from lightning_pipesync.core.storage import unshare_storage
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.session import Sessions


class SavingAccelerator(Overriding, Accelerator):
    """An Accelerator of which others see consolidated weights only.

    Attributes:
        pipesync: the method and its settings; None if there are none.
    """

    pipesync: PipeSyncPlugin | None
    _sessions: Sessions

    @abstractmethod
    def _attach(self) -> None:
        """Has a method look after what has been prepared; a collective call."""

    def consolidate(self) -> None:
        """Makes the weights the method's consolidated ones, the same on all ranks, until training goes on.

        A collective call. ``model.eval()``, :meth:`wait_for_everyone`, and what saves something make it themselves.
        """
        self._sessions.consolidate()

    @override
    def wait_for_everyone(self) -> None:
        """Waits for all ranks, and consolidates the weights: what follows may well be saved by one of them."""
        super().wait_for_everyone()
        self.consolidate()

    @override
    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Returns the user's own model; with SelSync its weights are this rank's own unless they are consolidated."""
        if isinstance(model, SyncedModule):
            if model.method is not None:
                model.method.synchronize()
                if model.method.diverged:
                    warnings.warn(
                        "unwrap_model() has returned a model whose weights are this process's own. If they are to be "
                        "saved or evaluated, call accelerator.wait_for_everyone() before, on all processes.",
                        stacklevel=2,
                    )
            model = model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    @override
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the consolidated weights under the user's own names; a collective call."""
        self.consolidate()
        return unshare_storage(super().get_state_dict(model, unwrap))

    @override
    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Saves a checkpoint, as Accelerate does, with what each rank needs to go on bit for bit; a collective call."""
        self.consolidate()
        folder = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        self.save_rank_states(folder)
        return folder

    def save_rank_states(self, folder: str | Path) -> None:
        """Writes what each rank needs besides the consolidated weights and the optimizers; a collective call."""
        checkpoint.save_rank_states(
            folder,
            self._sessions.methods,
            "" if self.pipesync is None else self.pipesync.method,
            self.process_index,
            self.num_processes,
            prepared_models(self),
        )

    @override
    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Goes on from a checkpoint of this method, of another one or of plain Accelerate; a collective call.

        Raises:
            ValueError: it is of other models, settings, or another number of processes.
        """
        folders: list[str] = []
        hook = self.register_load_state_pre_hook(lambda _, folder: folders.append(folder))
        # Methods begin with what models and optimizers hold, so these are loaded without them.
        self._sessions.return_optimizer_states()
        self._sessions.detach()
        try:
            super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        finally:
            hook.remove()
            self._attach()
        self.load_rank_states(folders[0])

    def load_rank_states(self, folder: str | Path) -> None:
        """Goes on from what :meth:`save_rank_states` has written, if it was this method; a collective call.

        Raises:
            ValueError: it is of other models, settings, or another number of processes.
        """
        if not self._sessions.methods:
            return
        assert self.pipesync is not None
        states = checkpoint.read_rank_states(
            folder,
            self.pipesync.method,
            self.process_index,
            self.num_processes,
            prepared_models(self),
            len(self._sessions.methods),
            self.pipesync.config,
        )
        for one, state in zip(self._sessions.methods, states, strict=False):
            one.load_state_dict(state)
