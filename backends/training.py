"""Training as the executor sees it: preparation functions by name, learning, weights to publish, checkpoints.

The driver's side of the learner: texts, rewards, advantages. What computes with models is `backends.learner`, behind
`backends.learner_ranks`. What a preparation function finds of a step is kept here until the step has been learned from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from backends.grpo import GrpoOptions, group_advantages
from backends.learner_batch import Batch
from backends.learner_ranks import LocalRank, Ranks
from backends.learner_types import Experience, LearnerConfig
from backends.losses import Mismatch, mismatch
from backends.ppo import PpoOptions, experience
from backends.rewards import Reward, checked
from backends.trainer import Generated
from backends.weight_sync import Published
from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, floats, ints
from rlhfless.types.workload import Algorithm, Workload

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a step has taught."""

    metrics: dict[str, float]
    """Named means over the step's updates, and over its tokens before them."""
    mismatch: Mismatch
    """Between engines and learner."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """Findings of the preparation functions."""

    scores: FloatArray | None = None
    reference: torch.Tensor | None = None
    values: torch.Tensor | None = None


class Training:
    """Learns from step after step. `version` names the weights that it has: the number of steps learned from."""

    def __init__(
        self,
        config: LearnerConfig,
        reward: Reward | Path,
        references: Mapping[Any, str],
        decode: Decode | None = None,
        *,
        ranks: Ranks | None = None,
        dtype: str = "float32",
        old_logprobs: Literal["learner", "engine"] = "learner",
    ) -> None:
        """`reward`: a function, or the folder of a reward model, which then runs on the learner's ranks; `references`:
        reference answer of each prompt by its id; `decode`: by default that of the model's tokenizer;
        `ranks`: by default one, in this process; `dtype`: of the engines' weights; `old_logprobs`: whose stand for the
        policy that has drawn the responses.

        Raises InputError where several ranks are needed and none are given, and what `Learner` raises.
        """
        if old_logprobs not in ("learner", "engine"):
            raise InputError(f"old_logprobs {old_logprobs!r}: known are learner, engine")
        if ranks is None and config.device != "cpu":
            raise InputError("learner: on GPUs its ranks run in Ray actors; give them")
        self.config, self.references = config, references
        self.decode = decode or _decoder(config.model)
        self.dtype, self.old_logprobs = dtype, old_logprobs
        self.steps = 0
        self._ranks: Ranks = ranks or LocalRank(config)
        self.reward = checked(str(reward), partial(self._modelled, reward)) if isinstance(reward, Path) else reward
        self._step = _Step()

    @property
    def version(self) -> str:
        """Name of the weights."""
        return str(self.steps)

    @property
    def functions(self) -> tuple[str, ...]:
        """Preparation functions that there are, by their names in plans."""
        return ("reward", *self.config.functions)

    # ---- a step

    def score(self, workload: Workload, responses: Sequence[Generated]) -> FloatArray:
        """float[responses]: their rewards. Raises InputError for a prompt without a reference, and what the reward
        raises."""
        assert workload.prompts is not None
        ids, n = workload.prompt_ids.tolist(), workload.responses_per_prompt
        if unknown := [name for name in ids if name not in self.references]:
            raise InputError(f"step {workload.step}: prompt {unknown[0]!r} has no reference answer")
        prompts = [self.decode(prompt.tolist()) for prompt in workload.prompts]
        return self.reward(
            [text for text in prompts for _ in range(n)],
            [self.decode(response.tokens.tolist()) for response in responses],
            [self.references[name] for name in ids for _ in range(n)],
        )

    def prepare(
        self, function: str, cores: int, workload: Workload, responses: Sequence[Generated]
    ) -> FloatArray | None:
        """Carry out a preparation function on `cores` cores (CPUs alone); the scores, where it is the reward."""
        self._ranks.call("threads", cores)
        if function == "reward":
            self._step.scores = self.score(workload, responses)
            return self._step.scores
        found = self._sum(function, _batch(workload, responses))
        if function == "reference":
            self._step.reference = found
        else:
            self._step.values = found
        return None

    def learn(self, cores: int, workload: Workload, responses: Sequence[Generated]) -> Learned:
        """Update the models with a step of which every preparation function has been carried out."""
        self._ranks.call("threads", cores)
        told, metrics, apart = self.experience(workload, responses)
        for each in self._ranks.call("update", told):
            for name, value in each.items():
                metrics[name] = metrics.get(name, 0.0) + value
        self.steps += 1
        return Learned(metrics=metrics, mismatch=apart)

    def experience(
        self, workload: Workload, responses: Sequence[Generated]
    ) -> tuple[Experience, dict[str, float], Mismatch]:
        """What a step's responses and the findings of its preparation functions teach, which are then forgotten."""
        step, self._step = self._step, _Step()
        assert step.scores is not None, "not rewarded"
        batch, options = _batch(workload, responses), self.config.options
        mask, scores = batch.mask, torch.tensor(step.scores, dtype=torch.float32)
        engine, own = batch.padded([response.logprobs for response in responses]), self._sum("logprobs", batch)
        old, corrects = (engine, False) if self.old_logprobs == "engine" else (own, options.tis_cap is not None)
        found: dict[str, Any] = {"reference_logprobs": step.reference}
        metrics: dict[str, float] = {}
        if isinstance(options, GrpoOptions):
            found["advantages"] = group_advantages(scores, batch.group, scale_by_std=options.scale_by_std)
        else:
            assert step.values is not None, "not valued"
            advantages, returns, told = experience(
                scores, old, step.values, mask, options, reference_logprobs=step.reference
            )
            metrics = {name: float(value) for name, value in told.items()}
            found = {"advantages": advantages, "returns": returns, "old_values": step.values}
        made = Experience(
            batch=batch,
            step=workload.step,
            old_logprobs=old,
            engine_logprobs=engine if corrects else None,
            **found,
        )
        return made, metrics, mismatch(own, engine, mask)

    def publish(self, folder: Path) -> Published:
        """Put the weights where engines find them, under `version`."""
        published: Published = self._ranks.call("publish", folder, self.version, self.dtype)[0]
        return published

    # ---- around steps

    def rest(self) -> None:
        """Leave the GPUs to the engines."""
        self._ranks.call("move", "cpu")

    def wake(self) -> None:
        """Take the GPUs back."""
        self._ranks.call("move", self.config.device)

    def save(self, path: Path) -> None:
        """Weights and optimizers in one file; the ranks rest afterwards."""
        self.wake()  # sharded tensors are gathered from where they compute
        self._ranks.call("save", path)
        self.rest()

    def load(self, path: Path, steps: int) -> None:
        """What `save` has written after `steps` steps. Raises InputError for a file of other models."""
        self._ranks.call("load", path)
        self.steps = steps

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    # ---- inside

    def _modelled(
        self, folder: Path, prompts: Sequence[str], responses: Sequence[str], references: Sequence[str]
    ) -> FloatArray:
        del references
        return floats(sum(self._ranks.call("score", folder, prompts, responses)))

    def _sum(self, method: str, batch: Batch) -> torch.Tensor:
        """Each rank knows of its own responses, 0 of the others."""
        return torch.stack(self._ranks.call(method, batch)).sum(0)


