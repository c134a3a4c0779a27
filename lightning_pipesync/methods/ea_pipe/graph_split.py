"""Splits a traced graph into one graph per stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx
from torch.fx import Node

from lightning_pipesync.core.torch_private import tensors_in
from lightning_pipesync.methods.ea_pipe.torch_private import is_pipe_split, memory_of, written_by


@dataclass(frozen=True)
class StageGraph:
    """The part of a graph that one stage runs."""

    run: fx.GraphModule
    """Takes the incoming values, and returns a tuple of those for the next stage, or of the outputs."""
    strides: tuple[tuple[int, ...] | None, ...]
    """The strides of each incoming value as traced; None if it is contiguous and of a varying size."""
    of_weights: tuple[bool, ...]
    """For each outgoing value, whether it shares the memory of a parameter or a buffer."""


def split_graph(traced: fx.GraphModule) -> list[StageGraph]:
    """Splits a graph at its calls of ``torch.distributed.pipelining.pipe_split``.

    A stage receives values from the stage before it only, so values for later stages pass through all stages between.
    Parameters and buffers do not: each stage reads those that it uses from the module.

    Raises:
        ValueError: a stage has nothing to compute, or writes in place to memory that another stage reads.
    """
    nodes = [node for node in traced.graph.nodes if not is_pipe_split(node)]
    stage_of = _stages_of(traced.graph)
    num_stages = max(stage_of.values()) + 1
    computing = {stage_of[node] for node in nodes if node.op not in ("placeholder", "output", "get_attr")}
    empty = sorted(set(range(num_stages)) - computing)
    if empty:
        raise ValueError(f"stage {empty[0] + 1} of {num_stages} would have nothing to compute")
    weights = [node for node in nodes if node.op == "get_attr"]
    in_weights = {place for node in weights for place in _memory(node)}
    stage_graphs = []
    incoming = [node for node in nodes if node.op == "placeholder"]
    for stage in range(num_stages):
        members = [node for node in nodes if stage_of.get(node) == stage and node.op != "placeholder"]
        outgoing = [node for node in nodes if _crosses(node, stage, stage_of)]
        for node in outgoing:
            if not isinstance(node.meta.get("val"), Tensor):
                raise ValueError(f"{node.name}, a number computed from a tensor, would have to travel to another stage")
        _check_writes(members, incoming, weights)
        run = fx.GraphModule(traced, _graph_of(members, incoming, outgoing))
        strides = tuple(_strides_of(node) for node in incoming)
        of_weights = tuple(not in_weights.isdisjoint(_memory(node)) for node in outgoing)
        stage_graphs.append(StageGraph(run, strides, of_weights))
        incoming = outgoing
    return stage_graphs


def _stages_of(graph: fx.Graph) -> dict[Node, int]:
    """Returns the stage of each node, except those that read parameters and buffers."""
    stage, stages = 0, {}
    for node in graph.nodes:
        if is_pipe_split(node):
            stage += 1
        elif node.op != "get_attr":
            stages[node] = 0 if node.op == "placeholder" else stage
    return stages


def _crosses(node: Node, stage: int, stage_of: dict[Node, int]) -> bool:
    """Returns whether ``stage`` sends the value of a node to the next stage."""
    return node in stage_of and stage_of[node] <= stage and any(stage_of[user] > stage for user in node.users)


def _graph_of(members: Sequence[Node], incoming: Sequence[Node], outgoing: Sequence[Node]) -> fx.Graph:
    """Returns the graph of a stage's nodes; without an output node it returns ``outgoing``."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in incoming}

    def copy_of(node: Node) -> Node:
        if node not in copies:
            assert node.op == "get_attr"
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in members:
        copies[node] = graph.node_copy(node, copy_of)
    if not members or members[-1].op != "output":
        graph.output(tuple(copy_of(node) for node in outgoing))
    return graph


def _check_writes(members: Sequence[Node], incoming: Sequence[Node], weights: Sequence[Node]) -> None:
    """Raises a ValueError if a stage writes in place to memory that it shares with other values of earlier stages.

    Once sent, these values are separate copies.
    """
    for node in members:
        for written in written_by(node):
            places = set(_memory(written))
            others = [other for other in incoming if places & set(_memory(other))]
            if others and len(others) + sum(bool(places & set(_memory(weight))) for weight in weights) > 1:
                raise ValueError(
                    f"the model writes in place to {written.name}, which shares its memory with another value that "
                    "comes from an earlier stage: begin the stage elsewhere, or do not write in place there"
                )


def _strides_of(node: Node) -> tuple[int, ...] | None:
    tensor = node.meta["val"]
    if all(isinstance(stride, int) for stride in tensor.stride()):
        return tuple(tensor.stride())
    found = [str(stride) for stride in tensor.stride()]  # comparing symbols would specialize them
    for lengths in (tensor.shape, [torch.sym_max(size, 1) for size in tensor.shape]):  # torch uses both forms
        if found == [str(prod(lengths[dim + 1 :])) for dim in range(len(lengths))]:
            return None
    raise ValueError(
        f"{node.name}, whose strides depend on values, would have to travel to another stage: copy it with "
        "clone(memory_format=torch.contiguous_format)"
    )


def _memory(node: Node) -> list[int]:
    return [memory_of(tensor) for tensor in tensors_in(node.meta.get("val"))]
