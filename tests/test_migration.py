"""Mid-step rules: what may move and what must not, for any state of the actors, and decisions worked out by hand."""

import copy

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rlhfless.errors import InputError
from rlhfless.scheduler.migration import CutAndMigrate, GenerationView, GlobalCut, Migration, rule
from rlhfless.types.arrays import ints
from rlhfless.types.plan import MigrationSpec

# one actor: finished, contexts of running responses, contexts of waiting ones, slots beyond the running, KV headroom
ACTOR = st.tuples(
    st.integers(0, 6),
    st.lists(st.integers(1, 9), max_size=4),
    st.lists(st.integers(1, 9), max_size=1),
    st.integers(0, 5),
    st.integers(0, 40),
)
ACTORS = st.lists(ACTOR, min_size=1, max_size=7)
TAU = st.sampled_from([0.3, 0.5, 0.55, 0.7, 1.0])


def view_of(actors, cuts_so_far=0, asked=None):
    """A view of actors in the form of ACTOR; responses are numbered through, actor by actor."""
    finished = [a[0] for a in actors]
    running = [len(a[1]) for a in actors]
    waiting = [len(a[2]) for a in actors]
    contexts = [a[1] + a[2] for a in actors]
    first = np.cumsum([0, *map(len, contexts)]).tolist()

    def unfinished(actor):
        if asked is not None:
            asked.append(actor)
        return ints(range(first[actor], first[actor + 1])), ints(contexts[actor])

    def queue(actor):
        return ints(range(first[actor] + running[actor], first[actor + 1])), ints(contexts[actor][running[actor] :])

    return GenerationView(
        assigned=ints(np.add(finished, running) + waiting),
        finished=ints(finished),
        running=ints(running),
        waiting=ints(waiting),
        open_slots=ints([0 if a[2] else a[3] for a in actors]),  # a waiting response leaves no slot open
        tokens_generated=ints([sum(a[1]) for a in actors]),
        context_tokens=ints([sum(a[1]) for a in actors]),
        kv_headroom_tokens=ints([a[4] for a in actors]),
        cuts_so_far=cuts_so_far,
        unasked=np.zeros(len(actors), dtype=np.bool_),
        starting=np.zeros(len(actors), dtype=np.bool_),
        idle=np.zeros(len(actors), dtype=np.bool_),
        unfinished=unfinished,
        queue=queue,
        ended=lambda: ints([]),
    )


def obeys_the_laws(view, moves):
    """All or none of an actor's responses leave it; targets live, go on, and have the slots and the headroom."""
    cut = {move.source for move in moves}
    context = {}
    for source in cut:
        responses, tokens = view.unfinished(source)
        assert sorted(move.response for move in moves if move.source == source) == responses.tolist()
        context |= dict(zip(responses.tolist(), tokens.tolist(), strict=True))
    for target in {move.target for move in moves}:
        assert view.alive[target] or view.idle[target]
        assert target not in cut
        taken = [context[move.response] for move in moves if move.target == target]
        assert len(taken) <= view.open_slots[target]
        assert sum(taken) <= view.kv_headroom_tokens[target]


def triggered(some_rule, view):
    return some_rule.triggered(view.assigned, view.finished, view.running + view.waiting)


@given(ACTORS, TAU)
def test_cut_and_migrate_obeys_the_laws(actors, tau):
    some_rule, view = CutAndMigrate(tau), view_of(actors)
    before = copy.deepcopy((view.assigned, view.finished, view.open_slots, view.kv_headroom_tokens))
    moves = some_rule.decide(view)
    obeys_the_laws(view, moves)
    for source in {move.source for move in moves}:
        assert view.finished[source] / view.assigned[source] >= tau
    assert moves == some_rule.decide(view)
    for column, was in zip(
        (view.assigned, view.finished, view.open_slots, view.kv_headroom_tokens), before, strict=True
    ):
        assert np.array_equal(column, was)
    if moves:
        assert triggered(some_rule, view)


@given(ACTORS, TAU)
def test_where_slots_and_kv_abound_every_decision_ends_with_no_ripe_actor_that_others_could_hold(actors, tau):
    actors = [(*actor[:4], 10_000) for actor in actors]
    view = view_of(actors)
    moves = CutAndMigrate(tau).decide(view)
    cut, took = {move.source for move in moves}, [move.target for move in moves]
    slots = np.where(view.alive, view.open_slots, 0)
    np.subtract.at(slots, took, 1)
    slots[list(cut)] = 0
    for actor in set(range(len(actors))) - cut - set(took):
        unfinished = view.running[actor] + view.waiting[actor]
        ripe = unfinished > 0 and view.finished[actor] / view.assigned[actor] >= tau
        assert not ripe or slots.sum() - slots[actor] < unfinished


