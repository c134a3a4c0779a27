"""The same for EA-Pipe and the pipelines beside it: random models of layers, against a loop in one process."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipesync import EAPipe
from tests.fuzz.layers import LAYERS
from tests.fuzz.methods import TIMEOUT_S, Check, Settings
from tests.fuzz.optimizers import OPTIMIZERS, Options, draw_options
from tests.fuzz.outcome import Outcome, judge
from tests.fuzz.training import Seen
from tests.references.ea_pipe import ElasticReplicas, Stashed, Synchronous
from tests.support.models import batch

MINI_BATCHES = 9
MAX_NORM = 0.3

ALGORITHMS = ["pipedream", "weight_stashing", "naive", "spectrain", "gpipe", "1f1b"]
_SYNCHRONOUS = ("gpipe", "1f1b")

#: Layers that do not compute by their input and weights alone: the step counts, or a generator of the stage's own.
_BY_STEP = {"alternating", "by_replica", "thawed", "freezes"}
#: Layers whose random numbers are the engine's, and algorithms that no loop here follows.
_NOT_FOLLOWED = {"dropout", "naive", "spectrain"}


@dataclass(frozen=True)
class Pipeline:
    """One training.

    Attributes:
        events: what happens before a mini-batch, by its index.
        accumulate: batches of a mini-batch.
        double: as in ``Configuration``.
    """

    seed: int
    world_size: int
    settings: Settings
    layers: tuple[str, ...]
    optimizer: str
    options: Options
    accumulate: int
    events: dict[int, str]
    double: bool

    @property
    def refused(self) -> tuple[str, ...]:
        """As in ``Configuration``."""
        return tuple(filter(None, (LAYERS[name].refused for name in self.layers)))

    may_be_refused: tuple[str, ...] = ()

    def is_agreed(self, name: str) -> bool:
        """As in ``Configuration``."""
        return True

    @property
    def check(self) -> Check:
        """What the training is compared with."""
        drawn = {*self.layers, self.settings["algorithm"]}
        return Check.REPETITION if drawn & _NOT_FOLLOWED or "compression" in self.settings else Check.REFERENCE

    def model(self) -> nn.Sequential:
        torch.manual_seed(self.seed)
        blocks = [one for name in self.layers for one in (LAYERS[name].build(), nn.Tanh())]
        model = nn.Sequential(*blocks, nn.Linear(6, 3))
        return model.double() if self.double else model

    def make_optimizer(self, parameters: Any) -> Optimizer:
        made: Optimizer = getattr(torch.optim, self.optimizer)(list(parameters), **self.options)
        return made

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = batch(index, 0)
        return (x.double() if self.double else x), y


def draw(seed: int, world_size: int) -> Pipeline:
    """Returns the pipeline that belongs to a seed."""
    random = Random(f"ea_pipe {seed} {world_size}")
    names = [
        name for name, layer in LAYERS.items() if not layer.refused and name not in {*_BY_STEP, "counting", "empty"}
    ]
    layers = tuple(random.choice(names) for _ in range(random.randint(2, 4)))
    settings: Settings = {"algorithm": random.choice([*["ea_pipe"] * 5, *ALGORITHMS])}
    settings["split"] = tuple(sorted(2 * block for block in random.sample(range(1, len(layers) + 1), world_size - 1)))
    if settings["algorithm"] == "ea_pipe":
        settings["elastic_force"] = random.choice([0.1, 0.5])
        settings["period"] = random.choice([1, 2])
        settings["replicas"] = random.choice([None, None, world_size + 1])
    if settings["algorithm"] in ("ea_pipe", "pipedream") and random.random() < 0.3:
        settings["clip_norm"] = MAX_NORM
    if random.random() < 0.1:
        settings["compression"] = "bf16"
    optimizer = random.choice([name for name, kind in OPTIMIZERS.items() if not kind.refused and name != "Muon"])
    synchronous = settings["algorithm"] in _SYNCHRONOUS
    return Pipeline(
        seed,
        world_size,
        settings,
        layers,
        optimizer,
        draw_options(random, optimizer, layers),
        accumulate=1 if synchronous else random.choice([1, 1, 2]),
        events={random.randrange(1, MINI_BATCHES): random.choice(list(EVENTS)) for _ in range(random.randint(0, 2))},
        double=synchronous or "clip_norm" in settings or any(LAYERS[name].rounds for name in layers),
    )


class Stages:
    """A pipeline on this process, or on ranks."""

    def __init__(self, pipeline: Pipeline, virtual: bool) -> None:
        self.pipeline, self.virtual = pipeline, virtual
        self.seen: Seen = {}
        self._make()

    def _make(self) -> None:
        pipeline = self.pipeline
        self.model = pipeline.model()
        self.engine = EAPipe(
            self.model,
            lambda output, target: nn.functional.cross_entropy(output, target) / pipeline.accumulate,
            pipeline.make_optimizer,
            virtual_stages=pipeline.world_size if self.virtual else None,
            timeout_s=TIMEOUT_S,
            **pipeline.settings,
        )

    def train(self, index: int) -> None:
        for part in range(self.pipeline.accumulate):
            completes = part == self.pipeline.accumulate - 1
            self.engine.train_batch(self.pipeline.batch(8 * index + part), completes=completes)

    def see(self, moment: str) -> None:
        self.engine.gather()
        self.seen |= {f"{moment}: {name}": value.detach().clone() for name, value in self.model.state_dict().items()}

    def load_weights(self) -> None:
        self.engine.gather()
        self.model.load_state_dict(self.pipeline.model().state_dict())

    def start_anew(self) -> None:
        self.engine.gather()
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "pipesync": self.engine.state_dict()}, file)
        self.engine.detach()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self._make()
        self.model.load_state_dict(saved["model"])
        self.engine.load_state_dict(saved["pipesync"])


class Loop:
    """The algorithms in one process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.seen: Seen = {}
        self.reference = self._reference(pipeline.settings)

    def _reference(self, settings: Settings) -> Any:
        pipeline, algorithm = self.pipeline, settings["algorithm"]
        model, number = pipeline.model(), pipeline.world_size
        given = model, pipeline.make_optimizer
        if algorithm == "ea_pipe":
            elastic = {name: settings[name] for name in ("elastic_force", "period")}
            return ElasticReplicas(*given, self._backward, n=settings.get("replicas") or number, **elastic)
        if algorithm in _SYNCHRONOUS:
            return Synchronous(*given, self._backward_in_parts)
        by_stage = algorithm == "weight_stashing"
        stages = [self._stage_of(model, name) if by_stage else 0 for name, _ in model.named_parameters()]
        return Stashed(*given, self._backward, stages=stages, num_stages=number)

    def train(self, index: int) -> None:
        self.reference.train(index)

    def _stage_of(self, model: nn.Module, parameter: str) -> int:
        """Returns the stage that has a parameter; layers of a sequence within the model count one by one."""
        layers: list[str] = []
        for name, child in model.named_children():
            layers += [f"{name}.{n}." for n in range(len(child))] if isinstance(child, nn.Sequential) else [f"{name}."]
        [layer] = [index for index, prefix in enumerate(layers) if parameter.startswith(prefix)]
        return sum(layer >= first for first in self.pipeline.settings["split"])

    def _backward(self, model: nn.Module, index: int) -> None:
        for part in range(self.pipeline.accumulate):
            x, y = self.pipeline.batch(8 * index + part)
            (nn.functional.cross_entropy(model(x), y) / self.pipeline.accumulate).backward()
        if "clip_norm" in self.pipeline.settings:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)

    def _backward_in_parts(self, model: nn.Module, index: int) -> None:
        x, y = self.pipeline.batch(8 * index)
        number = self.pipeline.world_size
        for part, target in zip(x.chunk(number), y.chunk(number), strict=True):
            (nn.functional.cross_entropy(model(part), target) / number).backward()

    def see(self, moment: str) -> None:
        weights = self.reference.master.state_dict()
        self.seen |= {f"{moment}: {name}": value.detach().clone() for name, value in weights.items()}

    def load_weights(self) -> None:
        self.reference.load(self.pipeline.model())

    def start_anew(self) -> None:
        """Nothing is to change."""


