"""The policies of parameter servers: which gradients make an update, and who waits (lecture, "SGD Variants").

Learners push gradients at their own pace. The sequencer decides, push by push, which gradients make an update, and
which learners continue from the new weights. All servers follow its decisions in their order, so that each version of
the weights is the same on all shards, and a run can be replayed from its decisions. With independent shards each server
has a sequencer of its own for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_pipesync.methods.servers.messages import Decision, Gradient, Update


@dataclass(frozen=True)
class Policy:
    """What distinguishes the variants of SGD with parameter servers."""

    gradients: int
    """K, the number of gradients whose mean makes an update."""
    waits: bool
    """A learner waits for the update that uses its gradient, so that no update has two gradients of one learner."""
    cancels: bool = False
    """An update cancels the passes under way: those learners begin again with its weights."""
    bound: int | None = None
    """Maximum number of gradients that a learner may be ahead of the slowest one (SSP's s); None: any number."""
    together: bool = False
    """All learners skip a step in which one has a gradient that is not finite."""
    local: bool = False
    """Learners take local steps, and request weights when they want them."""
    by_steps: bool = False
    """What is pushed is how far the local steps of a learner have moved its weights, and counts by their number."""
    has_grace: bool = False
    """An update waits for the end of a period of grace once it has K gradients, if more may come."""


def policies(learners: int, k: int, n: int, staleness_bound: int, has_grace: bool = False) -> dict[str, Policy]:
    """Returns the policies by name."""
    return {
        "sync": Policy(learners, waits=True, together=True),
        "k_sync": Policy(k, waits=True, cancels=True),
        "k_batch_sync": Policy(k, waits=False, cancels=True),
        "k_async": Policy(k, waits=True),
        "k_batch_async": Policy(k, waits=False),
        "async": Policy(1, waits=True),
        "n_softsync": Policy(learners // n, waits=False),
        "ssp": Policy(1, waits=True, bound=staleness_bound),
        "downpour": Policy(1, waits=False, local=True),
        "easgd": Policy(1, waits=True),  # what is pushed is a replica, which attracts the weights, and they it
        "diloco": Policy(k, waits=True, by_steps=True, has_grace=has_grace),
    }


def weights_and_factor(factors: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Returns weights of gradients that add up to their number; times the returned factor they are ``factors``."""
    mean = sum(factors) / len(factors)
    return tuple(factor / mean for factor in factors) if mean else (1.0,) * len(factors), mean


class StalenessLR:
    """The learning rate by staleness (lecture, "Staleness Dependent Learning Rate"; Zhang et al., ICDM and IJCAI 2016).

    The rules are those of the setting ``staleness_lr``. ``"distance"`` is left to the servers, which know the weights.
    """

    def __init__(self, rule: str) -> None:
        self._rule, self._total, self._count = rule, 0, 0

    def of(self, staleness: Sequence[int]) -> tuple[tuple[float, ...], float]:
        """Returns the weights of an update's gradients, as :func:`weights_and_factor`, and the factor on the rate."""
        self._total, self._count = self._total + sum(staleness), self._count + len(staleness)
        if self._rule == "gradient":
            return weights_and_factor([1 / max(1, updates) for updates in staleness])
        factor = 1 / max(1.0, self.mean) if self._rule == "mean" else 1.0
        return (1.0,) * len(staleness), factor

    @property
    def mean(self) -> float:
        """The mean staleness of all gradients so far; 0 before the first."""
        return self._total / self._count if self._count else 0.0

    def state_dict(self) -> dict[str, int]:
        return {"total": self._total, "count": self._count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._total, self._count = state["total"], state["count"]


@dataclass
class _Progress:
    """What the sequencer knows of a rank."""

    clock: int = 0  # the gradients that it has pushed since all had the same weights last
    waiting: bool = False  # for weights
    retired: bool = False  # until all have retired
    serves: bool = False  # and takes no steps; it gets weights when all have retired
    finite: bool | None = None  # its gradient of a step that all take together; None: not known yet

    @property
    def trains(self) -> bool:
        """Whether it may push a gradient before all have retired."""
        return not (self.retired or self.serves)


class Sequencer:
    """Decides, in the order in which the learners' gradients and requests arrive.

    ``servers`` of the ``ranks`` take no steps. With ``predicts`` learners get weights predicted by as many updates as
    gradients are stale on average.
    """

    def __init__(
        self,
        policy: Policy,
        ranks: Iterable[int],
        staleness_lr: str = "none",
        predicts: bool = False,
        servers: Collection[int] = (),
    ) -> None:
        self.policy, self.staleness_lr, self.predicts = policy, StalenessLR(staleness_lr), predicts
        self.learners = {rank: _Progress(serves=rank in servers) for rank in ranks}
        self.version = 0  # the number of updates so far
        self.pending: list[Gradient] = []  # that no update has used yet
        self.in_grace = False  # there are enough for an update, which waits for more

    def push(self, gradient: Gradient) -> list[Decision]:
        """A learner has pushed a gradient, and waits for weights unless it takes local steps."""
        learner = self.learners[gradient.rank]
        learner.clock, learner.waiting = learner.clock + 1, learner.waiting or not self.policy.local
        if self.policy.cancels and gradient.version < self.version:
            return [Decision(dropped=gradient), *self._release()]
        self.pending.append(gradient)
        return self._update_if_due() + self._release()

    def end_grace(self) -> list[Decision]:
        """The period of grace is over."""
        return self._update_if_due(waits_for_more=False) + self._release()

    def fetch(self, rank: int) -> list[Decision]:
        """A learner requests weights without a gradient."""
        self.learners[rank].waiting = True
        return self._release()

    def check(self, rank: int, finite: bool) -> list[Decision]:
        """A learner reports whether its gradient of a step that all take together is finite."""
        self.learners[rank].finite = finite
        return self._skip_if_due()

    def retire(self, rank: int) -> list[Decision]:
        """A learner pushes nothing until all have retired.

        When all have, what is pending becomes an update, and all get the same weights.
        """
        self.learners[rank].retired = True
        decisions = self._skip_if_due() + self._update_if_due()
        if not all(learner.retired for learner in self.learners.values()):
            return decisions + self._release()
        for learner in self.learners.values():
            learner.retired, learner.waiting, learner.clock = False, False, 0
        return [*decisions, Decision(released=tuple(sorted(self.learners)), whole=True)]

    def lose(self, rank: int) -> list[Decision]:
        """A learner is lost. Its pending gradients are used all the same."""
        if self.learners.pop(rank, None) is None or not self.learners:
            return []
        retired = [other for other, learner in self.learners.items() if learner.retired]
        return self.retire(retired[0]) if retired else self._skip_if_due() + self._update_if_due() + self._release()

    def _skip_if_due(self) -> list[Decision]:
        """Decides whether a step is skipped, once all learners that take it have reported."""
        reported = {rank: learner for rank, learner in self.learners.items() if learner.finite is not None}
        if not reported or any(learner.finite is None and learner.trains for learner in self.learners.values()):
            return []
        skip = not all(learner.finite for learner in reported.values())
        for learner in reported.values():
            learner.finite = None
        return [Decision(skip=skip, stepping=tuple(reported))]

    def _update_if_due(self, waits_for_more: bool = True) -> list[Decision]:
        """Makes updates of the pending gradients if they are enough, or if no learner is left who would add one."""
        waits = self.policy.waits
        working = [learner for learner in self.learners.values() if learner.trains and not (learner.waiting and waits)]
        decisions = []
        for optimizer in sorted({gradient.optimizer for gradient in self.pending}):
            used = [gradient for gradient in self.pending if gradient.optimizer == optimizer]
            if working and len(used) < self.policy.gradients:
                continue
            if working and waits_for_more and self.policy.has_grace:
                self.in_grace = True
                continue
            self.in_grace = False
            self.pending = [gradient for gradient in self.pending if gradient.optimizer != optimizer]
            self.version += 1
            used.sort(key=lambda gradient: (gradient.rank, gradient.step))
            weights, lr_factor = self.staleness_lr.of([self.version - 1 - gradient.version for gradient in used])
            if self.policy.by_steps:
                counts = zip(weights, used, strict=True)
                weights, _ = weights_and_factor([weight * gradient.num_steps for weight, gradient in counts])
            decisions.append(Decision(update=Update(self.version, tuple(used), weights, lr_factor)))
        return decisions

    def _release(self) -> list[Decision]:
        """Releases the learners that wait, and need not wait any longer."""
        bound, in_pending = self.policy.bound, {gradient.rank for gradient in self.pending}
        slowest = min((learner.clock for learner in self.learners.values() if learner.trains), default=0)
        released = []
        for rank, learner in self.learners.items():
            awaits_update = self.policy.waits and rank in in_pending
            is_ahead = bound is not None and learner.clock - slowest > bound
            if learner.waiting and not learner.retired and not awaits_update and not is_ahead:
                learner.waiting = False
                released.append(rank)
        ahead = self.staleness_lr.mean if self.predicts else 0.0
        return [Decision(released=tuple(sorted(released)), ahead=ahead)] if released else []
