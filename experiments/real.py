"""Parts of real runs: from a configuration to engines, steps carried out, and the trace that they leave.

What `experiments.testbed` and `experiments.validate` share: the model's folder, prompts as workloads, the profile
(measured where the file says so), planner and executor, and the recorded trace.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.environment import prepare, require
from backends.ray_config import RayConfig
from backends.ray_executor import RayExecutor
from backends.tiny import make_tiny
from experiments import tasks
from experiments.config import MEASURE, TINY, WARM, Config
from experiments.output import progress
from rlhfless.driver import StepRecord
from rlhfless.driver import run as drive
from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.scheduler.planner import Planner
from rlhfless.scheduler.policies import policy
from rlhfless.types.arrays import BoolArray, FloatArray, floats, ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.profile import Profile
from rlhfless.types.workload import Workload
from sim.profiles import load as load_profile
from traces.format import Trace, TraceInfo
from traces.importers.gsm8k import Problems, problems
from traces.importers.tokenizers import Tokenizer, Words
from traces.importers.tokenizers import load as load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A configuration with everything that it names in hand."""

    config: Config
    """The file."""
    folder: Path
    """Where the run writes."""
    model: str
    """The model's folder."""
    tokenizer: Tokenizer
    """What turns prompts into token ids."""
    problems: Problems
    """Prompts of an epoch and the lengths of their reference answers."""
    profile: Profile
    """What the planner reads."""
    profiles: tuple[Profile, ...]
    """The same model at other tensor-parallel sizes, for policies that mix them."""
    cluster: Cluster
    """What plans may use."""
    usd_per_gpu_hour: float
    """Price."""

    def workloads(self, steps: int) -> list[Workload]:
        """The first steps of the run; the same prompts come again in every epoch."""
        asked, size = self.config.workload, self.config.workload.prompts_per_step
        found = []
        for step in range(steps):
            epoch, at = divmod(step, asked.steps_per_epoch)
            here = slice(at * size, (at + 1) * size)
            prompts = self.problems.prompts[here]
            found.append(
                Workload(
                    step=step,
                    epoch=epoch,
                    algorithm=asked.algorithm,
                    prompt_ids=self.problems.prompt_ids[here],
                    prompt_tokens=ints([len(prompt) for prompt in prompts]),
                    responses_per_prompt=asked.responses_per_prompt,
                    max_response_tokens=asked.max_response_tokens,
                    reference_tokens=self.problems.reference_tokens[here],
                    prompts=prompts,
                )
            )
        return found

    def planner(self, name: str) -> Planner:
        """A planner of policy `name` with the file's numbers."""
        asked, scales = self.config.planner, policy(name).scale
        return Planner(
            name,
            self.profile,
            self.cluster,
            actors=None if scales else asked.actors,
            weight=asked.weight,
            tau=asked.tau,
            window=asked.window,
            learner_gpus=asked.learner_gpus,
            seed=self.config.seed,
            start=asked.start,
            profiles=self.profiles,
        )

    def executor(self, lengths: Callable[[Workload], Outcome] | None = None) -> RayExecutor:
        """Real engines; `lengths` forces how long responses get."""
        config = self.config
        return RayExecutor(
            self.cluster,
            RayConfig(
                model=self.model,
                device=config.engine.device,
                dtype=config.engine.dtype,
                max_model_len=config.engine.max_model_len,
                max_slots=config.engine.max_slots,
                kv_cache_bytes=config.engine.kv_cache_bytes,
                block_size=config.engine.block_size,
                max_batched_tokens=config.engine.max_batched_tokens,
                actor_cpus=config.ray.actor_cpus,
                ray_address=config.ray.address,
                node_timeout_s=config.ray.node_timeout_s,
                kv=config.kv.transport,
                redis_url=config.kv.url,
                temperature=config.workload.temperature,
                seed=config.seed,
                start_timeout_s=config.ray.start_timeout_s,
                hang_timeout_s=config.ray.hang_timeout_s,
                run_folder=self.folder / "weights",
            ),
            lengths=lengths,
        )


# ---- what a configuration names


Find = Callable[[Config, Path | None, Tokenizer], Problems]
"""Finds the prompts of an epoch, in the file at the path where one is given."""


