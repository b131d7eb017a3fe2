"""What a planner believes of a step before it starts: its site, its transfers and starts, the time of its groups."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless.errors import InfeasibleError
from rlhfless.scheduler import placement
from rlhfless.scheduler.estimate import DecodeModel, Work, even_bounds, group_times
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.plan import Hosting, PlanEstimate
from rlhfless.types.workload import Algorithm

Seat = tuple[DecodeModel, placement.Positions, placement.Routes]
"""Actors of one size, room for them, and how transfers reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What depends on the cluster's state alone, and so is the same in most steps."""

    learner: IntArray
    """GPUs of the learner."""
    positions: placement.Positions
    """Room for decode actors of the planner's own profile."""
    routes: placement.Routes
    """How transfers reach them."""
    seats: tuple[Seat, ...]
    """The same for actors of every size that a plan may mix, largest first."""
    notes: tuple[str, ...]
    """For every plan made here."""

    @classmethod
    def of(
        cls,
        own: DecodeModel,
        mixed: Sequence[DecodeModel],
        cluster: Cluster,
        algorithm: Algorithm,
        free: IntArray,
        hosting: Hosting,
        learner_gpus: int | None,
    ) -> "Site":
        """The site on the free GPUs, for actors of the planner's own size and those that a plan may mix.

        `learner_gpus`: None for the fewest that hold the training state. Raises InfeasibleError for too few free GPUs.
        """
        data, notes = own.profile.data, []
        if learner_gpus is not None:
            size, holds = learner_gpus, True
        else:
            room = max(free.size // 2, 1) if hosting == "split" else free.size  # actors get as much as a split learner
            size, holds = placement.learner_gpus(data, cluster, algorithm, room)
        if free.size < max(size, 1):
            raise InfeasibleError(f"the learner needs {max(size, 1)} GPUs, {free.size} of {cluster.gpus} are free")
        if not holds:
            notes.append(f"{size} GPUs do not hold the training state; the rest is assumed to be in host memory")
        learner = ints(free[:size])
        at = placement.positions(cluster, free, data.tp, learner, exclusive=hosting == "split")
        if at.left_over:
            whole = at.gpus.size + at.left_over
            notes.append(f"{at.gpus.size} of {whole} GPUs usable by actors of {data.tp}")
        routes = placement.routes(cluster, at, learner, data.weight_bytes)
        seats = []
        for model in mixed:
            each = model.profile.data
            try:
                seat = placement.positions(cluster, free, each.tp, learner, exclusive=hosting == "split")
            except InfeasibleError:  # too large for any host; the planner's own size fits
                continue
            seats.append((model, seat, placement.routes(cluster, seat, learner, each.weight_bytes)))
        return cls(learner=learner, positions=at, routes=routes, seats=tuple(seats), notes=tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Beliefs:
    """What a step's groups of responses are believed to cost, on actors of one size."""

    model: DecodeModel
    """Latencies."""
    work: Work
    """The step's prompts, shortest first."""
    own_prefill_sum: FloatArray
    """float[items + 1]: running sum of the prompt tokens that decode actors compute themselves."""
    header_tokens: int
    """Tokens of every prompt but an actor's first that its prefix cache holds."""
    kv_bytes_sum: FloatArray
    """float[items + 1]: running sum of the KV that the prefill actor sends for each item's prompt."""
    prefill_s: float
    """Time of the prefill actor, 0 without."""
    routes: placement.Routes
    """How transfers reach the positions."""
    ready_s: FloatArray
    """float[positions]: when weights and process are there (L_model, and what a new process adds to it)."""
    start_sum: FloatArray
    """float[positions + 1]: running sum of the seconds for which a start holds each actor's GPUs; part of the cost."""

    def own_prefill(self, starts: IntArray, ends: IntArray) -> FloatArray:
        """float[groups]: prompt tokens that an actor computes; an upper bound, as longer common prefixes than the
        header are not looked for."""
        tokens: FloatArray = self.own_prefill_sum[ends] - self.own_prefill_sum[starts]
        return tokens - self.header_tokens * (ends - starts - 1)

    def kv_s(self, starts: IntArray, ends: IntArray, position: IntArray) -> FloatArray:
        """float[groups]: transfer of each group's prompt KV, groups in order of position."""
        if self.kv_bytes_sum[-1] == 0.0:
            return np.zeros(starts.size)
        return placement.kv_s(self.routes, self.kv_bytes_sum[ends] - self.kv_bytes_sum[starts], position)

    def evaluate(self, candidates: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """T(N), C(N) and hiding slack of every candidate, prompts sorted and dealt evenly (steps 2 and 3)."""
        starts, ends = even_bounds(self.work.lengths.size, candidates)
        seconds = group_times(self.model, self.work, starts, ends, self.own_prefill(starts, ends))
        first = np.cumsum(candidates) - candidates
        order = np.lexsort((-seconds, np.repeat(np.arange(candidates.size), candidates)))
        starts, ends, seconds = starts[order], ends[order], seconds[order]
        position = np.arange(order.size) - np.repeat(first, candidates)
        sent_s = self.kv_s(starts, ends, position)
        slack_s = placement.hiding_slack_s(self.prefill_s, self.ready_s, sent_s, seconds, position)
        cost = (np.add.reduceat(seconds, first) + self.start_sum[candidates]) * self.model.profile.data.tp
        return seconds[first], cost, slack_s

    def estimate(self, decode_s: FloatArray, starts: IntArray, ends: IntArray) -> PlanEstimate:
        """What generation will take with these groups on positions 0, 1, ...: weights flow at once, KV after
        prefill."""
        count = decode_s.size
        tp = np.full(count, self.model.profile.data.tp)
        kv_s = self.kv_s(starts, ends, np.arange(count))
        return estimate_of(self.prefill_s, self.ready_s[:count], kv_s, decode_s, tp)


def estimate_of(
    prefill_s: float, ready_s: FloatArray, kv_s: FloatArray, decode_s: FloatArray, tp: IntArray
) -> PlanEstimate:
    """The estimate of a plan from its actors' columns, [actors] each."""
    begin_s = np.maximum(ready_s, prefill_s + kv_s)
    return PlanEstimate(
        prefill_s=prefill_s,
        ready_s=floats(ready_s),
        kv_s=floats(kv_s),
        decode_s=floats(decode_s),
        generation_s=float((begin_s + decode_s).max()),
        decode_gpu_s=float((decode_s * tp).sum()),
    )
