"""FP8 in Hugging Face checkpoints: E4M3 bytes, and one scale per block of 128x128.

DeepSeek-V3's format (arXiv:2412.19437, and the `quantization_config` of its config.json), which
Qwen3's FP8 files share: ``X.weight``, F8_E4M3 (out, in), comes with ``X.weight_scale_inv``,
(ceil(out / 128), ceil(in / 128)), and ``value = weight * weight_scale_inv``. Despite its name the
scale is what QArray calls `scale`. Blocks are square, so our (in, out) form is the transposed bytes
with transposed scales: reading and writing requantise nothing.
"""

from __future__ import annotations

from typing import Any

from fp8rl_jax.models.arrays import LINEAR
from fp8rl_jax.models.families.fields import Fields
from fp8rl_jax.models.hf.tables import Tensor

BLOCKS = (128, 128)
SCALE_SUFFIX = ".weight_scale_inv"
MXFP4 = "mxfp4"  # of gpt-oss's experts, hf/mxfp4.py
_OTHER = "only blockwise FP8 is supported: take the BF16 checkpoint, or one in that format"


def quantisation_of(fields: Fields) -> str | None:
    """Returns how a config.json says that weights are stored: 'fp8', E4M3 with scales of 128x128
    blocks; 'mxfp4' in gpt-oss; None without `quantization_config`.

    Raises:
      UserError: it declares another kind of quantisation.
    """
    part = fields.part("quantization_config")
    if part is None:
        return None
    method = part.values.get("quant_method")
    if method == MXFP4 and fields.values.get("model_type") == "gpt_oss":
        return MXFP4
    if method != "fp8":
        raise part.error("quant_method", _OTHER)
    part.require("fmt", ("e4m3",), _OTHER)
    part.require("activation_scheme", ("dynamic",), "only dynamic is supported: " + _OTHER)
    part.require("scale_fmt", ("float", "ue8m0"), _OTHER)
    part.require("expert_dtype", ("fp8",), _OTHER)
    block = part.values.get("weight_block_size")
    if not isinstance(block, list | tuple) or tuple(block) != BLOCKS:
        raise part.error("weight_block_size", f"only {list(BLOCKS)} is supported: " + _OTHER)
    return "fp8"


def quantization_config(tensors: list[Tensor]) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint whose linear layers are FP8.

    Args:
      tensors: tensors of the model; modules without an FP8 tensor are listed by name.
    """
    quantised = {tensor.module for tensor in tensors if tensor.role == LINEAR}
    kept = {tensor.module for tensor in tensors} - quantised
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCKS),
        # A tied head has no tensor, but other programs treat it as a linear layer.
        "modules_to_not_convert": sorted({*kept, "lm_head"}),
    }


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a matrix's scales: ceil(n / 128) per axis."""
    return tuple(-(-n // block) for n, block in zip(shape, BLOCKS, strict=True))
