"""Every codec in every method that compresses: all ranks end with the same bits, near where they end uncompressed."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.optim import SGD

from lightning_pipesync.core.codecs import CODECS
from lightning_pipesync.training.registry import METHODS
from tests.support.harness import on_ranks
from tests.support.models import Run, assert_same, seeded_mlp, state

#: Those that pack several values into a byte, or send a few of them.
PACKED = ("int4", "int2", "chunked_topk")
#: Further cases of a resumed run.
OVERLAPPED = {
    "local_sgd, streaming": ("local_sgd", {"period": 4, "fragments": 2, "overlap_steps": 3}),
    "local_sgd, DiLoCo": ("local_sgd", {"period": 3, "outer_optimizer": "nesterov", "overlap_steps": 2}),
    "selsync, overlapped": ("selsync", {"delta": 0.0, "overlap": "forward"}),
    "pipe_sgd, segments": ("pipe_sgd", {"pipeline_level": 2, "staleness": 2}),
    "parameter_server, one": ("parameter_server", {"policy": "sync", "servers": 1}),
}
#: By case: the method, and settings in which it exchanges often.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dear, sharded": ("dear", {"fusion": "buffer", "update": "sharded"}),
    "dear, replicated": ("dear", {"fusion": "buffer", "update": "replicated"}),
    "selsync, parameters": ("selsync", {"delta": 0.0}),
    "selsync, gradients": ("selsync", {"delta": 0.0, "aggregation": "gradients"}),
    "local_sgd": ("local_sgd", {"period": 2}),
    "parameter_server": ("parameter_server", {"policy": "sync"}),
    "pipe_sgd": ("pipe_sgd", {}),
}


def train(case: str, codec: str) -> tuple[dict[str, Tensor], float]:
    """Returns the weights, and their loss on what all ranks have trained on."""
    name, settings = CASES[case]
    return Run(METHODS[name], lambda model: SGD(model.parameters(), lr=0.05), compression=codec, **settings).arrive(80)


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_and_arrive_where_they_do_uncompressed(case: str) -> None:
    _, exact = on_ranks(train, 2, case, "none")[0]
    for codec in CODECS:
        (weights, final), (others, _) = on_ranks(train, 2, case, codec)
        assert_same(weights, others, codec)
        assert final == pytest.approx(exact, rel=0.15), codec


def interrupted(case: str, codec: str, resumes: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns this rank's own weights, and the consolidated ones, of a run that is saved and perhaps resumed."""
    name, settings = {**CASES, **OVERLAPPED}[case]
    run = Run(METHODS[name], "adamw", compression=codec, **settings)
    run.steps(range(5))
    if resumes:
        run = run.resumed(seeded_mlp(1))
    else:
        run.sync.flush()
        run.sync.resume()
    run.steps(range(5, 12))
    run.sync.synchronize()
    return state(run.model), run.end()


def cases_of(codec: str) -> list[str]:
    """Returns the cases that a codec does not refuse, as it has residuals in place of an outer momentum."""
    return [case for case in {**CASES, **OVERLAPPED} if "DiLoCo" not in case or codec != "chunked_topk"]


def resume_each(codec: str) -> dict[str, list[tuple[dict[str, Tensor], dict[str, Tensor]]]]:
    return {case: [interrupted(case, codec, resumes) for resumes in (False, True)] for case in cases_of(codec)}


@pytest.mark.parametrize("codec", PACKED)
def test_a_resumed_run_has_what_the_codec_dropped(codec: str) -> None:
    """Bit for bit, of each method, on three ranks, of which the last has less."""
    outcomes = on_ranks(resume_each, 3, codec)
    for case in cases_of(codec):
        for rank, outcome in enumerate(outcomes):
            (own, consolidated), (resumed, of_resumed) = outcome[case]
            assert_same(resumed, own, f"{case}, rank {rank}")
            assert_same(of_resumed, consolidated, f"{case}, rank {rank}, consolidated")
            assert_same(of_resumed, outcomes[0][case][1][1], f"{case}, rank {rank}, as rank 0")


def test_every_method_with_a_codec_is_a_case() -> None:
    wires = {name for name, method in METHODS.items() if "compression" in method.config_type.__dataclass_fields__}
    assert {name for name, _ in CASES.values()} == wires - {"ea_pipe"}, "which sends activations"
