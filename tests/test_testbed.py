"""Real runs from configuration files: clear errors, whole steps on Ray and vLLM, traces that replay, both executors."""

import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from experiments import compare, replay, testbed, validate
from experiments.config import Config, load
from experiments.real import arithmetic
from rlhfless.errors import InputError
from rlhfless.types.arrays import floats
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Plan
from rlhfless.types.profile import Profile
from rlhfless.types.report import StepReport
from sim.executor import SimExecutor
from sim.profiles import load as load_profile
from sim.world import World
from tests.commands import call, edited
from traces.format import Trace
from traces.importers.tokenizers import Words
from traces.load import steps as steps_of

ROOT = Path(__file__).resolve().parent.parent
CPU = ROOT / "examples" / "cpu-tiny.toml"
GPU = ROOT / "examples" / "g6e-qwen3b.toml"
COMMAND_S = 420.0
"""Longest wait for a command that starts engines (chosen: some ten times what it takes; machines are shared)."""

Edit = Callable[[str], str]


# ---- configuration


@pytest.mark.parametrize("path", [CPU, GPU], ids=lambda path: path.stem)
def test_examples_are_whole(path: Path) -> None:
    config = load(path)
    assert config.name == path.stem
    assert config.cluster.cluster.gpus == config.cluster.gpus


def test_gpu_example_is_the_testbed_of_the_paper() -> None:
    config = load(GPU)
    assert (config.cluster.gpu, config.cluster.gpus, config.cluster.gpus_per_host) == ("l40s", 16, 8)
    assert config.profile.source == "qwen2.5-3b_l40s_tp2"
    assert (config.workload.max_prompt_tokens, config.workload.max_response_tokens) == (1024, 2048)
    assert (config.planner.tau, config.planner.weight, config.planner.window) == (0.7, 0.7, 1)
    assert config.ray.address == "auto"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text + "\nrepeats = 2\n", "unknown key validate.repeats; known here are preset, steps"),
        (lambda text: "colour = 1\n" + text, "unknown key colour; known here are name, seed"),
        (lambda text: text.replace("max_slots = 16\n", ""), "engine.max_slots is missing"),
        (lambda text: text.replace("[kv]\ntransport", "[planner2]\ntransport"), "unknown key planner2"),
        (lambda text: re.sub(r"\[kv\]\ntransport.*\n", "", text), "kv is missing"),
        (lambda text: text.replace("max_slots = 16", 'max_slots = "16"'), "engine.max_slots: expected `int`, got"),
        (lambda text: text.replace("gpus = 2", "gpus = 2.5", 1), "cluster.gpus: expected `int`, got `float`"),
        (lambda text: text.replace("gpus = 2", "gpus = 0", 1), "cluster.gpus: 0 must be at least 1"),
        (lambda text: text.replace('"cpu"', '"tpu"'), "engine.device: 'tpu' is unknown; known are cpu, cuda"),
        (lambda text: text.replace('policy = "rlhfless"', 'policy = "best"'), "planner.policy: unknown policy 'best'"),
        (lambda text: text.replace('policy = "rlhfless"', 'policy = "oracle:dp"'), "planner.policy: 'oracle:dp'"),
        (lambda text: text.replace('policy = "rlhfless"', "tau = 0.0"), "planner.tau: 0.0 must be above 0"),
        (lambda text: text.replace("batches = [1,", "batches = [4,"), "profile.batches: [4, 4, 8, 16] must be"),
        (lambda text: text.replace("batches = [", "sizes = [2, 2]\nbatches = ["), "profile.sizes: [2, 2] must be"),
        (lambda text: text.replace("batches = [", 'others = ["p"]\nbatches = ['), 'profile.others: not for source'),
        (lambda text: text.replace('"measure"', '"p.json"'), 'profile.batches: only for source = "measure"'),
        (lambda text: text.replace("max_model_len = 1024", "max_model_len = 512"), "engine.max_model_len: 512 is"),
        (lambda text: re.sub("kv_cache_bytes.*", "", text), "engine.kv_cache_bytes is missing"),
        (lambda text: text.replace("temperature = 1.0", "temperature = nan"), "workload.temperature: nan must"),
        (lambda text: text.replace("[model]", "[model"), "not TOML"),
        (lambda text: text.replace("[kv]", '[kv]\nredis_url = "redis://:pw@localhost"'), "kv.redis_url: a password"),
        (lambda text: text.replace("[model]\npath = \"tiny\"", "model = 1"), "model: expected `object`, got `int`"),
    ],
)  # fmt: skip
def test_config_errors_name_file_and_key(
    edit: Edit, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(edit(CPU.read_text()))
    assert path.read_text() != CPU.read_text()
    out = tmp_path / "out"
    code, printed, err = call(testbed, ["--config", str(path), "--out", str(out)], capsys)
    assert code == 2
    assert printed == ""
    assert err.startswith(f"error: {path}: {message}")
    assert err.count("\n") == 1
    assert not out.exists()


def test_config_file_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(testbed, ["--config", str(tmp_path / "none.toml")], capsys)
    assert (code, err) == (
        2,
        f"error: {tmp_path}/none.toml: cannot read the configuration (No such file or directory)\n",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "unknown policy 'best': known are verl"),
        (["--policy", "oracle:dp"], "--policy 'oracle:dp': nobody knows the true lengths"),
        (["--record", "trace.csv"], "--record trace.csv: the name must end in .parquet or .jsonl"),
        (["--steps", "0"], "Invalid value for '--steps'"),
    ],
)
def test_testbed_option_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(testbed, ["--config", str(CPU), "--out", str(tmp_path / "out"), *arguments], capsys)
    assert code == 2
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_model_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edited(CPU, tmp_path, path='"models/none"')
    code, _, err = call(testbed, ["--config", str(path), "--out", str(tmp_path / "out")], capsys)
    assert code == 2
    assert err == "error: model.path: models/none is not a folder with a Hugging Face model (no config.json)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "raw,best"], "--policies: unknown policy 'best'"),
        (["--policies", "raw,oracle:dp"], "--policies 'oracle:dp': oracle policies are for simulations alone"),
    ],
)
def test_validate_option_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(validate, ["--config", str(CPU), "--out", str(tmp_path / "out"), *arguments], capsys)
    assert code == 2
    assert err.startswith(f"error: {message}")


