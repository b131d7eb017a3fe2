"""Traces: rows that Perfetto can draw, whatever overlaps. Output helpers and figures: whole files, equal bytes."""

import io
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.output import csv_text, json_text, out_folder, print_table, progress, write_atomic
from experiments.perfetto import trace_events, write
from experiments.plots import ScaleRow, gantt, scale_figure
from rlhfless.accounting.metrics import Series
from rlhfless.errors import InputError
from rlhfless.types.arrays import floats, ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.report import IDLE, SCHEMA, WORK, Activity, Counters, Invocation, Phase, Span, StepReport

CLUSTER = Cluster.uniform("l40s", 12)


def invocation(function: str, gpus: tuple[int, ...], start_s: float, *parts: tuple[Activity, float]) -> Invocation:
    spans, at_s = [], start_s
    for activity, end_s in parts:
        spans.append(Span(activity=activity, start_s=at_s, end_s=end_s))
        at_s = end_s
    return Invocation(function=function, index=0, gpus=gpus, spans=tuple(spans))


def report(*invocations: Invocation, start_s: float = 0.0) -> StepReport:
    return StepReport(
        schema=SCHEMA,
        policy="test",
        step=0,
        epoch=0,
        start_s=start_s,
        prompt_ids=ints([0]),
        responses_per_prompt=1,
        tokens=ints([5]),
        first_s=floats([0.0]),
        end_s=floats([6.0]),
        actor=ints([0]),
        moves=ints([0]),
        invocations=invocations,
        phases=(
            Phase(name="generation", start_s=0.0, end_s=6.0),
            Phase(name="preparation", start_s=6.0, end_s=7.0),
            Phase(name="learning", start_s=7.0, end_s=10.0),
        ),
        reserved_gpus=0,
        counters=Counters(
            prefill_tokens=0,
            decode_prefill_tokens=0,
            recomputed_tokens=0,
            decoded_tokens=0,
            preemptions=0,
            cuts=0,
            moves=0,
            failures=0,
            moved_kv_bytes=0.0,
        ),
    )


STEP = report(
    invocation("decode", (9, 2), -1.5, ("start-up", 0.0), ("decode", 6.0)),
    invocation("learner", (0,), 6.0, ("start-up", 7.0), ("train", 10.0)),
)


