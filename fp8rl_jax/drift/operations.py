"""Table of a model's operations that an analysis can name, with their inputs and advice."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from fp8rl_jax.models import ModelConfig, Tokens, hidden_states, param_shapes
from fp8rl_jax.models.arrays import array_of
from fp8rl_jax.models.taps import LOGITS, MODEL_TAPS, Observe


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation whose result is a tapped value.

    Attributes:
      inputs: names of the tapped values of the same layer that it reads, in any model family; the
        residual stream is left out, as it depends on everything before it.
      what: description of the operation for a message.
      advice: what to check if its result differs although its inputs are equal.
    """

    inputs: tuple[str, ...]
    what: str
    advice: str


_NORM = functools.partial(
    Operation,
    what="an RMS norm",
    advice="use lax.rsqrt and never 1 / sqrt, with the same epsilon and the same rounding",
)
_QUANTISED = functools.partial(
    Operation,
    what="the quantisation of a linear layer's input",
    advice="quantise the value that was rounded to bf16, with a scale that no other row decides",
)
_PRODUCT = functools.partial(
    Operation,
    what="a matrix product",
    advice="compile both programs with exact_jit, and sum over K in blocks of 128 on both sides",
)
_ROPE = functools.partial(
    Operation,
    what="the rotary embedding",
    advice=(
        "pass the tables of rope_tables as arguments: computed inside a program, XLA folds them "
        "with another cosine"
    ),
)
_READ = functools.partial(
    Operation,
    what="the round trip through the KV cache",
    advice="let the learner quantise K and V as the cache does (quantize_kv), with the same scales",
)
_RESIDUAL = functools.partial(
    Operation, what="a residual addition", advice="round it to the compute dtype on both sides"
)


def _linear(name: str) -> dict[str, Operation]:
    """Returns the two operations of a linear layer: quantisation of its input, and product."""
    array = array_of((*name.split("/"), "kernel"))
    return {
        f"{name}/input": _QUANTISED(array.reads),
        f"{name}/output": _PRODUCT((f"{name}/input",)),
    }


def _gated_mlp(prefix: str) -> dict[str, Operation]:
    gate, up = f"{prefix}gate_proj", f"{prefix}up_proj"
    return {
        **_linear(gate),
        **_linear(up),
        f"{prefix}gated": Operation(
            (f"{gate}/output", f"{up}/output"),
            "the gated activation",
            "compute it in float32 and round once, on both sides",
        ),
        **_linear(f"{prefix}down_proj"),
    }


def _attention(*inputs: str) -> tuple[str, ...]:
    return tuple(f"self_attn/{name}" for name in inputs)


# Name -> operation, in the order of computation; a model has a subset.
OPERATIONS: dict[str, Operation] = {
    "embed": Operation(
        (), "the embedding", "look for a table that was rounded, scaled or updated on one side only"
    ),
    "input_layernorm/output": _NORM(()),
    **_linear("self_attn/q_a_proj"),
    "self_attn/q_a_layernorm/output": _NORM(_attention("q_a_proj/output")),
    **_linear("self_attn/q_b_proj"),
    **_linear("self_attn/q_proj"),
    **_linear("self_attn/k_proj"),
    **_linear("self_attn/v_proj"),
    **_linear("self_attn/kv_a_proj_with_mqa"),
    "self_attn/kv_a_layernorm/output": _NORM(_attention("kv_a_proj_with_mqa/output")),
    "self_attn/q_norm/output": _NORM(_attention("q_proj/output")),
    "self_attn/k_norm/output": _NORM(_attention("k_proj/output")),
    # Without QK-norm the projections themselves are rotated.
    "self_attn/q_rope": _ROPE(_attention("q_norm/output", "q_proj/output", "q_b_proj/output")),
    "self_attn/k_rope": _ROPE(
        _attention("k_norm/output", "k_proj/output", "kv_a_proj_with_mqa/output")
    ),
    "self_attn/q_absorbed": _PRODUCT(_attention("q_proj/output", "q_b_proj/output")),
    "self_attn/latent_read": _READ(_attention("kv_a_layernorm/output")),
    "self_attn/q_read": _READ(_attention("q_rope")),
    "self_attn/k_read": _READ(_attention("k_rope")),
    "self_attn/v_read": _READ(_attention("v_proj/output")),
    "self_attn/attention": Operation(
        _attention("q_read", "k_read", "v_read"),
        "attention's sum over keys",
        "cut the keys into the same chunks on both sides, and let masked chunks add exactly zero",
    ),
    "self_attn/values": _PRODUCT(_attention("attention")),
    **_linear("o_proj"),
    # Norms of results, in some models.
    "attention_norm/output": _NORM(("o_proj/output",)),
    "residual_attention": _RESIDUAL(("attention_norm/output", "o_proj/output")),
    # In front of the MLP there is one of these two.
    "post_attention_layernorm/output": _NORM(()),
    "pre_feedforward_layernorm/output": _NORM(()),
    **_gated_mlp(""),
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
    **_gated_mlp("shared_experts/"),
    "post_feedforward_layernorm/output": _NORM(("down_proj/output",)),
    "residual_mlp": _RESIDUAL(
        (
            "post_feedforward_layernorm/output",
            "down_proj/output",
            "experts_output",
            "shared_experts/down_proj/output",
        )
    ),
    "norm/output": _NORM(()),
}
LAYER_TAPS = tuple(name for name in OPERATIONS if name not in MODEL_TAPS)
# All earlier values reach later ones through these, so swapping one replaces all earlier values.
CUTS = ("residual_attention", "residual_mlp")


def tapped_values(config: ModelConfig, slots: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns {name: shape} of a model's tapped values, for one sequence of `slots` tokens in
    float32, in the order of computation."""

    def run(params):
        tokens = Tokens.of(jnp.zeros((1, slots), jnp.int32))
        observe = Observe(tuple(OPERATIONS))
        return hidden_states(params, tokens, config, "f32", observe=observe).aux["taps"]

    found = jax.eval_shape(run, param_shapes(config))
    return {name: found[name] for name in OPERATIONS if name in found}


def tap_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of a model's tapped values and 'logits', in the order of computation."""
    return (*tapped_values(config, 1), LOGITS)
