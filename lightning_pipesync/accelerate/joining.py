"""An Accelerator that joins others, as jobs whose replicas come and go."""

from __future__ import annotations

import sys
import weakref
from abc import abstractmethod
from typing import Any

from typing_extensions import override

from lightning_pipesync.accelerate.elastic import elastic_loaders
from lightning_pipesync.accelerate.private import saved_besides_optimizers
from lightning_pipesync.accelerate.sharded import ShardingAccelerator
from lightning_pipesync.core.faults.errors import is_normal_end
from lightning_pipesync.methods.sync_method import SyncMethod


class JoiningAccelerator(ShardingAccelerator):
    """An Accelerator that begins its training where the other jobs are."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._handed: dict[str, Any] = {"accelerator": HandedOver(weakref.proxy(self))}

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
        if is_normal_end(sys.exc_info()[1]) and (self.is_job or self._sessions.may_diverge):
            self.end()
        self._sessions.end()
        super().end_training()

    def hand_over(self, **parts: Any) -> None:
        """Adds ``parts`` to what a new job gets from another one, by ``state_dict`` and ``load_state_dict``."""
        self._handed |= parts
        self._meet_others()

    @property
    @abstractmethod
    def batches_per_step(self) -> int:
        """Number of batches whose gradients are accumulated for a step."""

    @property
    def is_job(self) -> bool:
        """Whether the replicas are jobs of their own, and this is one."""
        return self._synced is not None and self._synced.config.num_jobs is not None

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


class HandedOver:
    """What an Accelerator hands over to a new job besides the method's state: what it saves besides models."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of schedulers, registered objects and loss scaler, as they are between two steps."""
        scaler = self._accelerator.scaler
        saved = saved_besides_optimizers(self._accelerator)
        return {
            "batches_per_step": self._accelerator.batches_per_step,
            "scaler": None if scaler is None else scaler.state_dict(),
            **{kind: [one.state_dict() for one in parts] for kind, parts in saved.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from another job's state.

        Raises:
            ValueError: this job accumulates another number of batches, or has other objects.
        """
        own = self._accelerator.batches_per_step
        if state["batches_per_step"] != own:
            raise ValueError(
                f"This replica takes a step after {own} batches, and the others after {state['batches_per_step']}: set "
                "the same gradient_accumulation_steps on all."
            )
        for kind, parts in saved_besides_optimizers(self._accelerator).items():
            if len(state[kind]) != len(parts):
                raise ValueError(
                    f"This replica has {len(parts)} {kind}, and the others have {len(state[kind])}: prepare and "
                    "register the same ones on all, before the first batch."
                )
            for part, saved in zip(parts, state[kind], strict=True):
                part.load_state_dict(saved)
        if self._accelerator.scaler is not None and state["scaler"] is not None:
            self._accelerator.scaler.load_state_dict(state["scaler"])
