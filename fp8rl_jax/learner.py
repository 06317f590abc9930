"""The learner: GRPO and supervised train steps, and the log-probabilities of given responses.

A train step quantises the parameters once, with the function that also refits the sampler, runs the
one `forward` on full sequences under `value_and_grad`, and returns the log-probabilities that *this
step* computed, on which drift is measured. Parameters stay float32; gradients are accumulated in
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
from fp8rl_jax.micro_batches import join_parts, over_parts, split
from fp8rl_jax.models import (
    ONE_DEVICE,
    ForwardOutput,
    ModelConfig,
    Parallel,
    Swap,
    checksum,
    forward,
    head_logits,
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
from fp8rl_jax.models.lora import base_of, merged, trained, with_base, with_trained, without_base
from fp8rl_jax.models.router import expert_tokens, load_balance_loss
from fp8rl_jax.models.taps import LOGITS, NOTHING, ROUTING, Observe, batch_axis
from fp8rl_jax.quant import Recipe, get_recipe, merge_probes
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
      scaling_state: states of stateful scaling policies, by site, and calibrated scales of keys and
        values (quant/kv.py); {} if every scale is dynamic.
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
    zeros = (jnp.int32(0), rng, jnp.int32(0))
    return TrainState(params, optimizer.init(trained(params)), scaling_state, *zeros)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Static choices of the loss.

    Attributes:
      token_loss: a loss of rl/losses.py; supervised fine-tuning is `reinforce` with advantages 1.
      kl, kl_coef: estimator (rl/kl.py) and weight of the divergence from the reference policy;
        None leaves the divergence out.
      router_aux_coef: weight of `load_balance_loss`; 0 leaves it out.
      teacher_coef: weight of the divergence from `Batch.teacher`, which must be there; 0 leaves it
        out.
    """

    token_loss: TokenLoss = dataclasses.field(default_factory=ppo)
    kl: Estimator | None = None
    kl_coef: float = 0.0
    router_aux_coef: float = 0.0
    teacher_coef: float = 0.0


def _hidden(params, batch: Batch, model, recipe, rope, parallel, **more) -> ForwardOutput:
    """Runs `forward`, with keywords `more`, on a batch's sequences up to the output head."""
    given = {"rope": rope, "parallel": parallel, **batch.places, **more}
    return forward(params, batch.tokens, model, recipe, output="hidden", **given)


def response_logprobs(
    params,
    batch: Batch,
    model: ModelConfig,
    recipe: Recipe,
    rope,
    remat: str,
    parallel: Parallel = ONE_DEVICE,
    observe: Observe = NOTHING,
    teacher_head: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, dict]:
    """Returns (logp, entropy) of the response tokens, each (B, R), and the aux of `forward`.

    Arguments are those of `forward`. `batch.routing` replaces the routers' results. With the
    teacher's output head, aux has 'teacher_kl' (B, R), the divergence from `batch.teacher`.
    """
    everywhere = jnp.ones(model.num_hidden_layers, bool)
    routing = {name: Swap(everywhere, jnp.moveaxis(x, 0, 1)) for name, x in batch.routing.items()}
    replayed = dataclasses.replace(observe, swaps={**observe.swaps, **routing})
    out = _hidden(params, batch, model, recipe, rope, parallel, remat=remat, observe=replayed)
    hidden = rows_at(out.hidden, *batch.predictions)
    head = output_head(params, model, parallel)
    draws = batch.draws
    logp, entropy = token_logprobs(hidden, head, draws, recipe, parallel)
    if batch.teacher is not None:
        assert teacher_head is not None
        other = batch.teacher.hidden, teacher_head
        out.aux["teacher_kl"] = token_divergences(hidden, head, other, draws, recipe, parallel)
    if LOGITS in observe.taps:
        logits = head_logits(hidden.reshape(-1, hidden.shape[-1]), head, recipe, parallel)
        out.aux["taps"][LOGITS] = logits.reshape(*batch.targets.shape, -1)
    return logp, entropy, out.aux


def keep_if(wanted: jax.Array, after, before):
    """Returns the tree `after` if () bool `wanted`, else the tree `before`."""
    return jax.tree.map(lambda new, old: jnp.where(wanted, new, old), after, before)


