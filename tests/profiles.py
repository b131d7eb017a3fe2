"""Profiles for tests: a small one of chosen numbers, and the fields of a shipped one."""

import json
from typing import Any

import numpy as np

from rlhfless.types.arrays import floats, ints
from rlhfless.types.profile import SCHEMA, Profile, ProfileData
from sim.profiles import load


def tiny_profile(
    *, kv_capacity_tokens: int = 4000, max_slots: int = 16, tp: int = 1, gpu: str = "l40s", **fields: object
) -> Profile:
    """A profile with a bent grid: latency is nonlinear in batch and context, so closed forms cross knots."""
    batch = np.array([1, 2, 4, 8, 16, 32])
    context = np.array([16, 64, 128, 512, 4096])
    base = 0.010 + 0.0007 * batch[:, None] ** 1.2 + 1.5e-6 * batch[:, None] * context[None, :] ** 1.05
    tokens = np.array([1, 16, 64, 256, 1024])
    data: dict[str, object] = {
        "schema": SCHEMA,
        "name": "tiny",
        "model": "tiny",
        "gpu": gpu,
        "tp": tp,
        "kind": "measured",
        "origin": "chosen for tests",
        "licence": "Apache-2.0",
        "notes": (),
        "parameters": 1e9,
        "weight_bytes": 2e9,
        "kv_bytes_per_token": 1e5,
        "kv_capacity_tokens": kv_capacity_tokens,
        "max_slots": max_slots,
        "max_batched_tokens": 1024,
        "decode_batch": ints(batch),
        "decode_context": ints(context),
        "decode_s": floats(base),
        "prefill_tokens": ints(tokens),
        "prefill_s": floats(0.012 + 9e-5 * tokens + 1e-8 * tokens**2),
        "iteration_overhead_s": 0.0,
        "cold_start_s": 20.0,
        "warm_start_s": 1.0,
    }
    return Profile(data=ProfileData(**(data | fields)))  # type: ignore[arg-type]


def shipped_fields(name: str = "qwen2.5-3b_l40s_tp2") -> dict[str, Any]:
    """Of a shipped profile, as its file has them."""
    fields: dict[str, Any] = json.loads(load(name).to_json())
    return fields
