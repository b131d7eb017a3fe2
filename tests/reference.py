"""A slow simulator of the generation phase that steps token by token, written from the rules of `sim.engine` alone.

It shares with the real one only the profile, the links and the pure migration rules. Every iteration of every actor is
an event of its own, every response a small record, every total is summed anew.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from rlhfless.scheduler.migration import GenerationView, Start, rule
from rlhfless.types.arrays import ints
from rlhfless.types.plan import MigrationSpec
from rlhfless.types.profile import Profile
from sim.network import Links


@dataclass
class Response:
    number: int
    prompt: int
    prompt_tokens: int
    target: int
    planned_prefill: int
    home: int
    generated: int = 0
    seen: int = 0  # generated, as of the last event of its actor: what a rule may know
    loaded: bool = False
    first_s: float = -1.0
    end_s: float = -1.0
    moves: int = 0
    at: int = -1
    owner: int = -1  # worker that is to finish it
    promised: int = 0  # context that its owner keeps room for while it has not come

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.generated


@dataclass
class Worker:
    index: int
    host: int
    slots: int
    slowdown: float
    start_s: float
    caching: bool
    profile: Profile
    queue: list[Response] = field(default_factory=list)
    slots_used: list[Response] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    state: str = "working"  # in reserve: reserved, starting, idle first
    startup_s: float = 0.0  # from being asked for until it is idle
    begun: bool = False
    dead: bool = False
    stepping: bool = False
    pending: int = 0  # number of the iteration or prefill that is under way; others were called off
    decode_s: float = -1.0  # start of the decode iteration under way
    assigned: int = 0
    finished: int = 0
    seen_running: int = 0
    seen_kv: int = 0
    seen_context: int = 0
    seen_room: int = -1
    seen_generated: int = 0
    generated: int = 0
    woken: bool = False  # something arrived since the last boundary
    parting: list[Response] = field(default_factory=list)  # here, and to leave at the next boundary
    end_s: float = -1.0

    def key(self, response: Response) -> int:
        return response.prompt if self.caching else ~response.number

    def uncached(self, tokens: int, held: int) -> int:
        block = self.profile.data.kv_block_tokens
        whole = range(0, min(held, tokens - (block > 1)) + 1, block)  # of blocks that are there and may be used
        return tokens - max(whole)

    def kv(self) -> int:
        prompts = {self.key(r): r.prompt_tokens for r in self.slots_used}
        return sum(prompts.values()) + sum(r.generated for r in self.slots_used)


class TokenByToken:
    """Run with `run()`; results are on the responses and workers."""

    def __init__(
        self, migration: MigrationSpec | None, workers: list[Worker], links: Links, stop: int | None = None
    ) -> None:
        self.workers, self.links = workers, links
        self.rule = rule(migration) if migration else None
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.ticket = count()
        self.now = 0.0
        self.cuts = self.failures = self.preemptions = self.prefilled = self.recomputed = 0
        self.moved_bytes = 0.0
        self.left = sum(len(w.queue) for w in workers)
        self.spare = 0 if stop is None else max(0, self.left - stop)  # left when generation stops

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (time_s, next(self.ticket), act))

    def run(self, failures: list[tuple[int, float]] | None = None) -> float:
        self.responses = [r for w in self.workers for r in w.queue]
        for worker in self.workers:
            worker.assigned = len(worker.queue)
            worker.seen_room = worker.profile.data.kv_capacity_tokens
            for r in worker.queue:
                r.owner = worker.index
            if worker.state == "working":
                self.at(worker.start_s, lambda w=worker: self.start(w))
        for index, time_s in failures or []:
            self.at(time_s, lambda w=self.workers[index]: self.fail(w))
        while self.left > self.spare:
            self.now, _, act = heapq.heappop(self.heap)
            act()
        return self.now

    def owned(self, w: Worker) -> list[Response]:
        return [r for r in self.responses if r.owner == w.index and r.generated < r.target]

    def start(self, w: Worker) -> None:
        if not (w.dead or w.begun) and self.now >= w.start_s:
            w.begun = True
            self.boundary(w)

    def ready(self, w: Worker) -> None:
        if w.state == "starting":
            w.begun, w.state = True, "idle"
            self.observe(w)
            self.decide()

    # -- one actor ---------------------------------------------------------------------------------------------------
    def trim(self, w: Worker) -> None:
        if w.kv() + sum(w.cached.values()) > w.profile.data.kv_capacity_tokens:
            w.cached.clear()

    def admit(self, w: Worker) -> tuple[int, list[Response], bool]:
        tokens, decoding, admitted = 0, list(w.slots_used), False
        while w.queue and len(w.slots_used) < w.slots:
            if tokens + len(decoding) >= w.profile.data.max_batched_tokens:
                break
            r = w.queue[0]
            shared = any(w.key(other) == w.key(r) for other in w.slots_used)
            need = r.generated + (0 if shared else r.prompt_tokens)
            if w.kv() + need + len(w.slots_used) + 1 > w.profile.data.kv_capacity_tokens:
                break
            w.queue.pop(0)
            there = shared or w.cached.pop(w.key(r), None) is not None
            first = not (there or r.loaded or w.key(r) in w.met or r.home != w.index)
            if r.loaded:
                held = r.context
            elif there:
                held = r.prompt_tokens
            else:
                held = r.prompt_tokens - r.planned_prefill if first else 0
            computed, planned = w.uncached(r.context, held), 0
            if first:
                planned = r.planned_prefill
            elif r.first_s < 0 and r.home == w.index and not r.loaded:
                planned = min(r.planned_prefill, computed, w.uncached(r.prompt_tokens, r.prompt_tokens))
            tokens += computed
            self.prefilled += planned
            self.recomputed += computed - planned
            w.met.add(w.key(r))
            r.loaded, r.at = False, w.index
            if r.first_s < 0:
                r.first_s = self.now
            w.slots_used.append(r)
            admitted = True
            if not computed:
                decoding.append(r)
            self.trim(w)
        return tokens, decoding, admitted

    def observe(self, w: Worker) -> None:
        w.seen_running, w.seen_kv = len(w.slots_used), w.kv()
        w.seen_context = sum(r.context for r in [*w.slots_used, *w.queue])
        w.seen_room = w.profile.data.kv_capacity_tokens - w.kv() - sum(r.context for r in w.queue)
        if w.state != "leaving":  # what it still generates is known when it leaves
            w.seen_generated = w.generated
            for r in w.slots_used:
                r.seen = r.generated
        self.overlook(w, w.parting)
        if w.state not in ("working", "idle"):
            w.seen_running = w.seen_context = w.seen_room = 0

    def overlook(self, w: Worker, parting: list[Response]) -> None:
        """Rules no longer see what is about to leave."""
        if parting:
            w.seen_running -= sum(r in w.slots_used for r in parting)
            w.seen_context = max(0, w.seen_context - sum(r.prompt_tokens + r.seen for r in parting))

    def part(self, w: Worker) -> None:
        parting, w.parting = w.parting, []
        gone = []
        for r in parting:
            if r.owner == w.index:  # it has been given back
                r.promised = 0
                continue
            if r in w.slots_used:
                w.slots_used.remove(r)
                if w.caching and not any(w.key(o) == w.key(r) for o in w.slots_used):
                    w.cached[w.key(r)] = r.prompt_tokens
            else:
                w.queue.remove(r)
                r.loaded = False
            r.seen = r.generated
            gone.append(r)
        self.send(gone, w)

    def boundary(self, w: Worker) -> None:
        if w.state == "leaving":
            self.leave(w)
        if w.state == "gone":
            return
        if w.parting:
            self.part(w)
            w.woken = True
        tokens, decoding, admitted = self.admit(w)
        event = admitted or w.woken
        w.woken = False
        if tokens:
            self.observe(w)
            seconds = float(w.profile.prefill_s(tokens))
            if decoding:
                mean = sum(r.context for r in decoding) / len(decoding)
                seconds = w.profile.mixed_iteration_s(tokens, len(decoding), mean)
            self.step(w, seconds, self.prefilled_now)
            return
        if not w.slots_used:
            self.observe(w)
            w.stepping = False
            if not self.owned(w):
                w.state, w.end_s = "gone", self.now
            return
        while w.kv() + len(w.slots_used) > w.profile.data.kv_capacity_tokens:
            victim = w.slots_used.pop()
            victim.seen = victim.generated
            w.cached.clear()
            w.queue.insert(0, victim)
            self.preemptions += 1
            event = True
        if event:
            self.observe(w)
        mean = sum(r.context for r in w.slots_used) / len(w.slots_used)
        self.step(w, float(w.profile.decode_iteration_s(len(w.slots_used), mean)), self.iterated)

    def step(self, w: Worker, seconds: float, then: Callable[[Worker], None]) -> None:
        w.stepping = True
        w.decode_s = self.now if then == self.iterated else -1.0
        w.pending = number = next(self.ticket)
        self.at(self.now + seconds * w.slowdown, lambda: then(w) if w.pending == number else None)

    def prefilled_now(self, w: Worker) -> None:
        w.woken = True
        self.iterated(w)

    def iterated(self, w: Worker) -> None:
        w.stepping = False
        w.generated += len(w.slots_used)
        for r in w.slots_used:
            r.generated += 1
        self.trim(w)
        ended = [r for r in w.slots_used if r.generated == r.target]
        for r in ended:
            w.slots_used.remove(r)
            if w.caching and not any(w.key(o) == w.key(r) for o in w.slots_used):
                w.cached[w.key(r)] = r.prompt_tokens
            r.end_s, r.at, r.promised = self.now, w.index, 0
            if r in w.parting:
                w.parting.remove(r)
            if r.owner != w.index:
                other = self.workers[r.owner]
                other.assigned -= 1
                r.promised = 0
                w.assigned += 1
                r.owner = w.index
                self.end_if_idle(other)
        if ended:
            self.left -= len(ended)
            w.finished += len(ended)
            self.observe(w)
            w.seen_generated = w.generated
            w.woken = True
            if self.rule and self.left > self.spare:
                self.decide()
        if self.left <= self.spare:
            w.end_s = self.now
            return
        self.boundary(w)

    def end_if_idle(self, w: Worker) -> None:
        if w.state == "working" and w.begun and not w.stepping and not self.owned(w):
            w.state, w.end_s = "gone", self.now

    # -- between actors ----------------------------------------------------------------------------------------------
    def decide(self) -> None:
        ws = self.workers
        unfinished = ints([w.assigned - w.finished for w in ws])
        assigned, finished = ints([w.assigned for w in ws]), ints([w.finished for w in ws])
        if not self.rule.triggered(assigned, finished, unfinished):
            return
        running = ints([w.seen_running for w in ws])

        def left_of(index: int):  # type: ignore[no-untyped-def]
            own = sorted(self.owned(ws[index]), key=lambda r: r.number)
            return ints([r.number for r in own]), ints([r.prompt_tokens + r.seen for r in own])

        def queue_of(index: int):  # type: ignore[no-untyped-def]
            own = [r for r in ws[index].queue if r.owner == index]
            return ints([r.number for r in own]), ints([r.prompt_tokens + r.seen for r in own])

        def ended():  # type: ignore[no-untyped-def]
            every = sorted(self.responses, key=lambda r: r.number)
            return ints([r.context if r.generated == r.target else 0 for r in every])

        promised = [sum(r.promised for r in self.responses if r.owner == w.index) for w in ws]
        view = GenerationView(
            assigned=assigned,
            finished=finished,
            running=running,
            waiting=ints(unfinished - running),
            open_slots=ints(
                [max(w.slots - int(u), 0) if u or w.state == "idle" else 0 for w, u in zip(ws, unfinished, strict=True)]
            ),
            tokens_generated=ints([w.seen_generated for w in ws]),
            context_tokens=ints([w.seen_context for w in ws]),
            kv_headroom_tokens=ints([max(w.seen_room - p, 0) for w, p in zip(ws, promised, strict=True)]),
            cuts_so_far=self.cuts,
            unasked=np.array([w.state == "reserved" for w in ws]),
            starting=np.array([w.state == "starting" for w in ws]),
            idle=np.array([w.state == "idle" for w in ws]),
            unfinished=left_of,
            queue=queue_of,
            ended=ended,
        )
        decided = self.rule.decide(view)
        for start in decided:
            if isinstance(start, Start):
                w = ws[start.actor]
                w.state = "starting"
                self.at(self.now + w.startup_s, lambda w=w: self.ready(w))
        moves = [each for each in decided if not isinstance(each, Start)]
        number = {r.number: r for r in self.responses}
        leaving_of: dict[int, list[Response]] = {}
        for source in dict.fromkeys(m.source for m in moves):
            w = ws[source]
            leaving = leaving_of[source] = []
            for move in moves:
                r = number[move.response]
                if move.source != source:
                    continue
                if move.target == source:
                    w.queue.remove(r)
                    w.queue.insert(0, r)
                    w.woken = True
                    continue
                if (r in w.slots_used or r in w.queue) and r not in w.parting:
                    leaving.append(r)
                self.give(r, ws[move.target])
        for source, leaving in leaving_of.items():
            w = ws[source]
            if self.owned(w):
                w.parting += leaving
                self.overlook(w, leaving)
                if leaving and not (w.stepping or w.begun):
                    self.part(w)
                continue
            w.state = "leaving"
            self.observe(w)
            self.cuts += 1
            if not w.stepping and not (w.begun and (w.slots_used or w.queue)):
                self.leave(w)

    def give(self, r: Response, to: Worker) -> None:
        if to.state == "idle":
            to.state = "working"
        self.workers[r.owner].assigned -= 1
        to.assigned += 1
        r.owner, r.promised = to.index, r.prompt_tokens + r.seen

    def leave(self, w: Worker) -> None:
        w.state, w.end_s, w.parting = "gone", self.now, []
        w.seen_generated = w.generated
        here = [*w.slots_used, *w.queue]
        w.slots_used, w.queue = [], []
        for r in here:
            r.seen = r.generated
        self.send(here, w)

    def send(self, leaving: list[Response], source: Worker) -> None:
        computed: dict[int, int] = {}  # owner -> context that it is to compute again, all in one go
        for r in leaving:
            self.send_one(r, source, computed)

    def send_one(self, r: Response, source: Worker, computed: dict[int, int]) -> None:
        target = self.workers[r.owner]
        r.moves += 1
        size = r.context * target.profile.data.kv_bytes_per_token
        arrival = self.links.quote(source.host, target.host, size, self.now)
        useful = r.generated > 0 and not source.dead
        together = computed.get(target.index, 0) + r.context
        loaded = useful and arrival - self.now < float(target.profile.prefill_s(together))
        if loaded:
            self.links.send(source.host, target.host, size, self.now)
            self.moved_bytes += size
        else:
            computed[target.index] = together
        self.at(arrival if loaded else self.now, lambda: self.arrive(r, target, loaded))

    def arrive(self, r: Response, w: Worker, loaded: bool) -> None:
        if r.owner != w.index:
            self.send([r], w)
            return
        r.promised = 0
        r.loaded = loaded
        w.queue.append(r)
        w.woken = True
        if w.stepping and w.decode_s == self.now:  # the boundary is this very moment: begin the iteration anew
            self.step(w, 0.0, self.again)
            w.decode_s = self.now
        elif not w.stepping and w.begun:
            self.boundary(w)

    def again(self, w: Worker) -> None:
        w.stepping = False
        self.boundary(w)

    def fail(self, w: Worker) -> None:
        """The worker dies; the tokens of its last whole iteration were reported."""
        if w.state in ("gone", "reserved"):
            return
        w.pending, w.stepping, w.parting = -1, False, []
        w.state, w.dead, w.end_s = "gone", True, self.now
        self.failures += 1
        here = [*w.slots_used, *w.queue]
        w.slots_used, w.queue = [], []
        w.cached.clear()
        w.met.clear()
        for r in here:
            r.seen, r.loaded = r.generated, False
        heirs = [other for other in self.workers if other.state == "working"]
        for r in self.responses:
            if r.home == w.index:
                r.home = -1  # its delivered KV is lost
        if not heirs:  # a new process at once
            w.state, w.dead, w.begun, w.queue, w.start_s = "working", False, False, here, self.now
            self.observe(w)
            self.at(self.now, lambda: self.start(w))
            return
        for r in sorted(self.owned(w), key=lambda r: r.number):
            self.give(r, min(heirs, key=lambda other: other.assigned - other.finished))
        self.observe(w)
        self.send(here, w)
