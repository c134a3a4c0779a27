"""A user's script for the type checker, which `make lint` runs: it knows each strategy's settings, also those refused.

An error that is expected and not found is an error: a comment that ignores nothing.
"""

from __future__ import annotations

from lightning.fabric import Fabric
from lightning.pytorch import Callback, Trainer
from typing_extensions import assert_type

from lightning_pipesync import DeARStrategy, PlanCallback, StepReport, TraceCallback
from lightning_pipesync.fabric import SelSyncFabricStrategy
from lightning_pipesync.lightning.twin import SelSyncStrategy as SelSyncOfTheTwin

strategy = DeARStrategy(fusion="buffer", bucket_mb=4.0, compression="bf16")
assert_type(strategy, DeARStrategy)
callbacks: list[Callback] = [
    StepReport(every_n_batches=5, table=True),
    PlanCallback(),
    TraceCallback("trace.json", num_steps=2),
]
trainer = Trainer(strategy=strategy, callbacks=callbacks)
fabric = Fabric(strategy=SelSyncFabricStrategy(delta=0.3))
SelSyncOfTheTwin(delta="auto")

DeARStrategy(fusion="bufer")  # type: ignore[arg-type]
DeARStrategy(bucket_mib=4.0)  # type: ignore[call-arg]
SelSyncFabricStrategy(delta=[])  # type: ignore[arg-type]
SelSyncOfTheTwin(window="long")  # type: ignore[arg-type]
StepReport(every_n_batches="all")  # type: ignore[arg-type]
