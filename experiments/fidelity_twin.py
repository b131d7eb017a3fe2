"""The simulator, which jumps from event to event, against one that steps token by token: the same step in both."""

import importlib
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from experiments.evidence import Evidence, compared
from rlhfless.executor import Life
from rlhfless.types.arrays import floats
from rlhfless.types.cluster import Cluster
from rlhfless.types.plan import MigrationSpec
from rlhfless.types.profile import Profile
from sim.actor import Actor
from sim.engine import Batch, Engine, prefill_timer
from sim.generation import Generation
from sim.network import Links
from sim.profiles import load
from traces.synthesize import synthesize

TWIN = "tests.reference"
"""The token-by-token simulator, written from the rules alone; it comes with the sources, not with an installation."""
SEEDS = range(3)
PROFILE = "qwen2.5-3b_l40s_tp2"
RULES: dict[str, MigrationSpec | None] = {
    "none": None,
    "cut-and-migrate": MigrationSpec(kind="cut-and-migrate", value=0.7),
    "global-cut": MigrationSpec(kind="global-cut", value=40.0),
}
"""Mid-step rules of the comparison: none, the paper's tau, and RLHFuse's with a fifth of the responses left."""
PROMPTS, SAMPLES, ACTORS, CAP = 50, 4, 4, 512
SLOTS, KV_TOKENS = 24, 8000
"""Few enough that responses queue and are preempted."""


def row() -> Evidence:
    """End of every response, and the order of the rules, in both simulators."""
    against = "token-by-token twin"
    try:
        reference: Any = importlib.import_module(TWIN)
    except ImportError:
        return Evidence(against=against, skipped=f"{TWIN} is not here: run from a checkout of the sources")
    ours: list[float] = []
    theirs: list[float] = []
    agree = pairs = 0
    for seed in SEEDS:
        times = []
        for rule in RULES.values():
            mine, slow = _both(reference, seed, rule)
            ours += mine
            theirs += slow
            times.append((max(mine), max(slow)))
        for one, other in combinations(times, 2):
            if one[1] != other[1]:
                pairs += 1
                agree += (one[0] < other[0]) == (one[1] < other[1])
    return compared(
        floats(ours),
        floats(theirs),
        against=against,
        quantity="end of each response",
        agree=agree,
        pairs=pairs,
        scope=f"same profile and rules, so this is of the jumps alone; {ACTORS} actors, queues, preemption, "
        f"mid-step rules {', '.join(RULES)}",
    )


def _both(reference: Any, seed: int, rule: MigrationSpec | None) -> tuple[list[float], list[float]]:
    """When each response ends: event to event, token by token."""
    data = replace(load(PROFILE).data, max_slots=SLOTS, kv_capacity_tokens=KV_TOKENS)
    profile = Profile(data=data)
    cluster = Cluster.uniform(data.gpu, ACTORS * data.tp)
    trace = synthesize(
        "gsm8k", prompts=PROMPTS, epochs=1, responses_per_prompt=SAMPLES, max_response_tokens=CAP,
        prompts_per_step=PROMPTS, seed=seed, algorithm="grpo",
    )  # fmt: skip
    n, prompt_tokens, target = trace.n, trace.prompt_tokens.tolist(), trace.response_tokens.tolist()
    batch = Batch(
        prompt_tokens=prompt_tokens,
        responses_per_prompt=n,
        target=target,
        generated=[0] * len(target),
        first_s=[-1.0] * len(target),
    )
    timer, actors, workers, responses = prefill_timer(profile), [], [], {}
    for index, numbers in enumerate(np.array_split(np.arange(len(target)).reshape(-1, n), ACTORS)):
        own = numbers.ravel().tolist()
        first = {number: prompt_tokens[number // n] for number in own}
        engine = Engine(
            profile=profile, prefill_timer=timer, batch=batch, slots=SLOTS, prefix_caching=True, first_tokens=first
        )
        engine.submit(own)
        life = Life(function="decode", index=index, gpus=(index,), at_s=0.0)
        actors.append(Actor(index=index, host=0, engine=engine, life=life, start_s=0.0))
        worker = reference.Worker(
            index=index, host=0, slots=SLOTS, slowdown=1.0, start_s=0.0, caching=True, profile=profile
        )
        for number in own:
            responses[number] = reference.Response(
                number=number, prompt=number // n, prompt_tokens=first[number], target=target[number],
                planned_prefill=first[number], home=index,
            )  # fmt: skip
            worker.queue.append(responses[number])
        workers.append(worker)

    def at_once(_: Actor, now_s: float) -> float:
        return now_s

    generation = Generation(rule, batch, actors, Links(cluster=cluster), at_once, at_once, at_once)
    generation.run()
    reference.TokenByToken(rule, workers, Links(cluster=cluster)).run()
    return list(generation.ledger.end_s), [float(responses[number].end_s) for number in sorted(responses)]
