"""The executor on a real cluster: one plan in, one report out, with vLLM engines in Ray actors.

The twin of `sim.executor`. Generation is real (`backends.ray_step`). With a `Trainer` so is all else: reward, reference
and critic, each a function of its own, then the update; the weights of the next step are published as soon as they are
there. Without one, learning is a stand-in that publishes the model's own weights under the next version: what a step
pays for a change of weights is real, what a learner computes is not there, and its time says only that. How processes
start is the plan's: warm ones are kept alive, prewarmed ones are asked for while the step before still learns
(`backends.prewarm`), cold ones begin with the step.
"""

import atexit
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from backends.cluster import RayCluster, StepError
from backends.engine_types import EngineConfig
from backends.environment import require
from backends.invocation import Weights
from backends.kv_transfer import nixl_config, redis_config
from backends.prewarm import Prewarming
from backends.ray_config import RayConfig
from backends.ray_step import RayStep
from backends.redis_server import RedisServer, connect
from backends.step_inputs import prefixes_of, requests_of, require_match
from backends.trainer import Generated, Trainer
from backends.weight_sync import Published, discard, publish
from rlhfless.errors import InputError
from rlhfless.executor import Life
from rlhfless.types.arrays import FloatArray, floats, ints
from rlhfless.types.cluster import Cluster, ClusterState
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Plan
from rlhfless.types.report import SCHEMA, Counters, Phase, StepReport
from rlhfless.types.workload import Workload

