"""Every codec in every method that compresses: bit for bit by hand, with what it drops, and near uncompressed ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from lightning_pipesync.core.buckets import shard_of
from lightning_pipesync.core.codecs import CODECS, get_codec
from lightning_pipesync.training.registry import METHODS
from tests.references.pipe_sgd import all_reduce, divided, fused, mean, reduce_scatter, through, two_halves
from tests.references.tree import all_reduce_on_tree, residuals_of_roots
from tests.support.case_table import launch_cases
from tests.support.harness import call_on_hosts
from tests.support.method_runs import CASES, begin
from tests.support.models import assert_same, loss, seeded_mlp
from tests.support.own_methods import OWN

STEPS = 8
LOSSY = [codec for codec in CODECS if codec != "none"]
#: Those that follow the reference, each also with its ranks on hosts of two, or on a tree, if it can have these.
FLAT = [
    *("dear, sharded", "dear, replicated", "selsync, parameters", "selsync, gradients"),
    *("local_sgd", "local_sgd, DiLoCo", "parameter_server", "parameter_server, one"),
]
ON_HOSTS = [(case, "on hosts") for case in FLAT[:4]]
ON_A_TREE = [(case, "on a tree") for case in FLAT[1:4]]
#: Ranks, and those of a host.
PLACES = {"2": (2, 1), "3": (3, 1), "on hosts": (4, 2), "on a tree": (3, 1)}

#: The method, where it runs, its codec, and whether what the codec drops is sent later.
Row = tuple[str, str, str, bool]


def refused(case: str, codec: str) -> bool:
    """Whether the codec has residuals of its own in place of an outer momentum."""
    return "DiLoCo" in case and codec == "chunked_topk"


def in_turns(rows: Sequence[tuple[str, str]]) -> list[Row]:
    """Each method with one of the codecs, and with or without error feedback."""
    found = [(case, place, LOSSY[i % len(LOSSY)], i % 3 != 1) for i, (case, place) in enumerate(rows)]
    return [row for row in found if not refused(row[0], row[2])]


def sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.5)


def in_order(model: nn.Module, names: Sequence[str]) -> list[Tensor]:
    return [model.get_parameter(name) for name in names]


def train(row: Row) -> tuple[list[str], list[Tensor]]:
    """Returns in which order the parameters travel, and the weights after each step, in that order."""
    case, place, codec, feedback = row
    # Left out where it is on: that is the default.
    settings: dict[str, Any] = {"compression": codec, **({} if feedback else {"error_feedback": False})}
    if place == "on a tree":
        settings |= {"topology": "tree", **({"update": None} if case.startswith("dear") else {})}
    if case == "local_sgd":
        settings["residual_decay"] = 1.0
    if not feedback:
        settings.pop("residual_decay", None)
    run = begin(case, lambda model: sgd(model.parameters()), **settings)
    names = [name for name, _ in run.model.named_parameters()][:: -1 if case.startswith(("dear", "selsync")) else 1]
    weights = []
    for step in range(STEPS):
        run.step(step)
        run.sync.synchronize()
        if case.startswith("dear"):
            [bucket] = run.sync._fused.buckets
            names = [member.name for member in bucket.members]
        weights.append(fused(in_order(run.model, names)))
    run.sync.detach()
    return names, weights


def residuals(numel: int, world_size: int, columns: int) -> list[list[Tensor]]:
    """Of each host's values, and of each owner's shard."""
    shards = [torch.zeros_like(shard_of(torch.zeros(numel), rank, world_size)) for rank in range(world_size)]
    return [[torch.zeros(numel) for _ in range(world_size // columns)], shards]


@cache
def simulate(row: Row, names: tuple[str, ...]) -> list[list[Tensor]]:
    """Returns the weights of each rank after each step."""
    method, place, codec_name, feedback = row
    world_size, columns = PLACES[place]
    codec, models = get_codec(codec_name), [seeded_mlp() for _ in range(world_size)]
    parameters = [in_order(model, names) for model in models]
    optimizers = [sgd(own) for own in parameters]
    common, on_a_tree = fused(parameters[0]), place == "on a tree"
    on_flat = partial(two_halves if method.startswith("dear") else all_reduce, columns=columns)
    average_of = all_reduce_on_tree if on_a_tree else on_flat
    is_parameter = fused([torch.ones_like(one) for one in parameters[0]]).bool()
    dropped: Any = None
    if feedback:
        dropped = residuals_of_roots(common.numel()) if on_a_tree else residuals(common.numel(), world_size, columns)
    not_sent = torch.zeros_like(common)  # of the updated weights
    shared = nn.Parameter(common.clone())
    outer = SGD([shared], lr=0.7, momentum=0.9, nesterov=True)  # DiLoCo's
    weights = []

    def write(own: Sequence[Tensor], values: Tensor, gradients: bool = False) -> None:
        for tensor, part in zip(own, divided(values, own), strict=True):
            if gradients:
                tensor.grad = part.clone()
            else:
                tensor.data.copy_(part)

    for step in range(STEPS):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss(model, step, rank).backward()
        gradients = [fused([p.grad for p in own]) for own in parameters]
        if method.startswith(("selsync, parameters", "local_sgd")):
            for optimizer in optimizers:
                optimizer.step()
            moves = [fused(own) - common for own in parameters]
            if method.startswith("local_sgd") and step % 2 == 0:
                weights.append([fused(own) for own in parameters])
                continue
            if method == "local_sgd, DiLoCo":
                shared.data.copy_(common)
                shared.grad = -torch.cat(reduce_scatter(moves, codec, dropped[0] if dropped else None))
                outer.step()
                moved = [shard_of(shared.detach() - common, owner, world_size) for owner in range(world_size)]
                kept = dropped[1] if dropped else [None] * world_size
                common = common + torch.cat([through(codec, *one) for one in zip(moved, kept, strict=True)])
            else:
                common = common + average_of(moves, codec, dropped)
        elif method == "dear, sharded":
            average = torch.cat(reduce_scatter(gradients, codec, dropped[0] if dropped else None, columns))
            write(parameters[0], average, gradients=True)
            write(parameters[0], common + not_sent)
            optimizers[0].step()
            # The optimizer changes parameters, and not what a codec may leave between them.
            updated = torch.where(is_parameter, fused(parameters[0]), common + not_sent)
            moved = [shard_of(updated - common, owner, world_size) for owner in range(world_size)]
            common = common + torch.cat([through(codec, shard, None) for shard in moved])
            not_sent = updated - common if feedback else not_sent
        else:
            if method == "parameter_server":
                average = torch.cat(reduce_scatter(gradients, codec, dropped[0] if dropped else None))
            elif method == "parameter_server, one":
                kept = dropped[0] if dropped else [None] * world_size
                average = mean([through(codec, *one) for one in zip(gradients, kept, strict=True)])
            else:
                average = average_of(gradients, codec, dropped)
            write(parameters[0], average, gradients=True)
            optimizers[0].step()
            common = fused(parameters[0])
        for own in parameters:
            write(own, common)
        weights.append([fused(own) for own in parameters])  # without what a codec may leave between them
    return weights


def assert_follows(rows: Sequence[Row]) -> None:
    """Asserts that each rank has the reference's weights after each step, and not those of the other setting."""
    for place in dict.fromkeys(place for _, place, *_ in rows):
        world_size, columns = PLACES[place]
        here = {row: partial(call_on_hosts, columns, train, row) for row in rows if row[1] == place}
        outcomes = launch_cases(here, world_size)
        for row in here:
            names, weights = outcomes[row][0]
            reference, other = (simulate((*row[:3], feedback), tuple(names)) for feedback in (row[3], not row[3]))
            for rank, (_, of_rank) in enumerate(outcomes[row]):
                for step, (actual, expected) in enumerate(zip(of_rank, reference, strict=True)):
                    off = (actual - expected[rank]).abs().max()
                    assert torch.equal(actual, expected[rank]), f"{row}, rank {rank}, step {step}: off by {off}"
            assert not torch.equal(weights[-1], other[-1][0]), f"{row}: error_feedback makes no difference"


