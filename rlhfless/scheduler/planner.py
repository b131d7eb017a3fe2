"""The planner: from a step's workload and the cluster's state to a whole plan, in the five steps of RLHFless §4.1."""

from dataclasses import dataclass, replace

import numpy as np

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.rng import stream
from rlhfless.scheduler import assignment, migration, placement, policies, scaling
from rlhfless.scheduler.dedup import PrefixOrder
from rlhfless.scheduler.estimate import DecodeModel, Work, even_bounds, group_times, running_sum, split_work
from rlhfless.scheduler.lengths import DEFAULT_WINDOW, HistoryEstimator, LengthEstimator, LengthHistory
from rlhfless.scheduler.policies import GLOBAL_CUT_SHARE, Policy
from rlhfless.types import plan as plans
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.cluster import Cluster, ClusterState
from rlhfless.types.plan import CandidateTable, DecodeActor, Hosting, Plan, PlanEstimate, PrefillPlan, Prewarm, Start
from rlhfless.types.profile import COLD_START_GPU_SHARE, Profile
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Algorithm, Workload

PREWARM_BUFFER_S = 0.5
"""Added to the shortest past phase when functions are asked for ahead (RLHFless §5 has a fixed buffer, size chosen)."""
SEARCH_INTERVALS = 5_000_000
"""Stretches between two ends of responses that a search over N may evaluate (chosen: a few tenths of a second)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """What depends on the cluster's state alone, and so is the same in most steps."""

    learner: IntArray
    """GPUs of the learner."""
    positions: placement.Positions
    """Room for decode actors."""
    routes: placement.Routes
    """How transfers reach them."""
    notes: tuple[str, ...]
    """For every plan made here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beliefs:
    """What a step's groups of responses are believed to cost."""

    model: DecodeModel
    work: Work
    own_prefill_sum: FloatArray
    """float[items + 1]: running sum of the prompt tokens that decode actors compute themselves."""
    header_tokens: int
    """Tokens of every prompt but an actor's first that its prefix cache holds."""
    kv_bytes_sum: FloatArray
    """float[items + 1]: running sum of the KV that the prefill actor sends for each item's prompt."""
    prefill_s: float
    """Time of the prefill actor, 0 without."""
    routes: placement.Routes
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


