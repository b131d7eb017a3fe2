"""`python -m experiments.train`: GRPO or PPO, every step planned, generated on Ray and vLLM, rewarded, learned from."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from backends import checkpoint
from backends.environment import prepare
from experiments import options, perfetto, plots
from experiments.config import Config, load
from experiments.output import json_text, out_folder, print_table, write_atomic
from experiments.real import Bench, RealStep, open_bench, recorded
from experiments.tasks import Task
from experiments.train_beside import Beside, savings
from experiments.train_log import FIGURE, METRICS, Log, Row, held_out_error, read_rows, step_row
from experiments.train_parts import about, learner_of, memory, options_of, parts, remember, reward_of, tasks_of
from experiments.train_plot import train_figure
from rlhfless.accounting.billing import bill, total
from rlhfless.commands import run
from rlhfless.driver import StepRecord
from rlhfless.driver import run as drive
from rlhfless.errors import InputError
from rlhfless.scheduler.policies import policy
from rlhfless.types.arrays import floats, ints
from rlhfless.types.plan import Plan
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Workload
from traces.importers.tokenizers import Tokenizer

if TYPE_CHECKING:
    from backends.ray_executor import RayExecutor
    from backends.training import Training

CHECKPOINTS = "checkpoints"
"""Their folder."""
TRACE = "trace.parquet"
"""Recorded trace, unless --record names another file."""
FILES = (METRICS, "train.json", FIGURE, "gantt.png")
"""Result files, besides plans, reports, scores, checkpoints and the recorded trace."""
NOT_LOOKED: Row = {"held_out_reward": None, "held_out_stderr": None}
"""Of a step whose weights were not looked at with held-out prompts."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Run:
    """A training run: what it is made of, and its steps one after the other."""

    def __init__(self, bench: Bench, name: str, task: Task, held_out: Task) -> None:
        """Everything but processes, which `go` starts."""
        config = bench.config
        assert config.learner is not None
        assert config.train is not None
        self.bench, self.name, self.task, self.train = bench, name, task, config.train
        self.learner = learner_of(config, bench.model)
        self.reward = reward_of(config)
        found, asked = held_out.problems, config.workload
        self.references = dict(zip(bench.problems.prompt_ids.tolist(), task.references, strict=True))
        self.references |= dict(zip(found.prompt_ids.tolist(), held_out.references, strict=True))
        self.held_out = Workload(
            step=0,
            epoch=0,  # no history is kept of them, so they are always new
            algorithm=asked.algorithm,
            prompt_ids=found.prompt_ids,
            prompt_tokens=ints([len(prompt) for prompt in found.prompts]),
            responses_per_prompt=config.train.held_out_responses,
            max_response_tokens=asked.max_response_tokens,
            reference_tokens=found.reference_tokens,
            prompts=found.prompts,
        )
        self.root = bench.folder / CHECKPOINTS
        self.about = {
            **about(config),
            "algorithm": self.learner.algorithm,
            "policy": name,
            "model": checkpoint.digest(Path(bench.model)),
        }
        self.planner = bench.planner(name)
        self.first = 0
        self.rows: list[Row] = []
        self.final: Row = {}

    def resume(self) -> checkpoint.Checkpoint:
        """Take up the newest checkpoint. Raises InputError where there is none, or one of another run."""
        newest = checkpoint.newest(self.root)
        if newest is None:
            raise InputError(f"--resume: {self.root} holds no checkpoint")
        found = checkpoint.read(newest, self.about)
        remember(self.planner, found)
        self.first = found.steps
        self.rows = [row for row in read_rows(self.bench.folder / METRICS) if int(str(row["step"])) < found.steps]
        return found

    def go(self, steps: int, taken_up: checkpoint.Checkpoint | None, log: Log) -> list[RealStep]:
        """Carry out the steps that are left, and look at held-out prompts; the steps carried out now."""
        bench, found, every = self.bench, list[RealStep](), self.train.held_out_every
        workloads = bench.workloads(steps)
        left, beside = workloads[self.first :], Beside(bench)
        executor = bench.executor()
        training: Training | None = None
        try:
            training = self._training(executor, workloads[0])
            if taken_up is not None:
                training.load(taken_up.learner, taken_up.steps)
            executor.train_with(training)
            held_out = self._look(executor) if self.first % every == 0 or not left else None
            for workload, record in zip(left, drive(self.planner, executor, left), strict=True):
                results, done = executor.results, workload.step + 1
                assert {one.weight_version for one in results} == {str(workload.step)}, "weights of another step"
                truncated = np.array([one.finish_reason == "length" for one in results])
                step = RealStep(workload=workload, record=record, truncated=truncated, rewards=executor.scores)
                found.append(step)
                row = step_row(step, executor.learned, bench.usd_per_gpu_hour) | beside.of(record, workload)
                self.rows.append(row | (held_out or NOT_LOOKED))
                self._keep(step)
                log.step(self.rows[-1])
                if done == steps or done % self.train.checkpoint_every == 0:
                    self._checkpoint(training, done)
                held_out = self._look(executor) if done == steps or done % every == 0 else None
            assert held_out is not None
            self.final = held_out
        finally:
            executor.close()
            if training is not None:
                training.close()
        return found

    def past(self) -> list[RealStep]:
        """Steps that were carried out before this process."""
        found = []
        for workload, row in zip(self.bench.workloads(self.first), self.rows, strict=True):
            plan, report, kept = (
                _read(self.bench.folder / each / _file(workload)) for each in ("plans", "reports", "scores")
            )
            record = StepRecord(
                plan=Plan.from_json(plan), report=StepReport.from_json(report), planning_s=float(str(row["planning_s"]))
            )
            told = json.loads(kept)
            truncated = np.array(told["truncated"], dtype=np.bool_)
            found.append(
                RealStep(workload=workload, record=record, truncated=truncated, rewards=floats(told["rewards"]))
            )
        return found

    # ---- inside

    def _training(self, executor: "RayExecutor", first: Workload) -> "Training":
        from backends.learner_ranks import RayRanks
        from backends.training import Training

        config = self.bench.config
        assert config.learner is not None
        ranks = None
        if config.engine.device == "cuda":
            gpus = self.bench.planner(self.name).plan(first, executor.snapshot()).placement.learner
            ranks = RayRanks(self.learner, executor.places(gpus))
        return Training(
            self.learner, self.reward, self.references, ranks=ranks, dtype=config.engine.dtype,
            old_logprobs=config.learner.old_logprobs,
        )  # fmt: skip

    def _look(self, executor: "RayExecutor") -> Row:
        """Mean reward of held-out prompts, and its standard error over prompts."""
        plan = self.planner.plan(self.held_out, executor.snapshot())
        executor.evaluate(plan, self.held_out)
        assert executor.scores is not None
        mean, error = held_out_error(executor.scores, self.held_out.responses_per_prompt)
        return {"held_out_reward": mean, "held_out_stderr": error}

    def _keep(self, step: RealStep) -> None:
        folder, file = self.bench.folder, _file(step.workload)
        assert step.rewards is not None
        write_atomic(folder / "plans" / file, step.record.plan.to_json() + "\n")
        write_atomic(folder / "reports" / file, step.record.report.to_json() + "\n")
        scores = {"truncated": step.truncated, "rewards": step.rewards}
        write_atomic(folder / "scores" / file, json_text(scores))

    def _checkpoint(self, training: "Training", steps: int) -> None:
        kept = memory(self.planner)
        checkpoint.write(self.root, steps, self.about, training.save, kept, self.train.checkpoints)


