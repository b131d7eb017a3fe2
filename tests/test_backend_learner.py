"""The learner: the same gradient however a batch is split, log-probabilities of a plain forward, exact resumption."""

import importlib.util
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless.errors import InputError, RlhflessError
from rlhfless.rng import stream
from rlhfless.types.arrays import floats, ints
from rlhfless.types.workload import Workload
from tests import ray_steps

if missing := [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]:
    pytest.skip(f"needs {', '.join(missing)}: pip install 'rlhfless[cpu]'", allow_module_level=True)

import torch

from backends import environment

environment.prepare("cpu")

from backends.grpo import GrpoOptions  # noqa: E402
from backends.learner import Learner  # noqa: E402
from backends.learner_batch import Batch, micro_batches, shares  # noqa: E402
from backends.learner_types import Experience, LearnerConfig, LearnerError, minibatches  # noqa: E402
from backends.learner_warm import warm_start  # noqa: E402
from backends.ppo import PpoOptions  # noqa: E402
from backends.tiny import CHARACTERS, SPECIAL, make_tiny  # noqa: E402
from backends.trainer import Generated  # noqa: E402
from backends.training import Training  # noqa: E402

ALGORITHMS: dict[str, Any] = {
    "grpo": GrpoOptions(beta=0.05),
    "grpo by sequence": GrpoOptions(beta=0.05, aggregation="sequence-mean", entropy_coefficient=0.01, tis_cap=None),
    "ppo": PpoOptions(kl_coefficient=0.05),
}
WHOLE = 10**6
"""A budget of tokens that any batch fits into."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return str(make_tiny(tmp_path_factory.mktemp("learner") / "model", seed=3, layers=2, hidden=64))


def config(model: str, options: Any, **changes: Any) -> LearnerConfig:
    values: dict[str, Any] = {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "tokens_per_microbatch": WHOLE}
    return LearnerConfig(model=model, options=options, **(values | changes))


def batch(seed: int, prompts: int = 4, n: int = 3, longest: int = 24) -> Batch:
    rng = stream(seed, "learner batch")
    asked = [ints(rng.integers(3, 90, int(rng.integers(1, 20)))) for _ in range(prompts)]
    return Batch(
        prompts=tuple(prompt for prompt in asked for _ in range(n)),
        responses=tuple(ints(rng.integers(3, 90, int(rng.integers(1, longest)))) for _ in range(prompts * n)),
        group=n,
    )


def experience(given: Batch, learner: Learner, seed: int = 0) -> Experience:
    """Made-up advantages and returns, old log-probabilities a little off so that ratios are clipped here and there."""
    rng = torch.Generator().manual_seed(seed)
    shape = given.mask.shape
    own = learner.logprobs(given)
    extra: dict[str, Any] = {"advantages": torch.randn(len(given), generator=rng)}
    if learner.config.algorithm == "ppo":
        extra = {
            "advantages": torch.randn(shape, generator=rng),
            "returns": torch.randn(shape, generator=rng),
            "old_values": 0.3 * torch.randn(shape, generator=rng),
        }
    return Experience(
        batch=given,
        step=seed,
        old_logprobs=own + 0.2 * torch.randn(shape, generator=rng),
        engine_logprobs=own + 0.2 * torch.randn(shape, generator=rng),
        reference_logprobs=own - 0.1,
        **extra,
    )


def gradient(learner: Learner, told: Experience, rows: range) -> tuple[torch.Tensor, dict[str, float]]:
    metrics = learner.gradients(told, rows)
    flat = torch.cat([p.grad.flatten() for _, each in learner._models() for p in each.model.parameters()])
    for _, each in learner._models():
        each.model.zero_grad()
    return flat, metrics


def state(learner: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for _, each in learner._models() for p in each.model.parameters()]


# ---- batches


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    budget=st.integers(60, 300),
    ranks=st.integers(1, 5),
)
def test_every_response_is_in_one_microbatch(sizes: list[int], budget: int, ranks: int) -> None:
    tokens = ints(sizes)
    split = shares(tokens, ranks)
    assert sorted(row for share in split for row in share) == list(range(len(sizes)))
    loads = [sum(sizes[row] for row in share) for share in split]
    assert max(loads) - min(loads) <= max(sizes)
    for share in split:
        groups = micro_batches(share, tokens, budget)
        assert sorted(row for group in groups for row in group) == sorted(share)
        for group in groups:
            assert group
            assert len(group) * max(sizes[row] for row in group) <= budget
        for group in groups[:-1]:  # none ends before the budget makes it
            assert (len(group) + 1) * sizes[group[0]] > budget


def test_a_response_above_the_budget_is_refused() -> None:
    with pytest.raises(InputError, match="a response of 61 tokens, prompt included, is above tokens_per_microbatch 60"):
        micro_batches([0, 1], ints([3, 61]), 60)


def test_logprobs_and_values_are_those_of_single_forward_passes(model: str) -> None:
    learner = Learner(config(model, PpoOptions(), tokens_per_microbatch=150))
    assert learner._critic is not None
    torch.nn.init.normal_(learner._critic.model.score.weight, std=0.5)
    asked = batch(1)
    found, values = learner.logprobs(asked), learner.critic(asked)
    spreads: Any = learner._forward(
        asked,
        lambda rows: learner._logprobs(learner._policy.model, rows, entropy=True)[1],  # type: ignore[arg-type,return-value]
    )
    assert (found[~asked.mask] == 0).all()
    assert torch.equal(found, learner.reference(asked))
    for row, (prompt, response) in enumerate(zip(asked.prompts, asked.responses, strict=True)):
        ids = torch.from_numpy(np.concatenate([prompt, response])).unsqueeze(0)
        with torch.no_grad():
            predicted = learner._policy.model(input_ids=ids).logits[0].double().log_softmax(-1)
            valued = learner._critic.model(input_ids=ids).logits[0, :, 0]
        here = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
        own = predicted[here, torch.tensor(response)]
        torch.testing.assert_close(found[row, : len(response)].double(), own, atol=2e-5, rtol=0)
        torch.testing.assert_close(values[row, : len(response)], valued[here], atol=2e-5, rtol=0)
        spread = -(predicted.exp() * predicted).sum(-1)[here]
        torch.testing.assert_close(spreads[row, : len(response)].double(), spread, atol=2e-5, rtol=0)
    assert values.abs().max() > 0.1


# ---- gradients


@pytest.mark.parametrize("name", ALGORITHMS)
def test_accumulation_gives_the_gradient_of_the_whole_batch(model: str, name: str) -> None:
    options = ALGORITHMS[name]
    learner = Learner(config(model, options))
    told = experience(batch(2), learner)
    whole, metrics = gradient(learner, told, range(12))
    assert 0 < metrics["clip_share"] < 1
    for budget in (50, 120, 300):
        learner.config = replace(learner.config, tokens_per_microbatch=budget)
        assert len(micro_batches(range(12), told.batch.sizes, budget)) > 1
        split, again = gradient(learner, told, range(12))
        torch.testing.assert_close(split, whole, atol=2e-6 * whole.abs().max().item(), rtol=1e-3)
        assert again == pytest.approx(metrics, abs=1e-5)
    other, _ = gradient(learner, told, range(9))
    assert (other - whole).abs().max() > 1e-2 * whole.abs().max()


def test_an_empty_share_changes_nothing(model: str) -> None:
    """What a rank without responses does while the others have some."""
    for options in (ALGORITHMS["grpo"], ALGORITHMS["ppo"]):
        learner = Learner(config(model, options))
        told = experience(batch(2), learner)
        from backends.losses import Items

        assert not any(learner._backward(told, [], Items(tokens=9, sequences=2)).values())
        for _, each in learner._models():
            assert not any(p.grad.any() for p in each.model.parameters())


def test_order_of_responses_does_not_matter(model: str) -> None:
    learner = Learner(config(model, ALGORITHMS["grpo"]))
    told = experience(batch(4), learner)
    whole, _ = gradient(learner, told, range(12))
    order = stream(0, "order").permutation(12)
    turned = Experience(
        batch=Batch(
            prompts=tuple(told.batch.prompts[row] for row in order),
            responses=tuple(told.batch.responses[row] for row in order),
            group=told.batch.group,
        ),
        step=0,
        old_logprobs=told.old_logprobs[order],
        advantages=told.advantages[order],
        engine_logprobs=told.engine_logprobs[order] if told.engine_logprobs is not None else None,
        reference_logprobs=told.reference_logprobs[order] if told.reference_logprobs is not None else None,
    )
    again, _ = gradient(learner, turned, range(12))
    torch.testing.assert_close(again, whole, atol=2e-6 * whole.abs().max().item(), rtol=1e-3)


def test_gradient_checkpointing_changes_no_gradient(model: str) -> None:
    plain = Learner(config(model, ALGORITHMS["ppo"]))
    told = experience(batch(2), plain)
    again = Learner(config(model, ALGORITHMS["ppo"], gradient_checkpointing=True))
    torch.testing.assert_close(gradient(plain, told, range(12))[0], gradient(again, told, range(12))[0])


def test_minibatches_are_equal_parts_of_every_epoch(model: str) -> None:
    asked = config(model, ALGORITHMS["grpo"], minibatches=3, epochs=2, seed=5)
    parts = minibatches(12, asked, 7)
    assert len(parts) == 6
    for epoch in (parts[:3], parts[3:]):
        assert sorted(row for part in epoch for row in part) == list(range(12))
    assert parts == minibatches(12, asked, 7)
    assert parts != minibatches(12, asked, 8)
    with pytest.raises(InputError, match="13 responses of a step cannot be divided into 3 equal minibatches"):
        minibatches(13, asked, 0)


# ---- steps


def work(step: int, n: int = 4) -> Workload:
    prompts = tuple(ints([5 + number, 6, 7]) for number in range(3))
    return Workload(
        step=step, epoch=step, algorithm="grpo", prompt_ids=np.arange(3), prompt_tokens=ints([3, 3, 3]),
        responses_per_prompt=n, max_response_tokens=9, prompts=prompts,
    )  # fmt: skip


def drawn(learner: Training, asked: Workload) -> list[Generated]:
    """Responses of chance, with log-probabilities near the learner's own, as engines of other kernels would have."""
    rng = stream(3, "responses", asked.step)
    made = [
        Generated(
            tokens=ints(rng.integers(3, 90, int(rng.integers(1, 9)))),
            logprobs=floats([0.0]),
            finish_reason="stop",
            weight_version=learner.version,
            cached_tokens=0,
        )
        for _ in range(asked.responses)
    ]
    assert asked.prompts is not None
    n = asked.responses_per_prompt
    rows = Batch(
        prompts=tuple(prompt for prompt in asked.prompts for _ in range(n)),
        responses=tuple(one.tokens for one in made),
        group=n,
    )
    own = learner._sum("logprobs", rows)
    return [
        replace(one, logprobs=floats(own[row, : one.tokens.size].double().numpy() + 1e-4))
        for row, one in enumerate(made)
    ]