def make_score(
    model: ModelConfig, recipe: Recipe | str, parallel: Parallel = ONE_DEVICE
) -> Callable:
    """Returns the jitted ``score(params, scaling_state, batch, rope) -> logp (B, R)``.

    It computes old and reference log-probabilities.
    """
    recipe = get_recipe(recipe)

    def score(params, scaling_state, batch: Batch, rope):
        weights = quantize_params(params, recipe, scaling_state)

        def run(part: Batch):
            return (), response_logprobs(weights, part, model, recipe, rope, "none", parallel)[0]

        if batch.packing is None:
            return run(batch)[1]
        _, logp = over_parts(run, lambda *_: (), *split(batch, parallel))
        return join_parts(logp, 0)

    return exact_jit(score)


def make_hidden(
    model: ModelConfig,
    recipe: Recipe | str,
    parallel: Parallel = ONE_DEVICE,
    micro_batches: int = 1,
) -> Callable:
    """Returns the jitted ``hidden(weights, batch, rope) -> (B, R, D)``, the hidden state that
    predicts each response token, under weights of `quantize_params`. `micro_batches`: parts into
    which a batch of one sequence a row is split."""
    recipe = get_recipe(recipe)

    def hidden(weights, batch: Batch, rope):
        def run(part: Batch):
            out = _hidden(weights, part, model, recipe, rope, parallel)
            return (), rows_at(out.hidden, *part.predictions)

        if batch.packing is None and micro_batches == 1:
            return run(batch)[1]
        _, found = over_parts(run, lambda *_: (), *split(batch, parallel, micro_batches))
        return join_parts(found, 0)

    return exact_jit(hidden)


def count_experts(
    weights, batch: Batch, model: ModelConfig, recipe: Recipe, rope, parallel: Parallel = ONE_DEVICE
) -> jax.Array:
    """Returns (S, E) int32, the number of a batch's tokens that each expert gets.

    Replayed routing (`batch.routing`) is counted directly; without it, a forward pass is run.

    Args:
      weights: `quantize_params` of the masters.
      batch, model, recipe, rope, parallel: as for `response_logprobs`.
    """
    if (chosen := batch.routing.get(ROUTING[0])) is not None:  # (B, L, T, k)
        of_layer = functools.partial(expert_tokens, model, valid=batch.valid)
        return jax.vmap(of_layer, in_axes=1)(chosen[:, model.dense_layers :])
    out = _hidden(weights, batch, model, recipe, rope, parallel)
    return out.aux["expert_tokens"]


def _site_health(probes: dict) -> dict[str, dict[str, dict[str, jax.Array]]]:
    """Returns the counts of the probes: {operand class: {site: {count: (L,) or (L, E)}}}."""
    health: dict = {}
    for operand in ("activation", "gradient"):
        for site, probe in probes.items():
            found = getattr(probe, operand)
            if found is not None and found.counts is not None:
                counts = {count: found.counts[..., i] for i, count in enumerate(COUNTS)}
                health.setdefault(OPERAND_CLASSES[operand], {})[site] = counts
    return health


def _add(one, other):
    """Adds two micro-batches' results; probes are merged."""
    (value, grads, probes, sums), (value2, grads2, probes2, sums2) = one, other
    value, grads, sums = jax.tree.map(jnp.add, (value, grads, sums), (value2, grads2, sums2))
    return value, grads, merge_probes(probes, probes2), sums


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


