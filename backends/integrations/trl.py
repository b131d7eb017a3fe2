"""TRL's `GRPOTrainer` with its responses from planned vLLM actors: a `rollout_func` (TRL 1.16).

    planner = Planner("rlhfless", profile, cluster)
    with RayExecutor(cluster, config) as executor:
        rollouts = Rollouts(executor, planner.plan, planner.observe)
        GRPOTrainer(model, reward_funcs, args, dataset, rollout_func=rollouts).train()

Before each rollout the trainer's weights are published, and every engine loads them before it draws a token. Rewards,
reference and update stay with TRL. The trainer decides what is asked for (prompts, responses of each, longest
response); temperature and engines are the executor's.
"""

import hashlib
from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any

import numpy as np

from backends.ray_executor import RayExecutor
from backends.weight_sync import publish
from rlhfless.errors import InputError
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import ClusterState
from rlhfless.types.plan import Plan
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload

PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""What TRL's sampling options must be: engines draw from the softmax itself. All are TRL's defaults."""


class Rollouts:
    """A `rollout_func`: `GRPOTrainer` calls it with prompts and itself, and trains on what it returns."""

    def __init__(
        self,
        executor: RayExecutor,
        plan: Callable[[Workload, ClusterState], Plan],
        observe: Callable[[StepReport], object] | None = None,
    ) -> None:
        """`plan` and `observe` are a planner's. `executor` stays the caller's, who closes it."""
        self.executor, self.plan, self.observe = executor, plan, observe
        self.report: StepReport | None = None
        """What the last rollout was like; it ends with generation."""
        self._name = f"trl-{token_hex(4)}"  # another trainer on the same engines has weights of other names
        self._step = -1

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Responses under the trainer's weights, in the order of `prompts`: a dict with prompt_ids and completion_ids,
        lists of token ids, and logprobs, those of each response (None unless the temperature is 1: TRL's are of the
        softmax with temperature, an engine's of the one without).

        `prompts`: each as often as it is to be answered, one after the other, as TRL's sampler gives them. Raises
        InputError for a trainer that asks for what engines here do not do, and what planning and executing raise.
        """
        _require_supported(trainer, self.executor.config.temperature)
        n = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        ids = _token_ids(prompts, trainer)
        self._bring_weights(trainer)
        # seeds of responses follow from the step, so one that goes on from a checkpoint must not begin again
        self._step = max(self._step + 1, trainer.state.global_step)
        workload = _workload(ids, n, self._step, int(trainer.state.epoch or 0), trainer.max_completion_length)
        self.report = self.executor.evaluate(self.plan(workload, self.executor.snapshot()), workload)
        if self.observe is not None:
            self.observe(self.report)
        results = self.executor.results
        same_softmax = self.executor.config.temperature == 1
        return {
            "prompt_ids": ids,
            "completion_ids": [result.tokens.tolist() for result in results],
            "logprobs": [result.logprobs.tolist() for result in results] if same_softmax else None,
        }

    def _bring_weights(self, trainer: Any) -> None:
        """Let the next rollout draw from the trainer's weights; nothing happens where it has made no update since."""
        version = f"{self._name}-{trainer.state.global_step}"
        if self.executor.weight_version == version:
            return
        import torch

        config = self.executor.config
        dtype = getattr(torch, config.dtype)
        state = trainer.accelerator.unwrap_model(trainer.model).state_dict()
        weights = {name: tensor.to(dtype) for name, tensor in state.items()}
        self.executor.draw_from(publish(weights, config.run_folder / self._name, version))


def _require_supported(trainer: Any, temperature: float) -> None:
    wrong = {name: value for name, wanted in PLAIN.items() if (value := getattr(trainer, name)) != wanted}
    if wrong or trainer.args.generation_kwargs:
        told = ", ".join(f"{name} {value!r}" for name, value in wrong.items()) or "generation_kwargs"
        raise InputError(f"TRL: {told}: engines draw from the whole softmax; leave sampling options as they are")
    if trainer.temperature != temperature:
        raise InputError(f"TRL: temperature {trainer.temperature}, the engines have {temperature}; give both the same")
    if trainer.accelerator.num_processes != 1:
        raise InputError(f"TRL: {trainer.accelerator.num_processes} processes; rollouts are for a trainer of one")
    if trainer.tools or trainer.environments:
        raise InputError("TRL: tools and environments generate in turns; rollouts answer a prompt once")
    if hasattr(trainer.processing_class, "image_processor"):
        raise InputError("TRL: a model that reads images; rollouts are for text")
    if hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config"):
        raise InputError("TRL: a model with adapters; rollouts need the weights of the engines' model, merge them")


def _token_ids(prompts: Sequence[Any], trainer: Any) -> list[list[int]]:
    """As TRL itself makes them: texts by the tokenizer, conversations by the chat template."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        encoded: dict[str, list[list[int]]] = tokenizer(text=list(prompts))
    else:
        encoded = tokenizer.apply_chat_template(
            conversation=list(prompts),
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **trainer.chat_template_kwargs,
        )
    return encoded["input_ids"]


def _workload(ids: Sequence[Sequence[int]], n: int, step: int, epoch: int, max_response_tokens: int) -> Workload:
    """The rollout as a step; a prompt's name is a digest of its tokens, by which it is known in the next epoch."""
    groups = [ids[start : start + n] for start in range(0, len(ids), n)]
    odd = [number for number, group in enumerate(groups) if len(group) < n or any(each != group[0] for each in group)]
    if odd:
        raise InputError(f"TRL: prompts {n * odd[0]} to {n * odd[0] + n - 1} must be {n} times the same")
    prompts = tuple(ints(group[0]) for group in groups)
    return Workload(
        step=step,
        epoch=epoch,
        algorithm="grpo",
        prompt_ids=np.array([hashlib.blake2b(prompt.tobytes(), digest_size=8).hexdigest() for prompt in prompts]),
        prompt_tokens=ints([len(prompt) for prompt in prompts]),
        responses_per_prompt=n,
        max_response_tokens=max_response_tokens,
        prompts=prompts,
    )