def training(model: str, options: Any, **changes: Any) -> Training:
    """A learner that is paid for sevens."""

    def sevens(prompts: Any, responses: Any, references: Any) -> Any:
        return floats([text.count("7") / len(text) for text in responses])

    return Training(
        config(model, options, **changes), sevens, dict.fromkeys(range(3), ""),
        lambda ids: "".join("7" if token < 40 else "." for token in ids),
    )  # fmt: skip


def learn(learner: Training, steps: range) -> list[Any]:
    found = []
    for step in steps:
        asked = work(step)
        made = drawn(learner, asked)
        for function in learner.functions:
            learner.prepare(function, 1, asked, made)
        found.append(learner.learn(1, asked, made))
    return found


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_what_is_rewarded_becomes_likelier(model: str, name: str) -> None:
    learner = training(model, ALGORITHMS[name], learning_rate=3e-3, minibatches=2, epochs=2)
    assert learner.functions == (("reward", "reference") if name == "grpo" else ("reward", "reference", "critic"))
    local: Any = learner._ranks
    policy = local._learner._policy.model

    def share() -> float:
        with torch.no_grad():
            return float(policy(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)[3:40].sum())

    before = share()
    told = learn(learner, range(12))
    assert share() > before + 0.1
    assert learner.version == "12"
    assert told[0].mismatch.mean_abs == pytest.approx(1e-4, rel=0.2)
    assert {"kl", "policy_loss", "clip_share", "policy_grad_norm"} <= told[-1].metrics.keys()
    assert told[-1].metrics["kl"] != 0


