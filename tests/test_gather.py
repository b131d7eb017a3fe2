"""Where RLHFuse's global cut falls: the prediction against single iterations, the choice against all others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench import simulate
from experiments.study import GRPO, PPO, Asked, Lengths
from rlhfless.rng import stream
from rlhfless.scheduler import gather
from rlhfless.scheduler.width import Course
from rlhfless.types.arrays import FloatArray, ints
from tests.profiles import tiny_profile

PROFILE = tiny_profile(max_slots=32, kv_capacity_tokens=10**6)
"""Room for all: nothing queues, so that iterations can be counted one by one."""
PROMPT = 40


def one_by_one(lengths: FloatArray) -> Course:
    """Stretches that end at each response."""
    ordered = np.sort(lengths)
    step = np.diff(ordered, prepend=0.0)
    context = PROMPT + ordered - step / 2
    return Course(step=step, running=ints(np.arange(ordered.size, 0, -1)), context=context, footprint=context)


def twin(lengths: FloatArray, actors: int, left: int) -> tuple[float, float]:
    """Seconds and GPU-seconds where moves take no time, one iteration after the other."""
    number, time_s, cost = actors, 0.0, 0.0
    most = -(-lengths.size // actors)  # what an actor began with
    for token in range(int(lengths.max())):
        running = int((lengths > token).sum())
        if running <= left:
            number, left = min(-(-running // most), actors), -1
        iteration_s = float(PROFILE.decode_iteration_s(running / number, PROMPT + token + 0.5))
        time_s, cost = time_s + iteration_s, cost + PROFILE.data.tp * number * iteration_s
    return time_s, cost


@settings(max_examples=50)
@given(
    seed=st.integers(0, 10**6), count=st.integers(8, 32), actors=st.integers(1, 4), share=st.floats(0.05, 1.0)
)  # fmt: skip
def test_a_cut_costs_what_its_iterations_cost(seed: int, count: int, actors: int, share: float) -> None:
    # no two end at once: how many would then be left depends on which is told of first
    lengths = stream(seed, "lengths").choice(np.arange(5.0, 200.0), count, replace=False)
    left = ints([max(int(share * count), 1)])
    slots = -(-count // actors)
    time_s, cost = gather.predicted(PROFILE, one_by_one(lengths), actors, slots, left, 0.0)
    assert (time_s[0], cost[0]) == pytest.approx(twin(lengths, actors, int(left[0])), rel=0.01)
    slower_s, dearer = gather.predicted(PROFILE, one_by_one(lengths), actors, slots, left, 1e-4)
    assert slower_s[0] >= time_s[0]
    assert dearer[0] >= cost[0]
    assert (slower_s[0] > time_s[0]) == (dearer[0] > cost[0])


def test_a_single_actor_has_nothing_to_gather() -> None:
    course = Course.of(stream(0, "lengths").lognormal(4.5, 0.5, (30, 1)), np.full(30, PROMPT))
    time_s, cost = gather.predicted(PROFILE, course, 1, 30, ints([1, 10, 30]), 1.0)
    assert np.ptp(time_s) == np.ptp(cost) == 0


@pytest.mark.parametrize("lengths", [PPO, GRPO], ids=lambda each: each.algorithm)
def test_no_other_cut_is_much_better(lengths: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time x GPU-seconds in simulation, whose actors are not even: the choice against every share that is tried."""
    asked = Asked(batch=96)
    steps, setting = asked.steps(lengths, 0), asked.setting(0)

    def product() -> float:
        summary = simulate("rlhfuse", steps, setting, actors=3).summary
        assert summary.cuts.mean > 0
        return summary.generation_s.mean * summary.decode_executed_gpu_s.mean

    chosen, products = product(), []
    for share in gather.SHARES:
        monkeypatch.setattr(gather, "SHARES", np.array([share]))
        products.append(product())
    assert chosen < 1.03 * min(products)
    assert chosen < 0.97 * max(products)
