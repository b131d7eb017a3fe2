"""From what is believed of a step to the frontier's problem, and from its solution to actors: groups of any size."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rlhfless.errors import InfeasibleError
from rlhfless.scheduler import crowd, frontier, placement, width
from rlhfless.scheduler.beliefs import estimate_of
from rlhfless.scheduler.cheapest import Groups, Path, Problem, Seats, path_of
from rlhfless.scheduler.dedup import uncached
from rlhfless.scheduler.estimate import DecodeModel, even_bounds, running_sum
from rlhfless.scheduler.frontier import Goal
from rlhfless.scheduler.spread import Spread
from rlhfless.types.arrays import FloatArray, IntArray, ints
from rlhfless.types.cluster import Cluster
from rlhfless.types.plan import ElasticTerms, FrontierTable, PlanEstimate, PrefillPlan
from rlhfless.types.workload import Workload

CHANCE = 0.5
"""Chance with which generation is to have ended by the time planned for it (chosen: as likely as not)."""


UNLEARNED_WEIGHT = 0.8
"""Weight of time in a run's first step (chosen: see `Step._unlearned`)."""
EARLY = 0.1
"""Chance of ending by then that stands for responses that turn out short (chosen)."""
FLOOR_MOVES = 0.5
"""Part of `moved_s` that counts for the plan of equal groups (chosen: they end one after the other, so that responses
move to groups that are nearly done rather than to the longest)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A way to run the step, the choice of groups apart."""

    prefill: PrefillPlan | None
    """Shared prefixes; None where each actor computes its own prompts."""
    prefill_s: float
    """End of prefill with a process that is woken; 0 without."""
    late_s: float
    """Seconds by which it ends later because its process starts anew."""
    gpus: int
    """GPUs that the prefill actor holds until then."""
    cut: bool
    """Whether actors are released in mid-step, their last responses moved to others of their size."""


