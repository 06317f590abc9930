"""The table of features that do not work together: which two, why, and what to write instead.

::

    FEATURES   whether a configuration has a feature, and how an error message names it
    PAIRS      two features, the reason, the remedy

`config.checks` refuses a configuration that has both features of a pair, and `fp8rl plan` also one
that contradicts a feature which the plan assumes; the documentation's page of combinations is made
from the table. To close a gap, delete its pair; a new gap is a new pair, for which
tests/config/test_combinations.py needs a configuration that shows it.

Not here: numbers that do not fit each other (`config.checks`), and the shapes of a model
(`models.ModelConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.fields import FIELDS
from fp8rl_jax.config.load import flatten
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.envs import NO_ANSWER
from fp8rl_jax.quant import Recipe


class Feature(NamedTuple):
    """A feature that a configuration may have.

    Attributes:
      on: returns a true value if a configuration has the feature.
      said: returns its name in messages, with its field's value; a pair's `other` needs it.
    """

    on: Callable[[Resolved], Any]
    said: Callable[[Resolved], str] = lambda resolved: ""


class Pair(NamedTuple):
    """Two features that do not work together.

    Attributes:
      one, other: names of `FEATURES`; the message begins with `other`, which must have a `said`.
      reason: why they do not work together; '{one}' stands for the `said` of `one`.
      remedy: what to write instead.
    """

    one: str
    other: str
    reason: str
    remedy: str

    def refuses(self, resolved: Resolved) -> bool:
        return all(FEATURES[name].on(resolved) for name in (self.one, self.other))

    def problem(self, resolved: Resolved) -> str:
        """Returns the error message without the remedy."""
        one, other = (FEATURES[name].said(resolved) for name in (self.one, self.other))
        return f"{other}, and {self.reason.format(one=one)}"


def check_combinations(resolved: Resolved) -> None:
    """Raises UserError for the first pair of features that do not work together."""
    for pair in PAIRS:
        if pair.refuses(resolved):
            raise UserError(f"{pair.problem(resolved)}: {pair.remedy}")


def check_planned(resolved: Resolved, feature: str, others: Collection[str], command: str) -> None:
    """Raises UserError if `feature`, assumed by a plan, contradicts one of the features `others`.

    Callers leave out of `others` the features that change bits, but neither memory nor times.
    """
    for pair in PAIRS:
        if pair.one == feature and pair.other in others and FEATURES[pair.other].on(resolved):
            raise UserError(
                f"{command} plans with {feature}: {pair.problem(resolved)}: leave that field out"
            )


def _field(path: str, on: Callable[[Any], Any] = bool, verb: str = "is") -> Feature:
    """Returns the feature that a configuration has if `on` of a field's value is true."""

    def value(resolved: Resolved) -> Any:
        return flatten(resolved.config)[path]

    return Feature(lambda r: on(value(r)), lambda r: f"{path} {verb} {value(r)!r}")


def _batch_scale(resolved: Resolved) -> str:
    recipe = resolved.rollout_recipe
    field = "activation_policy" if resolved.config.precision.activation_policy else "rollout"
    return (
        f"precision.{field}: recipe {recipe.name!r} takes an activation's scale "
        f"({recipe.operands['activation'].policy.name}) from all tokens of a batch"
    )


def _observing(resolved: Resolved) -> list[str]:
    """Returns the fields of `precision` that make rollout scales follow what the learner saw."""
    operands = resolved.rollout_recipe.operands.items()
    names = [f"{name}_policy" for name, o in operands if o.policy.stateful and name != "gradient"]
    return [n for n in names if resolved.config.precision[n]] or ["rollout"] * bool(names)


def _other_cache(resolved: Resolved) -> list[str]:
    """Describes the recipes that do not keep both K and V in E4M3."""
    sides = {"rollout": resolved.rollout_recipe, "learner": resolved.learner_recipe}
    return [f"recipe {r.name!r} of precision.{s}" for s, r in sides.items() if not r.kv_e4m3]


def _cache(on: Callable[[Recipe], bool], what: str) -> Feature:
    """Returns the feature that a recipe's KV cache has, named by the field that asks for it."""

    def said(resolved: Resolved) -> str:
        if resolved.config.precision.kv_cache != "recipe":
            return _field("precision.kv_cache").said(resolved)
        side = "rollout" if on(resolved.rollout_recipe) else "learner"
        return f"precision.{side} is {resolved.config.precision[side]!r}, whose KV cache {what}"

    return Feature(lambda r: on(r.rollout_recipe) or on(r.learner_recipe), said)


def _updates(resolved: Resolved) -> int:
    return resolved.config.algo.num_minibatches * resolved.config.algo.epochs


