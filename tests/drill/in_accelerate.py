"""The training that is drilled, with Accelerate; imported where it is needed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from accelerate import InitProcessGroupKwargs
from torch import Tensor, nn

from lightning_pipesync.accelerate import PipeSyncAccelerator, PipeSyncPlugin
from tests.drill.phases import Gate
from tests.drill.training import Loop, Task, TrainsPipeline, optimizer_of


class AccelerateLoop(Loop):
    """A loop in Accelerate's words."""

    model: nn.Sequential

    def __init__(self, task: Task, gate: Gate) -> None:
        super().__init__(task, gate)
        plugin = PipeSyncPlugin(task.method, **task.all_settings)
        handlers = [InitProcessGroupKwargs(timeout=timedelta(seconds=task.timeout_s))]
        self.accelerator = PipeSyncAccelerator(plugin, cpu=True, kwargs_handlers=handlers)
        self.model = task.network(gate)
        gate.reach("attach")
        self.prepare()

    def prepare(self) -> None:
        optimizer = optimizer_of(self.model.parameters())
        self.called, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def train_on(self, x: Tensor, y: Tensor) -> None:
        self.accelerator.backward(self.loss(self.called(x), y))
        self.gate.reach("step")
        self.optimizer.step()
        self.called.zero_grad()

    def consolidate(self) -> None:
        self.accelerator.consolidate()

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    def end(self) -> None:
        self.accelerator.consolidate()
        self.accelerator.free_memory()


class AcceleratePipeline(TrainsPipeline, AccelerateLoop):
    """A pipeline that Accelerate prepares."""

    def prepare(self) -> None:
        self.engine = self.accelerator.prepare_pipeline(self.model, None, optimizer_of)

    def save(self, path: Path) -> None:
        self.engine.flush()
        super().save(path)

    def end(self) -> None:
        self.engine.flush()
        super().end()