class Planner:
    """Makes the plan of each step under one policy: no I/O, no clock; keeps length history, shortest phases, caches."""

    def __init__(
        self,
        policy: str | Policy,
        profile: Profile,
        cluster: Cluster,
        *,
        actors: int | None = None,
        weight: float = scaling.WEIGHT,
        tau: float = migration.DEFAULT_TAU,
        window: int = DEFAULT_WINDOW,
        min_actors: int = 1,
        max_actors: int | None = None,
        learner_gpus: int | None = None,
        estimator: LengthEstimator | None = None,
        seed: int = 0,
        start: Start | None = None,
        hosting: Hosting | None = None,
    ) -> None:
        """`actors`: static N, by default all that fit; the range of N and lambda (`weight`) are for scaling policies.

        `window` is the length history's; `estimator` replaces it, and must be given for an oracle policy. `start` and
        `hosting` override the policy's. Raises InputError for parameters out of range or that do not go together,
        InfeasibleError for a learner larger than the cluster.
        """
        chosen = policies.policy(policy) if isinstance(policy, str) else policy
        self.policy = replace(chosen, start=start or chosen.start, hosting=hosting or chosen.hosting)
        scaling.check_weight(weight)
        migration.CutAndMigrate(tau)
        if profile.data.gpu != cluster.gpu.name:
            raise InputError(
                f"profile {profile.data.name} is of GPU {profile.data.gpu}, the cluster has {cluster.gpu.name}"
            )
        if chosen.oracle and estimator is None:
            raise InputError(f"policy {chosen.name} needs an estimator that knows the true lengths")
        if chosen.scale and chosen.assignment != "sorted-even":
            raise InputError(f"policy {chosen.name}: scaling needs sorted-even assignment, not {chosen.assignment}")
        if chosen.scale and actors is not None:
            raise InputError(f"policy {chosen.name} chooses the number of actors; bound it with min_actors, max_actors")
        if min_actors < 1 or (max_actors is not None and max_actors < min_actors):
            raise InputError(f"actors from {min_actors} to {max_actors}: need 1 <= min_actors <= max_actors")
        for name, count in (("actors", actors), ("learner_gpus", learner_gpus)):
            if count is not None and count < 1:
                raise InputError(f"{name} {count} must be at least 1")
        cluster.require(learner_gpus or 1, "the learner")
        self.profile, self.cluster, self.seed = profile, cluster, seed
        self.estimator = estimator or HistoryEstimator(LengthHistory(window))
        self._actors, self._weight, self._tau = actors, weight, tau
        self._least, self._most = min_actors, max_actors
        self._learner_gpus = learner_gpus
        self._model = DecodeModel.of(profile)
        self._shortest_s: dict[str, float] = {}
        self._kept = np.zeros(cluster.gpus, dtype=np.bool_)  # GPUs on which a decode actor's process begins
        self._site: tuple[Algorithm, bytes, _Site] | None = None

    def plan(self, workload: Workload, state: ClusterState) -> Plan:
        """The plan of one step. Raises InfeasibleError where the step cannot be carried out as asked."""
        data, rule = self.profile.data, self.policy
        self.profile.require_fit(int(workload.prompt_tokens.max()), workload.max_response_tokens)
        site = self._site_of(workload.algorithm, state.free_gpus)
        prefixes = PrefixOrder.of(workload)
        prefill, prefill_s = self._prefill(workload, prefixes, site)
        lengths = self._lengths(workload)
        n, table = workload.responses_per_prompt, None
        if rule.assignment == "sorted-even":
            order = np.argsort(-lengths, kind="stable")[::-1]
            work = Work.of(order, lengths[order], workload.prompt_tokens[order], n)
            beliefs = self._beliefs(work, workload, prefill, prefill_s, site)
            if rule.scale:
                table = self._scale(beliefs, workload, site)
            count = int(table.actors[table.chosen]) if table is not None else self._static(workload, site)
            shares = assignment.sorted_even(lengths, n, count)
            starts, ends = even_bounds(workload.size, np.array([count]))
        else:
            count = self._static(workload, site)
            if rule.assignment == "shuffled-even":
                rng = stream(self.seed, "assignment", workload.step)
                shares = assignment.shuffled_even(workload.size, n, count, rng)
            else:
                shares = assignment.least_in_flight(workload.size, n, count)
            work, starts, ends = split_work(shares, lengths, workload.prompt_tokens, n)
            beliefs = self._beliefs(work, workload, prefill, prefill_s, site)
        own_prefill = self._own_prefill(workload, prefixes, prefill, shares)
        tokens = [int(column.sum()) for column in own_prefill]
        decode_s = group_times(self._model, beliefs.work, starts, ends, tokens)
        # only policies that assign by expected length place by it too: the baselines know nothing of it
        order = np.argsort(-decode_s, kind="stable") if rule.assignment == "sorted-even" else np.arange(count)
        estimate = _estimate(beliefs, decode_s[order], starts[order], ends[order])
        notes = site.notes
        if table is not None and not table.eligible.any():
            slack_s = float(table.hiding_slack_s.max())
            notes += (
                f"no number of actors hides its transfers (best slack {slack_s:.3g} s); the best of all is taken",
            )
        placed = placement.place(site.positions, count, site.learner, workload.algorithm, rule.hosting)
        return Plan(
            schema=plans.SCHEMA,
            policy=rule.name,
            step=workload.step,
            epoch=workload.epoch,
            algorithm=workload.algorithm,
            prompts=workload.size,
            responses_per_prompt=n,
            tp=data.tp,
            cluster_gpus=self.cluster.gpus,
            hosting=rule.hosting,
            start=rule.start,
            prewarm=self._prewarm(workload.algorithm, estimate),
            prefix_caching=rule.prefix_caching,
            prefill=prefill,
            actors=tuple(
                DecodeActor(
                    responses=shares[i], prefill_tokens=own_prefill[i], slots=min(data.max_slots, shares[i].size)
                )
                for i in order.tolist()
            ),
            placement=placed,
            migration=self._migration(workload),
            estimate=estimate,
            candidates=table,
            notes=notes,
        )

    def observe(self, report: StepReport) -> None:
        """Learn response lengths and the shortest phases from a step that has been carried out."""
        self.estimator.observe(report)
        self._kept[[one.gpus[0] for one in report.invocations if one.function == "decode"]] = True
        for phase in report.phases:
            shortest_s = self._shortest_s.get(phase.name, np.inf)
            self._shortest_s[phase.name] = min(report.execution_s(phase.name), shortest_s)

    def _site_of(self, algorithm: Algorithm, free: IntArray) -> _Site:
        key = free.tobytes()
        if self._site is not None and self._site[:2] == (algorithm, key):
            return self._site[2]
        data, hosting = self.profile.data, self.policy.hosting
        notes = []
        if self._learner_gpus is not None:
            size, holds = self._learner_gpus, True
        else:
            room = max(free.size // 2, 1) if hosting == "split" else free.size  # actors get as much as a split learner
            size, holds = placement.learner_gpus(data, self.cluster, algorithm, room)
        if free.size < max(size, 1):
            raise InfeasibleError(f"the learner needs {max(size, 1)} GPUs, {free.size} of {self.cluster.gpus} are free")
        if not holds:
            notes.append(f"{size} GPUs do not hold the training state; the rest is assumed to be in host memory")
        learner = ints(free[:size])
        at = placement.positions(self.cluster, free, data.tp, learner, exclusive=hosting == "split")
        if at.left_over:
            whole = at.gpus.size + at.left_over
            notes.append(f"{at.gpus.size} of {whole} GPUs usable by actors of {data.tp}")
        routes = placement.routes(self.cluster, at, learner, data.weight_bytes)
        site = _Site(learner=learner, positions=at, routes=routes, notes=tuple(notes))
        self._site = (algorithm, key, site)
        return site

    def _prefill(self, workload: Workload, prefixes: PrefixOrder, site: _Site) -> tuple[PrefillPlan | None, float]:
        """Shared prefixes (step 1), and the time of the prefill actor's replicas on the learner's GPUs."""
        if not self.policy.dedup:
            return None, 0.0
        replicas = max(site.learner.size // self.profile.data.tp, 1)
        capacity = max(replicas * self.profile.data.kv_capacity_tokens // int(workload.prompt_tokens.max()), 1)
        prefill = prefixes.prefill(capacity)
        compute_s = float(self.profile.prefill_s(prefill.computed_tokens / replicas))
        return prefill, site.routes.prefill_s + compute_s

    def _own_prefill(
        self,
        workload: Workload,
        prefixes: PrefixOrder,
        prefill: PrefillPlan | None,
        shares: assignment.Assignment,
    ) -> list[IntArray]:
        """For each actor int[assigned]: prompt tokens that it computes itself, in order of admission."""
        n, known = workload.responses_per_prompt, 0 if prefill is None else prefill.prefix_tokens
        if known >= int(workload.prompt_tokens.max()):
            nothing = ints(np.zeros(max(share.size for share in shares), dtype=np.int64))
            return [nothing[: share.size] for share in shares]
        if self.policy.prefix_caching:
            return [prefixes.new_tokens(share // n, known) for share in shares]
        rest = np.maximum(workload.prompt_tokens - known, 0)
        return [ints(rest[share // n]) for share in shares]

    def _lengths(self, workload: Workload) -> FloatArray:
        lengths = self.estimator.estimate(workload)
        if lengths.shape != (workload.size,) or not np.isfinite(lengths).all():
            raise InputError(f"step {workload.step}: the estimator must give a finite length for each prompt")
        return np.clip(lengths, 1.0, workload.max_response_tokens)

    def _beliefs(
        self, work: Work, workload: Workload, prefill: PrefillPlan | None, prefill_s: float, site: _Site
    ) -> _Beliefs:
        tokens = workload.prompt_tokens[work.prompt]
        sent = np.minimum(tokens, prefill.prefix_tokens) if prefill is not None else np.zeros_like(tokens)
        once = self.policy.prefix_caching
        own = (tokens - sent) if once else (tokens - sent) * np.diff(work.copies_sum)
        start_s, late_s = self._start_s(site)
        return _Beliefs(
            model=self._model,
            work=work,
            own_prefill_sum=running_sum(own.astype(np.float64)),
            header_tokens=workload.common_prefix_tokens if once and prefill is None else 0,
            kv_bytes_sum=running_sum(sent * self.profile.data.kv_bytes_per_token),
            prefill_s=prefill_s,
            routes=site.routes,
            ready_s=np.maximum(site.routes.weights_s, late_s),
            start_sum=running_sum(start_s),
        )

    def _start_s(self, site: _Site) -> tuple[FloatArray, FloatArray]:
        """float[positions] each: seconds that starting a process takes; how much later than the others it is ready.

        Processes start during learning, whose shortest past is all that can be counted on; only one that must start
        anew while others are woken comes later than they do. The run's first step finds all of them asleep.
        """
        data, kept = self.profile.data, self._kept[site.positions.gpus[:, 0]]
        if self.policy.hosting != "serverless":
            return np.zeros(kept.size), np.zeros(kept.size)
        if self.policy.start != "warm" or not kept.any():
            each_s = data.warm_start_s if self.policy.start == "warm" else data.cold_start_s
            return np.full(kept.size, each_s), np.zeros(kept.size)
        ahead_s = self._shortest_s.get("learning", np.inf) + PREWARM_BUFFER_S
        late_s = max(data.cold_start_s - max(ahead_s, data.warm_start_s), 0.0)
        beside = np.isin(site.positions.gpus[:, 0], site.learner)  # where the learner, then the prefill actor, runs
        blocked_s = np.where(beside, site.routes.prefill_s + COLD_START_GPU_SHARE * data.cold_start_s, 0.0)
        new_s = np.maximum(late_s, blocked_s)
        return np.where(kept, data.warm_start_s, data.cold_start_s), np.where(kept, 0.0, new_s)

    def _static(self, workload: Workload, site: _Site) -> int:
        fit = min(len(site.positions.gpus), workload.size)
        wanted = self._actors or fit
        if wanted > fit:
            raise self._too_many(wanted, workload, site)
        return wanted

    def _too_many(self, wanted: int, workload: Workload, site: _Site) -> InfeasibleError:
        room = len(site.positions.gpus)
        return InfeasibleError(
            f"policy {self.policy.name}: {wanted} decode actors asked for, {min(room, workload.size)} fit "
            f"(room for {room} of {self.profile.data.tp} GPUs, {workload.size} prompts)"
        )

    def _scale(self, beliefs: _Beliefs, workload: Workload, site: _Site) -> CandidateTable:
        """The choice of N (step 4)."""
        fit = min(len(site.positions.gpus), workload.size)
        if self._least > fit:
            raise self._too_many(self._least, workload, site)
        most = min(self._most or fit, fit)
        # An upper bound for any N: each group has an interval for its first length and one for every rise inside it.
        intervals = min(beliefs.work.rises.size + most, workload.size)
        return scaling.search(self._least, most, beliefs.evaluate, SEARCH_INTERVALS // intervals, self._weight)

    def _migration(self, workload: Workload) -> plans.MigrationSpec | None:
        if self.policy.migration is None:
            return None
        if self.policy.migration == "cut-and-migrate":
            return migration.CutAndMigrate(self._tau).spec
        return migration.GlobalCut(int(np.ceil(GLOBAL_CUT_SHARE * workload.responses))).spec

    def _prewarm(self, algorithm: Algorithm, estimate: PlanEstimate) -> tuple[Prewarm, ...]:
        """When each function is asked for: the shortest past of the phase before its own, plus a buffer (§5).

        Before any report, the plan's own estimate of generation stands in, and 0 for preparation; the decode actors of
        the first step start before the clock.
        """
        if self.policy.start == "cold" or self.policy.hosting != "serverless":
            return ()
        past = self._shortest_s
        first = ("prefill", "decode") if self.policy.dedup else ("decode",)
        waits = [(name, past["learning"]) for name in first] if "learning" in past else []
        waits += [(name, past.get("generation", estimate.generation_s)) for name in placement.PREPARATION[algorithm]]
        waits.append(("learner", past.get("preparation", 0.0)))
        return tuple(Prewarm(function=name, ready_after_s=wait_s + PREWARM_BUFFER_S) for name, wait_s in waits)


def _estimate(beliefs: _Beliefs, decode_s: FloatArray, starts: IntArray, ends: IntArray) -> PlanEstimate:
    """What generation will take with these groups on positions 0, 1, ...: weights flow at once, KV after prefill."""
    count = decode_s.size
    ready_s = beliefs.ready_s[:count]
    kv_s = beliefs.kv_s(starts, ends, np.arange(count))
    begin_s = np.maximum(ready_s, beliefs.prefill_s + kv_s)
    return PlanEstimate(
        prefill_s=beliefs.prefill_s,
        ready_s=floats(ready_s),
        kv_s=floats(kv_s),
        decode_s=floats(decode_s),
        generation_s=float((begin_s + decode_s).max()),
        decode_gpu_s=float(decode_s.sum() * beliefs.model.profile.data.tp),
    )
