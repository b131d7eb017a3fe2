"""`python -m experiments.validate`: the same plans on real engines and in the simulator, predicted against measured.

Every step is planned once. The real executor carries the plan out with lengths forced to a given outcome; then the
simulator carries out the very same plans, in the same order, with the same lengths, on a profile measured from the same
kind of engine. Nothing in the simulator is fitted to these runs but two times that are conditions, not predictions: how
long a kept process takes to answer and how long weights take to load, both read off steps that are not scored.

A measured profile holds the speed of the quickest round; engines at work run at the usual one. So predictions are also
made with the profile calibrated to one run, the first that is scored; errors of both are then over all the others.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from experiments import compare, options
from experiments.compare import Pair
from experiments.config import ValidateConfig, load
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, progress, write_atomic
from experiments.real import Bench, cpu_s, open_bench
from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.scheduler.policies import policy
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.profile import Profile
from rlhfless.types.report import Activity
from rlhfless.types.workload import Workload
from sim.executor import SimExecutor
from sim.profiles.calibrate import LEAST, Calibration, Observation, calibrate, calibrated, summary
from sim.world import World
from traces.format import Trace
from traces.load import steps as steps_of
from traces.synthesize import synthesize

DEFAULT_POLICIES = "raw,dp,dp+pa,rlhfless,rlhfuse"
UNSCORED = 1
"""Steps before those that are compared, in each run of a policy: processes start, connections open, caches fill."""
LEAST_S = 1e-4
"""Least seconds that a measured start or load counts for (chosen: a profile wants one above 0)."""
FILES = ("validate.csv", "actors.csv", "validate.json", "validate.png")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Steps = Sequence[tuple[Workload, Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Times of the real executor that the simulator is told."""

    start_s: float
    """From asking a kept process to its answer: median over invocations of unscored steps in which none started."""
    weights_s: float
    """From there to weights that are loaded: likewise."""


# ---- what is compared


def given_steps(bench: Bench, asked: ValidateConfig, trace: Path | None) -> Steps:
    """The unscored step and those that are compared, with their true lengths.

    From a recorded trace with token ids, or the file's own prompts with synthetic lengths (and reference answers, which
    first plans are made from). Raises InputError for a trace that has no token ids or too few steps.
    """
    count = UNSCORED + asked.steps
    if trace is not None:
        found = list(steps_of(Trace.read(trace)))[:count]
        if len(found) < count:
            raise InputError(f"{trace}: {len(found)} steps, {count} are needed (validate.steps and {UNSCORED} before)")
        if found[0][0].prompts is None:
            raise InputError(f"{trace}: no token ids of prompts; real engines need them")
        return found
    workloads, limits = bench.workloads(count), bench.config.workload
    drawn = synthesize(
        asked.preset,
        prompts=limits.prompts_per_step * limits.steps_per_epoch,
        epochs=workloads[-1].epoch + 1,
        responses_per_prompt=limits.responses_per_prompt,
        max_response_tokens=limits.max_response_tokens,
        prompts_per_step=limits.prompts_per_step,
        seed=bench.config.seed,
        algorithm=limits.algorithm,
        stretch=True,
    )
    assert drawn.reference_tokens is not None, "synthetic traces have reference lengths"
    n, size, result = drawn.n, limits.prompts_per_step, []
    for workload in workloads:
        first = workload.step % limits.steps_per_epoch * size
        here = drawn.epoch[::n] == workload.epoch
        order = drawn.prompt[::n][here].argsort()  # epochs are shuffled; rows by prompt
        lengths = drawn.lengths[here][order][first : first + size]
        references = ints(drawn.reference_tokens[first : first + size])
        result.append((replace(workload, reference_tokens=references), Outcome(response_tokens=ints(lengths))))
    return result


def measure(
    bench: Bench, steps: Steps, policies: Sequence[str], repeats: int, tick: Callable[[int], None]
) -> list[Pair]:
    """Every policy over the steps on real engines, `repeats` times in turns; processes are kept all along."""
    outcomes = {workload.step: outcome for workload, outcome in steps}
    executor = bench.executor(lengths=lambda workload: outcomes[workload.step])
    local = bench.config.engine.device == "cpu" and bench.config.ray.address is None
    pairs = []
    try:
        for repeat in range(repeats):
            for name in policies:
                planner = bench.planner(name)
                for workload, _ in steps:
                    plan = planner.plan(workload, executor.snapshot())
                    plan.check()
                    before = executor.pids(), cpu_s(executor.pids())
                    report = executor.execute(plan, workload)
                    after = executor.pids(), cpu_s(executor.pids())
                    planner.observe(report)
                    same = local and sorted(before[0]) == sorted(after[0])
                    used_s = after[1] - before[1] if same and after[1] is not None and before[1] is not None else None
                    pairs.append(
                        Pair(repeat=repeat, workload=workload, plan=plan, measured=report, engines_cpu_s=used_s)
                    )
                    tick(1)
    finally:
        executor.close()
    return pairs


