"""`python -m experiments.bakeoff`: every policy, peers' among them, on the same lengths, world and accounts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments import options, plots, rounds
from experiments.bench import PolicyRun, Setting, Steps, beside, best_static, bounds, simulate, static_ladder
from experiments.output import Cell, csv_text, json_text, out_folder, print_table, progress, write_atomic
from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.scheduler import migration, scaling
from rlhfless.scheduler.peers import PEERS
from rlhfless.scheduler.policies import ORACLE, Policy, policy
from sim.profiles import load
from traces.format import Trace
from traces.load import batch
from traces.load import steps as steps_of
from traces.synthesize import load_preset, preset_names, synthesize

BASELINE = "verl"
"""What ratios are to: its static number of actors is the best for itself in hindsight, as for all static policies."""
ALL = (
    "verl,rlhfuse,dp,dp+pa,rlhfless,elastic,frontier,"
    "rhymerl,streamrl,tailsieve,seer,laminar,rollpacker,april,oracle:rlhfless,oracle:elastic,oracle:lpt"
)
"""Policies that are compared by default."""
PROMPTS_PER_STEP, STEPS, EPOCHS = 128, 2, 3
"""Prompts of a step, steps of an epoch, epochs of a preset's trace (chosen: with 4 responses each, as many as the
paper's simulation has; later epochs have history)."""
NEEDS = {
    "seer": "probes, KV pool",
    "rollpacker": "early stop, prompts out of order",
    "april": "early stop, old tokens",
}
"""What the peers cannot do without that are more than assignment and migration."""
FILES = ("bakeoff.csv", "bakeoff.json", "bakeoff.png")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One policy's result."""

    name: str
    """Policy."""
    done: PolicyRun
    """Its steps."""
    actors: int | None
    """Static number of actors that is best for it in hindsight; None where it chooses."""

    @property
    def held_gpu_s(self) -> float:
        """GPU-seconds that are paid for, mean over steps."""
        return self.done.summary.held_gpu_s.mean

    @property
    def synchronous(self) -> bool:
        """Whether it trains each step on all responses of its prompts, all drawn from the newest weights."""
        peer = PEERS.get(self.name.removeprefix(ORACLE))
        return peer is None or peer.synchronous

    @property
    def competes(self) -> bool:
        """Whether it trains synchronously and knows no more than it may."""
        return self.synchronous and not pieces(self.name).oracle

    @property
    def trained_tokens(self) -> float:
        """Response tokens that a step trains on, mean over steps."""
        done = self.done
        return float(done.trained_tokens.mean()) if isinstance(done, rounds.RoundsRun) else done.summary.tokens.mean


def pieces(name: str) -> Policy:
    """The policy that plans the steps: `name` itself, but for loops over steps."""
    return policy(rounds.PIECES if name in rounds.LOOPS else name)


def needs(name: str) -> str:
    """What a policy cannot do without."""
    rule, found = pieces(name), []
    if name in NEEDS:
        return NEEDS[name]
    if rule.oracle:
        found.append("true lengths")
    elif rule.scale or rule.assignment not in ("shuffled-even", "least-in-flight"):
        found.append("history")
    if rule.migration is not None:
        found.append("migration")
    return ", ".join(found) or "nothing"


def undominated(entries: Sequence[Entry]) -> list[str]:
    """Policies that compete and that no other one beats in both generation time and what is paid, by rising time."""
    kept: list[str] = []
    least = float("inf")
    ranked = sorted((e for e in entries if e.competes), key=lambda e: (e.done.summary.generation_s.mean, e.held_gpu_s))
    for entry in ranked:
        if entry.held_gpu_s < least:
            kept.append(entry.name)
            least = entry.held_gpu_s
    return kept


