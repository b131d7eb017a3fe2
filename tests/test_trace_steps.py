"""What is made of a trace: steps, batches of other sizes, a description."""

import json

import numpy as np
import pytest
from hypothesis import given, settings

from rlhfless.errors import InputError
from tests.traces import info, small, traces
from traces.describe import describe
from traces.format import Trace
from traces.load import batch, steps


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