def _file(workload: Workload) -> str:
    return f"step-{workload.step:04d}.json"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


# ---- the command


@app.command()
def train(
    config: Annotated[Path, typer.Option("--config", help="Configuration file, such as examples/cpu-grpo.toml.")],
    policy_name: Annotated[str | None, typer.Option("--policy", help="Policy; default: the file's.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps in all; default: the file's.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of everything, warm start included; default: the file's.")
    ] = None,
    model: Annotated[Path | None, typer.Option("--model", help="Model to start from; default: the file's.")] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="GSM8K-like jsonl file; default: the file's, or sums.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the run.")] = Path("out/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    record: Annotated[
        Path | None, typer.Option("--record", help="Recorded trace, .parquet or .jsonl; default: trace.parquet there.")
    ] = None,
    trace_out: options.TraceOut = None,
    as_json: options.Json = False,
) -> None:
    """Train with planned generation: every step on vLLM actors under Ray, rewarded, learned from and billed."""
    loaded = _with(load(config), seed, model)
    try:
        parts(loaded)
    except InputError as error:
        raise InputError(f"{config}: {error}") from None
    name = policy_name or loaded.planner.policy
    if policy(name).oracle:
        raise InputError(f"--policy {name!r}: nobody knows the true lengths before a real step")
    if record is not None and record.suffix not in (".parquet", ".jsonl"):
        raise InputError(f"--record {record}: the name must end in .parquet or .jsonl")
    options.check_outputs(out, FILES, trace_out)
    if not resume and checkpoint.newest(out / CHECKPOINTS) is not None:
        raise InputError(f"--out {out}: holds a run; --resume goes on with it, or choose another folder")
    prepare(loaded.engine.device)  # before anything imports torch
    reward_of(loaded)  # a mistake in these is told before anything is made
    options_of(loaded)
    folder = out_folder(out)
    shutil.rmtree(folder / "weights", ignore_errors=True)  # of a process that was killed
    chosen: list[Task] = []

    def find(config: Config, path: Path | None, tokenizer: Tokenizer) -> Any:
        chosen.extend(tasks_of(config, path, tokenizer))
        return chosen[0].problems

    bench = open_bench(loaded, folder, prompts, find=find)
    task, held_out = chosen
    count = steps or loaded.workload.steps
    job = Run(bench, name, task, held_out)
    taken_up = job.resume() if resume else None
    if job.first > count:
        raise InputError(f"--resume: {job.first} steps are done, more than the {count} that are asked for")
    for each in ("plans", "reports", "scores"):
        out_folder(folder / each)
    past = job.past()
    with Log(folder, job.rows, count, f"{loaded.name}: {loaded.workload.algorithm} under {name}") as log:
        done = job.go(count, taken_up, log)
    found = [*past, *done]
    recorded(bench, found, command="experiments.train", dataset=task.name).write(record or folder / TRACE)
    _results(bench, job, found, count)
    if trace_out is not None:
        perfetto.write(trace_out, [step.record.report for step in found], bench.cluster)
    if as_json:
        print((folder / "train.json").read_text(), end="")
        return
    _print(bench, job, task, record or folder / TRACE)


