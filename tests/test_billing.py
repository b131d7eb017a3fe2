"""Bills: exact numbers on hand-made reports, then law 4 on random ones."""

from itertools import pairwise
from math import fsum, inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.accounting.billing import FUNCTIONS, Stretch, bill, share_gpu, timelines, total
from rlhfless.errors import InputError
from rlhfless.types.arrays import floats, ints
from rlhfless.types.report import (
    IDLE,
    SCHEMA,
    WORK,
    Activity,
    Counters,
    Invocation,
    Phase,
    Span,
    StepReport,
)

NO_COUNTS = Counters(
    prefill_tokens=0,
    decode_prefill_tokens=0,
    recomputed_tokens=0,
    decoded_tokens=0,
    preemptions=0,
    cuts=0,
    moves=0,
    failures=0,
    moved_kv_bytes=0.0,
)


def invocation(
    function: str, gpus: tuple[int, ...], start_s: float, *parts: tuple[Activity, float], index: int = 0
) -> Invocation:
    """Spans from `start_s`, each (activity, end_s)."""
    spans, at_s = [], start_s
    for activity, end_s in parts:
        spans.append(Span(activity=activity, start_s=at_s, end_s=end_s))
        at_s = end_s
    return Invocation(function=function, index=index, gpus=gpus, spans=tuple(spans))


def report(*invocations: Invocation, reserved_gpus: int = 0, step_s: float = 10.0) -> StepReport:
    return StepReport(
        schema=SCHEMA,
        policy="test",
        step=3,
        epoch=0,
        start_s=100.0,
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
            Phase(name="learning", start_s=7.0, end_s=step_s),
        ),
        reserved_gpus=reserved_gpus,
        counters=NO_COUNTS,
    )


def test_serverless_bill_counts_every_span_of_every_gpu() -> None:
    made = bill(
        report(
            invocation("prefill", (0, 1), 0.0, ("prefill", 1.0), ("send-kv", 1.5)),
            invocation("decode", (2, 3), -2.0, ("start-up", -0.5), ("early", 0.0), ("wait-kv", 1.5), ("decode", 6.0)),
            invocation("decode", (4,), 0.0, ("start-up", 1.0), ("decode", 4.0), ("wait-longest", 6.0), index=1),
            invocation("learner", (0, 1), 7.0, ("train", 10.0)),
        ),
        usd_per_gpu_hour=3600.0,
    )
    assert made.function("prefill").executed_gpu_s == 3.0
    decode = made.function("decode")
    assert (decode.invocations, decode.executed_gpu_s, decode.held_gpu_s) == (2, 12.0, 22.0)
    assert made.function("reward").invocations == 0
    assert dict(made.idle_gpu_s) == {
        "start-up": 4.0,
        "early": 1.0,
        "wait-weights": 0.0,
        "wait-kv": 3.0,
        "wait-longest": 2.0,
        "wait-phase": 0.0,
    }
    assert (made.executed_gpu_s, made.held_gpu_s, made.uncovered_gpu_s, made.usd) == (21.0, 31.0, 0.0, 31.0)


def test_reserved_bill_pays_every_gpu_for_the_whole_step() -> None:
    made = bill(
        report(
            invocation("decode", (0, 1), -5.0, ("start-up", 0.5), ("decode", 5.0), ("wait-longest", 6.0)),
            # Its start-up hides behind decoding until 5 and behind the decode actor's wait until 6.
            invocation("learner", (0, 1), 4.0, ("start-up", 6.5), ("wait-phase", 7.0), ("train", 10.0)),
            reserved_gpus=4,
        ),
        usd_per_gpu_hour=1800.0,
    )
    assert (made.held_gpu_s, made.executed_gpu_s, made.usd) == (40.0, 15.0, 20.0)
    assert made.function("decode").held_gpu_s == 12.0
    assert made.function("learner").held_gpu_s == 8.0
    assert made.uncovered_gpu_s == 20.0
    assert made.idle("start-up") == 2.0
    assert made.idle("wait-longest") == 2.0
    assert made.idle("wait-phase") == 21.0


def test_bills_add() -> None:
    one = bill(report(invocation("decode", (0,), -1.0, ("start-up", 0.0), ("decode", 6.0))), 2.0)
    two = bill(report(invocation("learner", (0,), 7.0, ("train", 10.0)), reserved_gpus=2), 4.0)
    both = one + two
    assert both == total([one, two])
    assert both.executed_gpu_s == 9.0
    assert both.held_gpu_s == 27.0
    assert both.usd == one.usd + two.usd
    assert both.function("learner").invocations == 1
    assert total([]).held_gpu_s == 0.0


@pytest.mark.parametrize("price", [-1.0, nan, inf])
def test_a_price_must_be_a_number_at_least_0(price: float) -> None:
    with pytest.raises(InputError, match="USD per GPU-hour"):
        bill(report(), price)