def rows_of(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """(pid, tid) -> its slices as (start, end, name) in ns, in order."""
    rows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            rows[event["pid"], event["tid"]].append((start, start + length, event["name"]))
    return {key: sorted(slices) for key, slices in rows.items()}


def names_of(trace: dict[str, Any], kind: str) -> dict[tuple[int, int], Any]:
    return {
        (event["pid"], event["tid"]): next(iter(event["args"].values()))
        for event in trace["traceEvents"]
        if event["name"] == kind
    }


def test_rows_are_gpus_by_number_under_their_hosts() -> None:
    trace = trace_events([STEP], CLUSTER)
    threads, order = names_of(trace, "thread_name"), names_of(trace, "thread_sort_index")
    gpus = {key: name for key, name in threads.items() if name.startswith("GPU")}
    assert sorted(gpus.values()) == ["GPU 0", "GPU 2", "GPU 9"]
    assert {name: order[key] for key, name in gpus.items()} == {"GPU 0": 0, "GPU 2": 2, "GPU 9": 9}
    hosts = {pid: name for (pid, _), name in names_of(trace, "process_name").items()}
    assert {name: hosts[pid] for (pid, _), name in gpus.items()} == {
        "GPU 0": "host 0",
        "GPU 2": "host 0",
        "GPU 9": "host 1",
    }
    assert len(set(threads)) == len({tid for _, tid in threads}), "thread numbers are unique across processes"


def test_times_are_shifted_microseconds() -> None:
    trace = trace_events([STEP], CLUSTER)
    rows = {names_of(trace, "thread_name")[key]: slices for key, slices in rows_of(trace).items()}
    second = 1_000_000_000
    assert rows["GPU 9"] == [(0, 3 * second // 2, "start-up"), (3 * second // 2, 15 * second // 2, "decode")]
    assert rows["steps"] == [(3 * second // 2, 23 * second // 2, "step 0")]
    assert [name for _, _, name in rows["phases"]] == ["generation", "preparation", "learning"]


def test_steps_that_begin_late_stay_where_they_are() -> None:
    trace = trace_events([replace(STEP, start_s=50.0)], CLUSTER)
    assert [event["ts"] for event in trace["traceEvents"] if event["name"] == "step 0"] == [50e6]


def test_start_up_during_the_step_before_gives_way_to_its_work() -> None:
    after = replace(STEP, step=1, start_s=10.0, invocations=(invocation("decode", (0,), -2.5, ("start-up", 4.0)),))
    trace = trace_events([STEP, after], CLUSTER)
    rows = {names_of(trace, "thread_name")[key]: slices for key, slices in rows_of(trace).items()}
    assert [(name, (end - start) / 1e9) for start, end, name in rows["GPU 0"]] == [
        ("start-up", 1.0),
        ("train", 3.0),
        ("start-up", 4.0),
    ]


def test_a_gpu_beyond_the_cluster_is_refused(tmp_path: Path) -> None:
    small = Cluster.uniform("l40s", 4)
    with pytest.raises(InputError, match="GPU 9, the cluster has 4"):
        trace_events([STEP], small)
    with pytest.raises(InputError, match="GPU 9"):
        write(tmp_path / "trace.json", [STEP], small)
    assert list(tmp_path.iterdir()) == [], "nothing is left half-written"


@st.composite
def random_reports(draw: st.DrawFn) -> list[StepReport]:
    times = st.floats(-5, 12, allow_nan=False)
    reports = []
    for step in range(draw(st.integers(1, 3))):
        made = []
        for _ in range(draw(st.integers(0, 5))):
            marks = sorted(draw(st.lists(times, min_size=2, max_size=5)))
            parts = [(draw(st.sampled_from((*WORK, *IDLE))), end_s) for end_s in marks[1:]]
            gpus = tuple(sorted(draw(st.sets(st.integers(0, 11), min_size=1, max_size=4))))
            made.append(invocation("decode", gpus, marks[0], *parts))
        reports.append(report(*made, start_s=step * 10.0))
    return reports


@given(random_reports())
def test_slices_of_a_row_never_overlap_nor_begin_before_0(reports: list[StepReport]) -> None:
    for slices in rows_of(trace_events(reports, CLUSTER)).values():
        assert slices[0][0] >= 0
        for (_, end, _), (start, _, _) in pairwise(slices):
            assert end <= start


def test_what_is_written_reads_back_and_is_the_same_every_time(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    write(one, [STEP], CLUSTER)
    write(two, [STEP], CLUSTER)
    assert one.read_bytes() == two.read_bytes()
    assert json.loads(one.read_bytes()) == trace_events([STEP], CLUSTER)
    write(one, [], CLUSTER)
    assert json.loads(one.read_bytes()) == {"traceEvents": [], "displayTimeUnit": "ms"}


def over_seeds(value: float) -> Series:
    return Series(values=floats([0.9 * value, value, 1.1 * value]))


def scale_rows() -> list[ScaleRow]:
    return [
        ScaleRow(
            gpus=gpus,
            cap_tokens=2048,
            policy=policy,
            generation_s=over_seeds(factor * 100 / gpus),
            step_s=over_seeds(factor * 120 / gpus),
            executed_gpu_s=over_seeds(factor * 90),
            held_gpu_s=over_seeds(factor * 110),
        )
        for policy, factor in (("ours", 0.8), ("theirs", 1.0))
        for gpus in (8, 16)
    ]


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_figures_have_the_same_bytes_every_time(tmp_path: Path, kind: str) -> None:
    pictures = []
    for name in ("one", "two"):
        gantt(STEP, tmp_path / f"{name}.{kind}", CLUSTER)
        scale_figure(scale_rows(), tmp_path / f"{name}-scale.{kind}", "ours", "theirs")
        pictures.append([(tmp_path / f"{name}{end}.{kind}").read_bytes() for end in ("", "-scale")])
    assert pictures[0] == pictures[1]
    assert all(len(picture) > 1000 for picture in pictures[0])


def test_a_gantt_of_many_gpus_has_a_row_per_invocation(tmp_path: Path) -> None:
    large = Cluster.uniform("l40s", 80)
    many = report(*(invocation("decode", (2 * n, 2 * n + 1), 0.0, ("decode", 6.0)) for n in range(40)))
    gantt(many, tmp_path / "many.svg", large)
    few = replace(many, invocations=many.invocations[:20])
    gantt(few, tmp_path / "few.svg", large)
    assert "invocation" in (tmp_path / "many.svg").read_text().replace("\n", "")
    assert (tmp_path / "many.svg").read_text().count("<!-- decode") == 41, "40 rows and the legend"
    assert (tmp_path / "few.svg").read_text().count("<!-- decode") == 1, "the legend alone; rows are GPU numbers"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no rows for ours"),
        (scale_rows()[:2], "no rows for theirs"),
        (scale_rows()[:3], "the baseline theirs did not"),
        (scale_rows() + scale_rows()[:1], "two rows for ours"),
        ([*scale_rows()[1:], replace(scale_rows()[0], step_s=over_seeds(0.0))], "a time or cost of 0"),
    ],
)
def test_scale_rows_that_make_no_figure(tmp_path: Path, rows: list[ScaleRow], message: str) -> None:
    with pytest.raises(InputError, match=message):
        scale_figure(rows, tmp_path / "scale.png", "ours", "theirs")


def test_figures_that_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.gif: unknown kind of figure"):
        gantt(STEP, tmp_path / "step.gif", CLUSTER)
    with pytest.raises(InputError, match="no invocations"):
        gantt(report(), tmp_path / "step.png", CLUSTER)
    with pytest.raises(InputError, match="GPU 9"):
        gantt(STEP, tmp_path / "step.png", Cluster.uniform("l40s", 4))


def test_write_atomic_replaces_whole_files_only(tmp_path: Path) -> None:
    path = tmp_path / "result.txt"
    write_atomic(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    with pytest.raises(TypeError):
        write_atomic(path, 3)  # type: ignore[arg-type]
    assert path.read_bytes() == b"two"
    assert [one.name for one in tmp_path.iterdir()] == ["result.txt"]
    with pytest.raises(InputError, match="cannot write"):
        write_atomic(tmp_path / "missing" / "result.txt", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        write_atomic(tmp_path / "folder", "")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "result.txt"]


def test_out_folder_is_made_or_refused(tmp_path: Path) -> None:
    assert out_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="a file is in the way"):
            out_folder(path)


@dataclass(frozen=True)
class Sample:
    zeta: float
    alpha: tuple[int, ...]


def test_json_and_csv_are_canonical() -> None:
    value = {"b": Sample(zeta=0.1, alpha=(1,)), "a": [ints([1, 2]), np.float64(2.5), None]}
    assert json.loads(json_text(value)) == {"a": [[1, 2], 2.5, None], "b": {"zeta": 0.1, "alpha": [1]}}
    assert json_text(value) == json_text(dict(reversed(value.items())))
    with pytest.raises(ValueError, match="JSON"):
        json_text(float("nan"))
    rows = [["x, y", 1, 0.1 + 0.2], [None, 2, float(np.float64(1e-7))], ["é", 3, np.float64(5.0)]]
    assert csv_text(["name", "n", "s"], rows) == 'name,n,s\n"x, y",1,0.30000000000000004\n,2,1e-07\né,3,5.0\n'


def test_tables_are_plain_and_whole_away_from_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [["rlhfless" + "s" * 200, 1234567.8, 3], ["[bold]verl", 0.123456, None]]
    print_table("Cost", ["policy", "GPU-s", "moves"], rows)
    first = capsys.readouterr().out
    assert first.isascii()
    assert "s" * 200 in first
    assert "[bold]verl" in first
    assert "1234568" in first
    assert "0.1235" in first
    assert max(map(len, first.splitlines())) < 250, "lines are not padded to the width"
    for name, value in (("COLUMNS", "20"), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)
    print_table("Cost", ["policy", "GPU-s", "moves"], rows)
    assert capsys.readouterr().out == first


def test_tables_on_a_narrow_terminal_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_table("Cost", ["policy", "s"], [["x" * 60, 1.0]])
    text = re.sub("\x1b\\[[0-9;]*m", "", sys.stdout.getvalue())  # type: ignore[attr-defined]
    assert text.count("x") == 60
    assert max(map(len, text.splitlines())) <= 30


def interrupted() -> None:
    with progress(3, "steps") as advance:
        advance(1)
        raise KeyboardInterrupt


def test_progress_is_two_lines_on_stderr_away_from_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(3, "steps") as advance:
        advance(1)
        advance(2)
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.splitlines() == ["steps: 3 to do", "steps: 3 of 3 done", "steps: 3 to do", "steps: 1 of 3 done"]
