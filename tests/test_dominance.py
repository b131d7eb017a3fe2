"""experiments.dominance in little: what holds by construction, what it writes, what it refuses."""

import csv
import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import dominance, dominance_scale
from experiments.dominance import CLOSE, VERDICTS, Asked, grounds, play, rows_of, tally, verdict
from experiments.output import Cell
from tests.commands import call
from traces.synthesize import synthesize

PROFILES = "qwen2.5-3b_l40s_tp2,qwen2.5-3b_l40s_tp1"
RECORDED = "recorded.parquet"
SMALL = ["--profile", PROFILES, "--nodes", "8", "--prompts-per-step", "12", "--samples", "2", "--epochs", "2",
         "--seeds", "2", "--scale-nodes", "0", "--lengths", "gsm8k", "--conditions", "plain"]  # fmt: skip
ROUNDING = 1e-9


@cache
def rows(*policies: str) -> tuple[dict[str, Cell], ...]:
    """Rows of two seeds, of a preset and a trace file, under every condition."""
    asked = Asked(policies=policies, conditions=dominance.CONDITIONS, prompts=12, samples=2, epochs=2)
    found: list[dict[str, Cell]] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / RECORDED
        synthesize(
            "aime2024", prompts=24, epochs=2, responses_per_prompt=2, max_response_tokens=512, prompts_per_step=6,
            seed=7, algorithm="grpo",
        ).write(path)  # fmt: skip
        for ground in grounds(["gpqa", str(path)], PROFILES.split(","), 8):
            found += rows_of(ground, asked, [play(asked, (ground, seed)) for seed in (0, 1)])
    return tuple(found)


def number(cell: Cell) -> float:
    assert isinstance(cell, float)
    return cell


def test_the_papers_policy_equals_itself() -> None:
    for row in rows("rlhfless"):
        assert [row[f"{name}_ratio"] for name in dominance.RATIOS] == [1.0] * 4
        assert [row[f"{name}_ratio_ci95"] for name in dominance.RATIOS] == [0.0] * 4
        assert row["verdict"] == "equal"


def test_every_length_condition_and_size_is_judged_once_and_one_size_is_the_best() -> None:
    found = rows("frontier", "elastic")
    labels = ["plain", "lengths44", "profile+20%", "profile-20%", "cold"]
    cells = [(row["lengths"], row["condition"], row["tp"], row["policy"]) for row in found]
    assert sorted(cells) == sorted(
        (lengths, condition, tp, policy)
        for lengths in ("gpqa", RECORDED)
        for condition in labels
        for tp in (1, 2)
        for policy in ("frontier", "elastic")
    )
    for lengths in ("gpqa", RECORDED):
        for label in labels:
            best = {
                row["tp"]: number(row["paper_generation_s"]) * number(row["paper_held_gpu_s"])
                for row in found
                if (row["lengths"], row["condition"], row["policy"]) == (lengths, label, "frontier")
            }
            chosen = [row["tp"] for row in found if row["paper_best"] and row["lengths"] == lengths
                      and row["condition"] == label and row["policy"] == "frontier"]  # fmt: skip
            assert chosen == [min(best, key=lambda tp: best[tp])]


def test_nothing_beats_its_bound() -> None:
    for row in rows("frontier", "elastic"):
        for name in ("generation_s", "decode_gpu_s"):
            assert number(row[f"{name}_over_bound"]) >= 1 - ROUNDING, row
            assert number(row[f"paper_{name}_over_bound"]) >= 1 - ROUNDING, row


def test_a_planners_errors_do_not_reach_the_world() -> None:
    """What plans without lengths and latencies fares the same whatever the planner believes."""
    found = {(row["lengths"], row["tp"], row["condition"]): row for row in rows("raw")}
    for (lengths, tp, condition), row in found.items():
        if condition != "cold":
            plain = found[lengths, tp, "plain"]
            assert row["decode_gpu_s"] == plain["decode_gpu_s"], condition  # the plan says when to prewarm
        else:
            assert number(row["held_gpu_s"]) > number(found[lengths, tp, "plain"]["held_gpu_s"])


