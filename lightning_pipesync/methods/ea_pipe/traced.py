"""Stages of a model that is not an ``nn.Sequential``: traced, and split at the calls of named submodules.

[Note: a graph for each shape]
``torch.export`` runs the model's Python code once, and records the operations. So Python's control flow is fixed when
the model is traced: by the shapes of the input, its leaves that are not tensors, the training mode of modules, and
autocast. There is a graph for each of these, traced on demand, over the model's parameters and buffers. The layout of
the first stage's input is sent along with the activations, so that each stage can trace its graph.

[Note: the split]
``torch.distributed.pipelining`` marks the split points, as for its own ``pipeline``. ``pipeline`` itself rebuilds the
modules from the graph, which fails if the model turns off gradients or autocast for a part, as Llama does; and it
connects any two stages, whereas these stages are connected to their neighbors only. So ``graph_split`` splits the flat
graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipesync.core.rng import seeded
from lightning_pipesync.methods.ea_pipe.config import SYNCHRONOUS, EAPipeConfig
from lightning_pipesync.methods.ea_pipe.graph_split import StageGraph, split_graph
from lightning_pipesync.methods.ea_pipe.layout import Call, Layout, described, input_of, with_strides
from lightning_pipesync.methods.ea_pipe.split import ModelSplit
from lightning_pipesync.methods.ea_pipe.torch_private import has_backward_hooks, noting_gradient_code

#: The number of graphs of a model above which its input is assumed to vary without bound.
MANY_GRAPHS = 32
#: Advice for models that are called with other arguments in training than in the validation before it.
SAME_CALL = "call it with the same arguments from the first batch on, or set the Trainer's num_sanity_val_steps=0"


@dataclass(frozen=True)
class _Traced:
    """The graphs of all stages, and the layout of the output."""

    stage_graphs: list[StageGraph]
    output: Layout


@dataclass
class _Run:
    """What a model does while it is traced: the submodules called, the output's layout, the buffers replaced."""

    called: list[str] = field(default_factory=list)
    output: Layout | None = None
    replaced: set[str] = field(default_factory=set)