def test_validate_needs_its_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(validate, ["--config", str(GPU), "--out", str(tmp_path / "out")], capsys)
    assert code == 2
    assert "validate is missing" in err


def test_redis_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = load(GPU).kv
    monkeypatch.delenv("RLHFLESS_REDIS_URL", raising=False)
    with pytest.raises(InputError, match="the environment variable RLHFLESS_REDIS_URL is not set"):
        _ = kv.url
    monkeypatch.setenv("RLHFLESS_REDIS_URL", "redis://:secret@10.0.0.1:6380")
    assert kv.url == "redis://:secret@10.0.0.1:6380"


# ---- without engines


def test_arithmetic_prompts_share_two_headers_and_repeat() -> None:
    found = arithmetic(10, 3, Words())
    assert [p.tolist() for p in arithmetic(10, 3, Words()).prompts] == [p.tolist() for p in found.prompts]
    assert [p.tolist() for p in arithmetic(10, 4, Words()).prompts] != [p.tolist() for p in found.prompts]
    assert len({tuple(prompt.tolist()) for prompt in found.prompts}) == 10
    for start in (0, 1):
        rows = np.array([prompt[:10] for prompt in found.prompts[start::2]])
        assert (rows == rows[0]).all()
    assert (found.reference_tokens >= 1).all()


def test_gpu_example_plans_without_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(testbed, ["--config", str(GPU), "--plan-only", "--out", str(tmp_path)], capsys)
    assert code == 0, err
    plan = Plan.from_json((tmp_path / "plans" / "step-0000.json").read_text())
    config = load(GPU)
    assert (plan.sizes, plan.cluster_gpus, plan.policy) == ((2,), 16, "rlhfless")
    assert (plan.prompts, plan.responses_per_prompt) == (128, 4)
    assert max(actor.slots for actor in plan.actors) <= config.engine.max_slots
    assert "words (approximate" in out