@given(st.floats(0.5, 2.0), st.floats(0.5, 2.0))
def test_verdicts(time_ratio: float, cost_ratio: float) -> None:
    """Symmetric; better on one side only never beats better on one and equal on the other."""
    got = verdict(time_ratio, cost_ratio)
    assert got == verdict(cost_ratio, time_ratio)
    better = verdict(time_ratio * 0.9, cost_ratio)
    assert VERDICTS.index(better) <= VERDICTS.index(got)
    assert (got in ("dominates", "equal")) == (max(time_ratio, cost_ratio) <= 1 + CLOSE)
    assert (got in ("dominates", "trade")) == (min(time_ratio, cost_ratio) < 1 - CLOSE)


def test_the_tally_counts_every_row_and_the_better_is_no_worse_than_any() -> None:
    found = rows("frontier", "elastic")
    counts = {(row["size"], row["condition"], row["policy"]): row for row in tally(found)}
    every = [row for key, row in counts.items() if key[0] == "every" and key[2] != "the better"]
    assert sum(int(row["cells"] or 0) for row in every) == len(found)
    for row in counts.values():
        assert sum(int(row[name] or 0) for name in VERDICTS) == row["cells"]
    for (size, condition, policy), row in counts.items():
        better = counts[size, condition, "the better"]
        assert int(better["dominates"] or 0) >= int(row["dominates"] or 0), policy
        assert int(better["worse"] or 0) <= int(row["worse"] or 0), policy


def test_the_scale_study_stays_within_its_bounds() -> None:
    found = dominance_scale.rows(16, 32, ("frontier", "elastic"), [256], [0], 1)
    assert [(row["tp"], row["policy"]) for row in found] == [
        (tp, name) for tp in (2, 4, 8) for name in ("rlhfless", "frontier", "elastic")
    ]
    for row in found:
        for own, most in (("generation_speedup", "most_speedup"), ("generation_saving", "most_generation_saving"),
                          ("held_saving", "most_held_saving")):  # fmt: skip
            assert number(row[own]) <= number(row[most]) + ROUNDING, row


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        code, out, err = call(dominance, [*SMALL, "--out", str(folder)], capsys)
        assert code == 0, err
        assert "| best  | plain     | the better |" in out
    for name in dominance.FILES:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    found: dict[str, Any] = json.loads((folders[0] / "dominance.json").read_text())
    with (folders[0] / "dominance.csv").open(encoding="utf-8") as file:
        assert [row["verdict"] for row in csv.DictReader(file)] == [row["verdict"] for row in found["rows"]]
    assert len(found["rows"]) == 4


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--conditions", "plain,dark"], "--conditions 'dark': known are plain, lengths44, profile20, cold"),
        (["--policies", "best"], "--policies: unknown policy 'best'"),
        (["--policies", "rlhfless"], "rlhfless is what the others are judged by; name another"),
        (["--lengths", "nothing"], "--lengths 'nothing': no trace file, nor one of the presets gsm8k, "),
        (["--lengths", "none.parquet"], "none.parquet: no such file"),
        (["--profile", "qwen"], "unknown profile 'qwen'"),
        (["--nodes", "1"], "fits on no host"),
        (["--scale-caps", "0"], "--scale-caps '0': every number must lie in 1.."),
        (["--scale-nodes", "8", "--scale-caps", "20000"], "exceed"),
    ],
)
def test_refuses_in_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(dominance, [*SMALL, "--out", str(tmp_path / "out"), *arguments], capsys)
    errors = [each for each in err.splitlines() if each.startswith("error: ")]
    assert (code, out, len(errors)) == (2, "", 1), err
    assert line in errors[0]
    assert not (tmp_path / "out").exists()


def test_a_size_may_not_be_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(Path("sim/profiles/shipped/qwen2.5-3b_l40s_tp1.json").read_bytes())
    code, _, err = call(dominance, [*SMALL, "--profile", f"{PROFILES},{copy}", "--out", str(tmp_path / "o")], capsys)
    assert code == 2
    assert "is a second one of" in err
