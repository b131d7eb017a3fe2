"""Calibration: exact parts, planted overheads and speeds that come back, the choice of a model, bad input, commands."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import compare
from experiments.calibrate import at_once, observations_of
from rlhfless.errors import InfeasibleError, InputError, SchemaError
from rlhfless.rng import stream
from rlhfless.types.arrays import IntArray, ints
from rlhfless.types.profile import Profile
from sim.engine import Batch, Engine, prefill_timer
from sim.profiles import calibrate as calibration
from sim.profiles import load
from sim.profiles.calibrate import MODELS, Observation, calibrate, errors, finish_s, predict_s, step_observation
from sim.profiles.registry import write_profile
from tests.profiles import tiny_profile
from traces.format import Trace, TraceInfo

PROFILE = tiny_profile()


def slower(profile: Profile, overhead_s: float, speed: float) -> Profile:
    return Profile(data=replace(profile.data, iteration_overhead_s=overhead_s), speed=speed)


def steps(
    count: int, *, seed: int = 0, truth: Profile | None = None, noise: float = 0.0, delivered: bool = False
) -> list[Observation]:
    """Steps of 4 to 12 prompts x 2 on 1 to 3 actors, timed on `truth` with log-normal noise."""
    draws = stream(seed, "tests", "calibrate")
    found = []
    for group in range(count):
        prompts = int(draws.integers(4, 13))
        each = step_observation(
            prompt_tokens=draws.integers(5, 100, prompts),
            response_tokens=draws.integers(1, 200, (prompts, 2)),
            actors=int(draws.integers(1, 4)),
            seconds=1.0,
            group=group,
            delivered=delivered,
        )
        seconds = float(predict_s(truth or PROFILE, [each])[0]) * math.exp(noise * draws.standard_normal())
        found.append(replace(each, seconds=seconds))
    return found


# ---- what a fit stands on


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 120), st.integers(1, 120)), min_size=1, max_size=12),
    st.floats(0.0, 0.05),
    st.floats(0.5, 2.0),
    st.booleans(),
)
def test_time_is_linear_in_the_overhead(
    rows: list[tuple[int, int, int]], overhead_s: float, speed: float, delivered: bool
) -> None:
    """The order of iterations does not depend on their length: speed * (compute + overhead * iterations), exactly."""
    table = np.array(rows)
    observed = Observation(
        prompt_tokens=ints(table[:, 0]),
        response_tokens=ints(table[:, 1:]),
        actors=(ints(np.arange(2 * len(rows))),),
        seconds=1.0,
        delivered=delivered,
    )
    queue = observed.actors[0]
    zero, one, any_ = (
        finish_s(slower(PROFILE, *each), observed, queue) for each in ((0.0, 1.0), (1.0, 1.0), (overhead_s, speed))
    )
    iterations = one - zero
    np.testing.assert_allclose(iterations, np.round(iterations), atol=1e-6)
    np.testing.assert_allclose(any_, speed * (zero + overhead_s * iterations), rtol=1e-9)


def test_one_response_by_hand() -> None:
    """10 tokens after a prompt of 20: a prefill that gives the first, nine iterations; ten where KV was delivered."""
    alone = step_observation(prompt_tokens=ints([20]), response_tokens=ints([[10]]), actors=1, seconds=1.0)
    prefilled_s = float(PROFILE.prefill_s(20)) + PROFILE.decode_run_s(1, 21.0, 9)
    assert predict_s(PROFILE, [alone])[0] == pytest.approx(prefilled_s)
    assert predict_s(PROFILE, [replace(alone, delivered=True)])[0] == pytest.approx(PROFILE.decode_run_s(1, 20.0, 10))


def test_steps_are_dealt_in_contiguous_groups_of_prompts() -> None:
    found = step_observation(prompt_tokens=ints([1] * 5), response_tokens=ints([[1, 1]] * 5), actors=2, seconds=1.0)
    assert [queue.tolist() for queue in found.actors] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_step_takes_as_long_as_its_slowest_actor() -> None:
    (step,) = steps(1, seed=3)
    alone = [replace(step, actors=(queue,)) for queue in step.actors]
    assert predict_s(PROFILE, [step])[0] == max(predict_s(PROFILE, alone))


# ---- fits


@pytest.mark.parametrize(
    ("overhead_s", "speed", "model"),
    [(0.0, 1.0, "none"), (0.004, 1.0, "overhead"), (0.0, 1.21, "speed"), (0.02, 0.7, "overhead+speed")],
)
def test_planted_figures_come_back(overhead_s: float, speed: float, model: str) -> None:
    found = calibrate(PROFILE, steps(12, truth=slower(PROFILE, overhead_s, speed)))
    assert found.model == model
    assert found.overhead_s == pytest.approx(overhead_s, rel=1e-3, abs=1e-8)
    assert found.speed == pytest.approx(speed, rel=1e-3)
    assert found.held_out is not None
    assert found.held_out.p90 < 1e-3
    assert found.held_out.n == found.before.n == 12


@pytest.mark.parametrize("model", MODELS)
def test_a_fit_is_never_worse_than_what_it_started_from(model: str) -> None:
    observed = steps(6, seed=1, truth=slower(PROFILE, 0.006, 1.1), noise=0.05)
    measured_s = np.array([each.seconds for each in observed])

    def loss(profile: Profile) -> float:
        return float(np.mean(np.abs(np.log(predict_s(profile, observed) / measured_s))))

    found = calibrate(PROFILE, observed, model)
    assert loss(found.profile) <= loss(PROFILE) * (1 + 1e-6)
    assert (loss(found.profile) < 0.5 * loss(PROFILE)) == (model != "none")


def test_noise_alone_is_not_fitted() -> None:
    assert calibrate(PROFILE, steps(12, seed=2, noise=0.05)).model == "none"


def test_held_out_error_is_that_of_fits_without_the_group() -> None:
    observed = steps(5, seed=4, truth=slower(PROFILE, 0.004, 1.0), noise=0.03)
    found = calibrate(PROFILE, observed, "overhead")
    expected = []
    for out in observed:
        fit = calibrate(PROFILE, [each for each in observed if each.group != out.group], "overhead")
        expected.append(predict_s(slower(PROFILE, fit.overhead_s, fit.speed), [out])[0])
    by_hand = errors(np.array(expected), np.array([each.seconds for each in observed]))
    assert found.held_out is not None
    assert found.held_out.median == pytest.approx(by_hand.median, rel=1e-6)
    assert found.held_out.p90 == pytest.approx(by_hand.p90, rel=1e-6)


def test_two_runs_do_not_carry_two_numbers() -> None:
    observed = steps(2, seed=5, truth=slower(PROFILE, 0.02, 0.7))
    found = calibrate(PROFILE, observed)
    assert found.model in calibration.SIMPLE
    assert found.held_out is None
    assert any("held out: nothing" in line for line in calibration.summary(found))


def test_own_overhead_is_replaced_and_a_second_calibration_changes_nothing() -> None:
    truth = slower(PROFILE, 0.004, 1.0)
    observed = steps(8, truth=truth)
    for start in (PROFILE, slower(PROFILE, 0.1, 1.0)):
        found = calibrate(start, observed, "overhead")
        assert found.overhead_s == pytest.approx(0.004, rel=1e-6)
    again = calibrate(found.profile, observed)
    assert again.model == "none"
    assert again.before.p90 < 1e-6


def test_calibrated_profile_is_an_ordinary_file(tmp_path: Path) -> None:
    observed = steps(8, truth=slower(PROFILE, 0.02, 0.7))
    found = calibrate(PROFILE, observed, "overhead+speed")
    write_profile(found.profile, tmp_path / "p.json")
    data = load(str(tmp_path / "p.json")).data
    assert data.iteration_overhead_s == pytest.approx(0.014, rel=1e-3)
    np.testing.assert_allclose(data.decode_s, 0.7 * PROFILE.data.decode_s, rtol=1e-3)
    np.testing.assert_allclose(data.prefill_s, 0.7 * PROFILE.data.prefill_s, rtol=1e-3)
    assert data.notes[-1].startswith("Calibrated: 0.02 s an iteration on top of the tables, all times 0.7;")
    assert "calibrated" in data.origin
    assert data.name == "tiny_calibrated"
    seconds = np.array([each.seconds for each in observed])
    np.testing.assert_allclose(predict_s(Profile(data=data), observed), seconds, rtol=1e-5)


# ---- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": ints([5])}, "1 prompts, responses of shape"),
        ({"response_tokens": ints([5, 6])}, "responses of shape"),
        ({"seconds": 0.0}, "0.0 s; a time must be above 0"),
        ({"seconds": math.inf}, "inf s; a time must be above 0"),
        ({"response_tokens": ints([[0, 1], [1, 1]])}, "a length below 1 token"),
        ({"actors": ()}, "no response, or one that is queued twice"),
        ({"actors": (ints([0, 1]), ints([1]))}, "queued twice"),
        ({"actors": (ints([4]),)}, "a response number beyond its lengths"),
    ],
)
def test_bad_observation_is_refused(change: dict[str, object], message: str) -> None:
    good = step_observation(prompt_tokens=ints([5, 6]), response_tokens=ints([[1, 2]] * 2), actors=1, seconds=1.0)
    with pytest.raises(InputError, match=message):
        replace(good, **change)


def test_bad_calibration_is_refused() -> None:
    observed = steps(3)
    with pytest.raises(InputError, match="1 observations, at least 2 are needed"):
        calibrate(PROFILE, observed[:1])
    with pytest.raises(InputError, match=r"unknown model 'cubic'; known are auto, none, overhead"):
        calibrate(PROFILE, observed, "cubic")
    with pytest.raises(InputError, match="3 prompts on 4 actors"):
        step_observation(prompt_tokens=ints([1] * 3), response_tokens=ints([[1]] * 3), actors=4, seconds=1.0)
    long = step_observation(prompt_tokens=ints([5]), response_tokens=ints([[4001]]), actors=1, seconds=1.0)
    with pytest.raises(InfeasibleError, match="KV cache of 4000 tokens"):
        calibrate(PROFILE, [long, long])


# ---- commands


def as_json(observed: list[Observation]) -> str:
    return json.dumps(
        {
            "schema": 1,
            "observations": [
                {
                    "prompt_tokens": each.prompt_tokens.tolist(),
                    "response_tokens": each.response_tokens.tolist(),
                    "actors": [queue.tolist() for queue in each.actors],
                    "seconds": each.seconds,
                    "group": each.group,
                }
                for each in observed
            ],
        }
    )


def test_observations_survive_their_file(tmp_path: Path) -> None:
    observed, path = steps(3), tmp_path / "runs.json"
    path.write_text(as_json(observed))
    again = calibration.read(path)
    assert predict_s(PROFILE, again).tolist() == predict_s(PROFILE, observed).tolist()
    assert [each.group for each in again] == [0, 1, 2]
    for text, kind, message in (
        ("{", SchemaError, "not JSON"),
        ('{"schema": 2}', SchemaError, "schema 2 is not readable"),
        ('{"schema": 1}', SchemaError, "missing required field `observations`"),
        (as_json(observed).replace('"seconds"', '"minutes"'), SchemaError, "missing required field `seconds`"),
        (as_json(observed).replace('"seconds": ', '"seconds": -'), InputError, "a time must be above 0"),
    ):
        path.write_text(text)
        with pytest.raises(kind, match=message) as caught:
            calibration.read(path)
        assert str(caught.value).startswith(str(path))


def recorded(truth: Profile, count: int) -> Trace:
    """A run of `count` steps of 6 prompts x 2 on two actors, as an engine with `truth` would leave it."""
    draws = stream(0, "tests", "recorded")
    prompt_tokens = draws.integers(5, 100, 6)
    columns: dict[str, list[IntArray]] = {name: [] for name in ("lengths", "start", "end", "actor")}
    for step in range(count):
        lengths = draws.integers(1, 200, 12)
        start_s, end_s = np.zeros(12), np.zeros(12)
        for queue in (range(6), range(6, 12)):
            batch = Batch(
                prompt_tokens=prompt_tokens.tolist(), responses_per_prompt=2, target=lengths.tolist(),
                generated=[0] * 12, first_s=[-1.0] * 12,
            )  # fmt: skip
            engine = Engine(
                profile=truth, prefill_timer=prefill_timer(truth), batch=batch, slots=4, prefix_caching=True,
                first_tokens={response: int(prompt_tokens[response // 2]) for response in queue},
            )  # fmt: skip
            engine.submit(queue)
            now_s = 100.0 * step
            while (stretch_s := engine.settle(now_s)) is not None:
                now_s += stretch_s
                end_s[engine.advance()] = now_s
            start_s[list(queue)] = [batch.first_s[response] for response in queue]
        for name, values in zip(columns, (lengths, start_s, end_s, np.repeat([0, 1], 6)), strict=True):
            columns[name].append(values)
    rows = {name: np.concatenate(values) for name, values in columns.items()}
    return Trace(
        info=TraceInfo(
            model="tiny", dataset="made up", tokenizer="none", algorithm="grpo", responses_per_prompt=2,
            max_prompt_tokens=100, max_response_tokens=200, source="tests",
        ),
        prompt_ids=np.array([f"p{i}" for i in range(6)]),
        prompt_tokens=ints(prompt_tokens),
        epoch=ints(np.arange(count).repeat(12)),
        step=ints(np.arange(count).repeat(12)),
        prompt=ints(np.tile(np.arange(6).repeat(2), count)),
        sample=ints(np.tile([0, 1], 6 * count)),
        response_tokens=ints(rows["lengths"]),
        truncated=np.zeros(12 * count, dtype=bool),
        start_s=rows["start"],
        end_s=rows["end"],
        actor=ints(rows["actor"]),
    )  # fmt: skip


SLOTS = tiny_profile(max_slots=4)


def test_recorded_run_gives_back_what_its_engines_cost() -> None:
    trace = recorded(slower(SLOTS, 0.003, 1.0), 6)
    observed = observations_of(trace, SLOTS)
    assert [each.group for each in observed] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    found = calibrate(SLOTS, observed)
    assert (found.model, found.after.p90 < 1e-6) == ("overhead", True)
    assert found.overhead_s == pytest.approx(0.003, rel=1e-6)


def test_trace_without_times_or_with_more_slots_is_refused() -> None:
    trace = recorded(SLOTS, 2)
    with pytest.raises(InputError, match="not every response has start_s, end_s and actor"):
        observations_of(replace(trace, actor=None), SLOTS)
    with pytest.raises(InputError, match=r"step 0, actor 0 ran 4 responses at once, profile tiny has 3 slots"):
        observations_of(trace, tiny_profile(max_slots=3))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=15))
def test_overlap_by_brute_force(spans: list[tuple[int, int]]) -> None:
    starts, ends = (np.array(each, dtype=np.float64) for each in zip(*((a, a + d) for a, d in spans), strict=True))
    assert at_once(starts, ends) == max(int(((starts <= t) & (ends > t)).sum()) for t in starts)


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120)


def test_commands_write_a_profile_and_say_how_good_it_is(tmp_path: Path) -> None:
    profile, out = tmp_path / "tiny.json", tmp_path / "fitted.json"
    write_profile(SLOTS, profile)
    truth = slower(SLOTS, 0.003, 1.0)
    trace, runs = tmp_path / "run.jsonl", tmp_path / "runs.json"
    recorded(truth, 6).write(trace)
    runs.write_text(as_json(observations_of(recorded(truth, 6), SLOTS)))
    printed = []
    for module, observed in (("experiments.calibrate", trace), ("sim.profiles", runs)):
        first = (module, "calibrate") if module == "sim.profiles" else (module,)
        done = command(*first, profile, observed, "--out", out)
        assert (done.returncode, done.stderr) == (0, "")
        assert load(str(out)).data.iteration_overhead_s == pytest.approx(0.003, rel=1e-4)
        printed.append(done.stdout)
        out.unlink()
    assert printed[0] == printed[1]
    assert "fitted: overhead; 3 ms an iteration beside the tables, all times 1\n" in printed[0]
    assert "(n = 12)" in printed[0]
    facts = json.loads(command("experiments.calibrate", profile, trace, "--json").stdout)
    assert (facts["model"], facts["before"]["n"]) == ("overhead", 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sim.profiles", "calibrate", "PROFILE", "TRACE"), "run.jsonl: a recorded trace; python -m experiments.calib"),
        (("sim.profiles", "calibrate", "PROFILE", "nope.json"), "nope.json: cannot read the observed runs"),
        (("experiments.calibrate", "PROFILE", "nope.jsonl"), "nope.jsonl: "),
        (("experiments.calibrate", "nope", "TRACE"), "unknown profile 'nope'"),
        (("experiments.calibrate", "PROFILE", "TRACE", "--model", "cubic"), "calibration: unknown model 'cubic'"),
    ],
)
def test_wrong_use_ends_in_one_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    write_profile(SLOTS, tmp_path / "tiny.json")
    recorded(SLOTS, 2).write(tmp_path / "run.jsonl")
    names = {"PROFILE": tmp_path / "tiny.json", "TRACE": tmp_path / "run.jsonl"}
    done = command(*(names.get(each, each) for each in arguments))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr


# ---- predictions with and without a calibration


def compared(measured_s: list[float], predicted_s: list[float], cpu_s: float | None) -> compare.Tables:
    """Steps and ends of actors with these times."""
    rows: list[compare.Row] = [
        {
            "measured_generation_s": real, "predicted_generation_s": guess, "measured_core_s": 2 * real,
            "predicted_core_s": 2 * guess, "measured_end_s": real, "predicted_end_s": guess, "measured_cpu_s": cpu_s,
        }
        for real, guess in zip(measured_s, predicted_s, strict=True)
    ]  # fmt: skip
    return {"steps": rows, "actors": rows[:2]}


def test_errors_of_both_profiles_stand_side_by_side() -> None:
    raw, calibrated = ([1.0, 1.6, 0.9], [2.0, 1.8, 1.0])
    real = [2.0, 2.0, 1.0]
    found = compare.side_by_side(compared(real, raw, None), compared(real, calibrated, None))
    assert [row[:2] for row in found] == [["generation time", 3], ["last token of each actor", 2], ["core-seconds", 3]]
    assert found[0][2:] == pytest.approx([20.0, 44.0, -20.0, 0.0, 8.0, 0.0], abs=1e-9)
    assert found[1][2:] == pytest.approx([35.0, 47.0, -35.0, 5.0, 9.0, -5.0])
    with_cpu = compare.side_by_side(compared(real, raw, 4.0), compared(real, calibrated, 4.0))
    assert with_cpu[3][:3] == ["against processor time", 3, pytest.approx(50.0)]
