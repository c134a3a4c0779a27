"""What the benchmarks train: small models, those of ``transformers``, and emulated ones that sleep."""

from lightning_pipesync.lab.bench.models.bench_model import BenchModel
from lightning_pipesync.lab.bench.models.build import EMULATED, build_model, model_names, stand_in
from lightning_pipesync.lab.bench.models.emulated import EmulatedModel, computation_seconds
from lightning_pipesync.lab.bench.models.networks import TABLES
from lightning_pipesync.lab.bench.models.table import ModelTable

__all__ = [
    "EMULATED",
    "TABLES",
    "BenchModel",
    "EmulatedModel",
    "ModelTable",
    "build_model",
    "computation_seconds",
    "model_names",
    "stand_in",
]
