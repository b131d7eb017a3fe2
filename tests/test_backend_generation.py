"""Ownership under every order of events: the generation's controller against actors that race, lag and die."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine_types import EngineCounters, EngineError, Finished, Partial, Request
from backends.generation import Generation
from backends.generation_types import End
from backends.vllm_actor import NOTHING, Update
from rlhfless.types.arrays import floats, ints
from rlhfless.types.plan import ElasticTerms, MigrationSpec, Speed

VERSION = "7"
BLOCK, BLOCKS = 16, 40


def token(seed: int, position: int) -> int:
    """The model: what comes at a position depends on the response and the position alone."""
    return (seed * 7919 + position * 104729) % 1000


@dataclass
class Engine:
    """An actor that runs when it is let; what it says is on its way until it is delivered."""

    slots: int
    live: dict[int, tuple[Request, list[int]]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    parted: dict[int, Partial] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    orders: list[tuple[str, Sequence[Request], Sequence[int], Sequence[int]]] = field(default_factory=list)
    outbox: list[Finished] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    iterations: int = 0
    generated: int = 0
    over: bool = False

    def counters(self) -> EngineCounters:
        used = sum(-(-(len(r.token_ids) + len(t)) // BLOCK) for r, t in map(self.live.get, self.running))
        return EngineCounters(
            iterations=self.iterations,
            generated_tokens=self.generated,
            running=len(self.running),
            waiting=len(self.live) - len(self.running),
            kv_blocks=BLOCKS,
            kv_blocks_used=min(used, BLOCKS),
            block_tokens=BLOCK,
        )

    def obey(self) -> None:
        what, requests, leaving, first = self.orders.pop(0)
        if what == "rearrange":
            for number in first:
                if number in self.queue:
                    queue = [number, *(other for other in self.queue if other != number)]
                    self.live |= {other: self.live.pop(other) for other in queue}
            for number in self.live.keys() & leaving:
                self.parted[number] = self.partial(number)
                self.leave(number)
        if what == "drain":
            given_up = {number: self.partial(number) for number in self.live}
            self.live.clear()
            self.running.clear()
            self.say(over="drained", given_up=given_up)
            self.over = True
        for request in requests:
            assert request.response not in self.live, "sent twice"
            self.live[request.response] = (request, [])

    @property
    def queue(self) -> list[int]:
        return [number for number in self.live if number not in self.running]

    def leave(self, number: int) -> None:
        del self.live[number]
        self.running.discard(number)
        self.told.pop(number, None)

    def partial(self, number: int, since: int = 0) -> Partial:
        _, tokens = self.live[number]
        if not tokens:
            return NOTHING
        times = {"admitted_s": 1.0, "first_token_s": 2.0, "last_token_s": 3.0}
        logprobs = tuple(-float(each) for each in tokens[since:])
        return Partial(tokens=tuple(tokens[since:]), logprobs=logprobs, cached_tokens=0, **times)

    def step(self) -> None:
        self.iterations += bool(self.live)
        self.running |= set(self.queue[: self.slots - len(self.running)])
        for number in sorted(self.running):
            request, tokens = self.live[number]
            self.generated += 1
            tokens.append(token(request.seed, len(request.token_ids) + len(tokens)))
            if len(tokens) == request.max_tokens:
                done = self.partial(number)
                self.outbox.append(Finished(response=number, finish_reason="length", weight_version=VERSION, done=done))
                self.leave(number)

    def say(self, report: bool = False, **fields: object) -> None:
        told = {}
        if report:
            told = {n: self.partial(n, self.told.get(n, 0)) for n in self.live if len(self.live[n][1])}
            self.told = {n: len(tokens) for n, (_, tokens) in self.live.items()}
        progress = {number: len(tokens) for number, (_, tokens) in self.live.items() if tokens}
        values = {
            "finished": tuple(self.outbox),
            "progress": progress,
            "queue": tuple(self.queue),
            "report": told,
            "parted": self.parted,
            "counters": self.counters(),
        } | fields
        self.outbox, self.parted = [], {}
        self.updates.append(Update(**values))  # type: ignore[arg-type]


class World:
    """The wire, with the randomness of a cluster."""

    def __init__(
        self,
        rng: random.Random,
        rule: MigrationSpec | None,
        actors: int,
        responses: int,
        slots: int,
        reserve: int = 0,
    ) -> None:
        """`reserve` more actors start when the rule, which must name them, says."""
        self.rng = rng
        self.requests = [
            Request(
                response=number,
                token_ids=list(range(rng.randint(1, 20))),
                max_tokens=rng.randint(1, 60),
                temperature=0.0,
                seed=number,
            )
            for number in range(responses)
        ]
        order = list(range(responses))
        rng.shuffle(order)
        shares = [order[index::actors] for index in range(actors)] + [[] for _ in range(reserve)]
        self.engines: dict[int, Engine] = {}
        self.starting = dict.fromkeys(range(actors), slots)
        self.slots = slots
        self.ended: list[tuple[int, End]] = []
        self.asked: list[int] = []
        self.revived = self.raced = self.hastened = 0
        self.generation = Generation(rule, self.requests, shares, [slots] * (actors + reserve), VERSION, self)

    def submit(self, actor: int, requests: Sequence[Request]) -> None:
        self.engines[actor].orders.append(("submit", requests, (), ()))

    def drain(self, actor: int) -> None:
        self.engines[actor].orders.append(("drain", (), (), ()))

    def rearrange(self, actor: int, leaving: Sequence[int], first: Sequence[int]) -> None:
        assert leaving or first
        self.hastened += len(first)
        self.engines[actor].orders.append(("rearrange", (), leaving, first))

    def release(self, actor: int, end: End) -> None:
        engine = self.engines.pop(actor, None)
        assert engine is not None or self.starting.pop(actor, None) is not None, "released twice"
        if end == "done":
            assert engine is None or not engine.live, "released with work"
        self.ended.append((actor, end))

    def start(self, actor: int) -> None:
        assert actor not in self.asked, "asked for twice"
        self.asked.append(actor)
        self.starting[actor] = self.slots

    def revive(self, actor: int) -> None:
        self.revived += 1
        self.starting[actor] = self.slots

    def happen(self, deadliness: float) -> None:
        """One event somewhere."""
        rng = self.rng
        index = rng.choice([*self.starting, *self.engines])
        if index in self.starting:
            if rng.random() < deadliness:
                self.generation.fail(index)
            elif rng.random() < 0.2:
                self.engines[index] = Engine(slots=self.starting.pop(index), generated=rng.randint(0, 99))
                self.generation.begin(index, self.engines[index].counters())
            return
        engine = self.engines[index]
        match rng.choice(["obey", "step", "step", "say", "hear", "hear", "die"]):
            case "obey" if engine.orders and not engine.over:
                if rng.random() < 0.1 and [order[0] for order in engine.orders[:2]] == ["submit", "rearrange"]:
                    engine.orders[:2] = engine.orders[1::-1]  # calls of one caller can overtake each other
                engine.obey()
            case "step":
                engine.step()
            case "say" if not engine.over:
                engine.say(report=rng.random() < 0.5)
            case "hear" if engine.updates:
                update, owner = engine.updates.pop(0), self.generation._owner
                self.raced += sum(owner[one.response] != index for one in update.finished)
                self.generation.update(index, update)
            case "die" if rng.random() < deadliness:
                if rng.random() < 0.5:
                    self.generation.fail(index)
                else:  # the engine fails, its process still speaks
                    given_up = {n: self.partial_or_nothing(engine, n) for n in engine.live}
                    engine.live.clear()
                    engine.running.clear()
                    engine.say(over="failed", given_up=given_up, error="boom")
                    engine.over = True

    def partial_or_nothing(self, engine: Engine, number: int) -> Partial:
        return engine.partial(number) if self.rng.random() < 0.7 else NOTHING


def play(world: World, deadliness: float) -> Generation:
    """Let events happen until the step is over."""
    for _ in range(200_000):
        if not world.generation.busy:
            break
        world.happen(deadliness)
        if world.rng.random() < 0.5:
            check_columns(world.generation)
    return world.generation


def check_columns(generation: Generation) -> None:
    """What a rule would see, computed anew, is what is kept up to date."""
    kept = generation._held.copy(), generation._room.copy()
    for index in range(len(generation.actors)):
        generation._look_at(index)
        if index not in generation._stale:
            assert (kept[0][index], kept[1][index]) == (generation._held[index], generation._room[index])
    generation._held[:], generation._room[:] = kept


SPEED = Speed(gpus=1, batch=ints([1, 12]), iteration_s=floats([0.01, 0.012]))
ANY_NUMBER = ElasticTerms(speeds=(SPEED,), speed_of=ints([0] * 5), move_s_per_token=1e-6, reserve=ints([]), start_s=0.0)
RULES = [
    None,
    MigrationSpec(kind="cut-and-migrate", value=0.3),
    MigrationSpec(kind="cut-and-migrate", value=0.05),
    MigrationSpec(kind="global-cut", value=9.0),
    MigrationSpec(kind="repack", value=6.0),
    MigrationSpec(kind="elastic", value=2.0, terms=ANY_NUMBER),
]


def check_delivered(world: World, generation: Generation, deadliness: float) -> None:
    """Every response once, with the tokens that it would have anywhere, and nothing left behind."""
    assert generation.left == 0
    assert generation._assigned.tolist() == generation._finished.tolist()
    assert not any([*generation._owned, *generation._at])
    assert not any(actor.parting for actor in generation.actors)
    for request, response in zip(world.requests, generation.responses, strict=True):
        first = len(request.token_ids)
        expected = [token(request.seed, first + at) for at in range(request.max_tokens)]
        assert response.tokens == expected
        assert response.logprobs == [-float(each) for each in expected]
        assert response.version == VERSION
    assert not any(engine.live for engine in world.engines.values())
    ends = [end for _, end in world.ended]
    assert ends.count("dead") == generation.failures
    if not deadliness:
        assert generation.generated_tokens == sum(request.max_tokens for request in world.requests)
        assert ends.count("cut") == generation.cuts
        assert len(set(world.ended)) == len(world.ended)


@settings(max_examples=400, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rule=st.sampled_from(RULES),
    actors=st.integers(1, 5),
    responses=st.integers(5, 40),
    slots=st.integers(1, 12),
    deadliness=st.sampled_from([0.0, 0.0, 0.02, 0.2]),
)
def test_every_response_is_delivered_once(
    seed: int, rule: MigrationSpec | None, actors: int, responses: int, slots: int, deadliness: float
) -> None:
    world = World(random.Random(seed), rule, min(actors, responses), responses, slots)
    generation = play(world, deadliness)
    check_delivered(world, generation, deadliness)
    if rule is None and not deadliness:
        assert not any(generation.moves)


def test_rules_do_cut_and_actors_do_race() -> None:
    """The worlds above are not idle: there are cuts, moves, revivals, and responses that end while they are to move."""
    cuts = moves = revived = raced = 0
    for seed in range(60):
        world = World(random.Random(seed), RULES[1], 3, 30, 8)
        generation = world.generation
        while generation.busy:
            world.happen(0.02 if seed % 2 else 0.0)
        cuts, moves, revived = cuts + generation.cuts, moves + sum(generation.moves), revived + world.revived
        raced += world.raced
    assert cuts > 20
    assert moves > 60
    assert revived > 0
    assert raced > 10


def reserving(actors: int, reserve: int) -> MigrationSpec:
    """A rule that wants a reserve of quicker actors early, whatever that costs."""
    quick = Speed(gpus=2, batch=SPEED.batch, iteration_s=floats(SPEED.iteration_s / 3))
    terms = ElasticTerms(
        speeds=(SPEED, quick), speed_of=ints([0] * actors + [1] * reserve), move_s_per_token=0.0,
        reserve=ints(range(actors, actors + reserve)), start_s=0.01,
    )  # fmt: skip
    return MigrationSpec(kind="elastic", value=50.0, terms=terms)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    actors=st.integers(1, 4),
    reserve=st.integers(1, 2),
    responses=st.integers(5, 40),
    deadliness=st.sampled_from([0.0, 0.0, 0.05]),
)
def test_a_reserve_delivers_once_as_well(
    seed: int, actors: int, reserve: int, responses: int, deadliness: float
) -> None:
    world = World(random.Random(seed), reserving(actors, reserve), actors, responses, 12, reserve)
    generation = play(world, deadliness)
    check_delivered(world, generation, deadliness)
    assert set(world.asked) <= set(range(actors, actors + reserve))
    assert {generation.actor_of[number] for number in range(responses)} <= {*range(actors), *world.asked}


def test_a_reserve_is_asked_for_and_takes_over() -> None:
    asked = moved = unused = 0
    for seed in range(40):
        world = World(random.Random(seed), reserving(3, 1), 3, 30, 12, 1)
        generation = world.generation
        while generation.busy:
            world.happen(0.0)
        asked += len(world.asked)
        moved += sum(actor == 3 for actor in generation.actor_of)
        unused += generation.actors[3].state in ("starting", "idle")
    assert asked > 20
    assert moved > 40
    assert asked - unused > 10


def test_other_weights_are_refused() -> None:
    world = World(random.Random(0), None, 1, 2, 2)
    world.engines[0] = Engine(slots=world.starting.pop(0))
    world.generation.begin(0, EngineCounters())
    done = Partial(tokens=(1,), logprobs=(0.0,), cached_tokens=0, admitted_s=1.0, first_token_s=1.0, last_token_s=1.0)
    finished = Finished(response=0, finish_reason="stop", weight_version="6", done=done)
    with pytest.raises(EngineError, match="response 0 was drawn from weights 6, not 7"):
        world.generation.update(0, Update(finished=(finished,)))
