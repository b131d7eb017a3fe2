"""Rewards: GSM8K's own answers and solutions of real models, rules, functions of the user's, a reward model."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import rewards
from backends.rewards import answer_of, checked, exact_match, find, gsm8k, gsm8k_last_number
from rlhfless.errors import InputError

DATA = os.environ.get("RLHFLESS_TEST_DATA")
GSM8K = Path(DATA or "") / "gsm8k"
real_data = pytest.mark.skipif(not (DATA and GSM8K.is_dir()), reason="needs GSM8K in $RLHFLESS_TEST_DATA/gsm8k")
MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
"""Whose solutions the file of example solutions holds."""


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GSM8K / name).read_text().splitlines()]


# ---- real data


@real_data
@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_every_reference_answers_itself(name: str) -> None:
    answers = [row["answer"] for row in lines(name)]
    numbers = [answer.split("####")[1].strip() for answer in answers]
    for rule in (gsm8k, gsm8k_last_number):
        assert rule(answers, answers, answers).all()
        assert rule(answers, answers, numbers).all()
    assert gsm8k_last_number(answers, numbers, answers).all()
    assert not gsm8k(answers, numbers, answers).any()
    wrong = [f"#### {int(number.replace(',', '')) + 1}" for number in numbers]
    assert not gsm8k(answers, wrong, answers).any()


@real_data
@pytest.mark.parametrize("model", MODELS)
def test_solutions_of_real_models_are_judged_as_their_authors_have(model: str) -> None:
    rows = lines("example_model_solutions.jsonl")
    references = {row["question"]: row["answer"] for row in lines("test.jsonl")}
    wanted = [references[row["question"]] for row in rows]
    solutions = [row[model]["solution"] for row in rows]
    right = np.array([row[model]["is_correct"] for row in rows])
    assert 0.1 < right.mean() < 0.9
    marked = [solution.replace("A: ", "#### ") for solution in solutions]  # the file's own mark of an answer
    assert (gsm8k(solutions, marked, wanted) == right).all()
    assert (gsm8k_last_number(solutions, solutions, wanted) == right).all()


# ---- rules


@pytest.mark.parametrize(
    ("text", "strict", "last"),
    [
        ("so #### 42", "42", "42"),
        ("####42.", "42", "42"),
        ("#### $1,080.00", "1080", "1080"),
        ("#### -$5", "-5", "-5"),
        ("#### $-5", "-5", "-5"),
        ("#### +7 apples", "7", "7"),
        ("#### -+7", None, None),
        ("5 - -7", None, "-7"),
        ("#### .5", "0.5", "0.5"),
        ("#### 3 then #### 4\n", "4", "4"),
        ("#### 1/5", None, None),
        ("#### 12 / 60", None, None),
        ("#### 18/hour", "18", "18"),
        ("5 #### none", None, None),
        ("#### ", None, None),
        ("", None, None),
        ("no number", None, None),
        ("6 of them make 12.", None, "12"),
        ("it is 10-4", None, "4"),
        ("it is 10 - 4 = 6.", None, "6"),
        ("the share is 7/14", None, None),
        ("$3,000.50, or so", None, "3000.50"),
    ],
)
def test_answers(text: str, strict: str | None, last: str | None) -> None:
    assert answer_of(text) == (None if strict is None else Decimal(strict))
    assert answer_of(text, last_number=True) == (None if last is None else Decimal(last))


@given(
    value=st.integers(-(10**12), 10**12),
    before=st.text(max_size=20),
    after=st.sampled_from(["", ".", " ", "\n", " dollars", ".\n", ", and so on"]),
    style=st.sampled_from(["{}", "{:,}", "${}", "${:,}", "{}.0", "{:,}.00"]),
)
def test_any_way_to_write_a_number(value: int, before: str, after: str, style: str) -> None:
    text = f"{before}#### {style.format(value)}{after}"
    assert gsm8k([""], [text], [f"#### {value}"])[0] == 1
    assert gsm8k([""], [text], [str(value + 1)])[0] == 0


@given(text=st.text(alphabet="0123456789.,$-+/# x", max_size=60))
def test_any_text_has_an_answer_or_none(text: str) -> None:
    strict, last = answer_of(text), answer_of(text, last_number=True)
    assert strict is None or strict == last
    if not any(character.isdigit() for character in text):
        assert last is None


def test_a_reference_without_a_number_is_named() -> None:
    with pytest.raises(InputError, match="reference 1 has no number: 'about ten'"):
        gsm8k(["", ""], ["#### 1", "#### 1"], ["#### 1", "about ten"])


def test_exact_match() -> None:
    assert exact_match(["", "", ""], [" a  b\n", "ab", "A b"], ["a b"] * 3).tolist() == [1, 0, 0]


def test_lists_of_unequal_length_are_a_bug() -> None:
    for rule in (gsm8k, exact_match):
        with pytest.raises(ValueError, match="zip"):
            rule([""], ["#### 1"], ["1", "2"])


# ---- functions of the user's


BROKEN = {
    "fails.py": "raise RuntimeError('no licence')",
    "lacks.py": "import a_package_that_nobody_has",
}
MINE = """
import math
value = 3
def length(prompts, responses, references):
    return [len(p) + 10 * len(r) + 100 * len(ref) for p, r, ref in zip(prompts, responses, references)]
