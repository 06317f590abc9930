"""The learner: GRPO and supervised train steps, and the log-probabilities of given responses.

A train step quantises the parameters once, with the function that also refits the sampler, runs the
model on full sequences under `value_and_grad`, and returns the log-probabilities that *this step*
computed, on which drift is measured. Parameters stay float32; gradients are accumulated in
float32 over micro-batches; the state is donated.

States of scaling policies are frozen during the step, so that its forward pass is the rollout's.
The step's observations (amaxes of weights, activations and gradients) come back as the gradient of
its probes and update the states once, whatever the number of micro-batches.

Only response positions reach the output head: hidden states are gathered first, so that logits
exist for one chunk of response tokens at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax

from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.batch import Batch
from fp8rl_jax.kernels import resolve, sum_all, tree_norm
from fp8rl_jax.micro_batches import join_parts, over_parts
from fp8rl_jax.models import (
    ONE_DEVICE,
    ForwardOutput,
    ModelConfig,
    Parallel,
    Swap,
    checksum,
    head_logits,
    hidden_states,
    init_probes,
    init_scaling,
    output_head,
    quantize_params,
    token_divergences,
    token_logprobs,
    trainable_params,
    update_scaling,
)
from fp8rl_jax.models.logprobs import rows_at
from fp8rl_jax.models.masters import frozen, merged, trained, with_frozen, with_trained
from fp8rl_jax.models.router import expert_tokens, load_balance_loss
from fp8rl_jax.models.taps import LOGITS, NOTHING, ROUTING, Observe, batch_axis
from fp8rl_jax.quant import Recipe, merge_probes
from fp8rl_jax.quant.operands import COUNTS, OPERAND_CLASSES
from fp8rl_jax.rl.kl import Estimator
from fp8rl_jax.rl.losses import TokenLoss, ppo

Array = Any  # numpy on the host, jax.Array on the device


@flax.struct.dataclass
class TrainState:
    """The complete training state; restoring it resumes a run bit for bit.

    Attributes:
      params: float32 master parameters, or `Adapted`.
      opt_state: optax state of the current phase (SFT or RL).
      scaling_state: states of stateful scaling policies, by site, and scales of keys and values
        (quant/kv.py); {} if every scale is dynamic.
      step: () int32, number of finished SFT updates or RL steps.
      rng: key data (uint32) of the rollout key; each step folds its number into it.
      data_state: () int32, number of batches taken from the phase's stream.
    """

    params: dict
    opt_state: optax.OptState
    scaling_state: dict
    step: Array
    rng: Array
    data_state: Array


def policy_of(state: TrainState) -> dict[str, Any]:
    """Returns the fields of a state that its policy's log-probabilities depend on."""
    return {"params": state.params, "scaling_state": state.scaling_state}


def new_state(
    params,
    optimizer: optax.GradientTransformation,
    rng: Array,
    recipe: Recipe | str,
    scaling_state: dict | None = None,
) -> TrainState:
    """Returns the state at the start of a phase.

    Args:
      params: float32 masters, or `Adapted`.
      optimizer: optimiser of the phase.
      rng: key data; see `TrainState`.
      recipe: recipe of the learner.
      scaling_state: states at the end of an earlier phase; None for new states.
    """
    if scaling_state is None:
        scaling_state = init_scaling(params, recipe)
    return TrainState(
        params,
        opt_state=optimizer.init(trained(params)),
        scaling_state=scaling_state,
        step=jnp.int32(0),
        rng=rng,
        data_state=jnp.int32(0),
    )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static choices of the loss.

    Attributes:
      token_loss: a loss of rl/losses.py; supervised fine-tuning is `reinforce` with advantages 1.
      kl, kl_coef: estimator (rl/kl.py) and weight of the divergence from the reference policy;
        None leaves the divergence out.
      router_aux_coef: weight of `load_balance_loss`; 0 leaves it out.
      frozen_kl_coef: weight of the divergence from a frozen model, over the whole vocabulary;
        `Batch.frozen_hidden` must be there. 0 leaves it out.
    """

    token_loss: TokenLoss = dataclasses.field(default_factory=ppo)
    kl: Estimator | None = None
    kl_coef: float = 0.0
    router_aux_coef: float = 0.0
    frozen_kl_coef: float = 0.0


@dataclasses.dataclass(frozen=True)
class ForwardPass:
    """How the learner reads batches: static choices that its programs share.

    Attributes:
      model: shapes.
      recipe: numerics.
      parallel: the devices that share the work.
      remat: what the backward pass recomputes, as for `Observe`.
    """

    model: ModelConfig
    recipe: Recipe
    parallel: Parallel = ONE_DEVICE
    remat: str = "none"

    def run(self, params, batch: Batch, rope, observe: Observe = NOTHING) -> ForwardOutput:
        """Runs the model on a batch's sequences up to the output head."""
        return hidden_states(
            params,
            batch.inputs(rope),
            self.model,
            self.recipe,
            parallel=self.parallel,
            observe=dataclasses.replace(observe, remat=self.remat),
        )


