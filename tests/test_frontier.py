"""The frontier: against every plan of small problems, its goals, and the distribution of lengths that it plans on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfless.errors import InfeasibleError, InputError, PlanError, SchemaError
from rlhfless.scheduler import crowd, frontier
from rlhfless.scheduler.cheapest import Groups, Path, Problem, Seats, cheapest, least_costs_gpu_s, path_of
from rlhfless.scheduler.estimate import DecodeModel, Work
from rlhfless.scheduler.estimate import group_times as point_times
from rlhfless.scheduler.frontier import Goal
from rlhfless.scheduler.planner import Planner
from rlhfless.scheduler.spread import Spread, SpreadHistory
from rlhfless.types.arrays import floats, ints
from rlhfless.types.cluster import Cluster, ClusterState
from rlhfless.types.plan import FrontierTable, Plan
from rlhfless.types.report import Invocation, Span
from tests.profiles import tiny_profile
from tests.test_planner import Told, idle, report_of, step
from traces.load import steps
from traces.synthesize import synthesize


@dataclass(frozen=True)
class Case:
    """A small problem: tables of ends that grow with the group, actors of up to three sizes on a few GPUs."""

    seed: int
    borders: int
    gpus: int
    sizes: tuple[int, ...]
    prefill: bool

    def problem(self) -> Problem:
        rng = np.random.default_rng(self.seed)
        shape = (len(self.sizes), self.borders, self.borders)
        ends, held = np.full(shape, np.inf), np.full(shape, np.inf)
        prompts = rng.uniform(1, 5, self.borders)
        for kind, tp in enumerate(self.sizes):
            for i in range(self.borders - 1, -1, -1):
                for j in range(i + 1, self.borders):
                    base = prompts[i:j].max() + 0.3 * prompts[i:j].sum()
                    within = [ends[kind, i + 1, j], ends[kind, i, j - 1]] if j > i + 1 else []
                    ends[kind, i, j] = max(base / tp ** rng.uniform(0.4, 0.9), *within, 0.0)
                    held[kind, i, j] = ends[kind, i, j] * rng.uniform(0.6, 1.0)
        offset = np.concatenate([np.arange(0, self.gpus - tp + 1, tp) for tp in self.sizes])
        kind = np.concatenate([np.full((self.gpus // tp), row) for row, tp in enumerate(self.sizes)])
        order = np.argsort(offset, kind="stable")
        tp = np.array(self.sizes)[kind[order]]
        seats = Seats(
            offset=offset[order],
            kind=kind[order],
            tp=tp,
            ready_s=rng.uniform(0, 2, kind.size) * (rng.random(kind.size) < 0.7),
            start_s=rng.uniform(0, 1, kind.size),
            kv_latency_s=np.full(kind.size, 0.01),
            kv_byte_s=rng.uniform(0, 0.05, kind.size),
        )
        kv_bytes = np.cumsum(rng.uniform(0, 3, self.borders)) * self.prefill
        kv_bytes[0] = 0.0
        return Problem(
            ends_s=ends,
            held_s=held,
            cut_s=held,
            moved_s=np.zeros(shape),
            seats=seats,
            kv_bytes=kv_bytes,
            prefill_s=0.5 * self.prefill,
            fixed_gpu_s=1.5 * self.prefill,
        )


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    borders=st.integers(2, 6),
    gpus=st.integers(4, 8),
    sizes=st.sampled_from([(1,), (2, 1), (4, 2, 1), (4, 1), (4, 2)]),
    prefill=st.booleans(),
)


def every_plan(problem: Problem, border: int = 0, offset: int = 0) -> Iterator[Groups]:
    """All contiguous groups on all seats in rising order."""
    last = problem.kv_bytes.size - 1
    if border == last:
        yield ()
        return
    for seat in np.flatnonzero(problem.seats.offset >= offset).tolist():
        after = int(problem.seats.offset[seat] + problem.seats.tp[seat])
        for end in range(border + 1, last + 1):
            for rest in every_plan(problem, end, after):
                yield ((border, end, seat), *rest)


def pareto(points: list[Path]) -> list[tuple[float, float]]:
    """(time, cost) of those that none other is as good as in both and better in one."""
    pairs = sorted({(round(p.time_s, 9), round(p.cost_gpu_s, 9)) for p in points})
    kept: list[tuple[float, float]] = []
    for time_s, cost in pairs:
        if not kept or cost < kept[-1][1] - 1e-9:
            kept.append((time_s, cost))
    return kept


@settings(max_examples=120, deadline=None)
@given(cases)
def test_the_cheapest_plan_in_time_is_that_of_brute_force(case: Case) -> None:
    problem = case.problem()
    plans = [path_of(problem, groups) for groups in every_plan(problem)]
    times = sorted({plan.time_s for plan in plans})
    limits = np.array([times[0] * 0.999, *times[:: max(len(times) // 12, 1)], np.inf])
    for limit, got in zip(limits.tolist(), cheapest(problem, limits), strict=True):
        within = [plan.cost_gpu_s for plan in plans if plan.time_s <= limit]
        if not within:
            assert got is None
            continue
        assert got is not None
        assert got.time_s <= limit
        assert got.cost_gpu_s == pytest.approx(min(within), rel=1e-9)
        assert path_of(problem, got.groups) == got
        assert [group[0] for group in got.groups[1:]] == [group[1] for group in got.groups[:-1]], "contiguous"


@settings(max_examples=60, deadline=None)
@given(cases)
def test_the_frontier_is_that_of_brute_force(case: Case) -> None:
    problem = case.problem()
    got = frontier.frontier(problem)
    expected = pareto([path_of(problem, groups) for groups in every_plan(problem)])
    np.testing.assert_allclose([(p.time_s, p.cost_gpu_s) for p in got], expected, rtol=1e-6)
    assert (np.diff([p.time_s for p in got]) > 0).all()
    assert (np.diff([p.cost_gpu_s for p in got]) < 0).all()


@settings(max_examples=60, deadline=None)
@given(cases, st.floats(0.0, 1.0))
def test_goals(case: Case, weight: float) -> None:
    """Deadlines are kept at the least cost, budgets in nearly the least time; others are as near as the best of all."""
    problem = case.problem()
    every = frontier.frontier(problem)
    middle = every[len(every) // 2]
    path, table = frontier.choose(problem, Goal(kind="deadline_s", value=middle.time_s * (1 + 1e-12)))
    assert path.cost_gpu_s == pytest.approx(middle.cost_gpu_s, rel=1e-9)
    assert (np.diff(table.time_s) > 0).all()
    assert (np.diff(table.cost_gpu_s) < 0).all()
    assert table.time_s[table.chosen] == path.time_s
    path, _ = frontier.choose(problem, Goal(kind="budget_gpu_s", value=middle.cost_gpu_s))
    assert path.cost_gpu_s <= middle.cost_gpu_s * (1 + 1e-9)
    assert path.time_s <= middle.time_s * (1 + 2 * frontier.FASTEST)
    for goal in (Goal(), Goal(kind="weight", value=weight)):
        path, _ = frontier.choose(problem, goal)
        best = frontier.scores(goal, every).min()
        assert frontier.scores(goal, [path])[0] <= best + frontier.NEAR + frontier.FASTEST


def test_what_no_plan_keeps_names_the_nearest() -> None:
    problem = Case(seed=1, borders=5, gpus=8, sizes=(4, 2, 1), prefill=False).problem()
    every = frontier.frontier(problem)
    with pytest.raises(InfeasibleError, match="no plan of generation ends by then; the fastest takes") as caught:
        frontier.choose(problem, Goal(kind="deadline_s", value=every[0].time_s / 2))
    named = float(str(caught.value).split("the fastest takes ")[1].split()[0])
    assert named == pytest.approx(every[0].time_s, rel=2e-3)
    with pytest.raises(InfeasibleError, match="no plan of generation holds so little; the cheapest holds"):
        frontier.choose(problem, Goal(kind="budget_gpu_s", value=every[-1].cost_gpu_s / 2))


@settings(max_examples=60, deadline=None)
@given(cases)
def test_the_fastest_is_named_also_where_moves_take_time(case: Case) -> None:
    """Plans at smaller limits may then take longer: the search for the least limit must end all the same."""
    plain = case.problem()
    moved = np.random.default_rng(case.seed).uniform(0, 9, plain.moved_s.shape)
    problem = replace(plain, moved_s=moved)
    plans = [path_of(problem, groups) for groups in every_plan(problem)]
    with pytest.raises(InfeasibleError, match="no plan of generation ends by then; the fastest takes") as caught:
        frontier.choose(problem, Goal(kind="deadline_s", value=1e-3))
    named = float(str(caught.value).split("the fastest takes ")[1].split()[0])
    least_ends = min(plan.ends_s for plan in plans)
    near = [plan.time_s for plan in plans if plan.ends_s <= least_ends * (1 + 2 * frontier.FASTEST)]
    assert min(plan.time_s for plan in plans) * (1 - 1e-3) <= named <= max(near) * (1 + 1e-3)


def test_the_knee_does_not_fall_behind_the_floor() -> None:
    problem = Case(seed=2, borders=6, gpus=8, sizes=(2, 1), prefill=False).problem()
    every = frontier.frontier(problem)
    floor = replace(every[0], time_s=every[0].time_s * 1.2, early_s=every[0].time_s * 1.2, cost_gpu_s=1e9)
    path, _ = frontier.choose(problem, Goal(), floor)
    assert path.time_s <= floor.time_s


@settings(max_examples=60, deadline=None)
@given(cases)
def test_no_plan_costs_less_than_the_least_that_is_told(case: Case) -> None:
    problem = case.problem()
    plans = [path_of(problem, groups) for groups in every_plan(problem)]
    limits = np.array(sorted({plan.time_s for plan in plans})[:: max(len(plans) // 8, 1)])
    for limit, least in zip(limits.tolist(), least_costs_gpu_s(problem, limits).tolist(), strict=True):
        assert least <= min(plan.cost_gpu_s for plan in plans if plan.time_s <= limit) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(cases, cases, st.floats(0.0, 1.0))
def test_what_is_passed_over_has_no_better_plan(one: Case, other: Case, weight: float) -> None:
    goal, problem = Goal(kind="weight", value=weight), other.problem()
    path, _ = frontier.choose(one.problem(), goal)
    if frontier.hopeless(problem, goal, path, None):
        best = frontier.scores(goal, [path_of(problem, groups) for groups in every_plan(problem)]).min()
        assert best >= frontier.scores(goal, [path])[0] - 1e-9


def test_where_seats_are_alike_the_nearest_are_taken() -> None:
    problem = Case(seed=3, borders=4, gpus=8, sizes=(1,), prefill=False).problem()
    seats = problem.seats
    alike = replace(seats, ready_s=np.zeros(8), start_s=np.zeros(8))
    for limit in (np.inf, 1.01 * float(np.diagonal(problem.ends_s[0], 1).max())):
        path = cheapest(replace(problem, seats=alike), np.array([limit]))[0]
        assert path is not None
        assert [seat for _, _, seat in path.groups] == list(range(len(path.groups)))


def test_a_second_is_worth_more_to_a_plan_that_is_cheap_beside_the_floor() -> None:
    path = Path(time_s=10.0, early_s=10.0, ends_s=10.0, cost_gpu_s=50.0, gpus=5, groups=())
    floors = [replace(path, time_s=time_s, cost_gpu_s=cost) for time_s, cost in ((20, 50), (10, 50), (10, 55), (5, 99))]
    prices = [frontier.price_of(path, floor) / 5.0 for floor in floors]
    assert prices[1] == pytest.approx(frontier.EVEN)
    assert prices == sorted(prices)
    assert (prices[0], prices[-1]) == frontier.PRICES
    assert frontier.price_of(path, None) == frontier.PRICE * 5.0


@pytest.mark.parametrize("actors", [3, 37])
def test_the_floor_is_the_papers_plan_whatever_borders_are_offered(
    actors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as many groups as the paper's rule chooses, of equal size, though fewer borders are offered."""
    floors: list[Path | None] = []
    choose = frontier.choose

    def noted(problem: Problem, goal: Goal, floor: Path | None = None) -> tuple[Path, FrontierTable]:
        floors.append(floor)
        return choose(problem, goal, floor)

    monkeypatch.setattr(frontier, "choose", noted)
    planner = Planner("frontier", tiny_profile(), Cluster.uniform("l40s", 64), min_actors=actors, max_actors=actors)
    for number in range(2):
        work = step(prompts=64, number=number, epoch=number)
        plan = planner.plan(work, idle(64))
        tokens = np.random.default_rng(number).integers(20, 200, 128)
        planner.observe(report_of(plan, work, ints(tokens), (3.0, 2.0, 1.0)))
    floor = floors[-1]
    assert floor is not None
    assert [group[:2] for group in floor.groups] == [(number, number + 1) for number in range(actors)]


