"""experiments.frontier and experiments.bakeoff in little: what they write, and what they refuse."""

import csv
import json
from pathlib import Path

import pytest

from experiments import bakeoff, frontier
from experiments.bakeoff import undominated
from tests.commands import call

PROFILES = "qwen2.5-3b_l40s_tp2,qwen2.5-3b_l40s_tp1"
FRONTIER = ["--profile", PROFILES, "--nodes", "8", "--prompts", "24", "--epochs", "2", "--cap", "256"]
BAKEOFF = ["--trace", "gsm8k", "--profile", PROFILES, "--nodes", "8", "--prompts-per-step", "12", "--samples", "2",
           "--cap", "256"]  # fmt: skip
ROUNDING = 1e-9


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_frontier_writes_the_same_bytes_again_and_beats_no_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        code, out, err = call(frontier, [*FRONTIER, "--out", str(folder)], capsys)
        assert code == 0, err
        assert "believed frontier:" in out
    for name in frontier.FILES:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    found = json.loads((folders[0] / "frontier.json").read_text())
    curve = [(point["generation_s"], point["held_gpu_s"]) for point in found["frontier"]]
    assert curve == sorted(curve)
    costs = [cost for _, cost in curve]
    assert costs == sorted(costs, reverse=True)  # more time only for less cost
    assert {"verl tp1", "verl tp2", "rlhfless", "frontier"} <= {row["policy"] for row in found["rows"]}
    for row in found["rows"]:
        assert row["generation_s"] >= found["bound"]["generation_s"] * (1 - ROUNDING), row
        assert row["held_gpu_s"] >= found["bound"]["decode_gpu_s"] * (1 - ROUNDING), row


def test_a_deadline_binds_what_frontier_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(frontier, [*FRONTIER, "--deadline", "60", "--json", "--out", str(tmp_path)], capsys)
    assert code == 0, err
    assert json.loads(out)["config"]["goal"] == "deadline_s 60"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--deadline", "0.001"], "deadline_s 0.001: no plan of generation ends by then; the fastest takes "),
        (["--budget", "1e-9"], "GPU-seconds and takes "),
        (["--budget", "1", "--usd-per-gpu-hour", "0"], "--budget 1: nothing is spent at 0 USD a GPU-hour"),
        (["--budget", "1", "--deadline", "9"], "exclude each other"),
        (["--deadline", "0"], "deadline_s 0.0: it must be above 0"),
        (["--profile", f"{PROFILES},llama-3-8b_h100_sxm_tp1"], "is of GPU h100_sxm, the cluster has l40s"),
        (["--nodes", "1", "--gpus-per-host", "1"], "fits on no host"),
        (["--learner-gpus", "9"], "the learner needs 9 GPUs, the cluster has 8"),
        (["--trace", "none.parquet"], "none.parquet: no such file"),
    ],
)
def test_frontier_refuses_in_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(frontier, [*FRONTIER, "--out", str(tmp_path / "out"), *arguments], capsys)
    errors = [each for each in err.splitlines() if each.startswith("error: ")]
    assert (code, out, len(errors)) == (2, "", 1), err
    assert line in errors[0]
    assert not (tmp_path / "out").exists()


def test_bakeoff_plays_every_policy_on_the_same_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(bakeoff, [*BAKEOFF, "--out", str(tmp_path)], capsys)
    assert code == 0, err
    rows = rows_of(tmp_path / "bakeoff.csv")
    assert [row["policy"] for row in rows] == bakeoff.ALL.split(",")
    assert "* not synchronous: beside the others for its place, not for its gain" in out
    found = json.loads((tmp_path / "bakeoff.json").read_text())
    best = [row for row in rows if row["undominated"] == "1"]
    assert best
    for row in rows:
        competes = row["synchronous"] == "1" and not row["policy"].startswith("oracle:")
        beaten = any(
            float(other["generation_s"]) <= float(row["generation_s"])
            and float(other["held_gpu_s"]) <= float(row["held_gpu_s"])
            for other in best
            if other is not row
        )
        assert (row in best) == (competes and not beaten), row
    assert found["rows"], found.keys()
    assert undominated([]) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--trace", "nothing"], "--trace 'nothing': no trace file, nor one of the presets gsm8k, "),
        (["--trace", "none.jsonl"], "none.jsonl: no such file"),
        (["--policy", "verl,best"], "--policy: unknown policy 'best'"),
        (["--cap", "17000"], "exceed"),
        (["--learner-gpus", "9"], "the learner needs 9 GPUs, the cluster has 8"),
    ],
)
def test_bakeoff_refuses_in_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(bakeoff, [*BAKEOFF, "--out", str(tmp_path / "out"), *arguments], capsys)
    errors = [each for each in err.splitlines() if each.startswith("error: ")]
    assert (code, out, len(errors)) == (2, "", 1), err
    assert line in errors[0]
    assert not (tmp_path / "out").exists()
