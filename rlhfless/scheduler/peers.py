"""Other systems' ways to deal a step's prompts, as far as they fit one synchronous step of a plan (see `PEERS`).

All take `estimates` float[prompts] of expected response lengths in tokens, n, the number of actors, and the speed of
one; they keep a prompt's n responses together and admit the longest first, and leave no actor without a prompt. They
raise InfeasibleError for more actors than prompts, InputError for estimates that are not finite.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from heapq import heapify, heapreplace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from rlhfless.scheduler.assignment import Assignment, dealt
from rlhfless.scheduler.iteration import iteration_s
from rlhfless.types.arrays import FloatArray, IntArray, ints
from rlhfless.types.plan import Speed

TAIL_SHARE = 0.1
"""Prompts, the longest, that TailSieve's tail is taken to be (chosen)."""
LONG_SHARE = 0.2
"""Prompts, the longest, that StreamRL's long samples are taken to be (chosen; there a ranker model picks them)."""
BATCH_SLOWDOWN = 1.25
"""An iteration of the largest batch that Laminar's repack makes, over one of a single response (chosen)."""
ROUNDING = 1e-9
"""Relative difference of seconds that is rounding."""
HALVINGS = 60
"""Halvings of the interval in which a time limit is looked for: to the last bit of a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a peer's policy comes from."""

    paper: str
    """Its system and paper."""
    assumed: str
    """What had to be assumed or left out here."""
    gives_up: str | None = None
    """What of synchronous training the system gives up, where it does not train each step on all responses of that
    step's prompts, all drawn from the newest weights. What it gains is then not to be judged alone."""

    @property
    def synchronous(self) -> bool:
        """Whether nothing is given up."""
        return self.gives_up is None


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "rhymerl": Peer(
            paper="RhymeRL (arXiv 2508.18588), HistoPipe within a step",
            assumed="prompts ranked by the last epoch's lengths, in contiguous groups that are to take equal time, so "
            "that long ones get more actors; no complementary steps, no speculative decoding, no migration",
        ),
        "streamrl": Peer(
            paper="StreamRL (arXiv 2504.15930), skewness-aware dispatch",
            assumed="the longest fifth on actors of their own, as many as equal the times of both parts; length "
            "history in place of its ranker model; generation is not streamed into training",
        ),
        "tailsieve": Peer(
            paper="TailSieve, by name alone (its paper was not at hand)",
            assumed="the longest tenth on actors of their own, both parts in contiguous groups that are to "
            "take equal time",
        ),
        "laminar": Peer(
            paper="Laminar (arXiv 2510.12633), dynamic repack",
            assumed="shuffled prompts, repacked inside one synchronous step whenever a response ends; the bound on a "
            "batch is where an iteration takes a quarter longer than alone; trajectories do not outlive their step",
            gives_up="responses may be older than the newest weights",
        ),
        "seer": Peer(
            paper="Seer (arXiv 2511.14617), divided rollout with context-aware scheduling",
            assumed="one probe of each prompt first, then the prompts whose longest ended response is longest; what "
            "waits goes to open slots, what runs to the emptiest actor where it ends sooner, at the ends of others in "
            "place of its own chunks' borders; KV is sent or computed again, not pooled; no speculative decoding",
        ),
        "rollpacker": Peer(
            paper="RollPacker (arXiv 2509.21009), tail batching",
            assumed="a quarter more prompts and responses than wanted in short rounds, the first to end are kept; the "
            "other prompts wait, and fill a long round with all of their responses drawn anew; `dp` otherwise; neither "
            "its scheduling of rewards nor of training",
            gives_up="long responses are dropped in short rounds, and long prompts come later",
        ),
        "april": Peer(
            paper="APRIL (arXiv 2509.18521), active partial rollouts",
            assumed="more prompts than wanted are begun; once enough have all of their responses the rest stops, and "
            "goes on in the next step from the tokens that it has, whose KV is computed again; `dp` otherwise",
            gives_up="responses begin under older weights",
        ),
        "lpt": Peer(
            paper="longest processing time first (Graham 1969)",
            assumed="by expected tokens; an upper bound as oracle:lpt, with true mean lengths",
        ),
    }
)
"""Peers by the name of their policy; those of rollpacker and april, which change what a step trains on, are loops over
steps in `experiments.rounds`."""


def batch_limit(speed: Speed) -> int:
    """The most responses that repack puts on one actor: BATCH_SLOWDOWN slower than one alone."""
    batch = np.arange(1, int(speed.batch[-1]) + 1)
    seconds = iteration_s(speed, batch.astype(np.float64))
    return int(batch[seconds <= BATCH_SLOWDOWN * seconds[0]][-1])


def time_balanced(estimates: npt.ArrayLike, n: int, actors: int, speed: Speed) -> Assignment:
    """Contiguous groups of the ranked prompts, each ending by the same time limit, the least for which they suffice."""
    ranked, lengths = _ranked(estimates, n, actors)
    return _shares(ranked, _balanced_sizes(lengths, n, actors, speed), n)


def skew_split(estimates: npt.ArrayLike, n: int, actors: int, speed: Speed) -> Assignment:
    """The longest LONG_SHARE of the prompts dealt to actors of their own, the rest to the others."""
    return _two_parts(estimates, n, actors, speed, LONG_SHARE, lambda part, n, count, _: dealt(part, n, count))


