"""The policies of a parameter server, and which gradients it applies in which order (lecture, "SGD Variants").

Learners push gradients at their own pace. The sequencer decides, push by push, which gradients make an update, and
which learners go on from the new weights. All servers follow its decisions in their order, so that each version of the
weights is the same on all shards, and a run can be replayed from its decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Policy:
    """What distinguishes the variants of SGD with a parameter server.

    Attributes:
        gradients: K, the number of gradients whose mean makes an update.
        waits: whether a learner waits for the update that its gradient is part of, so that no update has two gradients
            of one learner. Otherwise it goes on at once, from the weights that there are.
        cancels: whether an update cancels the passes that are under way: those learners start anew from its weights.
        bound: the most gradients that a learner may be ahead of the slowest one (SSP's s); None: any number.
        together: whether all learners skip a step of which one has a gradient that is not finite.
        local: whether learners take local steps, and ask for weights at their own time (Downpour).
        elastic: whether what learners push is their replica, which then pulls at the weights, and they at it (EASGD).
    """

    gradients: int
    waits: bool
    cancels: bool = False
    bound: int | None = None
    together: bool = False
    local: bool = False
    elastic: bool = False


@dataclass(frozen=True)
class Fetch:
    """A learner's taking of weights.

    Attributes:
        step: in which step.
        version: of the weights.
        before_pass: whether before the step's gradient is computed, or after that and before the local update.
    """

    step: int
    version: int
    before_pass: bool


@dataclass(frozen=True)
class Accrued:
    """What a gradient consists of that a learner has accrued in local steps.

    Attributes:
        first_step: the first of these steps; the last one is the gradient's.
        fetches: when the learner has taken weights since its last push.
    """

    first_step: int
    fetches: tuple[Fetch, ...]


@dataclass(frozen=True)
class Gradient:
    """A learner's gradient.

    Attributes:
        rank: of the learner.
        step: the number of the learner's step: 1 for the first one.
        version: the version of the weights that it was computed at.
        optimizer: the index of the optimizer whose parameters it is of.
        ahead: the updates by which those weights were predicted from that version.
        accrued: the local steps whose gradients it is the sum of; None: it is of one step.
    """

    rank: int
    step: int
    version: int
    optimizer: int = 0
    ahead: float = 0.0
    accrued: Accrued | None = None


@dataclass(frozen=True)
class Update:
    """An update of the weights, by the mean of several gradients.

    Attributes:
        version: of the weights after it: 1 for the first one.
        gradients: of one optimizer's parameters, ordered by rank, and by step.
        weights: of each gradient in their mean; they add up to their number.
        lr_factor: factor on the learning rate.
    """

    version: int
    gradients: tuple[Gradient, ...]
    weights: tuple[float, ...]
    lr_factor: float

    @property
    def optimizer(self) -> int:
        """The index of the optimizer."""
        return self.gradients[0].optimizer

    @property
    def staleness(self) -> list[int]:
        """The number of updates between the weights of each gradient and this one."""
        return [self.version - 1 - gradient.version for gradient in self.gradients]


@dataclass(frozen=True)
class Decision:
    """What all servers do next.

    Attributes:
        update: the update that they make first; None: none.
        dropped: a gradient that they do not use: its pass was cancelled.
        released: the learners that they then send the weights to.
        ahead: the updates by which they predict these weights.
        whole: whether all ranks are to have the same weights, which no codec changes.
        skip: whether all learners skip a step that they take together; None: nothing is said of one.
    """

    update: Update | None = None
    dropped: Gradient | None = None
    released: tuple[int, ...] = ()
    ahead: float = 0.0
    whole: bool = False
    skip: bool | None = None


def weights_and_factor(factors: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Returns weights of gradients, of their number in all, and the factor on the rate that makes them ``factors``."""
    mean = sum(factors) / len(factors)
    return tuple(one / mean for one in factors) if mean else (1.0,) * len(factors), mean


class StalenessLR:
    """The learning rate by staleness (lecture, "Staleness Dependent Learning Rate"; Zhang et al., ICDM and IJCAI 2016).

    Args:
        rule: ``"none"``; ``"mean"``: divided by the mean staleness so far, where that is above 1; ``"gradient"``: each
            gradient is divided by its own; ``"distance"``: decided by the servers, which know the weights.
    """

    def __init__(self, rule: str) -> None:
        self._rule, self._total, self._count = rule, 0, 0

    def of(self, staleness: Sequence[int]) -> tuple[tuple[float, ...], float]:
        """Returns the weight of each gradient of an update, of their number in all, and a factor on the rate."""
        self._total, self._count = self._total + sum(staleness), self._count + len(staleness)
        if self._rule == "gradient":
            return weights_and_factor([1 / max(1, one) for one in staleness])
        factor = 1 / max(1.0, self.mean) if self._rule == "mean" else 1.0
        return (1.0,) * len(staleness), factor

    @property
    def mean(self) -> float:
        """The mean staleness of all gradients so far; 0 before the first."""
        return self._total / self._count if self._count else 0.0

    def state_dict(self) -> dict[str, int]:
        """Returns the sum and the number of the gradients' staleness."""
        return {"total": self._total, "count": self._count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resumes from what :meth:`state_dict` returned."""
        self._total, self._count = state["total"], state["count"]


@dataclass
class _Learner:
    """What the sequencer knows of a learner.

    Attributes:
        clock: the gradients that it has pushed since all had the same weights last.
        waiting: whether it waits for weights.
        retired: whether it has ended its part, until all have.
        serves: whether it is no learner, and gets the weights when all others have ended their parts.
        finite: whether its gradient of a step that all take together is finite; None: it has not said so.
    """

    clock: int = 0
    waiting: bool = False
    retired: bool = False
    serves: bool = False
    finite: bool | None = None

    @property
    def trains(self) -> bool:
        """Whether it may push a gradient before all have ended their parts."""
        return not (self.retired or self.serves)


@dataclass
class Sequencer:
    """Takes the decisions, from what the learners tell, in the order in which that arrives.

    Attributes:
        policy: the variant of SGD.
        staleness_lr: the learning rate by staleness.
        predicts: whether learners go on from weights that are predicted by as many updates as gradients are stale.
        version: the number of updates so far.
        pending: gradients that no update has used yet.
    """

    policy: Policy
    staleness_lr: StalenessLR
    learners: dict[int, _Learner]
    predicts: bool = False
    version: int = 0
    pending: list[Gradient] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        policy: Policy,
        ranks: Iterable[int],
        staleness_lr: str = "none",
        predicts: bool = False,
        servers: Collection[int] = (),
    ) -> Sequencer:
        """Returns the sequencer of ranks, which have the weights of version 0; ``servers`` of them only serve."""
        learners = {rank: _Learner(serves=rank in servers) for rank in ranks}
        return cls(policy, StalenessLR(staleness_lr), learners, predicts)

    def push(self, gradient: Gradient) -> list[Decision]:
        """Takes the gradient of a learner, which wants weights next, unless it takes local steps."""
        learner = self.learners[gradient.rank]
        learner.clock, learner.waiting = learner.clock + 1, learner.waiting or not self.policy.local
        if self.policy.cancels and gradient.version < self.version:
            return [Decision(dropped=gradient), *self._release()]
        self.pending.append(gradient)
        return self._update_if_due() + self._release()

    def fetch(self, rank: int) -> list[Decision]:
        """Takes a learner's request for weights, without a gradient."""
        self.learners[rank].waiting = True
        return self._release()

    def check(self, rank: int, finite: bool) -> list[Decision]:
        """Takes whether a learner's gradient is finite, of a step that all take together."""
        self.learners[rank].finite = finite
        return self._skip_if_due()

    def retire(self, rank: int) -> list[Decision]:
        """Takes the end of a learner's part: it pushes nothing until all learners have retired.

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
        """Takes the loss of a learner. Its gradients that are pending stay."""
        if self.learners.pop(rank, None) is None or not self.learners:
            return []
        ended = [one for one, learner in self.learners.items() if learner.retired]
        return self.retire(ended[0]) if ended else self._skip_if_due() + self._update_if_due() + self._release()

    def _skip_if_due(self) -> list[Decision]:
        """Says whether a step is skipped once all learners that take it have told of their gradients."""
        told = [learner for learner in self.learners.values() if learner.finite is not None]
        if not told or any(one.finite is None and one.trains for one in self.learners.values()):
            return []
        skip = not all(learner.finite for learner in told)
        for learner in told:
            learner.finite = None
        return [Decision(skip=skip)]

    def _update_if_due(self) -> list[Decision]:
        """Makes updates of the pending gradients if they are enough, or if nobody is left who would add one."""
        working = [one for one in self.learners.values() if one.trains and not (one.waiting and self.policy.waits)]
        decisions = []
        for optimizer in sorted({gradient.optimizer for gradient in self.pending}):
            used = [gradient for gradient in self.pending if gradient.optimizer == optimizer]
            if len(used) < self.policy.gradients and working:
                continue
            self.pending = [gradient for gradient in self.pending if gradient.optimizer != optimizer]
            self.version += 1
            used.sort(key=lambda gradient: (gradient.rank, gradient.step))
            weights, lr_factor = self.staleness_lr.of([self.version - 1 - gradient.version for gradient in used])
            decisions.append(Decision(update=Update(self.version, tuple(used), weights, lr_factor)))
        return decisions

    def _release(self) -> list[Decision]:
        """Releases the learners that wait, and need not wait any longer."""
        bound, own = self.policy.bound, {gradient.rank for gradient in self.pending}
        slowest = min((one.clock for one in self.learners.values() if one.trains), default=0)
        released = []
        for rank, learner in self.learners.items():
            awaits_update = self.policy.waits and rank in own
            is_ahead = bound is not None and learner.clock - slowest > bound
            if learner.waiting and not learner.retired and not awaits_update and not is_ahead:
                released.append(rank)
        for rank in released:
            self.learners[rank].waiting = False
        ahead = self.staleness_lr.mean if self.predicts else 0.0
        return [Decision(released=tuple(sorted(released)), ahead=ahead)] if released else []
