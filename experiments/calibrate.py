"""`python -m experiments.calibrate PROFILE TRACE`: fit a profile to a recorded run.

A recorded trace says which responses each actor ran and when; `sim.profiles.calibrate` fits the profile's overhead (and
speed) to the actors' times. The command stands here because only experiments may join the simulator and traces. Use
runs without cuts: of a response that moved, a trace names the last actor alone.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments import options
from experiments.output import json_text
from rlhfless.commands import run
from rlhfless.errors import InputError
from rlhfless.types.arrays import FloatArray, ints
from rlhfless.types.profile import Profile
from sim.profiles import calibrate as calibration
from sim.profiles import load
from sim.profiles.calibrate import Observation
from sim.profiles.registry import write_profile
from traces.format import Trace

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def observations_of(trace: Trace, profile: Profile, *, delivered: bool = False) -> list[Observation]:
    """One observation an actor and step: first admission to last token, its queue in the order of admission.

    `delivered`: a prefill actor computed the prompts. Raises InputError where the trace has no times or actors, or an
    actor ran more responses at once than the profile has slots.
    """
    start_s, end_s, actor = trace.start_s, trace.end_s, trace.actor
    if start_s is None or end_s is None or actor is None or np.isnan(start_s).any() or (actor < 0).any():
        raise InputError("trace: not every response has start_s, end_s and actor; only recorded runs have")
    found = []
    runs = np.stack([trace.epoch, trace.step], axis=1)
    for group, (epoch, step) in enumerate(np.unique(runs, axis=0).tolist()):
        rows = np.flatnonzero((trace.epoch == epoch) & (trace.step == step))
        lengths = trace.response_tokens[rows].reshape(-1, trace.n)
        prompt_tokens = trace.prompt_tokens[trace.prompt[rows[:: trace.n]]]
        for index in np.unique(actor[rows]).tolist():
            queue = np.flatnonzero(actor[rows] == index)
            starts_s, ends_s = start_s[rows[queue]], end_s[rows[queue]]
            where = f"trace: epoch {epoch}, step {step}, actor {index}"
            if (most := at_once(starts_s, ends_s)) > profile.data.max_slots:
                raise InputError(
                    f"{where} ran {most} responses at once, profile {profile.data.name} has {profile.data.max_slots} "
                    "slots; take the profile of that engine"
                )
            if not ends_s.max() > starts_s.min():
                raise InputError(f"{where} took no time")
            found.append(
                Observation(
                    prompt_tokens=ints(prompt_tokens),
                    response_tokens=ints(lengths),
                    actors=(ints(queue[np.argsort(starts_s, kind="stable")]),),
                    seconds=float(ends_s.max() - starts_s.min()),
                    group=group,
                    delivered=delivered,
                )
            )
    return found


def at_once(starts_s: FloatArray, ends_s: FloatArray) -> int:
    """The most intervals that overlap; one that ends as another starts does not count with it."""
    times = np.concatenate([ends_s, starts_s])
    change = np.repeat([-1, 1], [ends_s.size, starts_s.size])
    order = np.argsort(times, kind="stable")
    return int(np.cumsum(change[order]).max())


@app.command()
def calibrate(
    profile: Annotated[str, typer.Argument(help="Name of a shipped profile, or a profile file.")],
    trace: Annotated[Path, typer.Argument(help="A recorded trace (.parquet or .jsonl).")],
    out: Annotated[Path | None, typer.Option("--out", help="The profile file to write; default: none.")] = None,
    model: Annotated[
        str, typer.Option("--model", help=f"What to fit: auto, {', '.join(calibration.MODELS)}.")
    ] = "auto",
    delivered: Annotated[bool, typer.Option("--delivered", help="A prefill actor computed the prompts.")] = False,
    as_json: options.Json = False,
) -> None:
    """Fit a profile's iteration overhead (and speed) to a recorded run."""
    known = load(profile)
    try:
        observed = observations_of(Trace.read(trace), known, delivered=delivered)
    except InputError as error:
        message = str(error)
        raise InputError(message if message.startswith(str(trace)) else f"{trace}: {message}") from None
    found = calibration.calibrate(known, observed, model)
    if out is not None:
        write_profile(found.profile, out)
    if as_json:
        facts = {name: getattr(found, name) for name in ("model", "overhead_s", "speed", "before", "after", "held_out")}
        print(json_text(facts | {"profile": known.data.name}), end="")
        return
    for line in calibration.summary(found):
        print(line)
    if out is not None:
        print(out)


if __name__ == "__main__":
    run(app)
