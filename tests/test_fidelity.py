"""The evidence for the simulator: that its parts say what they claim, and that the real log's figures hold."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import fidelity, fidelity_twin, fidelity_verl, perturb
from experiments.bench import simulate
from experiments.estimators import BUCKETS, BucketEstimator, Misses, buckets, of_accuracy, share_right
from experiments.evidence import compared
from experiments.fidelity_verl import AGAINST, Work, engine_profile, line, renewed, work
from experiments.perturb import EXACT, Case
from rlhfless.errors import InputError, SchemaError
from rlhfless.scheduler.planner import Planner
from rlhfless.types.arrays import floats, ints
from rlhfless.types.cluster import GPUS, Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.profile import Profile
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.profiles import load, roofline
from sim.profiles.calibrate import Observation, drive_s
from sim.profiles.registry import model_shape
from sim.world import World
from tests.commands import call
from traces.importers import verl
from traces.load import steps
from traces.synthesize import synthesize

SMALL = Case(model="qwen2.5-3b", gpu="l40s", tp=2, gpus=8, prompts=24, cap_tokens=256, epochs=2)


def real_log() -> Path:
    folder = os.environ.get("RLHFLESS_TEST_DATA")
    if not folder:
        pytest.skip("RLHFLESS_TEST_DATA is not set: the folder with verl/qwen2-7b_math.log")
    return Path(folder) / fidelity.VERL_FILE


def workload_of(outcome: Outcome, cap: int = 4096) -> Workload:
    prompts, n = outcome.response_tokens.shape
    return Workload(
        step=0, epoch=0, algorithm="grpo", prompt_ids=np.arange(prompts), prompt_tokens=ints(np.full(prompts, 8)),
        responses_per_prompt=n, max_response_tokens=cap,
    )  # fmt: skip


def observation(seed: int, prompts: int = 24, n: int = 3) -> Observation:
    rng = np.random.default_rng(seed)
    queues = np.array_split(rng.permutation(prompts * n), 4)
    return Observation(
        prompt_tokens=ints(rng.integers(5, 200, prompts)),
        response_tokens=ints(rng.integers(1, 600, (prompts, n))),
        actors=tuple(map(ints, queues)),
        seconds=1.0,
    )


# ---- errors


def test_sizes_of_errors() -> None:
    row = compared(floats([1.1, 2.0, 2.4]), floats([1.0, 2.0, 3.0]), against="x", quantity="q", scope="s")
    assert row.n == 3
    assert row.median == pytest.approx(0.1)
    assert row.mean == pytest.approx(0.1)
    assert row.p90 == pytest.approx(0.18)
    assert row.r == pytest.approx(np.corrcoef([1.1, 2.0, 2.4], [1, 2, 3])[0, 1])
    assert compared(floats([1.0, 1.0]), floats([1.0, 2.0]), against="x", quantity="q", scope="s").r is None
    assert list(row.cells()) == list(row.__slots__)


# ---- estimators


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.integers(BUCKETS, 300),
    n=st.integers(1, 4),
    accuracy=st.floats(0, 1),
    misses=st.sampled_from(["anywhere", "near"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_estimator_is_right_exactly_as_often_as_asked(
    prompts: int, n: int, accuracy: float, misses: Misses, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    totals = rng.permutation(prompts) * 3 + 1 + n  # no two prompts alike, so that every bucket has its own range
    lengths = np.ones((prompts, n), dtype=np.int64)
    lengths[:, 0] = totals
    outcome = Outcome(response_tokens=ints(lengths))
    truth = floats(outcome.response_tokens.mean(axis=1))
    estimator = of_accuracy(accuracy, seed=seed, misses=misses)({0: outcome})
    estimates = estimator.estimate(workload_of(outcome))
    assert share_right(estimates, truth) == round(accuracy * prompts) / prompts
    np.testing.assert_array_equal(estimates, estimator.estimate(workload_of(outcome)))
    if misses == "near":
        centres = np.array([truth[buckets(truth) == number].mean() for number in range(BUCKETS)])
        named = np.abs(estimates[:, None] - centres).argmin(axis=1)
        assert np.abs(named - buckets(truth)).max() <= 1


def test_an_estimator_draws_anew_for_every_seed_and_step() -> None:
    outcome = Outcome(response_tokens=ints(np.arange(1, 101)[:, None]))
    one, other = (
        of_accuracy(seed=seed)({0: outcome, 1: outcome}).estimate(workload_of(outcome)).tolist() for seed in (0, 1)
    )
    next_step = of_accuracy(seed=0)({1: outcome}).estimate(replace(workload_of(outcome), step=1)).tolist()
    assert one != other
    assert one != next_step


def test_estimators_refuse_what_they_cannot_do() -> None:
    outcome = Outcome(response_tokens=ints(np.arange(1, 10)[:, None]))
    with pytest.raises(InputError, match=r"accuracy is 1.5; it must lie in 0\.\.1"):
        BucketEstimator(outcomes={}, accuracy=1.5)
    with pytest.raises(InputError, match="1 buckets; a prediction needs at least 2"):
        BucketEstimator(outcomes={}, accuracy=0.5, count=1)
    with pytest.raises(InputError, match="misses 'far': known are anywhere, near"):
        BucketEstimator(outcomes={}, accuracy=0.5, misses="far")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="step 0: 9 prompts, 10 buckets need as many"):
        of_accuracy()({0: outcome}).estimate(workload_of(outcome))


# ---- the verl log


def test_engines_alone_run_as_they_do_in_a_whole_step() -> None:
    """What the comparison drives is what a plan's actors do in the simulator's executor."""
    profile = load("qwen2.5-3b_l40s_tp2")
    trace = synthesize(
        "gsm8k", prompts=40, epochs=1, responses_per_prompt=5, max_response_tokens=512, prompts_per_step=40, seed=3,
        algorithm="grpo",
    )  # fmt: skip
    workload, outcome = next(steps(trace))
    cluster = Cluster.uniform("l40s", 8)
    executor = SimExecutor(cluster=cluster, world=World(profile=profile, outcome_of=lambda _: outcome))
    plan = Planner("verl", profile, cluster, actors=4).plan(workload, executor.snapshot())
    report = executor.execute(plan, workload)
    alone = Observation(
        prompt_tokens=workload.prompt_tokens,
        response_tokens=outcome.response_tokens,
        actors=tuple(actor.responses for actor in plan.actors),
        seconds=1.0,
    )
    for index, queue in enumerate(alone.actors):
        here = report.actor == index
        assert drive_s(profile, alone, queue) == pytest.approx(report.end_s[here].max() - report.first_s[here].min())


def test_time_is_linear_in_what_is_fitted() -> None:
    profile = roofline.build(model_shape("qwen2.5-7b"), "a100_sxm", 2)
    observations = tuple(observation(seed) for seed in range(3))
    parts = work(profile, observations)
    bare = engine_profile(profile)
    slow = Profile(data=replace(bare.data, iteration_overhead_s=0.01), speed=1.7)
    expected = [np.mean([drive_s(slow, each, queue) for queue in each.actors]) for each in observations]
    np.testing.assert_allclose(parts.seconds(1.7, 1.7 * 0.01), expected, rtol=1e-9)


def test_the_fit_finds_what_was_put_in_and_nothing_below_zero() -> None:
    rng = np.random.default_rng(0)
    parts = Work(compute_s=floats(rng.uniform(5, 20, 30)), iterations=floats(rng.uniform(500, 1500, 30)))
    chosen = ints(np.arange(0, 30, 3))
    assert parts.fit(parts.seconds(2.0, 0.02), chosen) == pytest.approx((2.0, 0.02))
    speed, overhead_s = parts.fit(floats(2 * parts.compute_s - 0.001 * parts.iterations), chosen)
    assert overhead_s == 0
    assert 1 < speed < 2
    speed, overhead_s = parts.fit(floats(0.02 * parts.iterations - 0.1 * parts.compute_s), chosen)
    assert speed == 0
    assert 0.015 < overhead_s < 0.02
    straight = floats(3 + 0.5 * parts.compute_s)
    np.testing.assert_allclose(line((parts.compute_s,), straight, chosen), straight)


def test_the_last_calibration_step_rescales_what_follows() -> None:
    predicted = floats(np.linspace(10, 30, 25))
    calibration = np.arange(25) % 10 == 0
    factor = np.repeat([1.0, 1.6, 0.9], [10, 10, 5])
    np.testing.assert_allclose(renewed(predicted, floats(predicted * factor), calibration), predicted * factor)
    late = floats(predicted * np.where(np.arange(25) < 12, 1.0, 1.6))  # slows down between two calibration steps
    np.testing.assert_allclose(renewed(predicted, late, calibration)[12:20], predicted[12:20])


def test_a_profile_goes_on_beyond_its_grid() -> None:
    shape = model_shape("qwen2.5-7b")
    profile = engine_profile(roofline.build(shape, "a100_sxm", 2))
    assert profile.data.max_slots == fidelity_verl.SLOTS
    own = roofline.decode_s(shape, GPUS["a100_sxm"], 2, np.array([1024.0]), np.array([512.0]))
    assert profile.decode_iteration_s(1024, 512) == pytest.approx(own[0], rel=1e-6)  # bound by FLOP/s: linear
    whole = roofline.build(shape, "a100_sxm", 2).data.kv_capacity_tokens
    assert profile.data.kv_capacity_tokens < 0.65 * whole


def test_the_mfu_of_the_log_is_that_of_an_a100() -> None:
    """A lower bound of 312 TFLOP/s, close to it in every one of the 210 steps."""
    implied = np.array([fidelity_verl._implied_flops(each) for each in verl.read(real_log())])
    assert implied.max() < 312e12
    assert implied.min() > 0.98 * 312e12


def test_the_learner_of_the_verl_log_has_fixed_seconds() -> None:
    logged = verl.read(real_log())
    calibration = np.arange(len(logged)) % fidelity_verl.EVERY == 0
    given, held = ints(np.flatnonzero(calibration)), np.flatnonzero(~calibration)
    rows = fidelity_verl._learning(logged, given, held)
    assert [row.n for row in rows] == [189] * 6
    for bare, fixed in zip(rows[::2], rows[1::2], strict=True):
        assert bare.quantity == fixed.quantity
        assert bare.mean is not None
        assert fixed.mean is not None
        assert fixed.r is not None
        assert bare.mean > 0.1
        assert fixed.mean < 0.01
        assert fixed.r > 0.99


def test_the_verl_log_is_met_as_the_readme_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity_verl, "OTHERS", ())  # what it is beside the profile that the rows are of
    done: list[int] = []
    found = fidelity_verl.study(real_log(), 0, done.append)
    assert sum(done) == fidelity_verl.PROFILES - 2
    rows = {(row.quantity, row.predictor): row for row in found.evidence}
    once = rows["generation time, one calibration", "simulator"]
    again = rows["generation time, rescaled at each tenth step", "simulator"]
    rival = rows["generation time, rescaled at each tenth step", "line in mean length"]
    assert once.n == again.n == 189
    assert again.mean is not None
    assert once.mean is not None
    assert rival.mean is not None
    assert again.r is not None
    assert again.mean < 0.1  # the aim
    assert again.r > 0.9
    assert 0.1 < once.mean < 0.2  # the run's engines slow down by more than lengths explain
    assert abs(again.mean - rival.mean) < 0.02  # on one fixed set-up, a line does as well
    np.testing.assert_allclose(found.renewed_s[found.calibration], found.measured_s[found.calibration], rtol=1e-12)
    late = [row for row in found.evidence if "1 step of" in row.quantity]
    assert {row.n for row in late} == {50 * 54}


# ---- the other rows


def test_the_twin_agrees_to_rounding_errors() -> None:
    row = fidelity_twin.row()
    assert row.skipped is None
    assert row.n == len(fidelity_twin.SEEDS) * len(fidelity_twin.RULES) * 200
    assert row.p90 is not None
    assert row.p90 < 1e-9
    assert row.agree == row.pairs == 9


def test_the_twin_is_left_out_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity_twin, "TWIN", "tests.no_such_module")
    assert "run from a checkout" in str(fidelity_twin.row().skipped)


def test_a_result_of_validate_becomes_a_row(tmp_path: Path) -> None:
    path = tmp_path / "validate.json"
    assert "give --real" in str(fidelity.real_rows(path, False, tmp_path)[0].skipped)
    facts = {
        "config": {"name": "cpu-tiny", "engine": {"device": "cpu"}},
        "profile": "measured",
        "steps": [
            {"predicted_generation_s": 0.9, "measured_generation_s": 1.0},
            {
                "predicted_generation_s": 3.0,
                "measured_generation_s": 2.0,
                "measured_cpu_s": 4.0,
                "predicted_core_s": 3.0,
            },
        ],
        "rank_agreement": {"agree": 1, "of": 2, "beyond": 0.1},
    }
    path.write_text(json.dumps(facts))
    row, cores = fidelity.real_rows(path, False, tmp_path)
    assert (cores.n, cores.median) == (1, 0.25)
    assert (row.n, row.agree, row.pairs) == (2, 1, 2)
    assert row.median == pytest.approx(0.3)
    assert "cpu-tiny on cpu" in row.scope
    for text in ("{", "[]", json.dumps(facts | {"steps": [{}]})):
        path.write_text(text)
        with pytest.raises(SchemaError, match=r"validate\.json: no result of experiments\.validate"):
            fidelity.real_rows(path, False, tmp_path)


# ---- perturbations


def test_every_condition_is_measured_in_its_own_world() -> None:
    rows = {str(row["condition"]): row for row in perturb.study(SMALL, range(2), lambda _: None)}
    assert next(iter(rows)) == EXACT
    assert rows[EXACT]["held_saving_left"] == 1
    wanted = ["latencies -20%", "latencies -10%", "latencies +10%", "latencies +20%", "data sheet"]
    wanted += ["noise 0.05", "noise 0.1", "noise 0.2", "44% in the right decile, others next", "others anywhere"]
    for part in wanted:
        assert sum(part in label for label in rows) == 1, part
    noisy = rows["speed noise 0.2"]
    assert noisy["generation_speedup_mean"] != rows[EXACT]["generation_speedup_mean"]


def test_a_wrong_planner_plans_wrongly_and_the_world_stays_as_it_is() -> None:
    """The conditions reach the planner alone: estimates in its plans are off, the world's latencies are not."""
    setting = SMALL.setting(0)
    given = perturb.conditions(SMALL, setting)
    exact, off = (
        simulate("dp+pa", SMALL.steps(0), given[label], actors=2) for label in (EXACT, "planner's latencies +20%")
    )
    for right, wrong in zip(exact.records, off.records, strict=True):
        np.testing.assert_allclose(wrong.plan.estimate.decode_s, 1.2 * right.plan.estimate.decode_s)
        assert wrong.report.tokens.tolist() == right.report.tokens.tolist()
    assert all(each.profile is setting.profile for each in given.values())
    assert {label for label, each in given.items() if each.speed_noise} == {f"speed noise {x}" for x in perturb.NOISES}


