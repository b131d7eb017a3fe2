"""Seer's rule: what may move, whither and in which order; responses that leave an actor that goes on, in both
simulators, under this rule and under any."""

from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless.errors import InputError
from rlhfless.scheduler.midstep import GenerationView, Migration
from rlhfless.scheduler.migration import rule
from rlhfless.scheduler.peers import ASSIGNMENTS
from rlhfless.scheduler.seer import KV_KEPT, Seer, _to_head
from rlhfless.types.arrays import floats, ints
from rlhfless.types.plan import ElasticTerms, MigrationSpec, Speed
from tests.test_generation import assert_equal, both
from tests.test_migration import ACTORS, view_of

SPEED = Speed(gpus=1, batch=ints([1, 16]), iteration_s=floats([0.01, 0.16]))
N = 3


def terms(actors=7, move_s=0.0):
    return ElasticTerms(
        speeds=(SPEED,),
        speed_of=ints(np.zeros(actors, dtype=np.int64)),
        move_s_per_token=move_s,
        reserve=ints([]),
        start_s=0.0,
    )


def seer(n=N, **fields):
    return Seer(n, terms(**fields))


def seer_view(actors, ended=()):
    """A view of actors in the form of ACTOR; `ended`: (response, context) of those that have ended."""
    view = view_of(actors)
    total = sum(len(a[1]) + len(a[2]) for a in actors)
    column = np.zeros(-(-max([total, *(r + 1 for r, _ in ended)]) // N) * N, dtype=np.int64)
    for response, context in ended:
        column[response] = context

    return replace(view, ended=lambda: ints(column))


@given(ACTORS, st.floats(0, 0.01), st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=5))
def test_seer_obeys_the_laws(actors, move_s, ended):
    """No response twice, none into a full or dead actor, none from an actor's last; what waits goes first."""
    view = seer_view(actors, ended)
    moves = seer(move_s=move_s).decide(view)
    assert moves == seer(move_s=move_s).decide(view)
    assert len({move.response for move in moves}) == len(moves)
    unfinished = view.running + view.waiting
    context, waits = {}, set()
    for actor in range(len(actors)):
        context |= {r: (actor, c) for r, c in zip(*map(np.ndarray.tolist, view.unfinished(actor)), strict=True)}
        waits |= set(view.queue(actor)[0].tolist())
    for move in moves:
        assert context[move.response][0] == move.source
        assert move.response in waits or move.target != move.source
    away = [move for move in moves if move.target != move.source]
    for actor in range(len(actors)):
        assert unfinished[actor] == 0 or sum(move.source == actor for move in away) < unfinished[actor]
        taken = [context[move.response][1] for move in away if move.target == actor]
        if taken:
            assert view.alive[actor]
            assert len(taken) <= view.open_slots[actor]
            kept = KV_KEPT * (view.context_tokens[actor] + view.kv_headroom_tokens[actor])
            assert sum(taken) <= view.kv_headroom_tokens[actor] - kept
    if waits:
        assert {move.response for move in moves} <= waits


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(0, 8))
def test_moves_to_the_head_bring_any_queue_into_any_order(queue, wanted, size):
    """Brute force: no fewer moves do."""
    wanted = [r for r in wanted if r < size]
    queue = [r for r in queue if r < size]
    moves, made = _to_head(0, wanted, queue), list(queue)
    for move in moves:
        made.remove(move.response)
        made.insert(0, move.response)
    assert made == wanted
    kept = max(k for k in range(size + 1) if [r for r in queue if r in wanted[size - k :]] == wanted[size - k :])
    assert len(moves) == size - kept


def test_probes_then_groups_that_nothing_is_known_of_then_the_longest():
    # responses 0..7 wait on one actor behind number 8: groups 0 (0-2), 1 (3-5), 2 (6-8)
    view = seer_view([(1, [5], [1] * 9, 0, 0)], [(9, 1)])
    order = [move.response for move in seer().decide(view)]
    # queue is 1..9; probes 3, 6 and 9 come to the head, 9 not: its group has one that ended, so it is the last
    assert order == [6, 3]
    # group 1 has an end at 40, group 0 none, group 2 at 50: 0's, then 2's, then 1's; 3 and 6 are no probes any more
    view = seer_view([(1, [5], [1] * 8, 0, 0)], [(5, 40), (6, 50)])
    moved = [move.response for move in seer().decide(view)]
    queue = [1, 2, 3, 4, 5, 6, 7, 8]
    for response in moved:
        queue.remove(response)
        queue.insert(0, response)
    assert queue == [1, 2, 6, 7, 8, 3, 4, 5]


def test_what_waits_goes_to_the_emptiest_actor_with_room():
    full = (0, [1, 1], [7, 8], 0, 0)
    view = seer_view([full, (1, [1], [], 1, 6), (1, [1, 1], [], 5, 99)])
    away = [move for move in seer().decide(view) if move.source != move.target]
    assert away == [Migration(3, 0, 2), Migration(2, 0, 2)]  # 3 is a probe; actor 1 has a slot but no KV for either


