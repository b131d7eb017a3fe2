"""One rank of the learner: the policy, for PPO a critic, a frozen reference; log-probabilities, values and updates.

With one rank the models are plain; with more they are sharded (FSDP2), and every rank calls every method with the same
arguments. Ranks share the responses of a batch by tokens. A gradient does not depend on how a batch was split, but for
rounding: each micro-batch is weighted by the `Items` of the whole (see `backends.losses`).

Weights and optimizer are float32; on GPUs, forward and backward passes are bfloat16. Models run without dropout, and
minibatches are drawn from a stream named by seed and step, so these two are the whole state of chance.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from backends import grpo, ppo
from backends.environment import prepare, require
from backends.grpo import GrpoOptions
from backends.learner_batch import Batch, Rows, micro_batches, shares
from backends.learner_types import Experience, LearnerConfig, LearnerError, minibatches
from backends.losses import Items, policy_loss
from backends.ppo import PpoOptions
from backends.rewards import RewardModel
from backends.weight_sync import Published, publish
from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, IntArray, floats

BETAS = (0.9, 0.95)
"""Adam's, as usual for language models (Brown et al. 2020, appendix B)."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Trained:
    """A model with its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer
    learning_rate: float


class Learner:
    """One rank. Methods that answer with tensors answer for the rank's own share of the batch, 0 elsewhere: the sum
    over ranks is the whole."""

    def __init__(self, config: LearnerConfig, rank: int = 0, ranks: int = 1, address: str = "") -> None:
        """`address`: of rank 0, as torch.distributed has it (tcp://host:port or file:///path); needed by several ranks.

        Raises InputError where transformers or the model are missing.
        """
        prepare(config.device)
        require("transformers")
        self.config, self.rank, self.ranks = config, rank, ranks
        self.updates = 0
        self._reward_model: RewardModel | None = None
        self._device = torch.device(config.device)
        self._mesh: Any = None
        if ranks > 1:
            from torch.distributed import init_process_group
            from torch.distributed.device_mesh import init_device_mesh

            backend = "nccl" if config.device == "cuda" else "gloo"
            init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
            self._mesh = init_device_mesh(config.device, (ranks,))
        self._policy = self._trained("CausalLM", config.learning_rate)
        self._critic: _Trained | None = None
        if config.algorithm == "ppo":
            self._critic = self._trained("TokenClassification", config.critic_learning_rate)
        self._reference = self._load("CausalLM", train=False) if config.has_reference else None

    # ---- forward passes

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """float32[responses, tokens]: of the policy as it is."""
        return self._forward(batch, lambda rows: self._logprobs(self._policy.model, rows)[0])

    def reference(self, batch: Batch) -> torch.Tensor:
        """float32[responses, tokens]: log-probabilities of the reference."""
        assert self._reference is not None
        return self._forward(batch, lambda rows: self._logprobs(self._reference, rows)[0])

    def critic(self, batch: Batch) -> torch.Tensor:
        """float32[responses, tokens]: the critic's value before each token."""
        assert self._critic is not None
        return self._forward(batch, self._values)

    def score(self, model: Path, prompts: Sequence[str], responses: Sequence[str]) -> FloatArray:
        """float[responses]: what the reward model in a folder says of this rank's share, 0 elsewhere.

        It is loaded when first asked for, and stays on the rank's device. Raises what `RewardModel` raises.
        """
        if self._reward_model is None:
            self._reward_model = RewardModel(model, self.config.device)
        found, own = np.zeros(len(responses)), slice(self.rank, None, self.ranks)
        if len(responses) > self.rank:
            found[own] = self._reward_model(prompts[own], responses[own], responses[own])
        return floats(found)

    # ---- learning

    def update(self, experience: Experience) -> dict[str, float]:
        """`epochs` passes over the responses in `minibatches` updates each; metrics are means over the updates.

        Raises InputError where the responses cannot be divided so, LearnerError for a gradient that is not finite.
        """
        config, total = self.config, dict[str, float]()
        parts = minibatches(len(experience.batch), config, experience.step)
        for part in parts:
            for name, value in self._update(experience, part).items():
                total[name] = total.get(name, 0.0) + value / len(parts)
        return total

    def gradients(self, experience: Experience, rows: Sequence[int]) -> dict[str, float]:
        """Add the gradient of the loss over `rows` to the models' `grad`; metrics of this rank's share of them."""
        batch, chosen = experience.batch, sorted(rows)
        items = Items.of(batch.mask[chosen])
        sizes, metrics = batch.sizes, dict[str, float]()
        budget = self.config.tokens_per_microbatch
        split = [micro_batches([chosen[at] for at in share], sizes, budget) for share in self._shares(sizes[chosen])]
        # sharded models gather in every pass, so every rank has as many
        for number in range(max(map(len, split))):
            own = split[self.rank]
            rows_of = own[number] if number < len(own) else []
            for name, value in self._backward(experience, rows_of, items).items():
                metrics[name] = metrics.get(name, 0.0) + value
        return metrics

    # ---- weights

    def publish(self, folder: Path, version: str, dtype: str) -> Published | None:
        """Publish the policy's weights as `dtype`; None on all ranks but the first."""
        state = self._whole(self._policy.model)
        if self.rank:
            return None
        kind = getattr(torch, dtype)
        return publish({name: tensor.to(kind) for name, tensor in state.items()}, folder, version)

    def save(self, path: Path) -> None:
        """Weights and optimizers, whole, in one file that any number of ranks can load; written by the first."""
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        content: dict[str, Any] = {"updates": self.updates}
        for name, each in self._models():
            content[name] = self._whole(each.model)
            content[f"{name}.optimizer"] = get_optimizer_state_dict(each.model, each.optimizer, options=_whole())
        if self.rank == 0:
            torch.save(content, path)

    def load(self, path: Path) -> None:
        """What `save` has written. Raises InputError for a file of other models."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        try:
            # mapped, not read: the ranks of a host share its pages
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            for name, each in self._models():
                set_model_state_dict(each.model, content[name], options=_whole())
                set_optimizer_state_dict(each.model, each.optimizer, content[f"{name}.optimizer"], options=_whole())
        except (OSError, EOFError, KeyError, RuntimeError, ValueError, UnpicklingError) as error:
            raise InputError(f"{path}: no state of this learner ({str(error).splitlines()[0]})") from error
        self.updates = int(content["updates"])

    def move(self, device: str) -> None:
        """Bring everything to `device`: to "cpu" while engines have the GPUs, and back. Nothing happens on CPUs."""
        if self.config.device == "cpu":
            return
        self._device = torch.device(device)
        for _, each in self._models():
            each.model.to(device)
            for state in each.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim():
                        state[name] = value.to(device)
        if self._reference is not None:
            self._reference.to(device)
        torch.cuda.empty_cache()

    def threads(self, count: int) -> None:
        """Cores to compute on, where the device is the CPU."""
        if self.config.device == "cpu":
            torch.set_num_threads(count)

    def close(self) -> None:
        """Leave the group of ranks."""
        if self.ranks > 1:
            torch.distributed.destroy_process_group()

    # ---- inside

    def _models(self) -> Iterator[tuple[str, _Trained]]:
        yield "policy", self._policy
        if self._critic is not None:
            yield "critic", self._critic

    def _load(self, kind: str, *, train: bool) -> Any:
        import transformers

        options = {"num_labels": 1} if kind == "TokenClassification" else {}
        loader = getattr(transformers, f"AutoModelFor{kind}")
        transformers.logging.disable_progress_bar()
        level = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # a critic's head is new, which is no news
        try:
            model = loader.from_pretrained(self.config.model, local_files_only=True, dtype=torch.float32, **options)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"learner: {self.config.model}: {str(error).splitlines()[0]}") from error
        finally:
            transformers.logging.set_verbosity(level)
        if options:  # values start at 0, whatever the process has drawn before
            for parameter in model.score.parameters():
                torch.nn.init.zeros_(parameter)
        model.eval().requires_grad_(train)  # dropout stays off in training too
        if train and self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        if self._mesh is not None:
            self._shard(model)
        return model.to(self._device)

    def _shard(self, model: Any) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        how: dict[str, Any] = {"mesh": self._mesh}
        if self.config.device == "cuda":
            how["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in layers:
                fully_shard(module, **how)
        fully_shard(model, **how)

    def _trained(self, kind: str, learning_rate: float) -> _Trained:
        model = self._load(kind, train=True)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=BETAS, weight_decay=self.config.weight_decay
        )
        return _Trained(model=model, optimizer=optimizer, learning_rate=learning_rate)

    def _compute(self) -> AbstractContextManager[Any]:
        if self.config.device == "cpu" or self._mesh is not None:  # sharded models bring their own precision
            return nullcontext()
        precision: AbstractContextManager[Any] = torch.autocast(self._device.type, dtype=torch.bfloat16)
        return precision

    def _logprobs(self, model: Any, rows: Rows, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self._compute():
            logits = model(input_ids=rows.ids, use_cache=False, logits_to_keep=rows.kept).logits[:, :-1]
        logits = logits.float()
        total = logits.logsumexp(-1)
        chosen = logits.gather(-1, rows.ids[:, rows.start + 1 :].unsqueeze(-1)).squeeze(-1)
        spread = None
        if entropy:
            spread = rows.take(total - (logits.softmax(-1) * logits).sum(-1))
        return rows.take(chosen - total), spread

    def _values(self, rows: Rows) -> torch.Tensor:
        assert self._critic is not None
        with self._compute():
            values = self._critic.model(input_ids=rows.ids, use_cache=False).logits
        return rows.take(values[:, rows.start : -1, 0].float())

    def _shares(self, sizes: IntArray) -> list[list[int]]:
        return shares(sizes, self.ranks)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _forward(self, batch: Batch, work: Callable[[Rows], torch.Tensor]) -> torch.Tensor:
        sizes, tokens = batch.sizes, max(map(len, batch.responses))
        split = [micro_batches(share, sizes, self.config.tokens_per_microbatch) for share in self._shares(sizes)]
        found = torch.zeros(len(batch), tokens)
        for number in range(max(map(len, split))):
            own = split[self.rank]
            chosen = own[number] if number < len(own) else []
            rows = Rows.of(batch, chosen or [0], tokens, self._device)
            result = work(rows)
            if chosen:
                found[chosen] = result.masked_fill(~rows.mask, 0).cpu()
        return found

    def _update(self, experience: Experience, part: Sequence[int]) -> dict[str, float]:
        metrics = self.gradients(experience, part)
        self.updates += 1
        share = min(1.0, self.updates / self.config.warmup_steps) if self.config.warmup_steps else 1.0
        for name, each in self._models():
            norm = torch.nn.utils.clip_grad_norm_(each.model.parameters(), self.config.max_grad_norm)
            size = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
            if not size < float("inf"):
                raise LearnerError(f"learner: the gradient of the {name} is {size} in step {experience.step}")
            for group in each.optimizer.param_groups:
                group["lr"] = each.learning_rate * share
            each.optimizer.step()
            each.optimizer.zero_grad(set_to_none=True)
            metrics[f"{name}_grad_norm"] = size / self.ranks  # of the sum over ranks of what they report
        return metrics

    def _backward(self, experience: Experience, chosen: Sequence[int], items: Items) -> dict[str, float]:
        """One micro-batch; without rows, a pass that changes nothing."""
        batch, options = experience.batch, self.config.options
        tokens = experience.old_logprobs.shape[1]
        rows = Rows.of(batch, chosen or [0], tokens, self._device)
        mask = rows.mask if chosen else torch.zeros_like(rows.mask)

        def part(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values[list(chosen or [0])].to(self._device)

        logprobs, entropy = self._logprobs(self._policy.model, rows, entropy=options.entropy_coefficient > 0)
        old, advantages, engine = map(
            part, (experience.old_logprobs, experience.advantages, experience.engine_logprobs)
        )
        if isinstance(options, GrpoOptions):
            loss, metrics = grpo.loss(
                logprobs, old, advantages, mask, options, reference_logprobs=part(experience.reference_logprobs),
                engine_logprobs=engine, entropy=entropy, over=items,
            )  # fmt: skip
        else:
            loss, metrics = policy_loss(
                logprobs, old, advantages, mask, options, engine_logprobs=engine, entropy=entropy, over=items
            )
        (loss * self.ranks).backward()  # sharded gradients are means over ranks
        if isinstance(options, PpoOptions):
            values, returns = part(experience.old_values), part(experience.returns)
            loss, more = ppo.value_loss(self._values(rows), values, returns, mask, options, over=items)
            (loss * self.ranks).backward()
            metrics |= more
        return {name: float(value) for name, value in metrics.items()}

    def _whole(self, model: Any) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state: dict[str, torch.Tensor] = get_model_state_dict(model, options=_whole())
        return state


def _whole() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)
