"""What an Accelerator with a method does besides training: joins other jobs, consolidates, saves, loads, and ends."""

from __future__ import annotations

import sys
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from typing_extensions import override

from lightning_pipesync.accelerate.checkpoint import load_models, read_rank_state, save_rank_state
from lightning_pipesync.accelerate.elastic import elastic_loaders
from lightning_pipesync.accelerate.optimizer import synchronized_optimizers
from lightning_pipesync.accelerate.plugin import PipeSyncPlugin
from lightning_pipesync.accelerate.private import prepared_models, saved_besides_optimizers
from lightning_pipesync.accelerate.sharding import replicas_of, shards_by_fsdp2
from lightning_pipesync.core.buckets import unshare_storage
from lightning_pipesync.core.dtensors import is_sharded
from lightning_pipesync.core.faults.errors import is_normal_end
from lightning_pipesync.core.faults.failure import PeerWatch, waiting_for_all, waits_for_all
from lightning_pipesync.core.faults.meeting import watch_job
from lightning_pipesync.core.files import check_undamaged
from lightning_pipesync.core.private_names import ChecksOverrides
from lightning_pipesync.data.training_data import TrainingData
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.place import HandedOver
from lightning_pipesync.training.session import Sessions
from lightning_pipesync.training.sharded_state import whole_state
from lightning_pipesync.training.state import layout_of


