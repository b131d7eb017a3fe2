"""`python -m experiments.prefill`: what sharing prefixes saves, by n and by common header (RLHFless §6.4, Fig. 13b)."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments import charts, figure, plots, study
from experiments.bench import Steps, bounds, simulate
from experiments.figure import Claim, Figure, Result
from experiments.study import GRPO, STATIC, Asked, Lengths, Means, Measures
from rlhfless.commands import run
from rlhfless.scheduler.policies import policy
from rlhfless.types.arrays import ints
from rlhfless.types.plan import Plan
from rlhfless.types.profile import Profile
from rlhfless.types.workload import Workload

SAMPLES = (1, 2, 3, 4, 8)
"""n of the sweep; 3 is the paper's."""
HEADERS = (0, 64, 256, 896)
"""Tokens that all prompts begin with, such as instructions and worked examples, for the sweep at the paper's n."""
PAPER_N = 3
PAPER_SAVING = 0.66
"""RLHFless §6.4: in theory, 1 - 1/n at n = 3."""
NO_REUSE = replace(policy("raw"), name="no reuse", assignment="least-in-flight", prefix_caching=False)
"""Every response computes its own prompt: parallel generation as the paper draws it (Fig. 3b)."""
SCATTERED = replace(policy("raw"), name="scattered", assignment="least-in-flight")
"""The n responses of a prompt on different actors, each of which computes it once and keeps it."""
GROUPED = replace(policy("raw"), name="grouped")
"""The n responses of a prompt on one actor, which computes it once and keeps it: verl's way."""
DEDUPLICATED = replace(policy("dp"), name="deduplicated")
"""The prefill actor computes each prefix once for all."""
KINDS = (NO_REUSE, SCATTERED, GROUPED, DEDUPLICATED)


def longer(steps: Steps, tokens: int, common: bool = True) -> Steps:
    """The same prompts with `tokens` before them: a header that all have in common, or other tokens for each."""
    return [(_longer(workload, tokens, common), outcome) for workload, outcome in steps] if tokens else steps


def _longer(workload: Workload, tokens: int, common: bool) -> Workload:
    prompt_tokens = ints(workload.prompt_tokens + tokens)
    if workload.prompts is None:
        shared = workload.common_prefix_tokens + tokens if common else 0
        return replace(workload, prompt_tokens=prompt_tokens, common_prefix_tokens=shared)
    heads = [np.full(tokens, 0 if common else row) for row in range(workload.size)]  # which token repeats is no matter
    prompts = tuple(ints(np.concatenate(each)) for each in zip(heads, workload.prompts, strict=True))
    return replace(workload, prompt_tokens=prompt_tokens, prompts=prompts)