# ---- the command


def test_the_command_without_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLHFLESS_TEST_DATA", raising=False)
    monkeypatch.setattr(fidelity, "find_spec", lambda name: None)
    small = ["--prompts", "24", "--nodes", "8", "--seeds", "2", "--validated", str(tmp_path / "none.json")]
    folders = [tmp_path / "a", tmp_path / "b"]
    code, printed, err = call(fidelity, [*small, "--out", str(folders[0]), "--json"], capsys)
    assert code == 0, err
    assert json.loads(printed)["perturbed"][0]["seeds"] == 2
    code, out, err = call(fidelity, [*small, "--out", str(folders[1])], capsys)
    assert code == 0, err
    for name in fidelity.FILES:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    with (folders[0] / "fidelity.csv").open() as file:
        rows = {row["against"]: row for row in csv.DictReader(file)}
    assert float(rows["token-by-token twin"]["p90"]) < 1e-9
    assert "pip install 'rlhfless[vidur]'" in rows["Vidur 0.0.26"]["skipped"]
    assert "no --data" in rows[AGAINST]["skipped"]
    assert "give --real" in rows["real vLLM and Ray"]["skipped"]
    assert "| token-by-token twin |" in out
    assert "planner's latencies -20%" in out
    assert "2 of 2 done" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no/such/folder"], "--data no/such/folder: no such folder"),
        (["--seeds", "1"], "--seeds"),
        (["--real"], "--real needs vLLM and Ray: pip install 'rlhfless[cpu]'"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fidelity, "find_spec", lambda name: None)
    code, out, err = call(fidelity, [*arguments, "--out", str(tmp_path)], capsys)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
