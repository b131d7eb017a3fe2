"""Loops over steps: what is issued and kept, nothing lost and nothing twice, steps that stop before their end."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.bench import Setting
from experiments.bench import simulate as simulate_policy
from experiments.rounds import LOOPS, MORE, PIECES, PartialRollouts, Stream, TailBatching, first_to_end, simulate
from rlhfless.errors import InputError
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import MigrationSpec
from rlhfless.types.workload import Workload
from tests.profiles import tiny_profile
from tests.test_generation import RELATIVE, both
from tests.test_seer import seer

INF = float("inf")


@given(
    st.lists(st.lists(st.sampled_from([1.0, 2.0, 3.0, INF]), min_size=3, max_size=3), min_size=1, max_size=6), st.data()
)
def test_the_first_to_end(ends, data):
    """Against the definition, prompt by prompt."""
    wanted, n = data.draw(st.integers(1, len(ends))), data.draw(st.integers(1, 3))
    done = sorted((sorted(row)[n - 1], prompt) for prompt, row in enumerate(ends))
    chosen = first_to_end(np.array(ends), wanted, n)
    if done[wanted - 1][0] == INF:
        assert chosen is None
        return
    for prompt, row in enumerate(ends):
        first = sorted((end_s, response) for response, end_s in enumerate(row))[:n]
        kept = {response for _, response in first} if (sorted(row)[n - 1], prompt) in done[:wanted] else set()
        assert set(np.flatnonzero(chosen[prompt]).tolist()) == kept


def deliver(loop, wanted, n, rng):
    """Carry a loop out with ends drawn at random: its rounds, and what each has delivered."""
    rounds, delivered = [], []
    while (issued := loop.issue()) is not None:
        assert len(rounds) < 1000
        ends = rng.permutation(issued.begun.size).reshape(issued.begun.shape).astype(float)
        chosen = first_to_end(ends, wanted, n)
        assert chosen is not None
        tokens = issued.begun + rng.integers(0, 5, issued.begun.shape)
        loop.take(issued, chosen, ints(tokens))
        rounds.append((issued, tokens))
        delivered.append([row for row, kept in zip(issued.rows, chosen, strict=True) if kept.any()])
        assert (chosen.sum(axis=1) % n == 0).all()
        assert chosen.sum() == wanted * n
    return rounds, delivered


@given(st.sampled_from(sorted(LOOPS)), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_every_prompt_is_delivered_once_and_a_step_delivers_as_many_as_the_traces(name, steps, wanted, n, seed):
    rounds, delivered = deliver(LOOPS[name](steps * wanted, wanted, n), wanted, n, np.random.default_rng(seed))
    assert Counter(row for rows in delivered for row in rows) == Counter(range(steps * wanted))
    assert len(rounds) == steps
    for issued, _ in rounds:
        assert len(set(issued.rows)) == len(issued.rows) <= np.ceil(MORE * wanted)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(1, 5), st.integers(0, 99))
def test_partial_responses_go_on_from_the_tokens_that_they_have(steps, wanted, n, seed):
    rounds, delivered = deliver(PartialRollouts(steps * wanted, wanted, n), wanted, n, np.random.default_rng(seed))
    for (before, tokens), (after, _), gone in zip(rounds, rounds[1:], delivered, strict=False):
        left = [row for row in before.rows if row not in gone]
        assert list(after.rows[: len(left)]) == left
        for row, begun in zip(after.rows, after.begun, strict=True):
            assert begun.tolist() == (tokens[before.rows.index(row)].tolist() if row in left else [0] * n)


def test_a_long_round_comes_once_enough_are_put_off():
    rounds, delivered = deliver(TailBatching(80, 8, 4), 8, 4, np.random.default_rng(0))
    sizes = [(len(issued.rows), issued.n) for issued, _ in rounds]
    assert sizes == [(10, 5)] * 4 + [(8, 4)] + [(10, 5)] * 4 + [(8, 4)]
    put_off = [
        row
        for (issued, _), rows in zip(rounds[:4], delivered[:4], strict=True)
        for row in issued.rows
        if row not in rows
    ]
    assert list(rounds[4][0].rows) == put_off


def steps_of(epochs=2, per_epoch=2, size=4, n=2, seed=0, cap=60):
    rng = np.random.default_rng(seed)
    made = []
    for step in range(epochs * per_epoch):
        ids = np.arange(size) + size * (step % per_epoch)
        made.append(
            (
                Workload(
                    step=step,
                    epoch=step // per_epoch,
                    algorithm="grpo",
                    prompt_ids=ids,
                    prompt_tokens=ints(rng.integers(1, 30, size)),
                    responses_per_prompt=n,
                    max_response_tokens=cap,
                ),
                Outcome(response_tokens=ints(rng.integers(1, cap + 1, (size, n)))),
            )
        )
    return made


def test_a_spare_response_is_one_of_the_same_prompt_in_the_next_epoch():
    steps = steps_of(epochs=3)
    stream = Stream.of(steps)
    lengths = {
        (w.epoch, int(p)): row.tolist()
        for w, o in steps
        for p, row in zip(w.prompt_ids, o.response_tokens, strict=True)
    }
    for row, prompt in enumerate(stream.workload.prompt_ids.tolist()):
        assert stream.spare[row].tolist() == lengths[(int(stream.epoch[row]) + 1) % 3, prompt]
    workload, outcome = stream.round(7, [3, 9], 3, 2)
    assert workload.prompt_ids.tolist() == [stream.workload.prompt_ids[3], stream.workload.prompt_ids[9]]
    assert outcome.response_tokens.tolist() == [[*stream.lengths[r], stream.spare[r, 0]] for r in (3, 9)]


def setting(**fields):
    return Setting(
        profile=tiny_profile(kv_capacity_tokens=400, max_slots=8),
        cluster=Cluster.uniform("l40s", 8, 4),
        usd_per_gpu_hour=1.0,
        **fields,
    )


CASES = {
    "actors": st.integers(1, 4),
    "size": st.integers(4, 12),
    "n": st.integers(1, 4),
    "epochs": st.integers(1, 3),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LOOPS)), st.fixed_dictionaries(CASES))
def test_loops_obey_the_laws(name, case):
    """All delivered once, tokens conserved, GPUs released at the stop, ends no later than the phase's."""
    actors = case.pop("actors")
    steps = steps_of(**case)
    done = simulate(name, steps, setting(), actors=actors)
    n, lengths = case["n"], Stream.of(steps).lengths
    assert len(done.records) == len(steps)
    assert done.late_steps.sum() == 0  # as many as come later come earlier, in steps
    for record in done.records:
        report = record.report
        generated_s = report.phases[0].end_s
        assert report.end_s.max() <= generated_s * (1 + 1e-12)
        for one in report.invocations:
            if one.function == "decode":
                assert one.end_s <= generated_s * (1 + 1e-12)
        assert report.counters.decoded_tokens >= 0
    assert done.decoded_tokens.sum() == done.trained_tokens.sum() + done.wasted_tokens.sum()
    if name == "april":
        assert done.trained_tokens.sum() == lengths.sum()
        assert done.wasted_tokens.sum() == 0
        assert (done.off_policy_tokens <= done.trained_tokens).all()
        assert done.off_policy_tokens[0] == 0
        decoded = sum(record.report.counters.decoded_tokens for record in done.records)
        assert decoded == lengths.sum(), "no token twice"
    else:
        assert done.off_policy_tokens.sum() == 0
        assert [record.report.counters.decoded_tokens for record in done.records] == done.decoded_tokens.tolist()
    again = simulate(name, steps, setting(), actors=actors)
    assert [r.report.to_json() for r in again.records] == [r.report.to_json() for r in done.records]
    assert n == done.records[0].plan.responses_per_prompt or name == "rollpacker"