def compete(names: Sequence[str], steps: Steps, setting: Setting) -> list[Entry]:
    """Carry all policies out; the baseline first, whose learner the others' is as large as."""
    order = list(dict.fromkeys([BASELINE, *names]))
    rungs = len(static_ladder(steps, setting))
    work = sum(1 if pieces(name).scale else rungs for name in order) * len(steps)
    entries: list[Entry] = []
    with progress(work, f"{len(order)} policies, {len(steps)} steps") as tick:
        for name in order:
            rule = pieces(name)
            own = beside(setting, rule.name, entries[0].done) if entries else setting
            if rule.scale:
                entries.append(Entry(name=name, done=simulate(name, steps, own, tick=tick), actors=None))
            else:
                carry_out = rounds.simulate if name in rounds.LOOPS else simulate
                actors, done = best_static(name, steps, own, tick, carry_out)
                entries.append(Entry(name=name, done=done, actors=actors))
    return entries


def row_of(entry: Entry, baseline: Entry, front: Sequence[str]) -> dict[str, Cell]:
    """One line of the table; numbers are means over steps."""
    own, against = entry.done.summary, baseline.done.summary
    peer = PEERS.get(entry.name.removeprefix(ORACLE))
    return {
        "policy": entry.name,
        "actors": own.actors.mean,
        "generation_s": own.generation_s.mean,
        "generation_ci95_s": own.generation_s.half_width,
        "step_s": own.step_s.mean,
        "decode_gpu_s": own.decode_executed_gpu_s.mean,
        "held_gpu_s": entry.held_gpu_s,
        "usd": own.usd.mean,
        "trained_tokens": entry.trained_tokens,
        "generation_speedup": against.generation_s.mean / own.generation_s.mean if entry.synchronous else None,
        "held_saving": 1 - entry.held_gpu_s / baseline.held_gpu_s if entry.synchronous else None,
        "moves": own.moves.mean,
        "undominated": int(entry.name in front) if entry.competes else None,
        "needs": needs(entry.name),
        "synchronous": int(entry.synchronous),
        "gives_up": peer.gives_up if peer else None,
        **shares_of(entry.done),
        "source": peer.paper if peer else None,
    }


def shares_of(done: PolicyRun) -> dict[str, Cell]:
    """What a loop over steps does to what is trained on; None where each step trains on its own responses."""
    if not isinstance(done, rounds.RoundsRun):
        return dict.fromkeys(("off_policy_share", "wasted_share", "late_share", "late_steps_max"))
    return {
        "off_policy_share": done.off_policy_share,
        "wasted_share": done.wasted_share,
        "late_share": done.late_share,
        "late_steps_max": int(done.late_steps.max()),
    }


HEADINGS = (
    ("policy", "policy"), ("actors", "actors"), ("gen s", "generation_s"), ("step s", "step_s"),
    ("decode GPU-s", "decode_gpu_s"), ("held GPU-s", "held_gpu_s"), ("USD", "usd"), ("tokens", "trained_tokens"),
    ("gen x", "generation_speedup"),
    ("held saved", "held_saving"), ("moves", "moves"), ("needs", "needs"),
)  # fmt: skip


GREY, CROSSES = "#777777", ("x", "+", "1")
"""Colour and markers of policies that are not synchronous."""


def scatter(entries: Sequence[Entry], bound: tuple[float, float], front: Sequence[str], path: Path) -> None:
    """Generation time against GPU-seconds of decoding with the bounds, and against what is paid with the front."""
    with plots.picture(path, 9.6, 4.4) as figure:
        work, paid = figure.subplots(1, 2)
        for number, entry in enumerate(entries):
            style = _style(number, entry)
            time_s = entry.done.summary.generation_s.mean
            work.plot([time_s], [entry.done.summary.decode_executed_gpu_s.mean], label=entry.name, **style)
            paid.plot([time_s], [entry.held_gpu_s], label=entry.name, **style)
        work.axvline(bound[0], color=plots.BLACK, linewidth=0.8, linestyle=":")
        work.axhline(bound[1], color=plots.BLACK, linewidth=0.8, linestyle=":")
        best = [next(e for e in entries if e.name == name) for name in front]
        line = [(e.done.summary.generation_s.mean, e.held_gpu_s) for e in best]
        paid.plot(*zip(*line, strict=True), color="#999999", linewidth=0.9, drawstyle="steps-post", zorder=0)
        for axes, cost, title in (
            (work, "decode GPU-seconds of a step", "(a) work; dotted: bounds of synchronous steps"),
            (paid, "GPU-seconds held in a step", "(b) what is paid; line: undominated"),
        ):
            axes.set_xlabel("generation time of a step (s)")
            axes.set_ylabel(cost)
            axes.margins(0.08)
            axes.set_title(title, loc="left", fontsize=10)
            axes.grid(color="#DDDDDD", linewidth=0.6)
            axes.set_axisbelow(True)
        handles, labels = paid.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside right upper", fontsize=8, title="hollow: oracle; grey: not synchronous"
        )


