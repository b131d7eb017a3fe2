"""Responses that leave an actor which goes on: ownership under every order of events, whatever a rule says."""

import random
import time
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import vllm_actor
from backends.engine_types import EngineCounters, Finished, Partial, Request
from backends.vllm_actor import NOTHING
from rlhfless.scheduler.midstep import Migration
from rlhfless.types.plan import MigrationSpec
from tests.test_backend_generation import VERSION, Engine, World, check_delivered, play
from tests.test_seer import Anything, seer

SIZES = {
    "seed": st.integers(0, 1 << 30),
    "actors": st.integers(1, 5),
    "prompts": st.integers(5, 20),
    "n": st.integers(1, 3),
    "slots": st.integers(1, 12),
    "deadliness": st.sampled_from([0.0, 0.0, 0.02, 0.2]),
}


@settings(max_examples=100, deadline=None)
@given(**SIZES)
def test_seer_delivers_every_response_once(
    seed: int, actors: int, prompts: int, n: int, slots: int, deadliness: float
) -> None:
    spec = seer(n, actors=actors, move_s=1e-6).spec
    world = World(random.Random(seed), spec, actors, prompts * n, slots)
    generation = play(world, deadliness)
    check_delivered(world, generation, deadliness)
    assert generation.cuts == 0


@settings(max_examples=100, deadline=None)
@given(**SIZES)
def test_whatever_parts_every_response_is_delivered_once(
    seed: int, actors: int, prompts: int, n: int, slots: int, deadliness: float
) -> None:
    with patch("backends.generation.rule", Anything):
        world = World(random.Random(seed), MigrationSpec(kind="any", value=0.0), actors, prompts * n, slots)
        check_delivered(world, play(world, deadliness), deadliness)


def test_the_worlds_above_reach_what_they_are_about() -> None:
    """Responses part running and waiting, end while they are to part, come back to where they have left, go first."""
    moves = raced = first = running = back = 0
    for seed in range(40):
        with patch("backends.generation.rule", Anything):
            world = World(random.Random(seed), MigrationSpec(kind="any", value=0.0), 3, 30, 5)
        generation, depart = world.generation, world.generation._depart

        def watched(actor, parted, generation=generation, depart=depart):
            nonlocal running, back
            running += sum(bool(partial.tokens) for partial in parted.values())
            back += sum(generation._owner[number] == actor.index for number in parted)
            depart(actor, parted)

        with patch.object(generation, "_depart", watched):
            play(world, 0.01 if seed % 2 else 0.0)
        moves, raced = moves + sum(generation.moves), raced + world.raced
        first += world.hastened
    assert moves > 500
    assert running > 100
    assert raced > 10
    assert back > 10
    assert first > 50


@pytest.mark.parametrize("begun", [False, True])
def test_what_is_to_go_first_does(begun: bool) -> None:
    """A queue of one slot, in the order in which it was rearranged, before and after the actor has begun."""
    world = World(random.Random(1), None, 2, 12, 1)
    generation = world.generation
    order = list(generation._at[0])

    def start() -> None:
        world.engines[0] = Engine(slots=world.starting.pop(0))
        generation.begin(0, world.engines[0].counters())
        world.engines[0].obey()

    if begun:
        start()
    moves = [Migration(order[4], 0, 0), Migration(order[2], 0, 1), Migration(order[3], 0, 0)]
    generation._reassign(generation.actors[0], moves)
    if begun:
        world.engines[0].obey()
        world.engines[0].say()
        generation.update(0, world.engines[0].updates.pop())
    else:
        assert generation._queue(0)[0].tolist() == [order[3], order[4], order[0], order[1], order[5]]
        start()
    assert list(world.engines[0].live) == [order[3], order[4], order[0], order[1], order[5]]
    assert list(generation._at[1])[-1] == order[2]


class Stub:
    """An engine that generates when it is told to."""

    weight_version = VERSION

    def __init__(self, config: object) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.first: list[int] = []
        self.slots = 0

    def counters(self) -> EngineCounters:
        return EngineCounters()

    def reset_prefix_cache(self) -> None:
        """Nothing is cached."""

    def set_slots(self, slots: int) -> None:
        self.slots = slots

    def submit(self, requests: list[Request]) -> None:
        self.tokens |= {request.response: [] for request in requests}

    def poll(self, timeout_s: float) -> list[Finished]:
        time.sleep(timeout_s)
        return []

    def progress(self) -> dict[int, int]:
        return {response: len(tokens) for response, tokens in self.tokens.items()}

    def queue(self) -> list[int]:
        return [response for response, tokens in self.tokens.items() if not tokens]

    def salvage(self) -> dict[int, Partial]:
        return {response: replace(NOTHING, tokens=tuple(tokens)) for response, tokens in self.tokens.items()}

    def abort(self, responses: set[int], first: tuple[int, ...] = ()) -> dict[int, Partial]:
        self.first += first
        partials = {response: self.salvage()[response] for response in responses}
        for response in responses:
            del self.tokens[response]
        return partials


def test_an_actor_hands_over_what_parts_once_and_reports_what_comes_back_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_actor, "StepEngine", Stub)
    monkeypatch.setattr(vllm_actor, "REPORT_S", 0.0)
    actor = vllm_actor.VllmActor(None)
    engine = actor._engine
    wanted = [Request(response=number, token_ids=[1], max_tokens=9, temperature=0.0) for number in range(4)]
    actor.begin(1, VERSION, None, 2, False)
    assert engine.slots == 2
    actor.submit(1, wanted)
    engine.tokens |= {0: [5, 6, 7], 1: [8]}
    update = actor.poll(1, 0.0)
    assert update.progress == {0: 3, 1: 1}
    assert update.queue == (2, 3)
    assert update.report[0].tokens == (5, 6, 7)
    actor.rearrange(0, [1], [])  # of an earlier turn
    actor.rearrange(1, [0, 3, 7], [2])
    assert engine.first == [2]
    update = actor.poll(1, 60.0)  # it is there at once
    assert {number: partial.tokens for number, partial in update.parted.items()} == {0: (5, 6, 7), 3: ()}
    assert update.queue == (2,)
    actor.submit(1, [replace(wanted[0], token_ids=[1, 5, 6, 7], generated=3, max_tokens=6)])
    engine.tokens[0] = [8, 9, 10, 11]
    update = actor.poll(1, 0.0)
    assert not update.parted
    assert update.report[0].tokens == (8, 9, 10, 11)
    actor.rearrange(1, [2], [])
    actor.drain(1, 5)
    actor.rearrange(1, [1], [])  # too late
    update = actor.poll(1, 0.0)
    assert update.over == "drained"
    assert list(update.parted) == [2]
    assert sorted(update.given_up) == [0, 1]
