"""Numpy oracle for the decoder: a Qwen3-style forward pass in float64, one token list at a time.

Written from the published architecture (Hugging Face's Qwen3: pre-norm RMSNorm, QK-norm per head,
rotary embedding with the two halves of a head paired, grouped-query causal attention, SwiGLU,
residual connections, final norm, tied or untied head), and in a different manner on purpose:
loops over layers, heads and queries, one sequence without padding, no cache, no masks. Nothing is
rounded on the way, so it stands for the real-number result.

Parameter tree (nested dicts; layers stacked in front; kernels [in, out])::

    embed_tokens (V, D); norm/weight (D,); lm_head (D, V), absent when the head is tied
    layers/input_layernorm/weight, layers/post_attention_layernorm/weight (L, D)
    layers/self_attn/{q,k,v}_proj/kernel; layers/self_attn/{q,k}_norm/weight (L, Dh)
    layers/o_proj/kernel, layers/{gate,up,down}_proj/kernel
    with experts, in the place of the last three: layers/router/kernel (L, D, E),
    layers/experts/{gate,up,down}_proj/kernel (L, E, in, out)
"""

import numpy as np
from oracles import moe_oracle


def _rms_norm(x, weight, eps):
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def _rotate(x, theta):
    """Rotates one head's (T, Dh) by its positions: pairs are (i, i + Dh/2)."""
    length, dim = x.shape
    out = np.empty_like(x)
    for position in range(length):
        for i in range(dim // 2):
            angle = position / theta ** (2 * i / dim)
            a, b = x[position, i], x[position, i + dim // 2]
            out[position, i] = a * np.cos(angle) - b * np.sin(angle)
            out[position, i + dim // 2] = b * np.cos(angle) + a * np.sin(angle)
    return out


def _attend(q, k, v):
    """One head: (T, Dh) each; query t sees keys 0..t."""
    out = np.empty_like(q)
    for t in range(len(q)):
        score = k[: t + 1] @ q[t] / np.sqrt(q.shape[1])
        weight = np.exp(score - score.max())
        out[t] = (weight / weight.sum()) @ v[: t + 1]
    return out


def _attention(x, p, config):
    dim, eps = config.head_dim, config.rms_norm_eps
    groups = config.num_attention_heads // config.num_key_value_heads
    q, k, v = (x @ p[f"{name}_proj"]["kernel"] for name in "qkv")
    heads = []
    for head in range(config.num_attention_heads):
        mine = slice(head * dim, (head + 1) * dim)
        shared = slice(head // groups * dim, (head // groups + 1) * dim)
        query = _rotate(_rms_norm(q[:, mine], p["q_norm"]["weight"], eps), config.rope_theta)
        key = _rotate(_rms_norm(k[:, shared], p["k_norm"]["weight"], eps), config.rope_theta)
        heads.append(_attend(query, key, v[:, shared]))
    return np.concatenate(heads, axis=1)


def _take(tree, layer):
    if isinstance(tree, dict):
        return {name: _take(child, layer) for name, child in tree.items()}
    return tree[layer]


def to_float64(tree):
    """The tree with every leaf as a float64 numpy array."""
    if isinstance(tree, dict):
        return {name: to_float64(child) for name, child in tree.items()}
    return np.asarray(tree, np.float64)


def sequence_logits(params, config, tokens) -> np.ndarray:
    """Logits (T, V) float64 of one sequence of token ids (T,), without padding."""
    params = to_float64(params)
    x = params["embed_tokens"][np.asarray(tokens)]
    for layer in range(config.num_hidden_layers):
        p = _take(params["layers"], layer)
        h = _rms_norm(x, p["input_layernorm"]["weight"], config.rms_norm_eps)
        x = x + _attention(h, p["self_attn"], config) @ p["o_proj"]["kernel"]
        h = _rms_norm(x, p["post_attention_layernorm"]["weight"], config.rms_norm_eps)
        if config.num_experts:
            x = x + moe_oracle.layer(
                h,
                p["router"]["kernel"],
                moe_oracle.matrices(p["experts"]),
                config.num_experts_per_tok,
                config.norm_topk_prob,
            )
        else:
            gate, up = h @ p["gate_proj"]["kernel"], h @ p["up_proj"]["kernel"]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p["down_proj"]["kernel"]
    x = _rms_norm(x, params["norm"]["weight"], config.rms_norm_eps)
    head = params["embed_tokens"].T if config.tie_word_embeddings else params["lm_head"]
    return x @ head


def decoder_logits(params, config, tokens) -> np.ndarray:
    """Logits (B, T, V) float64 of token ids (B, T), sequence by sequence."""
    return np.stack([sequence_logits(params, config, row) for row in tokens])


def random_params(shapes, seed: int):
    """A float32 tree of the given shapes whose norm weights are not 1, so that each is felt.

    Args:
      shapes: nested dict whose leaves have `.shape`.
      seed: of numpy's generator.
    """
    rng = np.random.default_rng(seed)

    def fill(tree, name):
        if isinstance(tree, dict):
            return {key: fill(tree[key], key) for key in sorted(tree)}
        values = rng.standard_normal(tree.shape)
        if name == "weight":
            return (1 + 0.3 * values).astype(np.float32)
        scale = 1 if name == "embed_tokens" else 1 / np.sqrt(tree.shape[-2])
        return (scale * values).astype(np.float32)

    return fill(shapes, "")