def _style(number: int, entry: Entry) -> dict[str, Any]:
    turn = number // len(plots.POLICY_COLOURS)
    colour = plots.POLICY_COLOURS[number % len(plots.POLICY_COLOURS)] if entry.synchronous else GREY
    return {
        "color": colour,
        "marker": plots.MARKERS[(number + turn) % len(plots.MARKERS)] if entry.synchronous else CROSSES[number % 3],
        "markerfacecolor": colour if entry.competes else "white",
        "markeredgewidth": 1.0 if entry.synchronous else 2.0,
        "markersize": 7,
        "linestyle": "none",
    }


def recorded(source: str, samples: int, cap: int | None, prompts_per_step: int | None, seed: int) -> Trace:
    """The trace in a file, or a synthetic one of a preset's name. Raises InputError where it is neither."""
    if source not in preset_names():
        if not Path(source).suffix:
            raise InputError(f"--trace {source!r}: no trace file, nor one of the presets {', '.join(preset_names())}")
        found = Trace.read(Path(source))
        return batch(found, prompts_per_step, seed).trace if prompts_per_step is not None else found
    size = PROMPTS_PER_STEP if prompts_per_step is None else prompts_per_step
    most = load_preset(source).cap_tokens if cap is None else cap
    return synthesize(
        source, prompts=STEPS * size, epochs=EPOCHS, responses_per_prompt=samples, max_response_tokens=most,
        prompts_per_step=size, seed=seed, algorithm="grpo",
    )  # fmt: skip


def told(done: rounds.RoundsRun) -> str:
    """What a loop over steps did to what is trained on."""
    return (
        f"{100 * done.off_policy_share:.3g} % of tokens that a step trains on are from older weights, "
        f"{100 * done.wasted_share:.3g} % of tokens generated are thrown away, {100 * done.late_share:.3g} % of "
        f"prompts come later than in the trace, by {done.late_steps.max()} steps at most"
    )


def named(text: str) -> list[str]:
    """Policies and loops over steps, with commas between, in this order. Raises InputError for an unknown one."""
    parts = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for part in parts:
        if part not in rounds.LOOPS:
            options.policy_names(part, "--policy")
    return parts


