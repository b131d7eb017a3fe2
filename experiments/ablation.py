"""`python -m experiments.ablation`: one feature after the other, a point a step (RLHFless §6.3, Fig. 11)."""

from pathlib import Path

from experiments import charts, figure, plots, study
from experiments.bench import PolicyRun, beside, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.study import GRPO, PPO, STATIC, Asked, Lengths, Means, Measures
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.types.arrays import floats

LADDER = ("raw", "dp", "dp+pa", "rlhfless")
"""Each adds one feature to the one before: deduplicated prefill, prompt assignment, actor scaling."""
POLICIES = ("verl", *LADDER, "oracle:rlhfless")
STEPS = (
    ("dp", "raw", "+DP", "cost falls", "time unchanged"),
    ("dp+pa", "dp", "+PA", "cost falls further", "time unchanged"),
    ("rlhfless", "dp+pa", "+AS", "cost grows slowly or stays", "time falls much"),
)
"""(policy, the one before, what it adds, what the paper says of cost and of time)."""


def runs(asked: Asked, lengths: Lengths, seed: int) -> dict[str, PolicyRun]:
    """Every policy on the same lengths; static ones with the paper's 3 actors."""
    steps, setting = asked.steps(lengths, seed), asked.setting(seed)
    base = simulate("verl", steps, setting, actors=STATIC)
    return {
        name: base if name == "verl" else simulate(name, steps, beside(setting, name, base), actors=STATIC)
        for name in POLICIES
    }


def job(asked: Asked, lengths: Lengths, seed: int) -> dict[str, Measures]:
    """Each policy against verl, and what each feature changes, as ratios to the policy before."""
    found = runs(asked, lengths, seed)
    bound = bounds(asked.steps(lengths, seed), asked.setting(seed).profile)
    measured = {name: study.measures(each, bound, found["verl"]) for name, each in found.items()}
    for name, before, *_ in STEPS:
        own, other = measured[name], measured[before]
        measured[name] |= {
            f"{what}_change": own[what] / other[what] - 1
            for what in ("generation_s", "decode_gpu_s", "executed_gpu_s", "held_gpu_s")
        }
    return measured


def ablation(asked: Asked) -> Result:
    """RLHFless Fig. 11."""
    workloads = asked.workloads([PPO, GRPO])
    found = study.over_seeds(job, workloads, asked, "ablation")
    claims, remarks = [], []
    for lengths, policies in zip(workloads, found, strict=True):
        given = f"{lengths.algorithm}, n = {lengths.n}, {STATIC} actors before AS"
        for name, _, feature, cost, time in STEPS:
            for what, field, says in (
                ("executed GPU-seconds", "executed_gpu_s", cost), ("held GPU-seconds", "held_gpu_s", cost),
                ("generation time", "generation_s", time),
            ):  # fmt: skip
                claims.append(Claim(
                    what=f"{feature}: {what}", given=given, paper=says, here=policies[name][f"{field}_change"], unit="%"
                ))  # fmt: skip
        remarks += _remarks(lengths, policies)

    def draw(path: Path) -> None:
        with plots.picture(path, 4.2 * len(workloads) + 0.2, 4.3) as picture:
            for number, lengths in enumerate(workloads):
                every = [runs(asked, lengths, seed) for seed in asked.seed_list]
                axes = picture.add_subplot(1, len(workloads), number + 1)
                values = {name: _points([each[name] for each in every]) for name in POLICIES}
                plots.clouds(axes, values, "generation time of a step (s)", "decode GPU-seconds of a step")
                charts.title(axes, f"({'ab'[number]}) {lengths.algorithm.upper()}, n = {lengths.n} (large: mean)")
            charts.legend(picture, axes, 6)

    return Result(
        claims=tuple(claims),
        columns=figure.COLUMNS,
        rows=tuple(
            figure.row({"workload": lengths.label, "policy": name}, each)
            for lengths, policies in zip(workloads, found, strict=True)
            for name, each in policies.items()
        ),
        remarks=tuple(remarks),
        draw=draw,
    )


def _points(every: list[PolicyRun]) -> tuple[Series, Series]:
    """(time, cost) of all steps of all seeds."""
    time = [value for each in every for value in each.summary.generation_s.values]
    cost = [value for each in every for value in each.summary.decode_executed_gpu_s.values]
    return Series(values=floats(time)), Series(values=floats(cost))


def _remarks(lengths: Lengths, policies: dict[str, Means]) -> list[str]:
    ours, before = policies["rlhfless"], policies["dp+pa"]
    remarks = [figure.bound_remark(lengths.label, policies)]
    dp = policies["dp"]["executed_gpu_s_change"].mean
    saved = policies["dp"]["prefill_tokens"].mean / policies["raw"]["prefill_tokens"].mean - 1
    remarks.append(
        f"{lengths.label}: DP computes {100 * saved:+.0f} % prefill tokens and changes executed GPU-seconds by "
        f"{100 * dp:+.1f} %, for the engines of raw keep prompts themselves; PA, which puts the longest responses "
        f"together, changes generation time by {100 * policies['dp+pa']['generation_s_change'].mean:+.1f} %; AS goes "
        f"from {before['actors'].mean:.1f} to "
        f"{ours['actors'].mean:.1f} actors, {100 * ours['generation_s_change'].mean:+.1f} % time for "
        f"{100 * ours['held_gpu_s_change'].mean:+.1f} % held GPU-seconds"
    )
    return remarks


FIGURE = Figure(name="ablation", paper="11", title="raw, +DP, +PA, +AS, verl and oracle lengths", work=ablation)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
