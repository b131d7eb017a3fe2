"""Rewards by name: rules, functions of the user's, reward models; one call for all.

A reward takes the texts of a step, one of each per response, and returns float[responses]: `reward(prompts, responses,
references)`. `find` gives one by its name, with what it returns checked.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from backends.environment import Device, prepare, require
from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, floats

Reward = Callable[[Sequence[str], Sequence[str], Sequence[str]], FloatArray]
"""Texts of prompts, responses and reference answers, one of each per response, to float[responses]."""

ANSWER = "####"
"""What stands before the answer in GSM8K (Cobbe et al. 2021)."""
NUMBER = re.compile(r"(?<![\d.,/])(?:[-+]?\$?|\$[-+])(?:\d[\d,]*+(?:\.\d++)?+|\.\d++)(?!\s*/\s*\d)")
"""A number as answers have them: sign and dollar sign before it, commas in it. Neither part of a fraction is one, and
in `10-4` the second is 4."""
RIGHT, WRONG = 1.0, 0.0
"""Scores of the rules (verl's)."""
BATCH = 16
"""Responses that a reward model reads at once (chosen)."""


# ---- rules


def gsm8k(prompts: Sequence[str], responses: Sequence[str], references: Sequence[str]) -> FloatArray:
    """1 where the number after the last `####` of a response equals the reference's, else 0.

    Numbers are compared by value: `$1,080.00` is 1080. A reference is a whole solution of GSM8K, or its number. Raises
    InputError for a reference without one.
    """
    del prompts
    return _by_number(responses, references, last_number=False)


def gsm8k_last_number(prompts: Sequence[str], responses: Sequence[str], references: Sequence[str]) -> FloatArray:
    """As `gsm8k`, but a response without `####` answers with the last number in it. For models that have not learned
    the format; it also rewards a text that only happens to end in the right number."""
    del prompts
    return _by_number(responses, references, last_number=True)


def exact_match(prompts: Sequence[str], responses: Sequence[str], references: Sequence[str]) -> FloatArray:
    """1 where a response is its reference up to white space, else 0."""
    del prompts
    pairs = zip(responses, references, strict=True)
    return floats([RIGHT if response.split() == reference.split() else WRONG for response, reference in pairs])


RULES: dict[str, Reward] = {"gsm8k": gsm8k, "gsm8k-last-number": gsm8k_last_number, "exact-match": exact_match}
"""Rewards that need nothing but the texts."""


def answer_of(text: str, *, last_number: bool = False) -> Decimal | None:
    """The number that `text` answers with: right after its last `####`; with `last_number`, and where there is no
    `####`, the last of all. None where there is none."""
    _, marker, tail = text.rpartition(ANSWER)
    if marker:
        found = NUMBER.match(tail.lstrip())
        return _value(found.group()) if found else None
    numbers = NUMBER.findall(tail) if last_number else []
    return _value(numbers[-1]) if numbers else None


def _by_number(responses: Sequence[str], references: Sequence[str], *, last_number: bool) -> FloatArray:
    right = []
    for row, (response, reference) in enumerate(zip(responses, references, strict=True)):
        wanted = answer_of(reference if ANSWER in reference else f"{ANSWER} {reference}")
        if wanted is None:
            raise InputError(f"reward gsm8k: reference {row} has no number: {reference[-40:]!r}")
        right.append(RIGHT if answer_of(response, last_number=last_number) == wanted else WRONG)
    return floats(right)


def _value(number: str) -> Decimal:
    return Decimal(number.replace("$", "").replace(",", ""))


# ---- reward models


class RewardModel:
    """A sequence classifier with one output, from a local folder: a response's score is its logit."""

    def __init__(self, folder: Path, device: Device = "cpu", *, batch: int = BATCH) -> None:
        """float32 on CPUs, bfloat16 on GPUs. Raises InputError where the folder holds no such model."""
        if not (folder / "config.json").is_file():
            raise InputError(f"reward model {folder} is not a folder with a Hugging Face model (no config.json)")
        prepare(device)
        require("transformers")
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.folder, self.batch = folder, batch
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                folder,
                local_files_only=True,
                num_labels=1,
                dtype=torch.float32 if device == "cpu" else torch.bfloat16,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"reward model {folder}: {str(error).splitlines()[0]}") from error
        if self._tokenizer.pad_token_id is None:
            raise InputError(f"reward model {folder}: its tokenizer has no padding token")
        # the model's own search for a response's last token: whatever the config says, it is this tokenizer's padding
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.eval().to(device)

    def __call__(self, prompts: Sequence[str], responses: Sequence[str], references: Sequence[str]) -> FloatArray:
        """Score prompt and response together, the longest first. Raises InputError for texts beyond the model's
        context."""
        del references
        import torch

        texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        sizes = np.array([len(ids) for ids in encoded])
        most = getattr(self._model.config, "max_position_embeddings", None)
        if most is not None and sizes.max() > most:
            raise InputError(
                f"reward model {self.folder}: response {sizes.argmax()} and its prompt have {sizes.max()} tokens, the "
                f"model reads {most}"
            )
        scores = np.empty(len(texts))
        order = np.argsort(-sizes, kind="stable")
        with torch.inference_mode():
            for start in range(0, len(texts), self.batch):
                rows = order[start : start + self.batch]
                inputs = self._tokenizer.pad(
                    {"input_ids": [encoded[row] for row in rows]}, padding_side="right", return_tensors="pt"
                ).to(self._model.device)
                scores[rows] = self._model(**inputs).logits[:, 0].float().cpu().numpy()
        return floats(scores)


# ---- by name


def find(name: str, *, device: Device = "cpu") -> Reward:
    """The reward called `name`: one of `RULES`, `module:function`, or the folder of a reward model.

    What it returns is checked: InputError, naming the reward, for a wrong number of scores, and for those that are not
    finite numbers. Raises InputError for a name that is none of the three, a module that cannot be imported, and a
    function that does not take three texts.
    """
    if name in RULES:
        return checked(name, RULES[name])
    if Path(name).is_dir():
        return checked(name, RewardModel(Path(name), device))
    module, colon, function = name.partition(":")
    if colon:
        return checked(name, _function(name, module, function))
    raise InputError(f"reward {name!r}: known are {', '.join(RULES)}, module:function, the folder of a reward model")


def checked(name: str, reward: Callable[..., Any]) -> Reward:
    """`reward` with its answers checked; see `find`."""

    def call(prompts: Sequence[str], responses: Sequence[str], references: Sequence[str]) -> FloatArray:
        given = reward(prompts, responses, references)
        try:
            scores = np.asarray(given, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError(f"reward {name}: returned {type(given).__name__}, not one number per response") from None
        if scores.shape != (len(responses),):
            raise InputError(f"reward {name}: scores of shape {scores.shape}, {len(responses)} responses need as many")
        if not np.isfinite(scores).all():
            row = int(np.flatnonzero(~np.isfinite(scores))[0])
            raise InputError(f"reward {name}: response {row} has the score {scores[row]}, it must be a finite number")
        return floats(scores)

    return call


def _function(name: str, module: str, function: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] | None = getattr(importlib.import_module(module), function, None)
    except Exception as error:  # whatever the user's module raises while it is imported
        told = f"{type(error).__name__}: {error}"
        raise InputError(f"reward {name}: cannot import {module!r} ({told})") from error
    if found is None or not callable(found):
        raise InputError(f"reward {name}: module {module} has no function {function!r}")
    try:
        inspect.signature(found).bind((), (), ())
    except TypeError as error:
        raise InputError(
            f"reward {name}: must take (prompts, responses, references), three lists of texts ({error})"
        ) from None
    return found