def test_methods_follow_one_rule() -> None:
    """Each with one codec, on two and on three ranks, on hosts and on a tree. Pipe-SGD has a test of its own."""
    flat = [(case, place) for place in ("2", "3") for case in FLAT]
    assert_follows([*in_turns(flat), *in_turns(ON_HOSTS), *in_turns(ON_A_TREE)])


#: Each exchanges in every step or in every other one.
ARRIVING = ["dear, sharded", "dear, replicated", "selsync, parameters", "selsync, gradients"]
ARRIVING += ["local_sgd", "parameter_server", "pipe_sgd"]


def arrive(case: str, codec: str) -> tuple[dict[str, Tensor], float]:
    """Returns the weights, and their loss on what all ranks have trained on."""
    return begin(case, lambda model: SGD(model.parameters(), lr=0.05), compression=codec).arrive(80)


def assert_arrive(pairs: Sequence[tuple[str, str]]) -> None:
    """Asserts that ranks end with the same weights, whose loss is near that of an uncompressed training."""
    everything = [*pairs, *((case, "none") for case in dict.fromkeys(case for case, _ in pairs))]
    outcomes = launch_cases({pair: partial(arrive, *pair) for pair in everything}, 2)
    for case, codec in pairs:
        (weights, final), (others, _) = outcomes[case, codec]
        assert_same(weights, others, (case, codec))
        assert final == pytest.approx(outcomes[case, "none"][0][1], rel=0.15), (case, codec)


