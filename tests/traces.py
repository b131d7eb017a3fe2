"""Traces, made by hand and at random."""

import numpy as np
from hypothesis import strategies as st

from traces.format import Trace, TraceInfo


def info(n: int = 2, **changes: object) -> TraceInfo:
    values = {
        "model": "m",
        "dataset": "d",
        "tokenizer": "t",
        "algorithm": "grpo",
        "responses_per_prompt": n,
        "max_prompt_tokens": 100,
        "max_response_tokens": 1000,
        "source": "a test",
    }
    return TraceInfo(**(values | changes))


def small(**changes: object) -> Trace:
    """Two epochs of two steps of one prompt each, n = 2."""
    values = {
        "info": info(),
        "prompt_ids": np.array(["a", "b"]),
        "prompt_tokens": np.array([3, 4]),
        "epoch": np.repeat([0, 1], 4),
        "step": np.repeat([0, 1, 2, 3], 2),
        "prompt": np.array([0, 0, 1, 1, 1, 1, 0, 0]),
        "sample": np.tile([0, 1], 4),
        "response_tokens": np.array([10, 20, 30, 40, 50, 60, 70, 80]),
        "truncated": np.zeros(8, dtype=bool),
    }
    return Trace(**(values | changes))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    n = draw(st.integers(1, 3))
    text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=5)
    ids = draw(st.lists(text, min_size=1, max_size=4, unique=True))
    blocks = [(e, s, p) for e in range(draw(st.integers(1, 2))) for s in range(2) for p in range(len(ids))]
    blocks = draw(st.permutations(blocks))
    rows = len(blocks) * n
    tokens = draw(st.lists(st.integers(1, 5), min_size=len(ids), max_size=len(ids)))

    def some(values: st.SearchStrategy) -> object:
        column = st.lists(values, min_size=rows, max_size=rows)
        return draw(st.none() | column.map(np.array))

    start = some(st.floats(-1e9, 1e9))
    reference = draw(st.none() | st.lists(st.integers(0, 9), min_size=len(ids), max_size=len(ids)))
    token_ids = tuple(np.array(draw(st.lists(st.integers(0, 2**40), min_size=t, max_size=t))) for t in tokens)
    lengths = np.array(draw(st.lists(st.integers(1, 1000) | st.just(1000), min_size=rows, max_size=rows)))
    ended = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    return Trace(
        info=info(n, seed=draw(st.none() | st.integers(0, 9)), source=draw(st.text(max_size=5))),
        prompt_ids=np.array(ids),
        prompt_tokens=np.array(tokens),
        reference_tokens=None if reference is None else np.array(reference),
        prompt_token_ids=token_ids if draw(st.booleans()) else None,
        epoch=np.repeat([e for e, _, _ in blocks], n),
        step=np.repeat([s for _, s, _ in blocks], n),
        prompt=np.repeat([p for _, _, p in blocks], n),
        sample=np.tile(np.arange(n), len(blocks)),
        response_tokens=lengths,
        truncated=ended & (lengths == 1000),
        reward=some(st.floats(allow_infinity=False)),
        start_s=start,
        end_s=None if start is None else start + 1,
        actor=some(st.integers(-1, 3)),
    )