class TracedSplit(ModelSplit):
    """The split of any model, with one layer per stage, by tracing its graphs, see [Note: a graph for each shape].

    The second and later stages begin with the submodules that ``split`` names, in the order in which they are called.
    """

    def __init__(self, model: nn.Module, config: EAPipeConfig, num_stages: int, device: torch.device) -> None:
        super().__init__(num_stages)
        name, names = type(model).__name__, config.split_names or ()
        if config.algorithm in SYNCHRONOUS:
            raise ValueError(
                f"algorithm={config.algorithm!r} takes the layers of an nn.Sequential, and {name} would have to be "
                "traced: make it one, without names in split=, or choose another algorithm."
            )
        if not names and num_stages > 1:
            raise ValueError(
                f"{name} is not an nn.Sequential, and split={config.split!r} does not say where to divide it: set "
                "split= to the names of the submodules with which the later stages begin."
            )
        if len(names) != num_stages - 1:
            raise ValueError(
                f"split={names!r} must name the submodules with which the stages after the first begin, "
                f"{num_stages - 1} of them."
            )
        self.layers = []
        self._model, self._names, self._device = model, names, device
        self._seed = config.seed  # of the random numbers that Python's control flow may use, the same on all ranks
        self._graphs: dict[Any, _Traced] = {}
        self._owners: dict[int, int] = {}
        for name in names:
            _check_name(model, name)

    def inspect(self, source: Callable[[], Any]) -> Layout:
        return input_of(source())[0]

    def choose(self, inspected: Layout) -> list[int]:
        """Traces the stages in training and in evaluation mode, with the input of the first mini-batch.

        The last stage has the parameters and buffers that no graph uses.
        """
        self._model.to(self._device)
        graphs = [self.graph(inspected)]
        with _restored(self._model):
            self._model.train(not self._model.training)
            try:
                graphs.append(self.graph(inspected))
            except ValueError as error:
                mode = "training" if self._model.training else "evaluation"
                raise ValueError(
                    f"{error} It is traced in training and in evaluation with the arguments of the first call, and "
                    f"this is {mode}: if it is called with other arguments there, {SAME_CALL}."
                ) from error
        last = len(self._names)
        used = [set().union(*(_used(graph.stage_graphs[stage]) for graph in graphs)) for stage in range(last + 1)]
        used[last] |= set(map(id, _tensors_of(self._model).values())) - set().union(*used)
        for stage, ids in enumerate(used):
            tensors = {name: tensor for name, tensor in _tensors_of(self._model).items() if id(tensor) in ids}
            self._owners.update((id(tensor), stage) for tensor in tensors.values())
            begin = f"from {self._names[stage - 1]}" if stage else ""
            end = f"before {self._names[stage]}" if stage < last else ""
            name = " to ".join(filter(None, [begin, end])) or "all"
            self.layers.append((name, TracedStage(self, stage, stage == last, tensors)))
        return list(range(1, len(self.layers)))

    def graph(self, inputs: Layout) -> _Traced:
        """Returns the graphs for ``inputs``, in the current training mode of the model's modules."""
        device = self._device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        key = (inputs.key(), tuple(module.training for module in self._model.modules()), autocast)
        if key not in self._graphs:
            with torch.inference_mode(False), torch.enable_grad():
                self._graphs[key] = self._checked(self._trace(inputs))
            if len(self._graphs) == MANY_GRAPHS + 1:
                warnings.warn(
                    f"There are more than {MANY_GRAPHS} graphs of {type(self._model).__name__}, each of which takes "
                    "time and memory, since its input varies: pad tensors to a few shapes, and pass numbers that vary "
                    "as tensors.",
                    stacklevel=2,
                )
        return self._graphs[key]

    def _trace(self, inputs: Layout) -> _Traced:
        run, name = _Run(), type(self._model).__name__
        what = f"{name} cannot be divided at split={self._names!r}"
        try:
            with (
                noting_gradient_code() as gradient_code,
                _marked(self._model, self._names, run.called.append),
                _restored(self._model),
                seeded(self._seed, 0, None, self._device),
            ):
                flat = _Flat(self._model, inputs, run)
                exported = torch.export.export(flat, inputs.zeros(self._device), strict=False)
        except Exception as error:
            self._check_run(run, gradient_code, what)
            [reason, *_] = str(error).splitlines() or [type(error).__name__]
            raise ValueError(
                f"{what}, since torch.export cannot trace it: {reason.strip()} {_advice(str(error))}"
            ) from error
        output = self._check_run(run, gradient_code, what)
        assert output is not None
        try:
            stage_graphs = split_graph(exported.module(check_guards=False))
        except ValueError as error:
            raise ValueError(f"{what}: {error}.") from error
        self._check_calls(run.called, len(stage_graphs))
        if run.replaced:
            raise ValueError(
                f"{name} replaces its buffer {min(run.replaced)} by another tensor, and a graph keeps the first one: "
                "write to it in place, as with copy_()."
            )
        return _Traced(stage_graphs, output)

    def _check_run(self, run: _Run, gradient_code: list[str], what: str) -> Layout | None:
        """Returns the layout of the output, after checking it, and that no Python code changes gradients."""
        hooked = [name or "itself" for name, module in self._model.named_modules() if has_backward_hooks(module)]
        if code := [f"the backward hooks of {name}" for name in hooked] + gradient_code:
            raise ValueError(f"{what}, since a graph would not have what it does to gradients: {code[0]}.")
        if run.output is not None:
            run.output.check(f"The output of {type(self._model).__name__}")
        return run.output

    def _check_calls(self, called: list[str], num_stages: int) -> None:
        for name in self._names:
            if called.count(name) != 1:
                raise ValueError(
                    f"split={self._names!r}: {type(self._model).__name__} calls {name} {called.count(name)} times in a "
                    "forward pass, and a stage begins where it is called once: name another submodule."
                )
        if tuple(called) != self._names:
            raise ValueError(
                f"split={self._names!r} must name the submodules in the order in which they are called: {called}."
            )
        if num_stages != len(self._names) + 1:
            raise ValueError(
                f"split={self._names!r}: a stage cannot begin within torch.no_grad(), autocast or a checkpointed "
                "function of the model: name a submodule that is called outside."
            )

    def _checked(self, graph: _Traced) -> _Traced:
        """Returns the graphs after checking that no stage uses another stage's parameters or buffers."""
        names = {id(tensor): name for name, tensor in _tensors_of(self._model).items()}
        for stage, stage_graph in enumerate(graph.stage_graphs):
            for used in _used(stage_graph):
                owner = self._owners.get(used, stage)
                if owner != stage:
                    raise ValueError(
                        f"{names[used]} is on stage {owner + 1}, and with an input of this shape or in this mode "
                        f"{type(self._model).__name__} uses it on stage {stage + 1}: set split= so that both are one. "
                        f"If the first call did not use it, {SAME_CALL}."
                    )
        return graph


