"""What a step costs: GPU-seconds per function, idle time by cause, dollars.

Each step is counted twice. Executed GPU-seconds are those in which a function works, as the paper counts (RLHFless §6:
GPU x second per function invocation). Held GPU-seconds run from the moment GPUs are held to their release, start-up and
loading of weights included; dollars are paid for them. Reserved GPUs are held all step long, whatever runs on them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from math import fsum, isclose, isfinite
from typing import NamedTuple

from rlhfless.errors import InputError
from rlhfless.types.report import IDLE, WORK, Activity, Invocation, StepReport
from rlhfless.units import HOUR_S

FUNCTIONS = ("prefill", "decode", "reward", "reference", "critic", "learner")
"""Functions of a training step, in the order in which they work."""
UNCOVERED: Activity = "wait-phase"
"""Cause of a reserved GPU's time that no function holds: another phase is running elsewhere."""
TOLERANCE = 1e-9
"""Relative error that rounding may leave in sums of times (chosen: far above double precision, far below a result)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionBill:
    """One function's share of a bill, all its invocations together."""

    function: str
    """prefill, decode, reward, reference, critic or learner."""
    invocations: int
    """How often it was invoked."""
    executed_gpu_s: float
    """GPU-seconds in which it worked."""
    held_gpu_s: float
    """GPU-seconds from holding its GPUs to their release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What one step, or several together, cost. Bills add; components add up to the totals (law 4)."""

    functions: tuple[FunctionBill, ...]
    """All six, in the order of `FUNCTIONS`; those that did not run cost nothing."""
    idle_gpu_s: tuple[tuple[Activity, float], ...]
    """(cause, GPU-seconds held without use), all causes in the order of `IDLE`."""
    uncovered_gpu_s: float
    """GPU-seconds of reserved GPUs that no function held, contained in the idle time of `UNCOVERED`."""
    executed_gpu_s: float
    """GPU-seconds of all functions' work."""
    held_gpu_s: float
    """GPU-seconds billed: executed and idle, or every function's held time and what no function held."""
    usd: float
    """Price of the GPU-seconds held."""

    def __post_init__(self) -> None:
        def same(parts: Iterable[float], total: float) -> bool:
            return isclose(fsum(parts), total, rel_tol=TOLERANCE, abs_tol=TOLERANCE)

        functions = self.functions
        assert tuple(entry.function for entry in functions) == FUNCTIONS, "a bill lists every function, in order"
        assert tuple(cause for cause, _ in self.idle_gpu_s) == IDLE, "a bill lists every cause, in order"
        assert same((entry.executed_gpu_s for entry in functions), self.executed_gpu_s), "executed time does not add up"
        held = (self.uncovered_gpu_s, *(entry.held_gpu_s for entry in functions))
        assert same(held, self.held_gpu_s), "held time does not add up over functions"
        parts = (self.executed_gpu_s, *(seconds for _, seconds in self.idle_gpu_s))
        assert same(parts, self.held_gpu_s), "held time is not executed and idle time"
        assert min(*parts, *held, self.usd) >= 0, "a negative cost"
        assert self.held_gpu_s >= self.executed_gpu_s * (1 - TOLERANCE), "used more than billed"

    def function(self, name: str) -> FunctionBill:
        """The share of one function."""
        return self.functions[FUNCTIONS.index(name)]

    def idle(self, cause: Activity) -> float:
        """GPU-seconds held without use for one cause."""
        return self.idle_gpu_s[IDLE.index(cause)][1]

    def __add__(self, other: "Bill") -> "Bill":
        return total((self, other))