def options(algorithm: Algorithm, numbers: Mapping[str, Any]) -> GrpoOptions | PpoOptions:
    """An algorithm's options from the `numbers` of a table, in which `tis_cap = "none"` stands for none.

    Raises InputError for a number that the algorithm does not have, and for values that cannot be.
    """
    kind: type[Any] = GrpoOptions if algorithm == "grpo" else PpoOptions
    known = {each.name: each for each in fields(kind)}
    chosen = {name: None if (name, value) == ("tis_cap", "none") else value for name, value in numbers.items()}
    for name, value in chosen.items():
        if name not in known:
            raise InputError(f"learner.{algorithm}.{name}: unknown; known are {', '.join(known)}")
        wanted = type(known[name].default)
        if value is not None and type(value) is not wanted and not (wanted is float and type(value) is int):
            raise InputError(f"learner.{algorithm}.{name}: {value!r} must be of type {wanted.__name__}")
    try:
        made: GrpoOptions | PpoOptions = kind(**chosen)
    except InputError as error:
        raise InputError(f"learner.{algorithm}: {error}") from None
    return made


def _decoder(model: str) -> Decode:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _batch(workload: Workload, responses: Sequence[Generated]) -> Batch:
    assert workload.prompts is not None
    n = workload.responses_per_prompt
    return Batch(
        prompts=tuple(prompt for prompt in workload.prompts for _ in range(n)),
        responses=tuple(ints(response.tokens) for response in responses),
        group=n,
    )
