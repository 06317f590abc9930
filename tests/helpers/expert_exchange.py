"""Run by test_expert_parallel.py in a process of its own: a layer of experts on several devices
beside one, as JSON.

    python expert_exchange.py '{"recipe": "fp8", "meshes": [[1, 4]], "tokens": 24, "route": "half"}'

Meshes are [fsdp, expert]. With "gradient" also the gradients of rows, router weights and experts,
and what the probes of sites observed; with "biases" experts have some.
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8rl_jax import sharding
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import ModelConfig, Parallel, moe
from fp8rl_jax.models.parallel import experts as expert_parallel
from fp8rl_jax.quant import (
    BoundWeight,
    compute_value,
    get_recipe,
    init_probe,
    init_site,
    quantize_weight,
)
from fp8rl_jax.quant.operands import COUNTS

_EXPERTS, _CHOSEN = 16, 4
CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=256,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=_EXPERTS,
    num_experts_per_tok=_CHOSEN,
    moe_intermediate_size=128,
)
_WIDE = (_EXPERTS, CONFIG.hidden_size, CONFIG.moe_intermediate_size)
SHAPES = {"gate_proj": _WIDE, "up_proj": _WIDE, "down_proj": (_WIDE[0], _WIDE[2], _WIDE[1])}


BIASES = {f"{n.removesuffix('_proj')}_bias": (s[0], s[2]) for n, s in SHAPES.items()}


def _routes(route: str, tokens: int, rng) -> np.ndarray:
    """(tokens, k) experts: 'random'; 'half' of the tokens want expert 3; 'one': each token goes to
    the same k, which are one device's where there are four."""
    logits = rng.standard_normal((tokens, _EXPERTS))
    if route == "half":
        logits[: tokens // 2, 3] += 8
    if route == "one":
        logits[:, 4:8] += 50
    return np.argsort(-logits, axis=1)[:, :_CHOSEN].astype(np.int32)


def _bound(recipe, name: str, master: np.ndarray, probes: bool) -> BoundWeight:
    """An expert's weight as the learner's forward pass sees it."""
    own, value = recipe.for_module(name), jnp.asarray(master)
    site = init_site(own, master.shape)
    probe = init_probe(own, master.shape, True) if probes else None
    if own.weight is None:
        return BoundWeight(compute_value(value, own), value, site, probe)
    return BoundWeight(quantize_weight(value, own, site)[0], value, site, probe)


def main() -> None:
    case = json.loads(sys.argv[1])
    recipe, tokens = get_recipe(case["recipe"]), case["tokens"]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, CONFIG.hidden_size)).astype(np.float32)
    chosen = _routes(case["route"], tokens, rng)
    weights = rng.random((tokens, _CHOSEN)).astype(np.float32)
    cotangent = rng.standard_normal(x.shape).astype(np.float32)
    masters = {n: (rng.standard_normal(s) / 16).astype(np.float32) for n, s in SHAPES.items()}
    gradient = case.get("gradient", False)
    shapes = BIASES if case.get("biases") else {}
    biases = {n: (rng.standard_normal(s) / 8).astype(np.float32) for n, s in shapes.items()}

    def layer(run, x, weights, chosen, experts):
        rows = compute_value(x, recipe)[None]
        y = run(CONFIG, recipe, rows, weights[None], chosen[None], experts)[0]
        return y.astype(jnp.float32)

    def everything(apply):
        """Result of `apply`, and with "gradient" its gradients, of all whole arrays."""

        def run(x, weights, chosen, experts):
            y = apply(x, weights, chosen, experts)
            if not gradient:
                return {"y": y}

            def value(x, weights, trained):
                bound = {n: trained[n][0] for n in biases}
                for n, p in zip(SHAPES, trained["probes"], strict=True):
                    w = experts[n]
                    bound[n] = BoundWeight(w.value, *trained[n], scaling=w.scaling, probe=p)
                return (apply(x, weights, chosen, bound) * cotangent).sum()

            trained = {n: (experts[n].master,) for n in SHAPES}
            trained |= {n: (experts[n],) for n in biases}
            trained["probes"] = [experts[n].probe for n in SHAPES]
            dx, dweights, found = jax.grad(value, argnums=(0, 1, 2))(x, weights, trained)
            return {"y": y, "dx": dx, "dweights": dweights, "found": found}

        return run

    experts = {
        n: exact_jit(lambda m, n=n: _bound(recipe, n, m, gradient))(m) for n, m in masters.items()
    } | biases
    one = jax.device_get(
        exact_jit(everything(lambda *a: layer(moe.moe_forward, *a)))(x, weights, chosen, experts)
    )
    results = []
    for fsdp, expert in case["meshes"]:
        mesh = jax.make_mesh(
            (1, fsdp, 1, expert),
            sharding.MESH_AXES,
            axis_types=(AxisType.Auto,) * 4,
            devices=jax.devices()[: fsdp * expert],
        )

        def over_devices(x, weights, chosen, experts, mesh=mesh):
            return Parallel.on(mesh).by_own_rows(
                lambda *a: layer(expert_parallel.exchange_forward, *a),
                x,
                weights,
                chosen,
                shared=(experts,),
                spec=PartitionSpec("expert"),
            )

        parts = NamedSharding(mesh, PartitionSpec("expert"))
        held = jax.device_put(jax.device_get(experts), parts)
        many = jax.device_get(exact_jit(everything(over_devices))(x, weights, chosen, held))
        results.append(_compare(one, many) | {"mesh": [fsdp, expert]})
    print(json.dumps(results))


def _compare(one: dict, many: dict) -> dict:
    """Numbers that differ in a bit, and relative errors of gradients and of observations."""
    ours, theirs = one["y"].view(np.int32), many["y"].view(np.int32)
    found = {"differ": int((ours != theirs).sum()), "size": float(np.abs(one["y"]).mean())}
    norm = np.linalg.norm
    for name in ("dx", "dweights"):
        if name in one:
            found[name] = float(norm(one[name] - many[name]) / norm(one[name]))
    if "found" in one:
        found["dexperts"] = max(
            float(norm(a - b) / norm(a))
            for a, b in (
                (one["found"][n][0], many["found"][n][0]) for n in one["found"] if n != "probes"
            )
        )
        seen, other = (_observed(x["found"]["probes"]) for x in (one, many))
        found["observed"] = {n: float(np.abs(x).sum()) for n, x in seen.items()}
        found["differently"] = [n for n, x in seen.items() if not np.array_equal(x, other[n])]
    return found


def _observed(probes: list) -> dict[str, np.ndarray]:
    """What the probes saw, by site, operand and count; not how many elements: tiles are filled up
    with zeros."""
    found = {}
    for name, probe in zip(SHAPES, probes, strict=True):
        for operand in ("activation", "gradient"):
            seen = probe and getattr(probe, operand)
            if seen and seen.amax is not None:
                found[f"{name} {operand} amax"] = seen.amax
            if seen and seen.counts is not None:
                named = zip(COUNTS, np.moveaxis(seen.counts, -1, 0), strict=True)
                found |= {f"{name} {operand} {n}": x for n, x in named if n != "elements"}
    return found


if __name__ == "__main__":
    main()
