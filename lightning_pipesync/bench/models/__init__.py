"""What the benchmarks train: small models, those of ``transformers``, and emulated ones that sleep."""

from lightning_pipesync.bench.models.bench_model import BenchModel
from lightning_pipesync.bench.models.build import MODEL_NAMES, TABLES, build_model
from lightning_pipesync.bench.models.computation import ComputationSeconds, computation_seconds
from lightning_pipesync.bench.models.emulated import EmulatedModel
from lightning_pipesync.bench.models.table import LayerSpec, ModelTable, TensorSpec

__all__ = [
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
]
