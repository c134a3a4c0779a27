"""The trainings of every method that are checked on streams."""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance.training import Options
from tests.streams.trainings import Training, checked
from tests.support.harness import on_ranks

SMALL = {"bucket_mb": 1e-3}
BUFFER: dict[str, Any] = {"fusion": "buffer", **SMALL}
LOSSY = ("bf16", "fp8", "int8", "int4", "topk", "chunked_topk")

TRAININGS: dict[str, list[Training]] = {
    "dear": [
        Training("dear"),
        Training("dear", {**BUFFER, "overlap": "eager"}, clips=True),
        Training("dear", {**BUFFER, "overlap": "forward"}, "AdamW"),
        Training("dear", {**BUFFER, "overlap": "none"}),
        Training("dear", {**BUFFER, "update": "sharded"}, "AdamW", clips=True),
        Training("dear", {**BUFFER, "update": "replicated"}, "AdamW"),
        Training("dear", {"fusion": "layers", "num_layers": 2}),
        Training("dear", {"fusion": "bo", "trial_steps": 4, "max_trials": 2, "search_mb": (1e-3, 1e-2)}, steps=10),
        Training("dear", BUFFER, flushes=False),
        Training("dear", BUFFER, side_stream=True),
        Training("dear", stream_per_layer=True),
    ],
    "dear, compressed": [
        Training("dear", {**BUFFER, "update": update, "compression": codec, "error_feedback": feedback}, "AdamW")
        for codec, update, feedback in (
            *((codec, "sharded", True) for codec in LOSSY),
            *((codec, "replicated", True) for codec in LOSSY),
            ("int8", "sharded", False),
            ("topk", "replicated", False),
        )
    ],
    "low rank": [
        Training(method, {**settings, "low_rank": 2, "low_rank_method": how}, "AdamW")
        for how in ("acp_sgd", "power_sgd")
        for method, settings in (
            ("dear", BUFFER),
            ("pipe_sgd", {"pipeline_level": 2}),
            ("selsync", {"delta": 0.0, "aggregation": "gradients", **SMALL}),
        )
    ],
    "selsync": [
        Training("selsync", {"delta": 0.0, "overlap": "none", **SMALL}),
        Training("selsync", {"delta": 0.01, "overlap": "forward", **SMALL}, "AdamW", clips=True),
        Training("selsync", {"delta": "auto", "lssr": 0.5, "overlap": "forward", "outer_lr": 0.7, **SMALL}),
        Training("selsync", {"delta": 0.0, "aggregation": "gradients", "compression": "int8", **SMALL}),
        Training("selsync", {"delta": 0.0, "overlap": "forward", "compression": "int8"}, side_stream=True),
        Training("selsync", {"delta": 0.0, "overlap": "forward", **SMALL}, flushes=False),
        Training("selsync", {"delta": 0.0, "overlap": "forward", **SMALL}, stream_per_layer=True),
    ],
    "pipe_sgd": [
        Training("pipe_sgd", {"pipeline_level": level, "delay_compensation": how, "compression": codec, **more}, name)
        for level, how, codec, more, name in (
            (1, "prediction", "none", {}, "SGD"),
            (2, "prediction", "none", {}, "AdamW"),
            (2, "none", "int8", {}, "SGD"),
            (1, "none", "none", {"staleness": 2, **SMALL}, "SGD"),
            (1, "prediction", "bf16", {"drain": True, "warmup_steps": 2}, "AdamW"),
        )
    ]
    + [Training("pipe_sgd", {"pipeline_level": 2}, clips=True, flushes=False)]
    + [Training("pipe_sgd", {"pipeline_level": 2}, side_stream=True)]
    + [Training("pipe_sgd", {"pipeline_level": 2}, stream_per_layer=True)],
    "local_sgd": [
        Training("local_sgd", {"period": 2, "average_optimizer_states": True, **SMALL}, "AdamW", clips=True),
        Training("local_sgd", {"period": 3, "overlap_steps": 2, "outer_optimizer": "nesterov", "compression": "int8"}),
        Training("local_sgd", {"period": 2, "overlap_steps": 1, "compression": "chunked_topk"}, side_stream=True),
        Training("local_sgd", {"period": 2, "fragments": 2, "overlap_steps": 1, **SMALL}),
        Training("local_sgd", {"period": 2, "overlap_steps": 1, "mixing_factor": "progress"}, side_stream=True),
        Training("local_sgd", {"period": 2, "fragments": 2, "overlap_steps": 1}, flushes=False),
        Training("local_sgd", {"period": 2, "warmup_steps": 3}, stream_per_layer=True),
        Training("local_sgd", {"period": 2, "outer_optimizer": "elastic", "elastic_force": 0.3}),
        Training("local_sgd", {"neighbors": "ring", "period": 1, "overlap_steps": 1, **SMALL}),
        Training("local_sgd", {"neighbors": "random_pairs", "period": 2}),
        *(
            Training("local_sgd", {"period": 3, "overlap_steps": 2, **outer}, snapshots=True)
            for outer in ({}, {"outer_optimizer": "nesterov"}, {"outer_optimizer": "nesterov", "compression": "int8"})
        ),
    ],
    "parameter_server": [
        Training("parameter_server", {"policy": "sync"}, "AdamW", clips=True, side_stream=True),
        Training("parameter_server", {"policy": "sync", "compression": "int8"}),
        Training("parameter_server", {"policy": "k_async", "servers": 1}, side_stream=True),
        Training("parameter_server", {"policy": "k_async", "delay_compensation": "dc_asgd"}),
        Training("parameter_server", {"policy": "k_async", "staleness_lr": "distance"}),
        Training("parameter_server", {"policy": "downpour", "n_push": 2, "n_fetch": 3}, side_stream=True),
        Training("parameter_server", {"policy": "easgd", "period": 2}, side_stream=True),
    ],
    "16 bits": [
        Training("dear", BUFFER, dtype=torch.bfloat16),
        Training("dear", {**BUFFER, "update": "sharded"}, "AdamW", clips=True, dtype=torch.float16),
        Training("selsync", {"delta": 0.0, "aggregation": "gradients", **SMALL}, dtype=torch.bfloat16),
        Training("pipe_sgd", {"pipeline_level": 2, "compression": "int8"}, dtype=torch.bfloat16),
        Training("local_sgd", {"period": 2, "fragments": 2, "overlap_steps": 1, **SMALL}, dtype=torch.bfloat16),
    ],
    "an error": [
        Training(method, settings, fails_in=fails_in)
        for method, settings in (
            ("dear", BUFFER),
            ("dear", {**BUFFER, "update": "sharded"}),
            ("selsync", {"delta": 0.0, "overlap": "forward", **SMALL}),
            ("pipe_sgd", {"pipeline_level": 2}),
            ("local_sgd", {"period": 2, "fragments": 2, "overlap_steps": 1, **SMALL}),
        )
        for fails_in in ("forward", "backward")
    ],
}
#: Those of which the first training is checked before each commit.
QUICK = ("dear", "selsync", "pipe_sgd", "local_sgd", "parameter_server", "dear, compressed")
#: On four ranks, in rows of two, each of which is a host.
OF_FOUR = [
    Training("dear", {"topology": "torus2d", "update": "sharded", "fusion": "buffer", **SMALL}, "AdamW", clips=True),
    Training("dear", {"update": "replicated", "compression": "int8", **BUFFER}, "AdamW"),
    Training("pipe_sgd", {"compression": "int8"}),
    Training("local_sgd", {"ranks_per_replica": 2, "period": 2, "overlap_steps": 1, "fragments": 2}),
    Training("local_sgd", {"neighbors": "ring", "ranks_per_replica": 2, "period": 1}),
]
GLOO = {"backend": "gloo"}
#: In loops of the conformance suite. Over Gloo, tensors of the device are sent through the host.
LOOPS: list[tuple[str, str, dict[str, Any], Options]] = [
    ("plain", "parameter_server", {"policy": "sync"}, Options()),
    ("plain", "parameter_server", {"policy": "k_async", "servers": 1, "compression": "int8"}, Options()),
    ("plain", "parameter_server", {"policy": "easgd", "period": 2}, Options()),
    ("plain", "ea_pipe", {"split": (2,)}, Options()),
    ("plain", "ea_pipe", {"split": (2,), "algorithm": "pipedream"}, Options(clip_norm=0.1)),
    ("plain", "ea_pipe", {"split": (2,), "compression": "bf16"}, Options()),
    ("plain", "dear", {**GLOO, **BUFFER, "compression": "int8"}, Options()),
    ("plain", "dear", {**GLOO, **BUFFER, "update": "sharded"}, Options(accumulate=2)),
    ("plain", "selsync", {**GLOO, "delta": 0.0, "overlap": "forward", **SMALL}, Options()),
    ("plain", "local_sgd", {**GLOO, "period": 2, "overlap_steps": 1, "compression": "int8"}, Options()),
    ("plain", "pipe_sgd", {**GLOO, "pipeline_level": 2}, Options("adamw")),
    ("plain", "dear", {}, Options(several=True)),
]
SCALED = Options(precision="16-mixed", clip_norm=0.1)
OVERLAPPED = {"delta": 0.0, "overlap": "forward", **SMALL}
#: In loops of a framework's, and with a loss scaler.
FRAMEWORKS: list[tuple[str, str, dict[str, Any], Options]] = [
    ("lightning", "dear", BUFFER, Options(accumulate=2)),
    ("lightning", "selsync", OVERLAPPED, Options(clip_norm=0.1)),
    ("lightning", "dear", {**BUFFER, "update": "sharded"}, SCALED),
    ("fabric", "dear", BUFFER, SCALED),
    ("fabric", "pipe_sgd", {"pipeline_level": 2}, Options()),
    ("accelerate", "selsync", OVERLAPPED, Options(clip_norm=0.1)),
    ("accelerate", "local_sgd", {"period": 2, "overlap_steps": 1}, Options(precision="bf16-mixed")),
    ("plain", "selsync", {"delta": 0.0, "aggregation": "gradients", **SMALL}, SCALED),
    ("plain", "local_sgd", {"period": 2, "overlap_steps": 1}, SCALED),
    ("plain", "pipe_sgd", {"pipeline_level": 2}, SCALED),
]


def assert_nothing_reported(world_size: int, run: Any, runs: list[tuple[Any, ...]]) -> None:
    """Asserts that nothing is read or written out of order, and no memory released too early."""
    for args in runs:  # each in a call, and so in a time, of its own: a busy machine needs ten times as long
        outcomes = on_ranks(checked, world_size, run, args)
        assert (args, [reports for reports, _ in outcomes]) == (args, [{}] * world_size)
