"""Peers' policies: every prompt once, what each rule promises, the repack rule; the bake-off command."""

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from experiments.bakeoff import app, needs, undominated
from experiments.rounds import LOOPS
from rlhfless.errors import InfeasibleError, InputError
from rlhfless.scheduler.assignment import dealt
from rlhfless.scheduler.iteration import iteration_s
from rlhfless.scheduler.midstep import Migration
from rlhfless.scheduler.migration import rule
from rlhfless.scheduler.peers import ASSIGNMENTS, BATCH_SLOWDOWN, LONG_SHARE, PEERS, TAIL_SHARE, batch_limit
from rlhfless.scheduler.policies import POLICIES
from rlhfless.scheduler.repack import KV_FULL, Repack
from rlhfless.types.arrays import floats, ints
from rlhfless.types.plan import MigrationSpec, Speed
from tests.test_generation import assert_equal, both
from tests.test_migration import ACTORS, obeys_the_laws, triggered, view_of

SPEED = Speed(gpus=1, batch=ints([1, 100]), iteration_s=floats([0.01, 0.06]))


RANKED = sorted({*ASSIGNMENTS} - {"probes-first"})
"""Rules that go by expected length."""


@given(
    st.sampled_from(RANKED),
    st.lists(st.floats(0.5, 5000), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_every_response_is_given_out_once_and_no_actor_is_idle(name, estimates, n, actors):
    actors = min(actors, len(estimates))
    shares = ASSIGNMENTS[name](estimates, n, actors, SPEED)
    assert len(shares) == actors
    assert all(share.size for share in shares)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(estimates) * n))
    for share in shares:
        prompts = share.reshape(-1, n) // n
        assert (prompts == prompts[:, :1]).all(), "a prompt's responses together"
        lengths = np.array(estimates)[prompts[:, 0]]
        assert (np.diff(lengths) <= 0).all(), "the longest first"


@pytest.mark.parametrize("name", sorted(ASSIGNMENTS))
def test_wrong_input_is_refused(name):
    with pytest.raises(InfeasibleError, match="4 actors for 3 prompts"):
        ASSIGNMENTS[name]([1.0, 2.0, 3.0], 1, 4, SPEED)
    with pytest.raises(InputError, match="one finite number for each prompt"):
        ASSIGNMENTS[name]([1.0, np.nan], 1, 1, SPEED)


