"""The planner: from a step's workload and the cluster's state to a whole plan, in the five steps of RLHFless §4.1."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless.errors import InputError
from rlhfless.rng import stream
from rlhfless.scheduler import assignment, frontier, gather, migration, peers, placement, policies, scaling, width
from rlhfless.scheduler.beliefs import Beliefs, Seat, Site
from rlhfless.scheduler.dedup import PrefixOrder
from rlhfless.scheduler.elastic import Elastic
from rlhfless.scheduler.estimate import Work, even_bounds, group_times, running_sum, split_work
from rlhfless.scheduler.grounds import Grounds, by_length, in_order
from rlhfless.scheduler.mixed import Option, SeatsOf, Step
from rlhfless.scheduler.repack import Repack
from rlhfless.scheduler.seer import Seer
from rlhfless.scheduler.starts import PREWARM_BUFFER_S
from rlhfless.types import plan as plans
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.cluster import ClusterState
from rlhfless.types.plan import (
    CandidateTable,
    DecodeActor,
    ElasticTerms,
    FrontierTable,
    Plan,
    PlanEstimate,
    PrefillPlan,
    Prewarm,
)
from rlhfless.types.workload import Algorithm, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What a policy has decided for a step; sequences [actors]."""

    prefill: PrefillPlan | None
    shares: Sequence[IntArray]
    sizes: Sequence[int]
    gpus: tuple[tuple[int, ...], ...]
    estimate: PlanEstimate
    migration: plans.MigrationSpec | None
    candidates: CandidateTable | None = None
    frontier: FrontierTable | None = None
    notes: tuple[str, ...] = ()


