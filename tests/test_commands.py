"""The commands as a user runs them: small runs, repeatable files, one clear line for bad input."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import replay, scale
from rlhfless.scheduler.peers import PEERS
from rlhfless.scheduler.policies import POLICIES
from tests.commands import call
from traces.importers.gsm8k import recorded
from traces.importers.tokenizers import load as tokenizer
from traces.synthesize import synthesize

SMALL = ["--prompts", "24", "--epochs", "2", "--caps", "256", "--processes", "1"]


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    trace = synthesize(
        "gsm8k",
        prompts=48,
        epochs=3,
        responses_per_prompt=2,
        max_response_tokens=512,
        prompts_per_step=24,
        seed=1,
        algorithm="grpo",
    )
    path = tmp_path / "trace.parquet"
    trace.write(path)
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("nodes", [2, 3, 9, 33])
def test_scale_runs_on_any_number_of_gpus(nodes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(scale, ["--nodes", str(nodes), *SMALL, "--out", str(tmp_path)], capsys)
    assert code == 0, err
    rows = [row for row in rows_of(tmp_path / "scale.csv") if row["policy"] != "(bound)"]
    assert max(int(row["gpus"]) for row in rows) == nodes
    largest = {row["policy"] for row in rows if int(row["gpus"]) == nodes}
    assert largest >= {*POLICIES, "verl-all", "oracle:rlhfless"} - {"verl-split", *PEERS}
    assert nodes > 3 or "2 GPUs, verl-split left out: no host has 2 GPUs free" in out
    if nodes % 2 and nodes > 2:
        assert f"{nodes - 1} of {nodes} GPUs usable by actors of 2" in out
    assert all(float(row["held_gpu_s"]) >= float(row["executed_gpu_s"]) * (1 - 1e-9) for row in rows)
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_no_policy_beats_the_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(scale, ["--nodes", "16", *SMALL, "--out", str(tmp_path)], capsys)[0] == 0
    rows = rows_of(tmp_path / "scale.csv")
    bounds = {(row["gpus"], row["cap_tokens"]): row for row in rows if row["policy"] == "(bound)"}
    for row in rows:
        bound = bounds[row["gpus"], row["cap_tokens"]]
        for name in ("generation_s", "decode_gpu_s"):
            assert float(row[name]) >= float(bound[name]) * (1 - 1e-9), row["policy"]


def test_baseline_is_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(scale, ["--nodes", "8", *SMALL, "--out", str(tmp_path)], capsys)[0] == 0
    rows = rows_of(tmp_path / "scale.csv")
    base = {row["gpus"]: row for row in rows if row["policy"] == "verl"}
    for row in rows:
        if row["policy"] == "(bound)":
            continue
        against = base[row["gpus"]]
        speedup = float(against["generation_s"]) / float(row["generation_s"])
        saving = 1 - float(row["held_gpu_s"]) / float(against["held_gpu_s"])
        assert float(row["generation_speedup"]) == pytest.approx(speedup)
        assert float(row["held_saving"]) == pytest.approx(saving, abs=1e-12)


def test_scale_over_seeds_is_the_mean_of_each_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same numbers, seed by seed, and an interval as wide as they differ."""
    given = ["--nodes", "2", *SMALL, "--policies", "rlhfless,rlhfuse"]
    found = {}
    for name, more in (
        ("3", ["--seed", "3"]),
        ("4", ["--seed", "4"]),
        ("both", ["--seed", "3", "--seeds", "2"]),
    ):
        code, out, err = call(scale, [*given, *more, "--out", str(tmp_path / name)], capsys)
        assert code == 0, err
        assert (" ± " in out) == ("--seeds" in more)
        found[name] = rows_of(tmp_path / name / "scale.csv")
    for one, other, both in zip(found["3"], found["4"], found["both"], strict=True):
        assert both.keys() == one.keys() == other.keys()
        for field in one:
            if field in ("gpus", "cap_tokens", "policy"):
                assert both[field] == one[field] == other[field]
            elif field.endswith("_ci95"):
                assert one[field] == other[field] == ""
            elif one[field]:
                ends = [float(one[field]), float(other[field])]
                assert float(both[field]) == pytest.approx(sum(ends) / 2), field
                # Student's t of one degree of freedom at 97.5 %, times the standard error of two values
                assert float(both[f"{field}_ci95"]) == pytest.approx(12.7062 * abs(ends[0] - ends[1]) / 2, rel=1e-4)
    assert any(float(row["generation_s_ci95"]) > 0 for row in found["both"])


