"""Length history: the moving average against its definition, and what stands in where nothing was seen."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.errors import InputError, SchemaError
from rlhfless.scheduler.lengths import HistoryEstimator, LengthEstimator, LengthHistory, NoEstimator
from rlhfless.types.arrays import floats, ints
from rlhfless.types.report import Counters, StepReport
from rlhfless.types.workload import Workload

LENGTH = st.floats(0.5, 4096)
EPOCHS = st.lists(st.dictionaries(st.integers(0, 5), LENGTH), max_size=8)


def history_of(window, epochs):
    history = LengthHistory(window)
    for epoch, means in enumerate(epochs):
        history.observe(epoch, list(means), list(means.values()))
    return history


def workload(**changes):
    usual = {
        "step": 0,
        "epoch": 0,
        "algorithm": "ppo",
        "prompt_ids": np.array(["a", "b", "c"]),
        "prompt_tokens": ints([5, 5, 5]),
        "responses_per_prompt": 2,
        "max_response_tokens": 100,
    }
    return Workload(**usual | changes)


def report(epoch, ids, tokens):
    none = Counters(
        prefill_tokens=0, decode_prefill_tokens=0, recomputed_tokens=0,
            decoded_tokens=0, preemptions=0, cuts=0, moves=0, failures=0,
        moved_kv_bytes=0.0,
    )  # fmt: skip
    count = len(tokens)
    return StepReport(
        schema=1, policy="p", step=0, epoch=epoch, start_s=0.0, prompt_ids=np.array(ids),
        responses_per_prompt=count // len(ids), tokens=ints(tokens), first_s=floats([0] * count),
        end_s=floats([1] * count), actor=ints([0] * count), moves=ints([0] * count), invocations=(), phases=(),
        reserved_gpus=0, counters=none,
    )  # fmt: skip


@given(st.integers(1, 4), EPOCHS)
def test_average_is_the_recursion_over_the_last_epochs_of_each_prompt(window, epochs):
    history = history_of(window, epochs)
    alpha = 2 / (window + 1)
    for name in range(6):
        seen = [means[name] for means in epochs if name in means][-window:]
        if not seen:
            continue
        average = seen[0]
        for tokens in seen[1:]:
            average = alpha * tokens + (1 - alpha) * average
        assert history.estimate([name])[0] == pytest.approx(average, rel=1e-12)


@given(EPOCHS)
def test_a_window_of_one_is_the_last_epoch_exactly(epochs):
    history = history_of(1, epochs)
    last = {name: tokens for means in epochs for name, tokens in means.items()}
    assert len(history) == len(last)
    assert history.estimate(list(last)).tolist() == list(last.values())


@given(st.integers(1, 4), EPOCHS)
def test_saved_and_loaded_it_goes_on_the_same(window, epochs):
    history = history_of(window, epochs)
    loaded = LengthHistory.from_json(history.to_json())
    assert loaded.to_json() == history.to_json()
    for one in (history, loaded):
        one.observe(len(epochs), [3, 99], [17.25, 0.1])
        one.observe(len(epochs) + 1, [3], [1 / 3])
    names = [name for name in range(6) if any(name in means for means in epochs)] + [3, 99, 1234]
    assert loaded.estimate(names).tolist() == history.estimate(names).tolist()
    assert loaded.to_json() == history.to_json()


def test_alpha_of_a_window_of_three_is_a_half():
    history = history_of(3, [{0: 1000.0}, {0: 8.0}, {0: 16.0}, {0: 40.0}])
    assert history.estimate([0]).tolist() == [((8 + 16) / 2 + 40) / 2]


def test_epochs_without_the_prompt_do_not_count():
    history = history_of(2, [{0: 30.0}, {1: 5.0}, {1: 6.0}, {0: 60.0}])
    assert history.estimate([0]).tolist() == [pytest.approx(60 * 2 / 3 + 30 / 3)]


def test_what_stands_in_for_history():
    history = LengthHistory()
    assert history.estimate(["x", "y"], [7, 900], cap=50).tolist() == [7, 900]  # raw, not cut at the cap
    assert history.estimate(["x", "y"], [7, np.nan], cap=50).tolist() == [7, 50]
    history.observe(0, ["a", "b"], [10, 20])
    assert history.estimate(["a", "x", "y"], [1, 2, np.nan], cap=50).tolist() == [10, 2, 15]
    assert history.estimate(["x"]).tolist() == [15]
    with pytest.raises(InputError, match="nothing is known of prompt 'x'"):
        LengthHistory().estimate(["x"])


def test_the_later_value_of_an_epoch_replaces_the_earlier():
    history = history_of(2, [{"a": 9.0}])
    history.observe(1, ["a"], [30])
    history.observe(1, ["a", "a"], [40, 60])
    expected = history_of(2, [{"a": 9.0}, {"a": 60.0}])
    assert history.to_json() == expected.to_json()


def test_a_prompt_has_one_name_in_every_form():
    history = LengthHistory()
    history.observe(0, np.array([1, 2], dtype=np.int32), [5, 6])
    assert history.estimate([2, np.int64(1)]).tolist() == [6, 5]
    history.observe(1, np.array(["one", "two"]), [7, 8])
    assert history.estimate(("two", np.str_("one"))).tolist() == [8, 7]
    history.observe(2, [np.int64(3), ("a", 4)], [9, 10])
    assert history.estimate([3, ("a", 4)]).tolist() == [9, 10]
    with pytest.raises(InputError, match=r"prompt id \('a', 4\) cannot be saved"):
        history.to_json()


@pytest.mark.parametrize("length", [0, -1, np.nan, np.inf, -np.inf])
def test_impossible_lengths_are_refused_and_change_nothing(length):
    history = history_of(1, [{"a": 5.0}])
    with pytest.raises(InputError, match="of prompt 'b' in epoch 1; expected a positive number") as caught:
        history.observe(1, ["a", "b"], [6, length])
    assert "\n" not in str(caught.value)
    assert history.to_json() == history_of(1, [{"a": 5.0}]).to_json()


def test_bad_input_is_named():
    history = history_of(1, [{"a": 5.0}, {"a": 5.0}])
    with pytest.raises(InputError, match="epoch 0 after epoch 1"):
        history.observe(0, ["a"], [5])
    with pytest.raises(InputError, match="epochs start at 0"):
        LengthHistory().observe(-1, ["a"], [5])
    with pytest.raises(InputError, match=r"mean_lengths has shape \(2,\), 1 prompts need \(1,\)"):
        history.observe(1, ["a"], [5, 6])
    with pytest.raises(InputError, match="mean_lengths: expected one number"):
        history.observe(1, ["a"], ["long"])
    with pytest.raises(InputError, match="reference_lengths has shape"):
        history.estimate(["a"], [1, 2])
    for reference in (0, -2, np.inf):
        with pytest.raises(InputError, match="reference_lengths: every value must be a positive number"):
            history.estimate(["x"], [reference])
    with pytest.raises(InputError, match="window 0 must be at least 1"):
        LengthHistory(0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 2}, "schema 2 is not readable"),
        ({"window": 0}, "window 0 at least 1"),
        ({"window": "2"}, r"\$.window"),
        ({"ids": ["a", "a"]}, "ids without repeats"),
        ({"ids": ["a"]}, "one entry for each prompt"),
        ({"epochs": [0]}, "one entry for each prompt"),
        ({"epochs": [0, 2]}, "epochs must lie in 0..1"),
        ({"epochs": [-1, 1]}, "epochs must lie in 0..1"),
        ({"tokens": [[1.0], [1.0, 2.0, 3.0]]}, "1 to window values"),
        ({"tokens": [[], [1.0]]}, "1 to window values"),
        ({"tokens": [[0.0], [1.0]]}, "tokens must be positive"),
        ({"tokens": [[None], [1.0]]}, r"\$.tokens\[0\]"),
    ],
)
def test_broken_files_are_refused(change, told):
    good = json.loads(history_of(2, [{"a": 5.0}, {"b": 6.0}]).to_json())
    assert len(LengthHistory.from_json(json.dumps(good))) == 2
    with pytest.raises(SchemaError, match=told) as caught:
        LengthHistory.from_json(json.dumps(good | change), "saved.json")
    assert str(caught.value).startswith("saved.json: ")
    with pytest.raises(SchemaError, match="not JSON"):
        LengthHistory.from_json("{")


def test_the_papers_estimator_takes_references_first_then_history():
    estimator: LengthEstimator = HistoryEstimator(LengthHistory())
    assert estimator.estimate(workload()).tolist() == [100, 100, 100]
    first = workload(reference_tokens=ints([70, 3, 900]))
    assert estimator.estimate(first).tolist() == [70, 3, 100]
    estimator.observe(report(0, ["a", "b"], [10, 20, 200, 400]))
    assert estimator.estimate(first).tolist() == [15, 100, 100]
    assert estimator.estimate(workload()).tolist() == [15, 100, 100]
    estimator.observe(report(1, ["c"], [1, 0]))
    assert estimator.estimate(workload()).tolist() == [15, 100, 1]


def test_no_estimator_tells_no_prompt_from_another():
    estimator: LengthEstimator = NoEstimator()
    estimator.observe(report(0, ["a"], [10, 20]))
    assert estimator.estimate(workload(reference_tokens=ints([1, 2, 3]))).tolist() == [50, 50, 50]
    assert estimator.estimate(workload(max_response_tokens=1)).tolist() == [1, 1, 1]
