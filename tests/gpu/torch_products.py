"""PyTorch's blockwise-scaled FP8 product (cuBLASLt), timed as `kernel_times` times ours.

A program of its own, so that PyTorch and JAX do not share a process or its memory:

    python tests/gpu/torch_products.py '[4096, 4096, 4096]' '[64, 4096, 4096]'

prints a JSON object for each rows x depth x columns: {'us', 'form'}, or {'error': text} where
PyTorch, its GPU or such a product is missing. Calls are replayed as a CUDA graph, since Python
launches one in more time than a product of few rows takes; 'form' says where that fails. PyTorch's
interface to these scales has changed between versions, so several forms are tried; one whose result
is wrong counts as refused.
"""

from __future__ import annotations

import json
import math
import sys
import time

_L2, _REPEATS, _PROGRAMS = 60e6, 7, 10
_WRONG = 0.02  # of the norm; FP8 operands are exact here, the result is rounded to bf16


def _forms(torch):
    """{name: product(x, w^T, x_scale, w_scale)}, the newer interface first."""
    found, functional = {}, torch.nn.functional
    if hasattr(functional, "scaled_mm") and hasattr(functional, "ScalingType"):
        kinds = functional.ScalingType
        found["scaled_mm"] = lambda x, wt, sx, sw: functional.scaled_mm(
            x, wt, sx, kinds.BlockWise1x128, sw, kinds.BlockWise128x128, output_dtype=torch.bfloat16
        )
    if hasattr(torch, "_scaled_mm"):
        found["_scaled_mm"] = lambda x, wt, sx, sw: torch._scaled_mm(
            x, wt, scale_a=sx, scale_b=sw, out_dtype=torch.bfloat16
        )
    return found


def _orders(torch, scale):
    """The weight's scales (KB, NB) in the memory orders that versions have asked for."""
    deep, wide = scale.shape
    padded = torch.zeros(wide, -(-deep // 4) * 4, device="cuda")
    padded[:, :deep] = scale.t()
    return {
        "along K": scale.t().contiguous().t(),
        "along N": scale.contiguous(),
        "along K, padded to 4": padded[:, :deep].t(),
        "transposed": scale.t().contiguous(),
    }


def _is_right(y, x, wt, sx, sw) -> bool:
    left = x[:64].float() * sx[:64].repeat_interleave(128, 1)[:, : x.shape[1]]
    wide = sw.repeat_interleave(128, 0)[: wt.shape[0]].repeat_interleave(128, 1)[:, : wt.shape[1]]
    want = left.double() @ (wt.float() * wide).double()
    return bool((y[:64].double() - want).norm() / want.norm() < _WRONG)


def _choose(torch, operands, scale):
    """(name, product, scales of the weight) of the first form that computes the product."""
    refusals = []
    for form, product in _forms(torch).items():
        for order, ordered in _orders(torch, scale).items():
            name = f"{form}, scales {order}"
            try:
                if _is_right(product(*operands, ordered), *operands, scale):
                    return name, product, ordered
                refusals.append(f"{name}: a wrong result")
            except Exception as error:
                refusals.append(f"{name}: {' '.join(str(error).split())[:160]}")
    raise RuntimeError("; ".join(refusals) or "no blockwise product")


def measure(rows: int, depth: int, columns: int) -> dict:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no CUDA device")
    torch.manual_seed(0)
    fp8 = torch.float8_e4m3fn

    def operands():
        x, w = (torch.randn(n, depth, device="cuda").to(fp8) for n in (rows, columns))
        # cuBLASLt reads the rows' scales with rows next to each other.
        return x, w.t(), (torch.rand(-(-depth // 128), rows, device="cuda") + 0.5).t()

    size = rows * depth + depth * columns + 2 * rows * columns
    sets = [operands() for _ in range(max(2, math.ceil(4 * _L2 / size)))]
    scale = torch.rand(-(-depth // 128), -(-columns // 128), device="cuda") + 0.5
    name, product, scale = _choose(torch, sets[0], scale)

    def run() -> None:
        for one in sets:
            product(*one, scale)

    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    except Exception as error:
        name += f"; no CUDA graph: {' '.join(str(error).split())[:80]}"
        replay = run

    def median() -> float:
        samples = []
        for _ in range(_REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_PROGRAMS):
                replay()
            torch.cuda.synchronize()
            samples.append((time.perf_counter() - start) / (_PROGRAMS * len(sets)))
        return sorted(samples)[_REPEATS // 2]

    median()
    return {"us": min(median(), median()) * 1e6, "form": name}


if __name__ == "__main__":
    for text in sys.argv[1:]:
        try:
            found = measure(*json.loads(text))
        except Exception as problem:
            found = {"error": " ".join(f"{type(problem).__name__}: {problem}".split())[:300]}
        print(json.dumps(found), flush=True)
