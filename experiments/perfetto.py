"""Steps as a trace for ui.perfetto.dev or chrome://tracing: a process per host, a row per GPU, a slice per activity.

The JSON trace event format: complete events (`ph` X) with `ts` and `dur` in microseconds, metadata events (`ph` M) that
name and order the rows. Times are rounded to nanoseconds, Perfetto's own resolution.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.output import atomic_file
from rlhfless.accounting.billing import timelines
from rlhfless.errors import InputError
from rlhfless.types.cluster import Cluster
from rlhfless.types.report import Invocation, StepReport

Event = dict[str, Any]

NS_PER_S = 1e9
NS_PER_US = 1000


def trace_events(reports: Sequence[StepReport], cluster: Cluster) -> dict[str, Any]:
    """The whole trace as a value. Raises InputError for a GPU that the cluster does not have."""
    return {"traceEvents": list(_events(reports, cluster)), "displayTimeUnit": "ms"}


def write(path: Path, reports: Sequence[StepReport], cluster: Cluster) -> None:
    """Write the trace, event by event. Raises InputError for an unknown GPU or a path that cannot be written."""
    with atomic_file(path) as file:
        separator = b'{"traceEvents":[\n'
        for event in _events(reports, cluster):
            file.write(separator + json.dumps(event, separators=(",", ":")).encode())
            separator = b",\n"
        file.write((b"" if separator[:1] == b"," else separator) + b'\n],"displayTimeUnit":"ms"}\n')


def _events(reports: Sequence[StepReport], cluster: Cluster) -> Iterator[Event]:
    """Steps lie one after the other by their start, shifted so that nothing begins before 0.

    Functions overlap on a GPU (one starts up while another works, also across steps); a row shows what the GPU counts
    for, as `timelines` decides. Threads are numbered GPU + 1, the processes behind them: some readers take 0 for idle.
    """
    invocations: list[Invocation] = []
    step_of: list[StepReport] = []
    for report in reports:
        for invocation in report.invocations:
            spans = tuple(
                replace(span, start_s=report.start_s + span.start_s, end_s=report.start_s + span.end_s)
                for span in invocation.spans
            )
            invocations.append(replace(invocation, spans=spans))
            step_of.append(report)
    starts_s = [invocation.start_s for invocation in invocations] + [report.start_s for report in reports]
    shift_s = -min(0.0, *starts_s) if starts_s else 0.0
    used = sorted({gpu for invocation in invocations for gpu in invocation.gpus})
    if used and used[-1] >= cluster.gpus:
        raise InputError(f"trace: a function runs on GPU {used[-1]}, the cluster has {cluster.gpus}")

    def slice_event(pid: int, tid: int, name: str, start_s: float, end_s: float, args: Event) -> Event:
        start_ns, end_ns = (round((time_s + shift_s) * NS_PER_S) for time_s in (start_s, end_s))
        span = {"ts": start_ns / NS_PER_US, "dur": (end_ns - start_ns) / NS_PER_US}
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, **span, "args": args}

    steps_row, phases_row, steps_pid = cluster.gpus + 1, cluster.gpus + 2, cluster.gpus + 3
    if reports:
        yield from _names("process", steps_pid, steps_pid, "steps", 0)
        for row, name in ((steps_row, "steps"), (phases_row, "phases")):
            yield from _names("thread", steps_pid, row, name, row)
    host_of = cluster.host_of.tolist()
    for host in sorted({host_of[gpu] for gpu in used}):
        yield from _names("process", steps_pid + 1 + host, steps_pid + 1 + host, f"host {host}", host + 1)
    for gpu in used:
        yield from _names("thread", steps_pid + 1 + host_of[gpu], gpu + 1, f"GPU {gpu}", gpu)

    for report in reports:
        args = {"policy": report.policy, "step": report.step, "epoch": report.epoch}
        end_s = report.start_s + report.step_s
        yield slice_event(steps_pid, steps_row, f"step {report.step}", report.start_s, end_s, args)
        for phase in report.phases:
            start_s, end_s = report.start_s + phase.start_s, report.start_s + phase.end_s
            yield slice_event(steps_pid, phases_row, phase.name, start_s, end_s, args)
    for gpus, stretches in timelines(invocations):
        for gpu in gpus:
            for stretch in stretches:
                invocation, report = invocations[stretch.invocation], step_of[stretch.invocation]
                args = {
                    "function": invocation.function,
                    "index": invocation.index,
                    "activity": stretch.activity,
                    "step": report.step,
                }
                pid = steps_pid + 1 + host_of[gpu]
                yield slice_event(pid, gpu + 1, stretch.activity, stretch.start_s, stretch.end_s, args)


def _names(kind: str, pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    """Metadata that names a process or thread and says where it is shown."""
    yield {"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_sort_index", "args": {"sort_index": order}}