def test_a_policy_that_mixes_sizes_plans_with_every_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, other = load_profile("qwen2.5-3b_l40s_tp2").data, load_profile("qwen2.5-3b_l40s_tp1").data
    quick = Profile(data=replace(other, decode_s=floats(other.decode_s / 10)))
    (tmp_path / "quick.json").write_text(quick.to_json())
    sources = f'source = "{slow.name}"\nothers = ["{tmp_path}/quick.json"]'
    path = tmp_path / "two.toml"
    path.write_text(GPU.read_text().replace(f'source = "{slow.name}"', sources))
    out = str(tmp_path / "out")
    code, _, err = call(testbed, ["--config", str(path), "--policy", "frontier", "--plan-only", "--out", out], capsys)
    assert code == 0, err
    plan = Plan.from_json((tmp_path / "out" / "plans" / "step-0000.json").read_text())
    assert (plan.sizes, plan.prefill_tp) == ((1,), 2)
    path.write_text(path.read_text().replace("max_slots = 256", "max_slots = 255"))
    code, _, err = call(testbed, ["--config", str(path), "--plan-only", "--out", out], capsys)
    assert (code, err) == (2, f"error: engine.max_slots: 255 is below the 256 of profile {slow.name}\n")
    path.write_text(GPU.read_text().replace(f'source = "{slow.name}"', sources.replace("quick", "none")))
    code, _, err = call(testbed, ["--config", str(path), "--plan-only", "--out", out], capsys)
    assert code == 2
    assert "none.json" in err


def test_gpu_example_takes_gsm8k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (data := os.environ.get("RLHFLESS_TEST_DATA")):
        pytest.skip("RLHFLESS_TEST_DATA is not set: no GSM8K file")
    prompts = str(Path(data) / "gsm8k" / "train.jsonl")
    arguments = ["--config", str(GPU), "--plan-only", "--out", str(tmp_path), "--prompts", prompts]
    code, _, err = call(testbed, arguments, capsys)
    assert code == 0, err
    plan = Plan.from_json((tmp_path / "plans" / "step-0000.json").read_text())
    assert plan.prompts == 128


def test_too_few_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 2)
    arguments = ["--config", str(GPU), "--plan-only", "--out", str(tmp_path / "out"), "--prompts", str(path)]
    code, _, err = call(testbed, arguments, capsys)
    assert code == 2
    assert err.startswith(f"error: {path}: 2 prompts of at most 1024 tokens, 384 are needed")


# ---- with engines

needs_engines = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ray", "vllm", "redis")),
        reason="needs Ray, vLLM and redis: pip install 'rlhfless[cpu]'",
    ),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not on PATH"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A testbed run that has ended."""

    config: Config
    folder: Path
    out: str
    trace: Trace
    plans: list[Plan]
    reports: list[StepReport]


def command(module: str, *arguments: object) -> str:
    """Stdout of a command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def finish(config: Path, folder: Path, *arguments: object) -> Done:
    out = command("experiments.testbed", "--config", config, "--out", folder, "--json", *arguments)
    plans = [Plan.from_json(path.read_text()) for path in sorted((folder / "plans").iterdir())]
    reports = [StepReport.from_json(path.read_text()) for path in sorted((folder / "reports").iterdir())]
    return Done(
        config=load(config),
        folder=folder,
        out=out,
        trace=Trace.read(folder / "recorded.jsonl"),
        plans=plans,
        reports=reports,
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two steps of four prompts, the second the first one's prompts again, with a profile measured on the way."""
    folder = tmp_path_factory.mktemp("testbed")
    config = edited(
        CPU, folder, prompts_per_step="4", max_response_tokens="48", steps="2", limit_s="1.0", contexts="[32, 512]",
        batches="[1, 4]", max_slots="4", max_model_len="512", max_batched_tokens="512",
    )  # fmt: skip
    return finish(
        config, folder / "run", "--record", folder / "run" / "recorded.jsonl", "--trace-out", folder / "p.json"
    )


