"""When RLHFuse's global cut falls: the number of responses left at which gathering them promises most.

RLHFuse (arXiv 2409.13221, §4) searches its threshold by running the lengths that earlier steps had through a simulator
of generation, for the least time of generation and preparation together: GPUs that the cut frees begin preparation
while the last responses run on. Here no preparation begins before generation has ended; what is freed is released, and
lowers the cost. What we had to assume: a cut is then worth its time multiplied by its GPU-seconds of decoding, so that
a hundredth more of one must save a hundredth of the other. (By time alone nearly nothing would be cut. Measured over 5
seeds on GSM8K with 3 actors, against a cut at a fifth: by time alone decoding costs 11 to 16 % more and generation
takes 1 % less; by time with preparation on freed GPUs 2 to 5 % more and 0.1 to 0.3 % less; by the product 0.1 to 3 %
less and 0.3 to 0.7 % more. The product is the best of them for a baseline whose cost is compared.)
"""

import numpy as np

from rlhfless.scheduler.width import Course
from rlhfless.types.arrays import FloatArray, IntArray
from rlhfless.types.profile import Profile

SHARES = np.arange(1, 13) / 20
"""Shares of the step's responses that may be left (chosen: beyond three fifths, hardly any actor is freed)."""


def remaining(
    profile: Profile, drawn: FloatArray, prompt_tokens: IntArray, actors: int, move_s_per_token: float
) -> int:
    """Responses left at which a global cut of `actors` even actors promises the least time x GPU-seconds.

    `drawn`: float[prompts, n] lengths, with the spread that earlier steps had. `move_s_per_token`: of context, for
    responses that change actor, one after the other. Ties go to the later cut.
    """
    left, course = np.ceil(SHARES * drawn.size).astype(np.int64), Course.of(drawn, prompt_tokens)
    most = min(profile.data.max_slots, -(-drawn.size // actors))  # an actor has no more slots than it needs at first
    time_s, decode_gpu_s = predicted(profile, course, actors, most, left, move_s_per_token)
    return int(left[(time_s * decode_gpu_s).argmin()])


def predicted(
    profile: Profile, course: Course, actors: int, slots: int, left: IntArray, move_s_per_token: float
) -> tuple[FloatArray, FloatArray]:
    """float[cuts] each: seconds and GPU-seconds of decoding where the cut falls at `left` responses, int[cuts].

    As many actors stay as the rule keeps: those whose slots and KV hold what is left.
    """
    data, running = profile.data, course.running
    at = (running > left[:, None]).sum(axis=1)  # the stretch at whose start the cut falls; in the last, one runs
    need = np.maximum(running[at] / slots, running[at] * course.footprint[at] / data.kv_capacity_tokens)
    stay = np.clip(np.ceil(need).astype(np.int64), 1, actors)
    moved = running[at] * (actors - stay) / actors
    moving_s = moved * course.context[at] * move_s_per_token
    after = np.arange(running.size) >= at[:, None]
    number = np.where(after, stay[:, None], actors)
    seconds = course.seconds(profile, number)
    time_s = seconds.sum(axis=1) + moving_s
    return time_s, data.tp * ((seconds * number).sum(axis=1) + stay * moving_s)
