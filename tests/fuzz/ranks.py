"""A configuration on real ranks."""

from __future__ import annotations

import io
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipesync.methods.settings import overridden
from lightning_pipesync.methods.sync_method import SyncMethod
from lightning_pipesync.training import registry
from tests.fuzz.configuration import Configuration, draw
from tests.fuzz.methods import METHODS, TIMEOUT_S, Check, Settings
from tests.fuzz.outcome import Outcome, judge
from tests.fuzz.reference import Reference
from tests.fuzz.sharding import REPLICAS, copied, of_first_replica
from tests.fuzz.training import MAX_NORM, MAX_VALUE, Replica, Seen, Worker, train


class Rank(Worker):
    """This rank, with the method."""

    def __init__(self, configuration: Configuration) -> None:
        self.rank = dist.get_rank()
        self.mesh = None if configuration.sharding is None else configuration.sharding.mesh()
        super().__init__(configuration, [self.rank])
        if configuration.place_of(self.rank)[0] and not configuration.pretrained_steps:  # rank 0's weights count
            with torch.no_grad():
                for p in self.replica.model.parameters():
                    p.add_(0.1)
        self.sync = self.attach(configuration.method, configuration.settings)

    def attach(self, method: str, settings: Settings) -> SyncMethod:
        self.name, self.settings = method, settings
        sharding = self.configuration.sharding
        if self.mesh is not None and sharding is not None and sharding.names_replicas:
            settings = {**settings, "replicas": self.mesh[REPLICAS]}
        settings = overridden(registry.METHODS[method].config_type, settings, {})
        return METHODS[method].type(self.replica.model, self.replica.optimizers, timeout_s=TIMEOUT_S, **settings)

    def new_replica(self, rank: int) -> Replica:
        return Replica(self.configuration, rank, self.mesh)

    @property
    def replica(self) -> Replica:
        return self.replicas[0]

    def passes(self, step: int) -> None:
        for micro in range(self.configuration.accumulate):
            last = micro == self.configuration.accumulate - 1
            sharding = self.configuration.sharding
            if sharding is not None and not sharding.reduces_passes:
                self.replica.model.set_requires_gradient_sync(last or not self.configuration.no_sync)
            with nullcontext() if last or not self.configuration.no_sync else self.sync.no_sync():
                self.replica.backward(step, micro)

    def reduce(self) -> None:
        for optimizer in self.replica.optimizers:
            self.sync.reduce(optimizer, self.replica.scaler)
        self.replica.forget_unscaling()

    def update(self) -> None:
        scaler, clip = self.replica.scaler, self.configuration.clip
        for optimizer in self.replica.optimizers:
            if scaler is not None:
                self.sync.reduce(optimizer, scaler)
            if clip == "norm":
                self.sync.clip(MAX_NORM, optimizer)
            elif clip == "value":
                self.sync.clip_value(MAX_VALUE, optimizer)
            if scaler is None:
                self.sync.step(optimizer=optimizer)
            else:
                self.sync.step(partial(scaler.step, optimizer), optimizer)
        self.replica.end_step()

    def flush(self) -> None:
        self.sync.flush()

    def resume(self) -> None:
        self.sync.resume()

    def optimizer_states(self) -> list[list[Any]]:
        if self.configuration.check == Check.AGREEMENT:  # ranks may be at different steps until then
            self.sync.flush()
        return [[copied(self.sync.optimizer_state_dict(one)) for one in self.replica.optimizers]]

    def start_anew(self) -> None:
        self.sync.flush()
        old = self.replica
        state = {
            "model": old.model.state_dict(),
            "optimizers": self.optimizer_states()[0],
            "schedulers": [scheduler.state_dict() for scheduler in old.schedulers],
            "scaler": old.scaler.state_dict() if old.scaler else {},
            "pipesync": self.sync.state_dict(),
        }
        file = io.BytesIO()
        torch.save(state, file)
        self.sync.detach()
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.replicas = [new := self.new_replica(self.rank)]
        for p, old_p in zip(new.model.parameters(), old.model.parameters(), strict=True):
            p.requires_grad_(old_p.requires_grad)  # a layer that has thawed
        self.sync = self.attach(self.name, self.settings)
        new.model.load_state_dict(saved["model"])
        saved_ones = [*saved["optimizers"], *saved["schedulers"], *([saved["scaler"]] if new.scaler else [])]
        resumed = [*new.optimizers, *new.schedulers, *([new.scaler] if new.scaler else [])]
        for one, of_one in zip(resumed, saved_ones, strict=True):
            one.load_state_dict(of_one)
        self.sync.load_state_dict(saved["pipesync"])

    def reattach(self, method: str, settings: Settings) -> None:
        self.sync.flush()
        self.sync.return_optimizer_states()
        self.sync.detach()
        if METHODS[self.name].own_states:  # which the user has to make the same
            self.replica.load_states(of_first_replica(self.replica.states(), self.mesh))
        self.sync = self.attach(method, settings)

    def synchronize(self) -> None:
        self.sync.synchronize()

    def give_back(self) -> None:
        own = list(self.replica.model.parameters())
        with self.sync.given_back():
            for optimizer in self.replica.optimizers:
                assert all(any(p is one for one in own) for group in optimizer.param_groups for p in group["params"])


def run(method: str, seed: int, num_shards: int | None) -> Outcome:
    """Trains a configuration on all ranks and judges the result; a collective call."""
    configuration = draw(method, seed, dist.get_world_size(), num_shards)
    return judge(configuration, partial(_on_this_rank, configuration), partial(_expected, configuration))


def _on_this_rank(configuration: Configuration) -> Seen:
    rank = Rank(configuration)
    try:
        train(rank)
    finally:
        rank.sync.detach()
    return rank.seen[rank.rank]


def _expected(configuration: Configuration) -> Seen:
    if configuration.check == Check.REPETITION:
        return _on_this_rank(configuration)
    reference = Reference(configuration, {name: entry.rule for name, entry in METHODS.items()})
    train(reference)
    return reference.seen[dist.get_rank()]