def prompt_gpu_s(plan: Plan, profile: Profile) -> float:
    """GPU-seconds that a plan's prompts take: each actor's at once, and the prefill actor's on its replicas."""
    tp, prefill = profile.data.tp, plan.prefill
    parts = [float(profile.prefill_s(int(actor.prefill_tokens.sum()))) * tp for actor in plan.actors]
    if prefill is not None:
        replicas = max(len(plan.placement.learner) // tp, 1)
        parts.append(float(profile.prefill_s(prefill.computed_tokens / replicas)) * replicas * tp)
    return sum(parts)


def job(asked: Asked, item: tuple[Lengths, int, bool], seed: int) -> dict[str, Measures]:
    """Each kind of reuse on the same lengths with the paper's 3 actors: prompt tokens, and what they cost."""
    lengths, header, common = item
    steps, setting = longer(asked.steps(lengths, seed), header, common), asked.setting(seed)
    bound = bounds(steps, setting.profile)
    mean_prompt = float(np.mean([workload.prompt_tokens.mean() for workload, _ in steps]))
    runs = {kind.name: simulate(kind, steps, setting, actors=STATIC) for kind in KINDS}
    found: dict[str, Measures] = {}
    for name, each in runs.items():
        counts = [report.counters for report in each.reports]
        tokens = sum(one.prefill_tokens + one.decode_prefill_tokens for one in counts) / len(steps)
        cost = sum(prompt_gpu_s(record.plan, setting.profile) for record in each.records) / len(steps)
        generation = sum(each.summary.bill.function(one).executed_gpu_s for one in ("prefill", "decode")) / len(steps)
        found[name] = study.measures(each, bound) | {
            "prompt_tokens": tokens, "prompt_gpu_s": cost, "generation_gpu_s": generation,
            "mean_prompt_tokens": mean_prompt, "header_share": header / mean_prompt,
        }  # fmt: skip
    base, once = found[NO_REUSE.name], found[DEDUPLICATED.name]
    for one in found.values():
        one["token_saving"] = 1 - one["prompt_tokens"] / base["prompt_tokens"]
        one["prompt_gpu_saving"] = 1 - one["prompt_gpu_s"] / base["prompt_gpu_s"]
        one["redundant_token_share"] = 1 - once["prompt_tokens"] / one["prompt_tokens"]
        one["redundant_gpu_share"] = max(one["prompt_gpu_s"] - once["prompt_gpu_s"], 0.0) / one["generation_gpu_s"]
    return found


def prefill(asked: Asked) -> Result:
    """RLHFless Fig. 13b."""
    by_n = asked.workloads([replace(GRPO, n=n) for n in SAMPLES])
    paper = asked.workloads([replace(GRPO, n=PAPER_N)])[0]
    items = list(dict.fromkeys([*((lengths, 0) for lengths in by_n), *((paper, header) for header in HEADERS)]))
    studied = study.over_seeds(job, [(*item, True) for item in items], asked, "prefill")
    found = dict(zip(items, studied, strict=True))
    at_paper = found[paper, 0]
    claims = [
        Claim(
            what=what, given=f"n = {paper.n}, {kind.name} against {NO_REUSE.name}", paper=PAPER_SAVING,
            here=at_paper[kind.name][field], unit="%",
        )
        for what, field in (("prompt tokens saved", "token_saving"), ("their GPU-seconds saved", "prompt_gpu_saving"))
        for kind in (DEDUPLICATED, GROUPED, SCATTERED)
    ]  # fmt: skip
    claims += [
        Claim(
            what="prompt tokens saved", given=f"n = {paper.n}, header of {header} tokens", paper="grows",
            here=found[paper, header][DEDUPLICATED.name]["token_saving"], unit="%",
        )
        for header in HEADERS[1:]
    ]  # fmt: skip
    rows = [
        figure.row({"workload": lengths.label, "header_tokens": header, "reuse": name}, each)
        for (lengths, header), kinds in found.items()
        for name, each in kinds.items()
    ]

    def draw(path: Path) -> None:
        with plots.picture(path, 9.0, 3.4) as picture:
            tokens, cost, headers = picture.subplots(1, 3)
            n = [lengths.n for lengths in by_n]
            for axes, field, label in (
                (tokens, "prompt_tokens", "prompt tokens of a step"), (cost, "prompt_gpu_s", "GPU-seconds of prompts"),
            ):  # fmt: skip
                values = {kind.name: [found[lengths, 0][kind.name][field] for lengths in by_n] for kind in KINDS}
                charts.lines(axes, n, values, "responses of a prompt, n", label)
                axes.set_ylim(bottom=0)
            shared = [100 * found[paper, header][DEDUPLICATED.name]["header_share"].mean for header in HEADERS]
            values = {
                kind.name: [found[paper, header][kind.name]["prompt_tokens"] for header in HEADERS] for kind in KINDS
            }
            charts.lines(headers, shared, values, "common header, % of a prompt", "prompt tokens of a step")
            plots.log_y(headers)
            for axes, text in (
                (tokens, "(a) tokens"),
                (cost, "(b) cost"),
                (headers, f"(c) common header, n = {paper.n}"),
            ):
                charts.title(axes, text)
            charts.legend(picture, tokens, len(KINDS))

    return Result(
        claims=tuple(claims), columns=COLUMNS, rows=tuple(rows), remarks=tuple(_remarks(paper, at_paper)), draw=draw
    )


COLUMNS: tuple[figure.Column, ...] = (
    ("workload", "workload", 1), ("header", "header_tokens", 1), ("reuse", "reuse", 1),
    ("mean prompt", "mean_prompt_tokens", 1), ("prompt tokens", "prompt_tokens", 1),
    ("prompt GPU-s", "prompt_gpu_s", 1), ("generation GPU-s", "generation_gpu_s", 1), ("gen s", "generation_s", 1),
    ("tokens saved %", "token_saving", 100), ("prompt GPU-s saved %", "prompt_gpu_saving", 100),
    ("redundant, % of generation", "redundant_gpu_share", 100),
    ("time / bound", "time_over_bound", 1), ("decode / bound", "cost_over_bound", 1),
)  # fmt: skip


def _remarks(paper: Lengths, kinds: dict[str, Means]) -> list[str]:
    once, grouped, none = (kinds[kind.name] for kind in (DEDUPLICATED, GROUPED, NO_REUSE))
    return [
        f"Against engines that keep the prompts they have seen and get a prompt's responses together (verl's way), "
        f"deduplication saves {100 * (1 - once['prompt_tokens'].mean / grouped['prompt_tokens'].mean):.1f} % of prompt "
        f"tokens at n = {paper.n}: the paper's {100 * PAPER_SAVING:.0f} % counts from no reuse at all.",
        f"Prompts are {100 * none['prompt_gpu_s'].mean / none['generation_gpu_s'].mean:.1f} % of generation's "
        f"GPU-seconds without reuse, {100 * once['prompt_gpu_s'].mean / once['generation_gpu_s'].mean:.1f} % "
        "deduplicated.",
        figure.bound_remark(paper.label, kinds),
    ]


FIGURE = Figure(name="prefill", paper="13b", title="prompt tokens and their cost by n and common header", work=prefill)
app = figure.command(FIGURE)

if __name__ == "__main__":
    run(app)
