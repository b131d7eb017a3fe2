"""The figures of the paper, small: what must hold by construction, and the harness that they share."""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import ablation, breakdown, figure, prefill, study, waste
from experiments import all as everything
from experiments.bench import bounds, simulate
from experiments.figure import Figure, produce
from experiments.study import GRPO, PPO, SMALL, Asked, Lengths
from rlhfless.accounting.metrics import Series
from rlhfless.types.arrays import floats, ints
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload
from tests.commands import call
from traces.synthesize import synthesize

TINY = Asked(seeds=2, epochs=2, batch=16)
NAMES = [each.name for each in everything.FIGURES]
BY_NAME = {each.name: each for each in everything.FIGURES}
ROUNDING = 1e-9


def asked_of(each: Figure) -> Asked:
    """The figure, small, on one model."""
    return replace(TINY, profiles=each.asked.profiles[:1])


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes each figure once and gives its folder."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            produce(BY_NAME[name], asked_of(BY_NAME[name]), made[name])
        return made[name]

    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ---- every figure


@pytest.mark.parametrize("name", NAMES)
def test_no_row_beats_the_bounds(name: str, folder_of: Any) -> None:
    rows = [row for row in rows_of(folder_of(name) / f"{name}.csv") if row.get("time_over_bound")]
    assert rows
    for row in rows:
        assert float(row["time_over_bound"]) >= 1 - ROUNDING, row
        assert float(row["cost_over_bound"]) >= 1 - ROUNDING, row


@pytest.mark.parametrize("name", NAMES)
def test_files_hold_the_paper_beside_ours_and_how_they_were_made(name: str, folder_of: Any) -> None:
    folder, one = folder_of(name), BY_NAME[name]
    config = json.loads((folder / "config.json").read_text())
    assert config["command"] == f"python -m experiments.{name}"
    assert config["options"]["seeds"] == 2
    assert config["options"]["batch"] == 16
    assert "processes" not in config["options"]
    assert {"python", "numpy", "rlhfless"} <= config["versions"].keys()
    assert re.fullmatch("[0-9a-f]{64}", config["source_sha256"])
    paper = rows_of(folder / ("timings-paper.csv" if name == "breakdown" else "paper.csv"))
    assert paper
    assert all(np.isfinite(float(row["here"])) and float(row["here_ci95"]) >= 0 for row in paper)
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert all((folder / file).is_file() for file in one.files)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bytes(name: str, folder_of: Any, tmp_path: Path) -> None:
    one = BY_NAME[name]
    produce(one, asked_of(one), tmp_path)
    timed = {f"{name}.png"} if name == "breakdown" else set()  # it shows wall-clock times
    for file in set(one.files) - timed:
        assert (tmp_path / file).read_bytes() == (folder_of(name) / file).read_bytes(), file