def response_logprobs(
    forward_pass: ForwardPass, params, batch: Batch, rope, observe: Observe = NOTHING
) -> tuple[jax.Array, jax.Array, dict]:
    """Returns (logp, entropy) of the response tokens, each (B, R), and the aux of `hidden_states`.

    `params` and `observe` are those of `forward`, `rope` that of `Tokens`. `batch.routing` replaces
    the routers' results. If the batch has a frozen model's hidden states, aux has 'frozen_kl'
    (B, R), the divergence from that model.
    """
    recipe = forward_pass.recipe
    parallel = forward_pass.parallel
    everywhere = jnp.ones(forward_pass.model.num_hidden_layers, bool)
    routing = {name: Swap(everywhere, jnp.moveaxis(x, 0, 1)) for name, x in batch.routing.items()}
    replayed = dataclasses.replace(observe, swaps={**observe.swaps, **routing})
    out = forward_pass.run(params, batch, rope, replayed)
    hidden = rows_at(out.hidden, *batch.predictions)
    head = output_head(params, forward_pass.model, parallel)
    draws = batch.draws
    logp, entropy = token_logprobs(hidden, head, draws, recipe, parallel)
    if batch.frozen_hidden is not None:
        other = batch.frozen_hidden, batch.frozen_head
        out.aux["frozen_kl"] = token_divergences(hidden, head, other, draws, recipe, parallel)
    if LOGITS in observe.taps:
        logits = head_logits(hidden.reshape(-1, hidden.shape[-1]), head, recipe, parallel)
        out.aux["taps"][LOGITS] = logits.reshape(*batch.targets.shape, -1)
    return logp, entropy, out.aux


def keep_if(wanted: jax.Array, after, before):
    """Returns the tree `after` if () bool `wanted`, else the tree `before`."""
    return jax.tree.map(lambda new, old: jnp.where(wanted, new, old), after, before)


def make_score(forward_pass: ForwardPass) -> Callable:
    """Returns the jitted ``score(params, scaling_state, batch, rope) -> logp (B, R)``.

    It computes old and reference log-probabilities.
    """

    def score(params, scaling_state, batch: Batch, rope):
        weights = quantize_params(params, forward_pass.recipe, scaling_state)

        def run(part: Batch):
            return (), response_logprobs(forward_pass, weights, part, rope)[0]

        return over_parts(run, batch, forward_pass.parallel)[1]

    return exact_jit(score)


def make_hidden(forward_pass: ForwardPass, micro_batches: int = 1) -> Callable:
    """Returns the jitted ``hidden(weights, batch, rope) -> (B, R, D)``, the hidden state that
    predicts each response token, under weights of `quantize_params`. `micro_batches`: parts into
    which a batch of one sequence a row is split."""

    def hidden(weights, batch: Batch, rope):
        def run(part: Batch):
            return (), rows_at(forward_pass.run(weights, part, rope).hidden, *part.predictions)

        return over_parts(run, batch, forward_pass.parallel, micro_batches)[1]

    return exact_jit(hidden)


