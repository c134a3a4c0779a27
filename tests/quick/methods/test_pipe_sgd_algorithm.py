"""Algorithm 1 of Pipe-SGD in one process: which gradient updates the weights at which step."""

from __future__ import annotations

import pytest

from lightning_pipesync.methods.pipe_sgd.algorithm import Pipeline

RATE, STEPS = 0.1, 12


def gradient_of(weight: float, step: int) -> float:
    return 2 * (weight - step % 3)


def paper(staleness: int, num_iterations: int) -> list[float]:
    """Algorithm 1 line by line, from w[0] on: gradients of iterations -k to 0 are zero."""
    weight = 1.0
    gradients = dict.fromkeys(range(-staleness, 1), 0.0)  # communication thread, line 1
    weights = []
    for t in range(1, num_iterations + 1):  # computation thread, line 2
        weight -= RATE * gradients[t - (staleness + 1)]  # lines 3 to 5
        weights.append(weight)
        gradients[t] = gradient_of(weight, t)  # lines 6 to 10
    return weights


def run(staleness: int, warmup_steps: int = 0, drain: bool = False) -> tuple[list[float], list[int | None], list[int]]:
    """Returns the weight after each step, the step whose gradient it applied, and how late each update was."""
    pipeline: Pipeline[tuple[int, int, float]] = Pipeline(staleness, warmup_steps)
    weight, weights, applied, late = 1.0, [], [], []

    def update() -> None:
        nonlocal weight
        step, num_updates, gradient = pipeline.retire()
        weight -= RATE * gradient
        pipeline.count_update(num_updates)
        applied.append(step)
        late.append(pipeline.staleness)

    for step in range(1, STEPS + 1):
        pipeline.submit((step, pipeline.num_updates, gradient_of(weight, step)))
        if pipeline.due is not None:
            assert pipeline.due is pipeline.in_flight[0]
            update()
        else:
            applied.append(None)
        pipeline.end_step()
        weights.append(weight)
    while drain and pipeline.in_flight:
        update()
        weights.append(weight)
    assert pipeline.num_steps == STEPS
    assert pipeline.num_updates == len([step for step in applied if step is not None])
    return weights, applied, late


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_the_sequence_of_weights_is_that_of_the_paper(staleness: int) -> None:
    """Bit for bit: the weights after our step t are those of the paper's iteration t + 1."""
    weights, applied, late = run(staleness)
    assert [1.0, *weights] == paper(staleness, STEPS + 1)
    assert applied == [None] * staleness + list(range(1, STEPS - staleness + 1))
    assert late == [min(i, staleness) for i in range(STEPS - staleness)], "the first updates are less late"


@pytest.mark.parametrize("staleness", [1, 3])
def test_warmup_steps_are_synchronous(staleness: int) -> None:
    """The pipeline then fills, without updates, and runs."""
    weights, applied, late = run(staleness, warmup_steps=4)
    assert weights[:4] == run(0)[0][:4]
    assert applied == [1, 2, 3, 4, *[None] * staleness, *range(5, STEPS - staleness + 1)]
    assert late[:4] == [0] * 4
    assert late[-1] == staleness


def test_a_drain_applies_what_is_in_flight_in_order() -> None:
    weights, applied, late = run(3, drain=True)
    assert applied == [None] * 3 + list(range(1, STEPS + 1))
    assert late[-3:] == [3, 3, 3]
    assert weights[:STEPS] == run(3)[0]