def times(shares, estimates, n):
    """Seconds of each actor, as long as its longest at its first batch."""
    longest = np.array([estimates[share // n].max() for share in shares])
    return longest * iteration_s(SPEED, np.array([float(share.size) for share in shares]))


@settings(deadline=None)
@given(st.lists(st.floats(1, 100), min_size=2, max_size=9), st.integers(1, 2), st.integers(1, 4))
def test_groups_of_equal_time_end_as_early_as_contiguous_groups_can(estimates, n, actors):
    """Against every way to cut the ranked prompts."""
    estimates, actors = np.sort(estimates)[::-1], min(actors, len(estimates))
    best = np.inf
    for cuts in combinations(range(1, estimates.size), actors - 1):
        edges = [0, *cuts, estimates.size]
        shares = [np.arange(a * n, b * n) for a, b in pairwise(edges)]
        best = min(best, times(shares, estimates, n).max())
    found = ASSIGNMENTS["time-balanced"](estimates, n, actors, SPEED)
    assert times(found, estimates, n).max() == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("name", "share"), [("skew-split", LONG_SHARE), ("tail-isolated", TAIL_SHARE)])
def test_the_long_ones_stand_apart_on_as_many_actors_as_balance_both_parts(name, share):
    rng = np.random.default_rng(0)
    estimates = np.sort(rng.lognormal(5, 1, 60))[::-1]
    shares = ASSIGNMENTS[name](estimates, 4, 8, SPEED)
    long = int(np.ceil(share * 60))
    apart = [set((s // 4).tolist()) <= set(range(long)) for s in shares]
    mixed = [any(p < long for p in (s // 4).tolist()) for s in shares]
    assert apart == mixed
    assert 1 <= sum(apart) < 8
    deal = (lambda part, count: dealt(part, 4, count)) if name == "skew-split" else (
        lambda part, count: ASSIGNMENTS["time-balanced"](part, 4, count, SPEED)
    )  # fmt: skip
    every = [
        max(
            times(deal(estimates[:long], own), estimates[:long], 4).max(),
            times(deal(estimates[long:], 8 - own), estimates[long:], 4).max(),
        )
        for own in range(1, min(7, long) + 1)
    ]
    assert times(shares, estimates, 4).max() == pytest.approx(min(every))
    assert min(every) < max(every)


def test_longest_first_keeps_grahams_bound():
    rng = np.random.default_rng(1)
    estimates = rng.lognormal(5, 1, 50)
    shares = ASSIGNMENTS["longest-first"](estimates, 2, 6, SPEED)
    loads = [float(estimates[share[::2] // 2].sum()) for share in shares]
    assert max(loads) <= (4 / 3 - 1 / 18) * max(estimates.sum() / 6, estimates.max())


def test_the_bound_on_a_batch_is_where_iterations_get_slower():
    most = batch_limit(SPEED)
    one, at, beyond = iteration_s(SPEED, np.array([1.0, most, most + 1.0]))
    assert at <= BATCH_SLOWDOWN * one < beyond


@given(ACTORS, st.integers(1, 12))
def test_repack_obeys_the_laws_and_its_bounds(actors, most):
    some_rule, view = Repack(most), view_of(actors)
    moves = some_rule.decide(view)
    obeys_the_laws(view, moves)
    assert moves == some_rule.decide(view)
    if moves:
        assert triggered(some_rule, view)
    for target in {move.target for move in moves}:
        taken = [move.source for move in moves if move.target == target]
        assert view.running[target] + len(taken) <= most
        assert view.waiting[target] == 0
        tokens = view.context_tokens[target] + sum(int(view.context_tokens[s]) for s in set(taken))
        assert tokens <= KV_FULL * (view.context_tokens[target] + view.kv_headroom_tokens[target])
    for source in {move.source for move in moves}:
        assert len({move.target for move in moves if move.source == source}) == 1


def test_repack_takes_the_fullest_that_fits():
    actors = [(5, [9], [], 9, 99), (5, [20, 20], [], 9, 99), (5, [30, 30, 30], [], 9, 99), (5, [5] * 4, [], 0, 99)]
    assert Repack(4).decide(view_of(actors)) == (Migration(0, 0, 2),)
    assert Repack(3).decide(view_of(actors)) == (Migration(0, 0, 1),)
    assert Repack(2).decide(view_of(actors)) == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    actors=st.integers(2, 6),
    capacity=st.integers(360, 2000),
    slots=st.integers(1, 30),
    most=st.integers(1, 30),
    deaths=st.integers(0, 2),
)
def test_repack_is_the_same_in_both_simulators(seed, actors, capacity, slots, most, deaths):
    spec = MigrationSpec(kind="repack", value=float(most))
    run = both(
        seed, actors=actors, prompts=5 * actors, n=2, capacity=capacity, slots=slots, caching=True, spec=spec,
        deaths=deaths,
    )  # fmt: skip
    assert_equal(*run)


def test_repack_by_name():
    assert rule(Repack(7).spec) == Repack(7)
    for value in (0.0, 2.5, -1.0):
        with pytest.raises(InputError, match=r"^repack: "):
            rule(MigrationSpec(kind="repack", value=value))


def test_each_peer_is_a_policy_that_says_where_it_comes_from():
    for name, peer in PEERS.items():
        assert (name in POLICIES) != (name in LOOPS)
        assert peer.paper
        assert peer.assumed
    assert [name for name, peer in PEERS.items() if not peer.synchronous] == ["laminar", "rollpacker", "april"]
    assert needs("seer") == "probes, KV pool"
    assert needs("laminar") == "migration"
    assert needs("rhymerl") == "history"
    assert needs("oracle:lpt") == "true lengths"
    assert needs("verl") == "nothing"


def test_bakeoff(tmp_path):
    names = "rlhfless,elastic,rhymerl,streamrl,tailsieve,seer,laminar,rollpacker,april,oracle:lpt"
    arguments = ["--trace", "gsm8k", "--prompts-per-step", "24", "--policy", names, "--nodes", "8", "--seed", "3"]
    first = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "a")], catch_exceptions=False)
    assert first.exit_code == 0, first.output
    assert "laminar: Laminar (arXiv 2510.12633), dynamic repack; * responses may be older" in first.output
    assert "| april *" in first.output
    assert "april, all prompts delivered in 6 steps: " in first.output
    CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "b")], catch_exceptions=False)
    for file in ("bakeoff.csv", "bakeoff.json", "bakeoff.png"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    result = json.loads((tmp_path / "a" / "bakeoff.json").read_text())
    rows = {row["policy"]: row for row in result["rows"]}
    assert set(rows) == {"verl", *names.split(",")}
    for row in rows.values():
        if row["policy"] not in LOOPS:  # a step that stops early ends before its longest response would
            assert row["generation_s"] >= result["bound"]["generation_s"]
            assert row["decode_gpu_s"] >= result["bound"]["decode_gpu_s"]
        apart = row["policy"] in ("laminar", "rollpacker", "april")
        assert (row["undominated"] is None) == (apart or row["policy"] == "oracle:lpt")
        assert (row["generation_speedup"] is None) == (row["held_saving"] is None) == apart
        assert (row["gives_up"] is None) != apart
        whole = row["policy"] != "rollpacker"
        assert (row["trained_tokens"] == rows["verl"]["trained_tokens"]) == whole
    competing = [row for row in rows.values() if row["undominated"] is not None]
    for row in competing:
        beaten = any(
            other["generation_s"] <= row["generation_s"] and other["held_gpu_s"] < row["held_gpu_s"]
            for other in competing
        )
        assert bool(row["undominated"]) != beaten
    assert result["undominated"] == [name for name in result["undominated"] if rows[name]["undominated"]]
    assert undominated([]) == []


def test_bakeoff_says_what_is_wrong(tmp_path):
    done = CliRunner().invoke(app, ["--trace", "nothing", "--out", str(tmp_path)])
    assert isinstance(done.exception, InputError)
    done = CliRunner().invoke(app, ["--policy", "nobody", "--out", str(tmp_path)])
    assert isinstance(done.exception, InputError)
