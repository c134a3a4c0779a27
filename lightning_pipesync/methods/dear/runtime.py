"""DeAR in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import Fusion
from lightning_pipesync.core.codecs import get_codec
from lightning_pipesync.core.comm.comm_queue import CommQueue, Queued
from lightning_pipesync.core.faults.shutdown import AFTER_ERROR_S
from lightning_pipesync.core.guarded_states import at_hand, bring_back, send_away
from lightning_pipesync.core.parameters import NamedParameter
from lightning_pipesync.core.sharding import copies_of
from lightning_pipesync.core.torch_private import foreach_norm, mark_stepped
from lightning_pipesync.methods.dear.bucket import IN_BUCKETS, FusedBucket
from lightning_pipesync.methods.dear.buckets import FusedBuckets
from lightning_pipesync.methods.dear.config import DeARConfig
from lightning_pipesync.methods.dear.fusion_search import FusionTuner, Trial
from lightning_pipesync.methods.gradients.backpipe import MISSING, BackPipe
from lightning_pipesync.methods.gradients.feedpipe import ExecutionOrder, FeedPipe
from lightning_pipesync.methods.method import NETWORK_METRICS, MetricInfo, counted
from lightning_pipesync.methods.settings import check_saved
from lightning_pipesync.methods.step import Stage
from lightning_pipesync.methods.sync_method import SyncMethod

T = TypeVar("T")

# DeAR's bits of a rank's flag: rank 0 has chosen the next bucket size; an optimizer has another state or other
# parameters.
END_OF_TRIAL, CHANGED = 4, 8


class DeAR(SyncMethod):
    """Synchronous SGD whose all-reduce is split in two, hidden under the backward pass and the next forward pass.

    The weights are those that ``DistributedDataParallel`` would train. A bucket's reduce-scatter starts when its last
    gradient is ready (BackPipe). :meth:`step` waits for all of them, and starts the all-gathers in the order in which
    the next forward pass needs the weights; a module waits for its own weights only (FeedPipe). With
    ``overlap="eager"`` some all-gathers start under the backward pass, where the network would idle.

    A plain loop::

        sync = DeAR(model, optimizer)                   # all ranks now have rank 0's weights
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            sync.step()                                 # in place of optimizer.step()
        sync.synchronize()                              # before anything but a forward pass or a state_dict reads them
        validate(model)
        sync.detach()

    ``p.grad`` stays this rank's own gradient; no rank has the whole average. With several backward passes before a
    step, all but the last belong under :meth:`no_sync`.

    Arguments, errors and further calls are those of :class:`SyncMethod`; the settings are in :class:`DeARConfig`.
    """

    name = "dear"
    config_type = DeARConfig
    applies_grad = False
    same_weights = True
    shards_optimizer_state = True

    metric_infos = MappingProxyType(
        {
            "buckets": MetricInfo("buckets of a step", over_ranks="same"),
            "early_gathers": MetricInfo("all-gathers of a step that start under the backward pass", over_ranks="same"),
            **NETWORK_METRICS,
        }
    )

    config: DeARConfig

    def _attach(self, parameters: Sequence[NamedParameter]) -> None:
        self._order = order = ExecutionOrder(self._module, self.transport.device)
        self._queue = queue = CommQueue("pipesync-dear", self.transport.device, self.transport.traffic)
        self._at_detach(queue.close)
        config = self._effective_config
        self._feedpipe: FeedPipe[FusedBucket] = FeedPipe(self._module, order, queue)
        self._at_detach(lambda _: self._feedpipe.remove_hooks())
        self._backpipe = BackPipe(
            queue,
            may_start=self._may_start,
            before_first=self._before_first,
            started=lambda index: self._fused.gather_early_after(index, queue),
            outdated=self._refuse_outdated,
        )
        self._at_detach(lambda _: self._backpipe.remove_hooks())
        self._fused = FusedBuckets(order, self.optimizers, config, self.transport, self._backpipe, self._feedpipe)
        self._at_detach(self._release_buckets)
        self._tuner = FusionTuner(config, self._fused, self.transport)
        self._at_detach(self._tuner.close)
        self._waits = config.overlap == "none"
        self._weights_loaded = False  # since the last collective
        self._loaded: set[int] = set()  # optimizers into which a state was loaded since the last step
        self._at_detach(lambda _: self._bring_back_states())
        self._set_parameters(parameters)

    @property
    def reduces_together(self) -> bool:
        """See the base class. What was not sent is added to the next gradient: it has to be of one that was applied."""
        return len(self.optimizers) == 1 or not self.config.needs_as_many_ranks

    @property
    def fusion(self) -> Fusion:
        """How tensors are fused now."""
        return self._tuner.fusion

    @property
    def tuned(self) -> bool:
        """Whether :attr:`fusion` is final."""
        return self._tuner.finished

    @property
    def planned(self) -> bool:
        """Whether the all-gathers that start under backward are chosen for the present buckets, or there are none."""
        return self._fused.planned

    @property
    def trials(self) -> Sequence[Trial]:
        """The measurements of the search for :attr:`fusion` so far."""
        return self._tuner.trials

    def _reduce(self, index: int, loss_scale: float | None) -> None:
        """Waits until each rank has the average of its shard of the gradients, which are scaled by ``loss_scale``."""
        # A state was loaded, or a callback has added parameters to the optimizer, as one that thaws layers.
        changed = bool(self._loaded) or self._has_new_parameters
        others = self.record.awaited_beside(index)
        if not self._fused.buckets:
            self._fused.fuse(self._tuner.fusion)
        elif self._tuner.change_due and not others:  # whose averaged gradient is in these buckets
            self._queue.wait_all()
            self._feedpipe.wait()
            # What was loaded is to stay, and other parameters make other buckets anyway.
            if not any(self.transport.exchange_flags(changed).wait()) and self._tuner.change():
                self.return_optimizer_states()
                self._fused.change_fusion(self._tuner.fusion)
        # On some rank: nothing may be applied to these buckets.
        if self._finish_backpipe(index, CHANGED * changed) & CHANGED:
            if others:
                raise RuntimeError(
                    f"{type(self.optimizers[others[0]]).__name__} has its averaged gradient already, and since then a "
                    "state was loaded, or parameters were added to an optimizer: load, and add parameters, before the "
                    "first reduce() or clip() of a step."
                )
            self.return_optimizer_states()
            self._compare_loaded()
            self._set_parameters(self._agreed_parameters())
            self._fused.fuse(self._tuner.fusion)
            self._finish_backpipe(index)
        if self._fused.measured:
            if self._tuner.wants_candidates:
                self._tuner.compare(self._fused.candidates())
            self._fused.plan_early_gathers()
            self._tuner.restart_trial()

    def _may_start(self, parameter: Tensor) -> bool:
        """Returns whether this pass starts reduce-scatters; observes the order of gradients, too."""
        if not self.syncing:
            return False
        self._order.gradient_is_ready(parameter)
        # New buckets come after this pass; and only a step tells whose gradients are applied, if not all are.
        return self.reduces_together and not self._tuner.change_due

    def _before_first(self) -> None:
        """Blocks until no communication is in flight and all weights are up to date."""
        self._queue.wait_all()
        self._feedpipe.wait()
        if self._weights_loaded:  # what was not sent of the former ones, and of their gradients, is dropped
            self._weights_loaded = False
            self._fused.drop_residuals()
        elif self.reduces_together and self.record.stage(0) > Stage.ACCUMULATING:
            self._fused.drop_residuals(0)  # the last gradient was reduced, and not applied

    def _refuse_outdated(self) -> None:
        """Raises a RuntimeError if the first pass has left most of a gradient already, to which it would be added."""
        config = self.config
        if config.low_rank is not None or (config.uses_error_feedback and get_codec(config.compression).sparse):
            used = f"compression={config.compression!r} with error_feedback=True has encoded"
            if config.low_rank is not None:
                used = f"low_rank={config.low_rank!r} has factorized"
            raise RuntimeError(
                f"{used} this gradient already, and a further backward pass changes it: "
                "put all backward passes of a step but the last under no_sync() (in a LightningModule: "
                "self.trainer.strategy.block_backward_sync()), take each step that has begun, checkpoint a layer that "
                "runs several times with use_reentrant=False, or set error_feedback=False, or low_rank=None."
            )

    def _finish_backpipe(self, index: int, flag: int = 0) -> int:
        """Blocks until all gradients, or an optimizer's, are averaged; returns the union of all ranks' flags."""

        def exchange(flag: int) -> Queued[list[int]]:
            return self._queue.submit("flags", lambda: self.transport.exchange_flags(flag))

        flag |= END_OF_TRIAL * self._tuner.end_of_trial()
        if not self.reduces_together:  # then no pass has started any
            self._backpipe.buckets = self._fused.of_optimizer(index)
        flags = self._backpipe.finish(exchange, flag, unless=CHANGED)
        self._tuner.change_due |= bool(flags & END_OF_TRIAL)
        if flags & MISSING and not flags & CHANGED:
            self._fused.find_present()
        return flags

    def _skip(self, index: int) -> None:
        """See the base class; a pass that has started collectives has dropped the residuals by itself."""
        if not self._backpipe.in_step:
            self._fused.drop_residuals(index)

    def _complete(self, index: int, loss_scale: float | None) -> bool:
        """Unscales the averaged gradient, which is not in ``p.grad``: a loss scaler has written to that."""
        if loss_scale is None:
            return False
        for bucket in self._fused.of_optimizer(index):
            bucket.note_gradients()
        for flat in self._averaged_gradients(index):
            flat.mul_(1 / loss_scale)
        finite = [bool(torch.isfinite(flat).all()) for flat in self._gradient_shards(index)]
        self._queue.wait_all()
        return any(self.transport.exchange_flags(not all(finite)).wait())

    def clip(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Clips the averaged gradient by its L2 norm; ranks all-reduce the squared norms of their shards."""
        self._reduce_to_clip(optimizer)
        index = self._index(optimizer)
        norms = foreach_norm(self._gradient_shards(index))
        squares = torch.stack(norms).square_()  # its dtype is the same on all ranks, as the buckets'
        if self.transport.shards is not None:
            squares.div_(squares.new_tensor([copies_of(b.parameters[0]) for b in self._fused.of_optimizer(index)]))
        self._queue.wait_all()  # another optimizer's all-gathers may be in flight
        square = self.transport.all_reduce(squares.sum().reshape(1)).wait()
        if self.transport.shards is not None:
            square.fill_(self.transport.sum_over_shards(square.item()))
        norm = square.sqrt()[0]
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for flat in self._averaged_gradients(index):
            flat.mul_(factor)
        return norm

    def clip_value(self, max_value: float, optimizer: Optimizer | None = None) -> None:
        self._reduce_to_clip(optimizer)
        for flat in self._averaged_gradients(self._index(optimizer)):
            flat.clamp_(-max_value, max_value)

    def _step(self, index: int, update: Callable[[], T] | None) -> T | None:
        """Starts the update and the all-gathers; forward passes and :meth:`synchronize` wait for them."""
        stepped, result = self.user_steps.update_by_method(index, update)
        buckets = self._fused.of_optimizer(index)
        for bucket in buckets:
            bucket.forget_gradients()  # also if the step is skipped: the next ones need memory
        if stepped:
            self._feedpipe.start(buckets)
        if index == 0:
            self._tuner.note_step()
        mark_stepped(self.optimizers[index])
        self.flushed = False
        self._feedpipe.end_step()
        if self._waits:
            self.synchronize()
        return result

    def check_gradient(self, index: int) -> None:
        for bucket in self._fused.of_optimizer(index):
            bucket.check_unwritten(self._name_of, "DeAR has sent it by then, and applies the average")

    def follow(self, module: nn.Module) -> None:
        """Makes :meth:`step` wait for the weights, since their running average reads them before any forward pass.

        Its buffers become rank 0's with :meth:`flush`.
        """
        super().follow(module)
        self._waits = True

    def synchronize(self) -> None:
        """Waits until all weights are up to date; not a collective call (Listing 1)."""
        self._feedpipe.wait()

    def give_up(self, timeout_s: float = AFTER_ERROR_S) -> str:
        buckets, lost = self._fused.buckets, self._feedpipe.give_up(timeout_s)
        if not lost:
            return "those after the last step, which all ranks have"
        if lost == len(buckets) and not any(bucket.sharded for bucket in buckets):
            return "those before the last step, which all ranks had"
        return f"a mixture: {lost} of {len(buckets)} buckets are from before the last step, or parts of them"

    def flush(self) -> None:
        """Waits for the weights of synchronous training, and broadcasts the buffers of rank 0; a collective call."""
        self.synchronize()
        if any(self.transport.exchange_flags(self._backpipe.in_step).wait()):  # a pass without a step, on some rank
            self._backpipe.start_rest()
        self._queue.wait_all()  # broadcasts do not overtake what it has started
        self._compare_loaded()
        self._compare_weights()
        self._broadcast_buffers()
        self.flushed = True

    def resume(self) -> None:
        self.flushed = False

    def metrics(self) -> dict[str, float]:
        counts = {"buckets": len(self._fused.buckets), "early_gathers": self._fused.num_early}
        return {**counts, **super().metrics()}

    def summary(self, num_steps: int, before: Mapping[str, float]) -> str:
        return f"{counted(num_steps, 'step')} with gradients in {counted(len(self._fused.buckets), 'bucket')}"

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """See :meth:`SyncMethod.given_back`; within it the optimizers have their whole states.

        Otherwise they have none: each rank has the state of its shard. A state that all ranks load with
        ``optimizer.load_state_dict`` takes effect at the next step.
        """
        self.synchronize()
        before = []
        for optimizer in self.optimizers:
            with at_hand(optimizer) as states:
                before.append(dict(states))
        self.return_optimizer_states()
        try:
            with super().given_back():
                yield
        finally:
            for index, optimizer in enumerate(self.optimizers):
                if self._fused.buckets and index not in self._loaded:  # before the first step they keep their states
                    optimizer.state.clear()
                    optimizer.state.update(before[index])
                    send_away(optimizer, IN_BUCKETS)

    def state_dict(self) -> dict[str, Any]:
        """Returns fusion, search and residuals; :meth:`optimizer_state_dict` returns the optimizer's state."""
        self.synchronize()
        tuner = self._tuner.state_dict()
        return {"settings": self._shape_settings(), "tuner": tuner, **self._fused.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from what :meth:`state_dict` returned on this rank, after weights and optimizers were loaded.

        If the optimizers had other parameters then, buckets, search and residuals begin anew.

        Raises:
            ValueError: the state is of other settings, or of another number of ranks.
        """
        present = self._shape_settings()
        saved = state["settings"]
        as_many = len(saved["sharded"]) == len(present["sharded"])
        if as_many and not (saved["error_feedback"] or present["error_feedback"]):
            present["sharded"] = saved["sharded"]  # no residuals of shards or of whole weights
        check_saved(saved, present, "to begin without its residuals and its search")
        if self._has_new_parameters:
            self._set_parameters(self._agreed_parameters())
        self._fused.load_state_dict(state)
        if self._fused.buckets:  # otherwise the search is of other parameters, or has not begun
            self._tuner.load_state_dict(state["tuner"])
        self._loaded.clear()
        self._weights_loaded = False  # before the residuals of the checkpoint

    def return_optimizer_states(self) -> None:
        """Sets the whole state of the optimizers, which :meth:`detach` would drop; a collective call."""
        self.synchronize()
        for index, optimizer in enumerate(self.optimizers):
            states = self._fused.optimizer_states(index)
            if index not in self._loaded:  # maybe on this rank alone
                bring_back(optimizer)
                optimizer.state.update(states)

    def _bring_back_states(self) -> None:
        for optimizer in self.optimizers:
            bring_back(optimizer)

    def _release_buckets(self, timeout_s: float) -> None:
        self._queue.close(timeout_s)  # which may still write to them
        self._fused.release()

    def _note_loading(self, loaded: nn.Module | Optimizer, *_: object) -> None:
        """See the base class; the next step starts from a loaded state, as the first buckets always do."""
        super()._note_loading(loaded)
        if not isinstance(loaded, Optimizer):
            self._weights_loaded = True
        elif self._fused.buckets:
            self._loaded.add(self._index(loaded))

    def _set_parameters(self, parameters: Sequence[NamedParameter]) -> None:
        """Trains the parameters that an optimizer has, in buckets that the next step makes."""
        trained = [parameter for parameter in parameters if parameter.group]
        self._fused.reset(trained)
        self._tuner.begin(trained)
        self._loaded.clear()
        self._backpipe.hook_gradients(parameter.tensor for parameter in trained)

    def _gradient_shards(self, index: int) -> list[Tensor]:
        return [bucket.gradient_shard for bucket in self._fused.of_optimizer(index)]

    def _averaged_gradients(self, index: int) -> list[Tensor]:
        """Returns what this rank has of the averaged gradient: its shards, and all that is gathered."""
        return [values for bucket in self._fused.of_optimizer(index) for values in bucket.averaged]

    @property
    def _effective_config(self) -> DeARConfig:
        """The settings. Several optimizers may step at different times: nothing is gathered before, or simulated.

        What a replica of several ranks has divided already is not divided again; its ranks, which exchange with
        different ones, would end their trials of bucket sizes at different steps.
        """
        config = self.config
        several, sharded = len(self.optimizers) > 1, self._sharded is not None
        if config.chooses_fusion and (several or sharded):
            config = replace(config, fusion="buffer")
        if several and config.overlap == "eager":
            config = replace(config, overlap="forward")
        return replace(config, update="replicated") if sharded else config

    def _shape_settings(self) -> dict[str, Any]:
        """Returns the settings that determine the structure of :meth:`state_dict`."""
        sharded = [self._effective_config.shards(optimizer) for optimizer in self.optimizers]
        with_residuals = self.config.uses_error_feedback
        return {
            "sharded": sharded,
            "compression": str(self.config.compression),
            "error_feedback": with_residuals,
            "world_size": self.transport.world_size,
            **self.config.low_rank_settings,
            **({"topology": str(self.transport.topology)} if with_residuals else {}),
        }

    def _check_support(self) -> None:
        self._shape_settings()
        for optimizer in self.optimizers:
            if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
                raise ValueError(
                    f"{type(optimizer).__name__} wraps another optimizer, which DeAR would not reach: pass that one."
                )
        if self._sharded is not None and self.config.update == "sharded":
            raise ValueError(
                "update='sharded' divides what a replica of several ranks has divided already: set "
                "update='replicated', or None, with replicas=."
            )
        super()._check_support()
