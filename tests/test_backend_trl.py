"""TRL's trainer on our engines: what a rollout hands over, what it refuses, and real training through real engines."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends.integrations.trl import Rollouts
from backends.invocation import Weights
from backends.ray_executor import RayExecutor
from rlhfless.errors import InputError
from rlhfless.types.arrays import floats, ints
from rlhfless.types.workload import Workload
from tests import ray_steps

ROOT = Path(__file__).resolve().parent.parent
N = 3


class Engines:
    """In place of a `RayExecutor`: answers with the response's number, and keeps what it was asked."""

    def __init__(self, run_folder: Path, temperature: float = 1.0) -> None:
        self.config = SimpleNamespace(run_folder=run_folder, temperature=temperature, dtype="bfloat16")
        self.results: tuple[Any, ...] = ()
        self.asked: list[Workload] = []
        self.drew_from: list[Weights] = []
        self._weights = Weights(version="0", published=None)

    draw_from = RayExecutor.draw_from

    @property
    def weight_version(self) -> str:
        return self._weights.version

    def snapshot(self) -> str:
        return "free"

    def evaluate(self, plan: Any, workload: Workload) -> Any:
        assert plan == ("free", workload.step)
        self.asked.append(workload)
        self.drew_from.append(self._weights)
        self.results = tuple(
            SimpleNamespace(tokens=ints([number, 7]), logprobs=floats([-number, -0.5]))
            for number in range(workload.responses)
        )
        return f"report {workload.step}"


def plan(workload: Workload, state: Any) -> Any:
    return (state, workload.step)


class Tokenizer:
    """A token a character."""

    def __call__(self, text: Sequence[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(character) for character in each] for each in text]}

    def apply_chat_template(self, conversation: Sequence[Any], **options: Any) -> dict[str, list[list[int]]]:
        assert options.pop("chat_template") == "template"
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "thinking": False}
        return self([f"<{messages[-1]['content']}>" for messages in conversation])


def trainer(**changes: Any) -> Any:
    """As much of a `GRPOTrainer` as a rollout looks at."""
    model = changes.pop("model", None) or SimpleNamespace(training=True, state_dict=dict)
    values = {
        "model": model,
        "accelerator": SimpleNamespace(num_processes=1, unwrap_model=lambda each: each),
        "args": SimpleNamespace(generation_kwargs=None),
        "state": SimpleNamespace(global_step=0, epoch=None),
        "processing_class": Tokenizer(),
        "chat_template": "template",
        "chat_template_kwargs": {"thinking": False},
        "num_generations": N,
        "num_generations_eval": 1,
        "max_completion_length": 20,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "tools": None,
        "environments": None,
    }
    return SimpleNamespace(**(values | changes))


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path)


@pytest.fixture
def rollouts(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Rollouts:
    """Rollouts that leave weights alone."""
    monkeypatch.setattr(Rollouts, "_bring_weights", lambda self, trainer: None)
    return Rollouts(engines, plan)  # type: ignore[arg-type]


def test_a_rollout_is_a_step_in_the_order_of_its_prompts(rollouts: Rollouts, engines: Engines) -> None:
    prompts = ["abc"] * N + ["de"] * N
    found = rollouts(prompts, trainer(state=SimpleNamespace(global_step=4, epoch=2.7)))
    assert found["prompt_ids"] == [[97, 98, 99]] * N + [[100, 101]] * N
    assert found["completion_ids"] == [[number, 7] for number in range(2 * N)]
    assert found["logprobs"] == [[-number, -0.5] for number in range(2 * N)]
    (work,) = engines.asked
    assert [prompt.tolist() for prompt in work.prompts or ()] == [[97, 98, 99], [100, 101]]
    assert (work.step, work.epoch, work.algorithm) == (4, 2, "grpo")
    assert (work.responses_per_prompt, work.max_response_tokens) == (N, 20)
    assert rollouts.report == "report 4"


def test_prompts_are_known_again_and_steps_never_come_twice(rollouts: Rollouts, engines: Engines) -> None:
    told: list[Any] = []
    rollouts.observe = told.append
    steps = [0, 0, 1, 5, 5]
    for at in steps:
        rollouts(["a"] * N + ["b"] * N, trainer(state=SimpleNamespace(global_step=at, epoch=0.1)))
    assert [work.step for work in engines.asked] == [0, 1, 2, 5, 6]
    assert told == [f"report {step}" for step in (0, 1, 2, 5, 6)]
    names = [work.prompt_ids.tolist() for work in engines.asked]
    assert names == names[:1] * len(steps)
    assert len(set(names[0])) == 2


def test_conversations_go_through_the_chat_template(rollouts: Rollouts) -> None:
    found = rollouts([[{"role": "user", "content": "a"}]] * N, trainer())
    assert found["prompt_ids"] == [[60, 97, 62]] * N


def test_evaluation_has_its_own_number_of_responses(rollouts: Rollouts, engines: Engines) -> None:
    rollouts(["a", "b"], trainer(model=SimpleNamespace(training=False, state_dict=dict)))
    assert (engines.asked[0].size, engines.asked[0].responses_per_prompt) == (2, 1)


def test_with_temperature_there_are_no_log_probabilities(rollouts: Rollouts, engines: Engines) -> None:
    engines.config.temperature = 0.7
    assert rollouts(["a"] * N, trainer(temperature=0.7))["logprobs"] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"top_p": 0.9}, "top_p 0.9"),
        ({"top_k": 40, "min_p": 0.1}, "top_k 40, min_p 0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"args": SimpleNamespace(generation_kwargs={"seed": 1})}, "generation_kwargs"),
        ({"temperature": 0.5}, "temperature 0.5, the engines have 1.0"),
        ({"accelerator": SimpleNamespace(num_processes=2)}, "2 processes"),
        ({"tools": [print]}, "tools"),
        ({"environments": [1]}, "tools and environments"),
        ({"processing_class": SimpleNamespace(image_processor=1)}, "images"),
        ({"model": SimpleNamespace(training=True, peft_config={})}, "adapters"),
        ({"num_generations": 2}, "prompts 2 to 3 must be 2 times the same"),
        ({"num_generations": 4}, "prompts 0 to 3 must be 4 times the same"),
    ],
)
def test_what_engines_do_not_do_is_refused(rollouts: Rollouts, engines: Engines, changes: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"^TRL: .*{says}"):
        rollouts(["a"] * N + ["b"] * N, trainer(**changes))
    assert not engines.asked


