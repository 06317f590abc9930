"""Fast attention and attention's gradients against float64 numpy, on all of the result; speed.

A result's error is in units of the weighted sum of the values' magnitudes; a gradient's is the norm
of the difference over the gradient's norm. The kernels round weights, and what multiplies keys and
queries in the gradients, to bf16 for their products; with float32 operands only float32 roundings
remain.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_attention import Attention, float64
from gpu_checks import assert_close, assert_finite, print_time, reports

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.kernels import attention_vjp
from fp8rl_jax.kernels.gpu import fast_attention

pytestmark = pytest.mark.gpu

BF16, BF16_GRADIENT, FLOAT32 = 2.0**-8, 4e-3, 4e-6
CASES = (
    Attention("int8", 300, (300, 300), 8, 2, paged=False),
    Attention("bf16", 200, (333, 333), 8, 2, paged=False),
    Attention("fp8", 130, (130,), 16, 8, 64, paged=False),
    Attention("bf16", 100, (100,), 4, 1, 256, paged=False),
    Attention("float32", 70, (130,), 4, 2, 64, paged=False),
)


def run(operands):
    """(the result, (dq, dk, dv))."""
    *arrays, cotangent = (operands[n] for n in ("q", "k", "v", "positions", "cotangent"))
    settings = {name: x for name, x in operands.items() if name.endswith("_scale")}
    settings["scale"] = arrays[0].shape[-1] ** -0.5
    out, _ = fast_attention.forward(fast_attention.prepare(*arrays, **settings))
    return out, attention_vjp(*arrays, cotangent, implementation="triton", **settings)


def given(case: Attention, source) -> dict[str, jax.Array]:
    operands = case.operands(source)
    q = operands["q"]
    return operands | {"cotangent": source.take(q.dtype, *q.shape)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64(case, source):
    operands = given(case, source)
    out, gradients = exact_jit(run)(operands)
    assert_finite(str(case), out)
    want, exact = float64(case, operands), case.kind == "float32"
    assert_close(str(case), out, want["out"], want["size"], FLOAT32 if exact else BF16)
    for name, got in zip(("dq", "dk", "dv"), gradients, strict=True):
        norm = np.linalg.norm(want[name])
        found = np.linalg.norm(np.asarray(got, np.float64) - want[name]) / norm
        text = f"{name} of {case}: error {found:.2g}"
        print(text)
        assert found <= (FLOAT32 if exact else BF16_GRADIENT), text


@reports
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_speed(kind, source, tokens=4096):
    """Gradients of one sequence, beside XLA's own attention of bf16 operands and its gradients."""
    case = Attention(kind, tokens, (tokens,), paged=False)

    def library(operands):
        def forward(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        arrays = (operands[name].astype(jnp.bfloat16) for name in "qkv")
        out, vjp = jax.vjp(forward, *arrays)
        return out, vjp(operands["cotangent"])

    moved = 2 * sum(x.nbytes for x in given(case, source).values())
    flops = 7.0 * case.heads * case.width * tokens * (tokens + 1)  # seven products, causal
    what = f"attention and gradients, {case}"
    ours = lambda operands: run(operands)[1]  # its forward pass is not used, so it is left out
    print_time(what, flops, moved, lambda: (given(case, source),), ours, XLA=library)