def bill(report: StepReport, usd_per_gpu_hour: float) -> Bill:
    """Bill one step.

    Serverless (`reserved_gpus` 0): every invocation pays for its GPUs from its first span to its last. Reserved: the
    reserved GPUs are paid from 0 to `step_s`; where spans overlap on a GPU, `share_gpu` says which one it counts for;
    time before 0 belongs to the step before.

    Raises InputError for a price below 0 or not finite, and for a report that breaks its own rules: an unknown
    function, spans with gaps or out of order, GPUs beyond the reservation, work that overlaps on a reserved GPU.
    """
    if not (isfinite(usd_per_gpu_hour) and usd_per_gpu_hour >= 0):
        raise InputError(f"price of {usd_per_gpu_hour} USD per GPU-hour: it must be a finite number, at least 0")
    _check(report)
    counts = dict.fromkeys(FUNCTIONS, 0)
    for invocation in report.invocations:
        counts[invocation.function] += 1
    executed: dict[str, list[float]] = {function: [] for function in FUNCTIONS}
    held: dict[str, list[float]] = {function: [] for function in FUNCTIONS}
    idle: dict[Activity, list[float]] = {cause: [] for cause in IDLE}
    for function, activity, gpu_s in _reserved(report) if report.reserved_gpus else _serverless(report):
        held[function].append(gpu_s)
        (executed[function] if activity in WORK else idle[activity]).append(gpu_s)
    covered_gpu_s = fsum(gpu_s for parts in held.values() for gpu_s in parts)
    held_gpu_s = report.reserved_gpus * report.step_s if report.reserved_gpus else covered_gpu_s
    uncovered_gpu_s = max(0.0, held_gpu_s - covered_gpu_s)
    idle[UNCOVERED].append(uncovered_gpu_s)
    return Bill(
        functions=tuple(
            FunctionBill(
                function=function,
                invocations=counts[function],
                executed_gpu_s=fsum(executed[function]),
                held_gpu_s=fsum(held[function]),
            )
            for function in FUNCTIONS
        ),
        idle_gpu_s=tuple((cause, fsum(parts)) for cause, parts in idle.items()),
        uncovered_gpu_s=uncovered_gpu_s,
        executed_gpu_s=fsum(gpu_s for parts in executed.values() for gpu_s in parts),
        held_gpu_s=held_gpu_s,
        usd=held_gpu_s / HOUR_S * usd_per_gpu_hour,
    )


def total(bills: Iterable[Bill]) -> Bill:
    """The bills added up; of none, a bill of zeros."""
    parts = tuple(bills)
    shares = [(name, [part.functions[row] for part in parts]) for row, name in enumerate(FUNCTIONS)]
    return Bill(
        functions=tuple(
            FunctionBill(
                function=name,
                invocations=sum(entry.invocations for entry in entries),
                executed_gpu_s=fsum(entry.executed_gpu_s for entry in entries),
                held_gpu_s=fsum(entry.held_gpu_s for entry in entries),
            )
            for name, entries in shares
        ),
        idle_gpu_s=tuple((cause, fsum(part.idle_gpu_s[row][1] for part in parts)) for row, cause in enumerate(IDLE)),
        uncovered_gpu_s=fsum(part.uncovered_gpu_s for part in parts),
        executed_gpu_s=fsum(part.executed_gpu_s for part in parts),
        held_gpu_s=fsum(part.held_gpu_s for part in parts),
        usd=fsum(part.usd for part in parts),
    )


class Stretch(NamedTuple):
    """A stretch of time in which a GPU does one thing."""

    start_s: float
    """Beginning."""
    end_s: float
    """End, after start_s."""
    invocation: int
    """Row of the invocation."""
    activity: Activity
    """What it does."""


def share_gpu(spans: Iterable[Stretch], rank: Mapping[int, int]) -> list[Stretch]:
    """What one GPU does at each moment although the spans of its functions overlap: disjoint stretches, in order.

    Work goes before idling, and among idle functions the one that held the GPU first (the lowest `rank`): a function
    that starts up while another works or waits costs nothing more.
    """
    pending = sorted(span for span in spans if span.end_s > span.start_s)
    bounds = sorted({time_s for span in pending for time_s in span[:2]})
    active: list[tuple[bool, int, Stretch]] = []
    stretches: list[Stretch] = []
    last: Stretch | None = None
    arrived = 0
    for start_s, end_s in pairwise(bounds):
        while arrived < len(pending) and pending[arrived].start_s <= start_s:
            span = pending[arrived]
            heappush(active, (span.activity not in WORK, rank[span.invocation], span))
            arrived += 1
        while active and active[0][2].end_s <= start_s:
            heappop(active)
        owner = active[0][2] if active else None
        if owner is not None:
            begin_s = stretches.pop().start_s if owner is last else start_s
            stretches.append(owner._replace(start_s=begin_s, end_s=end_s))
        last = owner
    return stretches


