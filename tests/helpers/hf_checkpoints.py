"""Small checkpoints written by hand: names and layouts spelled out in loops, unlike the library's.

`named` is the oracle of the name tables, `write` that of the writer (through the safetensors
library).
"""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
from known_families import CONFIGS
from oracles import quant_oracle
from oracles.decoder_oracle import random_params
from safetensors.numpy import save_file

from fp8rl_jax.models import ModelConfig, param_shapes
from fp8rl_jax.models.hf.config_json import config_json


def params_of(name: str, seed: int = 0):
    """Random float32 numpy parameters of CONFIGS[name]; norms and biases too."""
    return random_of(CONFIGS[name], seed)


@functools.cache
def random_of(config: ModelConfig, seed: int = 0):
    """Random float32 numpy parameters of a configuration, as `params_of`."""
    params = random_params(param_shapes(config), seed)
    generator = np.random.default_rng(seed + 1)

    def leaf(path, x):
        names = [key.key for key in path]
        if names[-1] == "e_score_correction_bias":  # positive: see test_hf_transformers.py
            return generator.uniform(0.05, 0.4, x.shape).astype(np.float32)
        if names[-1] == "weight":
            return generator.uniform(0.7, 1.3, x.shape).astype(np.float32)
        return np.asarray(x, np.float32)

    return jax.tree_util.tree_map_with_path(leaf, params)


def named(config: ModelConfig, params) -> dict[str, np.ndarray]:
    """{name in a checkpoint: array} of a model."""
    out = {
        "model.embed_tokens.weight": params["embed_tokens"],
        "model.norm.weight": params["norm"]["weight"],
    }
    if not config.tie_word_embeddings:
        out["lm_head.weight"] = params["lm_head"].T
    for layer in range(config.num_hidden_layers):
        stack, i = params["layers"], layer - config.dense_layers
        if layer < config.dense_layers:
            stack, i = params["dense_layers"], layer
        at = f"model.layers.{layer}."
        norms = {}
        if config.pre_norms:
            norms["input_layernorm"] = "input_layernorm"
        if config.sandwich_norms:
            norms["post_attention_layernorm"] = "attention_norm"
            norms["post_feedforward_layernorm"] = "post_feedforward_layernorm"
        else:
            norms["post_attention_layernorm"] = "post_attention_layernorm"
        if config.pre_norms and config.sandwich_norms:
            norms["pre_feedforward_layernorm"] = "pre_feedforward_layernorm"
        for theirs, ours in norms.items():
            out[f"{at}{theirs}.weight"] = stack[ours]["weight"][i]
        attention = stack["self_attn"]
        for name, leaf in attention.items():
            if name in ("k_b_proj", "v_b_proj"):
                continue
            if name == "sinks":
                out[at + "self_attn.sinks"] = leaf[i]
                continue
            value = leaf["kernel"][i].T if "kernel" in leaf else leaf["weight"][i]
            out[f"{at}self_attn.{name}.weight"] = value
            if "bias" in leaf:
                out[f"{at}self_attn.{name}.bias"] = leaf["bias"][i]
        out[at + "self_attn.o_proj.weight"] = stack["o_proj"]["kernel"][i].T
        if "bias" in stack["o_proj"]:
            out[at + "self_attn.o_proj.bias"] = stack["o_proj"]["bias"][i]
        if config.latent:
            keys, values = (attention[n]["kernel"][i] for n in ("k_b_proj", "v_b_proj"))
            joined = [x for h in range(config.num_attention_heads) for x in (keys[h], values[h].T)]
            out[at + "self_attn.kv_b_proj.weight"] = np.concatenate(joined)
        if config.moe_bias:
            out |= {at + "mlp." + name: x for name, x in _packed(stack, i).items()}
            continue
        for name in ("gate_proj", "up_proj", "down_proj"):
            if name in stack:
                out[f"{at}mlp.{name}.weight"] = stack[name]["kernel"][i].T
                continue
            for expert in range(config.num_experts):
                value = stack["experts"][name]["kernel"][i, expert].T
                out[f"{at}mlp.experts.{expert}.{name}.weight"] = value
            if config.n_shared_experts:
                value = stack["shared_experts"][name]["kernel"][i].T
                out[f"{at}mlp.shared_experts.{name}.weight"] = value
        if "router" in stack:
            out[at + "mlp.gate.weight"] = stack["router"]["kernel"][i].T
            if config.scoring_func == "sigmoid":
                bias = stack["router"]["e_score_correction_bias"][i]
                out[at + "mlp.gate.e_score_correction_bias"] = bias
    return out


def _packed(stack, i: int) -> dict[str, np.ndarray]:
    """Router and experts of a layer of gpt-oss: gate and up of all experts in turns."""
    experts, router = stack["experts"], stack["router"]

    def in_turns(gate, up):
        whole = np.empty((*gate.shape[:-1], 2 * gate.shape[-1]), gate.dtype)
        whole[..., ::2], whole[..., 1::2] = gate, up
        return whole

    gate, up, down = (experts[f"{n}_proj"]["kernel"][i] for n in ("gate", "up", "down"))
    return {
        "router.weight": router["kernel"][i].T,
        "router.bias": router["bias"][i],
        "experts.gate_up_proj": in_turns(gate, up),
        "experts.gate_up_proj_bias": in_turns(experts["gate_bias"][i], experts["up_bias"][i]),
        "experts.down_proj": down,
        "experts.down_proj_bias": experts["down_bias"][i],
    }


def fp8_tensors(name: str) -> dict[str, np.ndarray]:
    """An FP8 checkpoint of CONFIGS[name]: linear layers in E4M3 with scales, the rest in bf16."""
    return dict(_fp8_tensors(name))


@functools.cache
def _fp8_tensors(name: str) -> dict[str, np.ndarray]:
    out = {}
    for key, value in named(CONFIGS[name], params_of(name)).items():
        if key.endswith("e_score_correction_bias"):
            out[key] = value
        elif is_linear(key, value):
            codes, scale = quant_oracle.quantize_blocks(bf16(value), (128, 128))
            out[key] = codes.view(ml_dtypes.float8_e4m3fn)
            out[key + "_scale_inv"] = scale
        else:
            out[key] = bf16(value)
    return out


def is_linear(name: str, value: np.ndarray) -> bool:
    """Whether a checkpoint's tensor belongs to a layer that may be FP8."""
    others = ("mlp.gate.weight", "lm_head.weight", "embed_tokens.weight")
    return value.ndim == 2 and not name.endswith(others)


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def fields_of(name: str, fp8: bool = False) -> dict:
    """The config.json of CONFIGS[name]."""
    fields = config_json(CONFIGS[name], "bfloat16")
    if fp8:
        fields["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    return fields


def write(
    directory: pathlib.Path, fields: dict, tensors: dict[str, np.ndarray], shards: int = 1
) -> pathlib.Path:
    """A checkpoint of these tensors, in one file or several with an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(fields))
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return directory
    places = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        own = dict(list(tensors.items())[number::shards])
        save_file(own, directory / file, {"format": "pt"})
        places |= dict.fromkeys(own, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory
