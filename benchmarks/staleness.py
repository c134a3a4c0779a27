"""``python -m benchmarks.staleness``: how stale gradients are, and what that costs, with 30 learners in simulated time.

The lecture's "Staleness distribution" (Zhang et al., ICDM 2016), "Error-Runtime Tradeoff" and "Staleness Dependent
Learning Rate" (Dutta et al., AISTATS 2018, Fig. 9), and what ``n_push`` saves and costs with Downpour.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Adagrad, Optimizer

from benchmarks import command
from benchmarks.intervals import interval_of
from benchmarks.learners import staleness_report
from benchmarks.learners.host_speed import HostSpeeds
from benchmarks.learners.served_trainings import Pass, ServedTrainings
from benchmarks.learners.simulated_learners import SimulatedLearners, num_gradients
from benchmarks.pipelines import layered
from benchmarks.pipelines.vectorized import Dense
from benchmarks.tasks import Task, build_task, evaluations
from lightning_pipesync.lab.bench.benchmark import Command, progress_bar
from lightning_pipesync.lab.bench.named_settings import parse_settings
from lightning_pipesync.lab.bench.tables import environment
from lightning_pipesync.methods.servers import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Update

OPTIMIZERS: dict[str, Callable[[list[Tensor], float], Optimizer]] = {"sgd": SGD, "adagrad": Adagrad}
#: The policies of which the errors are compared.
_POLICIES = ("sync", "k_sync:k=10", "k_batch_sync:k=10", "k_async:k=10", "k_batch_async:k=10", "async")
#: And those with a learning rate that depends on the staleness.
_WITH_RULES = tuple(f"async:staleness_lr={rule}" for rule in ("mean", "gradient", "distance,distance_bound=0.005"))


@dataclass(frozen=True, kw_only=True)
class Staleness(Command):
    """Simulates learners with random delays: how stale gradients are, and the test error over time.

    Every training is computed from the updates that the sequencer of the parameter servers decides on.

    Attributes:
        learners: The number of learners, lambda. Servers answer at once.
        histograms: Policies whose staleness is counted, each with settings if need be: NAME:SETTING=VALUE.
        random_shares: The part of a pass that is random, for the counts, from 0 to 1: exponentially distributed, where
            a pass takes 1 on average.
        gradients: The number of gradients in a count.
        policies: Policies that train, with passes that are random altogether.
        n_push: n_push and n_fetch of Downpour.
        optimizers: Of Downpour's servers: sgd or adagrad.
        learning_rates: Of the trainings with policies, without momentum.
        downpour_rate: Of Downpour's learners and servers.
        batch_size: Samples of a gradient.
        hidden: Width of the hidden layer of the network, which learns scikit-learn's digits.
        passes: How long a training is, in mean passes of a learner.
        evaluations: How often the error is measured.
        target: The error, in %, of which the time is measured.
        seeds: Of the trainings, with other delays, weights and samples each.
        output: Folder for staleness.json, staleness.md and the pictures.
    """

    learners: int = 30
    histograms: tuple[str, ...] = ("n_softsync:n=1", "n_softsync:n=2", "n_softsync:n=15", "k_async:k=15", "async")
    random_shares: tuple[float, ...] = (0.1, 1.0)
    gradients: int = 30_000
    policies: tuple[str, ...] = (*_POLICIES, *_WITH_RULES)
    n_push: tuple[int, ...] = (1, 2, 4, 8, 16)
    optimizers: tuple[str, ...] = ("sgd", "adagrad")
    learning_rates: tuple[float, ...] = (0.1, 0.3)
    downpour_rate: float = 0.01
    batch_size: int = 16
    hidden: int = 32
    passes: int = 200
    evaluations: int = 50
    target: float = 5.0
    seeds: tuple[int, ...] = tuple(range(10))

    name = "staleness"

    def __post_init__(self) -> None:
        self._check_positive("learners", "gradients", "downpour_rate", "batch_size", "hidden", "passes", "evaluations")
        self._check_positive("target")
        self._check_all_positive("learning_rates", self.learning_rates, "numbers")
        self._check_all_positive("n_push", self.n_push, "numbers")
        if not self.seeds:
            raise ValueError("seeds must be one or more numbers.")
        for share in self.random_shares:
            if not 0 <= share <= 1:
                raise ValueError(f"random_shares must be from 0 to 1, got {share!r}.")
        for optimizer in self.optimizers:
            if optimizer not in OPTIMIZERS:
                raise ValueError(f"optimizers: {optimizer!r} is not known; there are {', '.join(OPTIMIZERS)}.")
        for text in (*self.histograms, *self.policies):
            config_of(text).policy_for(self.learners)

    def results(self) -> list[dict[str, Any]]:
        """Simulates and trains.

        Returns:
            Settings and environment; ``counts``: by random share and policy, how many gradients were 0, 1, ... updates
            late; ``policies`` and ``downpour``: see :meth:`_train`.
        """
        rated = [*product(self.learning_rates, self.policies)]
        kinds = [*product(self.optimizers, self.n_push)]
        total = len(self.random_shares) * len(self.histograms) + len(rated) + len(kinds)
        result: dict[str, Any] = {"settings": self.settings(), "environment": environment()}
        with progress_bar(f"{self.learners} learners", total) as advance:
            counts: dict[str, dict[str, list[int]]] = {}
            for share in self.random_shares:
                for text in self.histograms:
                    counts.setdefault(f"{share:g}", {})[text] = self._counts(config_of(text), share)
                    advance(text)
            trained = []
            for rate, text in rated:
                run = self._train(config_of(text), "sgd", rate)
                trained.append({"method": text, "learning_rate": rate, **run})
                advance(f"{text}, learning rate {rate:g}")
            downpour = []
            for optimizer, rounds in kinds:
                config = ParameterServerConfig(policy="downpour", n_push=rounds, n_fetch=rounds)
                run = self._train(config, optimizer, self.downpour_rate)
                downpour.append({"n_push": rounds, "optimizer": optimizer, **run})
                advance(f"n_push={rounds}, {optimizer}")
        return [{**result, "counts": counts, "policies": trained, "downpour": downpour}]

    def _updates(self, config: ParameterServerConfig, share: float, seed: int) -> Iterator[tuple[float, Update]]:
        speeds = HostSpeeds(compute_s=1 - share, stalling=1.0, stall_s=share)
        return SimulatedLearners(config, speeds.of_hosts(self.learners, seed)).updates()

    def _counts(self, config: ParameterServerConfig, share: float) -> list[int]:
        found: list[int] = []
        for _, update in self._updates(config, share, self.seeds[0]):
            found += update.staleness
            if len(found) >= self.gradients:
                break
        return [found.count(late) for late in range(max(found) + 1)]

    def _train(self, config: ParameterServerConfig, optimizer: str, rate: float) -> dict[str, Any]:
        """Trains once for each seed.

        Returns:
            ``updates``: the mean number in the time. ``staleness``: the mean. ``traffic``: how often the weights' size
            was sent and fetched in a pass. ``diverged``: the number of trainings with weights that are not finite.
            ``times``, ``errors``, ``intervals``: a curve, the mean and its 95 % confidence interval. ``final``: the
            last errors. ``reached``: when each training had the target error first, or None.
        """
        ends = evaluations(100 * self.passes, self.evaluations)
        times = sorted(end / 100 for end in ends)
        timed = self._logs(config)
        logs = [[update for _, update in log] for log in timed]
        task = build_task("digits")
        trainings, error_of = self._trainings(task, config, logs, optimizer, rate)
        errors: list[list[float]] = [[] for _ in self.seeds]
        for done in range(len(logs[0]) + 1):
            due = [
                (seed, sum(1 for time in times[len(errors[seed]) :] if done == len(log) or time < log[done][0]))
                for seed, log in enumerate(timed)
            ]
            if any(number for _, number in due):
                now = error_of(trainings.weights)
                for seed, number_due in due:
                    errors[seed] += [now[seed]] * number_due
            if done < len(logs[0]):
                trainings.update(done)
        in_time = [sum(time <= self.passes for time, _ in log) for log in timed]
        late = [one for log in logs for update in log for one in update.staleness]
        used = sum(num_gradients(update) for log in logs for update in log)
        sent = sum(len(update.gradients) for log in logs for update in log)
        columns = [*zip(*errors, strict=True)]
        reached = [next((t for t, e in zip(times, one, strict=True) if e <= self.target), None) for one in errors]
        return {
            "updates": fmean(in_time),
            "staleness": round(fmean(late), 2),
            "traffic": round(2 * sent / used, 4),
            "diverged": int((~trainings.weights.isfinite().all(dim=1)).sum()),
            "times": times,
            "errors": [round(fmean(column), 3) for column in columns],
            "intervals": [round(interval_of(column) or 0.0, 3) for column in columns],
            "final": [round(one[-1], 3) for one in errors],
            "reached": reached,
        }

    def _logs(self, config: ParameterServerConfig) -> list[list[tuple[float, Update]]]:
        """Returns each training's updates with their times: as many for all, at least until their end."""
        running = [self._updates(config, 1.0, seed) for seed in self.seeds]
        logs: list[list[tuple[float, Update]]] = [[] for _ in running]
        while any(not log or log[-1][0] <= self.passes for log in logs):
            for log, updates in zip(logs, running, strict=True):
                log.append(next(updates))
        return logs

    def _trainings(
        self,
        task: Task,
        config: ParameterServerConfig,
        logs: Sequence[Sequence[Update]],
        optimizer: str,
        rate: float,
    ) -> tuple[ServedTrainings, Callable[[Tensor], list[float]]]:
        """Returns the trainings, and a function of weights that returns the test errors in %."""
        x, y = task.train_set.tensors  # type: ignore[attr-defined]
        x = x.flatten(1)
        initial = []
        for seed in self.seeds:
            torch.manual_seed(seed)
            network = layered.mlp(x.shape[1], self.hidden, depth=2)
            initial.append(parameters_to_vector(network.parameters()).detach())
        dense = [module for module in network.modules() if isinstance(module, nn.Linear)]
        model = Dense([x.shape[1], *(layer.out_features for layer in dense)], [0] * len(dense))
        generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]

        def batches(_: Sequence[Pass]) -> tuple[Tensor, Tensor]:
            drawn = torch.stack([torch.randint(len(x), (self.batch_size,), generator=one) for one in generators])
            return x[drawn], y[drawn]

        def error_of(weights: Tensor) -> list[float]:
            given, labels = task.test_set.tensors  # type: ignore[attr-defined]
            given = given.flatten(1).expand(len(weights), -1, -1).contiguous()
            *_, output = model.forward(weights, given)
            return [float(error) for error in 100 * (output.argmax(dim=2) != labels).float().mean(dim=1)]

        bound = config.distance_bound if config.staleness_lr == "distance" else None
        make = OPTIMIZERS[optimizer]
        made = ServedTrainings(model, torch.stack(initial), logs, batches, lambda tensors: make(tensors, rate), bound)
        return made, error_of

    def report(self, results: list[dict[str, Any]]) -> str:
        return staleness_report.as_markdown(results[0])

    def draw(self, results: list[dict[str, Any]]) -> None:
        [result] = results
        staleness_report.draw_counts(result["counts"], self.output / "staleness_counts.png")
        staleness_report.draw_errors(result["policies"], self.output / "staleness_errors.png")
        staleness_report.draw_downpour(result["downpour"], self.output / "staleness_downpour.png")


def config_of(text: str) -> ParameterServerConfig:
    """Returns the settings of ``POLICY`` or ``POLICY:SETTING=VALUE,...``; ValueError if one is wrong."""
    policy: Any = text.partition(":")[0]
    config = ParameterServerConfig(policy=policy, **parse_settings(text, ParameterServerConfig, ["policy"]))
    if config.policy == "easgd":
        raise ValueError(f"{text!r}: the simulated learners push gradients, and those of easgd replicas.")
    if config.delay_compensation != "none":
        raise ValueError(
            f"delay_compensation={config.delay_compensation!r} in {text!r} is not simulated: leave it out."
        )
    return config


if __name__ == "__main__":
    torch.set_num_threads(1)  # several wait for each other for longer than these products take
    sys.exit(command.main("benchmarks.staleness:Staleness"))
