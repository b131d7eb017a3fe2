"""Training runs: whole steps on Ray, vLLM and PyTorch, killed and gone on with."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import checkpoint
from experiments import train
from experiments.train_log import read_rows
from rlhfless.scheduler.starts import PREWARM_BUFFER_S
from rlhfless.types.plan import Plan
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload
from tests import ray_steps
from tests.commands import edited, refused
from tests.profiles import tiny_profile
from traces.format import Trace

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {name: ROOT / "examples" / f"cpu-{name}.toml" for name in ("grpo", "ppo")}
COMMAND_S = 420.0
"""Longest wait for a command that starts engines (chosen: some ten times what it takes; machines are shared)."""


REAL = [pytest.mark.slow, ray_steps.real]


def small(tmp_path: Path, algorithm: str) -> Path:
    """An example in little: a profile that is not measured, a reward that tells responses of a random model apart."""
    profile = tmp_path / "profile.json"
    profile.write_text(tiny_profile(gpu="cpu", max_slots=16).to_json())
    path = edited(
        EXAMPLES[algorithm], tmp_path, source=f'"{profile}"', prompts_per_step="4", responses_per_prompt="4",
        max_response_tokens="24", steps_per_epoch="2", held_out_prompts="6", held_out_every="2", max_slots="16",
        reward='"tests.ray_steps:by_length"',
    )  # fmt: skip
    path.write_text(re.sub(r"^(batches|contexts|limit_s) = .*\n", "", path.read_text(), flags=re.MULTILINE))
    return path


def command(config: Path, model: Path, out: Path, *arguments: object) -> list[str]:
    return [
        sys.executable, "-m", "experiments.train", "--config", str(config), "--model", str(model), "--out", str(out),
        *map(str, arguments),
    ]  # fmt: skip


def finish(arguments: Sequence[str]) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def reports(folder: Path) -> list[StepReport]:
    return [StepReport.from_json(path.read_text()) for path in sorted((folder / "reports").iterdir())]


def check_run(folder: Path, algorithm: str, steps: int) -> None:
    """What every run must have left behind."""
    rows = read_rows(folder / "metrics.jsonl")
    assert [each["step"] for each in rows] == list(range(steps))
    assert [each["weights"] for each in rows] == [str(step) for step in range(steps)]
    functions = ["decode", "learner", "prefill", "reference", "reward"]
    for each, report in zip(rows, reports(folder), strict=True):
        found = sorted({one.function for one in report.invocations})
        assert found == sorted([*functions, *(["critic"] if algorithm == "ppo" else [])])
        assert [phase.name for phase in report.phases] == ["generation", "preparation", "learning"]
        assert all(phase.duration_s > 0 for phase in report.phases)
        assert 0 <= float(str(each["mismatch_mean"])) < 1e-3
        assert float(str(each["policy_grad_norm"])) > 0
        assert ("value_loss" in each) == (algorithm == "ppo")
    check_prewarming(folder)
    told = json.loads((folder / "train.json").read_text())
    assert 0 <= told["held_out_before"] <= 1
    assert 0 <= told["held_out_after"] <= 1
    billed = {each["function"] for each in told["bill"]["functions"] if each["invocations"]}
    assert {"reward", "reference", "learner"} <= billed
    trace = Trace.read(folder / "trace.parquet")
    assert trace.reward is not None
    assert trace.info.algorithm == algorithm
    assert np.unique(trace.step).tolist() == list(range(steps))
    assert trace.reward.mean() == pytest.approx(np.mean([float(str(each["reward"])) for each in rows]))
    assert checkpoint.newest(folder / "checkpoints") == folder / "checkpoints" / f"step-{steps:06d}"
    assert not list((folder / "weights").rglob("*.safetensors"))
    assert (folder / "train.png").read_bytes().startswith(b"\x89PNG")


def check_prewarming(folder: Path) -> None:
    """Functions are asked for by the shortest phases of all steps before, whichever process carried them out."""
    shortest_s: dict[str, float] = {}
    for path, report in zip(sorted((folder / "plans").iterdir()), reports(folder), strict=True):
        asked_s = {each.function: each.ready_after_s for each in Plan.from_json(path.read_text()).prewarm}
        for function, before in (("decode", "learning"), ("learner", "preparation")):
            assert not shortest_s or asked_s[function] == shortest_s[before] + PREWARM_BUFFER_S
        for phase in report.phases:
            past_s = shortest_s.get(phase.name, np.inf)
            shortest_s[phase.name] = min(report.execution_s(phase.name), past_s)


@pytest.fixture(scope="module")
def straight(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of GRPO in one go, without weights that depend on how the engines round."""
    folder = tmp_path_factory.mktemp("straight")
    path = small(folder, "grpo")
    path.write_text(path.read_text().replace("[learner.grpo]", '[learner.grpo]\ntis_cap = "none"'))
    finish(command(path, tiny_model, folder / "out", "--steps", 3))
    return folder


