"""From measured times of iterations to a profile's tables, and how good they are."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backends.bench import Grid, Point
from rlhfless.types.arrays import FloatArray
from rlhfless.types.profile import Profile
from rlhfless.units import MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """seconds of a decode iteration = a_s + b_s * batch + c_s * batch * context."""

    a_s: float
    """What every iteration costs."""
    b_s: float
    """What a response adds."""
    c_s: float
    """What a token of context adds."""
    mean_error: float
    """Share by which it misses the points that it was fitted to, on average."""
    p90_error: float
    """The same for the 90th percentile."""

    def __call__(self, batch: float, context: float) -> float:
        return self.a_s + self.b_s * batch + self.c_s * batch * context

    def __str__(self) -> str:
        return (
            f"t = {self.a_s / MS:.3f} ms + {self.b_s / MS:.4f} ms x batch + {self.c_s / MS * 1e3:.4f} us x batch x "
            f"context (mean error {self.mean_error:.1%}, 90th percentile {self.p90_error:.1%})"
        )


def fit(best_s: dict[Point, float]) -> Fit:
    """Least squares of the relative errors over decode points."""
    batch, context = np.array(list(best_s), dtype=np.float64).T
    seconds = np.array(list(best_s.values()))
    terms = np.stack([np.ones_like(batch), batch, batch * context], axis=1) / seconds[:, None]
    (a_s, b_s, c_s), *_ = np.linalg.lstsq(terms, np.ones_like(seconds), rcond=None)
    error = np.abs(terms @ (a_s, b_s, c_s) - 1)
    return Fit(
        a_s=float(a_s),
        b_s=float(b_s),
        c_s=float(c_s),
        mean_error=float(error.mean()),
        p90_error=float(np.quantile(error, 0.9)),
    )


def rising(values: FloatArray) -> tuple[FloatArray, int, float]:
    """A running maximum along every axis, since a Profile must not fall; entries it raised, and the largest share."""
    result = values
    for axis in range(values.ndim):
        result = np.maximum.accumulate(result, axis=axis)
    return result, int(np.count_nonzero(result > values)), float(np.max(result / values) - 1)


def tables(grid: Grid, best_s: dict[Point, float]) -> tuple[FloatArray, FloatArray, tuple[str, ...], Fit]:
    """decode_s[B, C], prefill_s[P], what was done to them, and the fit.

    Decode points without a time, whose KV does not fit the engine, are taken from the fit: no run gets there.
    """
    line = fit({(b, c): best_s[b, c] for b in grid.batches for c in grid.contexts if (b, c) in best_s})
    decode = np.array([[best_s.get((b, c), line(b, c)) for c in grid.contexts] for b in grid.batches])
    prefill = np.array([best_s[0, tokens] for tokens in grid.prefills])
    notes = []
    missing = sum((b, c) not in best_s for b in grid.batches for c in grid.contexts)
    if missing:
        notes.append(f"{missing} of {decode.size} decode points exceed the engine's KV cache and are from the fit.")
    rounded = []
    for name, values in (("decode", decode), ("prefill", prefill)):
        raised, count, share = rising(values)
        rounded.append(np.round(raised, 9))
        if count:
            notes.append(
                f"{count} of {values.size} {name} points were raised to the one before, by {share:.1%} at most."
            )
    return rounded[0], rounded[1], tuple(notes), line


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A profile and how good it is."""

    profile: Profile
    """What was measured."""
    fit: Fit
    """Its decode grid in one line."""
    held_out: dict[Point, float]
    """Seconds of decode iterations at points that are not in the grid."""

    def table(self) -> Iterator[str]:
        """Lines: the held-out points, and what grid and fit say of them."""
        yield f"{'batch':>6} {'context':>8} {'measured':>10} {'grid':>10} {'error':>7} {'fit':>10} {'error':>7}"
        grid_errors, fit_errors = [], []
        for (batch, context), real_s in self.held_out.items():
            grid_s, fit_s = float(self.profile.decode_iteration_s(batch, context)), self.fit(batch, context)
            grid_errors.append(grid_s / real_s - 1)
            fit_errors.append(fit_s / real_s - 1)
            yield (
                f"{batch:6} {context:8} {real_s / MS:7.2f} ms {grid_s / MS:7.2f} ms {grid_errors[-1]:+7.1%} "
                f"{fit_s / MS:7.2f} ms {fit_errors[-1]:+7.1%}"
            )
        if grid_errors:
            means = (statistics.fmean(map(abs, each)) for each in (grid_errors, fit_errors))
            yield "mean error of the held-out points: grid {:.1%}, fit {:.1%}".format(*means)
