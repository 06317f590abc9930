"""The plan of a train step: counted against real arrays, estimated against the compiler."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from marks import slow
from planned import mesh_of, resolved_as
from random_model import initial_params

from fp8rl_jax import models
from fp8rl_jax.batch import make_batch
from fp8rl_jax.kernels import gpu_kernels
from fp8rl_jax.learner import new_state
from fp8rl_jax.plan.bytes import weight_bytes
from fp8rl_jax.plan.learner import HEAD_TOKENS, Workload, plan_learner
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer

_DENSE = models.ModelConfig(96, 64, 128, 2, 4, 2, 16)
_EXPERTS = dataclasses.replace(
    _DENSE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=1
)
_WORK = Workload(rows=4, prompt=16, response=48, micro_batches=2, remat="full")


def _nbytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _plan(model=_DENSE, axes=None, recipe="fp8", fields=None, **work):
    resolved = resolved_as(model, get_recipe(recipe), **(fields or {}))
    return plan_learner(resolved, mesh_of(**(axes or {})), dataclasses.replace(_WORK, **work))


@pytest.mark.parametrize(
    ("model", "recipe"),
    [(_EXPERTS, "fp8"), slow(_DENSE, "fp8"), slow(_DENSE, "bf16"), slow(_DENSE, "fp8_delayed")],
    ids=["experts", "fp8", "bf16", "delayed"],
)
def test_counts_are_those_of_real_arrays(model, recipe):
    """Masters, moments, states, own weights and batch of one device, byte for byte."""
    params = initial_params(model)
    optimizer = make_optimizer(learning_rates(1e-4, 1), 0.9, 0.99, 0.0, 1.0)

    @jax.jit
    def stored(params):
        state = new_state(params, optimizer, np.zeros(2, np.uint32), recipe)
        return state, models.quantize_params(params, recipe, state.scaling_state)

    state, own = stored(params)
    rows, (length, response) = _WORK.rows * _WORK.micro_batches, (64, _WORK.response)
    tokens, targets = (np.zeros((rows, n), np.int32) for n in (length, response))
    batch = make_batch(tokens, np.ones(rows, np.int32), targets, targets > 0, np.ones(rows))
    plan = _plan(model, recipe=recipe)
    assert plan.masters == _nbytes(params)
    assert plan.own_weights == _nbytes(own)
    counters = 16  # the optimiser's counts of updates
    assert plan.moments <= _nbytes(state.opt_state) <= plan.moments + counters
    by_row = 16 * rows  # lengths and temperatures
    left = plan.others - _nbytes(state.scaling_state)
    assert left <= _nbytes(batch) <= left + by_row
    with_reference = _plan(model, recipe=recipe, fields={"algo": {"kl_coef": 0.1}})
    assert with_reference.others == plan.others + plan.masters


def test_offloaded_moments():
    """They are in the host's memory; the update, a second program, holds those of the largest
    array."""
    here, away = (_plan(fields={"learner": {"offload": o}}) for o in ("none", "moments"))
    assert here.host_moments == 0 == away.moments and away.host_moments == here.moments
    assert here.state - away.state == here.moments
    largest = max(4 * x.size for x in jax.tree.leaves(models.param_shapes(_DENSE)))
    assert away.optimizer == 3 * largest < here.optimizer
    small = dataclasses.replace(away, head=0, layer=0, layer_inputs=0, tables=0, own_weights=0)
    assert small.needed == small.state + small.gradients + small.optimizer
    assert away.needed < here.needed


def test_parts():
    """Masters are sharded over `fsdp`, experts over `expert` too, and nothing over `data`."""
    whole = _plan(_EXPERTS)
    experts = weight_bytes(models.param_shapes(_EXPERTS), mesh_of()).experts
    small = 4 * (2 * (2 * 64 + 2 * 16) + 64)  # norms are replicated
    assert _plan(_EXPERTS, {"fsdp": 2}).masters == (whole.masters + small) // 2
    both = _plan(_EXPERTS, {"fsdp": 2, "expert": 2})
    assert both.masters == (whole.masters + small) // 2 - experts // 4
    assert both.moments == 2 * both.masters == both.gradients
    assert _plan(_EXPERTS, {"data": 4}).masters == whole.masters


def test_gathered_weights():
    """Layers are gathered over `fsdp`; experts stay sharded over `expert`."""

    def gathered(**axes):
        return weight_bytes(models.param_shapes(_EXPERTS), mesh_of(**axes))

    expert = 3 * 4 * 64 * 64  # gate, up and down, float32
    one = gathered()
    assert one.experts == 4 * expert  # the first layer is dense
    assert gathered(fsdp=4).experts == one.experts
    assert gathered(fsdp=2, expert=2).experts == one.experts // 2
    assert gathered(fsdp=2, expert=2).dense == one.dense
    assert one.tables == 2 * 4 * 96 * 64
    assert one.layer >= 4 * expert


def test_the_heads_chunk():
    """As many tokens as the kernel takes at once."""
    pytest.importorskip("jax_triton", reason="needs jax-triton: pip install 'fp8rl_jax[dev]'")
    assert gpu_kernels().head.CHUNK == HEAD_TOKENS
    table = 4 * _DENSE.vocab_size * _DENSE.hidden_size
    few, many = (_plan(rows=1, response=n).head for n in (4096, 4097))
    assert many - few == table + 2 * 4 * _DENSE.hidden_size  # the gradient so far, and a row


def test_the_peak():
    """State, held arrays, and the largest of the temporary arrays of head, layer and optimiser."""
    plan = _plan()
    at_work = max(plan.head, plan.layer, plan.optimizer)
    held = plan.gradients + plan.own_weights + plan.layer_inputs + plan.tables
    assert plan.state == plan.masters + plan.moments + plan.others
    assert plan.needed == pytest.approx(plan.state + 1.1 * (held + at_work), abs=1)
    assert plan.gradients == 2 * plan.masters == 2 * _plan(micro_batches=1).gradients
    # Layers, rows, tokens, features of a layer's input and of attention's result in bf16.
    assert plan.layer_inputs == 2 * 4 * 64 * (64 + 64) * 2
    assert _plan(rows=8).layer_inputs == 2 * plan.layer_inputs
    assert _plan(remat="none").layer_inputs > 3 * plan.layer_inputs
    assert _plan(recipe="f32").layer_inputs == 2 * plan.layer_inputs