@pytest.mark.parametrize(
    ("kind", "value", "match"),
    [
        ("weight", 1.5, r"weight 1\.5: .* must lie in 0\.\.1"),
        ("deadline_s", 0.0, r"deadline_s 0\.0: it must be above 0"),
        ("budget_gpu_s", float("nan"), "budget_gpu_s nan: it must be above 0 and finite"),
    ],
)
def test_wrong_goals(kind: frontier.GoalKind, value: float, match: str) -> None:
    with pytest.raises(InputError, match=match):
        Goal(kind=kind, value=value)


# ---- the distribution of lengths


@pytest.mark.parametrize("slots", [8, 64])
def test_known_lengths_take_what_the_point_estimate_says(slots: int) -> None:
    """Without spread, expected and likely time are those of `estimate.group_times`; queues within its 15 %."""
    model = DecodeModel.of(tiny_profile(kv_capacity_tokens=10**6, max_slots=min(slots, 32)))
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.uniform(50, 400, 24))[::-1]
    prompts = ints(rng.integers(10, 60, 24))
    borders = np.array([0, 2, 6, 12, 24])
    row = crowd.Crowd.of(lengths, Spread.none(), prompts, 1, 400, borders)
    got = crowd.group_times([model], row, 0.5)[0]
    work = Work.of(np.arange(24), lengths[::-1], prompts[::-1], 1)
    for i, begin in enumerate(borders.tolist()):
        for j in range(i + 1, borders.size):
            end = int(borders[j])
            (expected,) = point_times(model, work, np.array([24 - end]), np.array([24 - begin]), [0])
            within = 0.06 if end - begin <= model.profile.data.max_slots else 0.35
            assert got.ends_s[i, j] == pytest.approx(expected, rel=within)
            assert got.works_s[i, j] <= got.ends_s[i, j] * 1.06


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_groups_end_together_with_the_chance_asked_for(chance: float) -> None:
    """Drawn lengths, decoded by the point estimate: the share of draws in time is the chance."""
    model = DecodeModel.of(tiny_profile(kv_capacity_tokens=10**6, max_slots=32))
    rng = np.random.default_rng(0)
    estimates = np.sort(rng.uniform(50, 300, 32))[::-1]
    prompts = ints(np.full(32, 20))
    spread = Spread.of(rng.normal(0, 0.4, 2000))
    borders = np.array([0, 4, 12, 32])
    row = crowd.Crowd.of(estimates, spread, prompts, 1, 4000, borders)
    times = crowd.group_times([model], row, 0.5)[0]
    groups = [(times, 0, 1, 0.0), (times, 1, 2, 0.5), (times, 2, 3, 0.2)]
    (limit,) = crowd.together_s(groups, [chance]).tolist()
    inside = 0
    for _ in range(400):
        drawn = np.maximum(estimates * np.exp(rng.choice(spread.strays, 32)), 1)
        ends = []
        for _, i, j, begin_s in groups:
            own = np.sort(drawn[borders[i] : borders[j]])
            work = Work.of(np.arange(own.size), own, prompts[: own.size], 1)
            ends.append(begin_s + point_times(model, work, np.array([0]), np.array([own.size]), [0])[0])
        inside += max(ends) <= limit
    assert inside / 400 == pytest.approx(chance, abs=0.09)