def test_weights_are_published_once_an_update(engines: Engines) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'rlhfless[cpu]'")
    loading = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install 'rlhfless[cpu]'")
    weight = torch.tensor([[0.1, 0.2]])
    model = SimpleNamespace(training=True, state_dict=lambda: {"a.weight": weight})
    rollouts = Rollouts(engines, plan)  # type: ignore[arg-type]
    held = []
    for step in (0, 0, 1):
        weight += step
        rollouts(["a"] * N, trainer(model=model, state=SimpleNamespace(global_step=step, epoch=0.0)))
        published = engines.drew_from[-1].published
        assert published is not None
        held.append(loading.load_file(published.path / "model.safetensors")["a.weight"])
    versions = [each.version for each in engines.drew_from]
    assert versions[0] == versions[1] != versions[2]
    assert len(list((engines.config.run_folder).glob("*/*"))) == 1  # what nobody draws from any more is gone
    assert {tensor.dtype for tensor in held} == {torch.bfloat16}
    assert torch.equal(held[0], torch.tensor([[0.1, 0.2]]).bfloat16())
    assert torch.equal(held[2], torch.tensor([[1.1, 1.2]]).bfloat16())
    other = Rollouts(engines, plan)  # type: ignore[arg-type]
    weight += 1
    other(["a"] * N, trainer(model=model))
    assert engines.weight_version not in versions


# ---- for real


TRAINING = """
import importlib.util, json, pathlib, sys
from backends.environment import prepare
prepare("cpu")
import torch
from transformers import AutoModelForCausalLM
from backends import grpo
from backends.integrations.trl import Rollouts
from rlhfless.scheduler.planner import Planner
from tests import ray_steps

example, model, folder = map(pathlib.Path, sys.argv[1:4])
spec = importlib.util.spec_from_file_location("example", example)
trl_grpo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trl_grpo)

def logprobs(lm, prompt, response):
    with torch.no_grad():
        logits = lm(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]

# models of their own: TRL rewrites the trainer's forward pass
now, first = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2))
found = []

class Watched(Rollouts):
    def __call__(self, prompts, trainer):
        answer = super().__call__(prompts, trainer)
        now.load_state_dict(trainer.model.state_dict())
        columns = list(zip(answer["prompt_ids"], answer["completion_ids"], answer["logprobs"], strict=True))
        apart = {
            name: max(float((logprobs(lm, p, c) - torch.tensor(l)).abs().max()) for p, c, l in columns)
            for name, lm in (("now", now), ("first", first))
        }
        found.append(apart | {
            "versions": sorted({one.weight_version for one in self.executor.results}),
            "wanted": self.executor.weight_version,
            "texts": trainer.processing_class.batch_decode(answer["prompt_ids"]) == prompts,
            "groups": [c for c in answer["completion_ids"]],
            "actors": len(set(self.report.actor.tolist())),
        })
        return answer

planner = Planner("rlhfless", ray_steps.profile(), ray_steps.CLUSTER, learner_gpus=1, min_actors=2, max_actors=2)
with ray_steps.executor(model, folder / "weights") as executor:
    rollouts = Watched(executor, planner.plan, planner.observe)
    trainer = trl_grpo.trainer_of(str(model), folder, rollouts, 2)
    trainer.train()
    pids = executor.pids()
grpo.STD_EPS = 1e-4  # TRL's
rewards = torch.tensor(list(trainer._logs["rewards"]["digits"]))
told = {
    "rollouts": found,
    "rewards": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
    "last_rewards": rewards.tolist(),
    "advantages": list(trainer._logs["advantages"]),
    "ours": grpo.group_advantages(rewards, trl_grpo.RESPONSES).tolist(),
    "longest": trl_grpo.LONGEST,
    "size": trl_grpo.PROMPTS * trl_grpo.RESPONSES,
}
pathlib.Path(folder / "told.json").write_text(json.dumps(told))
"""

needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL: pip install 'trl>=1.16,<2'")


@pytest.mark.slow
@ray_steps.real
@needs_trl
def test_trl_trains_on_responses_of_its_current_weights(tiny_model: Path, tmp_path: Path) -> None:
    arguments = [str(ROOT / "examples" / "trl_grpo.py"), str(tiny_model), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads((tmp_path / "told.json").read_text())
    first, second = told["rollouts"]
    assert first["wanted"] != second["wanted"]
    for rollout in (first, second):
        assert rollout["versions"] == [rollout["wanted"]]
        assert rollout["texts"]
        assert rollout["actors"] == 2
        assert len(rollout["groups"]) == told["size"]
        assert max(map(len, rollout["groups"])) <= told["longest"]
        assert len(set(map(tuple, rollout["groups"]))) > told["size"] // 2  # samples, not one text over and over
        assert rollout["now"] < 1e-3
    assert second["first"] > 0.1  # the update has changed what the engines say
    assert np.std(told["last_rewards"]) > 0
    assert told["ours"] == pytest.approx(told["advantages"], abs=1e-5)
