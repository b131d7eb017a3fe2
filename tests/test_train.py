"""Training: clear errors before anything starts, tasks, checkpoints, and what is told of a run."""

import importlib
import json
import re
from collections.abc import Callable
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
from tests.commands import refused
from traces.format import Trace
from traces.importers.tokenizers import Words

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = {name: ROOT / "examples" / f"{name}.toml" for name in ("cpu-grpo", "cpu-ppo", "g6e-qwen3b-grpo")}

Edit = Callable[[str], str]


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
    assert refused(train, ["--config", str(path), "--out", str(out)], capsys).startswith(f"{path}: {message}")
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
    assert refused(train, given, capsys).startswith(message)
    assert not out.exists()


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "checkpoints", 3)
    line = refused(train, ["--config", str(EXAMPLES["cpu-grpo"]), "--out", str(tmp_path)], capsys)
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
