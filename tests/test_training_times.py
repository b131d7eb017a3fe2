"""What preparation and learning cost in the simulator: FLOPs at a utilisation, fixed seconds, their fit to a run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.scheduler.planner import Planner
from rlhfless.types.cluster import GPUS, Cluster
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Algorithm
from sim.executor import SimExecutor
from sim.world import Training, World
from tests.profiles import tiny_profile
from traces.load import steps
from traces.synthesize import synthesize

GPU, GPUS_USED, PARAMETERS = GPUS["a100_sxm"], 8, 7.6e9


def test_shipped_training_is_in_proportion_to_tokens() -> None:
    """No set-up's fixed seconds are taken for another's: twice the tokens take twice the time, to the last bit."""
    training, profile = Training(), tiny_profile()
    for tokens in (1.0, 12345.0, 4e6):
        assert training.preparation_s("critic", profile, 2 * tokens, GPU, 8) == 2 * training.preparation_s(
            "critic", profile, tokens, GPU, 8
        )
        for algorithm in ("ppo", "grpo"):
            once = training.learning_s(algorithm, profile, tokens, GPU, 8)
            assert training.learning_s(algorithm, profile, 2 * tokens, GPU, 8) == 2 * once


def report(training: Training, algorithm: Algorithm) -> StepReport:
    trace = synthesize(
        "gsm8k", prompts=12, epochs=1, responses_per_prompt=2, max_response_tokens=200, prompts_per_step=12, seed=0,
        algorithm=algorithm,
    )  # fmt: skip
    workload, outcome = next(steps(trace))
    cluster, profile = Cluster.uniform("l40s", 4), tiny_profile(kv_capacity_tokens=9000)
    world = World(profile=profile, outcome_of=lambda _: outcome, training=training)
    executor = SimExecutor(cluster=cluster, world=world)
    return executor.execute(Planner("verl", profile, cluster).plan(workload, executor.snapshot()), workload)


@pytest.mark.parametrize(("algorithm", "prepared", "trained"), [("grpo", 2, 1), ("ppo", 3, 2)])
def test_fixed_seconds_are_those_of_every_pass(algorithm: Algorithm, prepared: int, trained: int) -> None:
    """Reward, reference and, in PPO, critic take turns; the learner makes old log-probabilities, updates each model."""
    bare, slow = report(Training(), algorithm), report(Training(forward_fixed_s=3.0, update_fixed_s=7.0), algorithm)
    assert slow.phase_s("generation") == bare.phase_s("generation")
    assert slow.phase_s("preparation") - bare.phase_s("preparation") == pytest.approx(3.0 * prepared)
    assert slow.phase_s("learning") - bare.phase_s("learning") == pytest.approx(3.0 + 7.0 * trained)


@given(
    forward=st.tuples(st.floats(0.05, 0.9), st.floats(0, 100)),
    update=st.tuples(st.floats(0.05, 0.9), st.floats(0, 100)),
    seed=st.integers(0, 10**6),
)
def test_a_fit_finds_what_was_put_in(forward: tuple[float, float], update: tuple[float, float], seed: int) -> None:
    training = Training(
        forward_mfu=forward[0], forward_fixed_s=forward[1], train_mfu=update[0], update_fixed_s=update[1]
    )
    tokens = stream(seed, "tokens").uniform(1e6, 4e6, 20)
    forward_s = np.array([training.forward_s(PARAMETERS, each, GPU, GPUS_USED) for each in tokens])
    update_s = np.array([training.update_s(PARAMETERS, each, GPU, GPUS_USED) for each in tokens])
    found = Training.fitted(PARAMETERS, tokens, forward_s, update_s, GPU, GPUS_USED)
    for name in ("forward_mfu", "train_mfu", "forward_fixed_s", "update_fixed_s"):
        assert getattr(found, name) == pytest.approx(getattr(training, name), rel=1e-6, abs=1e-6)
    alone = Training.fitted(PARAMETERS, tokens, forward_s, update_s, GPU, GPUS_USED, fixed=False)
    assert alone.forward_fixed_s == alone.update_fixed_s == 0
    assert alone.forward_mfu <= found.forward_mfu * (1 + 1e-6)


def test_fixed_seconds_are_never_below_zero() -> None:
    """Passes whose time grows faster than their tokens."""
    tokens = np.linspace(1e6, 4e6, 20)
    seconds = 40 * (tokens / 2e6) ** 1.5
    found = Training.fitted(PARAMETERS, tokens, seconds, 3 * seconds, GPU, GPUS_USED)
    assert found == Training.fitted(PARAMETERS, tokens, seconds, 3 * seconds, GPU, GPUS_USED, fixed=False)


def test_what_cannot_be_is_refused() -> None:
    tokens, seconds = np.array([1e6, 2e6]), np.array([100.0, 200.0])
    with pytest.raises(
        InputError, match=r"forward_fixed_s is -1\.0; it must be a finite number of seconds, at least 0"
    ):
        Training(forward_fixed_s=-1.0)
    with pytest.raises(InputError, match="update_fixed_s is inf"):
        replace(Training(), update_fixed_s=float("inf"))
    with pytest.raises(InputError, match="more than 0 seconds"):
        Training.fitted(PARAMETERS, tokens, seconds * 0, seconds, GPU, GPUS_USED)
    with pytest.raises(InputError, match=r"grow .* times as fast with tokens as at the GPUs' peak"):
        Training.fitted(PARAMETERS, tokens, seconds * 1e-3, seconds, GPU, GPUS_USED)