def test_a_ppo_critic_learns_the_returns(model: str) -> None:
    learner = training(model, ALGORITHMS["ppo"], critic_learning_rate=3e-3, epochs=2)
    losses = [each.metrics["value_loss"] for each in learn(learner, range(25))]
    assert np.mean(losses[-5:]) < 0.5 * losses[0]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_resumes_bit_for_bit(model: str, name: str, tmp_path: Path) -> None:
    options = {"minibatches": 2, "warmup_steps": 6, "weight_decay": 0.01}
    straight = training(model, ALGORITHMS[name], **options)
    learn(straight, range(2))
    straight.save(tmp_path / "learner.pt")
    rest = learn(straight, range(2, 4))
    resumed = training(model, ALGORITHMS[name], **options)
    resumed.load(tmp_path / "learner.pt", 2)
    assert resumed.version == "2"
    assert learn(resumed, range(2, 4)) == rest
    one, other = (state(each._ranks._learner) for each in (straight, resumed))  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    fresh = training(model, ALGORITHMS[name], **options)
    assert learn(fresh, range(2, 4)) != rest


def test_a_checkpoint_of_another_learner_is_refused(model: str, tmp_path: Path) -> None:
    path = tmp_path / "learner.pt"
    training(model, ALGORITHMS["grpo"]).save(path)
    with pytest.raises(InputError, match=r"learner\.pt: no state of this learner") as error:
        training(model, ALGORITHMS["ppo"]).load(path, 1)
    assert "\n" not in str(error.value)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="no state of this learner"):
        training(model, ALGORITHMS["grpo"]).load(path, 1)


