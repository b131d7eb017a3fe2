"""The executor on a real cluster: one plan in, one report out, with vLLM engines in Ray actors.

The twin of `sim.executor`. Generation is real (`backends.ray_step`), and so are rewards where a function for them is
given. Learning is a stand-in that publishes the model's own weights under the next version: what a step pays for a
change of weights is real, what a learner computes is not there, and its time says only that. Reference and critic are
not run. What a plan asks for ahead (`Prewarm`) is not, since a step is only known when the one before has ended: warm
starts are processes kept alive, all others begin with the step.
"""

import atexit
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from backends.cluster import RayCluster, RayConfig, StepError
from backends.engine_types import EngineConfig, FinishReason, Request
from backends.kv_transfer import redis_config
from backends.ray_step import RayStep, Weights
from backends.redis_server import RedisServer, connect
from backends.weight_sync import discard, publish
from rlhfless.errors import InfeasibleError, InputError, PlanError
from rlhfless.executor import Life
from rlhfless.rng import stream
from rlhfless.types.arrays import FloatArray, IntArray, floats, ints
from rlhfless.types.cluster import Cluster, ClusterState
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Plan
from rlhfless.types.report import SCHEMA, Counters, Phase, StepReport
from rlhfless.types.workload import Workload

PING_S = 1.0
"""Seconds in which the private Redis must answer before a step (chosen), or a new one takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One response."""

    tokens: IntArray
    """int[tokens]: token ids, the end token included."""
    logprobs: FloatArray
    """float[tokens]: their log-probabilities under the model that drew them, without temperature."""
    finish_reason: FinishReason
    """stop: the model ended it. length: its budget is used up."""
    weight_version: str
    """Weights that drew it."""
    cached_tokens: int
    """Prompt tokens that were not computed when it was first admitted: cached there, or fetched."""


Lengths = Callable[[Workload], Outcome]
"""Lengths that responses are forced to."""
Rewards = Callable[[Workload, Sequence[Generated]], FloatArray]
"""Scores, float[responses], of a step's responses."""


