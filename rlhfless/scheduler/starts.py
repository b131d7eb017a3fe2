"""What a run's steps teach of starts: whose processes are kept, and how much time there is to start one ahead."""

from collections.abc import Mapping

import numpy as np

from rlhfless.errors import InputError
from rlhfless.scheduler import placement
from rlhfless.scheduler.learned import Learned
from rlhfless.types.arrays import BoolArray, FloatArray, IntArray, ints
from rlhfless.types.plan import Hosting, Start
from rlhfless.types.profile import COLD_START_GPU_SHARE, Profile
from rlhfless.types.report import StepReport

PREWARM_BUFFER_S = 0.5
"""Added to the shortest past phase when functions are asked for ahead (RLHFless §5 has a fixed buffer, size chosen)."""

Kept = Mapping[int, BoolArray]
"""Size -> bool[GPUs]: first GPUs of actors of that size whose process is kept."""


class Starts:
    """Processes that are kept from earlier steps, and the shortest of the phases during which others can start."""

    def __init__(self, hosting: Hosting, start: Start, gpus: int) -> None:
        """`gpus`: those of the cluster."""
        self._serverless, self._warm = hosting == "serverless", start == "warm"
        self._gpus = gpus
        self._kept: dict[int, BoolArray] = {}
        self._equal: dict[int, BoolArray] = {}
        self.prefilled = False
        """Whether a prefill actor's process is kept."""
        self.shortest_s: dict[str, float] = {}
        """Phase -> its shortest in any step."""

    @property
    def kept(self) -> Kept:
        """Of the actors that ran."""
        return self._kept

    @property
    def equal(self) -> Kept:
        """Of those that would have run under the paper's rule."""
        return self._equal

    @property
    def waking(self) -> bool:
        """Whether a process that has been started is woken in later steps."""
        return self._serverless and self._warm

    def observe(self, report: StepReport) -> None:
        """Learn from a step that has been carried out."""
        for one in report.invocations:
            self.prefilled |= one.function == "prefill"
            if one.function == "decode":
                self._keep(self._kept, len(one.gpus), one.gpus[0])
        for phase in report.phases:
            shortest_s = self.shortest_s.get(phase.name, np.inf)
            self.shortest_s[phase.name] = min(report.execution_s(phase.name), shortest_s)

    def relearn(self, learned: Learned) -> None:
        """Go on from what another's had learned. Raises InputError for GPUs that this cluster does not have."""
        most = max(
            (int(gpus.max(initial=-1)) for each in (learned.kept, learned.equal) for gpus in each.values()), default=-1
        )
        if most >= self._gpus:
            raise InputError(f"what was learned is of a cluster with a GPU {most}, this one has {self._gpus}")
        self.shortest_s = dict(learned.shortest_s)
        self._kept, self._equal, self.prefilled = {}, {}, learned.prefilled
        for known, found in ((self._kept, learned.kept), (self._equal, learned.equal)):
            for tp, first in found.items():
                self._keep(known, int(tp), first)

    def keep_equal(self, tp: int, first: IntArray) -> None:
        """The paper's rule would have run actors of a size on these first GPUs."""
        self._keep(self._equal, tp, first)

    def _keep(self, kept: dict[int, BoolArray], tp: int, first: int | IntArray) -> None:
        kept.setdefault(tp, np.zeros(self._gpus, dtype=np.bool_))[first] = True

    def prefill_late_s(self, profile: Profile) -> float:
        """Seconds by which prefill ends later because its process starts anew while others are woken."""
        new = self._warm and self._kept and not self.prefilled
        return COLD_START_GPU_SHARE * profile.data.cold_start_s if new else 0.0

    def decode_s(
        self, profile: Profile, at: placement.Positions, ways: placement.Routes, learner: IntArray, kept_of: Kept
    ) -> tuple[FloatArray, FloatArray]:
        """float[positions] each: seconds that starting a process takes; how much later than the others it is ready.

        Processes start during learning, whose shortest past is all that can be counted on; only one that must start
        anew while others are woken comes later than they do. The run's first step finds all of them asleep.
        """
        data, first = profile.data, at.gpus[:, 0]
        kept = kept_of[data.tp][first] if data.tp in kept_of else np.zeros(first.size, dtype=np.bool_)
        if not self._serverless:
            return np.zeros(kept.size), np.zeros(kept.size)
        if not self._warm or not kept_of:
            each_s = data.warm_start_s if self._warm else data.cold_start_s
            return np.full(kept.size, each_s), np.zeros(kept.size)
        ahead_s = self.shortest_s.get("learning", np.inf) + PREWARM_BUFFER_S
        late_s = max(data.cold_start_s - max(ahead_s, data.warm_start_s), 0.0)
        beside = np.isin(first, learner)  # where the learner, then the prefill actor, runs
        blocked_s = np.where(beside, ways.prefill_s + COLD_START_GPU_SHARE * data.cold_start_s, 0.0)
        new_s = np.maximum(late_s, blocked_s)
        return np.where(kept, data.warm_start_s, data.cold_start_s), np.where(kept, 0.0, new_s)


def first_gpus(kept: Kept) -> dict[str, IntArray]:
    """Size -> int[]: first GPUs of actors of that size whose process is kept, ascending."""
    return {str(tp): ints(np.flatnonzero(gpus)) for tp, gpus in sorted(kept.items())}
