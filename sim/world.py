"""The world that plans meet: true speeds, links, noise and faults. Deliberately not the planner's estimate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite

import numpy as np

from rlhfless.errors import InputError
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray
from rlhfless.types.cluster import Gpu
from rlhfless.types.outcome import Outcome
from rlhfless.types.profile import Profile, check_sizes
from rlhfless.types.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What preparation and learning cost: FLOPs at a stated utilisation (MFU) of the GPUs' peak, and fixed seconds.

    The two utilisations are medians over the 210 steps of a public verl run (Qwen2-7B, 8 GPUs, batch 1024 x 5):
    its log prints 0.244 for the update; 0.33 follows for a forward pass from update_actor / 3 against old_log_prob.
    That run has fixed seconds as well (`fitted` finds 16 of old_log_prob's 36 and 73 of update_actor's 141, and
    utilisations of 0.65 and 0.58 for the rest): they come with its micro-batches and offloading, and are no other
    set-up's, so none are taken by default.
    """

    train_mfu: float = 0.244
    """Share of peak FLOP/s that forward + backward reach."""
    forward_mfu: float = 0.33
    """Share that a forward pass alone reaches (log-probabilities, values, scores)."""
    forward_fixed_s: float = 0.0
    """Seconds of a forward pass over a step whatever its tokens: gathering sharded weights, fetching offloaded ones."""
    update_fixed_s: float = 0.0
    """The same of a model's update pass."""
    reward_scale: float = 1.0
    """Parameters of the reward model over the policy's (chosen: a reward model of the policy's size)."""
    critic_scale: float = 1.0
    """Parameters of the critic over the policy's (chosen, as the usual PPO set-up)."""

    def __post_init__(self) -> None:
        for name in ("train_mfu", "forward_mfu"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must lie in (0, 1]")
        for name in ("reward_scale", "critic_scale"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be above 0")
        for name in ("forward_fixed_s", "update_fixed_s"):
            if not (getattr(self, name) >= 0 and isfinite(getattr(self, name))):
                raise InputError(f"{name} is {getattr(self, name)}; it must be a finite number of seconds, at least 0")

    @classmethod
    def fitted(
        cls,
        parameters: float,
        tokens: FloatArray,
        forward_s: FloatArray,
        update_s: FloatArray,
        gpu: Gpu,
        gpus: int,
        *,
        fixed: bool = True,
    ) -> "Training":
        """The training whose passes took so long in a run's steps.

        Columns float[steps]: tokens that a step reads, seconds of a forward pass and of an update pass of the policy.
        With `fixed` seconds, never fewer than 0, by least squares of relative errors; without, by the median ratio.
        Raises InputError for passes that take no time, or less than the GPUs' peak allows.
        """
        peak_s = parameters * tokens / (gpu.flops * gpus)
        forward_mfu, forward_fixed_s = _utilisation(2 * peak_s, forward_s, fixed)
        train_mfu, update_fixed_s = _utilisation(6 * peak_s, update_s, fixed)
        return cls(
            forward_mfu=forward_mfu, train_mfu=train_mfu, forward_fixed_s=forward_fixed_s, update_fixed_s=update_fixed_s
        )

    def forward_s(self, parameters: float, tokens: float, gpu: Gpu, gpus: int) -> float:
        """Seconds of one forward pass, 2 FLOPs a parameter and token."""
        return 2 * parameters * tokens / (gpu.flops * gpus * self.forward_mfu) + self.forward_fixed_s

    def update_s(self, parameters: float, tokens: float, gpu: Gpu, gpus: int) -> float:
        """Seconds of one update pass, 6 FLOPs a parameter and token."""
        return 6 * parameters * tokens / (gpu.flops * gpus * self.train_mfu) + self.update_fixed_s

    def preparation_s(self, function: str, profile: Profile, tokens: float, gpu: Gpu, gpus: int) -> float:
        """Seconds of one preparation function over all tokens of the step, prompts included."""
        scale = {"reward": self.reward_scale, "reference": 1.0, "critic": self.critic_scale}[function]
        return self.forward_s(profile.data.parameters * scale, tokens, gpu, gpus)

    def learning_s(self, algorithm: str, profile: Profile, tokens: float, gpu: Gpu, gpus: int) -> float:
        """Seconds of the learner: old log-probabilities, then one update pass (6 FLOPs a parameter and token) of the
        policy and, for PPO, of the critic."""
        parameters = profile.data.parameters
        critic = algorithm == "ppo"
        trained = parameters * (1 + (self.critic_scale if critic else 0))
        seconds = self.forward_s(parameters, tokens, gpu, gpus) + self.update_s(trained, tokens, gpu, gpus)
        return seconds + (self.update_fixed_s if critic else 0.0)


def _utilisation(peak_s: FloatArray, seconds: FloatArray, fixed: bool) -> tuple[float, float]:
    """(share of the peak, fixed seconds) of passes that would take `peak_s` at it and nothing besides."""
    if not (seconds.size and seconds.min() > 0):
        raise InputError("training: every pass must have taken more than 0 seconds")
    factor, fixed_s = float(np.median(seconds / peak_s)), 0.0
    if fixed:
        columns = np.stack([peak_s, np.ones_like(peak_s)], axis=1) / seconds[:, None]
        line = np.linalg.lstsq(columns, np.ones(seconds.size), rcond=None)[0].tolist()
        factor, fixed_s = line if line[1] >= 0 else (factor, 0.0)
    if not factor >= 1:
        raise InputError(f"training: seconds grow {factor:.3g} times as fast with tokens as at the GPUs' peak")
    return 1 / factor, fixed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A decode actor that dies."""

    step: int
    """Step of the run."""
    actor: int
    """Its number in the plan; a number that the plan does not have is no failure."""
    time_s: float
    """Seconds after the step's start; after the actor's end nothing happens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Everything that happens as it will, whatever was planned."""

    profile: Profile
    """True latencies; those of training do not depend on the size of an actor."""
    outcome_of: Callable[[Workload], Outcome]
    """True lengths of a step."""
    training: Training = Training()
    """Preparation and learning."""
    link_efficiency: float = 0.8
    """Share of a link's rated bandwidth that transfers reach (chosen: NCCL's usual 80 %; planners assume 100 %)."""
    speed_noise: float = 0.0
    """Standard deviation of the log of each actor's slowness in each step; 0 for none."""
    failures: tuple[Failure, ...] = ()
    """Actors that die."""
    seed: int = 0
    """Seed of the noise."""
    profiles: Mapping[int, Profile] = field(default_factory=dict)
    """True latencies of actors of other sizes: tensor-parallel size to profile, of the same model on the same GPU."""

    begun_of: Callable[[Workload], IntArray] | None = None
    """int[prompts, n]: tokens that each response brings from earlier steps, at most its length, whose KV is to be
    computed again; None for none."""
    enough: Callable[[Workload, FloatArray], BoolArray | None] | None = None
    """Given a step and float[responses], when each has ended (0 in an earlier step, infinite not yet): those that it
    trains on, bool[responses]; generation then stops, and all others keep the tokens that they have. None: it goes on.
    Without it all must end. Asked whenever one ends."""

    def __post_init__(self) -> None:
        check_sizes({self.profile.data.tp: self.profile, **self.profiles})
        if not 0 < self.link_efficiency <= 1:
            raise InputError(f"link_efficiency is {self.link_efficiency}; it must lie in (0, 1]")
        if not 0 <= self.speed_noise < 1:
            raise InputError(f"speed_noise is {self.speed_noise}; it must lie in [0, 1)")

    def of_size(self, tp: int) -> Profile:
        """True latencies of an actor of `tp` GPUs. Raises InputError where there are none."""
        if tp == self.profile.data.tp:
            return self.profile
        if tp not in self.profiles:
            known = ", ".join(map(str, sorted({self.profile.data.tp, *self.profiles})))
            raise InputError(f"an actor of {tp} GPUs: this world has profiles of actors of {known}")
        return self.profiles[tp]