@pytest.mark.parametrize(
    ("invocations", "reserved", "message"),
    [
        ([invocation("decoder", (0,), 0.0, ("decode", 1.0))], 0, "decoder 0: unknown function"),
        ([invocation("decode", (), 0.0, ("decode", 1.0))], 0, "1 spans on 0 GPUs"),
        ([invocation("decode", (0,), 0.0)], 0, "0 spans on 1 GPUs"),
        ([invocation("decode", (0, 0), 0.0, ("decode", 1.0))], 0, "holds a GPU twice"),
        ([invocation("decode", (0,), 2.0, ("decode", 1.0))], 0, "must not go back"),
        ([invocation("decode", (0,), 2.0, ("decode", nan))], 0, "must not go back"),
        ([invocation("decode", (0, 1), 0.0, ("decode", 1.0))], 1, "2 GPUs, only 1"),
        ([invocation(name, (0,), 0.0, ("score", 2.0)) for name in ("reward", "critic")], 1, "at once"),
        ([invocation("decode", (0,), -1.0, ("decode", 2.0))], 1, "outside the step"),
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_billed_is_named(invocations: list[Invocation], reserved: int, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        bill(report(*invocations, reserved_gpus=reserved), 1.0)
    assert "step 3" in str(caught.value)


def test_a_gap_between_spans_is_refused() -> None:
    spans = (Span(activity="decode", start_s=0.0, end_s=1.0), Span(activity="send-kv", start_s=1.5, end_s=2.0))
    with pytest.raises(InputError, match="without a gap"):
        bill(report(Invocation(function="decode", index=0, gpus=(0,), spans=spans)), 1.0)


moments = st.integers(-8, 24).map(lambda quarter: quarter / 4)
activities = st.sampled_from((*WORK, *IDLE))


@st.composite
def random_invocations(draw: st.DrawFn) -> Invocation:
    times = sorted(draw(st.lists(moments, min_size=2, max_size=6)))
    parts = [(draw(activities), end_s) for end_s in times[1:]]
    gpus = tuple(sorted(draw(st.sets(st.integers(0, 4), min_size=1, max_size=3))))
    return invocation(draw(st.sampled_from(FUNCTIONS)), gpus, times[0], *parts)


@given(st.lists(random_invocations(), max_size=6), st.floats(0, 100))
def test_law_4_serverless(invocations: list[Invocation], price: float) -> None:
    made = bill(report(*invocations), price)
    life = fsum((one.end_s - one.start_s) * len(one.gpus) for one in invocations)
    assert made.held_gpu_s == pytest.approx(life, abs=1e-9)
    assert fsum(entry.held_gpu_s for entry in made.functions) == pytest.approx(made.held_gpu_s, abs=1e-9)
    assert made.executed_gpu_s + fsum(idle for _, idle in made.idle_gpu_s) == pytest.approx(made.held_gpu_s, abs=1e-9)
    assert made.held_gpu_s >= made.executed_gpu_s - 1e-9
    assert made.usd == pytest.approx(made.held_gpu_s * price / 3600)
    assert sum(entry.invocations for entry in made.functions) == len(invocations)


def doings(invocations: list[Invocation], gpu: int, time_s: float) -> list[Activity]:
    """What all functions on a GPU do around a moment (the quarter-second that holds it)."""
    return [
        span.activity
        for one in invocations
        if gpu in one.gpus
        for span in one.spans
        if span.start_s <= time_s < span.end_s
    ]


@given(st.lists(random_invocations(), max_size=6))
def test_law_4_reserved(invocations: list[Invocation]) -> None:
    """Against a clock that looks at every GPU in every quarter of a second."""
    ticks = [(gpu, quarter / 4) for gpu in range(5) for quarter in range(-8, 24)]
    busy = {tick: [doing for doing in doings(invocations, *tick) if doing in WORK] for tick in ticks}
    clash = any(len(found) > 1 or (found and time_s < 0) for (_, time_s), found in busy.items())
    whole = report(*invocations, reserved_gpus=6, step_s=8.0)
    if clash:
        with pytest.raises(InputError):
            bill(whole, 1.0)
        return
    made = bill(whole, 1.0)
    assert made.held_gpu_s == 48.0
    assert made.executed_gpu_s == pytest.approx(sum(map(len, busy.values())) / 4)
    covered = sum(bool(doings(invocations, gpu, time_s)) for gpu, time_s in ticks if time_s >= 0) / 4
    assert made.uncovered_gpu_s == pytest.approx(48.0 - covered)
    held = fsum(entry.held_gpu_s for entry in made.functions)
    assert held + made.uncovered_gpu_s == pytest.approx(made.held_gpu_s)


@given(st.lists(random_invocations(), max_size=6))
def test_timelines_are_disjoint_and_lose_no_time(invocations: list[Invocation]) -> None:
    seen: set[int] = set()
    for gpus, stretches in timelines(invocations):
        assert not seen & set(gpus)
        seen |= set(gpus)
        for before, after in pairwise(stretches):
            assert before.end_s <= after.start_s
        for quarter in range(-8, 24):
            time_s = quarter / 4
            now = [stretch.activity for stretch in stretches if stretch.start_s <= time_s < stretch.end_s]
            possible = doings(invocations, gpus[0], time_s)
            assert len(now) == bool(possible)
            if now:
                assert now[0] in possible
                assert now[0] in WORK or not set(possible) & set(WORK)
    assert seen == {gpu for one in invocations for gpu in one.gpus}


def test_of_two_idle_functions_the_gpu_counts_for_the_one_that_held_it_first() -> None:
    spans = [Stretch(0.0, 6.0, 7, "wait-longest"), Stretch(2.0, 8.0, 4, "start-up"), Stretch(3.0, 4.0, 5, "score")]
    assert share_gpu(spans, {7: 0, 4: 1, 5: 2}) == [
        Stretch(0.0, 3.0, 7, "wait-longest"),
        Stretch(3.0, 4.0, 5, "score"),
        Stretch(4.0, 6.0, 7, "wait-longest"),
        Stretch(6.0, 8.0, 4, "start-up"),
    ]
