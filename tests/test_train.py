"""Training runs: clear errors before anything starts, tasks, checkpoints, and whole steps on Ray, vLLM and PyTorch."""

import importlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import checkpoint
from experiments import tasks, train
from experiments.config import load
from experiments.replay import DEFAULT_TRACE
from experiments.train_log import Log, held_out_error, read_rows
from experiments.train_plot import train_figure
from rlhfless.errors import InputError, SchemaError
from rlhfless.rng import stream
from rlhfless.scheduler.starts import PREWARM_BUFFER_S
from rlhfless.types.plan import Plan
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload
from tests import ray_steps
from tests.commands import call, edited
from tests.profiles import tiny_profile
from traces.format import Trace
from traces.importers.tokenizers import Words

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {name: ROOT / "examples" / f"{name}.toml" for name in ("cpu-grpo", "cpu-ppo", "g6e-qwen3b-grpo")}
COMMAND_S = 420.0
"""Longest wait for a command that starts engines (chosen: some ten times what it takes; machines are shared)."""

Edit = Callable[[str], str]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which the command ends."""
    code, printed, err = call(train, arguments, capsys)
    assert code == 2
    assert printed == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    return err.removeprefix("error: ")


# ---- errors, before anything has been made


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_whole(name: str) -> None:
    config = load(EXAMPLES[name])
    assert config.name == name
    assert config.learner is not None
    assert config.train is not None
    assert train.parts(config) == (config.learner, config.train)
    assert config.workload.algorithm == ("ppo" if "ppo" in name else "grpo")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace('reward = "gsm8k"', ""), "learner.reward is missing"),
        (lambda text: text.replace("minibatches = 2", "minibatches = 3"), "learner.minibatches: 128 responses of a"),
        (lambda text: text.replace("responses_per_prompt = 8", "responses_per_prompt = 1"), "workload.responses_per_"),
        (lambda text: re.sub("tokens_per_microbatch = .*", "tokens_per_microbatch = 159", text), "learner.tokens_per_"),
        (lambda text: re.sub("learning_rate = .*", "learning_rate = 0.0", text), "learner.learning_rate: 0.0 must be"),
        (lambda text: re.sub("temperature = .*", "temperature = 0.7", text), "workload.temperature: 0.7; learning"),
        (lambda text: re.sub(r"\[train\]\n(.+\n)+", "", text), "train is missing: experiments.train needs"),
        (lambda text: text.replace("held_out_prompts = 256", "held_out_prompts = 0"), "train.held_out_prompts: 0 must"),
        (lambda text: text + "rate = 1\n", "unknown key train.rate; known here are held_out_prompts"),
    ],
)  # fmt: skip
def test_config_errors_name_file_and_key(
    edit: Edit, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "broken.toml", tmp_path / "out"
    text = EXAMPLES["cpu-grpo"].read_text()
    path.write_text(edit(text))
    assert path.read_text() != text
    assert refused(["--config", str(path), "--out", str(out)], capsys).startswith(f"{path}: {message}")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "best"], "unknown policy 'best': known are verl"),
        (["--policy", "oracle:dp"], "--policy 'oracle:dp': nobody knows the true lengths"),
        (["--record", "trace.csv"], "--record trace.csv: the name must end in .parquet or .jsonl"),
    ],
)
def test_option_errors(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    given = ["--config", str(EXAMPLES["cpu-grpo"]), "--out", str(out), *arguments]
    assert refused(given, capsys).startswith(message)
    assert not out.exists()


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "checkpoints", 3)
    line = refused(["--config", str(EXAMPLES["cpu-grpo"]), "--out", str(tmp_path)], capsys)
    assert line == f"--out {tmp_path}: holds a run; --resume goes on with it, or choose another folder\n"


# ---- tasks


def test_sums_are_right_and_split() -> None:
    from backends import rewards

    taught, held_out = tasks.sums(300, 3, Words()), tasks.sums(100, 3, Words(), held_out=True)
    texts = [{tuple(prompt.tolist()) for prompt in each.problems.prompts} for each in (taught, held_out)]
    assert [len(each) for each in texts] == [300, 100]
    assert texts[0].isdisjoint(texts[1])
    assert tasks.sums(300, 3, Words()).references == taught.references != tasks.sums(300, 4, Words()).references
    rng, right = stream(0, "examples"), []
    for _ in range(300):
        prompt, answer = tasks.example(rng, 1.0)
        numbers = [int(number) for number in re.findall(r"\d+", prompt)]
        assert not tasks.Sum(tuple(numbers)).held_out
        right.append(rewards.gsm8k([prompt], [answer], [f"#### {sum(numbers)}"])[0])
        assert right[-1] == 1 or "\n" not in answer
        assert "\n" in tasks.example(rng, 0.0)[1]
    assert 0.4 < np.mean(right) < 0.65  # who works it out is right, who guesses seldom


def test_questions_come_with_answers(tmp_path: Path) -> None:
    path = tmp_path / "made.jsonl"
    lines = [{"question": f"What is {each} + 1?", "answer": f"#### {each + 1}"} for each in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    task = tasks.questions(path, " Think.", Words())
    assert task.references == tuple(line["answer"] for line in lines)
    assert task.problems.prompt_ids.tolist() == [f"made-{row}" for row in range(5)]
    assert task.problems.prompts[0].tolist() == Words().encode("What is 0 + 1? Think.")
    with pytest.raises(InputError, match=r"made\.jsonl: 0 prompts of at most 3 tokens, an epoch needs 2"):
        tasks.fitting(task, 3, 2, "an epoch")
    del lines[3]["answer"]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(InputError, match=r"made\.jsonl, line 4: no text in field 'answer'"):
        tasks.questions(path, "", Words())


# ---- checkpoints


def made(root: Path, steps: int, keep: int = 2, **about: Any) -> checkpoint.Checkpoint:
    def save(path: Path) -> None:
        path.write_text(f"weights {steps}")

    return checkpoint.write(root, steps, {"seed": 1} | about, save, {"lengths.json": f"lengths {steps}"}, keep)


def test_checkpoints_are_whole_and_few(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for steps in (5, 10, 15):
        made(tmp_path, steps)
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    found = checkpoint.read(newest, {"seed": 1})
    assert (found.steps, found.learner.read_text(), found.text("lengths.json")) == (15, "weights 15", "lengths 15")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000015"]
    made(tmp_path, 15, model="other")  # a run that went on from 10
    with pytest.raises(InputError, match="a checkpoint of another run: model was 'other', here it is 'mine'"):
        checkpoint.read(newest, {"seed": 1, "model": "mine"})


def test_what_fails_on_the_way_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    made(tmp_path, 5)

    def fail(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.write(tmp_path, 6, {"seed": 1}, fail, {}, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    found = made(tmp_path, 5)
    about = found.folder / checkpoint.ABOUT
    about.write_text(about.read_text().replace('"schema": 2', '"schema": 9'))
    with pytest.raises(SchemaError, match="a checkpoint of schema 9, this program reads 2"):
        checkpoint.read(found.folder, {"seed": 1})
    about.write_text("{")
    with pytest.raises(SchemaError, match="no checkpoint"):
        checkpoint.read(found.folder, {"seed": 1})
    with pytest.raises(SchemaError, match=r"cannot read none\.json"):
        found.text("none.json")


# ---- what is told


def row(step: int, reward: float, held_out: float | None = None) -> dict[str, Any]:
    return {
        "step": step, "reward": reward, "mean_tokens": 20.0 + step, "max_tokens": 50 + step, "saving": 0.25,
        "held_out_reward": held_out, "held_out_stderr": None if held_out is None else 0.03,
    }  # fmt: skip


def test_standard_error_is_over_prompts() -> None:
    scores = np.array([1.0, 1.0, 0.0, 0.0, 1.0, 0.0])
    assert held_out_error(scores, 2) == pytest.approx((0.5, 0.5 / np.sqrt(3)))
    assert held_out_error(scores[:2], 2) == (1.0, 0.0)


def test_log_goes_on_where_a_killed_run_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(step, 0.5) for step in range(3)]
    with Log(tmp_path, [], 3, "first") as log:
        for each in rows[:2]:
            log.step(each)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert read_rows(path) == rows[:2]
    with Log(tmp_path, read_rows(path)[:1], 3, "again") as log:
        log.step(rows[1])
        log.step(rows[2])
    assert read_rows(path) == rows
    out, err = capsys.readouterr()
    assert out == ""
    assert "again: 2 steps to do" in err
    assert "saved % 25" in err


def test_event_files_hold_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs TensorBoard: pip install tensorboard")
    with Log(tmp_path, [], 1, "run") as log:
        log.step(row(0, 0.5))
    (path,) = (tmp_path / "board").iterdir()
    loader = importlib.import_module("tensorboard.backend.event_processing.event_file_loader")
    told = {
        value.tag: event.step for event in loader.EventFileLoader(str(path)).Load() for value in event.summary.value
    }
    assert told == dict.fromkeys(("step", "reward", "mean_tokens", "max_tokens", "saving"), 0)


def test_figure(tmp_path: Path) -> None:
    rows = [row(step, 0.3 + 0.02 * step, 0.3 if step in (0, 5) else None) for step in range(10)]
    train_figure(rows, {"held_out_reward": 0.6, "held_out_stderr": 0.03}, tmp_path / "train.png", "run")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_the_recorded_run_has_learned() -> None:
    trace = Trace.read(DEFAULT_TRACE)
    assert DEFAULT_TRACE.stat().st_size < 300_000
    assert trace.reward is not None
    epochs = [trace.epoch == epoch for epoch in range(int(trace.epoch.max()) + 1)]
    assert len(epochs) >= 5
    assert trace.reward[epochs[-1]].mean() > trace.reward[epochs[0]].mean() + 0.1
    assert trace.response_tokens[trace.step == 0].mean() < 0.5 * trace.response_tokens[epochs[-1]].mean()
    prompts = [set(trace.prompt[epoch].tolist()) for epoch in epochs]
    assert prompts[0] == prompts[1] == prompts[2]  # the same prompts come again


# ---- on real engines

REAL = [pytest.mark.slow, ray_steps.real]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has seen a few examples, made by a process of its own."""
    folder = tmp_path_factory.mktemp("train") / "model"
    code = (
        "import sys; from pathlib import Path; from experiments.real import warm_model; "
        "warm_model(Path(sys.argv[1]), 0, 20)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True)
    return folder


def small(tmp_path: Path, algorithm: str) -> Path:
    """An example in little: a profile that is not measured, and no engine weight, so that what is drawn is all."""
    profile = tmp_path / "profile.json"
    profile.write_text(tiny_profile(gpu="cpu", max_slots=16).to_json())
    path = edited(
        EXAMPLES[f"cpu-{algorithm}"], tmp_path, source=f'"{profile}"', prompts_per_step="4", responses_per_prompt="4",
        max_response_tokens="24", steps_per_epoch="2", held_out_prompts="6", held_out_every="2", max_slots="16",
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
        assert float(str(each["policy_grad_norm"])) >= 0
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
def straight(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of GRPO in one go, without weights that depend on how the engines round."""
    folder = tmp_path_factory.mktemp("straight")
    path = small(folder, "grpo")
    path.write_text(path.read_text().replace("[learner.grpo]", '[learner.grpo]\ntis_cap = "none"'))
    finish(command(path, model, folder / "out", "--steps", 3))
    return folder


class TestRuns:
    pytestmark = REAL

    def test_grpo(self, straight: Path) -> None:
        check_run(straight / "out", "grpo", 3)

    def test_ppo(self, model: Path, tmp_path: Path) -> None:
        out = finish(command(small(tmp_path, "ppo"), model, tmp_path / "out", "--steps", 2, "--json"))
        assert out == (tmp_path / "out" / "train.json").read_text()
        check_run(tmp_path / "out", "ppo", 2)

    def test_a_killed_run_goes_on(self, straight: Path, model: Path, tmp_path: Path) -> None:
        """SIGKILL after a step: the rest comes out as without it, to the last bit of the weights."""
        out, config = tmp_path / "out", straight / "config.toml"
        process = subprocess.Popen(
            command(config, model, out, "--steps", 3), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until_s, metrics = time.monotonic() + COMMAND_S, out / "metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text().count("\n")) and time.monotonic() < until_s:
            assert process.poll() is None, "ended by itself"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        left = checkpoint.newest(out / "checkpoints")
        finish(command(config, model, out, "--resume" if left else "--steps", *([] if left else [3]), "--steps", 3))
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
        self, straight: Path, model: Path, tmp_path: Path, key: str, value: str, message: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        path = tmp_path / "config.toml"
        path.write_text(
            re.sub(rf"^{key} = .*$", f"{key} = {value}", (straight / "config.toml").read_text(), flags=re.M)
        )
        given = ["--config", str(path), "--model", str(model), "--out", str(straight / "out"), "--resume"]
        assert message in refused(given, capsys)

    def test_reward_and_options_that_are_unknown(
        self, straight: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text, path = (straight / "config.toml").read_text(), tmp_path / "config.toml"
        given = ["--config", str(path), "--model", str(model), "--out", str(tmp_path / "out")]
        path.write_text(text.replace('reward = "gsm8k"', 'reward = "best"'))
        assert refused(given, capsys).startswith("learner.reward: reward 'best': known are gsm8k")
        path.write_text(text.replace("beta = 0.001", "betta = 0.001"))
        assert refused(given, capsys).startswith("learner.grpo.betta: unknown; known are clip_low")
        path.write_text(text.replace("beta = 0.001", "beta = -1.0"))
        assert "beta -1.0 must be at least 0" in refused(given, capsys)


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


def by_length(prompts: Sequence[str], responses: Sequence[str], references: Sequence[str]) -> Any:
    return np.array([len(text) % 7 for text in responses], dtype=float)


@pytest.mark.slow
@ray_steps.real
def test_cuts_and_shared_kv_change_no_gradient(tmp_path: Path) -> None:
    """Responses that were moved in mid-step, with prompts' KV from elsewhere: the same tokens, and the same update."""
    from backends.grpo import GrpoOptions
    from backends.learner_ranks import LocalRank
    from backends.learner_types import LearnerConfig
    from backends.training import Training

    model = ray_steps.make_model(tmp_path / "model")
    work = ray_steps.workload(0, prompts=12, n=4)
    with ray_steps.executor(model, tmp_path / "weights") as executor:
        keeps = Keeps(model)
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
            model=str(model), options=GrpoOptions(beta=0.0), learning_rate=1e-3, critic_learning_rate=1e-3,
            tokens_per_microbatch=2048,
        )  # fmt: skip
        rank = LocalRank(config)
        learner = Training(config, by_length, dict.fromkeys(range(12), ""), ranks=rank)
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
