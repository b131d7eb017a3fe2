"""`python -m experiments.waste`: what a step wastes on reserved GPUs (RLHFless §2.2, Fig. 2 and 3c)."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import charts, figure, plots, prefill, study
from experiments.bench import PolicyRun, beside, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.prefill import DEDUPLICATED, NO_REUSE, SCATTERED
from experiments.study import GRPO, STATIC, Asked, Lengths, Means, Measures
from rlhfless.accounting.metrics import Series
from rlhfless.commands import run
from rlhfless.types.report import FUNCTIONS_OF, IDLE

SAMPLES = (1, 2, 4, 8)
"""n of the sweep; 4 is the paper's."""
LONGER = (0, 64, 128, 256, 512)
"""Tokens more in every prompt, for the dependence of redundant prefill on the length of prompts, which the paper does
not give beyond its cap of 1024."""
PAPER_N, PAPER_SHARE = 4, 0.22
"""RLHFless §2.2: share of GPU time that goes to redundant prefill, GRPO, Qwen2.5-3B, GSM8K."""
HOSTINGS = ("split, all GPUs", "colocated, all GPUs", "colocated, the actors' GPUs", "serverless")


def hosted(asked: Asked, lengths: Lengths, seed: int) -> dict[str, PolicyRun]:
    """One step after the other with 3 actors, under each way to hold GPUs; serverless: rlhfless."""
    steps, setting = asked.steps(lengths, seed), asked.setting(seed)
    rest = asked.nodes - STATIC * setting.profile.data.tp
    split = simulate("verl-split", steps, replace(setting, learner_gpus=rest), actors=STATIC)
    every = simulate("verl", steps, replace(setting, learner_gpus=asked.nodes), actors=STATIC)
    own = simulate("verl", steps, setting, actors=STATIC)
    ours = simulate("rlhfless", steps, beside(setting, "rlhfless", own))
    return dict(zip(HOSTINGS, (split, every, own, ours), strict=True))


def hosting_job(asked: Asked, lengths: Lengths, seed: int) -> dict[str, Measures]:
    """Shares of the GPU-seconds held: work by phase, idling by cause."""
    bound = bounds(asked.steps(lengths, seed), asked.setting(seed).profile)
    found = {}
    for name, each in hosted(asked, lengths, seed).items():
        bill = each.summary.bill
        shares = {
            phase: sum(bill.function(one).executed_gpu_s for one in functions) / bill.held_gpu_s
            for phase, functions in FUNCTIONS_OF.items()
        }
        idle = {cause: bill.idle(cause) / bill.held_gpu_s for cause in IDLE}
        found[name] = study.measures(each, bound) | shares | idle | {"idle_share": sum(idle.values())}
    return found