def count_experts(forward_pass: ForwardPass, weights, batch: Batch, rope) -> jax.Array:
    """Returns (S, E) int32, the number of a batch's tokens that each expert gets.

    Replayed routing (`batch.routing`) is counted directly; without it, a forward pass is run.

    Args:
      forward_pass, batch, rope: as for `response_logprobs`.
      weights: `quantize_params` of the masters.
    """
    if (chosen := batch.routing.get(ROUTING[0])) is not None:  # (B, L, T, k)
        of_layer = functools.partial(expert_tokens, forward_pass.model, valid=batch.valid)
        return jax.vmap(of_layer, in_axes=1)(chosen[:, forward_pass.model.dense_layers :])
    return forward_pass.run(weights, batch, rope).aux["expert_tokens"]


def _site_health(probes: dict, kv_health: dict) -> dict[str, dict[str, dict[str, jax.Array]]]:
    """Returns the counts of the probes, and those of the KV cache, if there are any: {operand
    class: {site: {count: (L,) or (L, E)}}}."""
    health: dict = {"kv": {"layers.self_attn": kv_health}} if kv_health else {}
    for operand in ("activation", "gradient"):
        for site, probe in probes.items():
            observed = getattr(probe, operand)
            if observed is not None and observed.counts is not None:
                counts = {count: observed.counts[..., i] for i, count in enumerate(COUNTS)}
                health.setdefault(OPERAND_CLASSES[operand], {})[site] = counts
    return health


@flax.struct.dataclass
class Gradients:
    """Gradients of one batch, and the state of the scaling policies after it.

    Attributes:
      params: float32 gradients, shaped as the parameters that are trained.
      changes: () bool, whether to make the update: loss and gradients are finite, a token counts.
      scaling_state: states after the batch; unchanged if the update is not made.
    """

    params: Any
    changes: jax.Array
    scaling_state: dict


class _Shared(NamedTuple):
    """What the micro-batches of an update share.

    Attributes:
      state: the state before the update.
      weights: `quantize_params` of its masters.
      probes: arguments whose gradients are observations of the scaling policies.
      rope: tables of `rope_tables`.
      loads: (S, E) int32, tokens of each expert in the update; None for those of the micro-batch.
    """

    state: TrainState
    weights: Any
    probes: dict
    rope: Any
    loads: jax.Array | None = None


class _Sums(NamedTuple):
    """Results of a micro-batch that are added up.

    Attributes:
      loss: () float32.
      gradients: float32, by the trained parameters.
      probes: observations of the scaling policies.
      broken: (L,) bool, whether a layer's output is not finite.
      counts: further sums, by their names in the metrics.
      kv_health: as `ForwardOutput.aux` has it; {} if that is not collected.
    """

    loss: jax.Array
    gradients: Any
    probes: dict
    broken: jax.Array
    counts: dict[str, jax.Array]
    kv_health: dict[str, jax.Array]

    def plus(self, other: _Sums) -> _Sums:
        """Returns the results of two micro-batches together."""
        return _Sums(
            self.loss + other.loss,
            jax.tree.map(jnp.add, self.gradients, other.gradients),
            merge_probes(self.probes, other.probes),
            self.broken | other.broken,
            jax.tree.map(jnp.add, self.counts, other.counts),
            jax.tree.map(jnp.add, self.kv_health, other.kv_health),
        )


class _Rows(NamedTuple):
    """Results of a micro-batch that have its rows.

    Attributes:
      logp: (B, R) float32.
      tokens: {statistic of a token: (B, R) float32}.
      taps: tapped values, with rows along `batch_axis`.
    """

    logp: jax.Array
    tokens: dict[str, jax.Array]
    taps: dict[str, jax.Array]

    def joined(self) -> _Rows:
        """Returns results (parts, ...) of micro-batches as those of their batch."""
        return _Rows(
            join_parts(self.logp, 0),
            {name: join_parts(x, 0) for name, x in self.tokens.items()},
            {name: join_parts(x, batch_axis(name)) for name, x in self.taps.items()},
        )