def test_releases_cost_others_less_than_they_save() -> None:
    model = DecodeModel.of(tiny_profile(kv_capacity_tokens=10**6, max_slots=32))
    estimates = np.linspace(300, 50, 30)
    spread = Spread.of(np.random.default_rng(1).normal(0, 0.5, 1000))
    row = crowd.Crowd.of(estimates, spread, ints(np.full(30, 20)), 1, 4000, crowd.borders_of(30))
    times = crowd.group_times([model], row, 0.5)[0]
    upper = np.triu_indices(31, 1)
    assert (times.cut_s[upper] <= times.works_s[upper] + 1e-12).all()
    assert (times.moved_s[upper] >= 0).all()
    for begin in range(30):
        assert (np.diff(times.ends_s[begin, begin + 1 :]) >= 0).all(), "a larger group does not end sooner"


@pytest.mark.parametrize("preset", ["gsm8k", "livecodebench", "long-reasoning"])
@pytest.mark.parametrize("n", [1, 4])
def test_the_longest_of_a_group_is_foreseen_on_epochs_not_yet_seen(preset: str, n: int) -> None:
    """Of groups of 8 prompts, about nine in ten have their longest response below the 90 % quantile of the prediction;
    the mean alone is exceeded by nearly all."""
    below, above_mean, groups = 0, 0, 0
    for seed in range(4):
        trace = synthesize(
            preset, prompts=256, epochs=4, responses_per_prompt=n, max_response_tokens=10**6, prompts_per_step=256,
            seed=seed, algorithm="grpo",
        )  # fmt: skip
        history, last = SpreadHistory(), None
        for workload, outcome in steps(trace):
            order = np.argsort(workload.prompt_ids)
            tokens = outcome.response_tokens[order]
            if last is not None:
                estimates = np.maximum(last, 1.0)
                if workload.epoch >= 2:
                    spread = history.of(workload.epoch, estimates)
                    for group in np.array_split(np.argsort(-estimates, kind="stable"), 32):
                        longest = float(tokens[group].max())
                        longer = spread.exceeds(estimates[group], np.array([longest]))[:, 0]
                        below += np.log1p(-np.minimum(longer, 1 - 1e-12)).sum() * n <= np.log(0.9)
                        above_mean += longest > estimates[group].max()
                        groups += 1
                history.observe(workload.epoch, estimates, tokens)
            last = tokens.mean(axis=1)
    assert 0.8 <= below / groups <= 0.98
    assert above_mean / groups > (0.55 if n == 1 else 0.9)


