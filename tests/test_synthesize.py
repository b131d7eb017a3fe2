"""Synthetic traces have the statistics that they claim."""

from pathlib import Path

import numpy as np
import pytest

from rlhfless.errors import InputError
from traces.describe import describe
from traces.format import Trace
from traces.synthesize import Preset, preset_names, preset_table, synthesize


def made(preset: str = "gsm8k", **changes: object) -> Trace:
    values = {
        "prompts": 64,
        "epochs": 2,
        "responses_per_prompt": 2,
        "max_response_tokens": 2048,
        "prompts_per_step": 16,
        "seed": 0,
        "algorithm": "grpo",
    }
    return synthesize(preset, **(values | changes))


def paper_run(**changes: object) -> Trace:
    """GSM8K with PPO as in RLHFless §4.3: n = 1, cap 2048, three epochs."""
    values = {"prompts": 7168, "prompts_per_step": 512, "epochs": 3, "responses_per_prompt": 1, "algorithm": "ppo"}
    return made(**(values | changes))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_papers_stability_between_epochs(seed: int) -> None:
    found = describe(paper_run(seed=seed))
    assert found["moved_at_most_50_tokens"] == pytest.approx(0.70, abs=0.04)
    assert found["moved_at_most_100_tokens"] == pytest.approx(0.90, abs=0.04)


def test_about_half_of_the_variance_lies_between_prompts() -> None:
    # The heavy tail makes a single estimate noisy: the mean of five seeds, to 0.06.
    shares = [describe(paper_run(responses_per_prompt=4, epochs=1, seed=s))["between_prompt_share"] for s in range(5)]
    assert np.mean(shares) == pytest.approx(0.48, abs=0.06)


def test_mean_and_references_match_what_was_measured() -> None:
    found = describe(paper_run(responses_per_prompt=4))
    assert found["per_epoch"][0]["mean_tokens"] == pytest.approx(214, abs=4)
    assert found["reference_rank_correlation"] == pytest.approx(0.76, abs=0.03)
    assert found["prompt_mean_tokens"] == pytest.approx(55.0, abs=1)
    assert found["mean_drift"] == pytest.approx(0.99**2, abs=0.01)


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_draws_and_every_parameter_has_a_source(preset: str) -> None:
    entry = preset_table()[preset]
    assert set(entry) == set(Preset.__dataclass_fields__)
    for name, parameter in entry.items():
        kind, _, why = parameter["source"].partition(": ")
        assert kind.split()[0] in ("measured", "cited", "solved", "chosen"), name
        assert why, name
    trace = made(preset)
    assert len(trace) == 256
    assert trace.response_tokens.max() <= 2048
    assert np.array_equal(trace.response_tokens[trace.truncated], np.full(trace.truncated.sum(), 2048))


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        made(seed=seed).write(tmp_path / f"{name}.{suffix}")
    a, b, c = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def by_prompt(trace: Trace, epoch: int) -> dict[str, list[int]]:
    here = trace.epoch[:: trace.n] == epoch
    ids = trace.prompt_ids[trace.prompt[:: trace.n][here]].tolist()
    return dict(zip(ids, trace.lengths[here].tolist(), strict=True))


def test_a_cap_cuts_the_same_lengths() -> None:
    long, short = made(), made(max_response_tokens=200)
    cut = {name: [min(length, 200) for length in lengths] for name, lengths in by_prompt(long, 1).items()}
    assert by_prompt(short, 1) == cut
    assert short.truncated.mean() > 0.3


def test_stretching_scales_with_the_cap() -> None:
    plain, stretched = made(prompts=512), made(prompts=512, max_response_tokens=8192, stretch=True)
    assert stretched.response_tokens.mean() == pytest.approx(4 * plain.response_tokens.mean(), rel=0.05)
    assert "stretched by 4" in stretched.info.source
    assert made(stretch=True) == made()


def test_epochs_hold_the_same_prompts_in_another_order() -> None:
    trace = made(prompts=70)
    assert "6 of 70 prompts left out" in trace.info.source
    first, second = (trace.prompt[trace.epoch == e][:: trace.n].tolist() for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    assert np.unique(trace.step).tolist() == list(range(8))


def test_later_epochs_and_step_sizes_change_no_earlier_draw() -> None:
    assert by_prompt(made(epochs=1), 0) == by_prompt(made(epochs=3), 0)
    assert by_prompt(made(prompts_per_step=8), 1) == by_prompt(made(prompts_per_step=32), 1)


@pytest.mark.parametrize(
    ("preset", "changes", "message"),
    [
        ("gsm9k", {}, "unknown preset 'gsm9k'; known are gsm8k, gpqa, livecodebench, aime2024, long-reasoning"),
        ("gsm8k", {"epochs": 0}, "epochs is 0"),
        ("gsm8k", {"prompts_per_step": 65}, "only 64 prompts"),
        ("gsm8k", {"seed": -1}, "seed is -1"),
        ("gsm8k", {"prompts": 10**20, "prompts_per_step": 1}, "more responses than the 10000000"),
        ("gsm8k", {"prompts": 10_000_001, "epochs": 1, "responses_per_prompt": 1}, "more responses than the 10000000"),
        ("gsm8k", {"epochs": 10**11 - 1}, "prompts 64 x epochs 99999999999 x responses_per_prompt 2 are more"),
        ("gsm8k", {"responses_per_prompt": 10**30}, "more responses than"),
        ("gsm8k", {"max_response_tokens": 10**20}, "max_response_tokens is 100000000000000000000; it must be at most"),
        ("gsm8k", {"algorithm": "dpo"}, "unknown algorithm 'dpo'"),
    ],
)
def test_bad_requests_are_one_line(preset: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        made(preset, **changes)