def make_gradients(
    model: ModelConfig,
    recipe: Recipe | str,
    loss: LossConfig,
    *,
    parallel: Parallel = ONE_DEVICE,
    micro_batches: int = 1,
    remat: str = "none",
    health: bool = False,
    taps: tuple[str, ...] = (),
) -> Callable:
    """Returns ``gradients(state, batch, rope) -> (Gradients, logp, metrics)``, not jitted; it does
    not read `state.opt_state`.

    Args:
      model, recipe: shapes and numerics.
      loss: static choices of the loss.
      parallel: the devices that share the work.
      micro_batches: number of parts into which the batch is split along B; gradients are added.
        A packed batch has as many as it has rows for each device, and runs those that are filled.
        With `router_aux_coef` and more than one part, experts' tokens are first counted over all
        parts, which costs a forward pass unless the routing is replayed.
      remat: argument of `forward`.
      health: also count what quantisation lost, by operand class, site and layer.
      taps: intermediate values to return as well: names of models/taps.py, and 'logits'.

    `logp` (B, R) float32 is computed by this step's own forward pass, before its update. `metrics`
    holds scalars (first five lines) and trees of arrays, health and taps if asked for::

        loss, grad_norm
        router_aux_loss: not multiplied by its coefficient (if that is above 0)
        checksum: uint32, of the bytes that the forward pass used
        good: bool, whether loss and grad_norm are finite
        bad_layer: first layer with a non-finite output, else -1
        tokens: {entropy, kl and teacher_kl (with such a divergence), the token loss's statistics:
            (B, R) float32}
        expert_tokens: (S, E) int32, see `ForwardOutput.aux` (with experts)
        health: {'activations' | 'gradients' | 'kv': {site: {count: (L,), of experts (L, E)}}}
        taps: {name: (L, B, T, ...), (B, T, ...) outside the layers, or 'logits' (B, R, V)}
    """
    recipe = get_recipe(recipe)
    collect = ("kv_health",) * health + ("expert_probability",) * (loss.router_aux_coef > 0)
    objective = _Objective(model, recipe, loss, parallel, remat, collect, taps)
    differentiated = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)

    def gradients(state: TrainState, batch: Batch, rope):
        params = merged(
            state.params,
            keep_quantised=True,
            dtype=recipe.compute_dtype,
            exact=recipe.kernels == "exact",
        )
        head = None
        if batch.teacher is not None:  # no row has a part of the head
            head = batch.teacher.head
            rows = dataclasses.replace(batch.teacher, head=None)
            batch = dataclasses.replace(batch, teacher=rows)
        weights = quantize_params(params, recipe, state.scaling_state)
        probes = init_probes(params, recipe, health)
        shared = _Shared(state, weights, rope, head)

        def run(part: Batch, shared: _Shared):
            (value, of_part), (grads, seen) = differentiated(
                trained(state.params), probes, part, shared
            )
            sums, tokens, finite, tapped = of_part
            return (value, grads, seen, sums), (tokens, ~finite, tapped)

        if micro_batches == 1 and batch.packing is None:
            total, (tokens, broken, tapped) = run(batch, shared)
        else:
            assert batch.packing is None or not taps
            parts = split(batch, parallel, micro_batches)
            # The balance loss of each micro-batch is weighted by an expert's share of the update's
            # tokens, which must be known before the first micro-batch.
            if loss.router_aux_coef > 0:

                def count(part: Batch):
                    return count_experts(weights, part, model, recipe, rope, parallel), ()

                shared = shared._replace(loads=over_parts(count, jnp.add, *parts)[0])
            of_part = functools.partial(run, shared=shared)
            total, (tokens, broken, tapped) = over_parts(of_part, _add, *parts)
            tokens = jax.tree.map(lambda x: join_parts(x, 0), tokens)
            broken = broken.any(axis=0)
            tapped = {name: join_parts(x, batch_axis(name)) for name, x in tapped.items()}
        value, grads, seen, sums = total
        logp, per_token = tokens
        norm = (tree_norm if resolve(recipe.kernels) == "reference" else optax.tree.norm)(grads)
        good = jnp.isfinite(value) & jnp.isfinite(norm)
        changes = good & (batch.weights != 0).any()
        scaling = update_scaling(params, recipe, state.scaling_state, seen)
        scaling = keep_if(changes, scaling, state.scaling_state)
        metrics = {
            "loss": value,
            "grad_norm": norm,
            "good": good,
            "bad_layer": jnp.where(broken.any(), jnp.argmax(broken), -1),
            "checksum": checksum(weights),
            "tokens": per_token,
            **{name: x for name, x in sums.items() if name != "kv_health"},
        }
        if health:
            metrics["health"] = _site_health(seen)
            if "kv_health" in sums:
                metrics["health"]["kv"] = {"layers.self_attn": sums["kv_health"]}
        if taps:
            metrics["taps"] = tapped
        return Gradients(grads, changes, scaling), logp, metrics

    return gradients


