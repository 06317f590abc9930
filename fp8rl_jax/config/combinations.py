"""What a configuration cannot have together: needs of fields, and pairs of features.

::

    Field.needs   of `config.fields`: a field that is set needs another one, set or at a value
    PAIRS         two features that follow from recipes or from several fields, and the message

`config.checks` refuses a configuration that breaks one of them. `fp8rl plan` refuses a field that
needs another rollout than the one that is planned. The documentation's page of combinations is made
from both tables. To close a gap, delete its need or pair. For a new one, add it here:
tests/config/test_combinations.py tries the needs of every field, and has a configuration for each
pair.

Not here: numbers that do not fit each other (`config.checks`), and the shapes of a model
(`models.ModelConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.fields import all_fields
from fp8rl_jax.config.load import flatten, literal
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.envs import NO_ANSWER
from fp8rl_jax.quant import Recipe


class Pair(NamedTuple):
    """Two features that do not work together.

    Attributes:
      one, other: their names, for the documentation.
      on: returns a true value if a configuration has both.
      problem: what does not work, and why; `{c}` stands for the configuration, `{r}` for the
        `Resolved`, and `{on}` for what `on` returned.
      remedy: what to write instead.
    """

    one: str
    other: str
    on: Callable[[Resolved], Any]
    problem: str
    remedy: str


def check_combinations(resolved: Resolved) -> None:
    """Raises UserError for the first need that is not met, or pair that does not work together."""
    for path, problem, remedy in unmet_needs(resolved):
        raise UserError(f"{problem}: {remedy}, or leave {path} out")
    for pair in PAIRS:
        if on := pair.on(resolved):
            problem = pair.problem.format(c=resolved.config, r=resolved, on=on)
            raise UserError(f"{problem}: {pair.remedy}")


def unmet_needs(
    resolved: Resolved, assumed: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, str, str]]:
    """Yields (field, problem, remedy) for each need of a field that is not met.

    Args:
      resolved: the configuration; fields of its model are the model's, whatever names it.
      assumed: {'section.field': value} in the place of the configuration's.
    """
    shapes = {f"model.{name}": value for name, value in vars(resolved.model).items()}
    values = {**flatten(resolved.config), **shapes, **(assumed or {})}
    for path, field in all_fields().items():
        for need, reason in field.needs.items() if field.is_set(values[path]) else ():
            if not any(_holds(condition, values) for condition in need.split(" or ")):
                problem = f"{path} is {values[path]!r}, which needs {need}"
                remedy = "set one of them" if " or " in need else "set that"
                yield path, f"{problem} ({reason})" if reason else problem, remedy


def _holds(condition: str, values: Mapping[str, Any]) -> bool:
    """Returns whether 'SECTION.FIELD' is set, or has the value of 'SECTION.FIELD=VALUE'."""
    path, equals, text = condition.partition("=")
    return values[path] == literal(text) if equals else all_fields()[path].is_set(values[path])


def _sides(resolved: Resolved, on: Callable[[Recipe], Any]) -> list[str]:
    """Names the fields whose recipes have a feature of the KV cache, with their values."""
    precision = resolved.config.precision
    recipes = {"rollout": resolved.rollout_recipe, "learner": resolved.learner_recipe}
    sides = [side for side, recipe in recipes.items() if on(recipe)]
    fields = sides if precision.kv_cache == "recipe" else ["kv_cache"] * bool(sides)
    return [f"precision.{field} = {precision[field]!r}" for field in fields]


def _observing(resolved: Resolved) -> list[str]:
    """Names the fields of `precision` that make rollout scales follow what the learner saw."""
    operands = resolved.rollout_recipe.operands.items()
    names = [f"{name}_policy" for name, o in operands if o.policy.stateful and name != "gradient"]
    return [n for n in names if resolved.config.precision[n]] or ["rollout"] * bool(names)


def _of_batch(resolved: Resolved) -> str:
    """Describes the scale of activations if it depends on a whole batch, else ''."""
    recipe = resolved.rollout_recipe
    if recipe.row_local:
        return ""
    field = "activation_policy" if resolved.config.precision.activation_policy else "rollout"
    policy = recipe.operands["activation"].policy.name
    return (
        f"precision.{field}: recipe {recipe.name!r} takes an activation's scale ({policy}) from "
        "all tokens of a batch"
    )


_DIFFER = (
    "recipes that differ (rollout {r.rollout_recipe.name!r}, learner {r.learner_recipe.name!r})"
)
# A configuration that has several pairs gets the message of the first.
PAIRS = (
    Pair(
        "latent attention",
        "K and V with a scale per layer, or in two formats",
        lambda r: (
            r.model.latent
            and _sides(r, lambda x: x.calibrates or x.stored_dtype("k") != x.stored_dtype("v"))
        ),
        "{on[0]}, and the model has multi-head latent attention (kv_lora_rank above 0), which "
        "stores one latent for both, with a scale per token",
        "set precision.kv_cache='fp8' or 'int8'",
    ),
    Pair(
        "latent attention",
        "FP8 attention",
        lambda r: r.model.latent and r.config.precision.attention == "fp8",
        "precision.attention is 'fp8', and the model has multi-head latent attention, which keeps "
        "its queries in bf16",
        "set precision.attention='bf16'",
    ),
    Pair(
        "latent attention",
        "layers cut by columns",
        lambda r: r.model.latent and r.config.mesh.tensor != 1,
        "mesh.tensor is {c.mesh.tensor}, and the model has multi-head latent attention, which is "
        "not cut by heads",
        "set mesh.tensor=1",
    ),
    Pair(
        "FP8 attention",
        "a recipe without K and V in E4M3",
        lambda r: r.config.precision.attention == "fp8" and _sides(r, lambda x: not x.kv_e4m3),
        "precision.attention is 'fp8': FP8 attention needs K and V in FP8 (E4M3), which {on[0]} "
        "lacks",
        "set precision.kv_cache='fp8' or 'fp8_calibrated'",
    ),
    Pair(
        "scales from observed values",
        "recipes that differ",
        lambda r: not r.same_forward and _observing(r),
        "precision.{on[0]}: recipe {r.rollout_recipe.name!r} scales by what the learner's steps "
        f"observed, and with {_DIFFER} the learner has another forward pass",
        "use the same recipe on both sides",
    ),
    Pair(
        "required zero drift",
        "recipes that differ",
        lambda r: r.config.precision.zero_drift == "required" and not r.same_forward,
        f"precision.zero_drift is 'required', and with {_DIFFER} the two sides compute different "
        "values",
        "make them equal, or set precision.zero_drift='report'",
    ),
    Pair(
        "zero drift",
        "scales of a whole batch",
        lambda r: r.zero_drift and _of_batch(r),
        "{on}, and sampler and learner see different batches, so they cannot agree (measured mean "
        "drift 0.13 per token)",
        "take a scale per token (fp8_blockwise) or one that is fixed beforehand (that of "
        "fp8_delayed, or static), or set precision.zero_drift='report'",
    ),
    Pair(
        "continuous batching",
        "scales of a whole batch",
        lambda r: r.config.rollout.slots and _of_batch(r),
        "{on}, and continuous batching (rollout.slots) decodes other rows together at every step",
        "set rollout.slots to 0, or take a scale per token, such as fp8's",
    ),
    Pair(
        "tools beside an environment",
        "questions without chat",
        lambda r: r.config.env.step and r.config.env.tools and not r.config.data.chat,
        "env.tools is {c.env.tools!r} beside env.step, and without data.chat no chat template "
        "shows them",
        "set data.chat=True, or env.tools=''",
    ),
    Pair(
        "rows without answers",
        "supervised fine-tuning",
        lambda r: r.config.env.answer_key == NO_ANSWER and r.config.sft.steps,
        "sft.steps is {on}, and env.answer_key = {c.env.answer_key!r} says that rows have no "
        "answer to learn",
        "set sft.steps=0, or name the column",
    ),
    Pair(
        "comparison within a group",
        "groups of one",
        lambda r: (
            r.config.rollout.group_size == 1
            and (
                r.config.algo.baseline in ("group_mean", "leave_one_out")
                or r.config.algo.scale == "group_std"
                or r.config.algo.dynamic_sampling
            )
        ),
        "rollout.group_size is 1, and with algo.baseline = {c.algo.baseline!r}, algo.scale = "
        "{c.algo.scale!r}, algo.dynamic_sampling = {c.algo.dynamic_sampling} a response is "
        "compared with the others of its group",
        "write a group of at least 2, or algo.preset='reinforce_pp'",
    ),
    Pair(
        "correction",
        "the rollout's log-probabilities",
        lambda r: (
            r.config.algo.old_logprobs == "rollout"
            and r.config.algo.correction not in ("auto", "none")
        ),
        "algo.correction is {c.algo.correction!r}, and needs the learner's own log-probabilities",
        "set algo.old_logprobs='auto' or 'learner'",
    ),
    Pair(
        "loss reinforce",
        "several updates of a rollout",
        lambda r: (
            r.config.algo.loss == "reinforce"
            and r.config.algo.num_minibatches * r.config.algo.epochs > 1
        ),
        "algo.num_minibatches x algo.epochs is above 1, and algo.loss = 'reinforce' has no ratio "
        "to the policy before",
        "write 1 for both, or take ppo or cispo",
    ),
    Pair(
        "loss reinforce",
        "older versions without a correction",
        lambda r: r.config.algo.loss == "reinforce" and r.stale and not r.algorithm.corrections,
        "rollout.ahead is above 0, or rollout.most_versions above 1, and algo.loss = 'reinforce' "
        "has no ratio to the version that drew a token",
        "set algo.correction='tis', or take ppo or cispo",
    ),
    Pair(
        "loss none",
        "no divergence",
        lambda r: (
            r.config.algo.loss == "none" and not r.config.algo.kl_coef and not r.frozen_kl_coef
        ),
        "algo.loss is 'none', and no divergence from a teacher or a reference is in the loss",
        "set algo.teacher and algo.teacher_coef, or another loss",
    ),
    Pair(
        "KL in the reward",
        "another estimator than k1",  # the default is accepted, where it has no effect
        lambda r: (
            r.config.algo.kl_in == "reward"
            and r.config.algo.kl_coef
            and r.config.algo.kl_estimator not in ("k1", all_fields()["algo.kl_estimator"].default)
        ),
        "algo.kl_estimator is {c.algo.kl_estimator!r}, and algo.kl_in = 'reward' takes k1 from the "
        "advantages",
        "write 'k1', or algo.kl_in='loss'",
    ),
)