def test_published_weights_are_the_policy(model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    learner = training(model, ALGORITHMS["grpo"])
    learn(learner, range(1))
    published = learner.publish(tmp_path)
    assert published.version == "1"
    have = load_file(published.path / "model.safetensors")
    policy = learner._ranks._learner._policy.model.state_dict()  # type: ignore[attr-defined]
    assert have.keys() == policy.keys()
    assert all(torch.equal(have[name], policy[name]) for name in have)


def test_a_gradient_that_is_not_finite_ends_the_step(model: str) -> None:
    learner = Learner(config(model, ALGORITHMS["grpo"]))
    told = experience(batch(2), learner)
    told.advantages[0] = float("inf")
    before = state(learner)
    with pytest.raises(LearnerError, match="the gradient of the policy is"):
        learner.update(told)
    assert all(torch.equal(a, b) for a, b in zip(before, state(learner), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "none"}, "none is not a folder with a Hugging Face model"),
        ({"learning_rate": 0.0}, "learning_rate 0.0 must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate nan must be above 0"),
        ({"minibatches": 0}, "minibatches 0 must be at least 1"),
        ({"warmup_steps": -1}, "warmup_steps -1 must be at least 0"),
    ],
)
def test_config_errors(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(config(model, ALGORITHMS["grpo"]), **changes)


def test_a_prompt_without_reference_is_refused(model: str) -> None:
    learner = training(model, ALGORITHMS["grpo"])
    learner.references = {0: "", 2: ""}
    with pytest.raises(InputError, match="step 0: prompt 1 has no reference answer"):
        learner.score(work(0), drawn(learner, work(0)))


def test_a_reward_model_runs_on_the_ranks(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from backends.rewards import RewardModel

    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    learner = Training(config(model, ALGORITHMS["grpo"]), tmp_path, dict.fromkeys(range(3), ""))
    made = drawn(learner, work(0))
    scores = learner.prepare("reward", 1, work(0), made)
    assert scores is not None
    assert scores.std() > 0
    prompts = [learner.decode([5 + number, 6, 7]) for number in range(3) for _ in range(4)]
    texts = [learner.decode(one.tokens.tolist()) for one in made]
    assert scores.tolist() == pytest.approx(RewardModel(tmp_path)(prompts, texts, texts).tolist(), abs=1e-5)


def test_a_warm_start_is_taught_and_made_once(tmp_path: Path) -> None:
    def sevens(rng: np.random.Generator, progress: float) -> tuple[str, str]:
        assert 0 <= progress < 1
        return str(rng.integers(100)), "7"

    counted: list[int] = []
    made = warm_start(tmp_path / "a", sevens, "sevens", seed=1, updates=40, tick=counted.append)
    assert sum(counted) == 40
    again = warm_start(tmp_path / "b", sevens, "sevens", seed=1, updates=40)
    weights = [(each / "model.safetensors").read_bytes() for each in (made, again)]
    assert weights[0] == weights[1]
    warm_start(made, sevens, "sevens", seed=1, updates=40, tick=counted.append)
    assert sum(counted) == 40
    with pytest.raises(InputError, match="holds another model than the warm start that is asked for"):
        warm_start(made, sevens, "sevens", seed=2, updates=40)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    learner = Learner(config(str(made), ALGORITHMS["grpo"]))
    seven, end = CHARACTERS.index("7") + len(SPECIAL), SPECIAL.index("<eos>")
    asked = Batch(prompts=(ints([5, 6]),), responses=(ints([seven, end]),), group=1)
    assert learner.logprobs(asked).sum() > -2  # of a fresh model it is -2 log(98) = -9


# ---- more than one rank, and many steps


@pytest.fixture(scope="module")
def node(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The only machine of a private Ray cluster."""
    import ray

    from backends.cluster import RayCluster

    cluster = RayCluster(ray_steps.CLUSTER, ray_steps.config(Path(model), tmp_path_factory.mktemp("weights")))
    try:
        yield ray.get_runtime_context().get_node_id()
    finally:
        cluster.close()


@pytest.mark.slow
@ray_steps.real
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_two_sharded_ranks_make_the_update_of_one(node: str, model: str, name: str, tmp_path: Path) -> None:
    """FSDP2 over gloo, in Ray actors, as on GPUs but for the device; checkpoints go from one number to the other."""
    from backends.learner_ranks import RayRanks

    options = {"minibatches": 2, "tokens_per_microbatch": 60, "gradient_checkpointing": True}
    alone = training(model, ALGORITHMS[name], **options)
    told = learn(alone, range(3))
    alone.save(tmp_path / "one.pt")
    both = training(model, ALGORITHMS[name], **options)
    both._ranks = RayRanks(config(model, ALGORITHMS[name], **options), [(node, 0), (node, 1)], cpus=1)
    try:
        again = learn(both, range(3))
        for one, other in zip(told, again, strict=True):
            assert other.metrics == pytest.approx(one.metrics, abs=2e-4, rel=2e-3)
        both.save(tmp_path / "two.pt")
        contents = [torch.load(tmp_path / f"{each}.pt", weights_only=True) for each in ("one", "two")]
        for key, tensor in contents[0]["policy"].items():
            torch.testing.assert_close(contents[1]["policy"][key], tensor, atol=3e-4, rtol=0)
        both.load(tmp_path / "one.pt", 3)
        assert learn(both, range(3, 4))[0].metrics == pytest.approx(
            learn(alone, range(3, 4))[0].metrics, abs=2e-4, rel=2e-3
        )
        published = both.publish(tmp_path / "published")
        assert published.version == "4"
        with pytest.raises(RlhflessError, match="no state of this learner"):
            both.load(tmp_path / "none.pt", 1)
    finally:
        both.close()


@pytest.mark.slow
def test_memory_stays_bounded_over_a_hundred_steps(model: str) -> None:
    learner = training(model, ALGORITHMS["ppo"], minibatches=2)
    learn(learner, range(20))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learn(learner, range(20, 120))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 16 << 10  # a step's tensors are some 2 MiB; kept, they would be 200