class TracedStage(nn.Module):
    """The graphs of one stage, over the model's own parameters and buffers.

    It returns the model's output, or a tuple for the next stage: the layout of the model's input, and the values that
    later stages need.
    """

    def __init__(self, split: TracedSplit, stage: int, is_last: bool, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._split, self._stage, self._is_last = split, stage, is_last
        for name, tensor in tensors.items():
            name = f"model/{name.replace('.', '/')}"  # a name of a tensor must not have dots
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, value: Any) -> Any:
        inputs, values = value if self._stage else input_of(value)
        graph = self._split.graph(inputs)
        stage_graph = graph.stage_graphs[self._stage]
        results = stage_graph.run(*map(with_strides, values, stage_graph.strides))
        if self._is_last:
            return graph.output.filled(results)
        # Weights are copied, as they may be written to before they are delivered.
        copied = zip(results, stage_graph.of_weights, strict=True)
        return inputs, [
            value.clone(memory_format=torch.contiguous_format) if is_of_weights else value.contiguous()
            for value, is_of_weights in copied
        ]


class _Flat(nn.Module):
    """A model that takes and returns tensors only, and records in ``run`` what it does."""

    def __init__(self, model: nn.Module, inputs: Layout, run: _Run) -> None:
        super().__init__()
        self.model, self._inputs, self._run = model, inputs, run

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        call = Call(**self._inputs.filled(tensors))
        before = dict(self.model.named_buffers())
        output = (self.model if call.hooks else self.model.forward)(*call.args, **call.kwargs)
        self._run.output, found = described(output)
        self._run.replaced = {name for name, buffer in self.model.named_buffers() if buffer is not before.get(name)}
        return tuple(found)


@contextmanager
def _marked(model: nn.Module, names: Sequence[str], tell: Callable[[str], object]) -> Iterator[None]:
    """Context in which calls of the named submodules are marked in a trace, and passed to ``tell``."""
    from torch.distributed.pipelining import pipe_split  # which takes a second

    def mark(name: str, *_: Any) -> None:
        tell(name)
        pipe_split()

    with ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_pre_hook(partial(mark, name), prepend=True)
            stack.callback(handle.remove)
        yield


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Context after which the attributes of the model's modules are restored."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers by name, tied ones under each of their names."""
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def _used(stage_graph: StageGraph) -> set[int]:
    """Returns the ids of the parameters, buffers and constants that a stage uses."""
    return set(map(id, _tensors_of(stage_graph.run).values()))


def _advice(reason: str) -> str:
    """Returns advice on an error of torch.export."""
    if "data-dependent" in reason:
        return (
            "Python's control flow must not depend on the values of tensors: use torch.where in the model, or make it "
            "an nn.Sequential, whose layers are not traced."
        )
    if "fake tensor" in reason.lower():
        return (
            "It may keep a tensor from one forward pass to the next, as lru_cache does: make a new tensor in each "
            "pass, or a buffer in __init__. Or it writes through .data: use torch.no_grad()."
        )
    return "Change the model, or make it an nn.Sequential, whose layers are not traced."


def _check_name(model: nn.Module, name: str) -> None:
    known, place = dict(model.named_modules()), name
    if name and name in known:
        return
    while place not in known:
        place = place.rpartition(".")[0]
    children = [f"{place}.{child}" if place else child for child, _ in known[place].named_children()]
    raise ValueError(
        f"split names {name!r}, and {type(model).__name__} has no such submodule. "
        f"{place or 'It'} has: {', '.join(children) or 'none'}."
    )
