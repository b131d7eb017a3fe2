"""GRPO by TRL, rollouts by planned vLLM actors: `python examples/trl_grpo.py`, on two cores and without a download.

The model is the project's tiny random one, and what it learns is to answer with digits. Needs TRL 1.16:
pip install -e '.[cpu]' 'trl>=1.16,<2'.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from backends.environment import require
from backends.integrations.trl import Rollouts
from experiments.config import load
from experiments.output import out_folder, print_table
from experiments.real import open_bench
from rlhfless.commands import run
from rlhfless.types.report import StepReport

PROMPTS, RESPONSES, LONGEST = 4, 4, 32
"""Prompts of a step, responses of each, tokens of a response at most."""
LEARNING_RATE = 1e-3
"""Large, as a model of 2.4 million parameters can take it (chosen)."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def digits(completions: list[str], **_: Any) -> list[float]:
    """Reward: the share of digits in a response."""
    return [sum(map(str.isdigit, text)) / LONGEST for text in completions]


def trainer_of(model: str, folder: Path, rollouts: Rollouts, steps: int) -> Any:
    """TRL's trainer as its documentation has it, but for `rollout_func`."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns that rollout_func is experimental
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=PROMPTS * RESPONSES,
        num_generations=RESPONSES,
        max_completion_length=LONGEST,
        learning_rate=LEARNING_RATE,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        disable_tqdm=True,
    )
    dataset = Dataset.from_dict(
        {"prompt": [f"Write a number below {10 ** (1 + number % 6)}: " for number in range(12)]}
    )
    return GRPOTrainer(model=model, reward_funcs=digits, args=args, train_dataset=dataset, rollout_func=rollouts)


@app.command()
def main(
    config: Annotated[Path, typer.Option("--config", help="Configuration of engines and planner.")] = Path(
        __file__
    ).parent
    / "cpu-tiny.toml",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Updates.")] = 5,
    out: Annotated[Path, typer.Option("--out", help="Folder of the run.")] = Path("out/trl"),
) -> None:
    """Train for a few steps and show what each rollout was like."""
    require("trl")
    folder = out_folder(out)
    bench = open_bench(load(config), folder, None)
    planner = bench.planner(bench.config.planner.policy)
    reports: list[StepReport] = []

    def observe(report: StepReport) -> None:
        planner.observe(report)
        reports.append(report)

    with bench.executor() as executor:
        rollouts = Rollouts(executor, planner.plan, observe)
        trainer = trainer_of(bench.model, folder / "trl", rollouts, steps)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    print_table(
        f"{steps} updates of GRPO by TRL, rollouts by {planner.policy.name}",
        ["step", "actors", "generation s", "tokens", "reward", "loss", "grad norm"],
        [
            [
                entry["step"],
                len({*report.actor.tolist()}),
                report.phase_s("generation"),
                report.counters.decoded_tokens,
                entry["reward"],
                entry["loss"],
                entry["grad_norm"],
            ]
            for entry, report in zip(logged, reports, strict=True)
        ],
    )


if __name__ == "__main__":
    run(app)