def conditions(pairs: Sequence[Pair]) -> Conditions:
    """Read off the unscored steps, but the very first, in which processes start."""
    lives = [
        {span.activity: span.end_s - span.start_s for span in invocation.spans}
        for pair in pairs[1:]
        if pair.workload.step < UNSCORED
        for invocation in pair.measured.invocations
        if invocation.function == "decode"
    ] or [
        {span.activity: span.end_s - span.start_s for span in invocation.spans}
        for invocation in pairs[-1].measured.invocations
        if invocation.function == "decode"
    ]

    def typical(activity: Activity) -> float:
        return max(LEAST_S, median(life.get(activity, 0.0) for life in lives))

    return Conditions(start_s=typical("start-up"), weights_s=typical("wait-weights"))


def told(profiles: Sequence[Profile], cluster: Cluster, known: Conditions) -> tuple[tuple[Profile, ...], Cluster]:
    """Profiles and cluster with the measured conditions: a start, and a link over which weights take their time."""
    bytes_per_s = profiles[0].data.weight_bytes / known.weights_s
    hosts = tuple(
        replace(host, local=replace(host.local, latency_s=0.0, bytes_per_s=bytes_per_s)) for host in cluster.hosts
    )
    started = tuple(Profile(data=replace(profile.data, warm_start_s=known.start_s)) for profile in profiles)
    return started, replace(cluster, hosts=hosts)


def observations(pair: Pair) -> list[Observation]:
    """What each actor of a run took, first admission to last token. Raises InputError where responses moved."""
    report = pair.measured
    if report.moves.any():
        raise InputError(f"policy {pair.plan.policy}: responses moved; a profile is calibrated to a run without cuts")
    found = []
    for actor in pair.plan.actors:
        queue = actor.responses
        found.append(
            Observation(
                prompt_tokens=pair.workload.prompt_tokens,
                response_tokens=report.tokens.reshape(-1, report.responses_per_prompt),
                actors=(queue,),
                seconds=float(report.end_s[queue].max() - report.first_s[queue].min()),
                delivered=pair.plan.prefill is not None,
            )
        )
    return found


def to_calibrate_on(pairs: Sequence[Pair], tp: int) -> Pair | None:
    """The first scored run in which no response moved and that has enough actors, all of `tp` GPUs; None where there is
    none."""
    for pair in pairs:
        scored = pair.workload.step >= UNSCORED and not pair.measured.moves.any()
        if scored and pair.plan.sizes == (tp,) and len(pair.plan.actors) >= LEAST:
            return pair
    return None


def predict(pairs: Sequence[Pair], steps: Steps, profiles: Sequence[Profile], cluster: Cluster) -> list[Pair]:
    """The same plans in the simulator, each run of a policy from its start; `profiles` of every size of actor."""
    outcomes = {workload.step: outcome for workload, outcome in steps}
    world = World(
        profile=profiles[0],
        profiles={profile.data.tp: profile for profile in profiles[1:]},
        outcome_of=lambda workload: outcomes[workload.step],
        link_efficiency=1.0,
    )
    found = []
    for pair in pairs:
        if pair.workload.step == steps[0][0].step:
            executor = SimExecutor(cluster=cluster, world=world)
        found.append(replace(pair, predicted=executor.execute(pair.plan, pair.workload)))
    return found


# ---- the command


