"""The runtime of EA-Pipe: a pipeline in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.comm.collectives import Collectives
from lightning_pipesync.core.comm.exchange import exchange_fused
from lightning_pipesync.core.comm.handle import Handle
from lightning_pipesync.core.comm.objects import Objects
from lightning_pipesync.core.comm.traffic import Traffic
from lightning_pipesync.core.comm.transport import Transport
from lightning_pipesync.core.consistency import check_same, describe, on_all_ranks
from lightning_pipesync.core.held_weights import HeldWeights, check_held
from lightning_pipesync.core.parameters import NamedParameter, check_values, collect_parameters, device_of
from lightning_pipesync.core.rng import seeded
from lightning_pipesync.methods.ea_pipe.channels import (
    Channels,
    Schedule,
    line_of,
    make_channels,
    make_transport,
    places_of,
    rank_of,
)
from lightning_pipesync.methods.ea_pipe.config import SYNCHRONOUS, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.split import ModelSplit, SequentialSplit, numbers_of_parameters
from lightning_pipesync.methods.ea_pipe.stage import Loss, ModelStage, OptimizerFactory, Source
from lightning_pipesync.methods.ea_pipe.traced import TracedSplit
from lightning_pipesync.methods.ea_pipe.weights import mean_state
from lightning_pipesync.methods.method import PIECE_MB, Method, counted, network_metrics
from lightning_pipesync.methods.settings import check_launch, config_from, overridden, warn_of_one_rank

#: The settings that determine the structure of a state.
SAVED = ("algorithm", "replicas", "split_names", "num_pipelines", "average", "neighbors")


class EAPipe(Method):
    """Trains a model as a pipeline without bubbles, with one stage in each process.

    Mini-batches follow each other without a flush. Each mini-batch in flight has a separate replica of the weights, and
    replicas and master are pulled together (paper, Algorithm 1). All processes make the same calls. Rank 0 has the last
    stage, which computes the loss, and the last rank has the first stage. A step is :meth:`train_batch`; or, for a
    framework, :meth:`feed`, :meth:`backward`, and :meth:`step` if that returned True. A plain loop::

        engine = EAPipe(layers, nn.functional.cross_entropy, lambda parameters: SGD(parameters, lr=0.1))
        for x, y in loader:                       # the same batches on all ranks
            loss = engine.train_batch((x, y))     # None except on rank 0
        engine.flush()                            # the pipeline is empty, the layers hold the master's weights
        layers.eval()
        predictions = engine.forward(x)           # None except on rank 0
        engine.gather()                           # all ranks have all layers, not only those of their stage
        engine.detach()

    Args:
        layers: the model, the same on all ranks: an ``nn.Sequential``, whose layers of other stages stay on the host;
            or any other module, which is traced, if ``split`` names submodules.
        loss: returns the loss, 0-dim, for an output and a target; None: it is an argument of :meth:`feed`.
        optimizer_factory: returns the optimizer of a stage's parameters; None: the model is not trained.
        config: the settings; or pass them as keywords, see :class:`EAPipeConfig`.
        others: parameters and buffers that the loss uses; they belong to the last stage.
        virtual_stages: the number of stages that run in this process, without ``torch.distributed``; the results are
            the same bit for bit.
        device: the device of this rank's stage; None: that of the layers.
        backend: the backend of the transport, see :class:`Transport`.

    Attributes:
        config: the settings.
        num_stages: the number of stages, N.
        transport: the transport to the other ranks; None for virtual stages.
        flushed: whether the pipeline is empty and the weights are the master's.

    Raises:
        ValueError: the ranks differ in settings or model, or the model or optimizer is not supported.
        RuntimeError: ``torch.distributed`` is not initialized.
    """

    name = "ea_pipe"
    makes_passes = True
    config_type = EAPipeConfig
    config: EAPipeConfig

    def __init__(
        self,
        layers: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        optimizer_factory: OptimizerFactory | None,
        config: EAPipeConfig | None = None,
        *,
        others: Sequence[Tensor] = (),
        virtual_stages: int | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        **settings: Any,
    ) -> None:
        self.config = config_from(EAPipeConfig, config, settings)
        check_launch(type(self).__name__, self.config)
        if optimizer_factory is None:  # one version of the weights is enough
            changed = {"algorithm": "naive", "average": "gradients", "clip_norm": None}
            self.config = EAPipeConfig(**overridden(EAPipeConfig, vars(self.config), changed))
        self._model, self._loss, self._optimizer_factory = layers, loss, optimizer_factory
        self._others = list(others)
        self._device = device_of(layers) if device is None else torch.device(device)
        self._to_resume: dict[str, Any] | None = None
        self._stages: list[ModelStage] = []
        self.flushed, self._checked, self._gathered = True, False, False
        self.transport: Transport | None = None
        self._traffic = Traffic()
        self._job: Objects | None = None
        self._line: Transport | None = None  # of this stage in several pipelines
        if virtual_stages is None:
            self.transport = make_transport(self._device, self.config, backend)
            self._traffic = self.transport.traffic
            self.transport.end_other_waits()
            self._job, self._pipeline = self.transport.job, places_of(self.transport)
            self._line = self.transport if self.config.num_pipelines > 1 else None
            self.num_stages = self._pipeline.world_size
        elif self.config.num_pipelines > 1:
            raise ValueError(
                f"num_pipelines={self.config.num_pipelines!r} needs a process for each stage of each pipeline, and "
                "virtual_stages= has them in one: set num_pipelines=1."
            )
        elif self.config.algorithm in SYNCHRONOUS:
            raise ValueError(
                f"algorithm={self.config.algorithm!r} has no virtual stages, since it is SGD with larger batches: "
                "train the model without a pipeline."
            )
        else:
            self.num_stages = virtual_stages
        try:
            self._prepare()
        except ValueError:
            self.detach()
            raise
        if self._job is not None:
            warn_of_one_rank(type(self).__name__, self._job.world_size)

    def train_batch(self, batch: tuple[Any, Any], *, completes: bool = True) -> Tensor | None:
        """Runs the next passes of the pipeline for a mini-batch, or a part of one, and the updates that are due.

        Args:
            batch: input and target. Only the first stage uses the input, only the last one the target.
            completes: whether this is the last part of the mini-batch.

        Returns:
            The loss, 0-dim and detached, on the rank of the last stage; None on others.
        """
        inputs, target = batch
        assert self._loss is not None
        criterion = self._loss
        loss = self.feed(lambda: inputs, lambda output, part: criterion(output, part(target)), completes=completes)
        if self.backward():
            self.step()
        return loss

    def feed(self, source: Source, loss: Loss, *, completes: bool = True, digest: int | None = None) -> Tensor | None:
        """Runs the forward pass of the next mini-batch, or of a part of one; returns as :meth:`train_batch`.

        ``source`` is called on the rank of the first stage, ``loss`` on that of the last one. If ``digest`` is that of
        the batch, it is compared between these.

        Raises:
            RuntimeError: the first and the last stage have different batches, or a peer is lost.
        """
        self._begin(source)
        self.flushed = self._gathered = False
        result = None
        for stage in self._stages:
            result = stage.forward(source, loss, completes=completes, digest=digest)
        return result

    def backward(self) -> bool:
        """Runs the backward passes that are due after :meth:`feed`.

        Returns:
            Whether the gradient of a mini-batch is complete, in ``p.grad``: then call :meth:`step`.

        Raises:
            RuntimeError: the loss depends on another stage's layers, or a peer is lost.
        """
        complete = [stage.backward() for stage in reversed(self._stages)]
        if any(complete) and self.transport is not None and not self._checked:
            self._check_gradients()
        return any(complete)

    def step(self, optimizer_step: Callable[[], object] | None = None) -> None:
        """Applies the complete gradient by ``optimizer_step``, maybe later; None: the step of the stage's optimizer."""
        for stage in reversed(self._stages):
            if stage.is_complete:
                stage.update(optimizer_step)

    def flush(self, step: Callable[[], object] | None = None) -> None:
        """Empties the pipeline, and loads the consolidated weights into the layers of this rank's stage.

        ``step`` is called in place of :meth:`step`, which it calls, when the gradient of a mini-batch is complete.
        """
        # A framework may have turned gradients off for a validation that follows.
        with torch.inference_mode(False), torch.enable_grad():
            for stage in reversed(self._stages):
                stage.finish_backward(step or self.step)
            with self._traffic.beside_steps():
                for stage in self._stages:
                    stage.finish()
        if not self.flushed and self._line is not None:
            part = rank_of(self._pipeline.rank, self.num_stages)
            self._compare_weights(self._split.tensors_of(part), part, self._line, self._pipeline)
        self.flushed = True

    def forward(self, inputs: Any) -> Any:
        """Runs the consolidated model as :meth:`infer` does, on ``inputs``."""
        return self.infer(lambda: inputs)

    def infer(self, source: Source) -> Any:
        """Runs the consolidated model without gradients; returns its output on the rank of the last stage."""
        self.flush()
        self._begin(source)
        output = None
        with self._traffic.beside_steps():
            for stage in self._stages:
                output = stage.infer(source)
        return output

    def gather(self) -> None:
        """Flushes, and broadcasts the master's layers of all stages to all ranks, unless they have them."""
        self.flush()
        if self.transport is None or not self.cuts or self._gathered:
            return
        self._gathered = True
        broadcast_from = partial(_broadcast_by, self._pipeline)
        with self._traffic.beside_steps():
            for stage in range(self.num_stages):
                broadcast = partial(broadcast_from, src=rank_of(stage, self.num_stages))
                # Through .data, so that autograd's version counters do not count this as a write to the master.
                exchange_fused([tensor.data for tensor in self._split.tensors_of(stage)], PIECE_MB, broadcast)
            exchange_fused([tensor.data for tensor in self._others], PIECE_MB, broadcast_from)  # with the last stage
        self._compare_weights(self._model.parameters(), 0, self._pipeline, self._line)

    @property
    def data_part(self) -> tuple[int, int]:
        """Which part of the training data this rank's pipeline trains on, from 0 on, and the number of parts."""
        return (0, 1) if self._job is None else self.config.data_part(self._job.rank, self._job.world_size)

    @property
    def cuts(self) -> list[int]:
        """The indices of the first layers of all stages but the first; empty before the first batch."""
        return self._split.cuts

    def describe(self) -> str:
        """Returns a line per stage that names its layers; an empty text before the first batch."""
        lines = []
        for stage in range(self.num_stages if self._stages else 0):
            first, *_, last = self._split.named_layers_of(stage) * 2
            names = " to ".join(dict.fromkeys([first[0], last[0]]))
            values = sum(numbers_of_parameters(self._split.layers_of(stage)))
            ranks = line_of(rank_of(stage, self.num_stages), self.num_stages, self.config)
            place = f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if self.transport else ""
            lines.append(f"stage {stage + 1} of {self.num_stages}{place}: layers {names}, {values:,.0f} parameters")
        return "\n".join(lines)

    def metrics(self) -> dict[str, float]:
        """Returns the MiB that this rank has sent, and the seconds that it has waited for others; 0 for virtual stages.

        It does not count the steps of ``gpipe`` and ``1f1b``, in which PyTorch's schedules communicate.
        """
        return network_metrics(self._traffic)

    def summary(self, num_steps: int, before: Mapping[str, float]) -> str:
        count = self.config.num_pipelines
        of_each = f" of each of {count} pipelines" if count > 1 else ""
        return f"{num_steps} mini-batches through {counted(self.num_stages, 'stage')}{of_each}"

    @property
    def counts_traffic(self) -> bool:
        return self.config.algorithm not in SYNCHRONOUS

    def state_dict(self) -> dict[str, Any]:
        """Flushes, and returns the state to resume the stages of this process bit for bit."""
        if self._to_resume is not None:
            return self._to_resume
        self.flush()
        settings = {name: getattr(self.config, name) for name in SAVED}
        return {"settings": settings, "cuts": self.cuts, "stages": [stage.state_dict() for stage in self._stages]}

    def optimizer_state(self) -> dict[int, Any]:
        """Returns the state of this rank's optimizer by the index of the parameter; a collective call.

        It is the mean over the replicas and the pipelines, of which the ranks of the first one get it, the others
        nothing.
        """
        own = self._stages[0].weights.optimizer_state() if self._stages else {}
        if self._line is None:
            return own
        of_pipelines = [part["own"] for part in self._line.collect_states({"own": own}) or []]
        return mean_state(of_pipelines if self.config.average == "elastic" else of_pipelines[:1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from the result of :meth:`state_dict` on this rank; traced stages resume at the first batch.

        Mini-batches in flight are ended first.

        Raises:
            ValueError: the state is of other stages, another algorithm or another number of replicas.
        """
        self.flush()
        self._gathered, self._to_resume = False, None
        if not state["stages"]:  # it was saved before the first mini-batch
            for stage in self._stages:
                stage.reset()
            return
        for name, saved in state["settings"].items():
            if saved != getattr(self.config, name):
                raise ValueError(
                    f"The state was saved with {name}={saved!r}, and this training has "
                    f"{name}={getattr(self.config, name)!r}: set the saved value, or begin from the weights alone."
                )
        if len(state["cuts"]) != self.num_stages - 1:
            raise ValueError(f"The state is of {len(state['cuts']) + 1} stages, and there are {self.num_stages}.")
        if not self._stages and not self._split.layers:
            self._to_resume = state
            return
        if not self._stages:
            self._make_stages(lambda: state["cuts"])
        elif self.cuts != state["cuts"]:
            raise ValueError(
                f"The state is of stages that begin with layers {state['cuts']}, and those of this training begin with "
                f"{self.cuts}: load it before the first mini-batch."
            )
        for stage, saved in zip(self._stages, state["stages"], strict=True):
            stage.load_state_dict(saved)

    def _detach(self, timeout_s: float) -> None:
        for stage in self._stages:
            stage.close(timeout_s)
        if self.transport is not None:
            self.transport.close(timeout_s)

    def _prepare(self) -> None:
        """Checks that all ranks train the same model, and broadcasts rank 0's weights."""

        def check() -> tuple[ModelSplit, list[NamedParameter]]:
            staged = self.transport is not None and self.transport.backend == "gloo" and self._device.type == "cuda"
            if staged and self.config.algorithm in SYNCHRONOUS:
                raise ValueError(
                    f"algorithm={self.config.algorithm!r} runs on PyTorch's schedules, which send CUDA tensors, and "
                    "backend='gloo' cannot: use backend='nccl', or another algorithm."
                )
            split: ModelSplit
            if isinstance(self._model, nn.Sequential) and self.config.split_names is None:
                split = SequentialSplit(self._model, self.config, self.num_stages, self._device)
            else:
                split = TracedSplit(self._model, self.config, self.num_stages, self._device)
            check_values(self._model)
            return split, collect_parameters(self._model, [])

        self._split, parameters = on_all_ranks(self._job, check)
        if self.transport is not None:
            check_same(self.transport.job, describe(self.config, parameters, self._model))
            tensors = [*self._model.parameters(), *self._model.buffers(), *self._others]
            with self._traffic.beside_steps():
                for collectives in dict.fromkeys([self.transport, self._pipeline]):  # along a line, and from it
                    exchange_fused(tensors, PIECE_MB, partial(_broadcast_by, collectives))

    def _check_gradients(self) -> None:
        """Raises a RuntimeError if the loss depends on another stage's layer directly: its gradient would be lost."""
        self._checked = True
        stage = rank_of(self._pipeline.rank, self.num_stages)
        held = {id(tensor) for tensor in self._split.tensors_of(stage)}
        for name, layer in self._split.layers:
            if any(parameter.grad is not None and id(parameter) not in held for parameter in layer.parameters()):
                raise RuntimeError(
                    f"The loss depends directly on the parameters of layer {name}, which is on another stage: compute "
                    "it from the output of the layers, and leave a penalty on weights to the optimizer's weight_decay."
                )

    def _begin(self, source: Source) -> None:
        """Makes the stages at the first call, which is a collective call."""
        if self._stages:
            return
        first = rank_of(0, self.num_stages)

        def inspect() -> Any:
            if self._job is not None and self._pipeline.rank != first:
                return None
            with torch.inference_mode(False), torch.enable_grad(), seeded(self.config.seed, 0, None, self._device):
                return self._split.inspect(source)

        try:
            inspected = on_all_ranks(self._job, inspect)
            if self._job is not None:
                inspected = self._job.broadcast_object(inspected, line_of(first, self.num_stages, self.config)[0])
            self._make_stages(lambda: self._split.choose(inspected))
        except ValueError:
            self.detach()  # as where the constructor refuses something
            raise
        if self._to_resume is not None:
            self.load_state_dict(self._to_resume)

    def _make_stages(self, choose_cuts: Callable[[], list[int]]) -> None:
        on_all_ranks(self._job, lambda: self._split.cut(choose_cuts()))
        if self._job is not None:
            stage_of = {id(t): stage for stage in range(self.num_stages) for t in self._split.tensors_of(stage)}
            named = [*self._model.named_parameters(), *self._model.named_buffers()]
            check_same(self._job, [(f"the stage of {name}", str(stage_of[id(t)] + 1)) for name, t in named])
        channels = make_channels(self.transport, self.num_stages, self.config)
        try:
            with torch.inference_mode(False):  # the first batch may belong to a validation
                self._stages = on_all_ranks(self._job, lambda: [self._make_stage(*stage) for stage in channels])
        except ValueError:
            for _, own in channels:
                own.close(timeout_s=1.0)
            raise

    def _make_stage(self, index: int, channels: Channels) -> ModelStage:
        others = self._others if index == self.num_stages - 1 else []
        schedule = Schedule(index, self.num_stages, self.config.replicas or self.num_stages)
        kind: Callable[..., ModelStage] = ModelStage
        if self.transport is not None and self.config.algorithm in SYNCHRONOUS:
            from lightning_pipesync.methods.ea_pipe.microbatched import MicroBatchedStage  # which takes a second

            kind = partial(MicroBatchedStage, transport=self.transport)
        layers = self._split.layers_of(index)
        pipeline = 0 if self._line is None else self._line.rank  # each draws random numbers of its own
        config = replace(self.config, seed=self.config.seed + pipeline)
        return kind(layers, others, self._optimizer_factory, schedule, config, channels, self._device, self._line)

    def _compare_weights(
        self, tensors: Iterable[Tensor], part: int, among: Collectives, beside: Collectives | None
    ) -> None:
        """Compares parameters of the master, see :func:`check_held`; a collective call of all ranks."""
        assert self._job is not None
        chosen = set(map(id, tensors))
        named = [(name, parameter) for name, parameter in self._model.named_parameters() if id(parameter) in chosen]
        with self._traffic.beside_steps():
            check_held(self._job, HeldWeights.of_this_process(self._job.rank, named, part), among, beside)


def _broadcast_by(collectives: Collectives, flat: Tensor, src: int = 0) -> Handle[Tensor]:
    """Broadcasts ``flat`` through the host, because only the rank of its stage has it on a device."""
    handle = collectives.broadcast(flat.cpu(), src)
    return Handle(lambda: flat.copy_(handle.wait()))