def test_every_method_with_a_codec_is_compared() -> None:
    wires = {name for name, method in METHODS.items() if "compression" in method.config_type.__dataclass_fields__}
    assert {CASES[case][0] for case in FLAT} == wires - {"ea_pipe", "pipe_sgd"}, "which sends activations; see above"


@pytest.mark.parametrize("name", ["dear", "pipe_sgd", "selsync"])
def test_residuals_need_as_many_ranks(name: str) -> None:
    config, own_replicas = OWN[name].config_type, name == "selsync"
    averaging = {"aggregation": "gradients"} if own_replicas else {}
    assert config().needs_as_many_ranks == own_replicas, "nothing is dropped"
    assert config(compression="int8", error_feedback=False).needs_as_many_ranks == own_replicas
    assert config(compression="int8").needs_as_many_ranks
    assert config(low_rank=2, **averaging).needs_as_many_ranks


#: Methods that average gradients.
RESTING = ["dear, replicated", "selsync, gradients", "parameter_server", "parameter_server, one", "pipe_sgd, segments"]


def rest(case: str, codec: str, in_between: bool) -> Tensor:
    """Returns a parameter after steps; in some others, in between or at the end, no rank has a gradient of it."""
    model: Any = nn.ParameterDict({"rests": torch.zeros(600), "trains": torch.zeros(10)})
    run = begin(case, lambda model: SGD(model.parameters(), lr=1.0), model, compression=codec)
    gradient = torch.randn(600, generator=torch.Generator().manual_seed(dist.get_rank()))
    for rests in [False, True] * STEPS if in_between else [False] * STEPS + [True]:
        model.zero_grad()
        of_step = 1e-4 * model["trains"].sum()
        if not rests:
            of_step = of_step + (gradient * model["rests"]).sum()
        of_step.backward()
        run.sync.step()
    run.sync.flush()
    run.sync.detach()
    return model["rests"].detach()


def test_what_was_not_sent_of_a_parameter_waits_until_it_has_a_gradient_again() -> None:
    """An expert that nobody uses for a step, a frozen layer. Int2 has no zero, for what shares a chunk with others."""
    rows = [(RESTING[i % len(RESTING)], codec) for i, codec in enumerate(LOSSY) if codec != "int2"]
    cases = {(row, resting): partial(rest, *row, resting) for row in rows for resting in (False, True)}
    outcomes = launch_cases(cases, 2)
    for row in rows:
        for found, expected in zip(outcomes[row, True], outcomes[row, False], strict=True):
            assert torch.equal(found, expected), row
