"""Plan: everything that an executor needs to carry out one training step, decided before the step starts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlhfless.errors import PlanError
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray
from rlhfless.types.codec import from_json, to_json
from rlhfless.types.workload import Algorithm

SCHEMA = 3

Hosting = Literal["serverless", "colocated", "split"]
"""serverless: each function holds GPUs only while it lives. colocated: all functions share GPUs that are reserved for
the whole run. split: learner with preparation, and the decode actors, reserve GPUs of their own."""

Start = Literal["cold", "prewarmed", "warm"]
"""cold: a function is asked for when its inputs are ready. prewarmed: asked for ahead, by `Prewarm`. warm: prewarmed,
and a process that has run on the same GPUs in an earlier step is woken instead of started anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """The prefixes that the prefill actor computes once for all decode actors (RLHFless §4.2)."""

    prefix_tokens: int
    """L: prompt tokens, counted from the first, whose KV the prefill actor computes; shorter prompts count whole."""
    distinct: int
    """D(L): distinct prefixes of that length."""
    prefix_of: IntArray
    """int[prompts]: number of each prompt's prefix, in 0..distinct - 1."""
    waves: int
    """Batches in which the prefill actor works, ceil(D / capacity)."""
    computed_tokens: int
    """Prompt tokens computed: each position of each distinct prefix once, headers shared by prefixes included once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeActor:
    """One replica of the policy that decodes a share of the responses."""

    responses: IntArray
    """int[assigned]: response numbers (prompt * n + sample) in the order in which they are admitted; none for an
    actor in reserve (`ElasticTerms.reserve`)."""
    prefill_tokens: IntArray
    """int[assigned]: prompt tokens that the actor computes itself when it first admits each of them: what neither the
    prefill actor has delivered nor its own prefix cache holds from those before."""
    slots: int
    """Responses that it runs at once."""
    tp: int
    """GPUs that it runs on: its tensor-parallel size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which GPUs each function runs on."""

    learner: tuple[int, ...]
    """GPUs of the learner, and of the prefill actor, which shares them (RLHFless §4.5)."""
    decode: tuple[tuple[int, ...], ...]
    """GPUs of each decode actor, aligned with `Plan.actors`."""
    preparation: tuple[tuple[str, tuple[int, ...]], ...]
    """(function, GPUs) of each preparation function: reward, reference, critic. Those that share GPUs take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How quickly decode actors of one size work, as far as a mid-step rule must know."""

    gpus: int
    """GPUs of such an actor."""
    batch: IntArray
    """int[points]: responses that run, ascending from 1 to the most that slots and KV let run at once."""
    iteration_s: FloatArray
    """float[points]: seconds of one decode iteration at the step's mean context; beyond the last, responses take
    turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTerms:
    """What the rules `elastic` and `seer` weigh."""

    speeds: tuple[Speed, ...]
    """One for each size of decode actor."""
    speed_of: IntArray
    """int[actors]: row of `speeds` for each actor of the plan."""
    move_s_per_token: float
    """Seconds for a token of context when a response changes actor: its KV is sent or computed again."""
    reserve: IntArray
    """int[reserves]: actors of the plan, ascending, without responses, which start only when the rule asks for them."""
    start_s: float
    """Seconds from asking for a reserve actor until it can take responses, weights included; 0 without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSpec:
    """The mid-step rule by name; `rlhfless.scheduler.migration.rule` makes it decide."""

    kind: str
    """cut-and-migrate, global-cut, repack, elastic or seer."""
    value: float
    """Its parameter: tau; the remaining responses at which the cut falls; responses that an actor is filled up to; the
    GPU-seconds that a second is worth; responses of a prompt."""
    terms: ElasticTerms | None = None
    """What elastic and seer weigh; None for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prewarm:
    """When to ask for a function, ahead of its work (RLHFless §5)."""

    function: str
    """prefill, decode, reward, reference, critic or learner."""
    ready_after_s: float
    """Seconds after the start of the phase before its own at which it should have started up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTable:
    """Every number of decode actors that was considered, and why one was chosen (RLHFless §4.4)."""

    actors: IntArray
    """int[candidates]: N, ascending."""
    time_s: FloatArray
    """float[candidates]: T(N), seconds of the slowest actor."""
    cost_gpu_s: FloatArray
    """float[candidates]: C(N) at a price of 1, the GPU-seconds of all actors, those for starting them included."""
    time_norm: FloatArray
    """float[candidates]: T(N), min-max normalised over the candidates; 0 where all tie."""
    cost_norm: FloatArray
    """float[candidates]: C(N), likewise."""
    score: FloatArray
    """float[candidates]: lambda * time_norm + (1 - lambda) * cost_norm."""
    hiding_slack_s: FloatArray
    """float[candidates]: least slack of the hiding condition (§4.5) over actors 2..N; 0 for a single actor."""
    eligible: BoolArray
    """bool[candidates]: whether transfers are hidden, slack at least 0."""
    chosen: int
    """Row of the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierTable:
    """Plans none of which is both faster and cheaper than another, and why one was chosen."""

    time_s: FloatArray
    """float[points]: generation time, ascending."""
    cost_gpu_s: FloatArray
    """float[points]: GPU-seconds that generation holds, falling."""
    gpus: IntArray
    """int[points]: GPUs of the decode actors."""
    actors: IntArray
    """int[points]: decode actors."""
    goal: str
    """What was asked for: knee, weight, deadline_s or budget_gpu_s, with its value."""
    chosen: int
    """Row of the choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """What the planner believes the step's generation will take; columns are 0 for an actor in reserve."""

    prefill_s: float
    """End of prefill: weights at all its replicas, then its work; 0 without a prefill actor."""
    ready_s: FloatArray
    """float[actors]: when the weights have arrived and a process that must start anew has started."""
    kv_s: FloatArray
    """float[actors]: transfer of the prompts' KV, after prefill."""
    decode_s: FloatArray
    """float[actors]: work of each decode actor, its own prefill included."""
    generation_s: float
    """From the step's start to the last response."""
    decode_gpu_s: float
    """GPU-seconds of the decode actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step, whole. `check` holds for every plan that a planner returns."""

    schema: int
    """Version of this layout."""
    policy: str
    """Name of the policy that made it."""
    step: int
    """Number of the step in the run."""
    epoch: int
    """Pass over the data set."""
    algorithm: Algorithm
    """ppo or grpo."""
    prompts: int
    """Prompts in the step."""
    responses_per_prompt: int
    """n."""
    prefill_tp: int
    """GPUs of one replica of the prefill actor."""
    cluster_gpus: int
    """GPUs of the cluster that it was made for."""
    hosting: Hosting
    """How GPUs are held."""
    start: Start
    """How functions start."""
    prewarm: tuple[Prewarm, ...]
    """Asking ahead; empty for cold starts and reserved hosting."""
    prefix_caching: bool
    """Whether a decode actor keeps the KV of prompts that it has seen in this step."""
    prefill: PrefillPlan | None
    """Shared prefixes computed by the prefill actor; None where each decode actor prefills its own prompts."""
    actors: tuple[DecodeActor, ...]
    """Decode actors; where prompts are assigned by expected length, the one with the longest work first."""
    placement: Placement
    """GPUs of every function."""
    migration: MigrationSpec | None
    """Mid-step rule."""
    estimate: PlanEstimate
    """What the planner expects."""
    candidates: CandidateTable | None
    """How N was chosen; None where the policy fixes it, or chooses more than N."""
    frontier: FrontierTable | None
    """How groups, their number and the size of each actor were chosen together; None where they are not."""
    notes: tuple[str, ...]
    """What the reader of a result must know: transfers that are not hidden, GPUs that are left unused."""

    @property
    def responses(self) -> int:
        """Responses of the step."""
        return self.prompts * self.responses_per_prompt

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes of its decode actors, each once, ascending."""
        return tuple(sorted({actor.tp for actor in self.actors}))

    def check(self) -> None:
        """Raise PlanError, naming the law that is broken, unless the plan can be carried out as it stands."""

        def require(holds: object, what: str) -> None:
            if not holds:
                raise PlanError(f"plan of step {self.step} ({self.policy}): {what}")

        require(self.actors, "no decode actors")
        seen = np.concatenate([actor.responses for actor in self.actors])
        inside = seen.size == 0 or (seen.min() >= 0 and seen.max() < self.responses)
        require(inside, f"a response number outside 0..{self.responses - 1}")
        counts = np.bincount(seen, minlength=self.responses)
        missing, doubled = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
        require(missing.size == 0, f"response {missing[:1].tolist()} is decoded by no actor ({missing.size} in all)")
        require(doubled.size == 0, f"response {doubled[:1].tolist()} is decoded twice ({doubled.size} in all)")
        require(all(actor.slots >= 1 for actor in self.actors), "an actor without slots")
        for actor in self.actors:
            aligned = actor.prefill_tokens.shape == actor.responses.shape
            require(aligned and (actor.prefill_tokens >= 0).all(), "prefill_tokens does not match an actor's responses")
        terms = self.migration.terms if self.migration is not None else None
        reserve = set() if terms is None else set(terms.reserve.tolist())
        idle = {index for index, actor in enumerate(self.actors) if not actor.responses.size}
        require(idle <= reserve, "an actor without responses")
        require(reserve <= idle, "a reserve actor that does not exist, or has responses")
        placement = self.placement
        require(len(placement.decode) == len(self.actors), "placement and actors differ in number")
        for actor, held in zip(self.actors, placement.decode, strict=True):
            require(actor.tp >= 1 and len(held) == actor.tp, f"an actor of {actor.tp} GPUs is placed on {len(held)}")
        require(self.prefill_tp >= 1, "a prefill actor without GPUs")
        for name, gpus in (("decode actors", _flat(placement.decode)), ("learner", list(placement.learner))):
            require(len(set(gpus)) == len(gpus), f"{name}: a GPU is given twice")
        used = _flat([*placement.decode, placement.learner, *(gpus for _, gpus in placement.preparation)])
        require(min(used) >= 0 and max(used) < self.cluster_gpus, f"a GPU outside 0..{self.cluster_gpus - 1}")
        require(placement.learner, "a learner without GPUs")
        require(all(gpus for _, gpus in placement.preparation), "a preparation function without GPUs")
        require(terms is None or terms.speed_of.shape == (len(self.actors),), "speed_of does not name every actor")
        prefill = self.prefill
        if prefill is not None:
            require(prefill.prefix_of.shape == (self.prompts,), "prefix_of does not cover the prompts")
            distinct = np.unique(prefill.prefix_of)
            require(distinct.size == prefill.distinct and distinct[-1] == prefill.distinct - 1, "prefixes miscounted")
            require(prefill.waves >= 1 and prefill.prefix_tokens >= 1, "prefill without waves or tokens")

    def to_json(self) -> str:
        """The plan as canonical JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "plan") -> "Plan":
        """Read what `to_json` wrote and check it. Raises SchemaError or PlanError."""
        plan = from_json(text, cls, SCHEMA, where)
        plan.check()
        return plan


def _flat(groups: Iterable[tuple[int, ...]]) -> list[int]:
    return [gpu for group in groups for gpu in group]
