"""MXFP4 files of gpt-oss: every number of the format, and files that do not fit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hf_checkpoints import CONFIGS, bf16, fields_of, named, params_of, write

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models import hf
from fp8rl_jax.models.hf.mxfp4 import unpack

_MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # E2M1: OCP Microscaling Formats 1.0, table 5
_QUANTISED = ("experts.gate_up_proj", "experts.down_proj")


def _number(code: int, exponent: int) -> float:
    if exponent == 255:
        return np.nan
    return (-1) ** (code >> 3) * _MAGNITUDES[code & 7] * 2.0 ** (exponent - 127)


def test_every_number():
    """All pairs of numbers in a byte, and every exponent whose numbers bf16 holds."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 2, 8, 16)
    scales = np.array([0, 2, 100, 126, 127, 128, 140, 251, 1, 3, 99, 125, 129, 130, 250, 255])
    scales = scales.astype(np.uint8).reshape(1, 2, 8)
    found = unpack(blocks, scales)
    assert found.shape == (1, 256, 2) and found.dtype.name == "bfloat16"
    for row, block, byte in np.ndindex(2, 8, 16):
        value, exponent = int(blocks[0, row, block, byte]), int(scales[0, row, block])
        pair = found[0, 32 * block + 2 * byte : 32 * block + 2 * byte + 2, row]
        expected = [_number(value & 15, exponent), _number(value >> 4, exponent)]
        np.testing.assert_array_equal(pair.astype(np.float64), expected)


def _fields() -> dict:
    return fields_of("gpt_oss") | {"quantization_config": {"quant_method": "mxfp4"}}


def _packed() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tensors of MXFP4 files, and of bf16 files of the same numbers."""
    rng = np.random.default_rng(0)
    packed, plain = {}, {}
    for name, value in named(CONFIGS["gpt_oss"], params_of("gpt_oss")).items():
        packed[name] = plain[name] = bf16(value)
        if name.endswith(_QUANTISED):
            experts, inputs, outputs = value.shape
            blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
            scales = rng.integers(118, 124, blocks.shape[:-1], np.uint8)
            del packed[name]
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = unpack(blocks, scales)
    return packed, plain


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_files_give_the_numbers_that_bf16_files_give(dtype, tmp_path):
    packed, plain = _packed()
    write(tmp_path / "mxfp4", _fields(), packed, shards=3)
    write(tmp_path / "bf16", fields_of("gpt_oss"), plain)
    config, params = hf.load(tmp_path / "mxfp4", dtype=dtype)
    assert config == CONFIGS["gpt_oss"]
    jax.tree.map(np.testing.assert_array_equal, params, hf.load(tmp_path / "bf16", dtype=dtype)[1])


_DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{_DOWN}_scales"), f"no {_DOWN}_scales"),
        (lambda t: t.pop(f"{_DOWN}_blocks"), f"no tensor {_DOWN}"),
        (lambda t: t.update({_DOWN: bf16(np.ones((8, 32, 64)))}), f"holds tensor {_DOWN} twice"),
        (lambda t: t.update({f"{_DOWN}_scales": bf16(np.ones((8, 64, 1)))}), "has type BF16"),
        (lambda t: t.update({f"{_DOWN}_scales": np.ones((8, 64, 2), np.uint8)}), "does not fit"),
        (
            lambda t: t.update({f"{_DOWN}_scales": np.full((8, 64, 1), 255, np.uint8)}),
            f"of tensor {_DOWN} are NaN or infinite",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(change, words, tmp_path):
    packed, _ = _packed()
    change(packed)
    write(tmp_path / "model", _fields(), packed)
    with pytest.raises(UserError, match=words):
        hf.load(tmp_path / "model")


def test_fp8_files_of_packed_experts_are_refused(tmp_path):
    """Before any weight is read."""
    with pytest.raises(UserError, match="write 'bf16'"):
        hf.save(tmp_path / "out", CONFIGS["gpt_oss"], params_of("gpt_oss"), dtype="fp8")
    write(tmp_path / "model", _fields(), {"damaged": np.zeros(3, np.float32)})
    with pytest.raises(UserError, match="write 'bf16'"):
        hf.convert(tmp_path / "model", tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()