class SeatsOf(NamedTuple):
    """Room for actors of one size; columns [positions]."""

    model: DecodeModel
    """Their latencies."""
    at: placement.Positions
    """Where they can be."""
    routes: placement.Routes
    """How transfers reach them, were all of this size."""
    start_s: FloatArray
    """Seconds that a start takes."""
    late_s: FloatArray
    """How much later than others the process is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """A chosen plan; sequences [actors], the longest prompts first."""

    option: Option
    """What goes with it."""
    shares: tuple[IntArray, ...]
    """Responses of each."""
    sizes: tuple[int, ...]
    """GPUs of each."""
    gpus: tuple[tuple[int, ...], ...]
    """Which ones."""
    estimate: PlanEstimate
    """What it will take, actors placed."""
    table: FrontierTable
    """Between what was chosen."""
    price: float
    """GPU-seconds that a second of the step is worth to the mid-step rule."""
    terms: ElasticTerms
    """What else the rule weighs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step whose plans are compared."""

    workload: Workload
    """Its prompts."""
    estimates: FloatArray
    """float[prompts]: expected tokens of a response."""
    spread: Spread
    """How far responses stray from that."""
    seats: Sequence[SeatsOf]
    """Room for actors of each size."""
    learner: IntArray
    """GPUs of the learner."""
    cluster: Cluster
    """For transfers."""
    prefix_caching: bool
    """Whether an actor keeps the KV of prompts that it has seen."""
    chance: float = CHANCE
    """Chance with which all groups end in time."""
    tau: float
    """Share of a group's responses after which the paper's rule cuts it."""
    equal: tuple[int, int]
    """(decode actors, size) of the plan of equal groups that the knee may not fall behind."""
    learned: bool
    """Whether lengths have been seen in earlier steps."""

    def plan(self, goal: Goal, options: Sequence[Option], borders: int = crowd.BORDERS) -> Mixed:
        """The best plan for the goal over all options. Raises InfeasibleError as `frontier.choose` does."""
        order = np.argsort(-self.estimates, kind="stable")
        offered, equal = crowd.borders_of(order.size, borders), self._equal_borders()
        whole, seats = self._crowd(order, np.union1d(offered, equal)), self._seats()
        row = whole.at(offered)
        kinds = self._times(row)
        problems = [self._problem(row, kinds, order, option, seats) for option in options]
        floor = self._floor(whole.at(equal), order, options[-1], seats)
        if goal.kind == "knee" and not self.learned:
            path, table = self._unlearned(row, problems[0], floor)
            return self._placed(row, order, options[0], problems[0], path, table, frontier.price_of(path, floor))
        best: Path | None = None
        chosen: FrontierTable | None = None
        problem, option = problems[0], options[0]
        refused: InfeasibleError | None = None
        for each, posed in zip(options, problems, strict=True):
            if best is not None and frontier.hopeless(posed, goal, best, floor):
                continue
            try:
                path, found = frontier.choose(posed, goal, floor)
            except InfeasibleError as error:
                refused = refused or error
                continue
            if best is None or np.argmin(frontier.scores(goal, [best, path], floor)) == 1:
                best, chosen, problem, option = path, found, posed, each
        if best is None or chosen is None:
            assert refused is not None
            raise refused
        price = frontier.price_of(best, floor if goal.kind == "knee" else None)
        return self._placed(row, order, option, problem, best, chosen, price)

    def _unlearned(self, row: crowd.Crowd, problem: Problem, floor: Path) -> tuple[Path, FrontierTable]:
        """While no length has been seen: equal groups on actors of one size, with time ahead of cost. Groups of
        different sizes would trust an order of prompts that has not shown itself; and the actors of the first step are
        those whose processes later steps can wake, so that they had better be many."""
        kinds = np.unique(problem.seats.kind, return_counts=True)
        paths = frontier.undominated(
            [
                path_of(problem, self._equal_groups(row, problem, kind, actors))
                for kind, seats in zip(*(column.tolist() for column in kinds), strict=True)
                for actors in range(1, min(seats, row.borders.size - 1) + 1)
            ]
        )
        goal = Goal(kind="knee", value=UNLEARNED_WEIGHT)
        chosen = int(frontier.scores(goal, paths, floor).argmin())
        return paths[chosen], frontier.table_of(paths, goal, chosen)

    def _times(self, row: crowd.Crowd) -> list[crowd.GroupTimes]:
        return crowd.group_times([seat.model for seat in self.seats], row, self.chance)

    def _equal_borders(self) -> IntArray:
        """int[actors + 1]: where the paper's groups begin, and the end."""
        prompts = self.workload.size
        return np.append(prompts - even_bounds(prompts, ints([self.equal[0]]))[1], prompts)

    def _floor(self, row: crowd.Crowd, order: IntArray, option: Option, seats: Seats) -> Path:
        """The paper's plan: equal groups, cut at tau, its processes warm. `row` has their borders."""
        actors, tp = self.equal
        kind = next(number for number, seat in enumerate(self.seats) if seat.at.gpus.shape[1] == tp)
        times = crowd.group_times([self.seats[kind].model], row, self.chance, self.tau, neighbours=True)
        problem = self._problem(row, times * len(self.seats), order, replace(option, late_s=0.0), seats)
        own = np.flatnonzero(seats.kind == kind)[:actors].tolist()
        ready_s, start_s = seats.ready_s.copy(), seats.start_s.copy()
        ready_s[own] = self.seats[kind].routes.weights_s[:actors]
        start_s[own] = np.minimum(start_s[own], self.seats[kind].model.profile.data.warm_start_s)
        warm = replace(
            problem,
            seats=replace(seats, start_s=start_s, ready_s=ready_s),
            moved_s=FLOOR_MOVES * problem.moved_s,
        )
        return path_of(warm, tuple((number, number + 1, seat) for number, seat in enumerate(own)))

    def _equal_groups(self, row: crowd.Crowd, problem: Problem, kind: int, actors: int) -> Groups:
        """Equal groups on the nearest actors of one size; borders are the nearest that are offered."""
        ends = np.rint(np.arange(1, actors + 1) * (row.borders[-1] / actors))
        at = np.unique(np.searchsorted((row.borders[1:] + row.borders[:-1]) / 2, ends)).tolist()
        own = np.flatnonzero(problem.seats.kind == kind)[: len(at)].tolist()
        return tuple(zip([0, *at[:-1]], at, own, strict=True))

    def problems(self, options: Sequence[Option], borders: int = crowd.BORDERS) -> list[Problem]:
        """The frontier's problem under each option."""
        order = np.argsort(-self.estimates, kind="stable")
        row, seats = self._crowd(order, crowd.borders_of(order.size, borders)), self._seats()
        kinds = self._times(row)
        return [self._problem(row, kinds, order, option, seats) for option in options]

    def _crowd(self, order: IntArray, borders: IntArray) -> crowd.Crowd:
        work = self.workload
        return crowd.Crowd.of(
            self.estimates[order],
            self.spread,
            work.prompt_tokens[order],
            work.responses_per_prompt,
            work.max_response_tokens,
            borders,
        )

    def _problem(
        self, row: crowd.Crowd, kinds: Sequence[crowd.GroupTimes], order: IntArray, option: Option, seats: Seats
    ) -> Problem:
        work, prefill = self.workload, option.prefill
        tokens = work.prompt_tokens[order]
        sent = np.minimum(tokens, prefill.prefix_tokens) if prefill is not None else np.zeros_like(tokens)
        block_tokens = self.seats[0].model.profile.data.kv_block_tokens
        own = uncached(tokens, sent, block_tokens)
        again = uncached(tokens, tokens, block_tokens) if self.prefix_caching else own
        own = own + (work.responses_per_prompt - 1) * again
        header = work.common_prefix_tokens // block_tokens * block_tokens
        header = header if self.prefix_caching and prefill is None else 0
        own_sum = running_sum((own - header).astype(np.float64))[row.borders]
        kv_bytes = running_sum(sent * self.seats[0].model.profile.data.kv_bytes_per_token)[row.borders]
        own_tokens = np.maximum(own_sum[None, :] - own_sum[:, None], 0.0) + header
        ends, held, cut, moved, own_s = [], [], [], [], []
        for (model, *_), times in zip(self.seats, kinds, strict=True):
            own_s.append(model.profile.prefill_s(own_tokens))
            ends.append(times.ends_s + own_s[-1])
            held.append(times.works_s + own_s[-1])
            cut.append(times.cut_s + times.moved_s + own_s[-1] if option.cut else held[-1])
            moved.append(times.moved_s if option.cut else np.zeros_like(times.moved_s))
        posed = Problem(
            ends_s=np.stack(ends),
            held_s=np.stack(held),
            cut_s=np.stack(cut),
            moved_s=np.stack(moved),
            seats=seats,
            kv_bytes=kv_bytes,
            prefill_s=option.prefill_s + option.late_s,
            fixed_gpu_s=(option.prefill_s + option.late_s) * option.gpus,
        )

        def together_s(groups: Groups) -> tuple[float, float]:
            kind = posed.seats.kind
            own = [
                (kinds[kind[seat]], i, j, float(posed.begins_s[seat, j] + own_s[kind[seat]][i, j]))
                for i, j, seat in groups
            ]
            early_s, last_s = crowd.together_s(own, (min(EARLY, self.chance), self.chance)).tolist()
            return last_s, early_s

        return replace(posed, together_s=together_s)

    def _seats(self) -> Seats:
        parts: dict[str, list[FloatArray | IntArray]] = {name: [] for name in Seats.__slots__}
        for kind, (_, at, routes, start_s, late_s) in enumerate(self.seats):
            count = at.host.size
            parts["offset"].append(at.offset)
            parts["kind"].append(np.full(count, kind))
            parts["tp"].append(np.full(count, at.gpus.shape[1]))
            parts["ready_s"].append(np.maximum(routes.weights_s, late_s))
            # a start holds GPUs before the step, unless the learner does; what is late of it is held after its begin
            beside = np.isin(at.gpus[:, 0], self.learner)
            parts["start_s"].append(np.where(beside, 0.0, np.maximum(start_s - late_s, 0.0)))
            parts["kv_latency_s"].append(routes.kv_latency_s)
            parts["kv_byte_s"].append(routes.kv_byte_s)
        offset = np.concatenate(parts["offset"])
        order = np.argsort(offset, kind="stable")
        return Seats(**{name: np.concatenate(columns)[order] for name, columns in parts.items()})  # type: ignore[arg-type]

    def _placed(
        self,
        row: crowd.Crowd,
        order: IntArray,
        option: Option,
        problem: Problem,
        path: Path,
        table: FrontierTable,
        price: float,
    ) -> Mixed:
        """The path's actors on their GPUs, with the transfers that they really have together."""
        seats, n = problem.seats, self.workload.responses_per_prompt
        chosen = [seat for _, _, seat in path.groups]
        kind, tp = seats.kind[chosen], seats.tp[chosen]
        at_kind = [np.flatnonzero(seats.kind == each) for each in range(len(self.seats))]
        place = [int(np.searchsorted(at_kind[k], seat)) for k, seat in zip(kind.tolist(), chosen, strict=True)]
        own = [(self.seats[k], p) for k, p in zip(kind.tolist(), place, strict=True)]
        gpus = tuple(tuple(seat.at.gpus[p].tolist()) for seat, p in own)
        host = np.array([int(seat.at.host[p]) for seat, p in own])
        late_s = np.array([seat.late_s[p] for seat, p in own])
        shared = bool(np.isin(gpus[0], self.learner).any())
        weight_bytes = self.seats[0].model.profile.data.weight_bytes
        ways = placement.routes_to(self.cluster, host, shared, self.learner, weight_bytes, int(tp[0]))
        begins, ends = (np.array([group[i] for group in path.groups]) for i in (0, 1))
        kv_s = np.zeros(host.size)
        if problem.kv_bytes[-1]:
            sent = problem.kv_bytes[ends] - problem.kv_bytes[begins]
            kv_s = placement.kv_s(ways, sent, np.arange(host.size))
        decode_s = problem.ends_s[kind, begins, ends]
        prompts = np.split(order, row.borders[ends[:-1]])
        return Mixed(
            option=option,
            shares=tuple(ints((group[:, None] * n + np.arange(n)).ravel()) for group in prompts),
            sizes=tuple(tp.tolist()),
            gpus=gpus,
            estimate=estimate_of(problem.prefill_s, np.maximum(ways.weights_s, late_s), kv_s, decode_s, tp),
            table=table,
            price=price,
            terms=self._terms(row, tp),
        )

    def _terms(self, row: crowd.Crowd, tp: IntArray) -> ElasticTerms:
        sizes = sorted(set(tp.tolist()))
        models = {seat.at.gpus.shape[1]: seat.model for seat in self.seats}
        context = float((row.context[-1] + row.alive[-1] * row.middle) @ row.width / (row.alive[-1] @ row.width))
        profile = models[sizes[0]].profile
        sent_s = self.cluster.hosts[0].network.transfer_s(context * profile.data.kv_bytes_per_token)
        move_s = min(sent_s, float(profile.prefill_s(np.ceil(context))))
        return ElasticTerms(
            speeds=tuple(width.at_context(models[size].profile, context, context) for size in sizes),
            speed_of=ints(np.searchsorted(sizes, tp)),
            move_s_per_token=move_s / context,
            reserve=ints([]),
            start_s=0.0,
        )
