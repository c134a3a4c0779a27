"""What the benchmarks train: small models, those of ``transformers``, and emulated ones that sleep."""

from lightning_pipesync.lab.bench.models.bench_model import BenchModel
from lightning_pipesync.lab.bench.models.build import EMULATED, MODEL_NAMES, TABLES, build_model, stand_in
from lightning_pipesync.lab.bench.models.computation import ComputationSeconds, computation_seconds
from lightning_pipesync.lab.bench.models.emulated import EmulatedModel
from lightning_pipesync.lab.bench.models.table import LayerSpec, ModelTable, TensorSpec

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