@dataclasses.dataclass(frozen=True)
class GradientProgram:
    """A train step without its update, not jitted: ``program(state, batch, rope) -> (Gradients,
    logp, metrics)``. It does not read `state.opt_state`.

    Attributes:
      forward_pass: shapes, numerics and devices.
      loss: static choices of the loss.
      micro_batches: number of parts into which the batch is split along B; gradients are added.
        A packed batch has as many as it has rows for each device, and runs those that are filled.
        With `router_aux_coef` and more than one part, experts' tokens are first counted over all
        parts, which costs a forward pass unless the routing is replayed.
      health: also count what quantisation lost, by operand class, site and layer.
      taps: intermediate values to return as well: names of models/taps.py, and 'logits'.

    `logp` (B, R) float32 is computed by this step's own forward pass, before its update. `metrics`
    holds scalars (first five lines) and trees of arrays, health and taps if asked for::

        loss, grad_norm
        router_aux_loss: not multiplied by its coefficient (if that is above 0)
        checksum: uint32, of the bytes that the forward pass used
        good: bool, whether loss and grad_norm are finite
        bad_layer: first layer with a non-finite output, else -1
        tokens: {entropy, kl and frozen_kl (with such a divergence), the token loss's statistics:
            (B, R) float32}
        expert_tokens: (S, E) int32, see `ForwardOutput.aux` (with experts)
        health: {'activations' | 'gradients' | 'kv': {site: {count: (L,), of experts (L, E)}}}
        taps: {name: (L, B, T, ...), (B, T, ...) outside the layers, or 'logits' (B, R, V)}
    """

    forward_pass: ForwardPass
    loss: LossConfig = LossConfig()
    micro_batches: int = 1
    health: bool = False
    taps: tuple[str, ...] = ()

    def __call__(self, state: TrainState, batch: Batch, rope) -> tuple[Gradients, Array, dict]:
        recipe = self.forward_pass.recipe
        params = merged(state.params, recipe, keep_quantised=True)
        weights = quantize_params(params, recipe, state.scaling_state)
        probes = init_probes(params, recipe, self.health)
        sums, rows = self._of_batch(_Shared(state, weights, probes, rope), batch)
        norm = (tree_norm if resolve(recipe.kernels) == "reference" else optax.tree.norm)(
            sums.gradients
        )
        good = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
        changes = good & (batch.weights != 0).any()
        scaling = update_scaling(params, recipe, state.scaling_state, sums.probes)
        scaling = keep_if(changes, scaling, state.scaling_state)
        metrics = sums.counts | {
            "loss": sums.loss,
            "grad_norm": norm,
            "good": good,
            "bad_layer": jnp.where(sums.broken.any(), jnp.argmax(sums.broken), -1),
            "checksum": checksum(weights),
            "tokens": rows.tokens,
        }
        if self.health:
            metrics["health"] = _site_health(sums.probes, sums.kv_health)
        if self.taps:
            metrics["taps"] = rows.taps
        return Gradients(sums.gradients, changes, scaling), rows.logp, metrics

    def _of_batch(self, shared: _Shared, batch: Batch) -> tuple[_Sums, _Rows]:
        """Returns the results of all micro-batches together."""
        assert batch.packing is None or not self.taps
        parallel = self.forward_pass.parallel
        rows = dataclasses.replace(batch, frozen_head=None)
        # The balance loss of each micro-batch is weighted by an expert's share of the update's
        # tokens, which must be known before the first micro-batch.
        if self.loss.router_aux_coef > 0 and (self.micro_batches > 1 or batch.packing is not None):

            def count(part: Batch):
                loads = count_experts(self.forward_pass, shared.weights, part, shared.rope)
                return loads, ()

            loads, _ = over_parts(count, rows, parallel, self.micro_batches, jnp.add)
            shared = shared._replace(loads=loads)

        def run(part: Batch) -> tuple[_Sums, _Rows]:
            part = dataclasses.replace(part, frozen_head=batch.frozen_head)
            return self._of_part(shared, part)

        return over_parts(run, rows, parallel, self.micro_batches, _Sums.plus, _Rows.joined)

    def _of_part(self, shared: _Shared, part: Batch) -> tuple[_Sums, _Rows]:
        """Returns the results of a micro-batch."""

        def loss(values, probes):
            return self._loss(shared, part, values, probes)

        differentiated = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        values = trained(shared.state.params)
        (value, (counts, rows, aux)), (gradients, observed) = differentiated(values, shared.probes)
        sums = _Sums(
            loss=value,
            gradients=gradients,
            probes=observed,
            broken=~aux["finite"],
            counts=counts,
            kv_health=aux.get("kv_health", {}),
        )
        return sums, rows

    def _loss(self, shared: _Shared, part: Batch, values, probes):
        """Returns (the loss of a micro-batch as a function of the trained parameters and the
        probes, (`_Sums.counts`, `_Rows`, aux of `hidden_states`))."""
        loss = self.loss
        paired = trainable_params(
            with_trained(shared.state.params, values),
            shared.weights,
            self.forward_pass.recipe,
            shared.state.scaling_state,
            probes,
        )
        collect = ["kv_health"] if self.health else []
        if loss.router_aux_coef > 0:
            collect.append("expert_probability")
        logp, entropy, aux = response_logprobs(
            self.forward_pass,
            paired,
            part,
            shared.rope,
            observe=Observe(self.taps, collect=tuple(collect)),
        )
        counts = part.weights != 0
        sequences = {} if part.packing is None else {"sequences": part.sequences}
        each, tokens = loss.token_loss(
            logp, part.old_logprobs, part.advantages, counts, **sequences
        )
        tokens["entropy"] = entropy
        each = each * part.rollout_weights
        if loss.kl:
            tokens["kl"] = loss.kl(logp, part.ref_logprobs)
            each = each + loss.kl_coef * tokens["kl"]
        if loss.frozen_kl_coef:
            tokens["frozen_kl"] = aux["frozen_kl"]
            each = each + loss.frozen_kl_coef * tokens["frozen_kl"]
        each = jnp.where(counts, each * part.weights, 0.0)
        value = sum_all(each, self.forward_pass.parallel.replicate)
        sums = {"expert_tokens": aux["expert_tokens"]} if "expert_tokens" in aux else {}
        if loss.router_aux_coef:
            loads = aux["expert_tokens"] if shared.loads is None else shared.loads
            sums["router_aux_loss"] = load_balance_loss(
                self.forward_pass.model, loads, aux["expert_probability"]
            )
            value = value + loss.router_aux_coef * sums["router_aux_loss"]
        return value, (sums, _Rows(logp, tokens, aux.get("taps", {})), aux)


