"""Faults that make rollout and learner differ, planted on one side while it is traced.

Each is what someone once got wrong in a real system.
`python tests/helpers/drift_faults.py` prints what the analysis says of every one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8rl_jax import learner as learner_module
from fp8rl_jax import models
from fp8rl_jax.config import load_config
from fp8rl_jax.drift import Programs, analyse
from fp8rl_jax.learner import LossConfig
from fp8rl_jax.models import attention, decoder_layer, feed_forward, layers
from fp8rl_jax.quant import Activation, Recipe, compute_value, get_recipe, rule
from fp8rl_jax.rollout import sampler
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import make_runtime

Patch = Callable[[], contextlib.AbstractContextManager]
_CONFIG = pathlib.Path(__file__).resolve().parent / "tiny_config.py"
_F32 = ("precision.rollout=f32", "precision.learner=f32")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is planted, and what the verdict must hold.

    Attributes:
      config: overrides of tests/helpers/tiny_config.py.
      rollout, learner: patches that hold while that side is traced.
      stale: the rollout keeps its weights through one update.
      culprit, layer: of the verdict.
      words: that its sentence or advice must contain.
      everywhere: the fault is in several operations; the first is named.
      may_vanish: the fault may leave the bits as they are on some platforms, which the verdict
        must then say.
    """

    config: tuple[str, ...] = ()
    rollout: Patch = contextlib.nullcontext
    learner: Patch = contextlib.nullcontext
    stale: bool = False
    culprit: str = ""
    layer: int | None = None
    words: tuple[str, ...] = ()
    everywhere: bool = False
    may_vanish: bool = False


@dataclasses.dataclass
class _Planted(Programs):
    fault: Fault = dataclasses.field(default_factory=Fault)

    def rollout(self, *args):
        with self.fault.rollout():
            return super().rollout(*args)

    def learner(self, *args):
        with self.fault.learner():
            return super().learner(*args)

    def swapper(self, *args):
        swapped = super().swapper(*args)

        def patched(chosen):
            with self.fault.learner():
                return swapped(chosen)

        return patched


def _no_round_trip(x, recipe: Recipe, name, scale=None):
    return compute_value(x, recipe), jnp.ones(x.shape[:-1])


class _OneOddNorm(layers.RMSNorm):
    """The norm after attention divides by a square root; the others are as they should be."""

    @nn.compact
    def __call__(self, x):
        weight = self.param("weight", nn.initializers.ones_init(), (x.shape[-1],))
        if self.name != "post_attention_layernorm":
            y = layers.rms_norm(self.recipe, self.eps, False, self.parallel, x, weight)
        else:
            x = x.astype(jnp.float32)
            root = jnp.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
            y = Activation(compute_value(x * (1 / root) * weight, self.recipe))
        return layers.tap_activation(self, "output", y)


def _odd_norms(config, recipe, parallel):
    return functools.partial(_OneOddNorm, config.rms_norm_eps, recipe, parallel)


def _unrounded(x, recipe: Recipe):
    return x.astype(jnp.float32)


@contextlib.contextmanager
def _no_rounding():
    with (
        mock.patch.object(layers, "compute_value", _unrounded),
        mock.patch.object(rule, "compute_value", _unrounded),
    ):
        yield


