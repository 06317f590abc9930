"""PyTorch's blockwise-scaled FP8 product (cuBLASLt), timed as `kernel_times` times ours.

A program of its own, so that PyTorch and JAX do not share a process or its memory:

    python fp8rl_jax/bench/torch_products.py '[[4096, 4096, 4096]]'

prints one JSON object: {'torch': version, 'rows': [{'shape', 'us', 'spread'} or {'shape',
'error'}]}, or {'error': text} where PyTorch or its GPU is missing. PyTorch's interface to these
scales has changed between versions, so several forms are tried; one whose result is wrong counts as
refused. Imports nothing of this library.
"""

from __future__ import annotations

import json
import math
import sys
import time

_L2 = 60e6
_REPEATS = 7
_WRONG = 0.02  # of the norm; FP8 operands are exact here, the result is rounded to bf16


def _scales(torch, rows: int, columns: int):
    """Float32 (rows, columns), columns contiguous along rows: as cuBLASLt reads them."""
    return (torch.rand(columns, rows, device="cuda") + 0.5).t()


def _forms(torch):
    """{name: product(x, w^T, x_scale, w_scale)}, the newer interface first."""
    found = {}
    functional = torch.nn.functional
    if hasattr(functional, "scaled_mm") and hasattr(functional, "ScalingType"):
        recipe = functional.ScalingType

        def newer(x, wt, sx, sw):
            return functional.scaled_mm(
                x, wt, sx, recipe.BlockWise1x128, sw, recipe.BlockWise128x128,
                output_dtype=torch.bfloat16,
            )  # fmt: skip

        found["scaled_mm"] = newer
    if hasattr(torch, "_scaled_mm"):
        found["_scaled_mm"] = lambda x, wt, sx, sw: torch._scaled_mm(
            x, wt, scale_a=sx, scale_b=sw, out_dtype=torch.bfloat16
        )
    return found


def _arranged(torch, sw):
    """The weight's scales (KB, NB) in the memory orders that versions have asked for."""
    kb, nb = sw.shape
    padded = torch.zeros(nb, -(-kb // 4) * 4, device="cuda")
    padded[:, :kb] = sw.t()
    return {
        "along K": sw.t().contiguous().t(),
        "along N": sw.contiguous(),
        "along K, padded to 4": padded[:, :kb].t(),
        "transposed": sw.t().contiguous(),
    }


def _right(torch, y, x, wt, sx, sw) -> bool:
    left = x[:64].float() * sx[:64].repeat_interleave(128, 1)[:, : x.shape[1]]
    wide = sw.repeat_interleave(128, 0)[: wt.shape[0]].repeat_interleave(128, 1)[:, : wt.shape[1]]
    want = left.double() @ (wt.float() * wide).double()
    off = (y[:64].double() - want).norm() / want.norm()
    return bool(off < _WRONG)


def _measure(torch, rows: int, depth: int, columns: int) -> dict:
    def operand(height: int, width: int):
        return torch.randn(height, width, device="cuda").to(torch.float8_e4m3fn)

    size = rows * depth + depth * columns + 2 * rows * columns
    count = max(2, math.ceil(4 * _L2 / size))
    sets = []
    for _ in range(count):
        x, wt = operand(rows, depth), operand(columns, depth).t()
        sets.append((x, wt, _scales(torch, rows, -(-depth // 128))))
    weight_scale = torch.rand(-(-depth // 128), -(-columns // 128), device="cuda") + 0.5
    refusals, chosen = [], None
    for form, product in _forms(torch).items():
        for order, sw in _arranged(torch, weight_scale).items():
            try:
                y = product(*sets[0], sw)
                torch.cuda.synchronize()
            except Exception as error:
                refusals.append(f"{form}, scales {order}: {' '.join(str(error).split())[:160]}")
                continue
            if _right(torch, y, *sets[0], weight_scale):
                chosen = (f"{form}, scales {order}", product, sw)
                break
            refusals.append(f"{form}, scales {order}: a wrong result")
        if chosen:
            break
    if chosen is None:
        return {"error": "; ".join(refusals) or "no blockwise product"}
    name, product, sw = chosen
    programs = max(1, math.ceil(4e-3 / (count * 2.0 * rows * depth * columns / 1.2e15)))

    def median() -> float:
        samples = []
        for _ in range(_REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(programs):
                for one in sets:
                    product(*one, sw)
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) / (programs * count))
        return sorted(samples)[_REPEATS // 2]

    median()
    first, second = median(), median()
    best = min(first, second)
    return {"us": best * 1e6, "spread": abs(first - second) / best, "form": name}


def main() -> None:
    try:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA device")
        torch.manual_seed(0)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        return
    rows = []
    for shape in json.loads(sys.argv[1]):
        try:
            found = _measure(torch, *shape)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        rows.append({"shape": shape, **found})
        torch.cuda.empty_cache()
    print(json.dumps({"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
