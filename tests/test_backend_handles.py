"""Which handle goes with which response, without engines."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from backends.engine_types import Finished, Partial, Request
from backends.handles import Handles
from backends.ray_config import RayConfig
from backends.step_inputs import prefixes_of, replicas_of, require_engines
from rlhfless.errors import InputError, PlanError
from rlhfless.types.plan import Plan
from tests import ray_steps
from tests.ray_steps import BLOCK, CLUSTER, plan, workload

NIXL: Any = SimpleNamespace(kv="nixl", block_size=BLOCK)
"""What of a configuration is looked at."""


def made(tokens: int = 0, kv: Any = None) -> Partial:
    return Partial(
        tokens=(7,) * tokens, logprobs=(0.0,) * tokens, cached_tokens=0, admitted_s=0.0, first_token_s=0.0,
        last_token_s=0.0, kv=kv,
    )  # fmt: skip


def finished(request: Request) -> Finished:
    done = made(1, {"of": request.response} if request.hand_over else None)
    return Finished(response=request.response, finish_reason="length", weight_version="0", done=done)


def two_readers() -> tuple[Plan, list[Request], list[Request]]:
    """A plan whose prefill actor has a GPU of its own, its prefixes, and one request for each of its responses."""
    work = workload(20)
    one = plan("dp", work)
    apart = replace(one, placement=replace(one.placement, learner=(2,), decode=((0,), (1,))))
    assert work.prompts is not None
    requests = [
        Request(response=r, token_ids=work.prompts[r // 2].tolist(), max_tokens=9, temperature=0.0)
        for r in range(work.responses)
    ]
    return apart, prefixes_of(apart, work), requests


def test_every_actor_has_a_handle_of_its_own_for_each_prefix_that_it_reads() -> None:
    apart, prefixes, requests = two_readers()
    assert apart.prefill is not None
    handles = Handles(apart, NIXL)
    asked = handles.prefills(prefixes, (2,))
    prefix_of = apart.prefill.prefix_of.repeat(2)
    pairs = {(int(prefix_of[r]), index) for index, actor in enumerate(apart.actors) for r in actor.responses.tolist()}
    assert len(asked) == len({one.response for one in asked}) == len(pairs) > len(prefixes)
    assert all(one.hand_over for one in asked)
    handles.prefilled(map(finished, asked))
    read: dict[tuple[int, int], Any] = {}
    for index, actor in enumerate(apart.actors):
        for one in handles.sent(index, [requests[r] for r in actor.responses.tolist()]):
            assert one.kv is not None
            assert read.setdefault((int(prefix_of[one.response]), index), one.kv) == one.kv
    assert read.keys() == pairs
    assert len({one["of"] for one in read.values()}) == len(pairs), "a handle has one reader"


def test_a_further_reader_costs_one_token() -> None:
    apart, prefixes, _ = two_readers()
    asked = Handles(apart, NIXL).prefills(prefixes, (2,))
    further = [one for one in asked if one.response >= len(prefixes)]
    assert further
    held = [tuple(one.token_ids) for one in prefixes]
    for one in further:
        blocks = len(one.token_ids) // BLOCK * BLOCK
        assert len(one.token_ids) == blocks + 1
        assert any(tokens[:blocks] == tuple(one.token_ids[:blocks]) and len(tokens) - blocks < BLOCK for tokens in held)


def test_an_actor_in_the_prefill_actors_process_reads_nothing() -> None:
    apart, prefixes, requests = two_readers()
    handles = Handles(apart, NIXL)
    handles.prefilled(map(finished, handles.prefills(prefixes, apart.placement.decode[0])))
    own = [requests[r] for r in apart.actors[0].responses.tolist()]
    assert handles.sent(0, own) == own
    assert all(one.kv for one in handles.sent(1, [requests[r] for r in apart.actors[1].responses.tolist()]))


def test_a_cut_response_brings_its_own_handle_once() -> None:
    apart, _, requests = two_readers()
    handles = Handles(apart, NIXL)
    handles.cut({3: made(5, {"of": "cut"}), 4: made(5)})
    three, four = handles.sent(1, requests[3:5])
    assert (three.kv, four.kv) == ({"of": "cut"}, None)
    assert handles.sent(0, requests[3:4])[0].kv is None, "its reader may have read it"


def test_over_redis_there_are_none() -> None:
    apart, prefixes, requests = two_readers()
    handles = Handles(apart, SimpleNamespace(kv="redis", block_size=BLOCK))  # type: ignore[arg-type]
    asked = handles.prefills(prefixes, (2,))
    assert asked == prefixes
    handles.prefilled(map(finished, asked))
    assert handles.sent(0, requests) == requests


def test_a_process_that_takes_anothers_place_reads_nothing_again() -> None:
    apart, prefixes, requests = two_readers()
    handles = Handles(apart, NIXL)
    handles.prefilled(map(finished, handles.prefills(prefixes, (2,))))
    handles.forget(1)
    assert not any(one.kv for one in handles.sent(1, [requests[r] for r in apart.actors[1].responses.tolist()]))
    assert all(one.kv for one in handles.sent(0, [requests[r] for r in apart.actors[0].responses.tolist()]))


def test_plans_whose_prefill_actor_ends_before_its_kv_is_read_are_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    config: RayConfig = ray_steps.config(tmp_path, tmp_path, kv="nixl")
    work = workload(20)
    shared = plan("dp", work)
    assert replicas_of(shared) == [shared.placement.decode[0]]
    require_engines(shared, work, CLUSTER, config)
    for start in ("cold", "prewarmed"):
        with pytest.raises(PlanError, match="start warm"):
            require_engines(replace(shared, start=start), work, CLUSTER, config)
        require_engines(replace(shared, start=start), work, CLUSTER, replace(config, kv="redis"))
    wide = replace(shared, placement=replace(shared.placement, decode=((0, 1), (2,))))
    with pytest.raises(PlanError, match="engines of one size"):
        require_engines(wide, work, CLUSTER, config)
    require_engines(replace(two_readers()[0], start="cold"), work, CLUSTER, config)


def test_nixl_must_be_there(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.ray_executor import RayExecutor

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(InputError, match=r"nixl is not installed: pip install 'rlhfless\[nixl\]'"):
        RayExecutor(CLUSTER, ray_steps.config(tmp_path, tmp_path, kv="nixl"))
