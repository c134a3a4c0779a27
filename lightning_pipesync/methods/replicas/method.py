"""Base class of the methods whose ranks train replicas of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from lightning_pipesync.core.buckets import buffer_reader
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.methods.gradients.module_hook import ModuleHook
from lightning_pipesync.methods.replicas.flags import LOADED, raise_if_not_all_loaded
from lightning_pipesync.methods.replicas.groups import exchange_flags
from lightning_pipesync.methods.replicas.non_trainable import NonTrainableTensors
from lightning_pipesync.methods.replicas.tensors import ReplicatedTensors
from lightning_pipesync.methods.sync_method import SyncMethod

T = TypeVar("T")


class ReplicaUnit(Protocol):
    """What a method has of each optimizer.

    Attributes:
        replicas: averages its parameters.
    """

    replicas: ReplicatedTensors

    def check_consolidation(self) -> None:
        """Checks that all ranks are about to consolidate the weights, after as many steps.

        Raises:
            RuntimeError: they differ; or a peer is lost.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank."""


class ReplicaMethod(SyncMethod):
    """Every rank trains its own weights with its own optimizer. The consolidated weights are their average.

    Arguments, errors and further calls are those of :class:`SyncMethod`.
    """

    @property
    def _replicas(self) -> list[ReplicatedTensors]:
        """The parameters of each optimizer."""
        return [unit.replicas for unit in self._units]

    @property
    def _averages_later(self) -> bool:
        """Whether an average is applied to weights of a later step."""
        return False

    @property
    def _can_undo(self) -> bool:
        """Whether averages keep what they replace until all ranks are known to have them."""
        return False

    @property
    @abstractmethod
    def _units(self) -> Sequence[ReplicaUnit]:
        """What the method has of each optimizer."""

    @abstractmethod
    def _shape_settings(self) -> dict[str, Any]:
        """Returns the settings that determine the structure of :meth:`state_dict`."""

    def _drop_averages(self) -> None:
        """Drops the averages under way, if there are any: training continues from other weights."""

    def _attach_replicas(self, parameters: Sequence[NamedParameter]) -> None:
        """Prepares to average what no optimizer updates, and to notice weights that are loaded."""
        others = [parameter.tensor for parameter in parameters if parameter.group is None]
        self._non_trainable = self._non_trainable_tensors(others, self._module)
        self._followers: list[NonTrainableTensors] = []
        self._followers_diverged = False
        self._waits = False
        self._loaded = self._loaded_since_flush = False
        loaded = ModuleHook(self._after_loading)
        compared = [replicas for replicas in self._replicas if replicas.agrees or self._averages_later]
        ids = {id(tensor) for replicas in compared for tensors in replicas.tensors for tensor in tensors}
        # Not of a teacher, into which the trained weights may be loaded at every step.
        children = [child for child in self._module.modules() if any(id(p) in ids for p in child.parameters())]
        self._load_hooks = [child.register_load_state_dict_post_hook(loaded) for child in children]

    @property
    def same_optimizer_states(self) -> bool:
        return False

    @property
    def diverged(self) -> bool:
        """Whether this rank's weights may differ from those of other ranks."""
        return not self.flushed and any(replicas.diverged for replicas in self._replicas)

    def follow(self, module: nn.Module) -> None:
        """Makes :meth:`flush` average ``module``, too, such as a running average of this rank's weights (EMA).

        As averages commute, it becomes the running average of the averaged weights. :meth:`resume` does not undo that.
        A step waits for its average then, which the running average reads.
        """
        self._waits = True
        self._followers.append(self._non_trainable_tensors(list(module.parameters()), module))

    def flush(self) -> None:
        """Sets the weights and buffers to the average of the replicas, which is exact with any codec.

        Raises:
            RuntimeError: another rank takes a step, or has skipped other steps than this one; or a peer is lost.
        """
        if self.flushed:
            return
        self.synchronize()
        self._together(self._consolidate)
        for follower in self._followers:
            follower.keep_average()

    def resume(self) -> None:
        """Restores this rank's own replica, except the tensors that were written to since the flush."""
        self._end_flush()
        for replicas in self._replicas:
            replicas.swap_back()
        self._non_trainable.swap_back()
        self.flushed = False

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's replica, optimizer states, counters and codec residuals."""
        self.synchronize()
        return {
            "units": [unit.state_dict() for unit in self._units],
            "untrained": self._non_trainable.state_dict(),
            "traffic": self.transport.traffic.state_dict(),
            "injection": self.data.injection.state_dict() if self.data.injection else {},
            "settings": self._shape_settings(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank, after the consolidated weights were loaded.

        Raises:
            ValueError: the state is of other settings that determine its structure.
        """
        former = self.config.former_names
        settings = {former.get(name, name): value for name, value in state["settings"].items()}
        if settings != self._shape_settings():
            raise ValueError(
                f"The checkpoint was written with {settings}, this run has {self._shape_settings()}. Use the "
                "same settings, or remove the key 'pipesync' from the checkpoint to start from the averaged weights."
            )
        self.synchronize()
        for unit, saved in zip(self._units, state["units"], strict=True):
            unit.load_state_dict(saved)
        self._non_trainable.load_state_dict(state["untrained"])
        self.flushed = self._loaded = self._loaded_since_flush = False
        self.transport.traffic.load_state_dict(state["traffic"])
        if self.data.injection and state["injection"]:
            self.data.injection.load_state_dict(state["injection"])

    def _detach(self, timeout_s: float) -> None:
        """Ends the method's threads and process groups. The weights stay as they are."""
        for hook in getattr(self, "_load_hooks", ()):
            hook.remove()
        super()._detach(timeout_s)

    def return_optimizer_states(self) -> None:
        """Waits for the average of the last step: the optimizers have had their states all along."""
        self.synchronize()

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Makes weights that were consolidated or loaded those that training continues from; reduces nothing yet."""
        if self.flushed:  # the gradient was computed at the consolidated weights
            self._drop_averages()
            self._keep_average()
        if self._loaded:
            self._together(self._agree_on_loaded)

    def _consolidate(self) -> None:
        """Sets the weights and buffers to the average of the replicas, see :meth:`flush`."""
        for unit in self._units:
            unit.check_consolidation()
        for replicas in self._replicas:
            replicas.swap_in_average()
        self._non_trainable.swap_in_average()
        for follower in self._followers:
            follower.average(self._can_undo, with_parameters=self._followers_diverged)
        self._followers_diverged = False
        self.flushed = True

    def _together(self, section: Callable[[], T]) -> T:
        """Runs a section of a step, or of a flush, in which all ranks communicate."""
        return section()

    def _after_loading(self, *_: Any) -> None:
        """Notes that weights were loaded, from which the next steps move away."""
        if self.flushed:
            self._loaded_since_flush = True
        else:
            self._loaded = True

    def _end_flush(self) -> None:
        """Finds out whether weights that were loaded since the flush are still there, as they are not after a swap."""
        if self._loaded_since_flush:
            self._loaded |= any(replicas.written_since_swap() for replicas in self._replicas)
        self._loaded_since_flush = False

    def _agree_on_loaded(self) -> None:
        """Makes weights that were loaded since the last step the agreed ones; a collective call.

        Raises:
            RuntimeError: not all ranks have loaded weights; or a peer is lost.
        """
        self._drop_averages()
        self._loaded = False
        raise_if_not_all_loaded(exchange_flags(self.transport, LOADED))
        for replicas in self._replicas:
            replicas.agree_on_present()

    def _keep_average(self) -> None:
        """Continues from the consolidated weights."""
        self._end_flush()
        for replicas in self._replicas:
            replicas.keep_average()
        self._non_trainable.keep_average()
        self.flushed = False

    def _non_trainable_tensors(self, parameters: list[Tensor], module: nn.Module) -> NonTrainableTensors:
        return NonTrainableTensors(parameters, buffer_reader(module), self.transport, self.config.bucket_mb)