@given(ACTORS, st.integers(1, 20), st.integers(0, 1))
def test_global_cut_obeys_the_laws(actors, remaining, cuts_so_far):
    some_rule, view = GlobalCut(remaining), view_of(actors, cuts_so_far)
    moves = some_rule.decide(view)
    obeys_the_laws(view, moves)
    if moves:
        assert triggered(some_rule, view)
        assert cuts_so_far == 0
        assert (view.running + view.waiting).sum() <= remaining
        cut = {move.source for move in moves}
        left = view.running + view.waiting
        stay = [actor for actor in np.flatnonzero(view.alive).tolist() if actor not in cut]
        assert min(left[stay]) >= max(left[list(cut)])


@given(ACTORS.filter(lambda actors: len(actors) <= 5))
def test_global_cut_keeps_the_fewest_that_hold_everything(actors):
    actors = [(finished, running, [], slots, 10_000) for finished, running, _, slots, _ in actors]
    view = view_of(actors)
    alive = np.flatnonzero(view.alive).tolist()
    assume(len(alive) > 1)
    ranked = sorted(alive, key=lambda actor: (-view.running[actor], -view.context_tokens[actor], actor))
    fewest = next(
        (m for m in range(1, len(alive)) if view.open_slots[ranked[:m]].sum() >= view.running[ranked[m:]].sum()),
        len(alive),
    )
    moves = GlobalCut(1000).decide(view)
    assert {move.source for move in moves} == set(ranked[fewest:])


@given(ACTORS, st.floats(0, 0.99))
def test_a_single_ripe_actor_is_cut_exactly_where_the_stated_filling_holds_it(actors, below):
    view = view_of(actors)
    share = view.finished / np.maximum(view.assigned, 1)
    alive = np.flatnonzero(view.alive).tolist()
    assume(alive)
    second, best = sorted([0.0, *share[alive].tolist()])[-2:]
    assume(best > second)
    tau = best - below * (best - second)
    ripe = [actor for actor in alive if share[actor] >= tau]
    assume(len(ripe) == 1)
    left = sorted(view.unfinished(ripe[0])[1].tolist(), reverse=True)
    for target in sorted(set(alive) - set(ripe), key=lambda actor: (share[actor], actor)):
        slots, tokens = view.open_slots[target], view.kv_headroom_tokens[target]
        for context in list(left):
            if slots and context <= tokens:
                slots, tokens = slots - 1, tokens - context
                left.remove(context)
    assert bool(CutAndMigrate(tau).decide(view)) == (not left)


def test_a_cut_fills_the_actor_that_has_finished_least_largest_context_first():
    actors = [
        (7, [30, 10, 20], [], 0, 0),  # ripe: 7 of 10
        (2, [5, 5], [], 1, 100),  # half finished, one slot
        (1, [5, 5, 5], [], 2, 100),  # a quarter finished: filled first
    ]
    moves = CutAndMigrate(0.7).decide(view_of(actors))
    assert moves == (Migration(0, 0, 2), Migration(2, 0, 2), Migration(1, 0, 1))


def test_without_room_for_all_it_waits():
    actors = [(7, [30, 10, 20], [], 0, 0), (2, [5, 5], [], 2, 100)]
    assert CutAndMigrate(0.7).decide(view_of(actors)) == ()
    short_of_kv = [(7, [30, 10, 20], [], 0, 0), (2, [5, 5], [], 3, 59)]
    assert CutAndMigrate(0.7).decide(view_of(short_of_kv)) == ()
    enough = [(7, [30, 10, 20], [], 0, 0), (2, [5, 5], [], 3, 60)]
    assert len(CutAndMigrate(0.7).decide(view_of(enough))) == 3


def test_the_fewest_unfinished_are_cut_first_and_ties_take_the_highest():
    actors = [(9, [1], [], 9, 99), (8, [1, 1], [], 0, 99), (9, [1], [], 9, 99), (0, [1] * 4, [], 1, 99)]
    assert CutAndMigrate(0.7).decide(view_of(actors))[0] == Migration(3, 2, 3)
    # then 0 has the fewest: it goes to nobody, since only its own slots are open, and 1 goes to 0
    assert CutAndMigrate(0.7).decide(view_of(actors))[1:] == (Migration(1, 1, 0), Migration(2, 1, 0))


def test_two_ripe_actors_do_not_move_to_each_other():
    actors = [(9, [1], [], 9, 99), (9, [1], [], 9, 99)]
    assert CutAndMigrate(0.7).decide(view_of(actors)) == (Migration(1, 1, 0),)


