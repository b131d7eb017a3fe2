"""From a plan and its workload to what engines are sent, once it is certain that they can take it."""

import numpy as np

from backends.engine_types import Request
from backends.ray_config import RayConfig
from rlhfless.errors import InfeasibleError, InputError, PlanError
from rlhfless.rng import stream
from rlhfless.types.cluster import Cluster
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Plan
from rlhfless.types.workload import Workload


def requests_of(plan: Plan, workload: Workload, outcome: Outcome | None, config: RayConfig) -> list[Request]:
    """Every response, by number; with an outcome, forced to its length."""
    assert workload.prompts is not None
    n = workload.responses_per_prompt
    prompts = [prompt.tolist() for prompt in workload.prompts]
    budgets = [workload.max_response_tokens] * plan.responses
    if outcome is not None:
        budgets = outcome.response_tokens.ravel().tolist()
    seeds = stream(config.seed, "sampling", plan.step).integers(0, 1 << 63, plan.responses).tolist()
    return [
        Request(
            response=response,
            token_ids=prompts[response // n],
            max_tokens=budgets[response],
            temperature=config.temperature,
            seed=seeds[response],
            force_length=outcome is not None,
        )
        for response in range(plan.responses)
    ]


def prefixes_of(plan: Plan, workload: Workload) -> list[Request]:
    """What the prefill actor computes: each distinct prefix, for the sake of its KV alone."""
    prefill = plan.prefill
    if prefill is None:
        return []
    assert workload.prompts is not None
    _, first = np.unique(prefill.prefix_of, return_index=True)
    return [
        Request(
            response=number,
            token_ids=workload.prompts[prompt][: prefill.prefix_tokens].tolist(),
            max_tokens=1,
            temperature=0.0,
            force_length=True,
        )
        for number, prompt in enumerate(first.tolist())
    ]


def replicas_of(plan: Plan) -> list[tuple[int, ...]]:
    """GPUs of each replica of the prefill actor."""
    if plan.prefill is None:
        return []
    tp, learner = plan.prefill_tp, plan.placement.learner
    replicas = [learner[start : start + tp] for start in range(0, len(learner) - tp + 1, tp)]
    return replicas[: plan.prefill.distinct]


def require_match(plan: Plan, workload: Workload, outcome: Outcome | None, cluster: Cluster, config: RayConfig) -> None:
    """Raise InputError where plan, workload, outcome and cluster do not belong together, as `require_engines` else."""
    where = f"step {workload.step}"
    shape = (workload.size, workload.responses_per_prompt)
    if (plan.prompts, plan.responses_per_prompt) != shape:
        raise InputError(f"{where}: a plan for {(plan.prompts, plan.responses_per_prompt)} prompts x n, not {shape}")
    if workload.prompts is None:
        raise InputError(f"{where}: engines need the token ids of the prompts, the workload has only their lengths")
    if outcome is not None:
        if outcome.response_tokens.shape != shape:
            raise InputError(f"{where}: lengths of shape {outcome.response_tokens.shape}, not {shape}")
        if outcome.response_tokens.max() > workload.max_response_tokens:
            raise InputError(f"{where}: a response of {outcome.response_tokens.max()} tokens is above the cap")
    if plan.cluster_gpus != cluster.gpus:
        raise InputError(f"{where}: a plan for {plan.cluster_gpus} GPUs, this cluster has {cluster.gpus}")
    require_engines(plan, workload, cluster, config)


def require_engines(plan: Plan, workload: Workload, cluster: Cluster, config: RayConfig) -> None:
    """Raise InfeasibleError or PlanError unless engines of this config can hold the plan."""
    where = f"step {workload.step}"
    slots = max(actor.slots for actor in plan.actors)
    if slots > config.max_slots:
        raise InfeasibleError(f"{where}: an actor of {slots} slots, engines have {config.max_slots}")
    longest = int(workload.prompt_tokens.max()) + workload.max_response_tokens
    if longest > config.max_model_len:
        raise InfeasibleError(
            f"{where}: prompt and response of up to {longest} tokens, engines hold {config.max_model_len}"
        )
    for gpus in plan.placement.decode:
        if len(set(cluster.host_of[list(gpus)].tolist())) > 1:
            raise InfeasibleError(f"{where}: an actor on GPUs {list(gpus)}, which are of several hosts")
    if plan.prefill is not None:
        if config.kv == "none":
            raise PlanError(f"{where}: a prefill actor's KV needs a way to the decode actors, kv is none")
        if config.kv == "nixl":
            _require_readable(plan, where)
        if len(plan.placement.learner) < plan.prefill_tp:
            raise PlanError(f"{where}: a prefill actor of {plan.prefill_tp} GPUs on {len(plan.placement.learner)}")


def _require_readable(plan: Plan, where: str) -> None:
    """KV is read from the memory of the prefill actor's process, so a decode actor on its GPUs must go on in it."""
    stays, computing = plan.start == "warm" or plan.hosting != "serverless", set(replicas_of(plan))
    for gpus in plan.placement.decode:
        if not (stays and gpus in computing) and any(not set(gpus).isdisjoint(one) for one in computing):
            raise PlanError(
                f"{where}: kv nixl reads from the prefill actor's process, which ends before a decode actor on GPUs "
                f"{list(gpus)} starts: start warm and with engines of one size, or use kv redis"
            )
