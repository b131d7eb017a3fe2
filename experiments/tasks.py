"""What is trained on: sums that the project makes, or questions from a file, with reference answers."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.types.arrays import ints
from traces.importers.gsm8k import Problems
from traces.importers.gsm8k import problems as checked
from traces.importers.tokenizers import Tokenizer, Words

HEADER = "Add up, one line for each step.\n"
"""What every sum begins with: 32 characters, a KV block of engines on CPUs."""
TERMS, LARGEST = (2, 9), 9
"""Fewest and most numbers of a sum, and the largest number; the smallest is 1."""
ALONE, GUESSES = 0.7, 0.6
"""Until ALONE of the warm start all examples are worked out; from then on the writer of a share of GUESSES guesses the
result without a line of work (chosen: a model that imitates both writers is right in some four of ten, and can learn
that writing the lines pays)."""
GUESS_STD = 2.5
"""Spread of guesses around the result, rounded."""
HELD_OUT_OF = 8
"""One sum in so many, by its text, is never taught: neither by example nor by reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompts and what is right."""

    name: str
    """What results call it."""
    problems: Problems
    """Prompts and the lengths of their reference answers."""
    references: tuple[str, ...]
    """Reference answer of each prompt."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum with its answers."""

    numbers: tuple[int, ...]

    @classmethod
    def draw(cls, rng: np.random.Generator, *, held_out: bool = False) -> "Sum":
        """One of those that are taught, or of the others."""
        while True:
            count = int(rng.integers(TERMS[0], TERMS[1] + 1))
            found = cls(tuple(rng.integers(1, LARGEST + 1, count).tolist()))
            if found.held_out == held_out:
                return found

    @property
    def prompt(self) -> str:
        return f"{HEADER}{'+'.join(map(str, self.numbers))}="

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.prompt.encode()) % HELD_OUT_OF == 0

    @property
    def worked(self) -> str:
        """Written out: the running total, a line a number, then the result as GSM8K has it."""
        lines, total = [], self.numbers[0]
        for number in self.numbers[1:]:
            lines.append(f"{total}+{number}={total + number}")
            total += number
        return "\n".join([*lines, f"#### {total}"])

    def guessed(self, rng: np.random.Generator) -> str:
        """The result as somebody has it who does not work it out."""
        return f"#### {max(1, sum(self.numbers) + round(rng.normal(0, GUESS_STD)))}"


def example(rng: np.random.Generator, progress: float) -> tuple[str, str]:
    """What a warm start is taught when `progress` of it is done: a prompt, and how one of two writers answers it."""
    found = Sum.draw(rng)
    guesses = progress >= ALONE and rng.random() < GUESSES
    return found.prompt, found.guessed(rng) if guesses else found.worked


def recipe() -> str:
    """What the examples depend on."""
    return f"sums: {TERMS[0]} to {TERMS[1]} numbers up to {LARGEST}, guesses {GUESSES} from {ALONE}, std {GUESS_STD}"


def sums(count: int, seed: int, tokenizer: Tokenizer, *, held_out: bool = False) -> Task:
    """Different sums drawn from `seed`."""
    rng = stream(seed, "experiments", "sums", str(held_out))
    found: dict[Sum, None] = {}
    while len(found) < count:
        found[Sum.draw(rng, held_out=held_out)] = None
    return _task("sums", "held-out" if held_out else "sum", _pairs(found), tokenizer)


def _pairs(sums: dict[Sum, None]) -> Iterator[tuple[str, str]]:
    return ((each.prompt, each.worked) for each in sums)


def questions(path: Path, instruction: str, tokenizer: Tokenizer) -> Task:
    """Questions and answers of a GSM8K-like jsonl file, `instruction` after each question.

    Raises InputError naming the line at fault, such as one without an answer.
    """
    checked(path, Words())
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = ((record["question"] + instruction, record["answer"]) for record in records)
    return _task(path.name, path.stem, pairs, tokenizer)


def part(task: Task, rows: list[int]) -> Task:
    """Some of a task's prompts."""
    found = task.problems
    return Task(
        name=task.name,
        problems=Problems(
            prompt_ids=found.prompt_ids[rows],
            prompts=tuple(found.prompts[row] for row in rows),
            reference_tokens=found.reference_tokens[rows],
        ),
        references=tuple(task.references[row] for row in rows),
    )


def fitting(task: Task, most_tokens: int, count: int, what: str) -> Task:
    """The first `count` prompts of at most `most_tokens`. Raises InputError where there are fewer."""
    rows = [row for row, prompt in enumerate(task.problems.prompts) if len(prompt) <= most_tokens]
    if len(rows) < count:
        raise InputError(f"{task.name}: {len(rows)} prompts of at most {most_tokens} tokens, {what} needs {count}")
    return part(task, rows[:count])


def _task(name: str, stem: str, pairs: Iterator[tuple[str, str]], tokenizer: Tokenizer) -> Task:
    both = list(pairs)
    prompts = tuple(ints(tokenizer.encode(prompt)) for prompt, _ in both)
    if empty := [row for row, prompt in enumerate(prompts) if prompt.size == 0]:
        raise InputError(f"{name}: prompt {empty[0]} has no tokens")
    return Task(
        name=name,
        problems=Problems(
            prompt_ids=np.array([f"{stem}-{row}" for row in range(len(both))], dtype=np.str_),
            prompts=prompts,
            reference_tokens=ints([max(len(tokenizer.encode(answer)), 1) for _, answer in both]),
        ),
        references=tuple(answer for _, answer in both),
    )