def _with(config: Config, seed: int | None, model: Path | None) -> Config:
    if seed is not None:
        config = replace(config, seed=seed, model=replace(config.model, seed=seed))
    if model is not None:
        config = replace(config, model=replace(config.model, path=str(model)))
    return config


def _results(bench: Bench, job: Run, found: Sequence[RealStep], steps: int) -> None:
    reports = [step.record.report for step in found]
    cost = total(bill(report, bench.usd_per_gpu_hour) for report in reports)
    content = {
        "config": bench.config,
        "policy": job.name,
        "profile": bench.profile.data.name,
        "task": job.task.name,
        "bill": cost,
        "steps": steps,
        **_summary(job),
    }
    write_atomic(bench.folder / "train.json", json_text(content))
    train_figure(
        job.rows, job.final, bench.folder / FIGURE, f"{bench.config.name}: {job.name}, seed {bench.config.seed}"
    )
    plots.gantt(reports[-1], bench.folder / "gantt.png", bench.cluster)


def _summary(job: Run) -> dict[str, Any]:
    rows, first, last = job.rows, job.rows[0], job.final

    def mean(name: str) -> float:
        return float(np.mean([float(str(row[name])) for row in rows]))

    return {
        "held_out_before": first["held_out_reward"],
        "held_out_before_stderr": first["held_out_stderr"],
        "held_out_after": last["held_out_reward"],
        "held_out_after_stderr": last["held_out_stderr"],
        "mismatch_mean": mean("mismatch_mean"),
        "mismatch_max": max(float(str(row["mismatch_max"])) for row in rows),
        "step_s": mean("step_s"),
        "generation_s": mean("generation_s"),
        "learning_s": mean("learning_s"),
        "usd": sum(float(str(row["usd"])) for row in rows),
        "saved_generation_s": savings(rows)[0],
        "saved_generation_gpu_s": savings(rows)[1],
    }


def _print(bench: Bench, job: Run, task: Task, trace: Path) -> None:
    asked, found = bench.config.workload, _summary(job)
    title = (
        f"{bench.config.name}: {asked.algorithm} of {Path(bench.model).name} on {task.name}, {len(job.rows)} steps of "
        f"{asked.prompts_per_step} prompts x {asked.responses_per_prompt} under {job.name}, on "
        f"{bench.cluster.gpus} {bench.cluster.gpu.name}"
    )
    print_table(title, ["", "value"], [[name.replace("_", " "), value] for name, value in found.items()])
    print("saved: shares, against the static plan of the same step and lengths, both simulated")
    print(f"written to {bench.folder}: {', '.join(FILES)}, plans, reports, scores, {CHECKPOINTS}; recorded: {trace}")


if __name__ == "__main__":
    run(app)
