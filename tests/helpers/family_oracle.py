"""Every family of models against Hugging Face transformers, with the same random parameters.

`python tests/helpers/family_oracle.py` prints the table of docs/models.md; test_hf_families.py
bounds its figures. Needs the extra `oracles`.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from hf_checkpoints import CONFIGS, named, params_of, write
from random_model import quantized

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import Tokens, forward, rope_tables
from fp8rl_jax.models.hf.config_json import config_json
from fp8rl_jax.rollout import Requests, SamplerConfig, make_sampler

NAMES = [name for name in CONFIGS if name != "latent_fp8"]
_NEW, _NO_END = 32, 1000


@functools.cache
def theirs(name: str, dtype: str = "float32"):
    """Their model with `params_of(name)`."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model"
        # Where a type has a padding token, torch gives its embedding no gradient.
        fields = {"pad_token_id": None} | config_json(CONFIGS[name], "float32")
        write(path, fields, named(CONFIGS[name], params_of(name)))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    return model.eval()


def tokens(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 60, (rows, length)).astype(np.int32)


def _ours(name: str, recipe: str, batch: np.ndarray) -> np.ndarray:
    config = CONFIGS[name]
    program = exact_jit(lambda p, t, rope: forward(p, Tokens.of(t, rope), config, recipe).logits)
    weights = quantized(params_of(name), recipe)
    return np.asarray(program(weights, batch, rope_tables(config, batch.shape[1])))


def padded_error(name: str) -> float:
    """Rows of 1 to 40 tokens, padded on the right, float32: the largest difference of a real
    token's logit over the largest logit."""
    import torch

    real = np.arange(40) < np.array([1, 7, 23, 40])[:, None]
    batch = np.where(real, tokens(4, 40), 0)
    ours = _ours(name, "f32", batch)
    with torch.no_grad():
        mask = torch.tensor(real.astype(np.int64))
        expected = theirs(name)(torch.tensor(batch), attention_mask=mask).logits.numpy()
    return float(np.abs(ours - expected)[real].max() / np.abs(expected[real]).max())


def bf16_error(name: str) -> float:
    """Two bf16 models: norm of the logits' difference over the norm of theirs."""
    import torch

    batch = tokens(4, 24)
    ours = _ours(name, "bf16", batch)
    with torch.no_grad():
        expected = theirs(name, "bfloat16")(torch.tensor(batch)).logits.float().numpy()
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


def gradient_errors(name: str) -> dict[str, float]:
    """{their parameter: norm of the difference over the norm of their gradient}, of every one.

    The loss takes in all logits; float32.
    """
    import torch

    config, params, batch = CONFIGS[name], params_of(name), tokens(2, 24)

    def loss(params, tokens, rope):
        return (jnp.sin(forward(params, Tokens.of(tokens, rope), config, "f32").logits) ** 2).mean()

    grads = exact_jit(jax.grad(loss))(params, batch, rope_tables(config, 24))
    ours = named(config, jax.tree.map(np.asarray, grads))
    model = theirs(name)
    model.zero_grad()
    (torch.sin(model(torch.tensor(batch)).logits) ** 2).mean().backward()
    errors, compared = {}, 0
    for key, parameter in model.named_parameters():
        gradient = ours[key] if key in ours else _with_fused_experts(ours, key)
        exact = parameter.grad.numpy()
        errors[key] = float(np.linalg.norm(gradient - exact) / np.linalg.norm(exact))
        compared += gradient.size
    assert compared >= 0.98 * sum(leaf.size for leaf in jax.tree.leaves(params))
    return errors


def _with_fused_experts(gradients: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Our gradient of their parameter, which holds all experts, gate above up."""
    layer, _, part = name.partition(".experts.")
    prefix = layer + ".experts."
    numbers = {int(k.removeprefix(prefix).split(".")[0]) for k in gradients if k.startswith(prefix)}

    def stacked(projection: str) -> np.ndarray:
        return np.stack([gradients[f"{prefix}{e}.{projection}.weight"] for e in sorted(numbers)])

    if part == "gate_up_proj":
        return np.concatenate([stacked("gate_proj"), stacked("up_proj")], axis=1)
    return stacked(part)


def greedy(name: str) -> tuple[np.ndarray, np.ndarray]:
    """32 tokens after each of three prompts: by our sampler with its cache, and by `generate`."""
    import torch

    config = CONFIGS[name]
    lengths = np.array([1, 5, 9], np.int32)
    prompts = tokens(3, 9)
    sample = make_sampler(config, "f32", SamplerConfig(_NEW, 1, (_NO_END,), 0))
    out = sample(
        quantized(params_of(name), "f32"),
        prompts,
        Requests(
            lengths,
            jax.random.key(0, impl="threefry2x32"),
            np.arange(3, dtype=np.int32),
            np.zeros(3, np.float32),
            np.full(3, _NEW, np.int32),
            tuple(jnp.asarray(t) for t in rope_tables(config, 9 + _NEW)),
        ),
    )
    expected = []
    for row, length in enumerate(lengths):
        prompt = torch.tensor(prompts[row : row + 1, :length])
        generated = theirs(name).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_NEW,
            min_new_tokens=_NEW,
            do_sample=False,
            pad_token_id=0,
        )
        expected.append(generated[0, length:].numpy())
    return np.asarray(out.tokens), np.stack(expected)


def main() -> None:
    """Prints the table as Markdown, a row as it is measured."""
    head = (
        "family",
        "logits, float32",
        "gradients, float32 (worst parameter)",
        "greedy tokens",
        "logits, bf16",
    )
    for cells in (head, ("---",) * len(head)):
        print("| " + " | ".join(cells) + " |")
    for name in sys.argv[1:] or NAMES:
        errors = gradient_errors(name)
        worst = max(errors, key=errors.__getitem__)
        ours, expected = greedy(name)
        cells = (
            name,
            f"{padded_error(name):.1e}",
            f"{errors[worst]:.1e} of {len(errors)} (`{worst}`)",
            f"{(ours == expected).sum()} of {expected.size} equal",
            f"{bf16_error(name):.3f}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
