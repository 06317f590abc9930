"""E4M3 by integer operations has the bits of XLA's own conversions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow

from fp8rl_jax.kernels import to_e4m3, widened

_E4M3 = jnp.float8_e4m3fn
_AT_ONCE = 1 << 22


@jax.jit
def _differing(first: jax.Array) -> jax.Array:
    """How many float32 numbers, whose bits follow `first`, are rounded otherwise than by XLA."""
    bits = first + jnp.arange(_AT_ONCE, dtype=jnp.uint32)
    x = jnp.clip(lax.bitcast_convert_type(bits, jnp.float32), -448, 448)
    ours, theirs = (lax.bitcast_convert_type(q, jnp.uint8) for q in (to_e4m3(x), x.astype(_E4M3)))
    return (ours != theirs).sum()


# Around 2**-10 to 2**-6, where rounding changes its form; 448 and above; NaN; all numbers.
@pytest.mark.parametrize(
    "start",
    [0x3A800000, 0x3C600000, 0x43C00000, 0x7FC00000, 0xBC600000, slow(None)],
    ids=["smallest", "near 2**-6", "largest", "NaN", "negative", "all numbers"],
)
def test_rounding(start):
    starts = range(0, 1 << 32, _AT_ONCE) if start is None else [start]
    assert sum(int(_differing(jnp.uint32(first))) for first in starts) == 0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_widening(dtype):
    codes = np.arange(256, dtype=np.uint8).view(_E4M3)
    ours = np.asarray(jax.jit(lambda q: widened(q, dtype))(codes))
    assert ours.tobytes() == codes.astype(dtype).tobytes()


def test_a_wrong_rounding_would_be_seen():
    """The comparison's own check: numbers between two codes do not all round down."""
    x = np.float32(1 + np.arange(16) / 128)
    down = (x.view(np.uint32) & np.uint32(0xFFF00000)).view(np.float32)
    assert (np.asarray(to_e4m3(jnp.asarray(x))).astype(np.float32) != down).any()
