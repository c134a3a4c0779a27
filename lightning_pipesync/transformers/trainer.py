"""transformers' Trainer with a :class:`PipeSyncAccelerator`: a ready class, and a mixin for a Trainer class."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback
from typing_extensions import override

from lightning_pipesync.accelerate.accelerator import PipeSyncAccelerator
from lightning_pipesync.accelerate.optimizer import SynchronizedOptimizer
from lightning_pipesync.accelerate.plugin import PipeSyncPlugin
from lightning_pipesync.accelerate.sharding import shards_by_fsdp2
from lightning_pipesync.core.private_names import ChecksOverrides, overrides
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.session import contains
from lightning_pipesync.transformers.place import OTHERS, StepsLoader, TrainerPlace
from lightning_pipesync.transformers.private import accelerator_of_transformers, skipping_batches

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import Trainer as _Base
else:
    _Base = object


#: The events at which transformers gives callbacks the model between a step and the next forward pass.
AFTER_STEP = ("on_optimizer_step", "on_step_end", "on_log", "on_epoch_end", "on_epoch_begin", "on_step_begin")


class TrainersAccelerator(PipeSyncAccelerator):
    """A PipeSyncAccelerator that returns a model that it shards without a wrapper: it becomes ``trainer.model``.

    Evaluation mode does not consolidate its weights, which the Trainer does itself.
    """

    elastic_loader_type = StepsLoader
    warns_of_own_weights = False  # with label smoothing the Trainer unwraps its model in each step, to read its class

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unwrapped: list[SyncedModule] = []  # which their sessions do not keep

    def _wrapped(self, model: nn.Module) -> nn.Module:
        wrapper = super()._wrapped(model)
        if not isinstance(wrapper, SyncedModule) or not shards_by_fsdp2(self):
            return wrapper
        if not contains(self._unwrapped, wrapper):
            self._unwrapped.append(wrapper)

            def resume(*_: Any) -> None:
                if wrapper.method is not None and wrapper.module.training and torch.is_grad_enabled():
                    wrapper.begin_to_train()

            wrapper.module.register_forward_pre_hook(resume, prepend=True)  # before FSDP2 gathers the weights
        return wrapper.module


class PipeSyncTrainerMixin(ChecksOverrides, _Base):
    """Mixin that precedes a subclass of ``transformers.Trainer`` in the bases::

        class MyTrainer(PipeSyncTrainerMixin, Seq2SeqTrainer): ...

        trainer = MyTrainer(model=model, args=args, train_dataset=data, pipesync=PipeSyncPlugin("dear"))

    Training logs contain the method's metrics. The consolidated weights are evaluated and saved. A checkpoint also
    holds each rank's state, from which ``train(resume_from_checkpoint=...)`` resumes bit for bit.

    Args:
        pipesync: as in PipeSyncAccelerator.

    Raises:
        ValueError: the method is EA-Pipe, which makes the passes itself, or data injection is set.
    """

    accelerator: TrainersAccelerator  #: in place of the Trainer's own
    _place: TrainerPlace | None = None  # in jobs that come and go, from the first epoch on

    def __init__(self, *args: Any, pipesync: PipeSyncPlugin | None = None, **kwargs: Any) -> None:
        self._pipesync = PipeSyncPlugin.from_environment() if pipesync is None else pipesync
        if self._pipesync is not None:
            _check(self._pipesync)
        super().__init__(*args, **kwargs)
        if self._pipesync is not None:
            self.callback_handler.callbacks.insert(0, WaitingCallback(self))

    @override
    def create_accelerator_and_postprocess(self) -> None:
        with accelerator_of_transformers(partial(TrainersAccelerator, self._pipesync)):
            super().create_accelerator_and_postprocess()

    @override
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does; an error that a lost rank causes ends with a line that names it."""
        if self.accelerator.is_job and self.args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True may give this replica another batch size than the others, with lighthouse: "
                "set auto_find_batch_size=False, and a per_device_train_batch_size that fits."
            )
        self._place = None
        with self.accelerator.naming_ranks(), skipping_batches(self.accelerator.skip_first_batches):
            return super().train(*args, **kwargs)

    @override
    def _run_epoch(self, **given: Any) -> None:
        if self.accelerator.is_job and self._place is None:
            self._place = TrainerPlace(self, given["num_update_steps_per_epoch"])
            self.accelerator.hand_over(trainer=self._place, scheduler=self.lr_scheduler)  # which is not prepared
            self.accelerator.join()
        begun = given if self._place is None else self._place.begun(given)
        if begun is not None:
            super()._run_epoch(**begun)

    @override
    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(None if checkpoint == OTHERS else checkpoint)

    @override
    def get_train_dataloader(self) -> DataLoader[Any]:
        with self.accelerator.preparing_train_loader(self.args.gradient_accumulation_steps):
            return super().get_train_dataloader()

    @override
    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.consolidate()
        return super().evaluation_loop(*args, **kwargs)

    @override
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        metrics = self.accelerator.metrics() if "loss" in logs else {}
        super().log({**logs, **metrics}, *args, **kwargs)

    @override
    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        self.accelerator.consolidate()
        if self.is_fsdp_enabled:  # with SHARDED_STATE_DICT all ranks ask next whether it exists, and none has made it
            Path(output_dir or self.args.output_dir).mkdir(parents=True, exist_ok=True)
        super().save_model(output_dir, *args, **kwargs)

    @override
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not isinstance(self.optimizer, SynchronizedOptimizer):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # Without FSDP only rank 0 reads the state, of which each rank may have a part.
        fsdp = self.is_fsdp_enabled
        with self.accelerator.optimizers_given_back() if fsdp else self.optimizer.state_at_hand():
            super()._save_optimizer_and_scheduler(output_dir)
        self.accelerator.save_rank_states(output_dir)

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self.accelerator.optimizers_given_back():
            super()._load_optimizer_and_scheduler(checkpoint)

    @override
    def _load_scaler(self, checkpoint: str | None) -> None:
        super()._load_scaler(checkpoint)
        if checkpoint is not None:
            self.accelerator.load_rank_states(checkpoint)  # also this rank's loss scale

    @override
    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.end()  # a single process may save or use the model afterwards
        self.accelerator.return_optimizer_states()
        return super()._finalize_training(*args, **kwargs)

    @override
    def _load_best_model(self) -> None:
        self.accelerator.consolidate()
        super()._load_best_model()


