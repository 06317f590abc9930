"""Checkpoints against Hugging Face transformers: it writes and we read, we write and it reads.

`pip install transformers torch` (the extra `oracles`); skipped without them. The FP8 export needs
`accelerate` too.

The router's correction biases are positive here: older transformers give experts outside the best
groups the score 0, newer ones and this library minus infinity, and with positive scores the choice
is the same.
"""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from hf_checkpoints import CONFIGS, bf16, named, params_of, write

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import Tokens, forward, hf, init_params, rope_tables
from fp8rl_jax.models.hf.config_json import config_json
from fp8rl_jax.quant import quantize

_REASON = "transformers' models are the published oracle (the extra 'oracles')"
_NAMES = [name for name in CONFIGS if name != "latent_fp8"]
_LENGTH = 40  # beyond rope_original_max_position_embeddings, where scaling acts


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch", reason=_REASON)
    return pytest.importorskip("transformers", minversion="5", reason=_REASON)


def _random_model(transformers, name: str, **changes):
    """Their model of a configuration, every parameter random."""
    import torch

    fields = config_json(CONFIGS[name], "float32") | changes
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.to(torch.float32).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if key.endswith("e_score_correction_bias"):
                value.uniform_(0.05, 0.4)
            elif value.ndim == 1:
                value.uniform_(0.7, 1.3)
            else:
                value.normal_(0, value.shape[-1] ** -0.5)
    return model


def _logits(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def _assert_same_logits(model, config, params) -> tuple[np.ndarray, np.ndarray]:
    """Compares their logits with ours; returns the tokens, and their logits."""
    tokens = np.random.default_rng(0).integers(0, 60, (2, _LENGTH)).astype(np.int32)
    expected = _logits(model, tokens)
    program = exact_jit(lambda p, t, rope: forward(p, Tokens.of(t, rope), config, "f32").logits)
    ours = np.asarray(program(params, tokens, rope_tables(config, _LENGTH)))
    assert np.abs(ours - expected).max() < 1e-4 * np.abs(expected).max()
    return tokens, expected


@pytest.mark.parametrize("name", _NAMES)
def test_both_ways(transformers, name, tmp_path):
    """What they save is our model, and what we save is theirs again, bit for bit."""
    model = _random_model(transformers, name)
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    assert config == CONFIGS[name]
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0, impl="threefry2x32")))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    tokens, expected = _assert_same_logits(model, config, params)

    hf.save(tmp_path / "ours", config, params, dtype="float32")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype == model.dtype
    np.testing.assert_array_equal(_logits(again.eval(), tokens), expected)


def test_mistral_is_a_llama(transformers, tmp_path):
    """Without a window; what we save of it is theirs again under the name llama."""
    changes = {"model_type": "mistral", "rope_scaling": None, "sliding_window": None}
    model = _random_model(transformers, "llama", **changes)
    model.save_pretrained(tmp_path / "theirs")
    config, params = hf.load(tmp_path / "theirs")
    tokens, expected = _assert_same_logits(model, config, params)
    hf.save(tmp_path / "ours", config, params, dtype="float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    np.testing.assert_array_equal(_logits(again.eval(), tokens), expected)


@pytest.mark.parametrize("published", [True, False])
def test_the_text_model_of_a_file_with_images(transformers, published, tmp_path):
    """Gemma 3 from 4B, under the names of published files and of transformers 5."""
    import safetensors.numpy

    model = _random_model(transformers, "gemma3")
    text = model.config.to_dict()
    (tmp_path / "theirs").mkdir()
    about = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    about |= {"text_config": text, "vision_config": {"hidden_size": 8}, "eos_token_id": [1, 106]}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(about, default=str))
    prefix = "language_model.model." if published else "model.language_model."
    tensors = {
        prefix + name.removeprefix("model."): value.numpy()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    tower = "vision_tower.x.weight" if published else "model.vision_tower.x.weight"
    tensors[tower] = np.ones((2, 2), np.float32)
    file = tmp_path / "theirs" / "model.safetensors"
    safetensors.numpy.save_file(tensors, file, {"format": "pt"})
    config, params = hf.load(tmp_path / "theirs")
    assert config == CONFIGS["gemma3"]
    _assert_same_logits(model, config, params)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_transformers_reads_fp8(transformers, name, tmp_path):
    """Their dequantisation of our FP8 files is the value that our quantiser gives the matrix."""
    pytest.importorskip("accelerate", reason="transformers needs it for FP8 files")
    import torch

    config, params = CONFIGS[name], params_of(name)
    hf.save(tmp_path / "fp8", config, params, dtype="fp8")
    tensors = {key: _as_exported(key, value) for key, value in named(config, params).items()}
    write(tmp_path / "plain", config_json(config, "float32"), tensors)
    dequantize = transformers.FineGrainedFP8Config(dequantize=True)
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, dtype=torch.float32, **options
        )
        for folder, options in (("fp8", {"quantization_config": dequantize}), ("plain", {}))
    ]
    theirs, ours = (model.state_dict() for model in models)
    assert theirs.keys() == ours.keys()
    for key, value in ours.items():
        np.testing.assert_array_equal(theirs[key].float().numpy(), value.numpy(), key)


def _as_exported(name: str, x: np.ndarray) -> np.ndarray:
    """A checkpoint's tensor as an FP8 export holds it, in float32."""
    if x.ndim == 1 or name.endswith("mlp.gate.weight"):
        return x
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return bf16(x).astype(np.float32)
    return np.asarray(quantize(bf16(x), (128, 128)).dequantize())