def test_its_own_open_slots_are_no_place_to_go():
    actors = [(9, [5], [], 9, 99), (0, [1], [], 9, 4), (0, [1], [], 9, 4)]
    assert CutAndMigrate(0.7).decide(view_of(actors)) == ()


def test_what_an_actor_took_lowers_its_share_for_the_next_cut():
    actors = [
        (9, [50], [], 0, 0),  # too large for 2: goes to 3
        (8, [5, 5], [], 0, 0),
        (2, [1, 1, 1], [], 1, 9),  # 2 of 5
        (2, [1, 1], [], 3, 99),  # 2 of 4, then 2 of 5: behind 2 by index, ahead of 4
        (4, [1, 1, 1, 1, 1], [], 1, 9),  # 4 of 9
    ]
    assert CutAndMigrate(0.7).decide(view_of(actors)) == (Migration(0, 0, 3), Migration(1, 1, 2), Migration(2, 1, 3))


def test_an_actor_without_work_takes_nothing():
    actors = [(9, [1], [], 0, 99), (10, [], [], 10, 99)]
    assert CutAndMigrate(0.7).decide(view_of(actors)) == ()
    assert not triggered(CutAndMigrate(0.7), view_of(actors))


def test_waiting_responses_move_too():
    actors = [(8, [4], [6], 0, 0), (0, [1, 1], [], 2, 99)]
    assert CutAndMigrate(0.7).decide(view_of(actors)) == (Migration(1, 0, 1), Migration(0, 0, 1))


@pytest.mark.parametrize(("tau", "finished", "assigned"), [(0.55, 11, 20), (0.7, 7, 10), (0.07, 7, 100), (1.0, 1, 1)])
def test_a_share_of_exactly_tau_is_enough(tau, finished, assigned):
    some_rule = CutAndMigrate(tau)
    unfinished = ints([max(assigned - finished, 1), 1])
    assert some_rule.triggered(ints([assigned, 1]), ints([finished, 0]), unfinished)
    assert not some_rule.triggered(ints([assigned, 1]), ints([finished - 1, 0]), unfinished)


def test_response_columns_are_asked_for_only_where_slots_and_kv_may_allow_a_cut():
    asked = []
    short_of_kv = [(9, [5], [], 0, 99), (0, [1], [], 1, 0), (0, [1], [], 1, 4)]
    assert CutAndMigrate(0.7).decide(view_of(short_of_kv, asked=asked)) == ()
    assert asked == []
    actors = [(7, [1, 1, 1], [], 3, 99), (9, [1], [], 0, 99), (0, [1, 1], [], 2, 99), (0, [1], [], 0, 99)]
    CutAndMigrate(0.7).decide(view_of(actors, asked=asked))
    assert asked == [1]


def test_global_cut_gathers_once():
    actors = [(5, [4], [], 3, 99), (4, [2, 3], [], 4, 99), (3, [1], [], 3, 99)]
    assert GlobalCut(3).decide(view_of(actors)) == ()
    assert GlobalCut(4).decide(view_of(actors)) == (Migration(0, 0, 1), Migration(3, 2, 1))
    assert GlobalCut(4).decide(view_of(actors, cuts_so_far=1)) == ()


def test_global_cut_keeps_another_actor_where_kv_is_short():
    actors = [(5, [4], [], 3, 0), (4, [2, 3], [], 4, 4), (3, [1], [], 3, 0)]
    assert GlobalCut(4).decide(view_of(actors)) == (Migration(3, 2, 1),)


def test_global_cut_of_equal_actors_keeps_the_one_with_most_kv():
    actors = [(5, [4], [], 3, 99), (5, [6], [], 3, 99), (5, [6], [], 3, 99)]
    assert GlobalCut(9).decide(view_of(actors)) == (Migration(2, 2, 1), Migration(0, 0, 1))


def test_rules_by_name():
    for some_rule in (CutAndMigrate(), CutAndMigrate(0.3), GlobalCut(17)):
        assert rule(some_rule.spec) == some_rule
    assert CutAndMigrate().spec == MigrationSpec(kind="cut-and-migrate", value=0.7)
    with pytest.raises(InputError, match="unknown migration rule 'x': known are cut-and-migrate, global-cut"):
        rule(MigrationSpec(kind="x", value=1))


@pytest.mark.parametrize(
    ("kind", "value"),
    [("cut-and-migrate", v) for v in (0, -0.1, 1.01, np.nan)]
    + [("global-cut", v) for v in (0, -3, 2.5, np.nan, np.inf)],
)
def test_parameters_out_of_range_are_refused(kind, value):
    with pytest.raises(InputError, match=f"^{kind}: ") as caught:
        rule(MigrationSpec(kind=kind, value=value))
    assert "\n" not in str(caught.value)