def make_train_step(
    gradients: GradientProgram,
    optimizer: optax.GradientTransformation,
    *,
    donate: bool = True,
    shardings: dict | None = None,
) -> Callable:
    """Returns the jitted ``train_step(state, batch, rope, base=None) -> (state, logp, metrics)``.

    Args:
      gradients: the step without its update; describes `logp` and `metrics`.
      optimizer: result of `make_optimizer`, or another of optax.
      donate: give the state's memory to the new state; False leaves the old state usable.
      shardings: keywords for jit on a mesh.

    `base` is the frozen base of a state that lacks it (`step_arguments`), as the new one does: it
    is never donated, because it may be the reference policy's too.

    If loss or gradients are not finite, or if no token of the batch counts, the returned state is
    the state before the step: without a gradient, the optimiser's momentum would still move the
    weights.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def train_step(state: TrainState, batch: Batch, rope, base=None):
        whole = state if base is None else with_frozen(state, base)
        computed, logp, metrics = gradients(whole, batch, rope)

        def update(state: TrainState, computed: Gradients) -> TrainState:
            values = trained(state.params)
            updates, opt_state = optimizer.update(
                computed.params, state.opt_state, values, norm=metrics["grad_norm"]
            )
            return dataclasses.replace(
                state,
                params=with_trained(state.params, optax.apply_updates(values, updates)),
                opt_state=opt_state,
                scaling_state=computed.scaling_state,
            )

        # XLA:CPU chooses between numbers in more passes, with copies of the old moments; XLA:GPU
        # copies what a branch returns.
        if resolve(gradients.forward_pass.recipe.kernels) == "reference":
            new = lax.cond(computed.changes, update, lambda state, computed: state, state, computed)
        else:
            new = keep_if(computed.changes, update(state, computed), state)
        return new, logp, metrics

    return exact_jit(train_step, donate_argnums=0 if donate else (), **(shardings or {}))


def step_arguments(state: TrainState, batch: Batch, rope) -> tuple:
    """Returns the arguments of a train step that does not donate the state's frozen base."""
    return with_frozen(state, None), batch, rope, frozen(state)
