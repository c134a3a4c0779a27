"""The sequencer's decisions, step by step, as the lecture draws them."""

from __future__ import annotations

import pytest

from lightning_pipesync.data.work_queue import WorkQueue
from lightning_pipesync.methods.servers.config import ParameterServerConfig
from lightning_pipesync.methods.servers.messages import Accrued, Decision, Gradient
from lightning_pipesync.methods.servers.policies import Policy, Sequencer

SHARDS = {"policy": "async", "independent_shards": True}


class Timeline:
    """Three learners, each of which pushes a gradient of the weights that it was released with."""

    def __init__(self, policy: Policy, staleness_lr: str = "none") -> None:
        self.sequencer = Sequencer(policy, range(3), staleness_lr)
        self.versions, self.steps = [0, 0, 0], [0, 0, 0]

    def push(self, rank: int) -> tuple[list[int], list[int]]:
        """Returns the ranks whose gradients make an update, and those that are released."""
        self.steps[rank] += 1
        return self.follow(self.sequencer.push(Gradient(rank, self.steps[rank], self.versions[rank])))

    def fetch(self, rank: int) -> tuple[list[int], list[int]]:
        return self.follow(self.sequencer.fetch(rank))

    def retire(self, rank: int) -> tuple[list[int], list[int]]:
        return self.follow(self.sequencer.retire(rank))

    def lose(self, rank: int) -> tuple[list[int], list[int]]:
        return self.follow(self.sequencer.lose(rank))

    def follow(self, decisions: list[Decision]) -> tuple[list[int], list[int]]:
        used = [gradient.rank for one in decisions if one.update for gradient in one.update.gradients]
        released = [rank for one in decisions for rank in one.released]
        for rank in released:
            self.versions[rank] = self.sequencer.version
        return used, released


ALL = [0, 1, 2]


def timeline(policy: str, **settings: int) -> Timeline:
    return Timeline(ParameterServerConfig(policy=policy, **settings).policy_for(3))


#: By what a policy does: the policy, and what learners do; each time, whose gradients are used and who is released.
DECISIONS: dict[str, tuple[Timeline, list[tuple[str, int, list[int], list[int]]]]] = {
    "sync waits for all": (timeline("sync"), [("push", 2, [], []), ("push", 0, [], []), ("push", 1, ALL, ALL)]),
    "k_sync cancels late passes, whose gradients are dropped": (
        timeline("k_sync", k=2),
        [
            *[("push", 2, [], []), ("push", 0, [0, 2], [0, 2]), ("push", 1, [], [1]), ("push", 1, [], [])],
            *[("push", 0, [0, 1], [0, 1]), ("fetch", 2, [], [2])],  # it has noticed that it is late
        ],
    ),
    "k_batch_sync lets the fast learner continue with the same weights": (
        timeline("k_batch_sync", k=3),
        [("push", 0, [], [0]), ("push", 0, [], [0]), ("push", 1, [0, 0, 1], [1]), ("push", 2, [], [2])],
    ),
    "k_async keeps late gradients": (
        timeline("k_async", k=2),
        [("push", 0, [], []), ("push", 1, [0, 1], [0, 1]), ("push", 2, [], []), ("push", 0, [0, 2], [0, 2])],
    ),
    "k_batch_async takes two gradients of one learner": (
        timeline("k_batch_async", k=2),
        [("push", 0, [], [0]), ("push", 0, [0, 0], [0])],
    ),
    "async updates at each push": (timeline("async"), [("push", rank, [rank], [rank]) for rank in (0, 0, 2)]),
    "n_softsync updates after a share of the learners": (
        timeline("n_softsync", n=1),
        [("push", 0, [], [0]), ("push", 0, [], [0]), ("push", 2, [0, 0, 2], [2])],
    ),
    "n_softsync with as many shares as learners is async": (timeline("n_softsync", n=3), [("push", 1, [1], [1])]),
    "ssp makes a learner that is two ahead wait until the slowest has moved": (
        timeline("ssp", staleness_bound=1),
        [("push", 0, [0], [0]), ("push", 0, [0], []), ("push", 1, [1], [1]), ("push", 2, [2], [0, 2])],
    ),
    "a retired learner is not waited for, and all begin again together": (
        timeline("sync"),
        [
            *[("push", 0, [], []), ("retire", 1, [], []), ("push", 2, [0, 2], [0, 2]), ("push", 0, [], [])],
            *[("retire", 2, [0], [0]), ("retire", 0, [], ALL)],
        ],
    ),
    "pending gradients are applied at the end": (
        timeline("k_batch_async", k=3),
        [("push", 0, [], [0]), ("retire", 0, [], []), ("retire", 1, [], []), ("retire", 2, [0], ALL)],
    ),
    "a lost learner is not waited for": (
        timeline("sync"),
        [("push", 0, [], []), ("push", 1, [], []), ("lose", 2, [0, 1], [0, 1])],
    ),
}