#: What may happen before a mini-batch.
EVENTS: dict[str, Callable[[Any, int], None]] = {
    "see": lambda worker, index: worker.see(f"mini-batch {index}"),
    "load weights": lambda worker, index: worker.load_weights(),
    "checkpoint": lambda worker, index: worker.start_anew(),
}


def train(worker: Stages | Loop) -> None:
    for index in range(MINI_BATCHES):
        if event := worker.pipeline.events.get(index):
            EVENTS[event](worker, index)
        worker.train(index)
    worker.see("end")


def run(seed: int) -> Outcome:
    """Trains a pipeline on all ranks and judges the result; a collective call."""
    pipeline = draw(seed, dist.get_world_size())
    return judge(pipeline, partial(_stages, pipeline, virtual=False), partial(_expected, pipeline))


def _stages(pipeline: Pipeline, virtual: bool) -> Seen:
    stages = Stages(pipeline, virtual)
    try:
        train(stages)
    finally:
        stages.engine.detach()
    return stages.seen


def _expected(pipeline: Pipeline) -> Seen:
    """What a loop in one process trains; with random layers, or without such a loop, stages in one process."""
    if pipeline.check == Check.REFERENCE:
        loop = Loop(pipeline)
        train(loop)
        return loop.seen
    compressed = "compression" in pipeline.settings
    return _stages(pipeline, virtual=pipeline.settings["algorithm"] not in _SYNCHRONOUS and not compressed)
