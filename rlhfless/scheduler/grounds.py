"""What all ways of deciding a step share: the site, shared prefixes, expected lengths, what groups of them cost."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlhfless.errors import InfeasibleError, InputError
from rlhfless.scheduler import migration, policies, scaling, width
from rlhfless.scheduler.beliefs import Beliefs, Seat, Site
from rlhfless.scheduler.dedup import PrefixOrder, uncached
from rlhfless.scheduler.estimate import DecodeModel, Work, running_sum
from rlhfless.scheduler.frontier import Goal
from rlhfless.scheduler.learned import SCHEMA, Learned
from rlhfless.scheduler.lengths import DEFAULT_WINDOW, HistoryEstimator, LengthEstimator, LengthHistory
from rlhfless.scheduler.mixed import CHANCE
from rlhfless.scheduler.policies import Policy
from rlhfless.scheduler.spread import Spread, SpreadHistory
from rlhfless.scheduler.starts import Kept, Starts, first_gpus
from rlhfless.types import plan as plans
from rlhfless.types.arrays import FloatArray, IntArray, ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.plan import CandidateTable, Hosting, PrefillPlan, Start
from rlhfless.types.profile import Profile, check_sizes
from rlhfless.types.report import StepReport
from rlhfless.types.workload import Algorithm, Workload

SEARCH_INTERVALS = 5_000_000
"""Stretches between two ends of responses that a search over N may evaluate (chosen: a few tenths of a second)."""


class Grounds:
    """What a planner decides on, under one policy; keeps length history, shortest phases, caches."""

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
        profiles: Sequence[Profile] = (),
        goal: Goal | None = None,
        chance: float = CHANCE,
    ) -> None:
        """`actors`: static N, by default all that fit; the range of N and lambda (`weight`) are for scaling policies.

        `profiles` (the same model at other tensor-parallel sizes), `goal` (by default the knee) and `chance` (of each
        group ending in time) are for the frontier; elastic takes larger sizes from them, to begin with or in reserve.
        All else runs on `profile`, as these may too.
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
        if chosen.scale and chosen.assignment not in ("sorted-even", "dealt", "frontier"):
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
        sizes = {each.data.tp: each for each in (*profiles, profile)}
        check_sizes(sizes)
        if not 0.0 < chance < 1.0:
            raise InputError(f"chance {chance}: the chance of ending in time must lie between 0 and 1")
        mixing = sorted(sizes, reverse=True) if chosen.assignment == "frontier" else []
        if chosen.migration == "elastic" and chosen.assignment == "dealt":
            mixing = [tp for tp in sorted(sizes, reverse=True) if tp > profile.data.tp]
        self._models = {tp: DecodeModel.of(sizes[tp]) for tp in mixing}
        self._goal, self._chance = goal or Goal(), chance
        self._spread, self._asked = SpreadHistory(), (-1, np.empty(0))
        self._starts = Starts(self.policy.hosting, self.policy.start, cluster.gpus)
        self._site: tuple[Algorithm, bytes, Site] | None = None

    def observe(self, report: StepReport) -> None:
        """Learn response lengths and the shortest phases from a step that has been carried out."""
        if self._asked[0] == report.step:
            n = report.responses_per_prompt
            self._spread.observe(report.epoch, self._asked[1], report.tokens.reshape(-1, n))
        self.estimator.observe(report)
        self._starts.observe(report)

    @property
    def learned(self) -> Learned:
        """What steps have taught besides the lengths of prompts, which the estimator keeps."""
        starts, (first_epoch, later_epochs) = self._starts, self._spread.seen
        return Learned(
            schema=SCHEMA,
            shortest_s=dict(starts.shortest_s),
            kept=first_gpus(starts.kept),
            equal=first_gpus(starts.equal),
            prefilled=starts.prefilled,
            first_epoch=first_epoch,
            later_epochs=later_epochs,
        )

    def relearn(self, known: Learned) -> None:
        """Go on from what a planner of the same run had learned: the next plan is the one that it would have made.

        Raises InputError for GPUs that the cluster does not have.
        """
        self._starts.relearn(known)
        self._spread.relearn(known)

    def _site_of(self, algorithm: Algorithm, free: IntArray) -> Site:
        key = free.tobytes()
        if self._site is not None and self._site[:2] == (algorithm, key):
            return self._site[2]
        models = tuple(self._models.values())
        site = Site.of(self._model, models, self.cluster, algorithm, free, self.policy.hosting, self._learner_gpus)
        self._site = (algorithm, key, site)
        return site

    def _prefill(self, workload: Workload, prefixes: PrefixOrder, site: Site) -> tuple[PrefillPlan | None, float]:
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
        shares: Sequence[IntArray],
    ) -> list[IntArray]:
        """For each actor int[assigned]: prompt tokens that it computes itself, in order of admission."""
        n, known = workload.responses_per_prompt, 0 if prefill is None else prefill.prefix_tokens
        if self.policy.prefix_caching and known < int(workload.prompt_tokens.max()):
            return [prefixes.new_tokens(share // n, known) for share in shares]
        rest = uncached(workload.prompt_tokens, known, prefixes.block_tokens)
        return [ints(rest[share // n]) for share in shares]

    def _lengths(self, workload: Workload) -> FloatArray:
        lengths = self.estimator.estimate(workload)
        if lengths.shape != (workload.size,) or not np.isfinite(lengths).all():
            raise InputError(f"step {workload.step}: the estimator must give a finite length for each prompt")
        return np.clip(lengths, 1.0, workload.max_response_tokens)

    def _beliefs(
        self,
        work: Work,
        workload: Workload,
        prefill: PrefillPlan | None,
        prefill_s: float,
        site: Site,
        kept: Kept | None = None,
        seat: Seat | None = None,
    ) -> Beliefs:
        """Of a step's prompts on actors of the planner's own size, or on those of `seat`."""
        model, at, ways = seat or (self._model, site.positions, site.routes)
        tokens = workload.prompt_tokens[work.prompt]
        sent = np.minimum(tokens, prefill.prefix_tokens) if prefill is not None else np.zeros_like(tokens)
        once, block_tokens = self.policy.prefix_caching, self.profile.data.kv_block_tokens
        first = uncached(tokens, sent, block_tokens)
        again = uncached(tokens, tokens, block_tokens) if once else first
        own: FloatArray = first + (np.diff(work.copies_sum) - 1.0) * again
        kept = self._starts.kept if kept is None else kept
        start_s, late_s = self._starts.decode_s(model.profile, at, ways, site.learner, kept)
        return Beliefs(
            model=model,
            work=work,
            own_prefill_sum=running_sum(own),
            header_tokens=workload.common_prefix_tokens // block_tokens * block_tokens
            if once and prefill is None
            else 0,
            kv_bytes_sum=running_sum(sent * self.profile.data.kv_bytes_per_token),
            prefill_s=prefill_s,
            routes=ways,
            ready_s=np.maximum(ways.weights_s, late_s),
            start_sum=running_sum(start_s),
        )

    def _expected(self, workload: Workload) -> tuple[FloatArray, Spread]:
        """float[prompts]: expected lengths; and how far responses stray from them."""
        lengths = self._lengths(workload)
        self._asked = (workload.step, lengths)
        known = self.policy.oracle and workload.responses_per_prompt == 1
        if not self._spread and isinstance(self.estimator, HistoryEstimator) and workload.reference_tokens is not None:
            # nothing says how long responses are for their reference answers: as long as the cap allows
            lengths = lengths * (workload.max_response_tokens / lengths.max())
        return lengths, Spread.none() if known else self._spread.of(workload.epoch, lengths)

    def _static(self, workload: Workload, site: Site) -> int:
        fit = min(len(site.positions.gpus), workload.size)
        wanted = self._actors or fit
        if wanted > fit:
            raise self._too_many(wanted, workload, site)
        return wanted

    def _too_many(self, wanted: int, workload: Workload, site: Site) -> InfeasibleError:
        room = len(site.positions.gpus)
        return InfeasibleError(
            f"policy {self.policy.name}: {wanted} decode actors asked for, {min(room, workload.size)} fit "
            f"(room for {room} of {self.profile.data.tp} GPUs, {workload.size} prompts)"
        )

    def _scale(self, beliefs: Beliefs, workload: Workload, site: Site) -> CandidateTable:
        """The choice of N (step 4)."""
        fit = min(len(site.positions.gpus), workload.size)
        if self._least > fit:
            raise self._too_many(self._least, workload, site)
        most = min(self._most or fit, fit)
        # An upper bound for any N: each group has an interval for its first length and one for every rise inside it.
        intervals = min(beliefs.work.rises.size + most, workload.size)
        return scaling.search(self._least, most, beliefs.evaluate, SEARCH_INTERVALS // intervals, self._weight)

    def _speed(self, workload: Workload, lengths: FloatArray) -> plans.Speed:
        """An actor's at the step's mean context."""
        prompt, n = float(workload.prompt_tokens.mean()), workload.responses_per_prompt
        generated = float((lengths**2).sum() / lengths.sum() / 2)
        return width.at_context(self.profile, prompt + generated, prompt / n + generated)


def by_length(workload: Workload, lengths: FloatArray) -> Work:
    """Prompts by expected length, the shortest first; of equal ones the last."""
    return in_order(np.argsort(-lengths, kind="stable")[::-1], workload, lengths)


def in_order(order: IntArray, workload: Workload, lengths: FloatArray) -> Work:
    """Prompts in a given order."""
    return Work.of(order, lengths[order], workload.prompt_tokens[order], workload.responses_per_prompt)