class TestTestbed:
    pytestmark = needs_engines

    def test_prints_and_writes_what_happened(self, done: Done) -> None:
        result = json.loads(done.out)
        assert done.out == (done.folder / "testbed.json").read_text()
        assert [row["step"] for row in result["steps"]] == [0, 1]
        assert [row["epoch"] for row in result["steps"]] == [0, 1]
        for row, report, plan in zip(result["steps"], done.reports, done.plans, strict=True):
            assert row["responses"] == report.tokens.size == 8
            assert row["tokens"] == report.counters.decoded_tokens >= report.tokens.sum()
            assert row["generation_s"] == report.phase_s("generation") > 0
            assert row["actors"] == len(plan.actors)
            assert row["policy"] == plan.policy == report.policy == "rlhfless"
            assert row["held_gpu_s"] >= row["executed_gpu_s"] > 0
        assert result["bill"]["usd"] == pytest.approx(sum(row["usd"] for row in result["steps"]))
        with (done.folder / "testbed.csv").open() as file:
            assert [row["step"] for row in csv.DictReader(file)] == ["0", "1"]
        assert (done.folder / "gantt.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((done.folder.parent / "p.json").read_text())["traceEvents"]

    def test_records_what_the_reports_say(self, done: Done) -> None:
        trace = done.trace
        assert len(trace) == 16
        assert trace.prompt_token_ids is not None
        assert trace.reference_tokens is not None
        found = list(steps_of(trace))
        for (workload, outcome), report in zip(found, done.reports, strict=True):
            order = [report.prompt_ids.tolist().index(name) for name in workload.prompt_ids.tolist()]
            tokens = report.tokens.reshape(-1, 2)[order]
            assert (outcome.response_tokens == tokens).all()
            assert (workload.step, workload.epoch) == (report.step, report.epoch)
        assert (trace.response_tokens <= 48).all()
        assert trace.start_s is not None
        assert trace.end_s is not None
        assert (trace.end_s > trace.start_s).all()
        assert trace.start_s.min() >= done.reports[0].start_s
        assert trace.actor is not None
        assert set(trace.actor.tolist()) <= set(range(max(len(plan.actors) for plan in done.plans)))

    def test_recorded_trace_replays(self, done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = [
            "--trace", str(done.folder / "recorded.jsonl"), "--profile", str(done.folder / "profile.json"),
            "--nodes", "2", "--gpus-per-host", "2", "--policy", "rlhfless,raw", "--out", str(tmp_path), "--json",
        ]  # fmt: skip
        code, out, err = call(replay, arguments, capsys)
        assert code == 0, err
        rows = json.loads(out)["rows"]
        assert {row["policy"] for row in rows} == {"verl", "rlhfless", "raw"}
        assert {row["steps"] for row in rows if row["epoch"] == "all"} == {2}

    def test_its_plans_run_in_the_simulator(self, done: Done) -> None:
        """The same Plan JSON in both executors: the same responses and tokens."""
        profile = Profile.read(done.folder / "profile.json")
        given = dict(enumerate(steps_of(done.trace)))
        outcomes: dict[int, Outcome] = {}
        workloads = {}
        for step, report in enumerate(done.reports):
            workload, _ = given[step]
            order = [workload.prompt_ids.tolist().index(name) for name in report.prompt_ids.tolist()]
            assert workload.prompts is not None
            workloads[step] = replace(
                workload,
                prompt_ids=report.prompt_ids,
                prompt_tokens=workload.prompt_tokens[order],
                reference_tokens=None,
                prompts=tuple(workload.prompts[row] for row in order),
            )
            outcomes[step] = Outcome(response_tokens=report.tokens.reshape(-1, 2))
        world = World(profile=profile, outcome_of=lambda workload: outcomes[workload.step])
        simulator = SimExecutor(cluster=Cluster.uniform("cpu", 2, 2), world=world)
        for step, (plan, report) in enumerate(zip(done.plans, done.reports, strict=True)):
            assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
            simulated = simulator.execute(plan, workloads[step])
            assert simulated.tokens.tolist() == report.tokens.tolist()
            assert simulated.counters.decoded_tokens == int(report.tokens.sum())

    def test_profile_was_measured_here(self, done: Done) -> None:
        data = Profile.read(done.folder / "profile.json").data
        assert (data.gpu, data.tp, data.kind) == ("cpu", 1, "measured")
        assert (data.max_slots, data.max_batched_tokens) == (4, 512)

    def test_leaves_no_weights_behind(self, done: Done) -> None:
        assert not list((done.folder / "weights").rglob("*.safetensors"))


class TestValidate:
    pytestmark = needs_engines

    def test_both_sides_do_the_same_work(self, done: Done, tmp_path: Path) -> None:
        config = edited(
            CPU, tmp_path, prompts_per_step="4", max_response_tokens="256", max_slots="4", max_model_len="512",
            max_batched_tokens="512", source=f'"{done.folder / "profile.json"}"',
        )  # fmt: skip
        text = re.sub(r"^(batches|contexts|limit_s) = .*\n", "", config.read_text(), flags=re.MULTILINE)
        config.write_text(re.sub(r"(preset = .*\n)steps = \d+", r"\1steps = 1", text))
        folder = tmp_path / "out"
        out = command(
            "experiments.validate", "--config", config, "--policies", "raw,rlhfless", "--out", folder, "--json"
        )
        assert out == (folder / "validate.json").read_text()
        result = json.loads(out)
        assert result["same_lengths"] is True
        rows = result["steps"]
        assert [row["policy"] for row in rows] == ["raw", "rlhfless"]
        for row in rows:
            assert row["measured_tokens"] >= row["predicted_tokens"] > 0
        assert result["errors"]["every run"]["steps"] == 2
        assert result["errors"]["every run"]["actors"] == len(result["actors"]) >= 2
        for name in ("validate.csv", "actors.csv"):
            assert (folder / name).read_text().count("\n") > 1
        assert (folder / "validate.png").read_bytes().startswith(b"\x89PNG")


# ---- comparison


def row(policy: str, step: int, repeat: int, measured_s: float, predicted_s: float) -> compare.Row:
    sides = {"measured": measured_s, "predicted": predicted_s}
    found: compare.Row = {"policy": policy, "step": step, "repeat": repeat, "measured_cpu_s": None}
    for side, seconds in sides.items():
        found |= {f"{side}_generation_s": seconds, f"{side}_core_s": 2 * seconds, f"{side}_end_s": seconds}
    return found


def test_errors_are_medians_of_sizes() -> None:
    rows = [row("raw", 1, 0, 2.0, 1.0), row("raw", 2, 0, 1.0, 1.1), row("raw", 3, 0, 1.0, 1.3)]
    found = compare.errors_of(rows, rows[:2])
    assert found.generation_s == pytest.approx(0.3)
    assert found.core_s == pytest.approx(0.3)
    assert found.actor_end_s == pytest.approx(0.3)
    assert (found.steps, found.actors, found.cpu_s) == (3, 2, None)
    rows[1]["measured_cpu_s"] = 2.0
    assert compare.errors_of(rows, rows).cpu_s == pytest.approx(0.1)


def test_quickest_run_of_each_plan() -> None:
    rows = [row("raw", 1, 0, 3.0, 1.0), row("raw", 1, 1, 2.0, 1.0), row("dp", 1, 0, 1.0, 1.0), row("raw", 2, 0, 1, 1)]
    assert compare.quickest(rows) == {("raw", 1, 1), ("dp", 0, 1), ("raw", 0, 2)}


def test_agreement_counts_pairs_beyond_the_error() -> None:
    rows = [row("a", 1, 0, 1.0, 1.0), row("b", 1, 0, 2.0, 3.0), row("c", 1, 0, 3.0, 2.0), row("d", 1, 0, 3.1, 9.0)]
    # a is below all others on both sides; b and c are in another order; c and d differ by less than the error
    assert compare.agreement(rows, 0.1) == (4, 5)


# ---- GPUs


@pytest.mark.slow
def test_testbed_on_gpus(tmp_path: Path) -> None:
    """The same command on real GPUs, for machines that have some."""
    if not (path := os.environ.get("RLHFLESS_GPU_CONFIG")):
        pytest.skip("RLHFLESS_GPU_CONFIG is not set: no configuration for GPUs of this machine")
    run_done = finish(Path(path), tmp_path, "--steps", 2, "--record", tmp_path / "recorded.jsonl")
    asked = run_done.config.workload
    for report in run_done.reports:
        assert report.tokens.size == asked.prompts_per_step * asked.responses_per_prompt
        assert report.tokens.max() <= asked.max_response_tokens
