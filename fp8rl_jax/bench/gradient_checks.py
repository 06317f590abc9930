"""Correctness of fast attention and of attention's gradients: against float64 numpy, on all of it.

The oracle dequantises queries, keys and values, and takes the softmax and its derivative as they
are written. A result's error is in units of the weighted sum of the values' magnitudes, as in
attention_checks.py; a gradient's is the norm of the difference over the gradient's norm.

Bounds. The kernels round weights, and what multiplies keys and queries in the gradients, to bf16
for their products; with float32 operands only float32 roundings remain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from fp8rl_jax.bench.attention_checks import Operands
from fp8rl_jax.bench.kernel_checks import DTYPES, Outcome, guarded, judge
from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.exact_jit import exact_jit
from fp8rl_jax.kernels import attention, attention_vjp, gpu_kernels

_BF16, _BF16_GRADIENT = 2.0**-8, 4e-3
_FLOAT32 = 4e-6


@dataclasses.dataclass(frozen=True)
class FastAttention:
    """Attention of each sequence's last queries.

    Attributes:
      kind: of keys and values: 'fp8', 'bf16' or 'float32'; queries are bf16, or float32 too.
      batch: sequences.
      queries, keys: of a sequence; no more queries than keys.
      heads, kv_heads, width: of the heads.
    """

    kind: str
    batch: int
    queries: int
    keys: int
    heads: int = 8
    kv_heads: int = 2
    width: int = 128

    def __str__(self) -> str:
        return (
            f"{self.kind}, {self.batch} x {self.queries} queries of {self.keys} keys, "
            f"{self.heads} x {self.kv_heads} heads of {self.width}"
        )

    @property
    def scale(self) -> float:
        return self.width**-0.5

    def operands(self, source: Source) -> Operands:
        """q (B, T, H, Dh), k and v (B, S, Hkv, Dh), their scales, positions, and the cotangent."""
        other = jnp.float32 if self.kind == "float32" else jnp.bfloat16
        rows = (self.batch, self.queries, self.heads, self.width)
        slots = (self.batch, self.keys, self.kv_heads)
        positions = np.arange(self.keys - self.queries, self.keys, dtype=np.int32)
        found = {
            "q": source.take(other, *rows),
            "k": source.take(DTYPES[self.kind], *slots, self.width),
            "v": source.take(DTYPES[self.kind], *slots, self.width),
            "positions": jnp.asarray(np.broadcast_to(positions, rows[:2])),
            "cotangent": source.take(other, *rows),
        }
        if self.kind == "fp8":
            found |= {name: source.scales(*slots) for name in ("k_scale", "v_scale")}
        return found


CASES = (
    FastAttention("fp8", 2, 300, 300),
    FastAttention("bf16", 2, 200, 333),
    FastAttention("fp8", 1, 130, 130, 16, 8, 64),
    FastAttention("bf16", 1, 100, 100, 4, 1, 256),
    FastAttention("float32", 1, 70, 130, 4, 2, 64),
)


def float64(case: FastAttention, operands: Operands) -> dict[str, np.ndarray]:
    """'out', 'size' (the sums of its terms' magnitudes), 'dq', 'dk' and 'dv', in float64."""
    wide = {n: np.asarray(x).astype(np.float64) for n, x in operands.items()}
    for name in ("k", "v"):
        wide[name] = wide[name] * wide.get(f"{name}_scale", np.ones(1))[..., None]
    q, cotangent, group = wide["q"], wide["cotangent"], case.heads // case.kv_heads
    k, v = (np.repeat(wide[name], group, 2) for name in "kv")
    score = np.einsum("bthd,bshd->bhts", q, k) * case.scale
    seen = np.arange(case.keys) <= wide["positions"][:, None, :, None]
    score = np.where(seen, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    weight /= weight.sum(-1, keepdims=True)
    of_weight = np.einsum("bthd,bshd->bhts", cotangent, v)
    of_score = weight * (of_weight - (weight * of_weight).sum(-1, keepdims=True)) * case.scale

    def of_keys(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], case.kv_heads, group, case.width).sum(3)

    return {
        "out": np.einsum("bhts,bshd->bthd", weight, v),
        "size": np.einsum("bhts,bshd->bthd", weight, np.abs(v)),
        "dq": np.einsum("bhts,bshd->bthd", of_score, k),
        "dk": of_keys(np.einsum("bhts,bthd->bshd", of_score, q)),
        "dv": of_keys(np.einsum("bhts,bthd->bshd", weight, cotangent)),
    }


def check(case: FastAttention, source: Source, implementation: str) -> Iterator[Outcome]:
    """Fast attention, and the gradients after it, against float64; an outcome each."""
    rounds = implementation != "reference" and case.kind != "float32"
    result, gradients = f"fast attention, {case}", f"gradients of attention, {case}"

    def compute(operands: Operands):
        """(the result, whether it is finite, (dq, dk, dv))."""
        arrays = [operands[name] for name in ("q", "k", "v", "positions")]
        scales = {name: x for name, x in operands.items() if name.endswith("_scale")}
        settings = {"scale": case.scale, "implementation": implementation, **scales}
        if implementation == "reference":
            out = attention(*arrays, **settings)
        else:
            fast = gpu_kernels().fast_attention
            out, _ = fast.forward(fast.prepare(*arrays, scale=case.scale, **scales))
        found = attention_vjp(*arrays, operands["cotangent"], **settings)
        return out, jnp.isfinite(out).all(), found

    def of_result() -> Outcome:
        operands = case.operands(source)
        got, finite, _ = exact_jit(compute)(operands)
        want = float64(case, operands)
        limit = _BF16 if rounds else _FLOAT32
        return judge(result, got, want["out"], want["size"], limit, finite)

    def of_gradients() -> Outcome:
        operands = case.operands(source)
        *_, found = exact_jit(compute)(operands)
        want = float64(case, operands)
        errors = [
            np.linalg.norm(np.asarray(got, np.float64) - want[name]) / np.linalg.norm(want[name])
            for name, got in zip(("dq", "dk", "dv"), found, strict=True)
        ]
        error, limit = float(np.max(errors)), _BF16_GRADIENT if rounds else _FLOAT32
        detail = "" if error <= limit else "too large an error"  # NaN is none of the smaller
        return Outcome("float64", gradients, not detail, error, limit, detail)

    yield guarded("float64", result, of_result)
    yield guarded("float64", gradients, of_gradients)