def test_same_seed_same_files_in_other_processes(trace_file: Path, tmp_path: Path) -> None:
    commands = [
        ["experiments.scale", "--nodes", "12", *SMALL, "--seeds", "2", "--trace-out", "run.json"],
        ["experiments.replay", "--trace", str(trace_file), "--nodes", "8", "--trace-out", "run.json"],
    ]
    for number, command in enumerate(commands):
        folders = []
        for hash_seed in ("1", "77"):
            folder = tmp_path / f"{number}-{hash_seed}"
            folder.mkdir()
            full = [sys.executable, "-m", *command, "--out", str(folder), "--json"]
            full[full.index("run.json")] = str(folder / "run.json")
            if "--processes" in full and folders:
                full[full.index("--processes") + 1] = "2"
            environment = os.environ | {"PYTHONHASHSEED": hash_seed}
            done = subprocess.run(full, capture_output=True, text=True, check=True, env=environment)
            json.loads(done.stdout)
            (folder / "stdout.json").write_text(done.stdout)
            folders.append(folder)
        names = sorted(path.name for path in folders[0].iterdir())
        assert names == sorted(path.name for path in folders[1].iterdir())
        for name in names:
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_replay_carries_history_from_epoch_to_epoch(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--trace", str(trace_file), "--policy", "rlhfless,dp+pa", "--nodes", "8", "--out", str(tmp_path)]
    code, out, err = call(replay, arguments, capsys)
    assert code == 0, err
    rows = rows_of(tmp_path / "replay.csv")
    assert [row["epoch"] for row in rows if row["policy"] == "rlhfless"] == ["0", "1", "2", "all"]
    assert {row["policy"] for row in rows} == {"verl", "rlhfless", "dp+pa"}
    assert "bound: no policy generates in less than" in out
    assert {path.name for path in tmp_path.iterdir()} >= {"replay.json", "replay.png", "gantt-rlhfless.png"}


@pytest.mark.skipif("RLHFLESS_TEST_DATA" not in os.environ, reason="RLHFLESS_TEST_DATA is not set: gsm8k/*.jsonl")
def test_recorded_gsm8k_solutions_under_every_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(os.environ["RLHFLESS_TEST_DATA"]) / "gsm8k"
    trace = recorded(folder / "example_model_solutions.jsonl", tokenizer("words"), 128)
    path = tmp_path / "gsm8k.jsonl"
    trace.write(path)
    names = [*POLICIES, *(f"oracle:{name}" for name in ("dp+pa", "rlhfless"))]
    out = tmp_path / "out"
    code, _, err = call(replay, ["--trace", str(path), "--policy", ",".join(names), "--out", str(out)], capsys)
    assert code == 0, err
    rows = {row["policy"]: row for row in rows_of(out / "replay.csv") if row["epoch"] == "all"}
    assert set(rows) == set(names)
    assert float(rows["dp"]["prefill_tokens"]) <= float(rows["raw"]["prefill_tokens"])
    assert float(rows["verl-lif"]["prefill_tokens"]) > 1.5 * float(rows["verl"]["prefill_tokens"])
    assert float(rows["dp+pa"]["decode_gpu_s"]) < float(rows["dp"]["decode_gpu_s"])


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nodes", "1"], "fits on no host"),
        (["--nodes", "0"], "greater than or equal to 1"),
        (["--nodes", "many"], "valid integer"),
        (["--profile", "gpt-9"], "gpt-9"),
        (["--policies", "rlhfless,nothing"], "--policies: unknown policy 'nothing': known are verl,"),
        (["--preset", "mmlu"], "mmlu"),
        (["--caps", "2048,x"], "--caps '2048,x': expected whole numbers"),
        (["--caps", "0"], "every number must lie in 1.."),
        (["--caps", "17000"], "exceed"),
        (["--algorithm", "dpo"], "--algorithm 'dpo': known are ppo, grpo"),
        (["--weight", "1.5"], "less than or equal to 1"),
        (["--weight", "nan"], "--weight"),
        (["--tau", "0"], "--tau 0"),
        (["--start", "hot"], "--start 'hot': known are warm, prewarmed, cold"),
        (["--gpus-per-host", "1"], "fits on no host"),
        (["--usd-per-gpu-hour", "-1"], "--usd-per-gpu-hour"),
        (["--usd-per-gpu-hour", "inf"], "--usd-per-gpu-hour inf"),
        (["--learner-gpus", "9"], "--learner-gpus: the learner needs 9 GPUs, the cluster has 8"),
        (["--nodes", "99999999999999999999"], "--nodes"),
        (["--trace-out", "/nowhere/at/all.json"], "/nowhere/at"),
        (["--speed-noise", "2"], "--speed-noise 2"),
        (["--bogus"], "No such option"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, stdout, err = call(scale, [*SMALL, "--nodes", "8", *arguments, "--out", str(out)], capsys)
    errors = [each for each in err.splitlines() if each.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1
    assert line in errors[0]
    assert stdout == ""
    assert not out.exists() or not list(out.iterdir()), "nothing half-written"


def test_bad_replay_input_is_one_line(trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(trace_file.read_bytes()[:200])
    for arguments, line in (
        (["--trace", str(tmp_path / "none.parquet")], "none.parquet"),
        (["--trace", str(cut)], "cut.parquet"),
        (["--trace", str(trace_file), "--out", str(blocked)], "a file is in the way"),
        (["--trace", str(trace_file), "--prompts-per-step", "100"], "prompts_per_step is 100"),
        (["--trace", str(trace_file), "--actors", "9", "--nodes", "8"], "9 decode actors asked for, 4 fit"),
        (["--trace", str(trace_file), "--baseline", "best"], "--baseline: unknown policy 'best'"),
        (["--trace", str(trace_file), "--learner-gpus", "99"], "the learner needs 99 GPUs, the cluster has 16"),
        (["--trace", str(trace_file), "--baseline", "verl,raw"], "one policy is needed"),
        (["--trace", str(trace_file), "--baseline", "rlhfless", "--actors", "3"], "has a static number of actors"),
    ):
        code, stdout, err = call(replay, arguments, capsys)
        errors = [each for each in err.splitlines() if each.startswith("error: ")]
        assert (code, stdout, len(errors)) == (2, "", 1), (arguments, err)
        assert line in errors[0]