def constant_tables(params, tokens, config, recipe, **options):
    """The model with rotary tables that it computes itself."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** (-jnp.arange(half) / half)
    angle = jnp.arange(tokens.ids.shape[1])[:, None] * frequency
    tokens = dataclasses.replace(tokens, rope=(jnp.cos(angle), jnp.sin(angle)))
    return models.hidden_states(params, tokens, config, recipe, **options)


def _whole_vocabulary(logits, scaled, tokens, *others):
    return models.logprobs_of_logits(scaled, tokens)


def _bf16_router(x, kernel, bias, implementation):
    del bias, implementation
    return (x.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(jnp.float32)


def first_layer_in_bf16() -> Recipe:
    """The default recipe with its first layer in bf16."""
    return dataclasses.replace(get_recipe("fp8"), name="first_layer_in_bf16", first_layers=1)


def _patch(target, name: str, value) -> Patch:
    return lambda: mock.patch.object(target, name, value)


FAULTS = {
    "bf16 learner": Fault(
        ("precision.learner=bf16",), culprit="recipe", words=("fp8", "bf16", "not quantised")
    ),
    "no KV round trip": Fault(
        learner=_patch(attention, "quantize_kv", _no_round_trip),
        culprit="self_attn/k_read",
        layer=0,
        words=("KV cache", "quantize_kv"),
    ),
    "stale weights": Fault(
        ("optimizer.warmup_steps=0",), stale=True, culprit="weights", words=("stale", "refit")
    ),
    "temperature forgotten": Fault(
        ("rollout.temperature=0.7",),
        learner=_patch(models.logprobs, "inverse_temperature", jnp.ones_like),
        culprit="logprob",
        words=("the learner leaves the temperature out",),
    ),
    "top-p not renormalised": Fault(
        ("rollout.top_p=0.8",),
        rollout=_patch(sampler, "drawn_logprobs", _whole_vocabulary),
        culprit="logprob",
        words=("the rollout takes the whole vocabulary",),
    ),
    "per-tensor activations": Fault(
        (
            "precision.rollout=fp8_tensorwise",
            "precision.learner=fp8_tensorwise",
            "precision.zero_drift=report",
        ),
        culprit="scaling",
        words=("whole tensor", "fp8_delayed"),
    ),
    "another KV chunk": Fault(
        _F32,
        learner=_patch(sys.modules["fp8rl_jax.kernels.reference.attention"], "KV_CHUNK", 8),
        culprit="self_attn/attention",
        layer=0,
        words=("keys", "chunks"),
        may_vanish=True,
    ),
    "1 / sqrt in one norm": Fault(
        _F32,
        learner=_patch(decoder_layer, "norm_of", _odd_norms),
        culprit="post_attention_layernorm/output",
        layer=0,
        words=("rsqrt",),
        may_vanish=True,
    ),
    "not rounded to bf16": Fault(
        learner=_no_rounding,
        everywhere=True,
        culprit="input_layernorm/output",
        layer=0,
        words=("learner's values", "not rounded to bf16"),
    ),
    "rotary tables as constants": Fault(
        _F32,
        learner=_patch(learner_module, "hidden_states", constant_tables),
        culprit="self_attn/q_rope",
        layer=0,
        words=("tables", "arguments"),
        may_vanish=True,
    ),
    "router in bf16": Fault(
        ("model.num_experts=8", "model.moe_intermediate_size=64"),
        learner=_patch(feed_forward, "router_logits", _bf16_router),
        culprit="router_logits",
        layer=0,
        words=("the router", "float32"),
    ),
    "one layer in bf16": Fault(
        ("precision.learner=drift_faults:first_layer_in_bf16",),
        culprit="layers",
        layer=0,
        words=("rollout first_layers=0", "learner first_layers=1"),
    ),
}


def programs(fault: Fault) -> Programs:
    """Both sides of a tiny run with random weights, and the fault."""
    config = load_config(str(_CONFIG), [f"--config.{text}" for text in fault.config])
    runtime = make_runtime(config)
    optimizer = optimizer_of_phase(config, "rl")
    state = runtime.engine.new_state(runtime.engine.init_params(), optimizer)
    questions = runtime.questions["train"][: config.rollout.prompts_per_step]
    weights = runtime.engine.refit(state).weights
    planted = _Planted(
        runtime, state, weights, questions, jax.random.key(5, impl="threefry2x32"), fault
    )
    if fault.stale:
        planted.state = _updated(planted, optimizer)
    return planted


def plant(name: str) -> dict:
    """The analysis of a tiny run with the fault."""
    jax.clear_caches()  # nothing traced without the fault may be found again
    return analyse(programs(FAULTS[name]))


def _updated(programs: Programs, optimizer):
    """The state after one train step on the programs' own samples."""
    step = programs.runtime.engine.train_step(optimizer, LossConfig(), 1, donate=False)
    batch = programs.batch(programs.rollout())
    state, _, metrics = step(programs.state, batch, programs.runtime.engine.rope)
    assert bool(np.asarray(metrics["good"]))
    return state


if __name__ == "__main__":
    for fault_name in sys.argv[1:] or FAULTS:
        verdict = plant(fault_name)["verdict"]
        print(f"{fault_name}\n  {verdict['culprit']}, layer {verdict['layer']}")
        print(f"  {verdict['sentence']}\n  {verdict['advice']}\n", flush=True)
