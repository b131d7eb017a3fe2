"""A small model that can already do a task now and then: a random one, taught by example for a minute or two.

What a downloaded base model is to a large run: reinforcement learning needs something that succeeds sometimes.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from backends.environment import prepare, require
from backends.tiny import draw_weights, make_model, make_tokenizer
from rlhfless.errors import InputError
from rlhfless.rng import stream

LAYERS, HIDDEN, HEADS = 2, 128, 4
"""320,000 parameters (chosen: the least that learns to copy and to add, with heads of 32, as vLLM on CPUs wants)."""
INIT_STD = 0.02
"""Spread of fresh weights, transformers' own."""
BATCH = 32
"""Examples of an update (chosen)."""
LEARNING_RATE, RISE, BETAS = 3e-3, 50, (0.9, 0.95)
"""AdamW; the rate rises over RISE updates and then falls in a straight line to a twentieth (chosen by trial)."""
FLOOR = 0.05
RECIPE = "recipe.json"
"""What the model was made with; the same needs not be made again."""

Sample = Callable[[np.random.Generator, float], tuple[str, str]]
"""Draws an example, a prompt and what to answer, when a share of the updates is done."""


def warm_start(
    folder: Path, sample: Sample, task: str, *, seed: int, updates: int, tick: Callable[[int], None] = lambda _: None
) -> Path:
    """Write a model that has seen `updates` x BATCH examples, and its character tokenizer, to `folder`; returns it.

    Takes some 0.13 s of one core an update. Does nothing where the same recipe (task, seed, updates) has been made
    there before. `tick` is told of every update. Raises InputError where transformers is missing, or where another
    model is there.
    """
    recipe = {"task": task, "seed": seed, "updates": updates, "layers": LAYERS, "hidden": HIDDEN, "batch": BATCH}
    if folder.exists():
        made = folder / RECIPE
        if not made.is_file() or json.loads(made.read_text()) != recipe:
            raise InputError(f"{folder}: holds another model than the warm start that is asked for; remove it")
        return folder
    prepare("cpu")
    require("transformers")
    import torch
    import transformers
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)  # so small a model gains little from more, and loses much where cores are shared
    transformers.logging.disable_progress_bar()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, layers=LAYERS, hidden=HIDDEN, heads=HEADS)
    draw_weights(model, seed, INIT_STD, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.01)
    rng, most = stream(seed, "warm start"), max(updates - 1, 1)
    for update in range(updates):
        rate = LEARNING_RATE * min(1.0, (update + 1) / RISE) * max(FLOOR, 1 - update / most)
        for group in optimizer.param_groups:
            group["lr"] = rate
        examples = [sample(rng, update / updates) for _ in range(BATCH)]
        asked = [tokenizer.encode(prompt) for prompt, _ in examples]
        rows = [
            [*prompt, *tokenizer.encode(answer), tokenizer.eos_token_id]
            for prompt, (_, answer) in zip(asked, examples, strict=True)
        ]
        ids = torch.full((BATCH, max(map(len, rows))), tokenizer.pad_token_id)
        labels = torch.full_like(ids, -100)
        for number, (prompt, row) in enumerate(zip(asked, rows, strict=True)):
            ids[number, : len(row)] = torch.tensor(row)
            labels[number, len(prompt) : len(row)] = ids[number, len(prompt) : len(row)]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tick(1)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        (part / RECIPE).write_text(json.dumps(recipe))
        part.chmod(0o755)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
