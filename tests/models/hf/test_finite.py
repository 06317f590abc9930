"""Weights that are NaN or infinite are refused by file, tensor and number, unless allowed."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from fuzz import time_limit
from hf_checkpoints import CONFIGS, bf16, fp8_tensors, named, params_of, write
from marks import slow

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.main import run
from fp8rl_jax.config import default_config
from fp8rl_jax.config.model_source import load_params, read_model
from fp8rl_jax.models import hf
from fp8rl_jax.models.families.fields import Fields
from fp8rl_jax.models.hf import loader
from fp8rl_jax.models.hf.blockwise import quantization_config
from fp8rl_jax.models.hf.config_json import config_json
from fp8rl_jax.models.hf.finite import count_bad_scales, count_not_finite

_Q = "model.layers.1.self_attn.q_proj.weight"
_SCALE = _Q + "_scale_inv"
_KV_B = "model.layers.1.self_attn.kv_b_proj.weight"


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn])
def test_every_bit_pattern(dtype):
    bits = np.arange(2 ** (8 * np.dtype(dtype).itemsize)).astype(f"u{np.dtype(dtype).itemsize}")
    values = bits.view(dtype)
    expected = int((~np.isfinite(values.astype(np.float32))).sum())
    assert count_not_finite(values) == expected > 1
    assert sum(count_not_finite(values[i : i + 1]) for i in range(0, len(values), 97)) == int(
        (~np.isfinite(values[::97].astype(np.float32))).sum()
    )


def test_float32_and_scales():
    values = np.float32([0, -0.0, 1e-45, 3.4e38, np.nan, -np.nan, np.inf, -np.inf])
    assert count_not_finite(values) == 4
    assert count_not_finite(values[:4].reshape(2, 2).T) == 0
    scales = np.float32([1, 1e-38, 1e-45, 7e35, 0, -0.0, -1, np.nan, np.inf, 1e36])
    assert count_bad_scales(scales) == 6


def _fields(name: str, fp8: bool = False) -> dict:
    fields = config_json(CONFIGS[name], "bfloat16")
    return fields | ({"quantization_config": quantization_config([])} if fp8 else {})


def _put(tensors: dict, name: str, *values: float) -> None:
    """Puts values at odd places of a tensor."""
    array = tensors[name] = tensors[name].copy()
    array.reshape(-1)[5 :: array.size // 3 + 1][: len(values)] = values


def _refused(directory, *words: str, **options) -> None:
    with pytest.raises(UserError) as raised:
        hf.load(directory, **options)
    for word in (str(directory / "model.safetensors"), "check_finite=False", *words):
        assert word in str(raised.value), raised.value


@pytest.mark.parametrize("dtype", [slow(np.float32), slow(np.float16), ml_dtypes.bfloat16])
def test_values(dtype, tmp_path, monkeypatch):
    """Also where a tensor is read in several slices; allowed, they arrive."""
    monkeypatch.setattr(loader, "SLICE_BYTES", 3000)
    tensors = {k: v.astype(dtype) for k, v in named(CONFIGS["qwen3"], params_of("qwen3")).items()}
    _put(tensors, _Q, np.nan, -np.inf, np.inf)
    path = write(tmp_path / "model", _fields("qwen3"), tensors)
    _refused(path, f"3 of the 8,192 elements of tensor {_Q} are NaN or infinite")
    params = hf.load(path, check_finite=False)[1]
    bad = jax.tree.map(lambda x: int((~np.isfinite(np.asarray(x))).sum()), params)
    assert sum(jax.tree.leaves(bad)) == bad["layers"]["self_attn"]["q_proj"]["kernel"] == 3


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (_Q, 0x7F, f"1 of the 8,192 elements of tensor {_Q} are NaN"),
        (_Q, 0xFF, f"1 of the 8,192 elements of tensor {_Q} are NaN"),
        (_SCALE, np.nan, f"1 of the 1 elements of tensor {_SCALE} are not finite and positive"),
        (_SCALE, 0.0, "not finite and positive"),
        (_SCALE, -1.0, "not finite and positive"),
        (_SCALE, 1e38, "not finite and positive"),
    ],
)
def test_fp8(name, value, words, dtype, tmp_path):
    tensors = fp8_tensors("qwen3")
    if name == _Q:
        tensors[_Q] = tensors[_Q].copy()
        tensors[_Q].view(np.uint8)[3, 4] = value
    else:
        tensors[_SCALE] = np.full_like(tensors[_SCALE], value)
    path = write(tmp_path / "model", _fields("qwen3", fp8=True), tensors)
    _refused(path, words, dtype=dtype)


@pytest.mark.slow
def test_a_tensor_of_many_pieces_is_counted_whole(tmp_path):
    tensors = named(CONFIGS["moonlight"], params_of("moonlight"))
    _put(tensors, _KV_B, np.nan, np.inf)
    path = write(tmp_path / "model", _fields("moonlight"), tensors)
    _refused(path, f"2 of the {tensors[_KV_B].size:,} elements of tensor {_KV_B}")


def test_a_tied_head(tmp_path):
    """NaN in both is not a head of its own."""
    tensors = named(CONFIGS["qwen3_tied"], params_of("qwen3_tied"))
    _put(tensors, "model.embed_tokens.weight", np.nan)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    path = write(tmp_path / "model", _fields("qwen3_tied"), tensors)
    _refused(path, "1 of the 3,840 elements of tensor model.embed_tokens.weight")


def test_the_field_of_a_run(tmp_path):
    """`model.check_finite` reaches the loader and says nothing of the shapes."""
    tensors = named(CONFIGS["qwen3"], params_of("qwen3"))
    _put(tensors, "model.norm.weight", np.inf)
    config = default_config()
    config.model.checkpoint = str(write(tmp_path / "model", _fields("qwen3"), tensors))
    assert read_model(config)[0] == CONFIGS["qwen3"]
    with pytest.raises(UserError, match=r"1 of the 64 elements of tensor model\.norm\.weight"):
        load_params(config)
    config.model.check_finite = False
    assert read_model(config)[0] == CONFIGS["qwen3"]
    assert not np.isfinite(load_params(config)["norm"]["weight"]).all()


@pytest.mark.parametrize("target", ["fp8", "bf16"])
def test_convert(target, tmp_path, capsys):
    """Both directions; nothing is left."""
    if target == "fp8":
        tensors = {k: bf16(v) for k, v in named(CONFIGS["qwen3"], params_of("qwen3")).items()}
        _put(tensors, _Q, np.nan)
    else:
        tensors = fp8_tensors("qwen3")
        tensors[_Q] = tensors[_Q].copy()
        tensors[_Q].view(np.uint8)[:2, 0] = 0xFF
    source = write(tmp_path / "model", _fields("qwen3", fp8=target == "bf16"), tensors)
    assert run(["convert", str(source), str(tmp_path / "out"), f"--dtype={target}"]) == 2
    error = capsys.readouterr().err
    count = 1 if target == "fp8" else 2
    assert f"{count} of the 8,192 elements of tensor {_Q}" in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("dtype", [slow("float32"), "bfloat16", slow("fp8")])
def test_save(dtype, tmp_path):
    """Weights of a run; also a number that bf16 rounds to infinity."""
    config, params = CONFIGS["qwen3"], jax.tree.map(np.copy, params_of("qwen3"))
    kernel = params["layers"]["self_attn"]["q_proj"]["kernel"]
    kernel[1, 2, 3:5] = np.nan if dtype == "float32" else 3.4e38
    with pytest.raises(UserError, match=r"2 of the 8,192 elements of tensor .*1\.self_attn\.q_pro"):
        hf.save(tmp_path / "new", config, params, dtype=dtype)
    assert not list(tmp_path.iterdir())
    hf.save(tmp_path / "new", config, params, dtype=dtype, check_finite=False)


def test_numbers_of_config_json_are_finite():
    """Each by name, wherever it is."""
    for changes, words in (
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rope_scaling": {"factor": float("nan")}}, "rope_scaling.factor is nan"),
        ({"initializer_range": -float("inf")}, "initializer_range is -inf"),
        ({"more": [0.5, {"x": float("nan")}]}, r"more\[1\].x is nan"),
    ):
        fields = Fields(_fields("qwen3") | changes, "config.json")
        with pytest.raises(UserError, match=f"config.json: {words}; write a number that is finite"):
            hf.config_json.read_config(fields)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen3", {"num_hidden_layers": 10**9}),
        ("qwen3", {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}),
        ("qwen3", {"intermediate_size": 10**9}),
        ("qwen3", {"num_attention_heads": 10**9, "num_key_value_heads": 10**9}),
        ("qwen3_moe", {"num_experts": 10**9}),
        ("qwen3_moe", {"moe_intermediate_size": 10**9}),
        ("moonlight", {"num_attention_heads": 10**9, "num_key_value_heads": 10**9}),
        ("moonlight", {"n_routed_experts": 10**9}),
        ("moonlight", {"n_shared_experts": 10**9}),
        ("moonlight", {"kv_lora_rank": 10**9}),
        ("deepseek_v3", {"q_lora_rank": 10**9}),
        ("deepseek_v3", {"v_head_dim": 10**9}),
        ("qwen3", {"num_hidden_layers": 10**10}),
        ("qwen3", {"rope_theta": 10**400}),
    ],
)
def test_more_than_the_files_hold(name, changes, tmp_path):
    """Refused at once: nothing is counted up to these numbers."""
    tensors = named(CONFIGS[name], params_of(name))
    path = write(tmp_path / "model", _fields(name) | changes, tensors)
    words = (
        r"of config.json make a model of .* and the files hold|write a .*number (from|of at most)"
    )
    with pytest.raises(UserError, match=words), time_limit():
        hf.load(path)