class Planner(Grounds):
    """Makes the plan of each step under one policy: no I/O, no clock; what it knows and keeps is its `Grounds`."""

    def plan(self, workload: Workload, state: ClusterState) -> Plan:
        """The plan of one step. Raises InfeasibleError where the step cannot be carried out as asked."""
        rule = self.policy
        self.profile.require_fit(int(workload.prompt_tokens.max()), workload.max_response_tokens)
        site = self._site_of(workload.algorithm, state.free_gpus)
        prefixes = PrefixOrder.of(workload, self.profile.data.kv_block_tokens)
        decide = {"frontier": self._mixed, "dealt": self._elastic}.get(rule.assignment, self._uniform)
        made = decide(workload, prefixes, site)
        own_prefill = self._own_prefill(workload, prefixes, made.prefill, made.shares)
        slots = {self.profile.data.tp: self.profile.data.max_slots}
        slots |= {tp: model.profile.data.max_slots for tp, model in self._models.items()}
        return Plan(
            schema=plans.SCHEMA,
            policy=rule.name,
            step=workload.step,
            epoch=workload.epoch,
            algorithm=workload.algorithm,
            prompts=workload.size,
            responses_per_prompt=workload.responses_per_prompt,
            prefill_tp=self.profile.data.tp,
            cluster_gpus=self.cluster.gpus,
            hosting=rule.hosting,
            start=rule.start,
            prewarm=self._prewarm(workload.algorithm, made),
            prefix_caching=rule.prefix_caching,
            prefill=made.prefill,
            actors=tuple(
                DecodeActor(
                    responses=share,
                    prefill_tokens=own,
                    # these give an actor more than it began with
                    slots=slots[tp] if rule.migration in ("elastic", "repack", "seer") else min(slots[tp], share.size),
                    tp=tp,
                )
                for share, own, tp in zip(made.shares, own_prefill, made.sizes, strict=True)
            ),
            placement=placement.place(made.gpus, site.learner, workload.algorithm, rule.hosting),
            migration=made.migration,
            estimate=made.estimate,
            candidates=made.candidates,
            frontier=made.frontier,
            notes=site.notes + made.notes,
        )

    def _uniform(self, workload: Workload, prefixes: PrefixOrder, site: Site) -> _Decision:
        """Actors of one size, prompts in equal shares."""
        rule = self.policy
        prefill, prefill_s = self._prefill(workload, prefixes, site)
        lengths = self._lengths(workload)
        n, table = workload.responses_per_prompt, None
        if rule.assignment == "sorted-even":
            beliefs = self._beliefs(by_length(workload, lengths), workload, prefill, prefill_s, site)
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
            elif rule.assignment == "least-in-flight":
                shares = assignment.least_in_flight(workload.size, n, count)
            else:
                deal = peers.ASSIGNMENTS[rule.assignment]
                shares = deal(lengths, n, count, self._speed(workload, lengths))
            work, starts, ends = split_work(shares, lengths, workload.prompt_tokens, n)
            beliefs = self._beliefs(work, workload, prefill, prefill_s, site)
        tokens = [int(column.sum()) for column in self._own_prefill(workload, prefixes, prefill, shares)]
        decode_s = group_times(self._model, beliefs.work, starts, ends, tokens)
        # only policies that assign by expected length place by it too: the baselines know nothing of it
        order = np.argsort(-decode_s, kind="stable") if rule.assignment == "sorted-even" else np.arange(count)
        notes: tuple[str, ...] = ()
        if table is not None and not table.eligible.any():
            slack_s = float(table.hiding_slack_s.max())
            notes = (f"no number of actors hides its transfers (best slack {slack_s:.3g} s); the best of all is taken",)
        return _Decision(
            prefill=prefill,
            shares=[shares[i] for i in order.tolist()],
            sizes=[self.profile.data.tp] * count,
            gpus=tuple(map(tuple, site.positions.gpus[:count].tolist())),
            estimate=beliefs.estimate(decode_s[order], starts[order], ends[order]),
            migration=self._migration(workload, lengths, beliefs, count),
            candidates=table,
            notes=notes,
        )

    def _elastic(self, workload: Workload, prefixes: PrefixOrder, site: Site) -> _Decision:
        """As many actors to start with, of such a size, with or without a larger one in reserve, and as eager a rule,
        as beat the paper's choice most in time and cost."""
        lengths, n = self._lengths(workload), workload.responses_per_prompt
        prefill, prefill_s = self._prefill(workload, prefixes, site)
        work = by_length(workload, lengths)
        rival, known = self._equal(work, workload, prefill, prefill_s, site)
        chosen = int(known.actors[known.chosen])
        expected, spread = self._expected(workload)
        rng = stream(self.seed, "width", workload.step)
        drawn = width.draw(expected, spread, n, workload.max_response_tokens, rng)
        equal = assignment.sorted_even(lengths, n, chosen)
        goal = width.cut_and_migrate(rival, drawn, workload.prompt_tokens, equal, self._tau)
        network = self.cluster.hosts[0].network
        longest = int(workload.prompt_tokens.max()), workload.max_response_tokens
        larger = [seat for seat in site.seats if seat[0].profile.fits(*longest)]
        best: tuple[width.Width, Seat] | None = None
        # the largest first: nothing can be in reserve for them, and what they come to spares others the search
        for seat in (*larger, (self._model, site.positions, site.routes)):
            model, at, _ = seat
            beliefs = self._beliefs(work, workload, prefill, prefill_s, site, seat=seat)
            if self._starts.waking:
                # a process that is kept serves all later steps: its first start is no reason against it in this one
                warm_s = np.full(at.host.size, model.profile.data.warm_start_s)
                beliefs = replace(beliefs, start_sum=running_sum(warm_s))
            beliefs = replace(beliefs, work=in_order(work.prompt, workload, drawn.mean(axis=1)))
            # lengths unknown: no fewer GPUs than the paper's
            least = 1 if self._spread else -(-chosen * self.profile.data.tp // model.profile.data.tp)
            most = min(at.host.size, workload.size, self._most or workload.size)
            candidates = scaling.ladder(min(max(least, self._least), most), most, width.CANDIDATES)
            tp = model.profile.data.tp
            reserves = self._reserves([each for each in larger if each[0].profile.data.tp > tp], beliefs, at, site)
            limit = best[0].score if best else np.inf
            wide = width.choose(beliefs, drawn, workload.prompt_tokens, candidates, goal, reserves, network, limit)
            if wide is not None and wide.score <= limit:  # of equals, the smallest
                best = wide, seat
        assert best is not None
        wide, (model, at, _) = best
        shares = assignment.dealt(lengths, n, wide.actors)
        tokens = [int(column.sum()) for column in self._own_prefill(workload, prefixes, prefill, shares)]
        work, starts, ends = split_work(shares, expected, workload.prompt_tokens, n)
        dealt = self._beliefs(work, workload, prefill, prefill_s, site, seat=best[1])
        estimate = dealt.estimate(group_times(model, work, starts, ends, tokens), starts, ends)
        later = () if wide.reserve is None else (wide.reserve.gpus,)
        none = np.zeros(len(later))
        return _Decision(
            prefill=prefill,
            shares=[*shares, *(ints([]) for _ in later)],
            sizes=[model.profile.data.tp] * wide.actors + [len(gpus) for gpus in later],
            gpus=(*map(tuple, at.gpus[: wide.actors].tolist()), *later),
            estimate=replace(
                estimate,
                generation_s=wide.generation_s,
                decode_gpu_s=wide.decode_gpu_s,
                ready_s=floats(np.append(estimate.ready_s, none)),
                kv_s=floats(np.append(estimate.kv_s, none)),
                decode_s=floats(np.append(estimate.decode_s, none)),
            ),
            migration=Elastic(wide.price, wide.terms).spec if wide.actors > 1 or later else None,
        )

    def _reserves(
        self, larger: Sequence[Seat], beliefs: Beliefs, begin: placement.Positions, site: Site
    ) -> list[width.Reserve]:
        """An actor of each size that may be kept in reserve, as far from where those that `begin` are as can be. Just
        one: on the shipped presets a second cost more than it saved."""
        found = []
        for model, at, ways in larger:
            profile, host = model.profile, self.cluster.hosts[int(at.host[-1])]
            start_s, _ = self._starts.decode_s(profile, at, ways, site.learner, self._starts.kept)
            near = bool(np.isin(at.host[-1], self.cluster.host_of[site.learner]))
            load_s = (host.local if near else host.network).transfer_s(profile.data.weight_bytes)
            in_its_way = np.isin(begin.gpus, at.gpus[-1]).any(axis=1)
            found.append(
                width.Reserve(
                    profile=profile,
                    speed=width.speed_of(beliefs, profile),
                    gpus=tuple(at.gpus[-1].tolist()),
                    start_s=float(start_s[-1]) + load_s,
                    beside=int(np.flatnonzero(np.append(in_its_way, True))[0]),
                )
            )
        return found

    def _mixed(self, workload: Workload, prefixes: PrefixOrder, site: Site) -> _Decision:
        """Groups, number and sizes of actors chosen together on the time-cost frontier."""
        options = self._options(workload, prefixes, site)
        best = self._step(workload, options[-1], site).plan(self._goal, options)
        return _Decision(
            prefill=best.option.prefill,
            shares=best.shares,
            sizes=best.sizes,
            gpus=best.gpus,
            estimate=best.estimate,
            migration=Elastic(best.price, best.terms).spec if best.option.cut and len(best.sizes) > 1 else None,
            frontier=best.table,
        )

    def frontier(self, workload: Workload, state: ClusterState, least_step: float) -> FrontierTable:
        """The whole frontier of a step as it is believed now, points more than a share of time apart; row 0 is chosen.

        Raises InputError for a policy that plans without one.
        """
        if self.policy.assignment != "frontier":
            raise InputError(f"policy {self.policy.name} plans without a frontier; {policies.FRONTIER} has one")
        site = self._site_of(workload.algorithm, state.free_gpus)
        options = self._options(workload, PrefixOrder.of(workload, self.profile.data.kv_block_tokens), site)
        problems = self._step(workload, options[-1], site).problems(options)
        paths = [path for problem in problems for path in frontier.frontier(problem, least_step)]
        return frontier.table_of(frontier.undominated(paths), self._goal, 0)

    def _step(self, workload: Workload, shared: Option, site: Site) -> Step:
        learned, starts = bool(self._spread), self._starts
        lengths, spread = self._expected(workload)
        work = by_length(workload, self._lengths(workload))
        _, equal = self._equal(work, workload, shared.prefill, shared.prefill_s, site)
        return Step(
            workload=workload,
            estimates=lengths,
            spread=spread,
            seats=[
                SeatsOf(model, at, ways, *starts.decode_s(model.profile, at, ways, site.learner, starts.kept))
                for model, at, ways in site.seats
                if model.profile.fits(int(workload.prompt_tokens.max()), workload.max_response_tokens)
            ],
            learner=site.learner,
            cluster=self.cluster,
            prefix_caching=self.policy.prefix_caching,
            chance=self._chance,
            tau=self._tau,
            equal=(int(equal.actors[equal.chosen]), self.profile.data.tp),
            learned=learned,
        )

    def _equal(
        self, work: Work, workload: Workload, prefill: PrefillPlan | None, prefill_s: float, site: Site
    ) -> tuple[Beliefs, CandidateTable]:
        """What the paper's rule would believe and choose, with the processes that it would have kept from before."""
        beliefs = self._beliefs(work, workload, prefill, prefill_s, site, self._starts.equal)
        table = self._scale(beliefs, workload, site)
        self._starts.keep_equal(self.profile.data.tp, site.positions.gpus[: table.actors[table.chosen], 0])
        return beliefs, table

    def _options(self, workload: Workload, prefixes: PrefixOrder, site: Site) -> list[Option]:
        cut = self.policy.migration is not None
        options = [Option(prefill=None, prefill_s=0.0, late_s=0.0, gpus=0, cut=cut)]
        if self.policy.dedup:
            prefill, prefill_s = self._prefill(workload, prefixes, site)
            late_s = self._starts.prefill_late_s(self.profile)
            options.append(Option(prefill=prefill, prefill_s=prefill_s, late_s=late_s, gpus=site.learner.size, cut=cut))
        return options

    def _migration(
        self, workload: Workload, lengths: FloatArray, beliefs: Beliefs, count: int
    ) -> plans.MigrationSpec | None:
        if self.policy.migration in (None, "elastic"):  # elastic's depends on the number of actors
            return None
        if self.policy.migration == "cut-and-migrate":
            return migration.CutAndMigrate(self._tau).spec
        if self.policy.migration == "repack":
            return Repack(peers.batch_limit(self._speed(workload, lengths))).spec
        if self.policy.migration == "seer":
            terms = ElasticTerms(
                speeds=(self._speed(workload, lengths),),
                speed_of=ints(np.zeros(count, dtype=np.int64)),
                move_s_per_token=width.move_s_per_token(beliefs, self.cluster.hosts[0].network),
                reserve=ints([]),
                start_s=0.0,
            )
            return Seer(workload.responses_per_prompt, terms).spec
        expected, spread = self._expected(workload)
        rng = stream(self.seed, "cut", workload.step)
        drawn = width.draw(expected, spread, workload.responses_per_prompt, workload.max_response_tokens, rng)
        move_s = width.move_s_per_token(beliefs, self.cluster.hosts[0].network)
        left = gather.remaining(self.profile, drawn, workload.prompt_tokens, count, move_s)
        return migration.GlobalCut(left).spec

    def _prewarm(self, algorithm: Algorithm, made: _Decision) -> tuple[Prewarm, ...]:
        """When each function is asked for: the shortest past of the phase before its own, plus a buffer (§5).

        Before any report, the plan's own estimate of generation stands in, and 0 for preparation; the decode actors of
        the first step start before the clock.
        """
        if self.policy.start == "cold" or self.policy.hosting != "serverless":
            return ()
        past = self._starts.shortest_s
        first = ("prefill", "decode") if made.prefill is not None else ("decode",)
        waits = [(name, past["learning"]) for name in first] if "learning" in past else []
        waits += [
            (name, past.get("generation", made.estimate.generation_s)) for name in placement.PREPARATION[algorithm]
        ]
        waits.append(("learner", past.get("preparation", 0.0)))
        return tuple(Prewarm(function=name, ready_after_s=wait_s + PREWARM_BUFFER_S) for name, wait_s in waits)
