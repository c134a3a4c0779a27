"""What the benchmarks train: small models, those of ``transformers``, and emulated ones that sleep."""

from lightning_pipesync.bench.models.bench_model import BenchModel
from lightning_pipesync.bench.models.build import EMULATED, MODEL_NAMES, TABLES, build_model, stand_in
from lightning_pipesync.bench.models.computation import ComputationSeconds, computation_seconds
from lightning_pipesync.bench.models.emulated import EmulatedModel
from lightning_pipesync.bench.models.table import LayerSpec, ModelTable, TensorSpec

__all__ = [
    "EMULATED",
    "MODEL_NAMES",
    "TABLES",
    "BenchModel",
    "ComputationSeconds",
    "EmulatedModel",
    "LayerSpec",
    "ModelTable",
    "TensorSpec",
    "build_model",
    "computation_seconds",
    "stand_in",
]