def test_without_more_than_is_wanted_nothing_stops(monkeypatch):
    """With nothing issued beyond what is wanted, both loops are the policy whose pieces they use."""
    monkeypatch.setattr("experiments.rounds.MORE", 1.0)
    steps = steps_of(seed=5)
    plain = simulate_policy(PIECES, steps, setting(), actors=2)
    for name in LOOPS:
        done = simulate(name, steps, setting(), actors=2)
        assert [r.report.phases for r in done.records] == [r.report.phases for r in plain.records]
        assert done.late_steps.tolist() == [0] * 16


def test_steps_of_different_sizes_are_refused():
    steps = [*steps_of(size=4, epochs=1), *steps_of(size=5, epochs=1)]
    with pytest.raises(InputError, match="steps of 4 to 5 prompts: rounds need all alike"):
        simulate("april", steps, setting(), actors=1)
    with pytest.raises(InputError, match="unknown loop 'nobody': known are rollpacker, april"):
        simulate("nobody", steps_of(), setting(), actors=1)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    actors=st.integers(1, 5),
    per_actor=st.integers(1, 6),
    n=st.integers(1, 4),
    capacity=st.integers(360, 1500),
    slots=st.integers(1, 16),
    caching=st.booleans(),
    deaths=st.integers(0, 2),
    share=st.floats(0.01, 1.0),
    begun=st.booleans(),
    kind=st.sampled_from(["none", "cut-and-migrate", "seer"]),
)
def test_a_step_that_stops_is_the_same_in_both_simulators(seed, actors, per_actor, n, share, begun, kind, **fields):
    specs = {"none": None, "cut-and-migrate": MigrationSpec(kind=kind, value=0.3), "seer": seer(n, actors=actors).spec}
    prompts = actors * per_actor
    begun = begun and kind != "seer"
    generation, slow, responses, _ = both(
        seed, actors=actors, prompts=prompts, n=n, spec=specs[kind], begun=begun,
        stop=int(np.ceil(share * prompts * n)), **fields,
    )  # fmt: skip
    assert generation.batch.generated == [r.generated for r in responses]
    if not slow.now:  # all came with all of their tokens: it ends when the first actor finds that
        assert generation.env.now in [actor.start_s for actor in generation.actors]
        return
    ends = [r.end_s if r.generated == r.target else slow.now for r in responses]
    np.testing.assert_allclose(generation.ledger.end_s, ends, rtol=RELATIVE)
    engines = [actor.engine for actor in generation.actors]
    assert sum(e.preemptions for e in engines) == slow.preemptions
    assert sum(e.prefilled_tokens for e in engines) == slow.prefilled
    assert sum(e.recomputed_tokens for e in engines) == slow.recomputed
    assert generation.env.now == pytest.approx(slow.now, rel=RELATIVE)
    for actor in generation.actors:
        assert actor.life.at_s <= generation.env.now * (1 + RELATIVE)