def test_an_untaught_spread_is_wide_and_a_taught_one_is_not() -> None:
    estimates = floats(np.linspace(50, 400, 100))
    untaught = SpreadHistory().of(0, estimates)
    taught = SpreadHistory()
    rng = np.random.default_rng(0)
    taught.observe(0, estimates, ints(np.rint(2 * estimates[:, None] * np.exp(0.1 * rng.standard_normal((100, 4))))))
    got = taught.of(0, estimates)
    assert np.std(got.strays) == pytest.approx(0.1, rel=0.1)
    assert np.std(untaught.strays) > 0.4
    assert got.slope == pytest.approx(1.0, abs=0.05)
    assert got.centre + got.slope * np.log(200) == pytest.approx(np.log(400), abs=0.05)
    later = taught.of(1, estimates)
    assert (later.centre, later.slope) == (0.0, 1.0)


def test_borders() -> None:
    assert crowd.borders_of(7).tolist() == list(range(8))
    got = crowd.borders_of(512)
    assert got.size <= crowd.BORDERS + 1
    assert {0, 1, 2, 512} <= set(got.tolist())


# ---- plans


def mixed(**given: object) -> Planner:
    small = tiny_profile(tp=1, kv_capacity_tokens=4000)
    large = replace(tiny_profile(tp=2, kv_capacity_tokens=8000), speed=0.6)
    return Planner("frontier", small, Cluster.uniform("l40s", 16), profiles=(large,), learner_gpus=4, **given)  # type: ignore[arg-type]


