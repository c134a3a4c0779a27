"""EA-Pipe in a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync.core.buckets import MIB
from lightning_pipesync.core.consistency import check_consistency, check_same, raise_on_all_ranks
from lightning_pipesync.core.exchange import exchange_fused
from lightning_pipesync.core.handle import Handle
from lightning_pipesync.core.parameters import check_optimizer, collect_parameters
from lightning_pipesync.core.traffic import Traffic
from lightning_pipesync.core.transport import Transport
from lightning_pipesync.methods.ea_pipe import split
from lightning_pipesync.methods.ea_pipe.config import SYNCHRONOUS, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.division import Division, division_of
from lightning_pipesync.methods.ea_pipe.links import Links, make_links, rank_of
from lightning_pipesync.methods.ea_pipe.microbatched import MicroBatchedStage, part_of
from lightning_pipesync.methods.ea_pipe.randomness import drawing
from lightning_pipesync.methods.ea_pipe.schedule import Schedule
from lightning_pipesync.methods.ea_pipe.stage import Loss, Source, Stage
from lightning_pipesync.methods.method import device_of, one_config, warn_of_ignored

T = TypeVar("T")
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

#: MiB that travel in one piece before the training.
PIECE_MB = 25.0


class EAPipe:
    """Trains a model as a pipeline: a stage of it in each process, and no bubble.

    Mini-batches follow each other at once; each in flight has a replica of the weights of its own, and replicas and
    master are pulled together (paper, Algorithm 1). All processes make the same calls. Rank 0 has the last stage: it
    computes the loss, and the last rank has the first stage. A plain loop::

        engine = EAPipe(layers, nn.functional.cross_entropy, lambda parameters: SGD(parameters, lr=0.1))
        for x, y in loader:                       # the same batches on all ranks
            loss = engine.train_batch((x, y))     # None but on rank 0
        engine.flush()                            # the pipeline is empty, the layers hold the master's weights
        layers.eval()
        predictions = engine.forward(x)           # None but on rank 0
        engine.gather()                           # all layers on all ranks, not only their own
        engine.detach()

    Args:
        layers: the model, the same on all ranks: an ``nn.Sequential``, of which the layers of other stages stay as they
            are, on the host; or any other module, if ``split`` names submodules, which is traced.
        loss: returns the loss, 0-dim, for an output and a target; None: each call of :meth:`feed` brings its own.
        optimizer_factory: returns the optimizer of a stage's parameters.
        config: the settings; or give them as keywords, see :class:`EAPipeConfig`.
        others: parameters and buffers that the loss uses; they belong to the last stage.
        device: where this rank's stage goes; None: where the layers are.
        virtual_stages: run so many stages in this process, and none elsewhere: the same results bit for bit, and no
            need for ``torch.distributed``.
        backend: of the traffic, see :class:`Transport`.

    Attributes:
        config: the settings.
        num_stages: N.
        transport: the way to the other ranks; None for virtual stages.
        cuts: indices of the first layers of all stages but the first; empty before the first batch. What is traced has
            one layer for each stage.
        flushed: whether the pipeline is empty and the weights are the master's.

    Raises:
        ValueError: the ranks differ in settings or model, or the model or optimizer is one that cannot be trained so.
        RuntimeError: ``torch.distributed`` is not initialized.
    """

    def __init__(
        self,
        layers: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        optimizer_factory: OptimizerFactory,
        config: EAPipeConfig | None = None,
        *,
        others: Sequence[Tensor] = (),
        virtual_stages: int | None = None,
        device: torch.device | str | None = None,
        backend: str | None = None,
        **settings: Any,
    ) -> None:
        self.config = one_config(EAPipeConfig, config, settings)
        self._model, self._loss, self._optimizer_factory = layers, loss, optimizer_factory
        self._others = list(others)
        self._device = device_of(layers) if device is None else torch.device(device)
        self._division: Division
        self._to_resume: dict[str, Any] | None = None
        self.cuts: list[int] = []
        self._stages: list[Stage] = []
        self.flushed, self._checked, self._gathered = True, False, False
        self.transport: Transport | None = None
        if virtual_stages is None:
            self.transport = Transport(self._device, timeout_s=self.config.timeout_s, backend=backend)
            self.num_stages = self.transport.world_size
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
        warn_of_ignored(self.config, 0 if self.transport is None else self.transport.rank)

    def train_batch(self, batch: tuple[Any, Any], *, completes: bool = True) -> Tensor | None:
        """Feeds the pipeline one mini-batch, or a part of one, and makes the updates that are due by then.

        Args:
            batch: input and target. Only the first stage uses the input, only the last one the target.
            completes: whether the gradient of the mini-batch is complete with it.

        Returns:
            The loss, 0-dim and detached, where the last stage is; None elsewhere.
        """
        inputs, target = batch
        assert self._loss is not None
        criterion = self._loss
        loss = self.feed(
            lambda: inputs,
            lambda output, index, count: criterion(output, part_of(target, index, count)),
            completes=completes,
        )
        for stage in self.backward():
            stage.update()
        return loss

    def feed(self, source: Source, loss: Loss, *, completes: bool = True, digest: int | None = None) -> Tensor | None:
        """Makes the forward pass of the next mini-batch, or of a part of one: the first half of :meth:`train_batch`.

        Args:
            source: returns the input of the first layer; called where the first stage is.
            loss: returns the loss; called where the last stage is.
            completes: whether the gradient of the mini-batch is complete with it.
            digest: tells this batch from others; compared, unless None, between the first and the last stage.

        Returns:
            The loss, 0-dim and detached, where the last stage is; None elsewhere.

        Raises:
            RuntimeError: the first and the last stage have different batches, or a peer is lost.
        """
        self._begin(source)
        self.flushed = self._gathered = False
        result = None
        for stage in self._stages:
            result = stage.forward(source, loss, completes=completes, digest=digest)
        return result

    def backward(self) -> list[Stage]:
        """Makes the backward passes that are due after :meth:`feed`: the second half of :meth:`train_batch`.

        Returns:
            The stages where the gradient of a mini-batch is complete: ``p.grad`` holds it, and their update follows.

        Raises:
            RuntimeError: the loss depends on another stage's layers, or a peer is lost.
        """
        complete = [stage for stage in reversed(self._stages) if stage.backward()]
        if complete and self.transport is not None and not self._checked:
            self._check_gradients()
        return complete

    def flush(self, update: Callable[[Stage], object] = Stage.update) -> None:
        """Empties the pipeline, and has the layers of this rank's stage hold the master's weights.

        Args:
            update: called when the gradient of a mini-batch is complete in a stage.
        """
        # A validation may be about to begin, for which a framework has turned gradients off.
        with torch.inference_mode(False), torch.enable_grad():
            for stage in reversed(self._stages):
                stage.finish_backward(partial(update, stage))
            for stage in self._stages:
                stage.finish()
        self.flushed = True

    def forward(self, inputs: Any) -> Any:
        """Runs the master model; returns its output where the last stage is, None elsewhere. No gradients."""
        return self.infer(lambda: inputs)

    def infer(self, source: Source) -> Any:
        """Runs the master model on the result of ``source``; otherwise as :meth:`forward`."""
        self.flush()
        self._begin(source)
        output = None
        for stage in self._stages:
            output = stage.infer(source)
        return output

    def gather(self) -> None:
        """Copies the master's layers of all stages to all ranks, after :meth:`flush`, unless they have them already."""
        self.flush()
        if self.transport is None or not self.cuts or self._gathered:
            return
        self._gathered = True
        for stage in range(self.num_stages):
            layers = nn.ModuleList(self._layers_of(stage))
            broadcast = partial(self._broadcast, src=rank_of(stage, self.num_stages))
            # Nobody writes to the master's own: autograd, which tells that, does not see their data.
            exchange_fused([tensor.data for tensor in _tensors_of(layers)], PIECE_MB, broadcast)
        exchange_fused([tensor.data for tensor in self._others], PIECE_MB, self._broadcast)  # of rank 0, like the loss

    def describe(self) -> str:
        """Returns which layers each stage has, a line for each; nothing before the first batch."""
        bounds = [0, *self.cuts, len(self._division.layers)] if self._stages else []
        lines = []
        for stage, (start, end) in enumerate(pairwise(bounds)):
            values = sum(split.numbers_of_parameters(self._layers_of(stage)))
            place = "" if self.transport is None else f" on rank {rank_of(stage, self.num_stages)}"
            names = " to ".join(dict.fromkeys([self._division.layers[start][0], self._division.layers[end - 1][0]]))
            lines.append(f"stage {stage + 1} of {self.num_stages}{place}: layers {names}, {values:,.0f} parameters")
        return "\n".join(lines)

    def metrics(self) -> dict[str, float]:
        """Returns the MiB that this rank has sent, and the seconds that it has waited for others; 0 if all are here.

        What ``gpipe`` and ``1f1b`` send in a step is not in it: PyTorch's own schedules do.
        """
        traffic = Traffic() if self.transport is None else self.transport.traffic
        return {"mib_sent": traffic.total_bytes_sent / MIB, "exposed_seconds": traffic.total_seconds_waited}

    def state_dict(self) -> dict[str, Any]:
        """Returns what the stages of this process need to go on bit for bit; empties the pipeline first."""
        if self._to_resume is not None:
            return self._to_resume
        self.flush()
        settings = {name: getattr(self.config, name) for name in ("algorithm", "replicas", "split_names")}
        return {"settings": settings, "cuts": self.cuts, "stages": [stage.state_dict() for stage in self._stages]}

    def optimizer_state(self) -> dict[int, Any]:
        """Returns the state of this rank's optimizer by the number of the parameter: the mean over the replicas."""
        return self._stages[0].weights.optimizer_state() if self._stages else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what :meth:`state_dict` returned on this rank, with its cuts.

        The stages of a traced model are made with the first mini-batch, and load it then.

        Raises:
            ValueError: the state is of another number of stages, or of other ones than there are already, or of
                another algorithm or number of replicas.
        """
        self._gathered, self._to_resume = False, None
        if not state["stages"]:  # it was saved before the first mini-batch
            for stage in self._stages:
                stage.begin_anew()
            return
        for name, saved in state["settings"].items():
            if saved != getattr(self.config, name):
                raise ValueError(
                    f"The state was saved with {name}={saved!r}, and this training has "
                    f"{name}={getattr(self.config, name)!r}: set it as it was, or begin from the weights alone."
                )
        if len(state["cuts"]) != self.num_stages - 1:
            raise ValueError(f"The state is of {len(state['cuts']) + 1} stages, and there are {self.num_stages}.")
        if not self._stages and not self._division.layers:
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

    def detach(self, timeout_s: float = 10.0) -> None:
        """Ends the threads and process groups. The weights stay as they are."""
        for stage in self._stages:
            stage.close(timeout_s)
        if self.transport is not None:
            self.transport.close(timeout_s)

    def _prepare(self) -> None:
        """Checks that all ranks are about to train the same model, and gives them rank 0's weights."""
        self._division = self._on_all_ranks(
            lambda: division_of(self._model, self.config, self.num_stages, self._device)
        )
        parameters = self._on_all_ranks(lambda: collect_parameters(self._model, []))
        if self.transport is not None:
            check_consistency(self.transport, self.config, parameters, self._model)
            exchange_fused(_tensors_of(self._model), PIECE_MB, self._broadcast)
            exchange_fused(self._others, PIECE_MB, self._broadcast)

    def _check_gradients(self) -> None:
        """Checks that the loss of the first mini-batch has left other stages' layers alone.

        Raises:
            RuntimeError: it has not: what it adds to their gradient is in this process, and would be lost.
        """
        self._checked = True
        own = {id(layer) for layer in self._layers_of(rank_of(self.transport.rank, self.num_stages))}  # type: ignore[union-attr]
        for name, layer in self._division.layers:
            if id(layer) not in own and any(parameter.grad is not None for parameter in layer.parameters()):
                raise RuntimeError(
                    f"The loss depends on the parameters of layer {name} itself, which is on another stage: compute it "
                    "from the output of the layers, and leave a penalty on weights to the optimizer's weight_decay."
                )

    def _broadcast(self, flat: Tensor, src: int = 0) -> Handle[Tensor]:
        """Copies a rank's ``flat`` to all ranks, through the host: it is on a device where its stage is only."""
        assert self.transport is not None
        handle = self.transport.broadcast(flat.cpu(), src)
        return Handle(lambda: flat.copy_(handle.wait()))

    def _begin(self, source: Source) -> None:
        """Makes the stages, if that has not been done: a collective call."""
        if self._stages:
            return
        seen = self._of_first_stage(lambda: self._division.look(source))
        self._make_stages(lambda: self._division.cut(seen))
        if self._to_resume is not None:
            self.load_state_dict(self._to_resume)

    def _of_first_stage(self, function: Callable[[], Any]) -> Any:
        """Returns what ``function`` returns where the first stage is, on all ranks."""
        first = rank_of(0, self.num_stages)

        def find() -> Any:
            if self.transport is not None and self.transport.rank != first:
                return None
            with torch.inference_mode(False), torch.enable_grad(), drawing(self.config.seed, 0, None, self._device):
                return function()

        found = self._on_all_ranks(find)
        return found if self.transport is None else self.transport.gather_objects(found)[first]

    def _make_stages(self, choose_cuts: Callable[[], list[int]]) -> None:
        self.cuts = self._on_all_ranks(
            lambda: split.checked_cuts(choose_cuts(), self._division.layers, self.num_stages)
        )
        if self.transport is not None:
            check_same(self.transport, self._places())
        links = make_links(self.transport, self.num_stages, self.config)
        with torch.inference_mode(False):  # the first batch may be one to validate with
            self._stages = self._on_all_ranks(lambda: [self._make_stage(*one) for one in links])

    def _places(self) -> list[tuple[str, str]]:
        """Returns on which stage each parameter and buffer is."""
        places = {
            id(tensor): n for n in range(self.num_stages) for tensor in _tensors_of(nn.ModuleList(self._layers_of(n)))
        }
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        return [(f"the stage of {name}", str(places[id(tensor)] + 1)) for name, tensor in named]

    def _make_stage(self, index: int, links: Links) -> Stage:
        layers = nn.Sequential(*self._layers_of(index))
        layers.to(self._device)
        others = self._others if index == self.num_stages - 1 else []
        parameters = [*layers.parameters(), *(tensor for tensor in others if isinstance(tensor, nn.Parameter))]
        buffers = [*layers.buffers(), *(tensor for tensor in others if not isinstance(tensor, nn.Parameter))]
        trained = any(parameter.requires_grad for parameter in parameters)
        optimizer = self._optimizer_factory(parameters) if trained else nothing_to_optimize()
        check_optimizer(optimizer)
        schedule = Schedule(index, self.num_stages, self.config.replicas or self.num_stages)
        if self.config.algorithm not in SYNCHRONOUS:
            return Stage(layers, parameters, buffers, optimizer, schedule, self.config, links, self._device)
        assert self.transport is not None
        return MicroBatchedStage(
            layers, parameters, buffers, optimizer, schedule, self.config, links, self._device, transport=self.transport
        )

    def _layers_of(self, stage: int) -> list[nn.Module]:
        bounds = [0, *self.cuts, len(self._division.layers)]
        return [layer for _, layer in self._division.layers[bounds[stage] : bounds[stage + 1]]]

    def _on_all_ranks(self, function: Callable[[], T]) -> T:
        """Returns what ``function`` returns; the ``ValueError`` of one rank is raised on all of them."""
        if self.transport is None:
            return function()
        try:
            result = function()
        except ValueError as error:
            raise_on_all_ranks(self.transport, error)
            raise
        raise_on_all_ranks(self.transport, None)
        return result


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def nothing_to_optimize() -> Optimizer:
    """Returns the optimizer of a stage without parameters: torch makes none without one."""
    return torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=0.0)
