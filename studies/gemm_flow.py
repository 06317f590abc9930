"""Measures the errors of every GEMM of one forward and backward pass of a dense model.

A pass takes one sequence. Taps give the inputs and outputs of every linear layer; `Swap`s that
replace nothing give the gradients at these places. The loss is the mean negative log-probability
of each next token.

Errors are measured twice. When inputs *flow*, each recipe runs the complete pass, so a GEMM's
result also differs by the errors before it. From *equal* inputs, each GEMM is computed alone under
each recipe from the operands of the bf16 pass.

Keys and values are not quantised here, even if the recipe says so: attention is the same in all
passes, and only GEMMs of linear layers differ.

Not done: experts and latent attention, whose GEMMs have other taps; embedding and output head,
which no recipe quantises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import (
    Draws,
    ModelConfig,
    Swap,
    Tokens,
    hidden_states,
    output_head,
    rope_tables,
    token_logprobs,
)
from fp8rl_jax.models.arrays import ATTENTION, LINEAR, MLP
from fp8rl_jax.models.taps import Observe
from fp8rl_jax.quant import Recipe, matmul
from studies.cells import rounded

GEMMS = ("fprop", "dgrad", "wgrad")
MODULES = tuple("/".join(a.path[:-1]) for a in (*ATTENTION, *MLP) if a.role == LINEAR)
RECIPES = ("bf16", "fake", "fp8_blockwise")
# Pairs of recipes: the measured one, and the one that it is compared with.
PAIRS = (("fp8_blockwise", "bf16"), ("fake", "bf16"), ("fp8_blockwise", "fake"))
MEASURES = ("rms", "calc_diff")


class GemmFlow:
    """The programs of one model."""

    def __init__(self, config: ModelConfig, recipes: dict[str, Recipe]):
        """`recipes`: one for each name of RECIPES.

        Raises:
          UserError: the model has experts or latent attention.
        """
        if config.num_experts or config.latent:
            raise UserError(
                "study layers measures dense models with ordinary attention, and this one has "
                "experts or latent attention: name another model"
            )
        recipes = {name: dataclasses.replace(recipes[name], kv="none") for name in RECIPES}
        self._config = config
        self._passes = {name: _make_pass(config, recipe) for name, recipe in recipes.items()}
        self._gemms = {name: _make_gemms(recipe) for name, recipe in recipes.items()}

    def errors(self, params: Any, tokens: np.ndarray) -> dict[str, Any]:
        """Measures the errors from 'equal' inputs and when inputs 'flow', on one sequence.

        Args:
          params: float32 parameters of the model.
          tokens: (T,) ids; T is a multiple of 128, so that blocks along tokens are full.

        Returns:
          {'equal' | 'flow': (PAIRS, MEASURES, L, MODULES, GEMMS) as `rounded` lists}. 'rms' is
          ``|x - y| / |y|``, 'calc_diff' DeepGEMM's ``1 - 2 <x, y> / (|x|^2 + |y|^2)``.
        """
        rope = tuple(jnp.asarray(t) for t in rope_tables(self._config, len(tokens)))
        row = jnp.asarray(tokens, jnp.int32)[None]
        operands, results = {}, {}
        for name, run in self._passes.items():
            taps, gradients, (at_input, at_output) = run(params, row, rope)
            results[name] = {m: (taps[f"{m}/output"], at_input[m], gradients[m]) for m in MODULES}
            if name == "bf16":
                operands = {m: (taps[f"{m}/input"], at_output[m]) for m in MODULES}
        layers = self._config.num_hidden_layers
        found = {
            kind: np.zeros((len(PAIRS), len(MEASURES), layers, len(MODULES), len(GEMMS)))
            for kind in ("equal", "flow")
        }
        for place, (module, kernel) in enumerate(_kernels(params).items()):
            x, dy = operands[module]
            for layer in range(layers):
                flowing = {r: [a[layer] for a in results[r][module]] for r in RECIPES}
                arguments = x[layer, 0], kernel[layer], dy[layer, 0]
                alone = {name: gemms(*arguments) for name, gemms in self._gemms.items()}
                for kind, products in (("flow", flowing), ("equal", alone)):
                    for gemm in range(len(GEMMS)):
                        for pair, names in enumerate(PAIRS):
                            errors = _errors(*(products[name][gemm] for name in names))
                            found[kind][pair, :, layer, place, gemm] = errors
        return {kind: rounded(values) for kind, values in found.items()}


def _kernels(params: Any) -> dict[str, jax.Array]:
    """Returns {module: its weights in all layers, (L, K, N)}."""
    layers = flatten_dict(params["layers"], sep="/")
    return {module: layers[f"{module}/kernel"] for module in MODULES}


def _make_pass(config: ModelConfig, recipe: Recipe) -> Callable:
    """Returns (params, tokens (1, T), rope) -> ({tap: (L, 1, T, D)}, {module: wgrad (L, K, N)},
    ({module: gradient at its input}, {module: gradient at its output}))."""
    names = tuple(f"{m}/{end}" for m in MODULES for end in ("input", "output"))

    def loss(kernels, probes, params, tokens, rope):
        nowhere = jnp.zeros(config.num_hidden_layers, bool)
        swaps = {name: Swap(nowhere, value) for name, value in probes.items()}
        layers = flatten_dict(params["layers"], sep="/")
        layers |= {f"{module}/kernel": kernel for module, kernel in kernels.items()}
        params = params | {"layers": unflatten_dict(layers, sep="/")}
        observe = Observe(names, swaps)
        out = hidden_states(params, Tokens.of(tokens, rope), config, recipe, observe=observe)
        targets, ones = jnp.roll(tokens, -1, axis=1), jnp.ones(tokens.shape)
        head = output_head(params, config)
        logp, _ = token_logprobs(out.hidden, head, Draws(targets, ones), recipe)
        return -logp[:, :-1].mean(), out.aux["taps"]

    @exact_jit
    def run(params, tokens, rope):
        kernels = _kernels(params)
        shape = (config.num_hidden_layers, *tokens.shape)
        probes = {}
        for module, kernel in kernels.items():
            for end, width in zip(("input", "output"), kernel.shape[1:], strict=True):
                probes[f"{module}/{end}"] = jnp.zeros((*shape, width), recipe.compute_dtype)
        (wgrads, at), taps = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            kernels, probes, params, tokens, rope
        )
        ends = tuple({m: at[f"{m}/{end}"] for m in MODULES} for end in ("input", "output"))
        return taps, wgrads, ends

    return run


def _make_gemms(recipe: Recipe) -> Callable:
    """Returns (x (T, K), w (K, N), dy (T, N)) -> (y, dx, dw) of a linear layer, as in a model."""

    @exact_jit
    def gemms(x, w, dy):
        def layer(x, w):
            return matmul(recipe, x, w, dtype=recipe.compute_dtype)

        y, backward = jax.vjp(layer, x.astype(recipe.compute_dtype), w)
        return y, *backward(dy)

    return gemms


def _errors(x: jax.Array, y: jax.Array) -> tuple[float, float]:
    """Returns relative RMS and calc_diff of x against y; 0 if both arrays are 0."""
    a, b = (np.asarray(z).astype(np.float32).ravel() for z in (x, y))
    error, one, other = (float(np.vdot(z, z)) for z in (a - b, a, b))
    if not other:
        return (0.0, 0.0) if not error else (float("inf"), 1.0)
    return (error / other) ** 0.5, error / (one + other)


def execution_order(layers: int) -> list[tuple[int, int, int]]:
    """Lists (layer, index in MODULES, index in GEMMS) of every GEMM in the order of execution:
    forward by layers, then backward from the last, dgrad before wgrad."""
    forwards = [(layer, m, 0) for layer in range(layers) for m in range(len(MODULES))]
    return forwards + [
        (layer, module, gemm) for layer, module, _ in reversed(forwards) for gemm in (1, 2)
    ]
