"""The trace format: files of both kinds, laws, and what is said of files that are wrong."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.errors import InputError, SchemaError
from tests.traces import info, small, traces
from traces.format import Trace

SUFFIXES = ("parquet", "jsonl")


@settings(max_examples=60, deadline=None)
@given(trace=traces())
def test_a_trace_survives_both_formats(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    folder = tmp_path_factory.mktemp("trace")
    for suffix in SUFFIXES:
        trace.write(folder / f"t.{suffix}")
        assert Trace.read(folder / f"t.{suffix}") == trace
    Trace.read(folder / "t.jsonl").write(folder / "again.parquet")
    assert (folder / "again.parquet").read_bytes() == (folder / "t.parquet").read_bytes()


@settings(max_examples=40, deadline=None)
@given(trace=traces(), data=st.data())
def test_rows_come_back_in_canonical_order(trace: Trace, data: st.DataObject) -> None:
    n = trace.n
    within = np.concatenate([data.draw(st.permutations(range(b, b + n))) for b in range(0, len(trace), n)])
    rows = {
        name: None if (column := getattr(trace, name)) is None else column[within]
        for name in ("epoch", "step", "prompt", "sample", "response_tokens", "truncated", "reward", "actor")
    }
    rows |= {
        name: None if getattr(trace, name) is None else getattr(trace, name)[within] for name in ("start_s", "end_s")
    }
    prompts = {name: getattr(trace, name) for name in ("prompt_ids", "prompt_tokens", "reference_tokens")}
    again = Trace(info=trace.info, prompt_token_ids=trace.prompt_token_ids, **prompts, **rows)
    assert again == trace


def test_equality_sees_a_changed_value() -> None:
    assert small() == small()
    assert small() != small(response_tokens=np.arange(1, 9))
    assert small() != small(reward=np.zeros(8))
    assert small() != small(info=info(model="other"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"response_tokens": np.array([10, 0, 3, 4, 5, 6, 7, 8])},
            r"row 2 \(counted from 1\) has 0 as response_tokens",
        ),
        (
            {"response_tokens": np.array([10, -5, 3, 4, 5, 6, 7, 8])},
            r"row 2 \(counted from 1\) has -5 as response_tokens",
        ),
        ({"response_tokens": np.array([10, 1001, 3, 4, 5, 6, 7, 8])}, "at most 1000, the cap"),
        ({"response_tokens": np.ones(8)}, "response_tokens is of type float64"),
        ({"response_tokens": np.ones(7, dtype=int)}, r"response_tokens has shape \(7,\), not \(8,\)"),
        ({"prompt_tokens": np.array([0, 4])}, r"prompt 1 \(counted from 1\) has 0 as prompt_tokens"),
        ({"prompt_tokens": np.array([3, 101])}, "prompt 'b' has 101 tokens; max_prompt_tokens is 100"),
        ({"epoch": np.array([0, 0, 0, 0, 0, 0, 0, -1])}, r"row 8 \(counted from 1\) has -1 as epoch"),
        ({"reward": np.full(8, np.inf)}, r"row 1 \(counted from 1\) has inf as reward"),
        ({"start_s": np.ones(8)}, "start_s and end_s"),
        ({"start_s": np.ones(8), "end_s": np.zeros(8)}, "start_s first"),
        ({"prompt_ids": np.array(["a", "a"])}, "distinct"),
        ({"prompt_ids": np.array(["a", ""])}, "none of them empty"),
        ({"prompt_ids": np.array(["a", "b", "c"]), "prompt_tokens": np.ones(3, dtype=int)}, "leave some out"),
        ({"prompt_token_ids": (np.arange(3), np.arange(3))}, "must be the lengths of the lists"),
        ({"sample": np.array([0, 0, 0, 1, 0, 1, 0, 1])}, "step 0, prompt 'a', sample 0 stands twice"),
        ({"sample": np.array([0, 2, 0, 1, 0, 1, 0, 1])}, r"is incomplete: it has samples \[0, 2\], not 0 to 1"),
        ({"info": info(3)}, "epoch 0, step 0, prompt 'a' is incomplete"),
        (
            {"truncated": np.arange(8) == 6, "response_tokens": np.array([1000, 20, 30, 40, 50, 60, 70, 80])},
            r"row 7 \(counted from 1\) has finish_reason 'length' at 70 tokens; only a response of 1000 tokens",
        ),
    ],
)
def test_a_law_that_a_trace_breaks_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        small(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "dpo"},
        {"responses_per_prompt": 0},
        {"max_response_tokens": -1},
        {"max_response_tokens": 10**30},
        {"max_prompt_tokens": 10_000_001},
        {"responses_per_prompt": 10**30},
    ],
)
def test_run_facts_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(InputError, match=str(next(iter(changes.values())))):
        info(**changes)


def parquet_with(tmp_path: Path, change: object) -> Path:
    small(reward=np.ones(8)).write(tmp_path / "good.parquet")
    table = pq.read_table(tmp_path / "good.parquet")
    metadata = table.schema.metadata
    pq.write_table(change(table).replace_schema_metadata(metadata), tmp_path / "bad.parquet")
    return tmp_path / "bad.parquet"


def not_utf8() -> pa.Array:
    """Eight strings, one of them a byte that UTF-8 does not have, as writers of other languages leave them."""
    ids = pa.array([b"a", b"a", b"b", b"b", b"b", b"b", b"\xff", b"a"])
    return pa.Array.from_buffers(pa.string(), 8, ids.buffers())


def swapped(table: pa.Table, name: str, values: list[object], kind: pa.DataType | None = None) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values, kind))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns("reward"), "no column 'reward'; a trace has epoch, step"),
        (lambda t: t.append_column("rewards", t["reward"]), "unknown column 'rewards'"),
        (lambda t: t.append_column("sample", t["sample"]), "column 'sample' stands twice"),
        (lambda t: t.set_column(2, "prompt_id", [not_utf8()]), "column 'prompt_id' holds text that is not UTF-8"),
        (lambda t: swapped(t, "epoch", [0.5] * 8), "column 'epoch' is of type double, not int64"),
        (lambda t: swapped(t, "prompt_id", [1] * 8), "column 'prompt_id' is of type int64, not string"),
        (lambda t: swapped(t, "reward", ["x"] * 8), "column 'reward' is of type string, not double"),
        (lambda t: swapped(t, "reward", [np.nan] * 8), r"row 1 \(counted from 1\) has NaN as reward"),
        (
            lambda t: swapped(t, "step", [0, None, 1, 1, 2, 2, 3, 3]),
            r"row 2 \(counted from 1\) has no step",
        ),
        (lambda t: swapped(t, "step", [2**63] * 8, pa.uint64()), "column 'step' is not int64"),
        (lambda t: swapped(t, "actor", [-1] * 8), r"row 1 \(counted from 1\) has -1 as actor"),
        (
            lambda t: swapped(t, "finish_reason", ["stop"] * 7 + ["done"]),
            r"row 8 \(counted from 1\) has finish_reason 'done'",
        ),
        (
            lambda t: swapped(t, "prompt_tokens", [3, 3, 4, 4, 4, 4, 3, 5]),
            r"row 8 \(counted from 1\): prompt 'a' has prompt_tokens 5",
        ),
        (lambda t: swapped(t, "prompt_id", ["a\0"] * 2 + ["b"] * 4 + ["a\0"] * 2), "NUL"),
        (lambda t: t.slice(0, 0), "no responses"),
        (lambda t: t.slice(0, 7), "incomplete"),
        (lambda t: pa.concat_tables([t, t]), "stands twice"),
        (
            lambda t: t.append_column("prompt_token_ids", pa.array([[1, 2, 3]] + [None] * 7)),
            "prompt 'b' has no prompt_token_ids",
        ),
        (lambda t: t.append_column("prompt_token_ids", pa.array(["1"] * 8)), "is of type string, not list<int64>"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path: Path, change: object, message: str) -> None:
    path = parquet_with(tmp_path, change)
    with pytest.raises(InputError, match=message) as caught:
        Trace.read(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda head, rows: [head | {"schema": 2}, *rows], SchemaError, "schema 2 is not readable here"),
        (lambda head, rows: [head | {"schema": 0}, *rows], SchemaError, "schema 0 is not readable here"),
        (lambda head, rows: [{k: v for k, v in head.items() if k != "model"}, *rows], SchemaError, "model"),
        (lambda head, rows: [head | {"algorithm": "dpo"}, *rows], SchemaError, "algorithm"),
        (lambda head, rows: [head | {"sead": 1}, *rows], SchemaError, "unknown field 'sead'; known are schema, model"),
        (lambda head, rows: [head | {"max_response_tokens": 10**30}, *rows], InputError, "must be at most 10000000"),
        (lambda head, rows: [head], SchemaError, "no responses after the metadata of line 1"),
        (lambda head, rows: rows, SchemaError, "line 1 is a JSON object without a schema; it must be the trace's meta"),
        (lambda head, rows: [[1, 2]], SchemaError, "line 1 is not a JSON object; it must be the trace's metadata"),
        (lambda head, rows: [head, rows[0], "text"], SchemaError, "line 3: not a JSON object"),
        (lambda head, rows: [head, rows[0] | {"epoch": "x"}], SchemaError, "line 2: epoch is 'x', not int64"),
        (lambda head, rows: [head, rows[0] | {"epoch": 0.5}], SchemaError, "line 2: epoch is 0.5, not int64"),
        (
            lambda head, rows: [head, rows[0] | {"reward": float("nan")}],
            SchemaError,
            r"row 1 \(counted from 1\) has NaN as reward",
        ),
        (lambda head, rows: [head, rows[0] | {"step": 2**63}], SchemaError, "line 2: step is 9223372036854775808"),
        (lambda head, rows: [head, rows[0] | {"rewards": 1}], SchemaError, "unknown column 'rewards'"),
        (lambda head, rows: [head, {k: v for k, v in rows[0].items() if k != "step"}], SchemaError, "no step"),
    ],
)
def test_what_is_wrong_with_json_lines_is_one_line(
    tmp_path: Path, change: object, kind: type[Exception], message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    small().write(path)
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in change(head, rows)))
    with pytest.raises(kind, match=message) as caught:
        Trace.read(path)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "text.jsonl").write_text("not json\n{}\n")
    (tmp_path / "word.jsonl").write_text("hello")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    small().write(tmp_path / "good.jsonl")
    good = (tmp_path / "good.jsonl").read_bytes()
    (tmp_path / "mark.jsonl").write_bytes(b"\xef\xbb\xbf" + good)
    (tmp_path / "byte.jsonl").write_bytes(good.replace(b'"prompt_id":"b"', b'"prompt_id":"\xff"', 1))
    (tmp_path / "twice.jsonl").write_bytes(good.replace(b'"sample":1', b'"sample":1,"sample":1', 1))
    (tmp_path / "key.jsonl").write_bytes(good.replace(b'"prompt_id"', b'"\xff"', 1))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    (tmp_path / "folder.parquet").mkdir()
    for name, message in {
        "none.parquet": "no such file",
        "folder.parquet": "is not a file",
        "trace.csv": "unknown suffix '.csv'; traces end in .parquet or .jsonl",
        "text.parquet": "not Parquet",
        "text.jsonl": "line 1 is not JSON",
        "word.jsonl": "line 1 is not JSON .*; it must be the trace's metadata",
        "empty.jsonl": "line 1 is empty; it must be the trace's metadata",
        "deep.jsonl": "line 1 is not JSON",
        "mark.jsonl": "begins with a byte order mark",
        "byte.jsonl": "line 4: not UTF-8",
        "twice.jsonl": "line 3: a key stands twice",
        "key.jsonl": "line 2: not UTF-8",
        "other.parquet": "not a trace",
    }.items():
        with pytest.raises(InputError, match=message) as caught:
            Trace.read(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"name of the trace file is empty; traces end in \.parquet"):
        Trace.read("")


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    small().write(path)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(InputError, match="cannot be written"):
        small().write(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["t.parquet"]
    with pytest.raises(InputError, match="a file is in the way of its folder"):
        small().write(tmp_path / "t.parquet" / "below" / "t.parquet")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_missing_folder_is_made_when_the_trace_is_written(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(InputError, match="unknown suffix"):
        small().write(tmp_path / "new" / "t.csv")
    assert os.listdir(tmp_path) == []
    path = tmp_path / "new" / "below" / f"t.{suffix}"
    small().write(path)
    assert Trace.read(path) == small()
