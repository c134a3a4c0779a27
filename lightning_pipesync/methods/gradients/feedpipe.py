"""FeedPipe: weights arrive under the next forward pass, each until a module needs it (DeAR, Section III-B).

All-gathers run so, and averages of replicas. :class:`ExecutionOrder` observes in which order, and when, gradients
become ready and weights are needed.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipesync.core.clock import Clock, Moment
from lightning_pipesync.core.comm.comm_queue import CommQueue
from lightning_pipesync.core.fingerprints import Version, versions_of, written_since
from lightning_pipesync.core.parameters import modules_with_parameters, parameters_needed_by
from lightning_pipesync.methods.module_hook import ModuleHook

CPU = torch.device("cpu")

#: The first step allocates memory and does not count; then so many are measured.
WARM_UP, MEASURED = 1, 3


class StepTimes:
    """Measures some steps after :meth:`begin`; before and afterwards it costs nothing.

    ``ready`` are the seconds from the first gradient of backward to that of a parameter, by the parameter's id;
    ``needed`` those of computation from the beginning of forward until it is needed. Both are medians over the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self.measuring = False  # the same on all ranks
        self.ready: dict[int, float] = {}
        self.needed: dict[int, float] = {}
        self._ready: list[dict[int, Moment]] = []  # for each step: by id of a parameter
        self._forward: list[list[tuple[Moment, Moment, list[int]]]] = []  # begin and end of a wait, ids of parameters

    def begin(self) -> None:
        self.measuring = True
        self._ready, self._forward = [{}], [[]]

    def gradient_is_ready(self, parameter: Tensor) -> None:
        """Notes that a parameter's gradient is ready; the last time in a backward pass counts."""
        if self.measuring:
            self._ready[-1][id(parameter)] = self._clock.now()

    def now(self) -> Moment | None:
        """Returns the present moment, while measuring."""
        return self._clock.now() if self.measuring else None

    def module_has_waited(self, module: nn.Module, since: Moment | None) -> None:
        """Notes that a module, in its first run of a step, has its weights, for which it has waited since ``since``."""
        if since is not None:
            ids = [id(parameter) for parameter in parameters_needed_by(module)]
            self._forward[-1].append((since, self._clock.now(), ids))

    def end_step(self) -> None:
        """Ends a step: its backward pass, and the forward pass before. Computes the medians after the last step."""
        if not self.measuring:
            return
        if len(self._ready) < WARM_UP + MEASURED:
            self._ready.append({})
            self._forward.append([])
            return
        self.measuring = False
        self.ready = _medians([self._since_first(moments) for moments in self._ready[WARM_UP:] if moments])
        self.needed = _medians([self._without_waits(waits) for waits in self._forward[WARM_UP:]])
        self._ready, self._forward = [], []

    def _since_first(self, moments: dict[int, Moment]) -> dict[int, float]:
        first = next(iter(moments.values()))
        return {key: self._clock.seconds_between(first, moment) for key, moment in moments.items()}

    def _without_waits(self, waits: Sequence[tuple[Moment, Moment, list[int]]]) -> dict[int, float]:
        needed: dict[int, float] = {}
        waited = 0.0
        for begin, end, ids in waits:
            computed = self._clock.seconds_between(waits[0][0], begin) - waited
            waited += self._clock.seconds_between(begin, end)
            for key in ids:
                needed.setdefault(key, computed)
        return needed


def _medians(steps: Sequence[dict[int, float]]) -> dict[int, float]:
    keys = {key: None for step in steps for key in step}
    return {key: median(step[key] for step in steps if key in step) for key in keys}


class ExecutionOrder:
    """Observes the order of gradients (``ready``) and of the forward pass (``needed``), by the ids of parameters.

    ``modules`` are those that need parameters, see :func:`parameters_needed_by`.
    """

    def __init__(self, module: nn.Module, device: torch.device = CPU) -> None:
        self.times = StepTimes(device)
        self.modules = modules_with_parameters(module)
        self.ready: dict[int, None] = {}
        self.needed: dict[int, None] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        self._not_run: dict[int, Tensor] = {}  # parameters of modules of which none has ever run
        for child in self.modules:
            for parameter in parameters_needed_by(child):
                self._owners.setdefault(id(parameter), []).append(child)
                self._not_run[id(parameter)] = parameter
        self._running: set[nn.Module] = set()  # modules that have run in this step
        self._used_elsewhere: dict[int, Tensor] = {}

    @property
    def used_elsewhere(self) -> list[Tensor]:
        """Parameters that may be read where no module that registers them runs.

        In some step no such module had run when their gradient was ready, or none has ever run.
        """
        return [*self._used_elsewhere.values(), *self._not_run.values()]

    def begin_step(self) -> None:
        self._running.clear()
        self.times.end_step()

    def forward_begins(self, module: nn.Module) -> bool:
        """Observes that one of the ``modules`` begins its forward pass; returns whether that is its first in a step."""
        if module in self._running:
            return False
        self._running.add(module)
        for parameter in parameters_needed_by(module):
            self.needed[id(parameter)] = None
            self._not_run.pop(id(parameter), None)
        return True

    def gradient_is_ready(self, parameter: Tensor) -> None:
        self.ready[id(parameter)] = None
        self.times.gradient_is_ready(parameter)
        if self._running.isdisjoint(self._owners.get(id(parameter), ())):
            self._used_elsewhere[id(parameter)] = parameter