def two(prompts, responses): return [0.0] * len(responses)
def keyword(prompts, responses, references, *, weight): return [0.0] * len(responses)
def more(prompts, responses, references, weight=2.0, **rest): return [weight] * len(responses)
def one_short(prompts, responses, references): return [0.0] * (len(responses) - 1)
def column(prompts, responses, references): return [[0.0]] * len(responses)
def text(prompts, responses, references): return ["good"] * len(responses)
def nothing(prompts, responses, references): return None
def nan(prompts, responses, references): return [0.0, math.nan]
def infinite(prompts, responses, references): return [0.0, -math.inf]
def bug(prompts, responses, references): return [1 / 0 for _ in responses]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, source in {"mine.py": MINE, **BROKEN}.items():
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "fails", "lacks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.usefixtures("mine")
def test_a_function_of_the_users() -> None:
    found = find("mine:length")(["p", "pp"], ["rrr", ""], ["a", "b"])
    assert found.tolist() == [131, 102]
    assert found.dtype == np.float64
    assert not found.flags.writeable
    assert find("mine:more")(["p"], ["r"], ["a"]).tolist() == [2.0]
    with pytest.raises(ZeroDivisionError):  # a bug of the user's keeps its traceback
        find("mine:bug")(["p"], ["r"], ["a"])


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gsm9k", "known are gsm8k, gsm8k-last-number, exact-match, module:function"),
        ("absent:function", "cannot import 'absent'.*No module named 'absent'"),
        ("fails:function", "cannot import 'fails'.*RuntimeError: no licence"),
        ("lacks:function", "cannot import 'lacks'.*a_package_that_nobody_has"),
        (":function", "cannot import ''"),
        ("mine:", "no function ''"),
        ("mine:absent", "module mine has no function 'absent'"),
        ("mine:value", "module mine has no function 'value'"),
        ("mine:two", r"must take \(prompts, responses, references\)"),
        ("mine:keyword", "must take.*weight"),
        ("mine:one_short", r"scores of shape \(1,\), 2 responses"),
        ("mine:column", r"scores of shape \(2, 1\), 2 responses"),
        ("mine:text", "returned list, not one number per response"),
        ("mine:nothing", r"scores of shape \(\), 2 responses"),
        ("mine:nan", "response 1 has the score nan"),
        ("mine:infinite", "response 1 has the score -inf"),
    ],
)
def test_what_is_wrong_with_a_reward_is_said_in_one_line(name: str, says: str) -> None:
    with pytest.raises(InputError, match=f"^reward '?{name}.*{says}") as told:
        find(name)(["p", "p"], ["r", "r"], ["a", "a"])
    assert "\n" not in str(told.value)


def test_rules_by_name() -> None:
    texts = ["#### 2"], ["#### 2"], ["#### 2"]
    for name, rule in rewards.RULES.items():
        assert find(name)(*texts).tolist() == rule(*texts).tolist() == [1.0]


def test_what_a_reward_returns_is_checked_on_every_call() -> None:
    answers = iter([[1.0], [math.nan]])
    reward = checked("mine", lambda *_: next(answers))
    assert reward(["p"], ["r"], ["a"]).tolist() == [1.0]
    with pytest.raises(InputError, match="reward mine: response 0"):
        reward(["p"], ["r"], ["a"])


# ---- a reward model


REWARD_MODEL = """
from backends.environment import prepare
prepare("cpu")
import sys, pathlib
from backends.tiny import make_tiny
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, classes = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(7)
model = make_tiny(folder / "policy", seed=1, layers=2)
judge = AutoModelForSequenceClassification.from_pretrained(model, num_labels=classes, dtype=torch.float32)
torch.nn.init.normal_(judge.score.weight)
judge.config.pad_token_id = None
judge.save_pretrained(folder / "judge")
AutoTokenizer.from_pretrained(model).save_pretrained(folder / "judge")
"""

SCORES = """
from backends.environment import prepare
prepare("cpu")
import json, pathlib, sys
from backends.rewards import RewardModel, find
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder, texts = sys.argv[1], json.load(sys.stdin)
prompts, responses = texts
nothing = [""] * len(prompts)
found = {str(size): RewardModel(pathlib.Path(folder), batch=size)(prompts, responses, nothing).tolist()
         for size in (1, 3, 16)}
found["named"] = find(folder)(prompts, responses, nothing).tolist()
judge = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
alone = []
for prompt, response in zip(prompts, responses):
    ids = torch.tensor([tokenizer(prompt + response)["input_ids"]])
    with torch.no_grad():
        hidden = judge.model(input_ids=ids).last_hidden_state[0, -1]
        alone.append(float(judge.score(hidden)))
found["alone"] = alone
try:
    RewardModel(pathlib.Path(folder))(["a"], ["b" * 4096], [""])
except Exception as error:
    found["long"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install 'rlhfless[cpu]'"
)


def python(code: str, *arguments: str, asked: Any = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_transformers
def test_a_reward_model_scores_each_response_by_its_last_token(tmp_path: Path) -> None:
    python(REWARD_MODEL, str(tmp_path), "1")
    prompts = ["1 + 1 = ", "What is it?", "1 + 1 = ", "x", "y" * 50]
    responses = ["2", "It is long. " * 20, "3", "", "no"]
    found = json.loads(python(SCORES, str(tmp_path / "judge"), asked=[prompts, responses]))
    alone = found.pop("alone")
    assert "response 0 and its prompt have 4097 tokens, the model reads 4096" in found.pop("long")
    assert len(set(alone)) == len(alone)
    for scores in found.values():
        assert scores == pytest.approx(alone, rel=1e-4, abs=1e-4)


@needs_transformers
def test_a_folder_without_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        find(str(tmp_path))