def _set_for_adapters(resolved: Resolved) -> list[str]:
    """Returns the fields of section `lora`, other than its rank, that are not at their default."""
    fields, lora = FIELDS["lora"], resolved.config.lora
    return [name for name in fields if name != "rank" and lora[name] != fields[name].default]


_KL_DEFAULT = FIELDS["algo"]["kl_estimator"].default  # accepted where it has no effect
_NORM = "seq_mean_token_sum_norm"

FEATURES: dict[str, Feature] = {
    # model and mesh
    "dense model": Feature(lambda r: not r.model.num_experts),
    "latent attention": Feature(lambda r: r.model.latent),
    "tensor parallelism": _field("mesh.tensor", lambda size: size != 1),
    "adapters": _field("lora.rank"),
    "moments in host memory": _field("learner.offload", lambda where: where != "none"),
    "mean weights": _field("eval.average_last", lambda count: count > 1),
    "no adapters": _field("lora.rank", lambda rank: not rank),
    "fields of adapters": Feature(
        _set_for_adapters, lambda r: _field(f"lora.{_set_for_adapters(r)[0]}").said(r)
    ),
    "expert parallelism": _field("mesh.expert", lambda size: size != 1),
    "routing replay": _field("algo.routing_replay", lambda what: what != "none"),
    "balance loss of routers": _field("algo.router_aux_loss_coef"),
    # precision
    "zero drift": Feature(lambda r: r.zero_drift),
    "required zero drift": _field("precision.zero_drift", lambda how: how == "required"),
    "recipes that differ": Feature(
        lambda r: not r.same_forward,
        lambda r: (
            f"recipes that differ (rollout {r.rollout_recipe.name!r}, "
            f"learner {r.learner_recipe.name!r})"
        ),
    ),
    "scales of a whole batch": Feature(lambda r: not r.rollout_recipe.row_local, _batch_scale),
    "scales from observed values": Feature(
        _observing,
        lambda r: (
            f"precision.{_observing(r)[0]}: recipe {r.rollout_recipe.name!r} scales by what the "
            "learner's steps observed"
        ),
    ),
    "FP8 attention": _field("precision.attention", lambda dtype: dtype == "fp8"),
    "a recipe without K and V in E4M3": Feature(_other_cache, lambda r: _other_cache(r)[0]),
    "calibrated scales of K and V": _cache(lambda r: r.kv == "calibrated", "is calibrated"),
    "K and V in two formats": _cache(
        lambda r: r.stored_dtype("k") != r.stored_dtype("v"), "has two formats"
    ),
    # rollout
    "continuous batching": _field("rollout.slots"),
    "all samples at once": _field("rollout.slots", lambda slots: not slots),
    "pages": _field("rollout.pages"),
    "rollouts ahead": _field("rollout.ahead"),
    "devices for rollouts": _field("mesh.rollout"),
    "partial rollouts": _field("rollout.most_versions", lambda most: most > 1),
    "environment": Feature(
        lambda r: r.step is not None, lambda r: f"{r.step.said} is set" if r.step else ""
    ),
    "no environment": Feature(lambda r: not r.step),
    "one reply": _field("env.max_turns", lambda most: most == 1),
    "tools beside an environment": Feature(
        lambda r: r.config.env.step and r.config.env.tools,
        lambda r: f"env.tools is {r.config.env.tools!r} beside env.step",
    ),
    "several replies": _field("env.max_turns", lambda most: most > 1),
    "length of a reply": _field("rollout.max_turn_tokens"),
    "credit by turn": _field("algo.credit", lambda how: how == "turn"),
    "groups of one": _field("rollout.group_size", lambda size: size == 1),
    "questions without chat": _field("data.chat", lambda chat: not chat),
    "system prompt": _field("data.system_prompt"),
    "variables of the chat template": _field("data.chat_options"),
    "rows without answers": _field("env.answer_key", lambda key: key == NO_ANSWER),
    "supervised fine-tuning": _field("sft.steps"),
    # algorithm
    "advantages within a group": Feature(
        lambda r: (
            r.config.algo.baseline in ("group_mean", "leave_one_out")
            or r.config.algo.scale == "group_std"
        ),
        lambda r: (
            f"algo.baseline = {r.config.algo.baseline!r}, algo.scale = {r.config.algo.scale!r}"
        ),
    ),
    "drawing from all tokens": Feature(
        lambda r: r.config.rollout.top_k == 0 and r.config.rollout.top_p == 1.0
    ),
    "log-probabilities over the vocabulary": _field(
        "algo.truncated_sampling", lambda over: over == "whole"
    ),
    "dynamic sampling": _field("algo.dynamic_sampling"),
    "correction": _field("algo.correction", lambda which: which not in ("auto", "none")),
    "the rollout's log-probabilities": _field("algo.old_logprobs", lambda own: own == "rollout"),
    "loss reinforce": _field("algo.loss", lambda loss: loss == "reinforce"),
    "older versions without a correction": Feature(
        lambda r: r.stale and not r.algorithm.corrections,
        lambda r: "rollout.ahead is above 0, or rollout.most_versions above 1",
    ),
    "no divergence": Feature(
        lambda r: (
            not r.config.algo.kl_coef and not (r.config.algo.teacher and r.config.algo.teacher_coef)
        )
    ),
    "loss none": _field("algo.loss", lambda loss: loss == "none"),
    "several updates of a rollout": Feature(
        lambda r: _updates(r) > 1, lambda r: f"algo.num_minibatches x algo.epochs is {_updates(r)}"
    ),
    "KL in the reward": Feature(
        lambda r: r.config.algo.kl_in == "reward" and r.config.algo.kl_coef
    ),
    "another estimator than k1": _field(
        "algo.kl_estimator", lambda name: name not in ("k1", _KL_DEFAULT)
    ),
    "another loss than ppo": _field(
        "algo.loss", lambda loss: loss.partition("(")[0].strip() != "ppo", "="
    ),
    "dual clip": _field("algo.dual_clip"),
    "a mean without a constant": _field("algo.loss_aggregation", lambda how: how != _NORM, "="),
    "constant length": _field("algo.loss_length"),
    # learner
    "rows of several sequences": _field("learner.tokens_per_batch"),
    "a row for each sequence": _field("learner.tokens_per_batch", lambda tokens: not tokens),
    "shared prompts": _field("learner.share_prompts"),
    "micro-batches": _field("learner.gradient_accumulation_steps", lambda parts: parts > 1),
}