def test_other_seeds_are_other_lengths(tmp_path: Path, folder_of: Any) -> None:
    one = BY_NAME["rlhfuse"]
    produce(one, replace(asked_of(one), seed=2), tmp_path)
    assert (tmp_path / "rlhfuse.csv").read_bytes() != (folder_of("rlhfuse") / "rlhfuse.csv").read_bytes()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = synthesize(
        "gpqa", prompts=48, epochs=3, responses_per_prompt=3, max_response_tokens=512, prompts_per_step=24, seed=5,
        algorithm="grpo",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("recorded") / "trace.parquet"
    trace.write(path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_recorded_lengths_take_the_place_of_synthetic_ones(name: str, recorded: Path, tmp_path: Path) -> None:
    one = BY_NAME[name]
    produce(one, replace(asked_of(one), trace=recorded), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["options"]["trace"]["name"] == "trace.parquet"
    workloads = {row["workload"] for row in rows_of(tmp_path / f"{name}.csv")}
    assert {each for each in workloads if "out" not in each} == {"GRPO gpqa, n = 3"}


def test_same_bytes_in_other_processes(tmp_path: Path) -> None:
    folders = []
    for processes, hash_seed in (("1", "1"), ("2", "77")):
        folder = tmp_path / processes
        command = ["experiments.rlhfuse", "--seeds", "3", "--epochs", "2", "--prompts-per-step", "16", "--json"]
        full = [sys.executable, "-m", *command, "--processes", processes, "--out", str(folder)]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(full, capture_output=True, text=True, check=True, env=environment)
        assert json.loads(done.stdout) == json.loads((folder / "rlhfuse.json").read_text())
        folders.append(folder)
    for file in BY_NAME["rlhfuse"].files:
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file


# ---- what single figures rest on


def same_lengths(reports: tuple[StepReport, ...], asked: Asked, lengths: Lengths) -> None:
    for report, (_, outcome) in zip(reports, asked.steps(lengths, 0), strict=True):
        assert report.tokens.tolist() == outcome.response_tokens.ravel().tolist(), report.policy


def test_every_policy_meets_the_same_lengths() -> None:
    runs = [*ablation.runs(TINY, GRPO, 0).values(), *waste.hosted(TINY, GRPO, 0).values()]
    assert len(runs) == len(ablation.POLICIES) + len(waste.HOSTINGS)
    for each in runs:
        same_lengths(each.reports, TINY, GRPO)
    same_lengths(simulate(prefill.NO_REUSE, TINY.steps(PPO, 0), TINY.setting(0), actors=3).reports, TINY, PPO)


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize(("more", "common"), [(0, True), (64, True), (64, False)])
def test_deduplication_never_adds_prompt_tokens(n: int, more: int, common: bool) -> None:
    found = prefill.job(TINY, (replace(GRPO, n=n), more, common), 0)
    tokens = [found[kind.name]["prompt_tokens"] for kind in reversed(prefill.KINDS)]
    assert tokens == sorted(tokens)  # deduplicated, grouped, scattered, no reuse
    prompts = np.mean([workload.prompt_tokens.sum() + more * workload.size for workload, _ in TINY.steps(GRPO, 0)])
    assert tokens[-1] == pytest.approx(n * prompts)
    saved = 1 - tokens[0] / tokens[-1]
    header = more * (TINY.batch - 1) if common else 0
    assert saved == pytest.approx(1 - (prompts - header) / (n * prompts))
    assert all(0 <= each["redundant_gpu_share"] < 1 for each in found.values())


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    tokens=st.integers(1, 20),
    common=st.booleans(),
    known=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_longer_prompts_share_what_they_are_told_to(sizes: list[int], tokens: int, common: bool, known: bool) -> None:
    rng = np.random.default_rng(0)
    workload = Workload(
        step=0, epoch=0, algorithm="ppo", prompt_ids=np.arange(len(sizes)), prompt_tokens=ints(sizes),
        responses_per_prompt=1, max_response_tokens=8,
        prompts=tuple(ints(rng.integers(10, 90, size)) for size in sizes) if known else None,
    )  # fmt: skip
    ((longer, outcome),) = prefill.longer([(workload, None)], tokens, common)  # type: ignore[list-item]
    assert outcome is None
    assert longer.prompt_tokens.tolist() == [size + tokens for size in sizes]
    if known:
        assert longer.prompts is not None
        heads = {tuple(each[:tokens].tolist()) for each in longer.prompts}
        assert len(heads) == (1 if common else len(sizes))
    else:
        assert longer.common_prefix_tokens == (tokens if common else 0)


def test_a_share_of_reuse_that_is_redundant_is_what_others_save() -> None:
    found = prefill.job(TINY, (GRPO, 0, True), 0)
    none = found[prefill.NO_REUSE.name]
    assert none["redundant_token_share"] == pytest.approx(1 - 1 / GRPO.n)
    assert found[prefill.DEDUPLICATED.name]["redundant_gpu_share"] == 0


def test_phases_of_a_step_add_up() -> None:
    for name in ("verl", "raw", "rlhfless"):
        actors = None if name == "rlhfless" else 3
        for report in simulate(name, TINY.steps(GRPO, 0), TINY.setting(0), actors=actors).reports:
            parts = breakdown.report_phases(report)
            generation = sum(parts[part] for part in breakdown.PARTS_OF_GENERATION)
            assert generation == pytest.approx(report.phase_s("generation")), name
            assert sum(parts.values()) == pytest.approx(report.step_s), name


def test_parts_of_planning_are_timed_without_changing_the_plan() -> None:
    steps, setting = breakdown.with_ids(TINY.steps(GRPO, 0), 0), TINY.setting(0)
    timed = simulate("rlhfless", steps, setting, made_by=breakdown.TimedPlanner)
    plain = simulate("rlhfless", steps, setting)
    assert [each.plan.to_json() for each in timed.records] == [each.plan.to_json() for each in plain.records]
    parts = breakdown.timings(steps, setting)
    assert set(breakdown.TIMED.values()) <= parts.keys()
    assert min(parts.values()) >= 0


def test_the_default_is_the_measure_of_sensitivity(folder_of: Any) -> None:
    rows = {row["policy"]: row for row in rows_of(folder_of("sensitivity") / "sensitivity.csv")}
    for name in ("window 1", "tau 0.7", "weight 0.7"):
        assert float(rows[name]["generation_s_ratio"]) == 1
        assert float(rows[name]["held_gpu_s_ratio"]) == 1
    actors = [float(rows[f"weight {share:g}"]["actors"]) for share in (0.3, 0.5, 0.7, 0.9)]
    assert actors == sorted(actors)  # more weight on time never chooses fewer actors


def test_measures_are_ratios_of_what_they_say() -> None:
    steps, setting = TINY.steps(GRPO, 0), TINY.setting(0)
    bound = bounds(steps, setting.profile)
    base, ours = simulate("verl", steps, setting, actors=3), simulate("dp+pa", steps, setting, actors=3)
    found, own = study.measures(ours, bound, base), study.measures(base, bound, base)
    assert found["held_saving"] == pytest.approx(1 - found["held_gpu_s"] / own["held_gpu_s"])
    assert found["generation_speedup"] == pytest.approx(own["generation_s"] / found["generation_s"])
    assert found["time_over_bound"] == pytest.approx(found["generation_s"] / bound[0])
    assert (own["held_saving"], own["generation_speedup"]) == (0, 1)


# ---- the harness


def square(asked: Asked, item: int, seed: int) -> dict[str, dict[str, float]]:
    return {"one": {"value": float(item * item + seed)}}


@pytest.mark.parametrize("processes", [1, 2])
def test_over_seeds_keeps_items_and_seeds_in_order(processes: int) -> None:
    asked = replace(TINY, seed=3, seeds=4, processes=processes)
    found = study.over_seeds(square, [5, 1, 2], asked, "squares")
    assert [each["one"]["value"].values.tolist() for each in found] == [
        [item * item + seed for seed in (3, 4, 5, 6)] for item in (5, 1, 2)
    ]


def test_derived_goes_seed_by_seed() -> None:
    one, other = Series(values=floats([1.0, 2.0])), Series(values=floats([4.0, 5.0]))
    assert study.derived(np.divide, one, other).values.tolist() == [0.25, 0.4]


def test_a_claim_is_printed_in_its_unit() -> None:
    here = Series(values=floats([0.1, 0.3]))
    claim = figure.Claim(what="saved", given="here", paper=0.448, here=here, unit="%")
    assert claim.printed() == ["saved", "here", "44.8 %", "20.0 ± 127.1 %"]
    assert replace(claim, paper=None, unit="x").printed()[2:] == ["-", "0.20 ± 1.27x"]
    assert claim.cells()["paper"] == 0.448


# ---- commands


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--profile", f"{SMALL},qwen2.5-7b_l40s_tp4"], "at most 1"),
        (["--profile", "gpt-9"], "gpt-9"),
        (["--trace", "/nowhere/trace.parquet"], "trace.parquet"),
        (["--seeds", "0"], "--seeds"),
        (["--nodes", "1"], "GPUs"),
    ],
)
def test_bad_input_ends_with_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = figure.command(BY_NAME["ablation"])
    small = ["--epochs", "1", "--prompts-per-step", "16", "--processes", "1", "--out", str(tmp_path / "out")]
    code, out, err = call(app, [*small, *arguments], capsys)
    assert code == 2
    assert out == ""
    assert says in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


SMALL_ALL = [
    "--seeds",
    "2",
    "--epochs",
    "1",
    "--prompts-per-step",
    "16",
    "--processes",
    "1",
    "--only",
    "rlhfuse,lengths",
]


def test_all_runs_what_is_not_there_and_reports_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_option = ["--out", str(tmp_path)]
    code, out, err = call(everything.app, [*SMALL_ALL, *out_option], capsys)
    assert code == 0, err
    assert "Figure 12" in out
    assert "[2/2] rlhfuse" in err
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.json")}
    assert len(before) == 4
    code, again, err = call(everything.app, [*SMALL_ALL, *out_option], capsys)
    assert (code, again) == (0, out)
    assert "[1/2] lengths: is there" in err
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (tmp_path / "rlhfuse" / "rlhfuse.png").unlink()
    code, _, err = call(everything.app, [*SMALL_ALL, *out_option], capsys)
    assert "lengths: is there" in err
    assert "rlhfuse: is there" not in err
    code, _, err = call(everything.app, [*SMALL_ALL, *out_option, "--seed", "9"], capsys)
    assert "is there" not in err

    report = (tmp_path / "report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', report)
    assert all(each.startswith(("data:image/png;base64,", "#")) for each in sources)
    assert "http" not in report.replace("http-equiv", "")
    assert report.count("data:image/png") == 2
    assert "12.8 %" in report


def test_all_runs_every_figure_over_the_same_seeds() -> None:
    for piece in everything.pieces(Asked(seed=4, seeds=3), None, None, []):
        told = piece.config["options"]
        assert (told["seed"], told["seeds"]) == (4, 3), piece.name


def test_all_refuses_an_unknown_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(everything.app, ["--only", "fig9", "--out", str(tmp_path)], capsys)
    assert code == 2
    assert "'fig9'" in err


def test_scale_writes_what_it_was_made_with(tmp_path: Path, capsys: pytest.CaptureFixture[str], recorded: Path) -> None:
    small = [
        "--nodes",
        "4",
        "--profile",
        SMALL,
        "--prompts",
        "16",
        "--policies",
        "verl,rlhfless",
        "--trace",
        str(recorded),
    ]
    code, out, err = call(everything.scale.app, [*small, "--out", str(tmp_path)], capsys)
    assert code == 0, err
    assert "Figure 16" in out
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["options"]["trace"]["name"] == "trace.parquet"
    assert config["options"]["prompts"] == 16
    assert {row["cap_tokens"] for row in rows_of(tmp_path / "scale.csv")} == {"512"}
    paper = rows_of(tmp_path / "paper.csv")
    assert [float(row["paper"]) for row in paper] == [1.23, 0.387]