class _Shared(NamedTuple):
    """The arguments of the loss that all micro-batches of an update share.

    Attributes:
      state: the state before the update.
      weights: `quantize_params` of its masters.
      rope: tables of `rope_tables`.
      teacher_head: the teacher's output head; None without one.
      loads: (S, E) int32, tokens of each expert in the update; None for those of the micro-batch.
    """

    state: TrainState
    weights: Any
    rope: Any
    teacher_head: jax.Array | None
    loads: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class _Objective:
    """The loss of a micro-batch as a function of the trained parameters and the probes; fields are
    arguments of `make_gradients`, `collect` is that of `forward`."""

    model: ModelConfig
    recipe: Recipe
    loss: LossConfig
    parallel: Parallel
    remat: str
    collect: tuple[str, ...]
    taps: tuple[str, ...]

    def __call__(self, values, probes, part: Batch, shared: _Shared):
        """Returns (loss, (sums over tokens, (logp, statistics of tokens), finite layers, taps))."""
        state, loss = shared.state, self.loss
        params = with_trained(state.params, values)
        paired = trainable_params(params, shared.weights, self.recipe, state.scaling_state, probes)
        logp, entropy, aux = response_logprobs(
            paired,
            part,
            self.model,
            self.recipe,
            shared.rope,
            self.remat,
            self.parallel,
            Observe(self.taps, collect=self.collect),
            teacher_head=shared.teacher_head,
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
        if loss.teacher_coef:
            tokens["teacher_kl"] = aux["teacher_kl"]
            each = each + loss.teacher_coef * tokens["teacher_kl"]
        value = sum_all(jnp.where(counts, each * part.weights, 0.0), self.parallel.replicate)
        sums = {name: aux[name] for name in ("expert_tokens", "kv_health") if name in aux}
        if loss.router_aux_coef:
            loads = aux["expert_tokens"] if shared.loads is None else shared.loads
            balance = load_balance_loss(self.model, loads, aux["expert_probability"])
            sums["router_aux_loss"] = balance
            value = value + loss.router_aux_coef * balance
        return value, (sums, (logp, tokens), aux["finite"], aux.get("taps", {}))


def make_train_step(
    model: ModelConfig,
    recipe: Recipe | str,
    optimizer: optax.GradientTransformation,
    loss: LossConfig,
    *,
    donate: bool = True,
    shardings: dict | None = None,
    **options,
) -> Callable:
    """Returns the jitted ``train_step(state, batch, rope) -> (state, logp, metrics)``, a
    `TrainStep`.

    Args:
      model, recipe, loss: as for `make_gradients`, which describes `logp` and `metrics`.
      optimizer: result of `make_optimizer`, or another of optax.
      donate: give the state's memory to the new state; False leaves the old state usable.
      shardings: keywords for jit on a mesh.
      options: keywords of `make_gradients`.

    If loss or gradients are not finite, or if no token of the batch counts, the returned state is
    the state before the step: without a gradient, the optimiser's momentum would still move the
    weights.
    """
    gradients = make_gradients(model, recipe, loss, **options)
    optimizer = optax.with_extra_args_support(optimizer)

    def train_step(state: TrainState, base, batch: Batch, rope):
        found, logp, metrics = gradients(with_base(state, base), batch, rope)

        def update(state: TrainState, found: Gradients) -> TrainState:
            values = trained(state.params)
            updates, opt_state = optimizer.update(
                found.params, state.opt_state, values, norm=metrics["grad_norm"]
            )
            return dataclasses.replace(
                state,
                params=with_trained(state.params, optax.apply_updates(values, updates)),
                opt_state=opt_state,
                scaling_state=found.scaling_state,
            )

        # XLA:CPU chooses between numbers in more passes, with copies of the old moments; XLA:GPU
        # copies what a branch returns.
        if resolve(get_recipe(recipe).kernels) == "reference":
            new = lax.cond(found.changes, update, lambda state, found: state, state, found)
        else:
            new = keep_if(found.changes, update(state, found), state)
        return new, logp, metrics

    donated = {"donate_argnums": 0} if donate else {}
    return TrainStep(exact_jit(train_step, **donated, **(shardings or {})))


class TrainStep:
    """A jitted train step that never donates the frozen base of a state, which may be the
    reference policy's too."""

    def __init__(self, program: Any):
        self._program = program

    @staticmethod
    def _arguments(state: TrainState, batch: Batch, rope) -> tuple:
        return without_base(state), base_of(state.params), batch, rope

    def __call__(self, state: TrainState, batch: Batch, rope) -> tuple[TrainState, Array, dict]:
        new, *others = self._program(*self._arguments(state, batch, rope))
        return with_base(new, base_of(state.params)), *others

    def trace(self, state: TrainState, batch: Batch, rope) -> jax.stages.Traced:
        """Traces the program, as `jax.jit` does."""
        return self._program.trace(*self._arguments(state, batch, rope))

    def lower(self, state: TrainState, batch: Batch, rope) -> jax.stages.Lowered:
        """Lowers the program, as `jax.jit` does."""
        return self._program.lower(*self._arguments(state, batch, rope))