@pytest.mark.parametrize("what", DECISIONS)
def test_decisions(what: str) -> None:
    run, moments = DECISIONS[what]
    for number, (does, rank, used, released) in enumerate(moments):
        assert getattr(run, does)(rank) == (used, released), f"at moment {number}"


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        *((policy, {}) for policy in ("sync", "k_batch_async", "async", "easgd")),
        *((policy, {"k": 3}) for policy in ("k_sync", "k_async")),
        ("k_batch_sync", {"k": 2}),
        ("n_softsync", {"n": 2}),
        ("ssp", {"staleness_bound": 1}),
        ("diloco", {"k": 3}),
    ],
)
@pytest.mark.parametrize("has_pushed", [False, True])
def test_the_others_continue_without_a_lost_learner(policy: str, settings: dict[str, int], has_pushed: bool) -> None:
    """K is bounded by the number of learners that are left."""
    run, running = timeline(policy, **settings), {0, 1}
    if has_pushed:
        run.push(2)
    running |= set(run.lose(2)[1])
    for _ in range(5):
        for rank in (0, 1):
            if rank in running:
                running.discard(rank)
                running |= set(run.push(rank)[1])
    assert run.steps[:2] == [5, 5]
    run.retire(0)
    assert run.retire(1)[1] == [0, 1]
    assert not run.sequencer.pending


def test_a_period_of_grace_takes_in_who_comes_meanwhile() -> None:
    run = timeline("diloco", k=1, grace_s=9)
    assert run.push(1) == ([], [])
    assert run.sequencer.in_grace
    assert run.push(0) == ([], [])
    assert run.follow(run.sequencer.end_grace()) == ([0, 1], [0, 1])
    assert not run.sequencer.in_grace
    assert run.push(2) == ([], []), "of the weights before"
    assert run.push(0) == ([], [])
    assert run.push(1) == ([0, 1, 2], [0, 1, 2]), "nobody is left to wait for"
    assert not run.sequencer.in_grace


def test_learners_count_by_their_steps() -> None:
    sequencer = Sequencer(Policy(2, waits=True, by_steps=True), range(3), "gradient")
    sequencer.version = 3
    sequencer.push(Gradient(0, 6, version=1, accrued=Accrued(1, ())))
    decision = sequencer.push(Gradient(1, 8, version=2, accrued=Accrued(5, ())))[0]
    assert decision.update is not None
    assert decision.update.weights == pytest.approx((6 / 2 / 7 * 2, 4 / 7 * 2))
    assert decision.update.lr_factor == pytest.approx((1 / 2 + 1) / 2), "the rate depends on the staleness alone"


@pytest.mark.parametrize(
    ("rule", "weights", "factor"),
    [("none", (1, 1), 1), ("mean", (1, 1), 1 / 2), ("gradient", (4 / 5, 6 / 5), (1 / 3 + 1 / 2) / 2)],
)
def test_stale_gradients_count_less(rule: str, weights: tuple[float, ...], factor: float) -> None:
    """Of staleness 3 and 2, after three that were fresh."""
    sequencer = Sequencer(Policy(2, waits=False), range(3), rule)
    sequencer.version = 3
    sequencer.staleness_lr.load_state_dict({"total": 3, "count": 2})
    sequencer.push(Gradient(0, 1, version=0))
    decision = sequencer.push(Gradient(1, 1, version=1))[0]
    assert decision.update is not None
    assert decision.update.weights == pytest.approx(weights)
    assert decision.update.lr_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dedicated_servers": True}, "set servers=1, or more"),
        ({**SHARDS, "policy": "ssp"}, "independent_shards=True has no effect with policy='ssp'"),
        ({**SHARDS, "policy": "easgd"}, "independent_shards=True has no effect with policy='easgd'"),
        ({**SHARDS, "delay_compensation": "momentum"}, "delay_compensation='momentum' is for weights of one"),
        ({**SHARDS, "staleness_lr": "distance"}, "staleness_lr='distance' is for weights of one version"),
        (
            {"policy": "diloco", "compression": "chunked_topk"},
            "outer_momentum=0.9 is another momentum beside the residuals of compression='chunked_topk': set outer_mom",
        ),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParameterServerConfig(**settings)


def test_more_gradients_than_learners_are_refused() -> None:
    with pytest.raises(ValueError, match="k=4 of policy='k_sync' is more than the 3 learners"):
        timeline("k_sync", k=4)


def test_the_last_batches_are_kept_for_ranks_without_one() -> None:
    queue = WorkQueue(range(3))
    assert [queue.take(0, (1, 0), 5, True) for _ in range(4)] == [0, 1, 2, None]
    assert [queue.take(rank, (1, 0), 5, True) for rank in (1, 1, 2, 0)] == [3, None, 4, None]
    resumed = WorkQueue(range(3))
    resumed.load_state_dict(queue.state_dict())
    assert resumed.take(1, (1, 0), 5, True) is None
    assert [resumed.take(1, (1, 1), 3, True) for _ in range(2)] == [0, None]
    assert [resumed.take(1, (1, 2), 3, False) for _ in range(4)] == [0, 1, 2, None]
    assert resumed.take(1, (2, 0), 3, False) == 0, "another loader begins with its first batch"