def waste(asked: Asked) -> Result:
    """RLHFless Fig. 2 and 3c."""
    by_n = asked.workloads([replace(GRPO, n=n) for n in SAMPLES])
    paper = asked.workloads([replace(GRPO, n=PAPER_N)])[0]
    items = list(dict.fromkeys([*((lengths, 0) for lengths in by_n), *((paper, more) for more in LONGER)]))
    held = study.over_seeds(hosting_job, [paper], asked, "hosting")[0]
    studied = study.over_seeds(prefill.job, [(*item, False) for item in items], asked, "prefill")
    found = dict(zip(items, studied, strict=True))
    claims = [
        Claim(what="idle share of GPU-seconds held", given=name, paper="large" if name != HOSTINGS[-1] else "small",
              here=each["idle_share"], unit="%")
        for name, each in held.items()
    ]  # fmt: skip
    claims += [
        Claim(
            what="redundant prefill, share of generation's GPU time",
            given=f"n = {paper.n}, {kind.name}, prompts of "
            f"{found[paper, more][kind.name]['mean_prompt_tokens'].mean:.0f} tokens on average",
            paper=PAPER_SHARE, here=found[paper, more][kind.name]["redundant_gpu_share"], unit="%",
        )
        for kind in (NO_REUSE, SCATTERED)
        for more in LONGER
    ]  # fmt: skip
    rows = [figure.row({"workload": paper.label, "hosting": name}, each) for name, each in held.items()]
    rows += [
        figure.row({"workload": lengths.label, "more_tokens": more, "reuse": name}, each)
        for (lengths, more), kinds in found.items()
        for name, each in kinds.items()
        if name in (NO_REUSE.name, SCATTERED.name, DEDUPLICATED.name)
    ]

    def draw(path: Path) -> None:
        with plots.picture(path, 9.0, 6.8) as picture:
            grid = picture.add_gridspec(3, 2, height_ratios=(1, 1, 1.25))
            drawn = hosted(asked, paper, asked.seed)
            cluster = asked.setting(asked.seed).cluster
            axes = [picture.add_subplot(grid[at, :]) for at in range(2)]
            reports = [drawn[name].reports[-1] for name in HOSTINGS[:2]]
            longest_s = max(report.step_s for report in reports)
            for panel, report, letter, name in zip(axes, reports, "ab", HOSTINGS, strict=False):
                plots.timeline(panel, report, cluster, most_names=8)
                panel.set_xlim(0, longest_s)
                panel.set_ylabel("GPU")
                charts.title(panel, f"({letter}) {name}: one step, {STATIC} actors", pad=16)
            shares = picture.add_subplot(grid[2, 0])
            parts = {part: [100 * held[name][part].mean for name in HOSTINGS] for part in (*FUNCTIONS_OF, *IDLE)}
            parts = {part: values for part, values in parts.items() if max(values) > 0.1}
            charts.stacks(shares, [name.replace(", ", "\n") for name in HOSTINGS], parts, "% of GPU-seconds held")
            shares.barh([0], [0], label="prefill", **plots.paint("prefill"))  # in (a) and (b) alone
            shares.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.25), ncols=3)
            charts.title(shares, "(c) work by phase, idling by cause")
            redundant = picture.add_subplot(grid[2, 1])
            tokens = [found[paper, more][NO_REUSE.name]["mean_prompt_tokens"].mean for more in LONGER]
            values = {
                f"n = {paper.n}, {kind.name}": [_percent(found[paper, more][kind.name]) for more in LONGER]
                for kind in (NO_REUSE, SCATTERED)
            }
            charts.lines(redundant, tokens, values, "mean prompt (tokens)", "redundant prefill,\n% of generation GPU-s")
            redundant.axhline(100 * PAPER_SHARE, color=plots.BLACK, linewidth=0.6, linestyle=":")
            redundant.text(tokens[0], 100 * PAPER_SHARE, "paper", ha="left", va="bottom", fontsize=8)
            redundant.legend(fontsize=8, loc="lower right")
            charts.title(redundant, "(d) redundant prefill")

    return Result(
        claims=tuple(claims), columns=COLUMNS, rows=tuple(rows),
        remarks=tuple(_remarks(paper, {more: found[paper, more] for more in LONGER})), draw=draw,
    )  # fmt: skip


COLUMNS: tuple[figure.Column, ...] = (
    ("workload", "workload", 1), ("hosting", "hosting", 1), ("prompts longer by", "more_tokens", 1),
    ("reuse", "reuse", 1),
    ("gen s", "generation_s", 1), ("step s", "step_s", 1), ("held GPU-s", "held_gpu_s", 1),
    *((f"{phase} %", phase, 100) for phase in FUNCTIONS_OF),
    *((f"{cause} %", cause, 100) for cause in IDLE),
    ("prompt tokens", "prompt_tokens", 1), ("redundant tokens %", "redundant_token_share", 100),
    ("redundant GPU time %", "redundant_gpu_share", 100),
    ("time / bound", "time_over_bound", 1), ("decode / bound", "cost_over_bound", 1),
)  # fmt: skip


def _percent(each: Means) -> Series:
    return study.derived(lambda share: 100 * share, each["redundant_gpu_share"])


def _remarks(paper: Lengths, found: dict[int, dict[str, Means]]) -> list[str]:
    """At which length of prompts the paper's share comes out."""
    columns = [(each[NO_REUSE.name]["mean_prompt_tokens"].mean, each[NO_REUSE.name]["redundant_gpu_share"].mean)
               for each in found.values()]  # fmt: skip
    tokens, shares = zip(*columns, strict=True)
    first = found[0][NO_REUSE.name]
    where = (
        f"{np.interp(PAPER_SHARE, shares, tokens):.0f} tokens" if shares[-1] >= PAPER_SHARE
        else f"more than {tokens[-1]:.0f} tokens"
    )  # fmt: skip
    return [
        f"Redundant prefill: {100 * first['redundant_token_share'].mean:.0f} % of prompt tokens are computed again at "
        f"n = {paper.n}, but {paper.preset}'s prompts of {tokens[0]:.0f} tokens on average make that "
        f"{100 * shares[0]:.1f} % of generation's GPU time; the paper's {100 * PAPER_SHARE:.0f} % needs prompts of "
        f"{where} (instructions, worked examples), which it does not state.",
        figure.bound_remark(paper.label, found[0]),
    ]


FIGURE = Figure(name="waste", paper="2, 3c", title="idle GPUs and redundant prefill of a step", work=waste)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