def test_a_running_response_moves_where_it_pays():
    actors = [(3, [10, 20, 30, 40, 50], [], 0, 99), (5, [10, 10], [], 9, 99)]
    # an iteration takes 0.05 s with five and 0.03 s with three; nothing is known, so all have the mean left
    view = seer_view(actors)
    assert seer().decide(view)[0] == Migration(0, 0, 1)
    mean = float(view.tokens_generated.sum() / view.finished.sum())
    assert seer(move_s=mean * 0.02 / 10 * 1.001).decide(view) == ()
    assert seer(move_s=mean * 0.02 / 10 * 0.999).decide(view)[0] == Migration(0, 0, 1)
    # group 1 is known to go to 90: its responses 3 and 4 have most left
    assert seer().decide(seer_view(actors, [(5, 90)]))[0] == Migration(3, 0, 1)
    # and none moves to an actor with but one fewer
    assert seer().decide(seer_view([(3, [10, 20, 30], [], 0, 99), (5, [10, 10], [], 9, 99)])) == ()


def test_seer_by_name():
    made = rule(seer(7).spec)
    assert isinstance(made, Seer)
    assert made.n == 7
    for value in (0.0, 1.5):
        with pytest.raises(InputError, match=r"^seer: "):
            rule(MigrationSpec(kind="seer", value=value, terms=terms()))
    with pytest.raises(InputError, match="seer: needs its terms"):
        rule(MigrationSpec(kind="seer", value=1.0))


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 6))
def test_probes_stand_first_in_every_queue(prompts, n, actors):
    actors = min(actors, prompts)
    shares = ASSIGNMENTS["probes-first"](np.ones(prompts), n, actors, SPEED)
    assert sorted(np.concatenate(shares).tolist()) == list(range(prompts * n))
    for share in shares:
        probe = share % n == 0
        assert probe.sum() * n == share.size
        assert probe[: probe.sum()].all()


SIZES = {
    "seed": st.integers(0, 2**32 - 1),
    "actors": st.integers(1, 6),
    "per_actor": st.integers(1, 8),
    "n": st.integers(1, 4),
    "capacity": st.integers(360, 1500),
    "slots": st.integers(1, 16),
    "caching": st.booleans(),
    "kv_bytes": st.sampled_from([1e5, 2e6]),
    "deaths": st.integers(0, 3),
}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**SIZES)
def test_seer_is_the_same_in_both_simulators(seed, actors, per_actor, n, **fields):
    spec = seer(n, actors=actors, move_s=1e-5).spec
    assert_equal(*both(seed, actors=actors, prompts=actors * per_actor, n=n, spec=spec, **fields))


@dataclass(frozen=True)
class Anything:
    """A rule that sends any of an actor's responses anywhere, all of them now and then, as the view's numbers say."""

    spec: MigrationSpec

    def triggered(self, assigned, finished, unfinished) -> bool:
        return True

    def decide(self, view: GenerationView) -> tuple[Migration, ...]:
        columns = (view.assigned, view.finished, view.running, view.waiting, view.open_slots, view.tokens_generated)
        more = (view.context_tokens, view.kv_headroom_tokens, view.ended(), [view.cuts_so_far])
        rng = np.random.default_rng(np.concatenate([*columns, *more]).astype(np.int64))
        alive = np.flatnonzero(view.alive)
        assert (view.waiting >= 0).all()
        moves: list[Migration] = []
        cut: set[int] = set()
        for source in rng.permutation(alive).tolist():
            if source in {move.target for move in moves}:
                continue
            queue = view.queue(source)[0].tolist()
            responses, contexts = view.unfinished(source)
            assert set(queue) <= set(responses.tolist())
            assert view.context_tokens[source] <= contexts.sum()
            targets = [int(a) for a in alive if a not in cut and a != source]
            share = 1.0 if rng.random() < 0.1 else 0.3
            chosen = [r for r in responses.tolist() if targets and rng.random() < share]
            moves += [Migration(r, source, targets[int(rng.integers(len(targets)))]) for r in chosen]
            if len(chosen) == len(responses):
                cut.add(source)
            moves += [Migration(r, source, source) for r in rng.permutation(queue).tolist() if r not in chosen]
        return tuple(moves)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**SIZES)
def test_any_moves_are_the_same_in_both_simulators(seed, actors, per_actor, n, **fields):
    spec = seer(n, actors=actors).spec
    with patch("sim.generation.rule", Anything), patch("tests.reference.rule", Anything):
        assert_equal(*both(seed, actors=actors, prompts=actors * per_actor, n=n, spec=spec, **fields))


def test_the_cases_reach_moves_of_what_runs_and_of_what_waits():
    """The comparison above means something only if its cases do what it is about."""
    moves = kept = 0
    for seed in range(12):
        spec = seer(2, actors=4, move_s=1e-6).spec
        run = both(seed, actors=4, prompts=24, n=2, capacity=900, slots=5, caching=True, spec=spec)
        assert_equal(*run)
        moves += sum(run[0].moves)
        kept += run[0].moved_kv_bytes > 0
        assert run[0].cuts == 0
    assert moves > 50
    assert kept > 6
