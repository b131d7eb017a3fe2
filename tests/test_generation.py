"""Event to event against token by token: the same step, two simulators."""

from dataclasses import replace
from operator import eq

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless.executor import Life
from rlhfless.types.arrays import BoolArray, FloatArray
from rlhfless.types.cluster import Cluster
from rlhfless.types.plan import MigrationSpec
from sim.actor import Actor
from sim.engine import Batch, Engine, prefill_timer
from sim.generation import Generation
from sim.network import Links
from tests.profiles import tiny_profile
from tests.reference import Response, TokenByToken, Worker

RELATIVE = 1e-9


def at_once(actor: Actor, now_s: float) -> float:
    """A process that is there when it is asked for."""
    return now_s


def tokens_left(tokens: int, held: int, block: int) -> int:
    """Of a prompt's tokens, those beyond the whole blocks of the first `held`, and at least one."""
    return next(left for left in range(1, tokens + 1) if (tokens - left) % block == 0 and tokens - left <= held)


def both(
    seed: int,
    *,
    actors: int,
    prompts: int,
    n: int,
    capacity: int,
    slots: int,
    caching: bool,
    spec: MigrationSpec | None,
    kv_bytes: float = 1e5,
    deaths: int = 0,
    mixed: bool = False,
    begun: bool = False,
    stop: int | None = None,
    reserve: int = 0,
    block: int = 1,
) -> tuple[Generation, TokenByToken, list[Response], list[Worker]]:
    """Run one random step in both simulators. `begun`: responses bring tokens from before, some all of theirs; `stop`:
    generation ends when so many have ended; `reserve` more actors, of twice the GPUs, start when a rule says; `block`:
    tokens of a KV block."""
    rng = np.random.default_rng(seed)
    sizes = {"max_slots": slots, "kv_bytes_per_token": kv_bytes, "kv_block_tokens": block}
    profile = tiny_profile(kv_capacity_tokens=capacity, **sizes)
    cluster = Cluster.uniform("l40s", actors + reserve, gpus_per_host=2)
    prompt_tokens = rng.integers(1, 60, prompts).tolist()
    target = np.minimum(rng.lognormal(3.6, 0.9, prompts * n).astype(int) + 1, 300).tolist()
    brought = [int(rng.integers(0, length + 1)) if begun and rng.random() < 0.7 else 0 for length in target]
    slowdown = np.exp(0.2 * rng.standard_normal(actors)).tolist()
    start_s = rng.uniform(0, 2.0, actors).tolist()
    groups = [*np.array_split(rng.permutation(prompts), actors), *([np.empty(0, dtype=int)] * reserve)]
    batch = Batch(
        prompt_tokens=prompt_tokens,
        responses_per_prompt=n,
        target=target,
        generated=list(brought),
        first_s=[-1.0] * len(target),
    )
    # actors of twice the GPUs: twice the KV, half the time
    larger = tiny_profile(kv_capacity_tokens=2 * capacity, tp=2, **sizes)
    larger = replace(larger, speed=0.5)
    profiles = [larger if mixed and index % 2 else profile for index in range(actors)] + [larger] * reserve
    slowdown += np.exp(0.2 * rng.standard_normal(reserve)).tolist()
    startup_s = [0.0] * actors + rng.uniform(0, 1.0, reserve).tolist()
    start_s += [0.0] * reserve
    timers = [prefill_timer(each) for each in profiles]
    simulated, workers, responses = [], [], {}
    for index, group in enumerate(groups):
        own = [int(p) * n + s for p in group for s in range(n)]
        first = {r: 0 if caching and r % n else int(rng.integers(0, prompt_tokens[r // n] + 1)) for r in own}
        if block > 1:  # what is there is there in whole blocks, and a prompt's last token is not
            first = {r: tokens_left(prompt_tokens[r // n], prompt_tokens[r // n] - first[r], block) for r in own}
        engine = Engine(
            profile=profiles[index],
            prefill_timer=timers[index],
            batch=batch,
            slots=slots,
            prefix_caching=caching,
            first_tokens=first,
            slowdown=slowdown[index],
        )
        engine.submit(r for r in own if brought[r] < target[r])
        life = Life(function="decode", index=index, gpus=(index,), at_s=0.0)
        host = int(cluster.host_of[index])
        simulated.append(
            Actor(
                index=index,
                host=host,
                engine=engine,
                life=life,
                start_s=start_s[index],
                waits=((start_s[index], "wait-weights"),),
                state="working" if index < actors else "reserved",
            )
        )
        worker = Worker(
            index=index,
            host=host,
            slots=slots,
            slowdown=slowdown[index],
            start_s=start_s[index],
            caching=caching,
            profile=profiles[index],
            state="working" if index < actors else "reserved",
            startup_s=startup_s[index],
        )
        for r in own:
            responses[r] = Response(
                number=r,
                prompt=r // n,
                prompt_tokens=prompt_tokens[r // n],
                target=target[r],
                planned_prefill=first[r],
                home=index,
                generated=brought[r],
                seen=brought[r],
                end_s=0.0 if brought[r] == target[r] else -1.0,
            )
            if brought[r] < target[r]:
                worker.queue.append(responses[r])
        workers.append(worker)
    came = sum(map(eq, brought, target))

    def enough(ends_s: FloatArray) -> BoolArray | None:
        ended = np.isfinite(ends_s)
        return ended if stop is not None and ended.sum() >= came + stop else None

    links = Links(cluster=cluster)

    def start(actor: Actor, now_s: float) -> float:
        return now_s + startup_s[actor.index]

    generation = Generation(spec, batch, simulated, links, at_once, start, at_once, enough)
    mortal = rng.permutation(actors + reserve)[: min(deaths, actors - 1)]
    killed = [(int(k), float(rng.uniform(0.3, 3.0))) for k in mortal]
    generation.run(killed)
    slow = TokenByToken(spec, workers, Links(cluster=cluster), stop)
    slow.run(killed)
    return generation, slow, [responses[r] for r in sorted(responses)], workers


SPECS = st.one_of(
    st.none(),
    st.floats(0.3, 1.0).map(lambda tau: MigrationSpec(kind="cut-and-migrate", value=tau)),
    st.integers(1, 20).map(lambda left: MigrationSpec(kind="global-cut", value=float(left))),
)


def assert_equal(generation: Generation, slow: TokenByToken, responses: list[Response], workers: list[Worker]) -> None:
    np.testing.assert_allclose(generation.ledger.end_s, [r.end_s for r in responses], rtol=RELATIVE)
    np.testing.assert_allclose(generation.batch.first_s, [r.first_s for r in responses], rtol=RELATIVE)
    assert generation.moves == [r.moves for r in responses]
    assert generation.actor_of == [r.at for r in responses]
    assert generation.batch.generated == [r.target for r in responses]
    engines = [actor.engine for actor in generation.actors]
    assert sum(e.preemptions for e in engines) == slow.preemptions
    assert sum(e.prefilled_tokens for e in engines) == slow.prefilled
    assert sum(e.recomputed_tokens for e in engines) == slow.recomputed
    assert generation.cuts == slow.cuts
    assert generation.failures == slow.failures
    assert sum(e.generated_tokens for e in engines) == sum(r.target for r in responses)
    assert generation.moved_kv_bytes == pytest.approx(slow.moved_bytes)
    for actor, worker in zip(generation.actors, workers, strict=True):
        if worker.state == "gone" and generation.moved_kv_bytes == 0:
            assert actor.life.at_s == pytest.approx(worker.end_s, rel=RELATIVE)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    actors=st.integers(1, 6),
    per_actor=st.integers(1, 8),
    n=st.integers(1, 4),
    capacity=st.integers(360, 1500),
    slots=st.integers(1, 16),
    caching=st.booleans(),
    spec=SPECS,
    kv_bytes=st.sampled_from([1e5, 2e6]),
    deaths=st.integers(0, 3),
    mixed=st.booleans(),
    block=st.sampled_from([1, 4, 16]),
)
def test_event_jump_equals_token_by_token(
    seed, actors, per_actor, n, capacity, slots, caching, spec, kv_bytes, deaths, mixed, block
):
    run = both(
        seed,
        actors=actors,
        prompts=actors * per_actor,
        n=n,
        capacity=capacity,
        slots=slots,
        caching=caching,
        spec=spec,
        kv_bytes=kv_bytes,
        deaths=deaths,
        mixed=mixed,
        block=block,
    )
    assert_equal(*run)
    planned = sum(response.planned_prefill for response in run[2])
    assert run[1].prefilled <= planned
    if run[1].failures == 0 == sum(run[0].moves):
        assert run[1].prefilled == planned


def test_the_cases_reach_queueing_preemption_and_migration():
    """The comparison above means something only if its cases do what it is about."""
    preemptions = moves = transferred = queued = 0
    for seed in range(12):
        spec = MigrationSpec(kind="cut-and-migrate", value=0.5)
        run = both(seed, actors=4, prompts=24, n=2, capacity=600, slots=8, caching=True, spec=spec)
        assert_equal(*run)
        generation, starts = run[0], {actor.start_s for actor in run[0].actors}
        preemptions += sum(actor.engine.preemptions for actor in generation.actors)
        moves += sum(generation.moves)
        transferred += generation.moved_kv_bytes > 0
        queued += sum(first not in starts for first in generation.batch.first_s)
    assert preemptions > 20
    assert moves > 20
    assert transferred > 2
    assert queued > 50


def test_deaths_among_cuts_and_moves() -> None:
    """Many actors, several of which die while others are cut and responses are on their way."""
    spec = MigrationSpec(kind="cut-and-migrate", value=0.3)
    cuts = failures = 0
    for seed in range(12):
        run = both(
            seed, actors=12, prompts=72, n=2, capacity=900, slots=16, caching=True, spec=spec, kv_bytes=2e6, deaths=6
        )
        assert_equal(*run)
        cuts += run[0].cuts
        failures += run[0].failures
    assert cuts > 60
    assert failures > 20
