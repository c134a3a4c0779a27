"""What is drawn from a seed: a model, its optimizers, a method with its settings, and what happens when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from tests.fuzz.layers import LAYERS
from tests.fuzz.methods import METHODS, METHODS_OF_SHARDS, NOT_ELEMENTWISE, Check, Settings
from tests.fuzz.optimizers import OPTIMIZERS, SCHEDULERS, Options, draw_options
from tests.fuzz.sharding import RECOVERS, Sharding, draw_sharding
from tests.fuzz.training import EVENTS, OF_HABITS, STEPS


@dataclass(frozen=True)
class Configuration:
    """One training.

    Attributes:
        then: the method, and its settings, with which the training goes on after a "reattach".
        num_optimizers: with two, each has every second layer.
        pretrained_steps: steps of the optimizers on one batch for all ranks, before the method is attached.
        no_sync: whether all passes of a step but the last are made under ``no_sync``.
        clip: "norm", "value" or "".
        overflow: step and rank at which the loss is infinite; with a loss scaler only.
        events: what happens before a step, by the step.
        zero_optimizers: whether the optimizers forget the gradients, and not the model.
        sharding: how a replica is sharded among ranks; None: each rank has a replica.
        double: whether the weights are float64, which tells a fault from rounding where sums are made in another order.
    """

    method: str
    seed: int
    world_size: int
    settings: Settings
    then: tuple[str, Settings] | None
    layers: tuple[str, ...]
    optimizer: str
    options: Options
    num_groups: int
    num_optimizers: int
    pretrained_steps: int
    accumulate: int
    no_sync: bool
    clip: str
    scaler: bool
    overflow: tuple[int, int] | None
    scheduler: str
    set_to_none: bool
    events: dict[int, str]
    zero_optimizers: bool
    sharding: Sharding | None
    double: bool = False

    @property
    def used(self) -> list[tuple[str, Settings]]:
        """The methods, with their settings."""
        return [(self.method, self.settings), *([self.then] if self.then else [])]

    @property
    def of_shards(self) -> bool:
        """Whether a replica has several ranks."""
        return self.sharding is not None and self.sharding.num_shards > 1

    def place_of(self, rank: int) -> tuple[int, int]:
        """Returns the replica of a rank, and its place in it."""
        return (rank, 0) if self.sharding is None else self.sharding.place_of(rank)

    @property
    def several_optimizers(self) -> bool:
        """Whether there are several, one of which may have the parameters that another one does not accept."""
        rest = self.optimizer == "Muon" or (self.optimizer == "Adafactor" and "empty" in self.layers)
        return rest or self.num_optimizers > 1

    @property
    def refused(self) -> tuple[str, ...]:
        """Words of the errors by one of which all ranks refuse it; none: it is trained."""
        of_layers = [LAYERS[name].refused for name in self.layers]
        of_methods = [METHODS[method].refused(self, settings) for method, settings in self.used]
        of_shards: list[str] = []
        if self.sharding is not None:
            of_methods += [METHODS[method].refused_of_shards(settings) for method, settings in self.used]
            of_shards = [] if OPTIMIZERS[self.optimizer].elementwise or not self.of_shards else [NOT_ELEMENTWISE]
        return tuple(filter(None, (*of_layers, OPTIMIZERS[self.optimizer].refused, *of_methods, *of_shards)))

    @property
    def may_be_refused(self) -> tuple[str, ...]:
        """Words of errors that depend on when something happens."""
        return tuple(filter(None, (METHODS[method].may_refuse(self, settings) for method, settings in self.used)))

    @property
    def check(self) -> Check:
        """What the training is compared with."""
        return max((METHODS[method].check(settings) for method, settings in self.used), key=list(Check).index)

    def is_agreed(self, name: str) -> bool:
        """Returns whether what was seen under a name has to be the same on all ranks."""
        own_states = METHODS[self.used[-1][0]].own_states or self.check == Check.AGREEMENT
        return name.startswith(("end: ", "flush")) and not (own_states and "optimizer" in name)


def draw(method: str, seed: int, world_size: int = 2, num_shards: int | None = None) -> Configuration:
    """Returns the configuration of a method that belongs to a seed; of replicas of so many ranks, or whole ones."""
    random = Random(f"{method} {seed} {world_size} {num_shards}")
    refusable = random.random() < 0.04  # rarely: refusals take no time and find little
    layers = [
        name
        for name, layer in LAYERS.items()
        if (refusable or not layer.refused) and (num_shards is None or layer.groups is not None)
    ]
    optimizer = random.choice([name for name, kind in OPTIMIZERS.items() if refusable or not kind.refused])
    # Muon, which some methods take, steps on DTensors otherwise than on whole matrices: test_sharded_optimizers has it.
    whole = not refusable and not OPTIMIZERS[optimizer].elementwise
    if num_shards is not None and (whole or optimizer == "Muon"):
        optimizer = "AdamW"
    drawn_layers = tuple(random.choice(layers) for _ in range(random.randint(1, 4)))
    scaler = random.random() < 0.25
    overflow = (random.randrange(STEPS), random.randrange(world_size))
    possible = [event for event in EVENTS if num_shards is None or RECOVERS or not event.startswith("raise")]
    possible = [event for event in possible if num_shards is None or event not in OF_HABITS]
    events = {random.randrange(1, STEPS): random.choice(possible) for _ in range(random.randint(0, 3))}
    then = random.choice([method, *(METHODS if num_shards is None else METHODS_OF_SHARDS)])

    def draw_settings(name: str) -> Settings:
        while True:
            settings = METHODS[name].draw(random)
            if num_shards is None or refusable or not METHODS[name].refused_of_shards(settings):
                return settings

    options = draw_options(random, optimizer, drawn_layers)
    no_dtensors = not OPTIMIZERS[optimizer].elementwise or (options.get("fused") and optimizer == "Adagrad")
    no_state = OPTIMIZERS[optimizer].refused or (num_shards and no_dtensors)
    drawn = Configuration(
        method=method,
        seed=seed,
        world_size=world_size,
        settings=draw_settings(method),
        then=(then, draw_settings(then)) if "reattach" in events.values() else None,
        layers=drawn_layers,
        optimizer=optimizer,
        options=options,
        num_groups=random.choice([1, 1, 2]),
        # PyTorch refuses to clip by value where there is no gradient at all.
        num_optimizers=1 if {"frozen", "thawed", "freezes"} & set(drawn_layers) else random.choice([1, 1, 1, 2]),
        pretrained_steps=0 if no_state else random.choice([0, 0, 2]),
        accumulate=random.choice([1, 1, 2]),
        no_sync=random.random() < 0.8,
        clip=random.choice(["", "", "norm", "value"]),
        scaler=scaler,
        overflow=overflow if scaler and random.random() < 0.7 else None,
        scheduler=random.choice(["", "", *SCHEDULERS]),
        set_to_none=random.random() < 0.8,
        events=events,
        zero_optimizers=random.random() < 0.3,
        sharding=num_shards and draw_sharding(random, drawn_layers, world_size // num_shards, num_shards),
    )
    rounds = any(METHODS[name].rounds(drawn, settings) for name, settings in drawn.used)
    rounds |= drawn.of_shards and (
        drawn.clip == "norm" or bool(drawn.options.get("fused")) or "bfloat16" in drawn_layers
    )
    rounds |= world_size // (num_shards or 1) > 2 or (num_shards or 1) > 2
    return replace(drawn, double=rounds or any(LAYERS[name].rounds for name in drawn.layers))
