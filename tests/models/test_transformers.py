"""The model of experts against Hugging Face transformers' Qwen3-MoE, with the same weights.

`pip install transformers torch` (the extra `oracles`); skipped without them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import decoder_oracle

from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, forward, init_params, rope_tables

_LENGTH = 12
_REASON = "transformers' model is the published oracle (the extra 'oracles')"
_ROUTER, _EXPERTS = "mlp.gate.weight", "mlp.experts."


def _theirs(transformers, torch, config: ModelConfig, params):
    """Their model with our weights (their linear weights are (out, in), gate and up are fused)."""
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=config.vocab_size, hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers, head_dim=config.head_dim,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads, rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            num_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok,
            moe_intermediate_size=config.moe_intermediate_size,
            norm_topk_prob=config.norm_topk_prob, attn_implementation="eager",
        )
    ).to(torch.float32)  # fmt: skip
    layers = params["layers"]
    weights = {
        "model.embed_tokens.weight": params["embed_tokens"],
        "model.norm.weight": params["norm"]["weight"],
        "lm_head.weight": params["lm_head"].T,
    }
    for i in range(config.num_hidden_layers):
        mine = {
            "input_layernorm.weight": layers["input_layernorm"]["weight"][i],
            "post_attention_layernorm.weight": layers["post_attention_layernorm"]["weight"][i],
            "self_attn.o_proj.weight": layers["o_proj"]["kernel"][i].T,
            _ROUTER: layers["router"]["kernel"][i].T,
        }
        for name in ("q_proj", "k_proj", "v_proj"):
            mine[f"self_attn.{name}.weight"] = layers["self_attn"][name]["kernel"][i].T
        for name in ("q_norm", "k_norm"):
            mine[f"self_attn.{name}.weight"] = layers["self_attn"][name]["weight"][i]
        gate, up, down = (
            layers["experts"][f"{name}_proj"]["kernel"][i].swapaxes(1, 2)
            for name in ("gate", "up", "down")
        )
        mine[_EXPERTS + "gate_up_proj"] = np.concatenate([gate, up], axis=1)
        mine[_EXPERTS + "down_proj"] = down
        weights |= {f"model.layers.{i}.{name}": value for name, value in mine.items()}
    tensors = {name: torch.tensor(np.array(value)) for name, value in weights.items()}
    model.load_state_dict(tensors, strict=True)
    return model


@pytest.mark.parametrize("top_k,renormalize", [(2, True), (3, False)])
def test_float32_logits_and_gradients(top_k, renormalize):
    transformers = pytest.importorskip("transformers", minversion="5", reason=_REASON)
    torch = pytest.importorskip("torch", reason=_REASON)
    config = ModelConfig(
        vocab_size=60, hidden_size=64, intermediate_size=1, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8,
        num_experts_per_tok=top_k, moe_intermediate_size=32, norm_topk_prob=renormalize,
    )  # fmt: skip
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = decoder_oracle.random_params(shapes, 0)
    tokens = np.random.default_rng(0).integers(0, 60, (2, _LENGTH)).astype(np.int32)

    def loss(params, tokens, rope):
        logits = forward(params, tokens, config, "f32", rope=rope).logits
        return (jnp.sin(logits) ** 2).mean(), logits

    program = exact_jit(jax.grad(loss, has_aux=True))
    grads, logits = program(params, tokens, rope_tables(config, _LENGTH))
    model = _theirs(transformers, torch, config, params)
    expected = model(torch.tensor(tokens)).logits
    scale = expected.detach().abs().max().item()
    assert np.abs(np.asarray(logits) - expected.detach().numpy()).max() < 1e-4 * scale
    (torch.sin(expected) ** 2).mean().backward()
    for layer in range(3):
        theirs = dict(model.model.layers[layer].named_parameters())
        ours = {
            _ROUTER: grads["layers"]["router"]["kernel"][layer].T,
            _EXPERTS + "down_proj": grads["layers"]["experts"]["down_proj"]["kernel"][
                layer
            ].swapaxes(1, 2),
        }
        for name, grad in ours.items():
            exact = theirs[name].grad.numpy()
            error = np.linalg.norm(grad - exact) / np.linalg.norm(exact)
            assert error < 1e-4, (layer, name, error)