@waits_for_all("_job_watch", "gather", "reduce", "pad_across_processes")
class SavingAccelerator(ChecksOverrides, Accelerator):
    """An Accelerator whose ranks have the same weights when they are read, saved, or the training ends.

    Its waits in the default process group end when a rank is lost, and name it.
    """

    pipesync: PipeSyncPlugin | None
    warns_of_own_weights: ClassVar[bool] = True  # where a model is unwrapped that may be saved next
    data_seed: int | None = None  # of the order of the training data, once its loader is prepared
    _sessions: Sessions
    _job_watch: PeerWatch | None = None
    _train_loader: Any = None  # the last one that was prepared
    _accumulated = 1  # batches that the caller of `preparing_train_loader` accumulates by itself

    @abstractmethod
    def _attach(self) -> None:
        """Attaches a method to prepared models and optimizers; a collective call."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        accelerator = weakref.proxy(self)  # a method keeps what it hands over
        of_accelerator = HandedOver(
            lambda: saved_besides_optimizers(accelerator),
            lambda: {
                "batches a step": (accelerator.batches_per_step, "set the same gradient_accumulation_steps on all")
            },
        )
        self._handed: dict[str, Any] = {"accelerator": of_accelerator}

    # --- what is synchronized ---------------------------------------------------------------------------------------

    @property
    def _synchronizes(self) -> bool:
        """Whether a method synchronizes what is prepared."""
        if self.pipesync is None:
            return False
        if self.pipesync.config.num_jobs is not None:
            return True
        return self.num_processes > 1 and (not shards_by_fsdp2(self) or replicas_of(self) is not None)

    @property
    def _synced(self) -> PipeSyncPlugin | None:
        """The plugin, if its method synchronizes what a loop computes; None: one process, or a pipeline."""
        return self.pipesync if self._synchronizes and self._pipelined is None else None

    @property
    def _pipelined(self) -> PipeSyncPlugin | None:
        """The plugin, if its method is a pipeline."""
        return self.pipesync if self.pipesync is not None and self.pipesync.method_type.makes_passes else None

    @property
    def is_job(self) -> bool:
        """Whether the replicas are jobs of their own, and this is one."""
        return self._synced is not None and self._synced.config.num_jobs is not None

    # --- other ranks ------------------------------------------------------------------------------------------------

    def _watch_job(self, timeout_s: float) -> None:
        """Starts to watch all ranks; a collective call. RuntimeError if there is no process group any more."""
        if self.num_processes > 1:
            if not dist.is_initialized():
                raise RuntimeError(
                    "There is no process group any more: another Accelerator's end_training() has destroyed it, so "
                    "that this process cannot train again. Between two trainings call accelerator.free_memory()."
                )
            self._job_watch = watch_job(timedelta(seconds=timeout_s))

    def naming_ranks(self) -> AbstractContextManager[None]:
        """Context manager whose errors, if a lost rank has caused them, end with a line that names it."""
        return nullcontext() if self._job_watch is None else self._job_watch.naming()

    def join(self) -> None:
        """Joins the other replicas, if they are jobs of their own (``lighthouse``), after a checkpoint was loaded.

        If they train already, this job gets their weights, states of optimizers and schedulers, registered objects and
        place in the data. The first forward pass in training, the first iteration over the training loader, and reading
        its ``epoch`` call it. Does nothing the second time.

        Raises:
            RuntimeError: no model and optimizer are prepared; or as in :meth:`ElasticReplicaMethod.join`.
            ValueError: this job has other settings, model, loaders or schedulers than the others.
        """
        if self.is_job and not self._sessions.sessions:
            raise RuntimeError(
                "There is no model to join other replicas with: call prepare(model, optimizer) before reading "
                "train_loader.epoch, or iterating over the training loader."
            )
        for session in self._sessions.sessions:
            if session.method.flushed:
                session.method.resume()
            session.method.join()

    def end(self) -> None:
        """Ends the training, before the model is saved: consolidates the weights.

        With ``lighthouse`` they become the average of all replicas that end after as many steps. A collective call.
        """
        if self.is_job:
            for session in self._sessions.sessions:
                session.method.finish(lambda _: None)
        self.consolidate()

    @override
    def end_training(self) -> None:
        """Ends the methods, trackers and process groups, after :meth:`end`; a collective call.

        After it one process may save or evaluate the model.
        """
        may_differ = any(not session.method.same_weights for session in self._sessions.sessions)
        if (self.is_job or may_differ) and is_normal_end(sys.exc_info()[1]):
            self.end()
        self._sessions.end()
        if self._job_watch is not None:
            self._job_watch.close()
        super().end_training()

    @override
    def free_memory(self, *objects: Any) -> Any:
        """Ends the methods, and releases what was prepared, with the parts of optimizer states that ranks have.

        Not a collective call, so a process may call it after an error. See :meth:`return_optimizer_states`.
        """
        diverged = any(session.method.diverged for session in self._sessions.sessions)
        if diverged and is_normal_end(sys.exc_info()[1]):
            warnings.warn(
                "free_memory() has left each process with the weights of its own. Before it, call "
                "accelerator.wait_for_everyone() on all processes.",
                stacklevel=2,
            )
        self._sessions.end()
        self._train_loader = None
        return super().free_memory(*objects)

    def return_optimizer_states(self) -> None:
        """Restores the whole state of the optimizers, before :meth:`free_memory`; a collective call."""
        self._sessions.return_optimizer_states()

    def hand_over(self, **parts: Any) -> None:
        """Adds ``parts`` to what a new job gets from another one, by ``state_dict`` and ``load_state_dict``."""
        self._handed |= parts
        self._meet_others()

    @property
    def batches_per_step(self) -> int:
        """Number of batches whose gradients are accumulated for a step."""
        return self._accumulated * self.gradient_accumulation_steps

    def _end_if_left(self) -> None:
        """Ends the process between two batches, if this job was asked to leave the others, and has."""
        for session in self._sessions.sessions:
            session.method.data.between_batches()

    def _meet_others(self) -> None:
        """Tells the method, when it is attached, what is divided among the jobs, and what they hand over.

        Raises:
            ValueError: there are several methods.
        """
        if not self.is_job:
            return
        methods: list[SyncMethod] = [session.method for session in self._sessions.sessions]
        if len(methods) > 1:
            self._sessions.end()
            raise ValueError(
                f"{len(methods)} models with optimizers of their own are prepared, and with lighthouse="
                f"{getattr(methods[0].config, 'lighthouse', None)!r} a job has one replica: prepare one model that has "
                "them as submodules, or leave lighthouse out."
            )
        for method in methods:
            method.hand_over(**self._handed)
            for loader in elastic_loaders(self):
                method.data.add(loader)
                method.data.followed = True

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

    # --- weights and checkpoints ------------------------------------------------------------------------------------

    def consolidate(self) -> None:
        """Makes the weights the method's consolidated ones, the same on all ranks, until the training continues.

        A collective call. ``model.eval()``, :meth:`wait_for_everyone` and all calls that save call it themselves.
        """
        self._sessions.flush()
        for engine in self._sessions.pipelines:
            engine.gather()

    def synchronize(self) -> None:
        """Waits for weights that are on their way after a step, before they are read or written.

        Not a collective call. Forward passes and all calls that save wait by themselves.
        """
        for session in self._sessions.sessions:
            session.method.synchronize()

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
        with waiting_for_all(self._job_watch):
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
        methods = self._sessions.methods if wanted else []
        state = {
            "methods": [method.state_dict() for method in methods],
            "places": [loader.state_dict() for loader in elastic_loaders(self)],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),  # Accelerate saves rank 0's
            "data_seed": self.data_seed,
        }
        name = "" if self.pipesync is None else self.pipesync.method
        layout = layout_of(methods[0].transport) if methods else {}
        models = prepared_models(self)
        save_rank_state(folder, state if methods else None, name, self.process_index, layout, models)

    @override
    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Resumes from a checkpoint of this method, of another one or of plain Accelerate; a collective call.

        Raises:
            ValueError: it is of other models, settings, or another number of processes.
            RuntimeError: each of several processes has a pipeline with all stages.
        """
        if self.num_processes > 1 and any(method.transport is None for method in self._sessions.methods):
            raise RuntimeError(
                f"There are {self.num_processes} processes, each with all stages of a pipeline, which cannot resume "
                "from a checkpoint: start a process for each stage, or a single one."
            )
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
        try:
            with self.optimizers_given_back():
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
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
        saved = read_rank_state(folder, transport, name, prepared_models(self), config)
        if saved is None:
            return
        if len(saved["methods"]) != len(methods):
            raise ValueError(
                f"{folder} holds {len(saved['methods'])} models that were trained with their optimizers, and "
                f"{len(methods)} are prepared: prepare the same models before load_state()."
            )
        for method, state in zip(methods, saved["methods"], strict=True):
            method.load_state_dict(state)
        for loader, place in zip(elastic_loaders(self), saved["places"], strict=False):
            loader.load_state_dict(place)
        if self.scaler is not None and saved["scaler"] is not None:
            self.scaler.load_state_dict(saved["scaler"])
        seed = saved["data_seed"]
        if None not in (seed, self.data_seed) and seed != self.data_seed and self.is_main_process:
            warnings.warn(
                f"The training data have another order than in the run that is resumed: its seed was {seed}, and is "
                f"{self.data_seed} now. To go on at the same batch, pass DataLoaderConfiguration(data_seed={seed}), or "
                "call set_seed() before loaders are prepared in both runs.",
                stacklevel=2,
            )