PING_S = 1.0
"""Seconds in which the private Redis must answer before a step (chosen), or a new one takes its place."""


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

        Raises InputError where Ray, vLLM's model, Redis or, under kv nixl, NIXL are missing.
        """
        self.cluster, self.config, self.lengths, self.rewards = cluster, config, lengths, rewards
        self.results: tuple[Generated, ...] = ()
        """Responses of the last step, by number."""
        self.scores: FloatArray | None = None
        """Their rewards."""
        self.learned: Any = None
        """What the trainer tells of the last step."""
        self.steps = 0
        """Executions so far, those that failed included."""
        self._trainer: Trainer | None = None
        self._born_s = time.monotonic()
        self._run = token_hex(8)
        self._weights = Weights(version="0", published=None)
        self._redis: RedisServer | None = None
        self._closed = False
        if config.kv == "nixl":
            require("nixl")
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

    def draw_from(self, published: Published) -> None:
        """The next step draws from these weights. They are discarded when others take their place, or at the end."""
        last, self._weights = self._weights, Weights(version=published.version, published=published)
        if last.published is not None:  # every process that is left loads the newest when it is next used
            discard(last.published)

    def train_with(self, trainer: Trainer) -> None:
        """From now on steps are learned from. Weights other than the model folder's are published at once."""
        assert self.steps == 0, "before the first step"
        self._trainer = trainer
        if trainer.version != self._weights.version:
            self._publish()
        trainer.rest()

    def places(self, gpus: Sequence[int]) -> list[tuple[str, int]]:
        """(Ray's node, number of the GPU there) of GPUs of the cluster."""
        return [self._processes.place(gpu) for gpu in gpus]

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

        Raises what `evaluate` raises, and what the trainer raises; an exception of its own ends the step as well.
        """
        return self._run_step(plan, workload, learns=True)

    def evaluate(self, plan: Plan, workload: Workload) -> StepReport:
        """Generate and reward, without learning: the next step draws from the same weights.

        Raises PlanError for a plan that breaks its own laws, InputError for one of another cluster or workload,
        InfeasibleError for what no engine of this config can hold, before anything is started. Raises StepError, or an
        interrupt, once all that the step has started is ended: it can be executed again.
        """
        return self._run_step(plan, workload, learns=False)

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
            with suppress(OSError):  # never made, or something else is in it
                (self.config.run_folder / self._run).rmdir()

    # ---- a step

    def _run_step(self, plan: Plan, workload: Workload, *, learns: bool) -> StepReport:
        assert not self._closed, "closed"
        plan.check()
        outcome = self.lengths(workload) if self.lengths is not None else None
        require_match(plan, workload, outcome, self.cluster, self.config)
        from ray.exceptions import RayError

        self.steps += 1
        try:
            return self._execute(plan, workload, outcome, learns)
        except BaseException as error:
            self._processes.end_used()
            if isinstance(error, RayError):
                raise StepError(f"step {plan.step}: Ray has failed, {str(error).splitlines()[0]}") from error
            raise

    def _execute(self, plan: Plan, workload: Workload, outcome: Outcome | None, learns: bool) -> StepReport:
        engine = self._engine(plan)
        zero_s = time.monotonic()
        step = RayStep(
            plan,
            requests_of(plan, workload, outcome, self.config),
            prefixes_of(plan, workload),
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
        if learns:
            prepared_s = self._prepare(plan, workload, lives, generated_s, zero_s)
            with Prewarming(self._processes, plan, engine):
                learned_s = self._learn(plan, workload, lives, zero_s)
        else:
            self.scores = self._trainer.score(workload, self.results) if self._trainer is not None else None
            prepared_s = learned_s = time.monotonic() - zero_s
        return self._report(plan, workload, step, zero_s, (generated_s, prepared_s, learned_s))

    def _engine(self, plan: Plan) -> EngineConfig:
        """What this step's engines are, of whatever size. A private Redis that has died is replaced, and with it every
        process."""
        connector: dict[str, Any] | None = None
        if self.config.kv == "redis":
            if self._redis is not None and not _answers(self._redis.url):
                self._processes.end_all()
                self._redis.stop()
                self._redis = RedisServer().__enter__()
            url = self._redis.url if self._redis is not None else self.config.redis_url
            assert url is not None
            connector = redis_config(url, self._run)
        elif self.config.kv == "nixl":
            connector = nixl_config(self.config.device)
        # only "split" gives engines GPUs that nobody else wants between steps
        sleeps = plan.hosting == "colocated" or (plan.hosting == "serverless" and plan.start == "warm")
        return self.config.engine(prefix_caching=plan.prefix_caching, kv_connector=connector, sleeps=sleeps)

    def _prepare(self, plan: Plan, workload: Workload, lives: list[Life], generated_s: float, zero_s: float) -> float:
        """The preparation functions that there are, one after the other on the GPUs that the plan names; when they are
        done."""
        self.scores, trainer = None, self._trainer
        functions: tuple[str, ...] = ("reward",) if self.rewards is not None else ()
        if trainer is not None:
            functions = trainer.functions
            trainer.wake()
        places, prepared_s = dict(plan.placement.preparation), generated_s
        for name in functions:
            gpus = places.get(name, plan.placement.learner)
            life = Life(function=name, index=0, gpus=gpus, at_s=prepared_s)
            found = (
                trainer.prepare(name, len(gpus), workload, self.results)
                if trainer is not None
                else self._rewarded(workload)
            )
            if name == "reward":
                self.scores = found
            prepared_s = time.monotonic() - zero_s
            life.until(prepared_s, "score")
            lives.append(life)
        return prepared_s

    def _rewarded(self, workload: Workload) -> FloatArray:
        assert self.rewards is not None
        scores = floats(self.rewards(workload, self.results))
        if scores.shape != (len(self.results),):
            raise InputError(f"rewards of shape {scores.shape}, the step has {len(self.results)} responses")
        return scores

    def _learn(self, plan: Plan, workload: Workload, lives: list[Life], zero_s: float) -> float:
        """The update, or its stand-in, and its weights under the next version; when they are published."""
        gpus = plan.placement.learner
        life = Life(function="learner", index=0, gpus=gpus, at_s=time.monotonic() - zero_s)
        if self._trainer is not None:
            self.learned = self._trainer.learn(len(gpus), workload, self.results)
        self._publish()
        if self._trainer is not None:
            self._trainer.rest()
        learned_s = time.monotonic() - zero_s
        life.until(learned_s, "train")
        lives.append(life)
        return learned_s

    def _publish(self) -> None:
        folder = self.config.run_folder / self._run
        if self._trainer is not None:
            self.draw_from(self._trainer.publish(folder))
        else:
            self.draw_from(publish(Path(self.config.model), folder, str(int(self._weights.version) + 1)))

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
                moved_kv_bytes=done.moved_kv_bytes,
            ),
        )


def _answers(url: str) -> bool:
    from redis.exceptions import RedisError

    with suppress(RedisError, OSError), connect(url, timeout_s=PING_S) as client:
        return bool(client.ping())
    return False