class RayExecutor:
    """Carries plans out on a Ray cluster, step after step. A context manager; `close` ends what it has started."""

    def __init__(
        self, cluster: Cluster, config: RayConfig, *, lengths: Lengths | None = None, rewards: Rewards | None = None
    ) -> None:
        """`lengths` forces each response to a length, so that a recorded or simulated step can be repeated.

        Raises InputError where Ray, vLLM's model or Redis are missing.
        """
        self.cluster, self.config, self.lengths, self.rewards = cluster, config, lengths, rewards
        self.results: tuple[Generated, ...] = ()
        """Responses of the last step, by number."""
        self.scores: FloatArray | None = None
        """What `rewards` has said of them."""
        self.steps = 0
        """Executions so far, those that failed included."""
        self._born_s = time.monotonic()
        self._run = token_hex(8)
        self._weights = Weights(version="0", published=None)
        self._redis: RedisServer | None = None
        self._closed = False
        self._processes = RayCluster(cluster, config)
        atexit.register(self.close)
        try:
            if config.kv == "redis" and config.redis_url is None:
                self._redis = RedisServer().__enter__()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RayExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def weight_version(self) -> str:
        """Weights that the next step draws from."""
        return self._weights.version

    def pids(self) -> list[int]:
        """Process ids of the engines that live, on their hosts."""
        return self._processes.pids()

    def snapshot(self) -> ClusterState:
        """Between steps every GPU is free, except those of hosts that Ray has lost."""
        alive = np.array(self._processes.alive_hosts())
        free = np.flatnonzero(alive[self.cluster.host_of])
        return ClusterState(time_s=time.monotonic() - self._born_s, free_gpus=ints(free))

    def execute(self, plan: Plan, workload: Workload) -> StepReport:
        """Run one step to its end.

        Raises PlanError for a plan that breaks its own laws, InputError for one of another cluster or workload,
        InfeasibleError for what no engine of this config can hold, before anything is started. Raises StepError, or an
        interrupt, once all that the step has started is ended: it can be executed again.
        """
        assert not self._closed, "closed"
        plan.check()
        outcome = self.lengths(workload) if self.lengths is not None else None
        self._require_match(plan, workload, outcome)
        from ray.exceptions import RayError

        self.steps += 1
        try:
            return self._execute(plan, workload, outcome)
        except BaseException as error:
            self._processes.end_used()
            if isinstance(error, RayError):
                raise StepError(f"step {plan.step}: Ray has failed, {str(error).splitlines()[0]}") from error
            raise

    def close(self) -> None:
        """End every process, the private Redis and the private Ray. May be called twice."""
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._processes.close()
        finally:
            if self._redis is not None:
                self._redis.stop()
            if self._weights.published is not None:
                discard(self._weights.published)

    # ---- a step

    def _execute(self, plan: Plan, workload: Workload, outcome: Outcome | None) -> StepReport:
        engine = self._engine(plan)
        zero_s = time.monotonic()
        step = RayStep(
            plan,
            self._requests(plan, workload, outcome),
            _prefixes(plan, workload),
            cluster=self._processes,
            config=self.config,
            engine=engine,
            weights=self._weights,
            number=self.steps,
            zero_s=zero_s,
        )
        step.run()
        responses = step.generation.responses
        generated_s = max(response.end_s for response in responses) - zero_s
        self.results = tuple(
            Generated(
                tokens=ints(response.tokens),
                logprobs=floats(response.logprobs),
                finish_reason=response.finish_reason,
                weight_version=response.version,
                cached_tokens=response.cached_tokens or 0,
            )
            for response in responses
        )
        lives = step.lives
        if plan.hosting != "serverless":
            for life in lives:
                if life.function == "decode":
                    life.until(generated_s, "wait-longest")
        prepared_s = self._prepare(plan, workload, lives, generated_s, zero_s)
        learned_s = self._learn(plan, lives, zero_s)
        return self._report(plan, workload, step, zero_s, (generated_s, prepared_s, learned_s))

    def _engine(self, plan: Plan) -> EngineConfig:
        """What this step's engines are. A private Redis that has died is replaced, and with it every process."""
        connector: dict[str, Any] | None = None
        if self.config.kv == "redis":
            if self._redis is not None and not _answers(self._redis.url):
                self._processes.end_all()
                self._redis.stop()
                self._redis = RedisServer().__enter__()
            url = self._redis.url if self._redis is not None else self.config.redis_url
            assert url is not None
            connector = redis_config(url, self._run)
        return self.config.engine(tp=plan.tp, prefix_caching=plan.prefix_caching, kv_connector=connector)

    def _requests(self, plan: Plan, workload: Workload, outcome: Outcome | None) -> list[Request]:
        assert workload.prompts is not None
        n = workload.responses_per_prompt
        prompts = [prompt.tolist() for prompt in workload.prompts]
        budgets = [workload.max_response_tokens] * plan.responses
        if outcome is not None:
            budgets = outcome.response_tokens.ravel().tolist()
        seeds = stream(self.config.seed, "sampling", plan.step).integers(0, 1 << 63, plan.responses).tolist()
        return [
            Request(
                response=response,
                token_ids=prompts[response // n],
                max_tokens=budgets[response],
                temperature=self.config.temperature,
                seed=seeds[response],
                force_length=outcome is not None,
            )
            for response in range(plan.responses)
        ]

    def _prepare(self, plan: Plan, workload: Workload, lives: list[Life], generated_s: float, zero_s: float) -> float:
        """Rewards, on the GPUs of the plan's reward function; when they are there."""
        self.scores = None
        if self.rewards is None:
            return generated_s
        gpus = dict(plan.placement.preparation).get("reward", plan.placement.learner)
        life = Life(function="reward", index=0, gpus=gpus, at_s=time.monotonic() - zero_s)
        self.scores = floats(self.rewards(workload, self.results))
        if self.scores.shape != (plan.responses,):
            raise InputError(f"rewards of shape {self.scores.shape}, the step has {plan.responses} responses")
        prepared_s = time.monotonic() - zero_s
        life.until(prepared_s, "score")
        lives.append(life)
        return prepared_s

    def _learn(self, plan: Plan, lives: list[Life], zero_s: float) -> float:
        """The stand-in: the same weights under the next version; when they are published."""
        life = Life(function="learner", index=0, gpus=plan.placement.learner, at_s=time.monotonic() - zero_s)
        last = self._weights
        version = str(int(last.version) + 1)
        published = publish(Path(self.config.model), self.config.run_folder / self._run, version)
        self._weights = Weights(version=version, published=published)
        if last.published is not None:  # every process that is left loads the newest when it is next used
            discard(last.published)
        learned_s = time.monotonic() - zero_s
        life.until(learned_s, "train")
        lives.append(life)
        return learned_s

    def _report(
        self, plan: Plan, workload: Workload, step: RayStep, zero_s: float, ends_s: tuple[float, float, float]
    ) -> StepReport:
        done = step.generation
        held = {gpu for gpus in (plan.placement.learner, *plan.placement.decode) for gpu in gpus}
        held.update(gpu for _, gpus in plan.placement.preparation for gpu in gpus)
        phases = zip(("generation", "preparation", "learning"), (0.0, *ends_s[:2]), ends_s, strict=True)
        return StepReport(
            schema=SCHEMA,
            policy=plan.policy,
            step=plan.step,
            epoch=plan.epoch,
            start_s=zero_s - self._born_s,
            prompt_ids=workload.prompt_ids,
            responses_per_prompt=plan.responses_per_prompt,
            tokens=ints([len(response.tokens) for response in done.responses]),
            first_s=floats([(response.first_s or zero_s) - zero_s for response in done.responses]),
            end_s=floats([response.end_s - zero_s for response in done.responses]),
            actor=ints(done.actor_of),
            moves=ints(done.moves),
            invocations=tuple(i for i in (life.invocation() for life in step.lives) if i is not None),
            phases=tuple(Phase(name=name, start_s=start_s, end_s=end_s) for name, start_s, end_s in phases),
            reserved_gpus=0 if plan.hosting == "serverless" else len(held),
            counters=Counters(
                prefill_tokens=step.prefilled_tokens,
                decode_prefill_tokens=done.computed_tokens,
                recomputed_tokens=done.recomputed_tokens,
                decoded_tokens=done.generated_tokens,
                preemptions=done.preemptions,
                cuts=done.cuts,
                moves=sum(done.moves),
                failures=done.failures + step.prefill_failures,
                moved_kv_bytes=0.0,  # KV goes through Redis block by block as it is made, whether or not it will move
            ),
        )

    def _require_match(self, plan: Plan, workload: Workload, outcome: Outcome | None) -> None:
        where, config = f"step {workload.step}", self.config
        shape = (workload.size, workload.responses_per_prompt)
        if (plan.prompts, plan.responses_per_prompt) != shape:
            raise InputError(
                f"{where}: a plan for {(plan.prompts, plan.responses_per_prompt)} prompts x n, not {shape}"
            )
        if workload.prompts is None:
            raise InputError(f"{where}: engines need the token ids of the prompts, the workload has only their lengths")
        if outcome is not None:
            if outcome.response_tokens.shape != shape:
                raise InputError(f"{where}: lengths of shape {outcome.response_tokens.shape}, not {shape}")
            if outcome.response_tokens.max() > workload.max_response_tokens:
                raise InputError(f"{where}: a response of {outcome.response_tokens.max()} tokens is above the cap")
        if plan.cluster_gpus != self.cluster.gpus:
            raise InputError(f"{where}: a plan for {plan.cluster_gpus} GPUs, this cluster has {self.cluster.gpus}")
        slots = max(actor.slots for actor in plan.actors)
        if slots > config.max_slots:
            raise InfeasibleError(f"{where}: an actor of {slots} slots, engines have {config.max_slots}")
        longest = int(workload.prompt_tokens.max()) + workload.max_response_tokens
        if longest > config.max_model_len:
            raise InfeasibleError(
                f"{where}: prompt and response of up to {longest} tokens, engines hold {config.max_model_len}"
            )
        if plan.tp > 1 and config.kv == "redis":
            raise InfeasibleError(f"{where}: KV over Redis is for engines of one GPU, the plan has {plan.tp}; use none")
        if plan.prefill is not None:
            if config.kv == "none":
                raise PlanError(f"{where}: a prefill actor's KV needs a way to the decode actors, kv is none")
            if len(plan.placement.learner) < plan.tp:
                raise PlanError(f"{where}: a prefill actor of {plan.tp} GPUs on {len(plan.placement.learner)}")


def _prefixes(plan: Plan, workload: Workload) -> list[Request]:
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


def _answers(url: str) -> bool:
    from redis.exceptions import RedisError

    with suppress(RedisError, OSError), connect(url, timeout_s=PING_S) as client:
        return bool(client.ping())
    return False