@app.command()
def bakeoff(
    trace: Annotated[
        str, typer.Option("--trace", help=f"Trace file, or a preset: {', '.join(preset_names())}.")
    ] = "gpqa",
    policies: Annotated[str, typer.Option("--policy", help="Policies; with commas.")] = ALL,
    profile: options.Profiles = "qwen2.5-3b_l40s_tp2,qwen2.5-3b_l40s_tp1",
    nodes: options.Nodes = 16,
    gpus_per_host: options.GpusPerHost = options.GPUS_PER_HOST,
    prompts_per_step: Annotated[
        int | None, typer.Option("--prompts-per-step", min=1, help="Regroup the trace into steps of this size.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, max=4096, help="Responses a prompt, of a preset.")] = 4,
    cap: Annotated[
        int | None, typer.Option("--cap", min=1, max=options.MOST_TOKENS, help="Cap on a response, of a preset.")
    ] = None,
    usd_per_gpu_hour: options.Price = None,
    weight: options.Weight = scaling.WEIGHT,
    tau: options.Tau = migration.DEFAULT_TAU,
    window: options.Window = 1,
    learner_gpus: options.LearnerGpus = None,
    start: options.StartMode = "warm",
    speed_noise: options.Noise = 0.0,
    seed: options.Seed = 0,
    out: options.Out = Path("out/bakeoff"),
    as_json: options.Json = False,
) -> None:
    """Compare every policy, peers' among them, on one trace: the same lengths, world, prices and hindsight for all.

    Policies of one size of actor use the first of --profile; frontier mixes all.
    """
    names = named(policies)
    options.check_outputs(out, FILES, None)
    first, *others = [part.strip() for part in profile.split(",")]
    setting = options.setting(
        profile=first, nodes=nodes, gpus_per_host=gpus_per_host, usd_per_gpu_hour=usd_per_gpu_hour, seed=seed,
        weight=weight, tau=tau, window=window, learner_gpus=learner_gpus, start=start, speed_noise=speed_noise,
    )  # fmt: skip
    setting = replace(setting, profiles=tuple(load(name) for name in others))
    played = recorded(trace, samples, cap, prompts_per_step, seed)
    steps = list(steps_of(played))
    longest = max(int(workload.prompt_tokens.max()) for workload, _ in steps)
    setting.profile.require_fit(longest, played.info.max_response_tokens)
    entries = compete(names, steps, setting)
    folder, front = out_folder(out), undominated(entries)
    rows = [row_of(entry, entries[0], front) for entry in entries]
    bound = bounds(steps, setting.profile)
    config: Mapping[str, Any] = {
        "trace": trace, "source": played.info.source, "policies": names, "profile": profile, "nodes": nodes,
        "gpus_per_host": gpus_per_host, "prompts_per_step": prompts_per_step, "samples": samples, "cap": cap,
        "usd_per_gpu_hour": setting.usd_per_gpu_hour, "weight": weight, "tau": tau, "window": window,
        "learner_gpus": learner_gpus, "start": start, "speed_noise": speed_noise, "seed": seed,
        "static_actors": {entry.name: entry.actors for entry in entries},
    }  # fmt: skip
    result = {"config": config, "bound": dict(zip(("generation_s", "decode_gpu_s"), bound, strict=True)), "rows": rows}
    columns = list(rows[0])
    write_atomic(folder / "bakeoff.csv", csv_text(columns, [[row[name] for name in columns] for row in rows]))
    write_atomic(folder / "bakeoff.json", json_text(result | {"undominated": front}))
    scatter(entries, bound, front, folder / "bakeoff.png")
    if as_json:
        print((folder / "bakeoff.json").read_text(), end="")
        return
    data = setting.profile.data
    print_table(
        f"{played.info.dataset} on {nodes} {data.gpu}, {data.model}, {data.tp} GPUs an actor; mean of {len(steps)} "
        f"steps, ${setting.usd_per_gpu_hour:g} a GPU-hour; simulated; functions start {start}; static "
        "policies with the number of actors that is best for each in hindsight",
        [heading for heading, _ in HEADINGS],
        [
            [f"{row['policy']}{'' if row['synchronous'] else ' *'}", *(row[name] for _, name in HEADINGS[1:])]
            for row in rows
        ],
    )
    print(f"bound of a synchronous step, {data.tp} GPUs an actor: {bound[0]:.4g} s, {bound[1]:.4g} decode GPU-s a step")
    print(f"undominated in generation time and held GPU-s: {', '.join(front)}")
    print("* not synchronous: beside the others for its place, not for its gain")
    for entry in entries:
        if peer := PEERS.get(entry.name.removeprefix(ORACLE)):
            kind = "" if peer.gives_up is None else f"; * {peer.gives_up}"
            print(f"{entry.name}: {peer.paper}{kind}. Here: {peer.assumed}")
        if isinstance(entry.done, rounds.RoundsRun):
            print(f"{entry.name}, all prompts delivered in {len(entry.done.records)} steps: {told(entry.done)}")
    print(f"written to {folder}: {', '.join(FILES)}")


if __name__ == "__main__":
    run(app)
