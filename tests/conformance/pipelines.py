"""The training of a pipeline in loops of the user's own: plain, on processes or in one, and with Accelerate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.loops import AccelerateLoop, Loop, PlainLoop, Settings, accelerator_of, autocast, rank_of_process
from tests.conformance.methods import Method
from tests.conformance.training import OPTIMIZERS, Options, flat, loss_of, network, pass_by
from tests.support.accelerate_runs import end as end_accelerator


class PipelineLoop(Loop):
    """A pipeline's engine in a plain loop, on processes, or in one."""

    virtual_stages: int | None = None

    def __init__(self, method: Method | None, settings: Settings, options: Options) -> None:
        assert method is not None
        super().__init__(method, settings, options)
        self.model = network(options, seed=0 if self.virtual_stages else rank_of_process())
        pass_by(options, "attach", self.model)
        self.engine = self.make(method, {**settings, "clip_norm": options.clip_norm})

    def make(self, method: Method, settings: Settings) -> Any:
        factory = OPTIMIZERS[self.options.optimizer]
        return method.plain(self.model, None, factory, virtual_stages=self.virtual_stages, **settings)

    def train_on(self, index: int, x: Tensor, y: Tensor) -> None:
        accumulate = self.options.accumulate

        def loss(output: Tensor, part: Callable[[Any], Any]) -> Tensor:
            return loss_of(output, part(y)) / accumulate

        with autocast(self.options):
            self.engine.feed(lambda: x, loss, completes=(index + 1) % accumulate == 0)
        if self.engine.backward():
            pass_by(self.options, "step", self)
            self.update()

    def update(self) -> None:
        if self.options.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.options.clip_value)
        self.engine.step()

    def save(self, path: Path) -> None:
        self.engine.flush(self.update)
        self.engine.gather()
        saved = {"model": self.model.state_dict(), "pipesync": self.engine.state_dict()}
        torch.save(saved, f"{path}-{0 if self.virtual_stages else rank_of_process()}")

    def load(self, path: Path) -> None:
        saved = torch.load(f"{path}-{rank_of_process()}", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.engine.load_state_dict(saved["pipesync"])

    saved_weights = staticmethod(PlainLoop.saved_weights)

    def end(self) -> Tensor:
        self.engine.flush(self.update)
        self.engine.gather()
        self.engine.detach()
        return flat(self.model)


class VirtualPipelineLoop(PipelineLoop):
    """All stages in this process: what the others are compared to."""

    virtual_stages = 2


class AcceleratePipelineLoop(PipelineLoop):
    """A pipeline that Accelerate prepares."""

    def make(self, method: Method, settings: Settings) -> Any:
        self.accelerator = accelerator_of(method, settings, self.options)
        return self.accelerator.prepare_pipeline(self.model, None, OPTIMIZERS[self.options.optimizer])

    def save(self, path: Path) -> None:
        self.engine.flush(self.update)
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    saved_weights = staticmethod(AccelerateLoop.saved_weights)

    def end(self) -> Tensor:
        self.engine.flush(self.update)
        self.accelerator.consolidate()
        end_accelerator(self.accelerator)
        return flat(self.model)
