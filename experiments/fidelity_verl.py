"""The simulator against the log of a real verl run: 210 steps of Qwen2-7B-Instruct on GSM8K and MATH, 8 GPUs, 1024 x 5.

The log gives statistics of each step's lengths, not the lengths: `traces.importers.verl` makes some that match. It
gives `timing_s/generate_sequences`, the mean over ranks of the time that the engines took (verl's reduce_timing), which
the simulator predicts as the mean over its four engines. It does not name the GPU: several are tried. Two numbers, a
factor on the profile and seconds an iteration, are fitted on every tenth step; all is judged on the others. Beside each
prediction stand baselines that need no simulator, fitted in the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.evidence import Evidence, compared
from experiments.output import Cell
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray, floats, ints
from rlhfless.types.cluster import GPUS
from rlhfless.types.profile import Profile
from rlhfless.units import MS
from sim.profiles import load, roofline
from sim.profiles.calibrate import Observation, drive_s, step_observation
from sim.profiles.common import UTILISATION
from sim.profiles.registry import model_shape
from sim.world import Training
from traces.importers import verl
from traces.load import steps as steps_of

LOG = "qwen2-7b_math.log"
"""The run, public in diqiuzhuanzhuan/verldata (MIT)."""
AGAINST = "verl log"
MODEL, TP, ENGINES = "qwen2.5-7b", 2, 4
"""Qwen2-7B has the layers, widths and heads of Qwen2.5-7B; the log's 8 GPUs are 4 engines at tensor-parallel size 2."""
SLOTS, MEMORY = 1024, 0.6
"""max_num_seqs and gpu_memory_utilization of the log's configuration."""
EVERY = 10
"""One step in so many calibrates."""
EARLY = 50
"""Steps before which lengths and engines are steady (seen in the log: the engines slow down after step 50)."""
GPU = "a100_sxm"
"""Whose profile the rows are of: the MFU that the log prints assumes 312 TFLOP/s, which verl does for A100 and A800."""
OTHERS = ("h100_sxm", "l40s")
TABLES = "qwen2.5-7b_l40s_tp2"
"""A shipped profile from measured operators, for the same question with another shape of latencies."""
OTHER_SPREAD = 0.43
"""Spread of log lengths below the cap for the other shape of lengths (measured on GSM8K's recorded solutions, 0.42, and
what the log's steps without a clipped response come to)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every step's time is linear in, speed * compute + overhead * iterations, for one profile and one draw."""

    compute_s: FloatArray
    """float[steps]: by the profile's tables, mean over the engines."""
    iterations: FloatArray
    """float[steps]: likewise."""

    def fit(self, measured_s: FloatArray, chosen: IntArray) -> tuple[float, float]:
        """(speed factor, overhead in seconds) of least squared relative error on the chosen steps, neither below 0.

        Not `sim.profiles.calibrate.calibrate`, whose observations are of the slowest engine of a step.
        """
        columns = np.stack([self.compute_s, self.iterations], axis=1)
        speed, overhead_s = _least_squares(columns, measured_s, chosen)
        if speed < 0:
            return 0.0, float(_least_squares(columns[:, 1:], measured_s, chosen)[0])
        if overhead_s < 0:
            return float(_least_squares(columns[:, :1], measured_s, chosen)[0]), 0.0
        return float(speed), float(overhead_s)

    def seconds(self, speed: float, overhead_s: float) -> FloatArray:
        """float[steps]: predicted."""
        return floats(speed * self.compute_s + overhead_s * self.iterations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All that came of it."""

    evidence: tuple[Evidence, ...]
    """Rows of the table."""
    candidates: tuple[dict[str, Cell], ...]
    """What was fitted for each profile that was tried."""
    implied_flops: float
    """FLOP/s at which verl's printed MFU would be 1: a lower bound, median over the steps."""
    step: IntArray
    """int[steps]: numbers of the steps."""
    measured_s: FloatArray
    """float[steps]: timing_s/generate_sequences."""
    once_s: FloatArray
    """float[steps]: predicted with one calibration for the whole run."""
    renewed_s: FloatArray
    """float[steps]: the same times measured over predicted of the last calibration step."""
    calibration: BoolArray
    """bool[steps]: calibration steps."""


def engine_profile(profile: Profile) -> Profile:
    """The profile with the log's slots and share of memory: decode rows go on beyond the grid at their last slope."""
    data, card = profile.data, GPUS[profile.data.gpu]
    batch, rows = data.decode_batch, data.decode_s
    half = int(np.searchsorted(batch, batch[-1] / 2))
    slope = (rows[-1] - rows[half]) / (batch[-1] - batch[half])
    less_bytes = data.tp * card.memory_bytes * (UTILISATION - MEMORY)
    changed = replace(
        data,
        decode_batch=ints([*batch, SLOTS]),
        decode_s=floats([*rows, rows[-1] + slope * (SLOTS - batch[-1])]),
        max_slots=SLOTS,
        kv_capacity_tokens=int(data.kv_capacity_tokens - less_bytes / data.kv_bytes_per_token),
        iteration_overhead_s=0.0,
    )
    return Profile(data=changed)


def observed(log: Path, seed: int, spread: float | None = None) -> tuple[Observation, ...]:
    """Every step with lengths that match it, dealt to the engines as verl deals a shuffled data set: in turns of
    contiguous prompts."""
    return tuple(
        step_observation(
            prompt_tokens=workload.prompt_tokens, response_tokens=outcome.response_tokens, actors=ENGINES, seconds=1.0
        )
        for workload, outcome in steps_of(verl.recorded(log, seed=seed, spread=spread))
    )


def work(profile: Profile, observations: tuple[Observation, ...]) -> Work:
    """Run every step's engines on the profile, twice: without overhead, and with one of a second."""
    bare = engine_profile(profile)
    slower = Profile(data=replace(bare.data, iteration_overhead_s=1.0))
    compute_s, slower_s = (
        floats([np.mean([drive_s(each, step, queue) for queue in step.actors]) for step in observations])
        for each in (bare, slower)
    )
    return Work(compute_s=compute_s, iterations=floats(slower_s - compute_s))


def renewed(predicted_s: FloatArray, measured_s: FloatArray, calibration: BoolArray) -> FloatArray:
    """float[steps]: predictions times measured over predicted of the last calibration step, the first at step 0."""
    last = np.maximum.accumulate(np.where(calibration, np.arange(calibration.size), 0))
    return floats(predicted_s * (measured_s / predicted_s)[last])


def line(columns: tuple[FloatArray, ...], measured: FloatArray, chosen: IntArray) -> FloatArray:
    """float[steps]: a constant and a slope for each column, of least squared relative error on the chosen steps."""
    matrix = np.stack([np.ones_like(measured), *columns], axis=1)
    return floats(matrix @ _least_squares(matrix, measured, chosen))


def _least_squares(matrix: FloatArray, measured: FloatArray, chosen: IntArray) -> FloatArray:
    found = np.linalg.lstsq(matrix[chosen] / measured[chosen, None], np.ones(chosen.size), rcond=None)
    return np.asarray(found[0])


def study(log: Path, seed: int, tick: Callable[[int], None]) -> Study:
    """The whole comparison; `tick` is told of each profile that is done, `PROFILES` in all."""
    logged = verl.read(log)
    steps = np.arange(len(logged))
    measured_s = floats([each.metric("timing_s/generate_sequences") for each in logged])
    calibration = steps % EVERY == 0
    given, held = ints(np.flatnonzero(calibration)), np.flatnonzero(~calibration)
    lengths = observed(log, seed)
    works = {}
    for name, profile in _profiles().items():
        works[name] = work(profile, lengths)
        tick(1)
    candidates = [_candidate(name, each, measured_s, given, held) for name, each in works.items()]
    own = next(iter(works.values()))
    other = work(roofline.build(model_shape(MODEL), GPU, TP), observed(log, seed, OTHER_SPREAD))
    tick(1)
    mean = floats([each.responses.mean for each in logged])
    most = floats([each.responses.most for each in logged])
    once_s = own.seconds(*own.fit(measured_s, given))

    scope = f"{len(steps)} steps of one run, GPU not named in the log; calibrated on every tenth, judged on the others"
    predictors = {
        "simulator": once_s,
        f"simulator, spread {OTHER_SPREAD:g}": other.seconds(*other.fit(measured_s, given)),
        "line in mean length": line((mean,), measured_s, given),
        "line in mean and max": line((mean, most), measured_s, given),
        "mean of calibration steps": floats(np.full(steps.size, measured_s[given].mean())),
    }
    quantity = "generation time, one calibration"
    evidence = [
        compared(predicted[held], measured_s[held], against=AGAINST, predictor=name, quantity=quantity, scope=scope)
        for name, predicted in predictors.items()
    ]
    quantity, scope = "generation time, rescaled at each tenth step", f"{scope}; speed of the last calibration step"
    evidence += [
        compared(
            renewed(predicted, measured_s, calibration)[held], measured_s[held],
            against=AGAINST, predictor=name.replace("mean of calibration steps", "last calibration step"),
            quantity=quantity, scope=scope,
        )
        for name, predicted in predictors.items()
    ]  # fmt: skip
    evidence += _further(works, logged, measured_s)
    evidence += _learning(logged, given, held)
    return Study(
        evidence=tuple(evidence),
        candidates=tuple(candidates),
        implied_flops=float(np.median([_implied_flops(each) for each in logged])),
        step=ints([each.step for each in logged]),
        measured_s=measured_s,
        once_s=once_s,
        renewed_s=renewed(once_s, measured_s, calibration),
        calibration=calibration,
    )


def _profiles() -> dict[str, Profile]:
    shape = model_shape(MODEL)
    found = {f"{gpu}, data sheet": roofline.build(shape, gpu, TP) for gpu in (GPU, *OTHERS)}
    return found | {"l40s, operator tables": load(TABLES)}


PROFILES = len(OTHERS) + 3
"""Runs of every step's engines: each GPU's data sheet, the tables, and the first again on other lengths."""


def _candidate(name: str, each: Work, measured_s: FloatArray, given: IntArray, held: IntArray) -> dict[str, Cell]:
    speed, overhead_s = each.fit(measured_s, given)
    fitted = each.seconds(speed, overhead_s)
    calibration = np.isin(np.arange(measured_s.size), given)
    cells: dict[str, Cell] = {"profile": name, "speed": speed, "overhead_ms": overhead_s / MS}
    for label, predicted in (
        ("before", each.compute_s),
        ("once", fitted),
        ("renewed", renewed(fitted, measured_s, calibration)),
    ):
        row = compared(predicted[held], measured_s[held], against=AGAINST, quantity="", scope="")
        cells |= {f"{label}_mean": row.mean, f"{label}_median": row.median, f"{label}_r": row.r}
    return cells


def _further(works: Mapping[str, Work], logged: tuple[verl.LoggedStep, ...], measured_s: FloatArray) -> list[Evidence]:
    """Out of range: from the run's first steps to those whose responses are longer on average than any of theirs. All
    ten choices of every tenth step, and each step alone: errors are over all of them, for a single one may be lucky.
    """
    mean = floats([each.responses.mean for each in logged])
    tokens = floats([each.responses.mean + each.prompts.mean for each in logged])
    late = np.flatnonzero(mean > mean[:EARLY].max())
    longer = mean[late] / mean[:EARLY].mean()
    fives = [ints(np.arange(first, EARLY, EVERY)) for first in range(EVERY)]
    ones = [ints([step]) for step in range(EARLY)]
    predicted = {
        (f"simulator, {name}", "5 steps"): [each.seconds(*each.fit(measured_s, chosen)) for chosen in fives]
        for name, each in works.items()
    }
    predicted["line in mean length", "5 steps"] = [line((mean,), measured_s, chosen) for chosen in fives]
    own = next(iter(works.values())).compute_s
    for name, each in (
        ("simulator, speed alone", own),
        ("in proportion to response tokens", mean),
        ("in proportion to all tokens", tokens),
    ):
        predicted[name, "1 step"] = [each * (measured_s[step] / each[step]) for step in ones]
    return [
        compared(
            np.concatenate([each[late] for each in found]), np.tile(measured_s[late], len(found)),
            against=AGAINST, predictor=name, quantity=f"late steps from {given} of the first {EARLY}",
            scope=f"{late.size} later steps, responses {longer.min():.1f} to {longer.max():.1f} times as long; over "
            f"all {len(found)} choices of what calibrates",
        )
        for (name, given), found in predicted.items()
    ]  # fmt: skip


FORWARD, UPDATE = "old_log_prob", "update_actor"
"""What a step spends on learning. The run has no reference model and no critic; rewards and advantages take 2 s of a
step's 400 and are no work of the GPUs."""


def _learning(logged: tuple[verl.LoggedStep, ...], given: IntArray, held: IntArray) -> list[Evidence]:
    """The learner, fitted like the others: in proportion to tokens, and with fixed seconds of each pass beside it."""
    tokens = floats([each.metric("perf/total_num_tokens") for each in logged])
    forward_s, update_s = (floats([each.metric(f"timing_s/{name}") for each in logged]) for name in (FORWARD, UPDATE))
    parameters, gpu, gpus = float(model_shape(MODEL).parameters), GPUS[GPU], ENGINES * TP
    found = []
    for name, fixed in (("in proportion to tokens", False), ("fixed seconds and tokens", True)):
        fit = Training.fitted(
            parameters, tokens[given], forward_s[given], update_s[given], gpu, gpus, fixed=fixed
        )  # fmt: skip
        forward = floats([fit.forward_s(parameters, each, gpu, gpus) for each in tokens])
        update = floats([fit.update_s(parameters, each, gpu, gpus) for each in tokens])
        for quantity, predicted, measured, scope in (
            (FORWARD, forward, forward_s, f"MFU {fit.forward_mfu:.2f} of {GPU} beside {fit.forward_fixed_s:.1f} s"),
            (UPDATE, update, update_s, f"MFU {fit.train_mfu:.2f} of {GPU} beside {fit.update_fixed_s:.1f} s"),
            (f"{FORWARD} + {UPDATE}", forward + update, forward_s + update_s, "both passes"),
        ):
            found.append(
                compared(
                    floats(predicted[held]), floats(measured[held]), against=AGAINST, predictor=f"simulator, {name}",
                    quantity=quantity, scope=f"fitted on every tenth step: {scope}",
                )
            )  # fmt: skip
    return [row for pair in zip(found[:3], found[3:], strict=True) for row in pair]


def _implied_flops(step: verl.LoggedStep) -> float:
    """Peak FLOP/s of a GPU that verl's MFU assumes: FLOPs of the update over its time, GPUs and MFU.

    As verl counts: 6 a parameter and token, 12 * layers * width for each pair of tokens. The sum of squared lengths is
    taken at its least, as if all were equal, so that this is a lower bound.
    """
    shape, tokens = model_shape(MODEL), step.metric("perf/total_num_tokens")
    length = step.prompts.mean + step.responses.mean
    weights = shape.layers * shape.matrix_per_layer + 2 * shape.vocab * shape.hidden
    flops = tokens * (6 * weights + 12 * shape.layers * shape.heads * shape.head_dim * length)
    return flops / (step.metric("timing_s/update_actor") * ENGINES * TP * step.metric("perf/mfu/actor"))
