"""GSM8K (openai/grade-school-math, MIT): prompts, reference answers, and the solutions that four models wrote.

The recorded solutions are real lengths, of four different models, not n samples of one: their spread within a prompt
holds the models' differences too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfless.errors import InputError
from rlhfless.types.arrays import IntArray, ints
from traces.format import Trace, TraceInfo
from traces.importers.tokenizers import Tokenizer

SOLUTIONS_FILE = "example_model_solutions.jsonl"
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
"""The models of the solutions file, in the order in which they become samples 0 to 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """Prompts of a problem file."""

    prompt_ids: npt.NDArray[np.str_]
    """str[problems]: the file's name without suffix, and the line from 0."""
    prompts: tuple[IntArray, ...]
    """Token ids of each question."""
    reference_tokens: IntArray
    """int[problems]: tokens of each reference answer."""


def problems(path: str | Path, tokenizer: Tokenizer) -> Problems:
    """Questions and reference answers of train.jsonl or test.jsonl. Raises InputError naming the line at fault."""
    path = Path(path)
    records = [(_text(r, "question", path, i), _text(r, "answer", path, i)) for i, r in enumerate(_records(path), 1)]
    return _problems(path, records, tokenizer)


def recorded(path: str | Path, tokenizer: Tokenizer, prompts_per_step: int) -> Trace:
    """The recorded solutions as a trace: one epoch, n = 4 (one sample a model), reward 1 where the answer is right.

    `path` is the solutions file or the folder that holds it. The last step holds what is left over. The cap is not
    known: the longest solution stands for it, and every finish_reason is "stop". Raises InputError naming the line,
    and for steps of more prompts than there are.
    """
    path = Path(path)
    if path.is_dir():
        path = path / SOLUTIONS_FILE
    if prompts_per_step < 1:
        raise InputError(f"prompts_per_step is {prompts_per_step}; it must be at least 1")
    texts, lengths, rewards = [], [], []
    for line, record in enumerate(_records(path), 1):
        if "answer" in record and MODELS[0] not in record:
            raise InputError(
                f"{path}: holds problems but no solutions of models; the solutions are in {SOLUTIONS_FILE}"
            )
        texts.append((_text(record, "question", path, line), _text(record, "ground_truth", path, line)))
        for model in MODELS:
            entry = record.get(model)
            if not isinstance(entry, dict) or not isinstance(entry.get("is_correct"), bool):
                raise InputError(f"{path}, line {line}: no {model} with is_correct and solution")
            lengths.append(max(len(tokenizer.encode(_text(entry, "solution", path, line))), 1))
            rewards.append(float(entry["is_correct"]))
    if prompts_per_step > len(texts):
        raise InputError(f"prompts_per_step is {prompts_per_step}, but {path} has only {len(texts)} prompts")
    found = _problems(path, texts, tokenizer)
    n, count = len(MODELS), len(texts)
    prompt_tokens = ints([len(prompt) for prompt in found.prompts])
    return Trace(
        info=TraceInfo(
            model=", ".join(MODELS),
            dataset="GSM8K test",
            tokenizer=tokenizer.name,
            algorithm="grpo",
            responses_per_prompt=n,
            max_prompt_tokens=int(prompt_tokens.max()),
            max_response_tokens=max(lengths),
            source=f"openai/grade-school-math, {path.name}: solutions of four models, one sample each, in file order; "
            "MIT",
        ),
        prompt_ids=found.prompt_ids,
        prompt_tokens=prompt_tokens,
        reference_tokens=found.reference_tokens,
        prompt_token_ids=found.prompts,
        epoch=np.zeros(count * n, dtype=np.int64),
        step=np.repeat(np.arange(count) // prompts_per_step, n),
        prompt=np.repeat(np.arange(count), n),
        sample=np.tile(np.arange(n), count),
        response_tokens=ints(lengths),
        truncated=np.zeros(count * n, dtype=bool),
        reward=np.array(rewards),
    )


def _problems(path: Path, texts: list[tuple[str, str]], tokenizer: Tokenizer) -> Problems:
    prompts = tuple(ints(tokenizer.encode(question)) for question, _ in texts)
    if empty := [line for line, prompt in enumerate(prompts, 1) if len(prompt) == 0]:
        raise InputError(f"{path}, line {empty[0]}: the question has no tokens")
    return Problems(
        prompt_ids=np.array([f"{path.stem}-{line}" for line in range(len(texts))], dtype=np.str_),
        prompts=prompts,
        reference_tokens=ints([max(len(tokenizer.encode(answer)), 1) for _, answer in texts]),
    )


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    records = []
    with path.open(encoding="utf-8") as file:
        try:
            for line, text in enumerate(file, 1):
                record = json.loads(text)
                if not isinstance(record, dict):
                    raise InputError(f"{path}, line {line}: not a JSON object")
                records.append(record)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path}, line {len(records) + 1}: not JSON ({error})") from None
    if not records:
        raise InputError(f"{path}: no problems in it")
    return records


def _text(record: dict[str, Any], field: str, path: Path, line: int) -> str:
    text = record.get(field)
    if not isinstance(text, str):
        raise InputError(f"{path}, line {line}: no text in field {field!r}")
    return text
