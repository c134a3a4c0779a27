"""Sessions: which method trains which models and optimizers.

Models and optimizers are told apart by identity: a user's class may define an equality of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipesync.core.dtensors import whole_of
from lightning_pipesync.core.faults.shutdown import AFTER_ERROR_S, at_shutdown, error_at_shutdown
from lightning_pipesync.methods.ea_pipe import EAPipe
from lightning_pipesync.methods.method import Method, parameters_of
from lightning_pipesync.methods.settings import Settings
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training.module import SyncedModule
from lightning_pipesync.training.registry import METHODS


@dataclass(frozen=True)
class MethodPlan:
    """How a framework attaches a method."""

    name: str
    config: Settings
    ranks_per_host: int
    backend: str | None = None  # see Transport
    loads_data: bool = False  # whether the framework follows the settings of the training data itself
    steps_per_epoch: Callable[[], int | None] | None = None  # see TrainingData
    #: Returns the dimension of the device mesh along which a model is replicated; None: as its parameters say.
    replicas_of: Callable[[nn.Module], DeviceMesh | None] = lambda _: None
    num_readers: int | None = None  # among which the framework divides the data; None: as the model says

    def attach(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> SyncMethod:
        """Attaches the method; a collective call, with the errors of :class:`SyncMethod`.

        Raises:
            ValueError: tensor parallelism divides the model among ranks to which the framework gives different data.
        """
        make: Any = METHODS[self.name]
        dist = torch.distributed
        world_size = dist.get_world_size() if dist.is_initialized() else 1  # a replica of one process, which is a job
        config = self.config.for_framework().on_hosts_of(self.ranks_per_host, world_size)
        replicas = self.replicas_of(module)
        method: SyncMethod = make(module, optimizers, config, backend=self.backend, replicas=replicas)
        number = method.transport.place_of_data[1]
        if self.num_readers is not None and method.transport.shards is not None and number != self.num_readers:
            method.detach(timeout_s=1.0)
            raise ValueError(
                f"The model is divided by tensor parallelism, so that there are {number} different batches at a time, "
                f"and tensor_parallel_size of strategy={self.name!r} says that there are {self.num_readers}: set "
                f"tensor_parallel_size={torch.distributed.get_world_size() // number}, and ranks_per_replica."
            )
        method.data.followed = self.loads_data
        if self.steps_per_epoch is not None:
            method.data.steps_per_epoch = self.steps_per_epoch
        return method


@dataclass(frozen=True, eq=False)
class Session:
    """A method, the user's optimizers whose steps it takes, and the user's models that they train."""

    modules: list[nn.Module]  # without those that are part of another one
    optimizers: list[Optimizer]
    method: SyncMethod
    wrappers: list[weakref.ref[SyncedModule]]

    def trains(self, modules: list[nn.Module], optimizers: list[Optimizer]) -> bool:
        """Returns whether the session has these optimizers, and of these models all parameters that they train."""
        known = {id(parameter) for module in self.modules for parameter in module.parameters()}
        return [*map(id, self.optimizers)] == [*map(id, optimizers)] and all(
            id(parameter) in known for module in modules for parameter in trained_parameters(module, optimizers)
        )

    def detach(self, timeout_s: float = 10.0) -> None:
        for reference in self.wrappers:
            if (wrapper := reference()) is not None:
                wrapper.method = None
        self.method.detach(timeout_s)


class Sessions:
    """Everything that was prepared to be trained: models and optimizers in any order, and pipelines.

    Whatever a method keeps, such as a function, must not refer to the sessions: they end when nothing refers to them.
    """

    _at_end: Finalize | None = None

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []  # those wrapped, each once, until end(); the same on all ranks
        self.sessions: list[Session] = []
        self.optimizers: list[Optimizer] = []
        self.pipelines: list[EAPipe] = []
        self._wrappers: list[weakref.ref[SyncedModule]] = []

    @property
    def methods(self) -> list[Method]:
        return [*(session.method for session in self.sessions), *self.pipelines]

    def wrap(self, module: nn.Module, automatic: bool) -> SyncedModule:
        """Returns the wrapper of a model, which can be trained once its optimizer has been added."""
        wrapper = SyncedModule(module, automatic)
        self._wrappers = [weakref.ref(held) for held in (*self._held_wrappers, wrapper)]
        if not contains(self.modules, module):
            self.modules.append(module)
        return wrapper

    def wrapper_of(self, module: nn.Module) -> SyncedModule | None:
        """Returns the wrapper of a model, or the wrapper that is given; None if there is none."""
        return next((held for held in self._held_wrappers if module is held or module is held.module), None)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Adds an optimizer, unless it was added before."""
        if not contains(self.optimizers, optimizer):
            self.optimizers.append(optimizer)

    def is_held(self, module: nn.Module) -> bool:
        """Returns whether a wrapper of a model is still referenced on this rank."""
        return any(wrapper.module is module for wrapper in self._held_wrappers)

    def session_of(self, trained: Optimizer | SyncedModule) -> Session | None:
        """Returns the session of an optimizer or a wrapper; None if there is none."""
        for session in self.sessions:
            if contains((*session.optimizers, *(wrapper() for wrapper in session.wrappers)), trained):
                return session
        return None

    def attach(self, plan: MethodPlan) -> None:
        """Attaches a method to all models that have optimizers and no method; a collective call.

        A session is replaced if its models have another optimizer now, or its optimizers another model. Optimizers that
        are refused are forgotten.
        """
        before = [optimizer for session in self.sessions for optimizer in session.optimizers]
        try:
            self._attach(plan)
        except ValueError:  # on all ranks
            self.optimizers = [optimizer for optimizer in self.optimizers if contains(before, optimizer)]
            self._attach(plan)
            raise

    def _attach(self, plan: MethodPlan) -> None:
        modules = self.modules.copy()  # and those of before the end that are still in use, with Accelerate
        for wrapper in self._held_wrappers:
            if wrapper.automatic and not contains(modules, wrapper.module):
                modules.append(wrapper.module)
        groups = connected(modules, self.optimizers)
        for session in list(self.sessions):
            others = [group for group in groups if not session.trains(*group)]
            if len(others) == len(groups):
                self.suspend(session)
            groups = others
        self.sessions += [self._attached(modules, optimizers, plan) for modules, optimizers in groups]

    def suspend(self, session: Session) -> None:
        """Ends a session, and writes weights and optimizer states back for the next one; a collective call."""
        session.method.flush()
        session.method.return_optimizer_states()
        session.detach()
        self.sessions.remove(session)

    def remove(self, session: Session, write_back: bool) -> None:
        """Ends a session, and removes its optimizers; with ``write_back`` as :meth:`suspend`, a collective call."""
        if write_back:
            self.suspend(session)
        else:
            session.detach()
            self.sessions.remove(session)
        self.optimizers = [one for one in self.optimizers if not contains(session.optimizers, one)]

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the methods of models and optimizers; their weights stay as they are."""
        for session in self.sessions:
            session.detach(timeout_s)
        self.sessions.clear()

    def end(self, timeout_s: float = 10.0) -> None:
        """Ends and removes everything; to train a model again, add an optimizer."""
        self.detach(timeout_s)
        for engine in self.pipelines:
            engine.detach(timeout_s)
        self.optimizers.clear()
        self.pipelines.clear()
        self.modules.clear()

    def end_at_shutdown(self) -> None:
        """Ends everything when this process ends, or when nothing refers to the sessions any more."""
        if self._at_end is not None:
            return
        sessions = weakref.ref(self)

        def end(timeout_s: float) -> None:
            if (present := sessions()) is not None:
                present.end(timeout_s)

        self._at_end = at_shutdown(end)

    def __del__(self) -> None:
        if self._at_end is None:
            return
        self._at_end.cancel()
        if not (self.sessions or self.pipelines):
            return
        timeout_s = 10.0 if error_at_shutdown() is None else AFTER_ERROR_S
        if threading.current_thread() is threading.main_thread():
            self.end(timeout_s)
        else:  # a garbage collection may run on the very thread of a method that is to end
            threading.Thread(target=self.end, args=(timeout_s,), name="pipesync-end").start()

    def return_optimizer_states(self) -> None:
        """Restores the whole state of the optimizers, of which a rank may have a part only; a collective call."""
        for session in self.sessions:
            session.method.return_optimizer_states()

    def flush(self) -> list[SyncMethod]:
        """Consolidates all weights; returns the methods that were not flushed before. A collective call."""
        training = [session.method for session in self.sessions if not session.method.flushed]
        for method in training:
            method.flush()
        return training

    @property
    def _held_wrappers(self) -> list[SyncedModule]:
        return [wrapper for reference in self._wrappers if (wrapper := reference()) is not None]

    def _attached(self, modules: list[nn.Module], optimizers: list[Optimizer], plan: MethodPlan) -> Session:
        method = plan.attach(modules[0] if len(modules) == 1 else nn.ModuleList(modules), optimizers)
        wrappers = [wrapper for wrapper in self._held_wrappers if trained_parameters(wrapper.module, optimizers)]
        for wrapper in wrappers:
            wrapper.method = method
        return Session(modules, optimizers, method, [weakref.ref(wrapper) for wrapper in wrappers])


def contains(members: Iterable[object], wanted: object) -> bool:
    return any(member is wanted for member in members)


def trained_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    trained = {id(whole_of(parameter)) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    return [parameter for parameter in module.parameters() if id(parameter) in trained]


def connected(
    modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[tuple[list[nn.Module], list[Optimizer]]]:
    """Returns groups of models and optimizers: those that share a parameter are in one group.

    Models without an optimizer, and optimizers without a model, are in no group; nor are models all of whose trained
    parameters are in another one of the group: its submodules.
    """
    groups: list[tuple[set[int], list[Optimizer]]] = []  # of indices of models
    for optimizer in optimizers:
        trained = {index for index, module in enumerate(modules) if trained_parameters(module, [optimizer])}
        if trained:
            sharing = [group for group in groups if group[0] & trained]
            groups = [group for group in groups if not group[0] & trained]
            together = [other for _, others in sharing for other in others]
            groups.append((trained.union(*(indices for indices, _ in sharing)), [*together, optimizer]))
    found = [([modules[index] for index in sorted(indices)], of_group) for indices, of_group in groups]
    return [(_without_submodules(of_models, of_group), of_group) for of_models, of_group in found]


def _without_submodules(modules: list[nn.Module], optimizers: list[Optimizer]) -> list[nn.Module]:
    needed = modules
    for module in sorted(modules, key=lambda module: len(list(module.modules()))):
        others = [other for other in needed if other is not module]
        known = {id(parameter) for other in others for parameter in other.parameters()}
        if all(id(parameter) in known for parameter in trained_parameters(module, optimizers)):
            needed = others
    return needed