def tail_isolated(estimates: npt.ArrayLike, n: int, actors: int, speed: Speed) -> Assignment:
    """The longest TAIL_SHARE of the prompts on actors of their own; both parts in groups of equal time."""
    return _two_parts(estimates, n, actors, speed, TAIL_SHARE, time_balanced)


def longest_first(estimates: npt.ArrayLike, n: int, actors: int, speed: Speed) -> Assignment:
    """Each prompt, longest first, to the actor with the fewest expected tokens so far (ties: the lowest index)."""
    ranked, lengths = _ranked(estimates, n, actors)
    heap = [(0.0, actor) for actor in range(actors)]
    heapify(heap)
    of = np.empty(ranked.size, dtype=np.int64)
    for place, tokens in enumerate(lengths.tolist()):
        load, of[place] = heap[0]
        heapreplace(heap, (load + max(tokens, 1.0), int(of[place])))
    return tuple(_responses(ranked[of == actor], n) for actor in range(actors))


def probes_first(estimates: npt.ArrayLike, n: int, actors: int, speed: Speed) -> Assignment:
    """Prompts in their order, in turn; each actor admits the first response of all of its prompts, then the rest."""
    ranked, _ = _ranked(estimates, n, actors)
    dealt_out = (np.arange(actor, ranked.size, actors) for actor in range(actors))
    return tuple(
        ints(np.concatenate([prompts * n, (prompts[:, None] * n + np.arange(1, n)).ravel()])) for prompts in dealt_out
    )


ASSIGNMENTS: Mapping[str, Callable[[npt.ArrayLike, int, int, Speed], Assignment]] = MappingProxyType(
    {
        "time-balanced": time_balanced,
        "skew-split": skew_split,
        "tail-isolated": tail_isolated,
        "longest-first": longest_first,
        "probes-first": probes_first,
    }
)
"""Rules by the name under which a policy has them."""


def _two_parts(
    estimates: npt.ArrayLike,
    n: int,
    actors: int,
    speed: Speed,
    share: float,
    deal: Callable[[npt.ArrayLike, int, int, Speed], Assignment],
) -> Assignment:
    """The longest `share` of prompts on so many actors that the slower of the two parts is as quick as can be."""
    ranked, lengths = _ranked(estimates, n, actors)
    cut = max(int(np.ceil(share * ranked.size)), 1)
    if actors == 1:
        return deal(estimates, n, 1, speed)
    best: tuple[float, Assignment] = (np.inf, ())
    for own in range(max(1, actors - (ranked.size - cut)), min(actors - 1, cut) + 1):
        parts = ((lengths[:cut], ranked[:cut], own), (lengths[cut:], ranked[cut:], actors - own))
        slowest_s, shares = 0.0, []
        for part, prompts, count in parts:
            for local in deal(part, n, count, speed):
                each_s = iteration_s(speed, np.array([float(local.size)]))[0]
                slowest_s = max(slowest_s, float(part[local // n].max() * each_s))
                shares.append(_responses(prompts[local[::n] // n], n))
        if slowest_s < best[0]:
            best = (slowest_s, tuple(shares))
    return best[1]


def _balanced_sizes(lengths: FloatArray, n: int, actors: int, speed: Speed) -> IntArray:
    """Sizes of groups that all end by the least time limit for which `actors` suffice; none is left empty."""
    batches = n * np.arange(1, lengths.size + 1, dtype=np.float64)
    turn_s = iteration_s(speed, batches)
    low, high = 0.0, float(lengths[0] * turn_s[-1]) * (1 + ROUNDING)  # one group holds all
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if len(_greedy(lengths, turn_s, middle, actors)) > actors:
            low = middle
        else:
            high = middle
    sizes = _greedy(lengths, turn_s, high, actors)
    while len(sizes) < actors:  # the largest group gives half away: that makes no group slower
        largest = int(np.argmax(sizes))
        sizes[largest : largest + 1] = [sizes[largest] - sizes[largest] // 2, sizes[largest] // 2]
    return ints(sizes)


def _greedy(lengths: FloatArray, turn_s: FloatArray, limit_s: float, actors: int) -> list[int]:
    """As many prompts to each group, longest first, as end by the limit, at least one; gives up beyond `actors`."""
    sizes: list[int] = []
    at = 0
    while at < lengths.size and len(sizes) <= actors:
        fits = int(np.searchsorted(turn_s, limit_s / lengths[at], side="right"))
        sizes.append(min(max(fits, 1), lengths.size - at))
        at += sizes[-1]
    return sizes


def _ranked(estimates: npt.ArrayLike, n: int, actors: int) -> tuple[IntArray, FloatArray]:
    """Prompts by falling estimate, and their estimates; checks the arguments as the other assignments do."""
    keys = np.asarray(estimates, dtype=np.float64)
    dealt(keys, n, actors)
    ranked = np.argsort(-keys, kind="stable")
    return ranked, np.maximum(keys[ranked], 1.0)


def _shares(ranked: IntArray, sizes: IntArray, n: int) -> Assignment:
    last = np.cumsum(sizes)
    return tuple(
        _responses(ranked[end - size : end], n) for end, size in zip(last.tolist(), sizes.tolist(), strict=True)
    )


def _responses(prompts: IntArray, n: int) -> IntArray:
    return ints((prompts[:, None] * n + np.arange(n)).ravel())
