"""The simulator's executor: one plan in, one report out, on the time of a SimPy environment."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

import numpy as np

from rlhfless.errors import InputError
from rlhfless.executor import Life
from rlhfless.rng import stream
from rlhfless.types.arrays import BoolArray, floats, ints
from rlhfless.types.cluster import Cluster, ClusterState
from rlhfless.types.outcome import Outcome
from rlhfless.types.plan import Plan
from rlhfless.types.report import SCHEMA, Activity, Counters, Phase, StepReport
from rlhfless.types.workload import Workload
from sim.actor import Actor
from sim.engine import Batch, Engine, prefill_timer
from sim.functions import Starter
from sim.generation import Generation
from sim.network import Links
from sim.world import World


@dataclass(slots=True, kw_only=True)
class SimExecutor:
    """Carries plans out in a simulated cluster, step after step."""

    cluster: Cluster
    """Hosts, GPUs and links."""
    world: World
    """True lengths, speeds, noise and faults."""
    now_s: float = 0.0
    """Time since the run began, at the end of the last step."""
    _past_learning_s: float | None = None
    _warm: frozenset[tuple[str, tuple[int, ...]]] | None = None
    _learner: frozenset[int] = frozenset()
    _timers: dict[int, Callable[[int], float]] = field(default_factory=dict, init=False, repr=False)

    def snapshot(self) -> ClusterState:
        """Between steps every GPU is free."""
        return ClusterState(time_s=self.now_s, free_gpus=ints(np.arange(self.cluster.gpus)))

    def execute(self, plan: Plan, workload: Workload) -> StepReport:
        """Run one step to its end.

        Raises PlanError for a plan that breaks its own laws, InputError for one of another cluster or workload and for
        an outcome of another shape.
        """
        plan.check()
        outcome = self.world.outcome_of(workload)
        self._require_match(plan, workload, outcome)
        step = _Step(self, plan, workload, outcome)
        report = step.run()
        self.now_s += report.step_s
        self._past_learning_s = report.phase_s("learning")
        self._learner = frozenset(plan.placement.learner)
        self._warm = (self._warm or frozenset()) | {(i.function, i.gpus) for i in report.invocations}
        return report

    def close(self) -> None:
        """Nothing is held between steps."""

    def timer(self, tp: int) -> Callable[[int], float]:
        """Seconds of a prefill on an actor of `tp` GPUs."""
        if tp not in self._timers:
            self._timers[tp] = prefill_timer(self.world.of_size(tp))
        return self._timers[tp]

    def _require_match(self, plan: Plan, workload: Workload, outcome: Outcome) -> None:
        where = f"step {workload.step}"
        shape = (workload.size, workload.responses_per_prompt)
        if (plan.prompts, plan.responses_per_prompt) != shape:
            raise InputError(
                f"{where}: a plan for {(plan.prompts, plan.responses_per_prompt)} prompts x n, not {shape}"
            )
        if outcome.response_tokens.shape != shape:
            raise InputError(f"{where}: outcome of shape {outcome.response_tokens.shape}, the workload has {shape}")
        if outcome.response_tokens.max() > workload.max_response_tokens:
            raise InputError(f"{where}: a response of {outcome.response_tokens.max()} tokens is above the cap")
        if plan.cluster_gpus != self.cluster.gpus:
            raise InputError(f"{where}: a plan for {plan.cluster_gpus} GPUs, this cluster has {self.cluster.gpus}")
        for tp in {*plan.sizes, plan.prefill_tp}:
            profile = self.world.of_size(tp)
            profile.require_fit(int(workload.prompt_tokens.max()), workload.max_response_tokens)


class _Step:
    """One step while it runs."""

    def __init__(self, executor: SimExecutor, plan: Plan, workload: Workload, outcome: Outcome) -> None:
        self.executor, self.plan, self.workload = executor, plan, workload
        self.world, self.cluster = executor.world, executor.cluster
        self.profile = self.world.profile
        self.links = Links(cluster=self.cluster, efficiency=self.world.link_efficiency)
        responses, begun_of = plan.responses, self.world.begun_of
        self.trained: BoolArray | None = None
        self.batch = Batch(
            prompt_tokens=workload.prompt_tokens.tolist(),
            responses_per_prompt=plan.responses_per_prompt,
            target=outcome.response_tokens.ravel().tolist(),
            generated=[0] * responses if begun_of is None else begun_of(workload).ravel().tolist(),
            first_s=[-1.0] * responses,
        )
        past_s = executor._past_learning_s
        self.before_s: dict[str, float] = {} if past_s is None else dict.fromkeys(("prefill", "decode"), -past_s)
        self.starters = {
            tp: Starter(plan=plan, profile=self.world.of_size(tp), warm=executor._warm, before_s=self.before_s)
            for tp in {*plan.sizes, plan.prefill_tp}
        }
        self.starter = self.starters[plan.prefill_tp]
        self.lives: list[Life] = []
        self.restarts = 0
        self.slowness = self._slowness()

    def _slowness(self) -> list[float]:
        """Each actor's factor on compute time in this step, of mean 1 in the log."""
        count, sigma = len(self.plan.actors), self.world.speed_noise
        if sigma == 0:
            return [1.0] * count
        draws = stream(self.world.seed, "speed", self.plan.step).standard_normal(count)
        factors: list[float] = np.exp(sigma * draws).tolist()
        return factors

    def run(self) -> StepReport:
        """All three phases."""
        size_bytes, owners = self.profile.data.weight_bytes, self._owners()
        gathered_s = self.links.gather(owners, size_bytes, 0.0)
        prefill_end_s = self._prefill(owners, gathered_s)
        actors = self._actors(self._weights(owners, gathered_s, prefill_end_s), prefill_end_s)
        generation = Generation(
            self.plan.migration,
            self.batch,
            actors,
            self.links,
            self._restart,
            self._start,
            self._load,
            None if self.world.enough is None else partial(self.world.enough, self.workload),
        )
        failures = [(f.actor, f.time_s) for f in self.world.failures if f.step == self.plan.step]
        generated_s = generation.run(failures)
        self.trained = generation.chosen
        self.lives.extend(generation.lives)
        if self.plan.hosting != "serverless":
            for actor in actors:
                actor.life.until(generated_s, "wait-longest")
        prepared_s = self._prepare(generated_s)
        learned_s = self._learn(generated_s, prepared_s)
        return self._report(generation, actors, (generated_s, prepared_s, learned_s))

    def _free_s(self, gpus: Iterable[int]) -> float:
        """When the last function of the step so far on any of `gpus` has ended; before the step, the last one's."""
        wanted = set(gpus)
        past_s = self.executor._past_learning_s or 0.0
        before_s = 0.0 if wanted & self.executor._learner else -past_s
        ends = [life.at_s for life in self.lives if life.spans and not wanted.isdisjoint(life.gpus)]
        return max(ends, default=before_s)

    def _owners(self) -> list[int]:
        """Hosts of the learner."""
        return sorted({int(self.cluster.host_of[gpu]) for gpu in self.plan.placement.learner})

    def _prefill(self, owners: list[int], gathered_s: float) -> float:
        """The prefill actor on the learner's GPUs, wave by wave; when all KV is there (0 without one).

        Each of its replicas first gets a copy of the weights over its host's fabric.
        """
        prefill = self.plan.prefill
        if prefill is None:
            return 0.0
        learner = self.plan.placement.learner
        weights_s = gathered_s
        for host in owners:
            gpus = sum(int(self.cluster.host_of[gpu]) == host for gpu in learner)
            for _ in range(max(1, gpus // self.plan.prefill_tp)):
                weights_s = max(weights_s, self.links.send(host, host, self.profile.data.weight_bytes, gathered_s))
        life, ready_s = self.starter.start("prefill", learner, 0, needed_s=0.0, free_s=0.0)
        life.until(weights_s, "wait-weights")
        replicas = max(1, len(learner) // self.plan.prefill_tp)
        wave_tokens = prefill.computed_tokens / (prefill.waves * replicas)
        profile = self.world.of_size(self.plan.prefill_tp)
        end_s = max(ready_s, weights_s) + prefill.waves * float(profile.prefill_s(wave_tokens))
        life.until(end_s, "prefill")
        self.lives.append(life)
        return end_s

    def _actors(self, weights_s: list[float], prefill_end_s: float) -> list[Actor]:
        """Decode actors with the times at which process, weights and KV are there."""
        placement, host_of = self.plan.placement, self.cluster.host_of
        hosts = [int(host_of[gpus[0]]) for gpus in placement.decode]
        kv_s = self._kv(hosts, prefill_end_s)
        learner = set(placement.learner)
        actors = []
        for index, (planned, gpus) in enumerate(zip(self.plan.actors, placement.decode, strict=True)):
            reserved = not planned.responses.size
            after_prefill = self.plan.prefill is not None and not learner.isdisjoint(gpus)
            free_s = prefill_end_s if after_prefill else min(0.0, self._free_s(gpus))
            life, ready_s = Life(function="decode", index=index, gpus=gpus, at_s=0.0), 0.0
            if not reserved:
                life, ready_s = self.starters[planned.tp].start("decode", gpus, index, needed_s=0.0, free_s=free_s)
            waits: list[tuple[float, Activity]] = [(ready_s, "start-up"), (weights_s[index], "wait-weights")]
            if self.plan.prefill is not None:
                waits.append((kv_s[index], "wait-kv"))
            engine = Engine(
                profile=self.world.of_size(planned.tp),
                prefill_timer=self.executor.timer(planned.tp),
                batch=self.batch,
                slots=planned.slots,
                prefix_caching=self.plan.prefix_caching,
                first_tokens=dict(zip(planned.responses.tolist(), planned.prefill_tokens.tolist(), strict=True)),
                slowdown=self.slowness[index],
            )
            target, generated = self.batch.target, self.batch.generated
            engine.submit(r for r in planned.responses.tolist() if generated[r] < target[r])
            start_s = max(time_s for time_s, _ in waits)
            actors.append(
                Actor(
                    index=index,
                    host=hosts[index],
                    engine=engine,
                    life=life,
                    start_s=start_s,
                    waits=() if reserved else tuple(waits),
                    state="reserved" if reserved else "working",
                )
            )
        return actors

    def _weights(self, owners: list[int], gathered_s: float, prefill_end_s: float) -> list[float]:
        """Arrival of the weights at each actor: a chain over the hosts, then one copy after the other inside each.

        A learner on several hosts has gathered its shards first. Actors on the GPUs of a replica of the prefill actor
        find its copy; without one, actor 0 uses the learner's where it shares the learner's GPUs. The first actor of
        any other host takes the copy that comes over the network.
        """
        size_bytes, placement = self.profile.data.weight_bytes, self.plan.placement
        hosts = [int(self.cluster.host_of[gpus[0]]) for gpus in placement.decode]
        reserved = [not actor.responses.size for actor in self.plan.actors]
        begin = [host for host, later in zip(hosts, reserved, strict=True) if not later]
        arrivals = self.links.broadcast(owners, begin, size_bytes, gathered_s)
        learner, served = set(placement.learner), set(owners)
        times = []
        for index, (host, gpus) in enumerate(zip(hosts, placement.decode, strict=True)):
            if reserved[index]:
                times.append(gathered_s)
                continue
            if self.plan.prefill is not None and learner.issuperset(gpus):
                times.append(prefill_end_s)
            elif host not in served or (index == 0 and self.plan.prefill is None and not learner.isdisjoint(gpus)):
                times.append(arrivals[host])
            else:
                times.append(self.links.send(host, host, size_bytes, arrivals[host]))
            served.add(host)
        return times

    def _kv(self, hosts: list[int], prefill_end_s: float) -> list[float]:
        """Arrival of the prompts' KV at each actor, the heaviest first; actor 0 finds it where it was computed.

        The learner's hosts have computed the prefixes of their own actors, and take turns for those of all others.
        """
        prefill = self.plan.prefill
        if prefill is None:
            return [0.0] * len(hosts)
        owners = self._owners()
        turns = cycle(owners)
        tokens = np.minimum(self.workload.prompt_tokens, prefill.prefix_tokens)
        shares = not set(self.plan.placement.decode[0]).isdisjoint(self.plan.placement.learner)
        times = []
        for index, (actor, host) in enumerate(zip(self.plan.actors, hosts, strict=True)):
            if (index == 0 and shares) or not actor.responses.size:
                times.append(prefill_end_s)
                continue
            prompts = np.unique(actor.responses // self.plan.responses_per_prompt)
            _, first = np.unique(prefill.prefix_of[prompts], return_index=True)
            size_bytes = float(tokens[prompts[first]].sum()) * self.profile.data.kv_bytes_per_token
            source = host if host in owners else next(turns)
            times.append(self.links.send(source, host, size_bytes, prefill_end_s))
        return times

    def _restart(self, actor: Actor, now_s: float) -> float:
        """A new process on a dead actor's GPUs, then the weights again; when it can work."""
        cold_start_s = actor.engine.profile.data.cold_start_s
        ready_s = now_s + (0.0 if self.plan.hosting != "serverless" else cold_start_s)
        self.restarts += 1
        index = len(self.plan.actors) + self.restarts - 1
        actor.life = Life(function="decode", index=index, gpus=actor.life.gpus, at_s=now_s)
        actor.life.until(ready_s, "start-up")
        source = int(self.cluster.host_of[self.plan.placement.learner[0]])
        weights_s = self.links.send(source, actor.host, self.profile.data.weight_bytes, ready_s)
        actor.life.until(weights_s, "wait-weights")
        return weights_s

    def _start(self, actor: Actor, now_s: float) -> float:
        """A reserve actor's process; when it is there."""
        planned, gpus = self.plan.actors[actor.index], actor.life.gpus
        starter = self.starters[planned.tp]
        actor.life, ready_s = starter.start_now("decode", gpus, actor.index, now_s=now_s, free_s=self._free_s(gpus))
        return ready_s

    def _load(self, actor: Actor, now_s: float) -> float:
        """The weights go from the learner to an actor that starts late; when they have arrived."""
        source = int(self.cluster.host_of[self.plan.placement.learner[0]])
        return self.links.send(source, actor.host, self.profile.data.weight_bytes, now_s)

    def _prepare(self, generated_s: float) -> float:
        """Reward, reference, critic: side by side, or in turn where they share GPUs."""
        tokens = self._tokens()
        end_s = generated_s
        for function, gpus in self.plan.placement.preparation:
            self.before_s[function] = 0.0
            free_s = self._free_s(gpus)
            life, ready_s = self.starter.start(function, gpus, 0, needed_s=max(generated_s, free_s), free_s=free_s)
            begin_s = max(ready_s, generated_s)
            life.until(begin_s, "start-up" if begin_s > generated_s else "early")
            seconds = self.world.training.preparation_s(function, self.profile, tokens, self.cluster.gpu, len(gpus))
            life.until(begin_s + seconds, "score")
            self.lives.append(life)
            end_s = max(end_s, begin_s + seconds)
        return end_s

    def _learn(self, generated_s: float, prepared_s: float) -> float:
        """The learner, after all preparation."""
        gpus = self.plan.placement.learner
        self.before_s["learner"] = generated_s
        free_s = self._free_s(gpus)
        life, ready_s = self.starter.start("learner", gpus, 0, needed_s=prepared_s, free_s=free_s)
        begin_s = max(ready_s, prepared_s)
        life.until(begin_s, "start-up")
        end_s = begin_s + self.world.training.learning_s(
            self.plan.algorithm, self.profile, self._tokens(), self.cluster.gpu, len(gpus)
        )
        life.until(end_s, "train")
        self.lives.append(life)
        return end_s

    def _tokens(self) -> float:
        """Tokens that preparation and learning read: each response that the step trains on, with its prompt."""
        prompts = np.repeat(self.batch.prompt_tokens, self.plan.responses_per_prompt)
        lengths = prompts + np.array(self.batch.target)
        return float(lengths.sum() if self.trained is None else lengths[self.trained].sum())

    def _report(self, generation: Generation, actors: list[Actor], ends_s: tuple[float, float, float]) -> StepReport:
        plan, prefill = self.plan, self.plan.prefill
        engines = [actor.engine for actor in actors]
        held = {gpu for gpus in (plan.placement.learner, *plan.placement.decode) for gpu in gpus}
        held.update(gpu for _, gpus in plan.placement.preparation for gpu in gpus)
        starts_s = (0.0, *ends_s[:2])
        names = ("generation", "preparation", "learning")
        return StepReport(
            schema=SCHEMA,
            policy=plan.policy,
            step=plan.step,
            epoch=plan.epoch,
            start_s=self.executor.now_s,
            prompt_ids=self.workload.prompt_ids,
            responses_per_prompt=plan.responses_per_prompt,
            tokens=ints(self.batch.generated),
            first_s=floats(self.batch.first_s),
            end_s=floats(generation.ledger.end_s),
            actor=ints(generation.actor_of),
            moves=ints(generation.moves),
            invocations=tuple(i for i in (life.invocation() for life in self.lives) if i is not None),
            phases=tuple(
                Phase(name=name, start_s=start_s, end_s=end_s)
                for name, start_s, end_s in zip(names, starts_s, ends_s, strict=True)
            ),
            reserved_gpus=0 if plan.hosting == "serverless" else len(held),
            counters=Counters(
                prefill_tokens=0 if prefill is None else prefill.computed_tokens,
                decode_prefill_tokens=sum(engine.prefilled_tokens for engine in engines),
                recomputed_tokens=sum(engine.recomputed_tokens for engine in engines),
                decoded_tokens=sum(engine.generated_tokens for engine in engines),
                preemptions=sum(engine.preemptions for engine in engines),
                cuts=generation.cuts,
                moves=sum(generation.moves),
                failures=generation.failures,
                moved_kv_bytes=generation.moved_kv_bytes,
            ),
        )