_LATENT = "the model has multi-head latent attention (kv_lora_rank above 0), which"
# A configuration that has several pairs gets the message of the first.
PAIRS = (
    Pair("dense model", "routing replay", "a dense model has no routers", "write 'none'"),
    Pair("dense model", "balance loss of routers", "a dense model has no routers", "write 0"),
    Pair("dense model", "expert parallelism", "a dense model has no experts", "write 1"),
    Pair(
        "latent attention", "FP8 attention", f"{_LATENT} keeps its queries in bf16", "write 'bf16'"
    ),
    Pair(
        "a recipe without K and V in E4M3",
        "FP8 attention",
        "FP8 attention needs K and V in FP8 (E4M3), which {one} lacks",
        "set precision.kv_cache='fp8' or 'fp8_calibrated'",
    ),
    Pair(
        "recipes that differ",
        "scales from observed values",
        "with {one} the learner has another forward pass",
        "use the same recipe on both sides",
    ),
    Pair(
        "recipes that differ",
        "required zero drift",
        "with {one} the two sides compute different values",
        "make them equal, or set precision.zero_drift='report'",
    ),
    Pair(
        "zero drift",
        "scales of a whole batch",
        "sampler and learner see different batches, so they cannot agree (measured mean drift 0.13 "
        "per token)",
        "take a scale per token (fp8_blockwise) or one that is fixed beforehand (that of "
        "fp8_delayed, or static), or set precision.zero_drift='report'",
    ),
    Pair(
        "no adapters",
        "fields of adapters",
        "without lora.rank there are no adapters",
        "set lora.rank, or leave the field out",
    ),
    Pair(
        "adapters",
        "moments in host memory",
        "{one}: the moments are those of the adapters alone, which are small",
        "write 'none'",
    ),
    Pair(
        "adapters", "mean weights", "the mean of adapters is not that of weights ({one})", "write 1"
    ),
    Pair("latent attention", "tensor parallelism", f"{_LATENT} is not cut by heads", "write 1"),
    Pair(
        "latent attention",
        "calibrated scales of K and V",
        f"{_LATENT} takes one scale per token and none that is calibrated",
        "set precision.kv_cache='fp8'",
    ),
    Pair(
        "latent attention",
        "K and V in two formats",
        f"{_LATENT} stores one latent for both",
        "set precision.kv_cache='fp8' or 'int8'",
    ),
    Pair(
        "questions without chat",
        "system prompt",
        "data.chat is False",
        "set data.chat=True, or leave system_prompt out",
    ),
    Pair(
        "questions without chat",
        "variables of the chat template",
        "data.chat is False",
        "set data.chat=True, or leave chat_options out",
    ),
    Pair(
        "questions without chat",
        "tools beside an environment",
        "{one}, and only a chat template shows them",
        "set data.chat=True, or env.tools=''",
    ),
    Pair(
        "rows of several sequences",
        "micro-batches",
        "{one}: how many micro-batches there are follows from the sequences' lengths",
        "write 1",
    ),
    Pair(
        "a row for each sequence",
        "shared prompts",
        "with {one} no two responses are in one row",
        "write False, or set learner.tokens_per_batch",
    ),
    Pair(
        "balance loss of routers",
        "shared prompts",
        "with {one} the experts' load would count a prompt once for all responses that share it",
        "write False",
    ),
    Pair(
        "advantages within a group",
        "groups of one",
        "with {one} all advantages are then 0",
        "write a group of at least 2, or algo.preset='reinforce_pp'",
    ),
    Pair(
        "dynamic sampling",
        "groups of one",
        "algo.dynamic_sampling drops groups of equal rewards",
        "write a group of at least 2, or dynamic_sampling=False",
    ),
    Pair(
        "the rollout's log-probabilities",
        "correction",
        "it needs the learner's own log-probabilities",
        "set algo.old_logprobs='auto' or 'learner'",
    ),
    Pair(
        "loss reinforce",
        "several updates of a rollout",
        "algo.loss = 'reinforce' has no ratio to the policy before",
        "write 1 for both, or take ppo or cispo",
    ),
    Pair(
        "loss reinforce",
        "older versions without a correction",
        "algo.loss = 'reinforce' has no ratio to the version that drew a token",
        "set algo.correction='tis', or take ppo or cispo",
    ),
    Pair(
        "KL in the reward",
        "another estimator than k1",
        "algo.kl_in = 'reward' takes k1 from the advantages",
        "write 'k1', or algo.kl_in='loss'",
    ),
    Pair(
        "another loss than ppo",
        "dual clip",
        "{one} has no such bound",
        "write 0, or algo.loss='ppo'",
    ),
    Pair(
        "no divergence",
        "loss none",
        "no divergence from a teacher or a reference is in the loss",
        "set algo.teacher and algo.teacher_coef, or another loss",
    ),
    Pair(
        "a mean without a constant",
        "constant length",
        "{one} divides by no constant",
        f"write 0, or algo.loss_aggregation='{_NORM}'",
    ),
    Pair(
        "all samples at once",
        "pages",
        "pages are used by continuous batching",
        "set rollout.slots to the sequences that decode at a time, or pages to 0",
    ),
    Pair(
        "one reply",
        "environment",
        "nothing is answered where {one}",
        "set env.max_turns to the most replies of a response",
    ),
    Pair(
        "no environment",
        "several replies",
        "nothing answers a reply",
        "set env.step or env.tools, or env.max_turns to 1",
    ),
    Pair(
        "all samples at once",
        "several replies",
        "replies are answered in continuous batching",
        "set rollout.slots to the sequences that decode at a time",
    ),
    Pair(
        "one reply",
        "length of a reply",
        "{one}, so a reply is a response",
        "use rollout.max_new_tokens, or set env.max_turns",
    ),
    Pair("one reply", "credit by turn", "{one}", "write 'response', or set env.max_turns"),
    Pair(
        "drawing from all tokens",
        "log-probabilities over the vocabulary",
        "neither rollout.top_k nor top_p leaves a token out",
        "leave it out, or set one of these",
    ),
    Pair(
        "dynamic sampling",
        "credit by turn",
        "dynamic sampling leaves out groups by the rewards of whole responses",
        "write 'response', or algo.dynamic_sampling=False",
    ),
    Pair(
        "continuous batching",
        "tensor parallelism",
        "continuous batching (rollout.slots) does not cut layers by columns",
        "set mesh.tensor to 1, or rollout.slots to 0",
    ),
    Pair(
        "continuous batching",
        "scales of a whole batch",
        "continuous batching (rollout.slots) decodes other rows together at every step",
        "set rollout.slots to 0, or take a scale per token, such as fp8's",
    ),
    Pair(
        "continuous batching",
        "routing replay",
        "continuous batching does not record routing",
        "set it to 'none', or rollout.slots to 0",
    ),
    Pair(
        "rollouts ahead",
        "routing replay",
        "a checkpoint keeps no routing of rollouts that are ahead ({one})",
        "set it to 'none', or rollout.ahead to 0",
    ),
    Pair(
        "devices for rollouts",
        "routing replay",
        "the routing of rollouts on devices of their own does not go to the learner ({one})",
        "set it to 'none', or mesh.rollout to 0",
    ),
    Pair(
        "partial rollouts",
        "all samples at once",
        "{one} needs slots that later responses take over",
        "set rollout.slots to the sequences that decode at a time, or most_versions to 1",
    ),
    Pair(
        "partial rollouts",
        "several replies",
        "how far a conversation gets in a step depends on its environment's time ({one})",
        "set rollout.most_versions to 1",
    ),
    Pair(
        "partial rollouts",
        "dynamic sampling",
        "a step with dynamic sampling takes further questions, and {one} has begun those of later "
        "steps",
        "set rollout.most_versions to 1, or algo.dynamic_sampling to False",
    ),
    Pair(
        "rows without answers",
        "supervised fine-tuning",
        f"env.answer_key = {NO_ANSWER!r} says that rows have no answer to learn",
        "set sft.steps=0, or name the column",
    ),
)