class PipeSyncTrainer(PipeSyncTrainerMixin, Trainer):
    """``transformers.Trainer`` with a method::

        trainer = PipeSyncTrainer(model=model, args=args, train_dataset=data, pipesync=PipeSyncPlugin("dear"))

    It takes the Trainer's arguments, and ``pipesync``; what it does, and its errors, are those of
    :class:`PipeSyncTrainerMixin`, which a Trainer class of your own takes.
    """


class WaitingCallback(TrainerCallback):
    """Waits, before a user's callbacks, for weights that are on their way after a step, so that all are of one step.

    The Trainer gives callbacks the user's own model, whose parameters nothing watches. Where no callback but those of
    transformers looks at it, weights go on to arrive under the next forward pass.
    """

    def __init__(self, trainer: PipeSyncTrainerMixin) -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if any(overrides(callback, *AFTER_STEP) for callback in self._trainer.callback_handler.callbacks):
            self._trainer.accelerator.synchronize()


def _check(plugin: PipeSyncPlugin) -> None:
    """Checks that the method works in transformers' Trainer."""
    if plugin.method_type.makes_passes:
        raise ValueError(
            f"method={plugin.method!r} makes the passes itself, and so does transformers' Trainer: use "
            "PipeSyncAccelerator.prepare_pipeline() in a plain loop, or another method."
        )
    if plugin.config.partition == "work_queue":
        raise ValueError(
            "partition='work_queue' gives ranks different numbers of steps, and transformers' Trainer saves and "
            "evaluates by the steps of a rank: set partition='defdp', or use PipeSyncAccelerator in a plain loop."
        )
    if plugin.config.injection is not None:
        raise ValueError(
            f"injection={plugin.config.injection} does not work in transformers' Trainer, which "
            "resumes within an epoch with another loader: use a plain loop, or set injection=None."
        )
