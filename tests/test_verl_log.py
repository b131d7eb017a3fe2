"""verl's console logs: what is read of them, and lengths with the statistics that they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.errors import InputError
from traces.format import Trace
from traces.importers import verl
from traces.importers.verl import LengthFacts, matching
from traces.load import steps

STEP = (
    "step:{step} - actor/entropy:0.354 - training/epoch:{epoch}.000 - response_length/mean:20.500 - "
    "response_length/max:40.000 - response_length/min:3.000 - response_length/clip_ratio:0.125 - "
    "prompt_length/mean:7.250 - prompt_length/max:9.000 - prompt_length/min:5.000 - prompt_length/clip_ratio:0.000 - "
    "timing_s/generate_sequences:1.25 - perf/total_num_tokens:222.000"
)
SIZES = {
    "prompts_per_step": 4,
    "responses_per_prompt": 2,
    "max_prompt_tokens": 16,
    "max_response_tokens": 40,
}


def real_log() -> Path:
    folder = os.environ.get("RLHFLESS_TEST_DATA")
    if not folder:
        pytest.skip("RLHFLESS_TEST_DATA is not set: the folder with verl/qwen2-7b_math.log")
    return Path(folder) / "verl" / "qwen2-7b_math.log"


def printed(lengths: np.ndarray, cap: int) -> LengthFacts:
    """What verl prints of lengths: three digits behind the point."""
    return LengthFacts(
        mean=round(float(lengths.mean()), 3),
        most=int(lengths.max()),
        least=int(lengths.min()),
        clip_ratio=round(float((lengths == cap).mean()), 3),
    )


# ---- lengths


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.one_of(st.integers(1, 12), st.integers(13, 3000)),
    cap=st.integers(1, 4096),
    level=st.floats(0.01, 3.0),
    width=st.floats(0.0, 3.0),
    spread=st.one_of(st.none(), st.floats(0.0, 2.0)),
)
def test_lengths_have_the_statistics_that_are_printed(
    seed: int, count: int, cap: int, level: float, width: float, spread: float | None
) -> None:
    """Whatever lengths a run had: those that are made print the same four figures."""
    drawn = cap * level * np.exp(width * np.random.default_rng(seed).standard_normal(count))
    facts = printed(np.clip(np.rint(drawn), 1, cap).astype(np.int64), cap)
    made = matching(facts, count, cap, "log", spread)
    assert made.shape == (count,)
    assert printed(made, cap) == facts
    assert (np.diff(made) >= 0).all()


def test_lengths_are_what_a_censored_log_normal_gives() -> None:
    """The family is recovered: quantiles of lengths that really are log-normal come back."""
    normal = np.sort(np.random.default_rng(1).standard_normal(20_000))
    true = np.minimum(np.rint(200 * np.exp(0.6 * normal)), 800).astype(np.int64)
    made = matching(printed(true, 800), true.size, 800, "log")
    shares = [0.05, 0.25, 0.5, 0.75, 0.95]
    np.testing.assert_allclose(np.quantile(made, shares), np.quantile(true, shares), rtol=0.02)


@pytest.mark.parametrize(
    ("facts", "count", "cap"),
    [
        (LengthFacts(mean=10.0, most=20, least=3, clip_ratio=0.0), 1, 64),  # one length, two of them
        (LengthFacts(mean=20.0, most=20, least=3, clip_ratio=0.0), 8, 64),  # a mean that is the max
        (LengthFacts(mean=10.3, most=20, least=3, clip_ratio=0.0), 7, 64),  # 7 whole numbers have no such mean
        (LengthFacts(mean=10.0, most=20, least=3, clip_ratio=0.5), 8, 64),  # clipped, and below the cap
        (LengthFacts(mean=10.0, most=64, least=3, clip_ratio=0.9), 100, 64),  # too many clipped for the mean
        (LengthFacts(mean=64.0, most=64, least=64, clip_ratio=0.5), 8, 64),
    ],
)
def test_statistics_that_no_lengths_have_are_refused(facts: LengthFacts, count: int, cap: int) -> None:
    with pytest.raises(InputError, match=r"log, step 3: no \d+ lengths have mean"):
        matching(facts, count, cap, "log, step 3")


def test_lengths_above_the_cap_are_refused() -> None:
    facts = LengthFacts(mean=10.0, most=20, least=3, clip_ratio=0.0)
    with pytest.raises(InputError, match=r"lengths from 3 to 20 tokens; they must lie in 1\.\.16"):
        matching(facts, 8, 16, "log")


# ---- reading


@pytest.mark.parametrize("process", ["", "(TaskRunner pid=17) ", "\x1b[36m(TaskRunner pid=17, ip=10.0.0.1)\x1b[0m "])
@pytest.mark.parametrize("width", [1000, 180, 61, 31])
def test_a_line_that_wraps_anywhere_reads_the_same(process: str, width: int, tmp_path: Path) -> None:
    """Cut at any column, each piece behind its process, another process talking in between."""
    log = tmp_path / "run.log"
    lines = ["(WorkerDict pid=3) loading 17 shards"]
    for step in (1, 2):
        text = STEP.format(step=step, epoch=0)
        for start in range(0, len(text), width):
            lines += [process + text[start : start + width], "(WorkerDict pid=3) WARNING 06-18 16:50:57 [cuda.py:95] x"]
        lines.append(process + "validation generation end, 12 of 12")
    log.write_text("\n".join(lines))
    found = verl.read(log)
    assert [each.step for each in found] == [1, 2]
    assert found[1].metrics == verl.steps_of(STEP.format(step=2, epoch=0), "log")[0].metrics
    assert found[0].responses == LengthFacts(mean=20.5, most=40, least=3, clip_ratio=0.125)
    assert found[0].metric("timing_s/generate_sequences") == 1.25
    assert found[0].metric("perf/total_num_tokens") == 222


def test_numbers_as_numpy_prints_them_and_behind_a_progress_bar() -> None:
    text = re.sub(r":(\d+\.\d+)", r":np.float64(\1)", STEP.format(step=3, epoch=1))
    found = verl.steps_of(f"Training Progress: 1%| | 3/210 [04:12<14:40, 252s/it]{text}", "log")[0]
    assert found.responses.mean == 20.5
    assert found.epoch == 1
    assert verl.steps_of(STEP.format(step=3, epoch=1).replace("timing_s/generate_sequences:1.25", "x:1e-06"), "log")[
        0
    ].metric("x") == pytest.approx(1e-6)


def test_validation_lines_are_passed_over_and_a_resumed_step_counts_once() -> None:
    again = STEP.format(step=1, epoch=0).replace("mean:20.500", "mean:21.500")
    text = "\n".join(
        ["step:0 - val-core/x/mean@1:0.2", STEP.format(step=2, epoch=0), STEP.format(step=1, epoch=0), again]
    )
    found = verl.steps_of(text, "log")
    assert [each.step for each in found] == [1, 2]
    assert found[0].responses.mean == 21.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("response_length/max:40.000 - ", ""), "run.log, step 1: no response_length/max"),
        (("prompt_length/min:5.000 - ", ""), "run.log, step 1: no prompt_length/min"),
        (("response_length/mean:20.500", "response_length/mean:nan"), "step 1: response_length/mean is nan"),
        (("clip_ratio:0.125", "clip_ratio:1.125"), r"clip_ratio is 1.125; it must lie in 0..1"),
        (("response_length", "answer_length"), "no training step of verl in it"),
        (("total_num_tokens:222", "total_num_tokens:333"), "its tokens are those of 12 responses, .* is 8"),
        (("response_length/max:40", "response_length/max:41"), r"step 1, response_length: lengths from 3 to 41"),
        (("response_length/mean:20.500", "response_length/mean:2.500"), r"step 1, response_length: no 8 lengths"),
    ],
)
def test_a_bad_line_is_named(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(STEP.format(step=1, epoch=0).replace(*change).replace("perf/total_num_tokens:222.000", "x:0"))
    if "total" in change[0]:
        log.write_text(STEP.format(step=1, epoch=0).replace(*change))
    with pytest.raises(InputError, match=message):
        verl.recorded(log, **SIZES)


def test_sizes_come_from_the_log_or_from_the_caller(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(STEP.format(step=1, epoch=0))
    with pytest.raises(InputError, match="the log does not say prompts_per_step; give it as an option"):
        verl.recorded(log)
    log.write_text(
        "+ python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_batch_size=4 "
        "data.max_prompt_length=16 actor_rollout_ref.model.path=/m/Some-Model\n"
        "(TaskRunner pid=1)   'rollout': {'max_num_seqs': 8,\n(TaskRunner pid=1)    'n': 2,\n"
        "(TaskRunner pid=1)   'val_kwargs': {'n': 1}},\n(TaskRunner pid=1)   'max_response_length': 40,\n"
        + STEP.format(step=1, epoch=0)
    )
    trace = verl.recorded(log)
    assert (len(trace.prompt_ids), trace.n, trace.info.max_prompt_tokens, trace.info.max_response_tokens) == (
        4,
        2,
        16,
        40,
    )
    assert (trace.info.model, trace.info.algorithm) == ("Some-Model", "ppo")
    assert "synthesized" in trace.info.source
    assert verl.recorded(log, **SIZES, algorithm="grpo").info.algorithm == "grpo"
    with pytest.raises(InputError, match="responses_per_prompt is 0"):
        verl.recorded(log, responses_per_prompt=0)
    with pytest.raises(InputError, match="prompt_share is 2"):
        verl.recorded(log, prompt_share=2)
    with pytest.raises(InputError, match="no such file"):
        verl.read(tmp_path / "none.log")
    with pytest.raises(InputError, match="is not a file"):
        verl.read(tmp_path)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, -0.15, 0.15), (1.0, 0.9, 1.0)])
def test_the_share_between_prompts_is_what_was_asked(share: float, least: float, most: float, tmp_path: Path) -> None:
    """It deals the same lengths out in another way."""
    step = STEP.format(step=1, epoch=0).replace("response_length/mean:20.500", "response_length/mean:15.000")
    step = step.replace("clip_ratio:0.125", "clip_ratio:0.020").replace("perf/total_num_tokens:222.000", "x:0")
    log = tmp_path / "run.log"
    log.write_text(step)
    sizes = SIZES | {"prompts_per_step": 500}
    made = verl.recorded(log, **sizes, prompt_share=share)
    assert least < np.corrcoef(np.log(made.lengths.T))[0, 1] <= most
    other = verl.recorded(log, **sizes, prompt_share=0.5, seed=3)
    np.testing.assert_array_equal(np.sort(made.response_tokens), np.sort(other.response_tokens))


# ---- the real log


def test_every_step_of_a_real_log() -> None:
    """All 210 steps against the file, read here by other means."""
    log = real_log()
    lines = [line for line in log.read_text(errors="replace").splitlines() if "response_length/mean" in line]
    found = verl.read(log)
    assert len(lines) == len(found) == 210
    assert [each.step for each in found] == list(range(1, 211))

    def value(line: str, name: str) -> float:
        return float(line.split(f"{name}:", 1)[1].split(" ", 1)[0])

    timings = ("gen", "generate_sequences", "reshard", "old_log_prob", "update_actor", "step")
    for line, step in zip(lines, found, strict=True):
        assert step.responses.mean == value(line, "response_length/mean")
        assert step.responses.most == value(line, "response_length/max")
        assert step.responses.least == value(line, "response_length/min")
        assert step.responses.clip_ratio == value(line, "response_length/clip_ratio")
        assert step.prompts.mean == value(line, "prompt_length/mean")
        for name in timings:
            assert step.metric(f"timing_s/{name}") == value(line, f"timing_s/{name}")
    assert found[0].metric("timing_s/generate_sequences") == 59.778
    assert (found[209].responses.mean, found[209].metric("timing_s/step")) == (648.667, 705.786)
    assert (found[0].epoch, found[209].epoch) == (0, 14)


def test_lengths_made_for_a_real_log(tmp_path: Path) -> None:
    log = real_log()
    trace = verl.recorded(log)
    assert (trace.info.model, trace.info.algorithm, trace.n) == ("Qwen/Qwen2-7B-Instruct", "grpo", 5)
    made = list(steps(trace))
    assert [workload.size for workload, _ in made] == [1024] * 210
    for logged, (workload, outcome) in zip(verl.read(log), made, strict=True):
        assert printed(outcome.response_tokens, 1024) == logged.responses
        assert printed(workload.prompt_tokens, 1024) == logged.prompts
        total = 5 * workload.prompt_tokens.sum() + outcome.response_tokens.sum()
        assert abs(total - logged.metric("perf/total_num_tokens")) < 9  # rounding of two means to 0.0005 of 5120
    first = tmp_path / "first.parquet"
    trace.write(first)
    assert Trace.read(first) == trace


def test_the_command(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(STEP.format(step=1, epoch=0))
    command = [sys.executable, "-m", "traces", "verl", str(log)]
    sizes = ["--prompts-per-step", "4", "-n", "2", "--max-prompt-tokens", "16", "--max-response-tokens", "40"]
    out = [["--out", str(tmp_path / name)] for name in ("a.jsonl", "b.jsonl")]
    for each in out:
        done = subprocess.run([*command, *sizes, *each], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    done = subprocess.run([*command, *out[0]], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "prompts_per_step" in done.stderr
    assert done.stderr.count("\n") == 1
