"""Parts of a training run that a configuration names: learner, reward, prompts with answers, a checkpoint's needs."""

from pathlib import Path
from typing import Any

from backends.checkpoint import Checkpoint
from experiments import tasks
from experiments.config import Config, LearnerConfig, TrainConfig
from experiments.tasks import Task
from rlhfless.errors import InputError
from rlhfless.scheduler.learned import Learned
from rlhfless.scheduler.lengths import HistoryEstimator, LengthHistory
from rlhfless.scheduler.planner import Planner
from traces.importers.tokenizers import Tokenizer


def options_of(config: Config) -> Any:
    """The algorithm's options. Raises InputError for what it does not have, and for values that cannot be."""
    from backends.training import options

    asked, algorithm = config.learner, config.workload.algorithm
    assert asked is not None
    return options(algorithm, asked.grpo if algorithm == "grpo" else asked.ppo)


def learner_of(config: Config, model: str) -> Any:
    """The learner's configuration."""
    from backends.learner_types import LearnerConfig

    asked = config.learner
    assert asked is not None
    return LearnerConfig(
        model=model,
        options=options_of(config),
        device=config.engine.device,
        learning_rate=asked.learning_rate,
        critic_learning_rate=asked.critic_learning_rate or asked.learning_rate,
        weight_decay=asked.weight_decay,
        warmup_steps=asked.warmup_steps,
        max_grad_norm=asked.max_grad_norm,
        minibatches=asked.minibatches,
        epochs=asked.epochs,
        tokens_per_microbatch=asked.tokens_per_microbatch,
        gradient_checkpointing=asked.gradient_checkpointing,
        seed=config.seed,
    )


def reward_of(config: Config) -> Any:
    """The reward, or the folder of its model. Raises InputError where there is none of that name."""
    from backends.rewards import find

    assert config.learner is not None
    if (folder := Path(config.learner.reward)).is_dir():
        return folder
    try:
        return find(config.learner.reward)
    except InputError as error:
        raise InputError(f"learner.reward: {error}") from None


def about(config: Config) -> dict[str, Any]:
    """What a checkpoint's run and one that goes on from it must have in common, by the keys of the file."""
    workload, learner = config.workload, config.learner
    assert learner is not None
    return {
        "seed": config.seed,
        "prompts_per_step": workload.prompts_per_step,
        "responses_per_prompt": workload.responses_per_prompt,
        "steps_per_epoch": workload.steps_per_epoch,
        "reward": learner.reward,
    }


LENGTHS, LEARNED = "lengths.json", "planner.json"
"""Of a checkpoint: the length history, and what else the planner has learned."""


def memory(planner: Planner) -> dict[str, str]:
    """Files of a checkpoint that a planner needs to go on."""
    texts = {LEARNED: planner.learned.to_json()}
    if isinstance(planner.estimator, HistoryEstimator):
        texts[LENGTHS] = planner.estimator.history.to_json()
    return texts


def remember(planner: Planner, found: Checkpoint) -> None:
    """Let a planner go on from a checkpoint. Raises SchemaError or InputError for one that it cannot go on from."""
    planner.relearn(Learned.from_json(found.text(LEARNED), str(found.folder / LEARNED)))
    if isinstance(planner.estimator, HistoryEstimator):
        where = str(found.folder / LENGTHS)
        planner.estimator = HistoryEstimator(LengthHistory.from_json(found.text(LENGTHS), where))


def parts(config: Config) -> tuple[LearnerConfig, TrainConfig]:
    """The sections that training needs. Raises InputError for one that is missing, and for what cannot be trained."""
    for name in ("learner", "train"):
        if getattr(config, name) is None:
            raise InputError(f"{name} is missing: experiments.train needs [learner] and [train]")
    if config.workload.temperature != 1:
        raise InputError(
            f"workload.temperature: {config.workload.temperature:g}; learning needs 1, at which the engines' "
            "log-probabilities are those of the policy that draws"
        )
    assert config.learner is not None
    assert config.train is not None
    return config.learner, config.train


def tasks_of(config: Config, path: Path | None, tokenizer: Tokenizer) -> tuple[Task, Task]:
    """What is trained on, an epoch of it, and what is held out."""
    asked, train = config.workload, config.train
    assert train is not None
    count, most = asked.prompts_per_step * asked.steps_per_epoch, asked.max_prompt_tokens
    source = path if path is not None else None if asked.prompts is None else Path(asked.prompts)
    if source is None:
        task = tasks.sums(count, config.seed, tokenizer)
        held_out = tasks.sums(train.held_out_prompts, config.seed, tokenizer, held_out=True)
        return (
            tasks.fitting(task, most, count, "an epoch"),
            tasks.fitting(held_out, most, train.held_out_prompts, "train.held_out_prompts"),
        )
    both = count + train.held_out_prompts
    found = tasks.fitting(tasks.questions(source, asked.instruction, tokenizer), most, both, "epoch and held-out set")
    return tasks.part(found, list(range(count))), tasks.part(found, list(range(count, both)))