@app.command()
def run_validate(
    config: Annotated[Path, typer.Option("--config", help="Configuration file, such as examples/cpu-tiny.toml.")],
    policies: Annotated[str, typer.Option("--policies", help="Policies to run, with commas.")] = DEFAULT_POLICIES,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=100, help="Real runs of each policy.")] = 1,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Recorded trace with token ids; default: synthetic lengths.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="GSM8K-like jsonl file; default: the file's, or arithmetic.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = Path("out/validate"),
    as_json: options.Json = False,
) -> None:
    """Compare the simulator with real engines, plan by plan, at equal lengths."""
    loaded = load(config)
    if loaded.validate is None:
        raise InputError(f"{config}: validate is missing; the section says which lengths to compare")
    names = options.policy_names(policies, "--policies")
    if oracles := [name for name in names if policy(name).oracle]:
        raise InputError(f"--policies {oracles[0]!r}: oracle policies are for simulations alone")
    options.check_outputs(out, FILES, None)
    folder = out_folder(out)
    bench = open_bench(loaded, folder, prompts)
    steps = given_steps(bench, loaded.validate, trace)
    with progress(repeats * len(names) * len(steps), f"{loaded.name}: {len(names)} policies") as tick:
        pairs = measure(bench, steps, names, repeats, tick)
    known = conditions(pairs)
    seen = to_calibrate_on(pairs, bench.profile.data.tp)
    fitted = None if seen is None else calibrate(bench.profile, observations(seen))
    measured = (bench.profile, *bench.profiles)
    sides = [measured] if fitted is None else [measured, tuple(calibrated(each, fitted) for each in measured)]
    raw, *others = (
        [pair for pair in predict(pairs, steps, *told(side, bench.cluster, known)) if pair.workload.step >= UNSCORED]
        for side in sides
    )
    report(bench, folder, raw, known, Held(seen=seen, fitted=fitted, pairs=others[0] if others else ()), as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The calibration, and what the simulator says with it."""

    seen: Pair | None
    """The run that was fitted to; None where there is no calibration."""
    fitted: Calibration | None
    """The fit."""
    pairs: Sequence[Pair]
    """Every scored run, predicted with the calibrated profile."""

    def lines(self, pairs: Sequence[Pair]) -> list[list[Cell]]:
        """Errors side by side over the runs that were not fitted to; `pairs` are those of the raw profile."""
        if self.seen is None:
            return []
        seen = self.seen.plan.policy, self.seen.repeat, self.seen.workload.step
        raw, calibrated = (
            compare.tables_of([pair for pair in side if (pair.plan.policy, pair.repeat, pair.workload.step) != seen])
            for side in (pairs, self.pairs)
        )
        return compare.side_by_side(raw, calibrated) if raw["steps"] else []


def report(bench: Bench, folder: Path, pairs: Sequence[Pair], known: Conditions, held: Held, as_json: bool) -> None:
    """Write the files and print what they say."""
    config, data = bench.config, bench.profile.data
    rows, actors = compare.tables_of(pairs).values()
    sides = held.lines(pairs)
    best = compare.quickest(rows)
    errors = {"every run": compare.errors_of(rows, actors)}
    if any(pair.repeat for pair in pairs):
        errors["each plan's quickest run"] = compare.errors_of(
            [row for row in rows if compare.name_of(row) in best],
            [row for row in actors if compare.name_of(row) in best],
        )
    typical = errors["every run"]
    agree, of = compare.agreement(rows, typical.generation_s)
    same = all(row["same_lengths"] for row in rows)
    for name, table in (("validate.csv", rows), ("actors.csv", actors)):
        head = list(table[0])
        write_atomic(folder / name, csv_text(head, [[row[each] for each in head] for row in table]))
    facts = {
        "config": config, "profile": data.name, "profile_notes": data.notes, "conditions": known,
        "unscored_steps": UNSCORED, "errors": errors, "same_lengths": same,
        "rank_agreement": {"agree": agree, "of": of, "beyond": typical.generation_s}, "steps": rows, "actors": actors,
        "calibration": None if held.fitted is None else {
            "overhead_s": held.fitted.overhead_s, "speed": held.fitted.speed, "model": held.fitted.model,
            "before": held.fitted.before, "after": held.fitted.after,
        },
        "held_out": [dict(zip(compare.ERROR_HEADINGS, side, strict=True)) for side in sides],
    }  # fmt: skip
    write_atomic(folder / "validate.json", json_text(facts))
    compare.scatter(actors, folder / "validate.png", typical.actor_end_s)
    if as_json:
        print((folder / "validate.json").read_text(), end="")
        return
    print_table(
        f"{config.name}: {Path(bench.model).name} on {bench.cluster.gpus} {bench.cluster.gpu.name}; the same plans on "
        "vLLM and Ray (measured) and in the simulator (predicted), lengths forced to be the same; medians over steps",
        compare.HEADINGS,
        compare.summary_rows(rows, actors),
    )
    for sample, of_sample in errors.items():
        cpu = "" if of_sample.cpu_s is None else f", {of_sample.cpu_s:.1%} against the engines' processor time"
        print(
            f"median error (aim {compare.AIM:.0%}), {sample}: generation time {of_sample.generation_s:.1%}, "
            f"core-seconds {of_sample.core_s:.1%}{cpu} (n = {of_sample.steps}); last token of each actor "
            f"{of_sample.actor_end_s:.1%} (n = {of_sample.actors})"
        )
    if held.fitted is not None and held.seen is not None:
        print_table(
            f"the profile as measured, and calibrated to step {held.seen.workload.step} of {held.seen.plan.policy}, "
            "which is left out here",
            compare.ERROR_HEADINGS,
            sides,
        )
        for line in summary(held.fitted):
            print(f"calibration: {line}")
    print(f"policies in the same order: {agree} of {of} pairs that differ by more than {typical.generation_s:.1%}")
    print(f"lengths the same on both sides: {'yes' if same else 'NO'}")
    print(
        f"measured: {config.engine.device}, {config.engine.dtype}, KV over {config.kv.transport}, {os.cpu_count()} "
        f"CPUs that engines, Ray and all other work share; {UNSCORED} step of each run is not scored"
    )
    print(
        f"simulated: profile {data.name} ({data.kind}); told of the real side: a kept process answers after "
        f"{known.start_s:.3g} s, weights load in {known.weights_s:.3g} s"
    )
    for note in data.notes:
        print(f"profile: {note}")
    print(f"written to {folder}: {', '.join(FILES)}")


if __name__ == "__main__":
    run(app)