class TestRuns:
    pytestmark = REAL

    def test_grpo(self, straight: Path) -> None:
        check_run(straight / "out", "grpo", 3)

    def test_ppo(self, tiny_model: Path, tmp_path: Path) -> None:
        out = finish(command(small(tmp_path, "ppo"), tiny_model, tmp_path / "out", "--steps", 2, "--json"))
        assert out == (tmp_path / "out" / "train.json").read_text()
        check_run(tmp_path / "out", "ppo", 2)

    def test_a_killed_run_goes_on(self, straight: Path, tiny_model: Path, tmp_path: Path) -> None:
        """SIGKILL after a step: the rest comes out as without it, to the last bit of the weights."""
        out, config = tmp_path / "out", straight / "config.toml"
        process = subprocess.Popen(
            command(config, tiny_model, out, "--steps", 3), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until_s, metrics = time.monotonic() + COMMAND_S, out / "metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text().count("\n")) and time.monotonic() < until_s:
            assert process.poll() is None, "ended by itself"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = checkpoint.newest(out / "checkpoints")
        finish(
            command(config, tiny_model, out, "--resume" if left else "--steps", *([] if left else [3]), "--steps", 3)
        )
        check_run(out, "grpo", 3)
        for one, other in zip(reports(out), reports(straight / "out"), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
        import torch

        ends = [
            torch.load(each / "checkpoints" / "step-000003" / "learner.pt", weights_only=True)
            for each in (out, straight / "out")
        ]
        assert all(torch.equal(tensor, ends[1]["policy"][name]) for name, tensor in ends[0]["policy"].items())

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("algorithm", '"ppo"', "algorithm was 'grpo', here it is 'ppo'"),
            ("prompts_per_step", "2", "prompts_per_step was 4, here it is 2"),
            ("steps", "2", "3 steps are done, more than the 2"),
        ],
    )
    def test_a_checkpoint_of_another_run(
        self, straight: Path, tiny_model: Path, tmp_path: Path, key: str, value: str, message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        path = tmp_path / "config.toml"
        path.write_text(
            re.sub(rf"^{key} = .*$", f"{key} = {value}", (straight / "config.toml").read_text(), flags=re.M)
        )
        given = ["--config", str(path), "--model", str(tiny_model), "--out", str(straight / "out"), "--resume"]
        assert message in refused(train, given, capsys)

    def test_reward_and_options_that_are_unknown(
        self, straight: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text, path = (straight / "config.toml").read_text(), tmp_path / "config.toml"
        given = ["--config", str(path), "--model", str(tiny_model), "--out", str(tmp_path / "out")]
        path.write_text(text.replace("tests.ray_steps:by_length", "best"))
        assert refused(train, given, capsys).startswith("learner.reward: reward 'best': known are gsm8k")
        path.write_text(text.replace("beta = 0.001", "betta = 0.001"))
        assert refused(train, given, capsys).startswith("learner.grpo.betta: unknown; known are clip_low")
        path.write_text(text.replace("beta = 0.001", "beta = -1.0"))
        assert "beta -1.0 must be at least 0" in refused(train, given, capsys)


class Keeps:
    """A trainer that learns nothing and keeps what it is given."""

    functions = ("reward",)

    def __init__(self, model: Path) -> None:
        self.model, self.steps, self.seen = model, 0, list[Any]()

    @property
    def version(self) -> str:
        return str(self.steps)

    def score(self, workload: Workload, responses: Any, /) -> Any:
        return np.zeros(len(responses))

    def prepare(self, function: str, cores: int, workload: Workload, responses: Any, /) -> Any:
        return self.score(workload, responses)

    def learn(self, cores: int, workload: Workload, responses: Any, /) -> Any:
        self.seen.append(responses)
        self.steps += 1

    def publish(self, folder: Path, /) -> Any:
        from backends.weight_sync import publish

        return publish(self.model, folder, self.version)

    def rest(self) -> None: ...

    def wake(self) -> None: ...


@pytest.mark.slow
@ray_steps.real
def test_cuts_and_shared_kv_change_no_gradient(tiny_model: Path, tmp_path: Path) -> None:
    """Responses that were moved in mid-step, with prompts' KV from elsewhere: the same tokens, and the same update."""
    from backends.grpo import GrpoOptions
    from backends.learner_ranks import LocalRank
    from backends.learner_types import LearnerConfig
    from backends.training import Training

    work = ray_steps.workload(0, prompts=12, n=4)
    with ray_steps.executor(tiny_model, tmp_path / "weights") as executor:
        keeps = Keeps(tiny_model)
        executor.train_with(keeps)
        plain = ray_steps.plan("raw", work)
        executor.execute(plain, work)
        planned = ray_steps.plan("rlhfless", work)
        executor.lengths = ray_steps.long_tails(planned, work)
        moved = ray_steps.execute_until_cut(executor, planned, work)
        assert moved.counters.moves > 0
        assert moved.counters.prefill_tokens > 0
        executor.execute(plain, work)
    cut, straight = keeps.seen[-2:]
    assert [one.tokens.tolist() for one in cut] == [one.tokens.tolist() for one in straight]
    gradients = []
    for responses in (straight, cut):
        config = LearnerConfig(
            model=str(tiny_model), options=GrpoOptions(beta=0.0), learning_rate=1e-3, critic_learning_rate=1e-3,
            tokens_per_microbatch=2048,
        )  # fmt: skip
        rank = LocalRank(config)
        learner = Training(config, ray_steps.by_length, dict.fromkeys(range(12), ""), ranks=rank)
        learner.prepare("reward", 1, work, responses)
        told, _, apart = learner.experience(work, responses)
        assert apart.max_abs < 1e-3
        rank._learner.gradients(told, range(len(responses)))
        gradients.append([one.grad for one in rank._learner._policy.model.parameters()])
    largest = max(float(one.abs().max()) for one in gradients[0])
    assert largest > 1e-4
    # with equal tokens, all that may differ is the engines' rounding of log-probabilities, which weights tokens
    apart = max(float((one - other).abs().max()) for one, other in zip(*gradients, strict=True))
    assert apart < 1e-4 * largest