def open_bench(
    config: Config, folder: Path, prompts: Path | None, *, engines: bool = True, find: Find | None = None
) -> Bench:
    """Everything that `config` names; writes a model of the project's and a measured profile to `folder`. `find` takes
    the place of `problems_of`.

    Without `engines` nothing will run: no model is needed (prompts are then counted in words) and none is measured.
    Raises InputError for what is missing or does not fit together.
    """
    prepare(config.engine.device)  # before anything imports transformers
    if engines and config.kv.transport == "nixl":
        require("nixl")
    cluster = config.cluster.cluster
    model = model_folder(config, folder, engines)
    tokenizer = load_tokenizer(model) if Path(model).is_dir() else Words()
    profile, *others = profiles_of(config, model, folder)
    if profile.data.gpu != cluster.gpu.name:
        raise InputError(
            f"profile.source: {profile.data.name} is of {profile.data.gpu}, cluster.gpu is {cluster.gpu.name}"
        )
    for each in (profile, *others):
        for name in ("max_slots", "max_batched_tokens"):
            assumed, own = getattr(each.data, name), getattr(config.engine, name)
            if assumed > own:
                raise InputError(f"engine.{name}: {own} is below the {assumed} of profile {each.data.name}")
    price = config.cluster.usd_per_gpu_hour
    return Bench(
        config=config,
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        problems=(find or problems_of)(config, prompts, tokenizer),
        profile=profile,
        profiles=tuple(others),
        cluster=cluster,
        usd_per_gpu_hour=cluster.gpu.usd_per_hour if price is None else price,
    )


def model_folder(config: Config, folder: Path, engines: bool) -> str:
    """The model's folder, made in `folder` where it is one of the project's. Raises InputError where there is none."""
    path = config.model.path
    if path == TINY:
        return str(make_tiny(folder / "model", seed=config.model.seed))
    if path == WARM:
        return str(warm_model(folder / "warm-start", config.model.seed, config.model.warm_updates))
    if engines and not (Path(path) / "config.json").is_file():
        raise InputError(f"model.path: {path} is not a folder with a Hugging Face model (no config.json)")
    return str(Path(path).absolute())


def warm_model(folder: Path, seed: int, updates: int) -> Path:
    """The small model that has been taught sums, made where it is not there yet."""
    from backends.learner_warm import warm_start

    if folder.exists():
        return warm_start(folder, tasks.example, tasks.recipe(), seed=seed, updates=updates)
    with progress(updates, "warm start: updates") as tick:
        return warm_start(folder, tasks.example, tasks.recipe(), seed=seed, updates=updates, tick=tick)


def profiles_of(config: Config, model: str, folder: Path) -> list[Profile]:
    """The profiles, each of another size: shipped, from files, or measured now, each in a process of its own."""
    asked = config.profile
    if asked.source != MEASURE:
        return [load_profile(name) for name in (asked.source, *asked.others)]
    if config.engine.device != "cpu":
        raise InputError(
            'profile.source: "measure" is for engines on CPUs; measure a GPU with python -m backends.measure'
        )
    first, *others = asked.sizes or (1,)
    outs = {first: folder / "profile.json"} | {tp: folder / f"profile-tp{tp}.json" for tp in others}
    return [_measured(config, model, tp, out) for tp, out in outs.items()]


def _measured(config: Config, model: str, tp: int, out: Path) -> Profile:
    engine, asked = config.engine, config.profile
    options_of = {
        "--model": model,
        "--tp": tp,
        "--out": out,
        "--dtype": engine.dtype,
        "--max-slots": engine.max_slots,
        "--max-batched-tokens": engine.max_batched_tokens,
        "--kv-cache-bytes": engine.kv_cache_bytes,
        "--batches": asked.batches and ",".join(map(str, asked.batches)),
        "--contexts": asked.contexts and ",".join(map(str, asked.contexts)),
        "--limit-s": asked.limit_s,
    }
    arguments = [part for name, value in options_of.items() if value is not None for part in (name, str(value))]
    # a process of its own: vLLM takes one engine a process, and this one must stay free of it
    done = subprocess.run([sys.executable, "-m", "backends.measure", *arguments], stdout=sys.stderr, check=False)
    if done.returncode:
        raise InputError("profile.source: measuring failed; the lines above say why")
    return Profile.read(out)


def problems_of(config: Config, path: Path | None, tokenizer: Tokenizer) -> Problems:
    """The prompts of an epoch. Raises InputError where the file has too few that are short enough."""
    asked = config.workload
    count = asked.prompts_per_step * asked.steps_per_epoch
    source = path if path is not None else None if asked.prompts is None else Path(asked.prompts)
    found = arithmetic(count, config.seed, tokenizer) if source is None else problems(source, tokenizer)
    short = [row for row, prompt in enumerate(found.prompts) if len(prompt) <= asked.max_prompt_tokens][:count]
    if len(short) < count:
        raise InputError(
            f"{source or 'arithmetic prompts'}: {len(short)} prompts of at most {asked.max_prompt_tokens} tokens, "
            f"{count} are needed (workload.prompts_per_step x steps_per_epoch)"
        )
    return Problems(
        prompt_ids=found.prompt_ids[short],
        prompts=tuple(found.prompts[row] for row in short),
        reference_tokens=found.reference_tokens[short],
    )