def test_a_plan_may_mix_sizes_and_says_between_what_it_chose() -> None:
    lengths = floats(np.concatenate([np.full(4, 195.0), np.linspace(60, 20, 20)]))
    planner, seen = mixed(goal=Goal(kind="weight", value=0.6)), set()
    for number in range(3):
        work = step(number=number, epoch=number)
        plan = planner.plan(work, idle(16))
        plan.check()
        seen.update(plan.sizes)
        assert plan.frontier is not None
        table = plan.frontier
        assert table.actors[table.chosen] == len(plan.actors)
        assert table.gpus[table.chosen] == sum(actor.tp for actor in plan.actors)
        tokens = np.rint(np.repeat(lengths, 2) * np.random.default_rng(number).uniform(0.9, 1.1, 48))
        planner.observe(report_of(plan, work, ints(np.clip(tokens, 1, 200)), (3.0, 2.0, 1.0)))
    assert 2 in seen


def test_deadline_and_budget_bind_a_plan() -> None:
    free = mixed(goal=Goal(kind="weight", value=0.5)).plan(step(), idle(16))
    assert free.frontier is not None
    fast, cheap = float(free.frontier.time_s[0]), float(free.frontier.cost_gpu_s[-1])
    with pytest.raises(InfeasibleError, match=r"deadline_s .*: no plan of generation ends by then; the fastest takes"):
        mixed(goal=Goal(kind="deadline_s", value=fast / 10)).plan(step(), idle(16))
    with pytest.raises(InfeasibleError, match="the cheapest holds"):
        mixed(goal=Goal(kind="budget_gpu_s", value=cheap / 10)).plan(step(), idle(16))
    slow = mixed(goal=Goal(kind="deadline_s", value=100 * fast)).plan(step(), idle(16))
    assert slow.frontier is not None
    assert slow.frontier.cost_gpu_s[slow.frontier.chosen] <= cheap * (1 + 1e-9)


