"""The operations of a layer as an analysis names them: their inputs, and what goes wrong there.

In the order of computation, with the names of models/taps.py.
"""

from __future__ import annotations

import dataclasses

from fp8rl_jax.models.taps import LAYER_TAPS, LOGITS, MODEL_TAPS


@dataclasses.dataclass(frozen=True)
class Operation:
    """One tapped value.

    Attributes:
      inputs: tapped values of the same layer that it is computed from; the residual stream, which
        carries everything before it, is left out.
      what: what it is.
      advice: what to look at when it differs although its inputs are equal.
    """

    inputs: tuple[str, ...]
    what: str
    advice: str


_NORM = (
    "an RMS norm",
    "use lax.rsqrt and never 1 / sqrt, with the same epsilon and the same rounding",
)
_QUANTISED = (
    "the quantisation of a linear layer's input",
    "quantise the value that was rounded to bf16, with a scale that no other row decides",
)
_PRODUCT = (
    "a matrix product",
    "compile both programs with exact_jit, and sum over K in blocks of 128 on both sides",
)
_ROPE = (
    "the rotary embedding",
    "pass the tables of rope_tables as arguments: computed inside a program, XLA folds them with "
    "another cosine",
)
_READ = (
    "the round trip through the KV cache",
    "let the learner quantise K and V as the cache does (quantize_kv), with the same scales",
)
_RESIDUAL = ("a residual addition", "round it to the compute dtype on both sides")

_ATTENTION = {
    "q_proj/output": (("q_proj/input",), *_PRODUCT),
    "k_proj/output": (("k_proj/input",), *_PRODUCT),
    "v_proj/output": (("v_proj/input",), *_PRODUCT),
    "q_norm/output": (("q_proj/output",), *_NORM),
    "k_norm/output": (("k_proj/output",), *_NORM),
    # Without QK-norm the projections are rotated as they are.
    "q_rope": (("q_norm/output", "q_proj/output", "q_b_proj/output"), *_ROPE),
    "k_rope": (("k_norm/output", "k_proj/output", "kv_a_proj_with_mqa/output"), *_ROPE),
    "q_read": (("q_rope",), *_READ),
    "k_read": (("k_rope",), *_READ),
    "v_read": (("v_proj/output",), *_READ),
    "attention": (
        ("q_read", "k_read", "v_read"),
        "attention's sum over keys",
        "cut the keys into the same chunks on both sides, and let masked chunks add exactly zero",
    ),
}


def _gated_mlp(prefix: str) -> dict[str, Operation]:
    """A gated MLP's operations, under a prefix of their names."""
    found = {
        "gate_proj/output": Operation((f"{prefix}gate_proj/input",), *_PRODUCT),
        "up_proj/output": Operation((f"{prefix}up_proj/input",), *_PRODUCT),
        "gated": Operation(
            (f"{prefix}gate_proj/output", f"{prefix}up_proj/output"),
            "the gated activation",
            "compute silu in float32 and round once, on both sides",
        ),
        "down_proj/input": Operation((f"{prefix}gated",), *_QUANTISED),
        "down_proj/output": Operation((f"{prefix}down_proj/input",), *_PRODUCT),
    }
    for name in ("gate_proj/input", "up_proj/input"):
        found[name] = Operation(("post_attention_layernorm/output",), *_QUANTISED)
    return {prefix + name: operation for name, operation in found.items()}


_LATENT_ATTENTION = {
    "q_a_proj/output": (("q_a_proj/input",), *_PRODUCT),
    "q_a_layernorm/output": (("q_a_proj/output",), *_NORM),
    "q_b_proj/input": (("q_a_layernorm/output",), *_QUANTISED),
    "q_b_proj/output": (("q_b_proj/input",), *_PRODUCT),
    "kv_a_proj_with_mqa/output": (("kv_a_proj_with_mqa/input",), *_PRODUCT),
    "kv_a_layernorm/output": (("kv_a_proj_with_mqa/output",), *_NORM),
    "q_absorbed": (("q_proj/output", "q_b_proj/output"), *_PRODUCT),
    "latent_read": (("kv_a_layernorm/output",), *_READ),
    "values": (("attention",), *_PRODUCT),
}
_OPERATIONS: dict[str, Operation] = {
    "embed": Operation(
        (), "the embedding", "look for a table that was rounded, scaled or updated on one side only"
    ),
    "input_layernorm/output": Operation((), *_NORM),
    **{
        f"self_attn/{name}/input": Operation(("input_layernorm/output",), *_QUANTISED)
        for name in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
    },
    **{
        f"self_attn/{name}": Operation(tuple(f"self_attn/{i}" for i in inputs), what, advice)
        for name, (inputs, what, advice) in (*_ATTENTION.items(), *_LATENT_ATTENTION.items())
    },
    "o_proj/input": Operation(("self_attn/attention", "self_attn/values"), *_QUANTISED),
    "o_proj/output": Operation(("o_proj/input",), *_PRODUCT),
    "residual_attention": Operation(("o_proj/output",), *_RESIDUAL),
    "post_attention_layernorm/output": Operation((), *_NORM),
    **_gated_mlp(""),
    **_gated_mlp("shared_experts/"),
    "router_logits": Operation(
        ("post_attention_layernorm/output",),
        "the router",
        "keep its weight and its product in float32, through block_matmul, on both sides",
    ),
    "router_experts": Operation(
        ("router_logits",),
        "the choice of experts",
        "choose by the same logits, equal ones by number",
    ),
    "router_weights": Operation(
        ("router_logits", "router_experts"),
        "the experts' weights",
        "take softmax or sigmoid in float32, and renormalise and scale on both sides or on none",
    ),
    "experts_output": Operation(
        ("post_attention_layernorm/output", "router_experts", "router_weights"),
        "the experts",
        "multiply in tiles of one expert, and add a token's results in the order of its experts",
    ),
    "residual_mlp": Operation(
        ("down_proj/output", "experts_output", "shared_experts/down_proj/output"), *_RESIDUAL
    ),
    "norm/output": Operation((), *_NORM),
}
OPERATIONS = {name: _OPERATIONS[name] for name in (MODEL_TAPS[0], *LAYER_TAPS, *MODEL_TAPS[1:])}
# In the order of computation, the logits at the end.
ORDER = (*OPERATIONS, LOGITS)
# Values through which everything flows: swapping one swaps all that came before it.
CUTS = ("residual_attention", "residual_mlp")