HEADERS = (
    "Work out the sum. Write one short line for each digit, then the result.\n",
    "Work out the product. Write one line for each partial product, add them up, then give the result.\n",
)
"""What arithmetic prompts begin with; each is shared by half of them."""


def arithmetic(count: int, seed: int, tokenizer: Tokenizer) -> Problems:
    """Sums and products with answers worked out, numbers drawn from `seed`."""
    draws = stream(seed, "experiments", "arithmetic").integers(10, 9999, size=(count, 2)).tolist()
    prompts, answers = [], []
    for number, (a, b) in enumerate(draws):
        times = number % 2
        prompts.append(f"{HEADERS[times]}{a} {'x' if times else '+'} {b} = ")
        parts = [f"{a} x {digit} = {a * int(digit)}" for digit in str(b)] if times else [f"{a} + {b}"]
        answers.append("\n".join([*parts, str(a * b if times else a + b)]))
    return Problems(
        prompt_ids=np.array([f"arithmetic-{number}" for number in range(count)], dtype=np.str_),
        prompts=tuple(ints(tokenizer.encode(text)) for text in prompts),
        reference_tokens=ints([len(tokenizer.encode(text)) for text in answers]),
    )


# ---- a run


def cpu_s(pids: Sequence[int]) -> float | None:
    """Processor seconds that processes of this machine have had so far; None where they cannot be read."""
    ticks = 0
    try:
        for pid in pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # user and system, the 14th and 15th of the whole line
    except (OSError, IndexError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealStep:
    """A step that has run."""

    workload: Workload
    """What was asked for."""
    record: StepRecord
    """Plan and report."""
    truncated: BoolArray
    """bool[responses]: ended by the cap."""
    rewards: FloatArray | None = None
    """float[responses]: scores, where there are any."""


def carry_out(bench: Bench, name: str, steps: int, done: Callable[[RealStep], None]) -> list[RealStep]:
    """Run the steps under policy `name` on real engines; `done` is told of each as it ends."""
    workloads = bench.workloads(steps)
    found = []
    executor = bench.executor()
    try:
        for workload, record in zip(workloads, drive(bench.planner(name), executor, workloads), strict=True):
            reasons = [result.finish_reason for result in executor.results]
            step = RealStep(workload=workload, record=record, truncated=np.array(reasons) == "length")
            found.append(step)
            done(step)
    finally:
        executor.close()
    return found


def recorded(
    bench: Bench,
    steps: Sequence[RealStep],
    *,
    command: str = "experiments.testbed",
    dataset: str = "arithmetic prompts",
) -> Trace:
    """The run as a trace: lengths, rewards where there are any, times on the run's clock, actors, token ids of the
    prompts."""
    asked, found = bench.config.workload, bench.problems
    n = asked.responses_per_prompt
    row_of = {name: row for row, name in enumerate(found.prompt_ids.tolist())}
    used = sorted({row_of[name] for step in steps for name in step.workload.prompt_ids.tolist()})
    number = {row: at for at, row in enumerate(used)}
    prompts = [[number[row_of[name]] for name in step.workload.prompt_ids.tolist()] for step in steps]
    reports = [step.record.report for step in steps]

    def column(values: Sequence[npt.ArrayLike]) -> npt.NDArray[Any]:
        return np.concatenate([np.asarray(each) for each in values])

    return Trace(
        info=TraceInfo(
            model=Path(bench.model).name,
            dataset=dataset if asked.prompts is None else Path(asked.prompts).name,
            tokenizer=bench.tokenizer.name,
            algorithm=asked.algorithm,
            responses_per_prompt=n,
            max_prompt_tokens=asked.max_prompt_tokens,
            max_response_tokens=asked.max_response_tokens,
            source=f"recorded: {command}, {bench.config.name}, policy {reports[0].policy}, "
            f"temperature {asked.temperature:g}, seed {bench.config.seed}",
        ),
        prompt_ids=found.prompt_ids[used],
        prompt_tokens=ints([len(found.prompts[row]) for row in used]),
        reference_tokens=found.reference_tokens[used],
        prompt_token_ids=tuple(found.prompts[row] for row in used),
        epoch=column([np.full(report.tokens.size, report.epoch) for report in reports]),
        step=column([np.full(report.tokens.size, report.step) for report in reports]),
        prompt=column([np.repeat(each, n) for each in prompts]),
        sample=column([np.tile(np.arange(n), len(each)) for each in prompts]),
        response_tokens=column([report.tokens for report in reports]),
        truncated=column([step.truncated for step in steps]),
        reward=floats(column([step.rewards for step in steps if step.rewards is not None]))
        if all(step.rewards is not None for step in steps)
        else None,
        start_s=column([report.start_s + report.first_s for report in reports]),
        end_s=column([report.start_s + report.end_s for report in reports]),
        actor=column([report.actor for report in reports]),
    )