def test_actors_stand_on_processes_that_are_kept() -> None:
    """A second step like the first wakes no process anew: that would be late by a cold start."""
    planner = mixed()
    work = step()
    first = planner.plan(work, idle(16))
    report = report_of(first, work, ints(np.full(work.responses, 50)), (3.0, 2.0, 1.0))
    ran = (Span(activity="decode", start_s=0.0, end_s=3.0),)
    decode = tuple(
        Invocation(function="decode", index=i, gpus=g, spans=ran) for i, g in enumerate(first.placement.decode)
    )
    planner.observe(replace(report, invocations=decode))
    second = planner.plan(replace(work, step=1, epoch=1), idle(16))
    assert set(second.placement.decode) <= set(first.placement.decode)


def test_few_gpus_are_planned_around() -> None:
    left = ClusterState(time_s=0.0, free_gpus=ints([0, 3, 8, 9, 10]))
    plan = mixed().plan(step(), left)
    used = [gpu for gpus in plan.placement.decode for gpu in gpus]
    assert len(set(used)) == len(used)
    assert set(used) <= {0, 3, 8, 9, 10}


def test_an_oracle_of_single_responses_plans_without_spread() -> None:
    lengths = floats(np.linspace(20, 200, 24))
    planner = Planner(
        "oracle:frontier", tiny_profile(), Cluster.uniform("l40s", 16), estimator=Told(lengths), learner_gpus=4
    )
    plan = planner.plan(step(n=1), idle(16))
    assert plan.policy == "oracle:frontier"
    assert 23 in plan.actors[0].responses


def test_profiles_of_another_model_or_size_are_refused() -> None:
    cluster = Cluster.uniform("l40s", 16)
    with pytest.raises(InputError, match="must have the same model"):
        Planner("frontier", tiny_profile(), cluster, profiles=(tiny_profile(tp=2, model="other"),))
    with pytest.raises(InputError, match=r"chance 1\.0: the chance of ending in time must lie between 0 and 1"):
        Planner("frontier", tiny_profile(), cluster, chance=1.0)


def test_plans_of_an_older_layout_and_of_wrong_sizes_are_refused() -> None:
    plan = mixed().plan(step(), idle(16))
    text = plan.to_json()
    with pytest.raises(SchemaError, match="schema 1 is not readable here; this version reads schema 3"):
        Plan.from_json(text.replace('"schema":3', '"schema":1', 1))
    actor = replace(plan.actors[0], tp=plan.actors[0].tp + 1)
    with pytest.raises(PlanError, match=r"an actor of \d GPUs is placed on \d"):
        replace(plan, actors=(actor, *plan.actors[1:])).check()