def timelines(invocations: Sequence[Invocation]) -> Iterator[tuple[tuple[int, ...], list[Stretch]]]:
    """(GPUs, what each of them does), by lowest GPU number. GPUs that serve the same invocations come together."""
    by_start = sorted(range(len(invocations)), key=lambda row: (invocations[row].start_s, row))
    rank = {row: place for place, row in enumerate(by_start)}
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, invocation in enumerate(invocations):
        for gpu in invocation.gpus:
            rows_of[gpu].append(row)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for gpu in sorted(rows_of):
        groups[tuple(rows_of[gpu])].append(gpu)
    for rows, gpus in groups.items():
        spans = (
            Stretch(span.start_s, span.end_s, row, span.activity) for row in rows for span in invocations[row].spans
        )
        yield tuple(gpus), share_gpu(spans, rank)


def _serverless(report: StepReport) -> Iterator[tuple[str, Activity, float]]:
    for invocation in report.invocations:
        for span in invocation.spans:
            yield invocation.function, span.activity, (span.end_s - span.start_s) * len(invocation.gpus)


def _reserved(report: StepReport) -> Iterator[tuple[str, Activity, float]]:
    for gpus, stretches in timelines(report.invocations):
        for stretch in stretches:
            inside_s = min(stretch.end_s, report.step_s) - max(stretch.start_s, 0.0)
            if inside_s > 0:
                yield report.invocations[stretch.invocation].function, stretch.activity, inside_s * len(gpus)


def _check(report: StepReport) -> None:
    """Raise InputError unless the report keeps the rules that a bill relies on."""
    where = f"report of step {report.step} ({report.policy})"
    for invocation in report.invocations:
        who = f"{where}: {invocation.function} {invocation.index}"
        if invocation.function not in FUNCTIONS:
            raise InputError(f"{who}: unknown function; known are {', '.join(FUNCTIONS)}")
        if not invocation.spans or not invocation.gpus:
            raise InputError(
                f"{who} has {len(invocation.spans)} spans on {len(invocation.gpus)} GPUs; neither may be 0"
            )
        if len(set(invocation.gpus)) != len(invocation.gpus):
            raise InputError(f"{who} holds a GPU twice: {invocation.gpus}")
        for span in invocation.spans:
            if not (isfinite(span.start_s) and isfinite(span.end_s) and span.end_s >= span.start_s):
                raise InputError(f"{who}: {span.activity} from {span.start_s} s to {span.end_s} s; it must not go back")
        for before, after in pairwise(invocation.spans):
            if not isclose(before.end_s, after.start_s, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                raise InputError(
                    f"{who}: {before.activity} ends at {before.end_s} s and {after.activity} begins at "
                    f"{after.start_s} s; spans must follow without a gap"
                )
    if report.reserved_gpus:
        _check_reserved(report, where)


def _check_reserved(report: StepReport, where: str) -> None:
    used = {gpu for invocation in report.invocations for gpu in invocation.gpus}
    if len(used) > report.reserved_gpus:
        raise InputError(f"{where}: functions on {len(used)} GPUs, only {report.reserved_gpus} are reserved")
    shared = fsum(gpu_s for _, activity, gpu_s in _reserved(report) if activity in WORK)
    alone = fsum(gpu_s for _, activity, gpu_s in _serverless(report) if activity in WORK)
    if not isclose(shared, alone, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        raise InputError(
            f"{where}: {alone} GPU-seconds of work, of which {shared} fit on reserved GPUs within the step; "
            "functions must not work on one GPU at once, nor outside the step"
        )
