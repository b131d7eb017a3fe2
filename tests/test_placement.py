"""Laws of placement and of transfers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.errors import InfeasibleError
from rlhfless.scheduler.placement import (
    Positions,
    hiding_slack_s,
    kv_s,
    learner_gpus,
    place,
    positions,
    routes,
)
from rlhfless.types.arrays import ints
from rlhfless.types.cluster import BROADCAST_CHUNK_BYTES, Cluster, Host, Link
from rlhfless.units import GIB
from tests.profiles import tiny_profile

L40S = Cluster.uniform("l40s", 16)


@st.composite
def sites(draw: st.DrawFn) -> tuple[Cluster, list[int], int, list[int]]:
    """(cluster with hosts of several sizes, free GPUs, tp, learner)."""
    kind = Cluster.uniform("l40s", 1)
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    hosts = tuple(Host(gpus=size, local=kind.hosts[0].local, network=kind.hosts[0].network) for size in sizes)
    cluster = Cluster(gpu=kind.gpu, hosts=hosts)
    free = sorted(draw(st.sets(st.integers(0, cluster.gpus - 1), min_size=1)))
    learner = free[: draw(st.integers(1, len(free)))]
    return cluster, free, draw(st.integers(1, max(sizes))), learner


@given(sites(), st.booleans())
@settings(max_examples=300)
def test_positions(site: tuple[Cluster, list[int], int, list[int]], exclusive: bool) -> None:
    cluster, free, tp, learner = site
    usable = [gpu for gpu in free if not (exclusive and gpu in learner)]
    whole = sum(sum(cluster.host_of[gpu] == host for gpu in usable) // tp for host in range(len(cluster.hosts)))
    if whole == 0:
        with pytest.raises(InfeasibleError, match=f"no host has {tp} GPUs free"):
            positions(cluster, ints(free), tp, ints(learner), exclusive)
        return
    got = positions(cluster, ints(free), tp, ints(learner), exclusive)
    used = got.gpus.ravel().tolist()
    assert got.gpus.shape == (whole, tp)
    assert got.left_over == len(usable) - whole * tp
    nearest = positions(cluster, ints(free), 1, ints(learner), exclusive).gpus.ravel()
    assert (nearest[got.offset[:, None] + np.arange(tp)] == got.gpus).all(), "offsets count the nearest GPUs"
    assert len(set(used)) == len(used), "disjoint"
    assert set(used) <= set(usable)
    assert (cluster.host_of[got.gpus] == got.host[:, None]).all(), "inside one host"
    near = np.isin(got.host, cluster.host_of[learner])
    assert (np.diff(near.astype(int)) <= 0).all(), "hosts of the learner come first"
    for some in (got.host[near], got.host[~near]):
        assert (np.diff(some) >= 0).all(), "then hosts by number"
    for host in set(got.host.tolist()):
        own = np.isin(got.gpus[got.host == host], learner).ravel().astype(int)
        assert (np.diff(own) <= 0).all(), "on a host, the learner's GPUs come first"


def test_tp_beyond_any_host() -> None:
    with pytest.raises(InfeasibleError, match="an actor of 9 GPUs fits on no host: the largest has 8"):
        positions(L40S, ints(range(16)), 9, ints([0]), False)


def test_learner_alone_on_its_gpus_when_exclusive() -> None:
    got = positions(L40S, ints(range(16)), 2, ints(range(4)), True)
    assert got.gpus[0].tolist() == [4, 5]
    with pytest.raises(InfeasibleError, match="beside the learner's 16"):
        positions(L40S, ints(range(16)), 2, ints(range(16)), True)


@pytest.mark.parametrize(
    ("parameters", "tp", "algorithm", "free", "expected"),
    [
        (1e9, 1, "grpo", 16, (1, True)),  # 16 GB in 46068 MiB x 0.9
        (3.09e9, 2, "grpo", 16, (2, True)),  # 49 GB
        (3.09e9, 2, "ppo", 16, (4, True)),  # 99 GB: 3 GPUs, a multiple of 2
        (7.6e9, 4, "ppo", 16, (8, True)),  # 243 GB: 6 GPUs, a multiple of 4
        (14e9, 2, "ppo", 16, (16, True)),  # 448 GB: 10 GPUs, whole hosts
        (70e9, 2, "ppo", 16, (16, False)),  # 2240 GB: more than there is
        (14e9, 2, "ppo", 9, (9, False)),
    ],
)
def test_default_learner(parameters: float, tp: int, algorithm: str, free: int, expected: tuple[int, bool]) -> None:
    profile = tiny_profile(tp=tp, parameters=parameters).data
    assert learner_gpus(profile, L40S, algorithm, free) == expected  # type: ignore[arg-type]


def _links(cluster: Cluster) -> tuple[Link, Link]:
    return cluster.hosts[0].local, cluster.hosts[0].network


def test_weights_reach_positions_one_after_the_other() -> None:
    cluster = Cluster.uniform("l40s", 24)
    local, network = _links(cluster)
    at = positions(cluster, ints(range(24)), 2, ints(range(4)), False)
    size = 2 * GIB
    arrival = routes(cluster, at, ints(range(4)), size).weights_s
    one = local.transfer_s(size)
    np.testing.assert_allclose(arrival[:4], [0, one, 2 * one, 3 * one])
    hop = BROADCAST_CHUNK_BYTES / network.bytes_per_s + network.latency_s
    first = size / network.bytes_per_s + hop
    np.testing.assert_allclose(arrival[4:8], first + one * np.arange(4))
    np.testing.assert_allclose(arrival[8:], first + hop + one * np.arange(4))


def test_no_position_is_free_of_transfers_beside_an_exclusive_learner() -> None:
    at = positions(L40S, ints(range(16)), 2, ints(range(4)), True)
    way = routes(L40S, at, ints(range(4)), GIB)
    one = _links(L40S)[0].transfer_s(GIB)
    assert not way.shared
    np.testing.assert_allclose(way.weights_s[:2], [one, 2 * one])
    assert kv_s(way, np.full(1, 1e9), np.array([0]))[0] == pytest.approx(_links(L40S)[0].transfer_s(1e9))


def test_kv_leaves_by_two_links_in_order_and_candidates_do_not_mix() -> None:
    local, network = _links(L40S)
    at = positions(L40S, ints(range(16)), 4, ints(range(4)), False)
    way = routes(L40S, at, ints(range(4)), GIB)
    one = kv_s(way, np.array([9e9, 1e9, 2e9, 3e9]), np.arange(4))
    expected = [0, local.transfer_s(1e9), network.transfer_s(2e9), network.transfer_s(2e9) + network.transfer_s(3e9)]
    np.testing.assert_allclose(one, expected)
    two = kv_s(way, np.array([9e9, 1e9, 9e9, 1e9, 2e9, 3e9]), np.array([0, 1, 0, 1, 2, 3]))
    np.testing.assert_allclose(two[2:], expected)
    np.testing.assert_allclose(two[:2], expected[:2])


def test_a_learner_on_two_hosts_gathers_its_shards_and_both_send_kv() -> None:
    cluster = Cluster.uniform("l40s", 32)
    local, network = _links(cluster)
    at = positions(cluster, ints(range(32)), 4, ints(range(16)), False)
    way = routes(cluster, at, ints(range(16)), 2 * GIB)
    gathered, one = network.transfer_s(GIB), local.transfer_s(2 * GIB)
    np.testing.assert_allclose(way.weights_s[:4], [gathered, gathered + one, gathered + one, gathered + 2 * one])
    assert way.weights_s[4] > gathered + 2 * GIB / network.bytes_per_s
    sent = kv_s(way, np.full(8, 1e9), np.arange(8))
    here, there = local.transfer_s(1e9), network.transfer_s(1e9)
    np.testing.assert_allclose(sent, [0, here, here, 2 * here, there, there, 2 * there, 2 * there])


@given(st.integers(0, 2**32 - 1))
def test_hiding_slack_by_its_words(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 5, 4)
    position = np.concatenate([np.arange(count) for count in counts])
    weights, sent, decode = rng.uniform(0, 2, 4), rng.uniform(0, 2, position.size), rng.uniform(0, 5, position.size)
    got = hiding_slack_s(0.5, weights, sent, decode, position)
    begin = 0
    for count, slack in zip(counts.tolist(), got, strict=True):
        worst = [(0.5 + decode[begin]) - (weights[i] + sent[begin + i] + decode[begin + i]) for i in range(1, count)]
        assert slack == pytest.approx(min(worst, default=0.0))
        begin += count


def _at(tp: int, learner: int, exclusive: bool = False) -> Positions:
    return positions(L40S, ints(range(16)), tp, ints(range(learner)), exclusive)


def _nearest(at: Positions, actors: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, at.gpus[:actors].tolist()))


def test_preparation_takes_turns_on_the_learners_gpus() -> None:
    got = place(_nearest(_at(2, 4), 3), ints(range(4)), "ppo", "serverless")
    assert got.decode == ((0, 1), (2, 3), (4, 5))
    assert got.preparation == tuple((name, (0, 1, 2, 3)) for name in ("reward", "reference", "critic"))
    grpo = place(_nearest(_at(2, 6), 1), ints(range(6)), "grpo", "serverless")
    assert [name for name, _ in grpo.preparation] == ["reward", "reference"]


@pytest.mark.parametrize(("actors", "gpus"), [(3, 8), (6, 12)])
def test_colocated_learner_has_all_reserved_gpus(actors: int, gpus: int) -> None:
    got = place(_nearest(_at(2, 8), actors), ints(range(8)), "ppo", "colocated")
    assert got.learner == tuple(range(gpus))
    assert {own for _, own in got.preparation} == {got.learner}


def test_split_keeps_decode_off_the_learner() -> None:
    got = place(_nearest(_at(2, 4, exclusive=True), 6), ints(range(4)), "ppo", "split")
    assert got.learner == (0, 1, 2, 3)
    assert not set(got.learner) & {gpu for gpus in got.decode for gpu in gpus}
    assert {gpus for _, gpus in got.preparation} == {got.learner}