K = TypeVar("K", bound=Hashable)


class GatheredBucket(Protocol):
    """Parameters that one collective brings up to date."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The parameters."""

    def start_update(self, queue: CommQueue) -> None:
        """Starts to bring the weights up to date."""

    def wait(self) -> None:
        """Blocks until the weights are up to date; raises a RuntimeError if a peer is lost."""

    def arrives(self, timeout_s: float) -> bool:
        """Returns whether the weights are up to date after ``timeout_s`` seconds at most."""


B = TypeVar("B", bound=GatheredBucket)


class UnwrittenWeights:
    """Weights to which nobody may write while their update is under way.

    Args:
        own_writes: how often the update itself writes to each, see :func:`written_since`.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str], own_writes: int = 0) -> None:
        self._tensors, self._names, self._own_writes = tensors, names, own_writes
        self._versions: list[Version] = []  # while an update that nobody has waited for is under way

    def begin_update(self) -> None:
        self._versions = versions_of(self._tensors)

    def forget_update(self) -> None:
        """Checks nothing until the next update."""
        self._versions = []

    def end_update(self) -> None:
        """Raises a RuntimeError, once, if somebody has written to the weights since :meth:`begin_update`."""
        versions, self._versions = self._versions, []
        if written := written_since(versions, self._tensors, self._own_writes):
            raise RuntimeError(
                f"{self._names[written[0]]} was written to while its update of the last step was under way, "
                "which has lost the one or the other. Call synchronize() before you write to weights, or read them, "
                "other than in a forward pass: sync.synchronize(), trainer.strategy.method.synchronize(), "
                "fabric.strategy.method_of(optimizer).synchronize() or accelerator.synchronize(); or set "
                "overlap='none'."
            )


class FeedPipeSchedule(Generic[K]):
    """In which ``order`` the all-gathers start, that of the forward pass, and which of them a module waits for."""

    def __init__(self, buckets: Sequence[Sequence[K]], needed: Sequence[K]) -> None:
        position = {parameter: index for index, parameter in enumerate(needed)}
        self.order = sorted(range(len(buckets)), key=lambda bucket: min(position[p] for p in buckets[bucket]))
        self._bucket_of = {parameter: index for index, members in enumerate(buckets) for parameter in members}

    def awaited(self, parameters: Sequence[K]) -> list[int]:
        """Returns the buckets that a module with these parameters waits for before its forward pass."""
        return list(dict.fromkeys(self._bucket_of[p] for p in parameters if p in self._bucket_of))


class FeedPipe(Generic[B]):
    """Starts the updates of a step; each module waits for its own weights before its forward pass.

    A ``state_dict`` of the module, and what is about to replace its weights, waits for all.
    """

    def __init__(self, module: nn.Module, order: ExecutionOrder, queue: CommQueue) -> None:
        self._order, self._queue = order, queue
        self.buckets: list[B] = []  # in the order of their updates, that of the forward pass
        self._bucket_of: dict[int, B] = {}  # by the id of a parameter
        self._awaited: dict[nn.Module, list[B]] = {}
        # Before the hooks of others, such as those of weight_norm, which read the weights.
        before_forward, before_state = ModuleHook(self._before_forward), ModuleHook(self._before_state_dict)
        self._hooks = [child.register_forward_pre_hook(before_forward, prepend=True) for child in order.modules]
        self._hooks += [child.register_state_dict_pre_hook(before_state) for child in module.modules()]
        self._hooks += [child.register_load_state_dict_pre_hook(before_state) for child in module.modules()]

    def set_buckets(self, buckets: Sequence[B], needed: Sequence[Tensor]) -> None:
        """Sets the buckets; ``needed`` are their parameters, in the order in which the forward pass needs them."""
        members = [[id(parameter) for parameter in bucket.parameters] for bucket in buckets]
        schedule = FeedPipeSchedule(members, [id(parameter) for parameter in needed])
        self.buckets = [buckets[index] for index in schedule.order]
        self._bucket_of = {key: bucket for bucket, keys in zip(buckets, members, strict=True) for key in keys}
        self._awaited = {
            module: [buckets[i] for i in schedule.awaited([id(p) for p in parameters_needed_by(module)])]
            for module in self._order.modules
        }

    def start(self, buckets: Iterable[B]) -> None:
        """Starts the updates of ``buckets``, in the order in which the forward pass needs them."""
        for bucket in buckets:
            bucket.start_update(self._queue)
        self._queue.start_finishing()

    def end_step(self) -> None:
        """Blocks until the weights are up to date that may be read where no module's forward pass waits for them."""
        self._order.begin_step()
        for parameter in self._order.used_elsewhere:
            if (bucket := self._bucket_of.get(id(parameter))) is not None:
                bucket.wait()

    def wait(self) -> None:
        for bucket in self.buckets:
            bucket.wait()

    def give_up(self, timeout_s: float) -> int:
        """Never waits again; returns in how many buckets weights do not arrive within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        arrive = [bucket.arrives(max(0.0, deadline - time.monotonic())) for bucket in self.buckets]
        self.remove_hooks()
        self.buckets, self._awaited, self._bucket_of = [], {}, {}
        return arrive.count(False)

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        began = self._order.times.now() if self._order.forward_begins(module) else None
        for bucket in self._awaited.get(module, ()):
            bucket.wait()
        self._order.times.module_has_waited(module, began)

    def _before_state_dict(self, *_: Any) -> None:
        self.wait()
