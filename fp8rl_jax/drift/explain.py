"""Derives a verdict from the results of an analysis: the culprit, the reason, and advice."""

from __future__ import annotations

import dataclasses

from fp8rl_jax.drift.operations import OPERATIONS
from fp8rl_jax.quant import Recipe, same_forward
from fp8rl_jax.quant.table import kv_cache_text


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The results of an analysis.

    Attributes:
      rollout_recipe, learner_recipe: recipes of the two sides.
      drifts: whether the bits of any log-probability differ.
      result: result of `analyse`, without the verdict.
      alternatives: the definition of the log-probability that each side follows, if known.
    """

    rollout_recipe: Recipe
    learner_recipe: Recipe
    drifts: bool
    result: dict
    alternatives: dict[str, str]


def explain(evidence: Evidence) -> dict[str, str | int | None]:
    """Returns the verdict: {culprit, layer, sentence, advice}.

    `culprit` is 'none', 'weights', 'recipe', 'layers', 'kv', 'scaling', 'logprob',
    'head', 'unknown', or the name of an operation.
    """
    if not evidence.drifts:
        return _no_drift(evidence)
    for cause in (_layers, _recipes, _weights, _scaling, _operation, _logprob):
        verdict = cause(evidence)
        if verdict is not None:
            return verdict
    if not evidence.result["tapped_programs"]:
        return _verdict(
            "unknown",
            "Log-probabilities differ, though recipes, weights and scaling agree; intermediate "
            "values are sharded where mesh.tensor is above 1.",
            "run it with --config.mesh.tensor=1 to see the operation",
        )
    hidden = ", ".join(evidence.result["unobservable"])
    return _verdict(
        "unknown",
        "Log-probabilities differ, and no value that could be observed does"
        + (f"; not observable without changing the bits: {hidden}." if hidden else "."),
        "compare the two programs' compiled HLO, and report this with the versions of jax and "
        "jaxlib",
    )


def _verdict(culprit: str, sentence: str, advice: str, layer: int | None = None) -> dict:
    return {"culprit": culprit, "layer": layer, "sentence": sentence, "advice": advice}


def _no_drift(evidence: Evidence) -> dict:
    first, logits = evidence.result["first"], evidence.result["logits"]
    differing = "recipes" if not _same(evidence) else None
    if evidence.result["weights"]["differing"]:
        differing = "weights"
    if first is not None:
        differing = f"values of {first['op']}"
    if logits is not None and logits["differ"]:
        differing = "logits of tokens that were not drawn"
    seen = evidence.result["tapped_programs"] and not evidence.result["unobservable"]
    if differing is None:
        return _verdict(
            "none",
            "Every log-probability of the rollout has the bits of the learner's"
            + (", and so has every intermediate value." if seen else "."),
            "nothing to do",
        )
    return _verdict(
        "none",
        f"The two sides differ ({differing}), without an effect on the "
        f"{evidence.result['headline']['drift_tokens']:,.0f} tokens compared here: their "
        "log-probabilities have the same bits.",
        "do not rely on it: another platform or another batch may show it",
    )


def _same(evidence: Evidence) -> bool:
    return same_forward(evidence.rollout_recipe, evidence.learner_recipe)


def _layers(evidence: Evidence) -> dict | None:
    """Returns the verdict if the recipes differ only in the layers or modules they quantise."""
    recipes = {"rollout": evidence.rollout_recipe, "learner": evidence.learner_recipe}
    rollout, learner = (
        dataclasses.replace(r, first_layers=0, last_layers=0, bf16_modules=())
        for r in recipes.values()
    )
    if _same(evidence) or not same_forward(rollout, learner):
        return None
    first = evidence.result["first"]
    layer = None if first is None else first["layer"]
    kept = {
        side: f"first_layers={r.first_layers}, last_layers={r.last_layers}, "
        f"bf16_modules={','.join(r.bf16_modules) or 'none'}"
        for side, r in recipes.items()
    }
    return _verdict(
        "layers",
        "The two sides keep different layers in bf16 (rollout "
        f"{kept['rollout']}; learner {kept['learner']})"
        + (f": the first value that differs is {first['op']} in layer {layer}." if first else "."),
        "keep the same layers and modules in bf16 on both sides",
        layer,
    )


def _recipes(evidence: Evidence) -> dict | None:
    """Returns the verdict if the recipes differ in anything else."""
    if _same(evidence):
        return None
    one, other = evidence.rollout_recipe, evidence.learner_recipe
    rollout, learner = (
        dataclasses.replace(r, kv="none", kv_policy=one.kv_policy, fp8_attention=False)
        for r in (one, other)
    )
    if same_forward(rollout, learner):
        return _verdict(
            "kv",
            f"The rollout's K and V are {kv_cache_text(one)}, the learner's are "
            f"{kv_cache_text(other)}.",
            "set precision.kv_cache and precision.attention so that both sides read the same keys "
            "and values",
        )
    parts = [
        f"{operand}: rollout {_operand(one, operand)}, learner {_operand(other, operand)}"
        for operand in ("weight", "activation")
        if getattr(one, operand) != getattr(other, operand)
    ]
    if kv_cache_text(one) != kv_cache_text(other):
        parts.append(f"KV cache: rollout {kv_cache_text(one)}, learner {kv_cache_text(other)}")
    if one.fake != other.fake:
        parts.append("products: in FP8 on one side, of dequantised bf16 on the other")
    if one.compute_dtype != other.compute_dtype:
        parts.append(f"computing in: rollout {one.compute_dtype}, learner {other.compute_dtype}")
    if one.head != other.head:
        rollout, learner = (recipe.for_head() for recipe in (one, other))
        parts.append(
            f"output head: rollout {rollout.compute_dtype}, learner {learner.compute_dtype}"
        )
    return _verdict(
        "recipe",
        f"Rollout and learner run different recipes ({one.name}, {other.name}): "
        + "; ".join(parts)
        + ".",
        "set precision.rollout and precision.learner to the same recipe; until then the drift is "
        "real, and importance weights (algo.correction) only bound it",
    )


def _operand(recipe: Recipe, name: str) -> str:
    operand = getattr(recipe, name)
    if operand is None:
        return "not quantised"
    block = "x".join("all" if n == -1 else str(n) for n in operand.block)
    return f"{operand.dtype} {block} {operand.policy.name}"


def _weights(evidence: Evidence) -> dict | None:
    weights = evidence.result["weights"]
    if not weights["differing"]:
        return None
    names = ", ".join(weights["differing"][:3])
    count = len(weights["differing"])
    return _verdict(
        "weights",
        f"The rollout holds other weights than the learner: {count} of {weights['leaves']} arrays "
        f"differ ({names}{', ...' if count > 3 else ''}), though the recipes are equal.",
        "refit after every update, before the next rollout: the sampler runs a stale policy, or "
        "its weights were changed on the way",
    )


def _scaling(evidence: Evidence) -> dict | None:
    recipe = evidence.learner_recipe
    if recipe.row_local or recipe.activation is None:
        return None
    return _verdict(
        "scaling",
        f"Recipe {recipe.name!r} scales an activation by the amax of the whole tensor "
        f"({_operand(recipe, 'activation')}): the scale depends on which tokens share the batch, "
        "and a decode step has other ones than a train step.",
        "take scales per row block (fp8_blockwise), or scales fixed beforehand (fp8_delayed, "
        "static)",
    )


def _operation(evidence: Evidence) -> dict | None:
    first = evidence.result["first"]
    if first is None:
        return None
    name = first["op"]
    layer = first["layer"]
    advice = OPERATIONS[name].advice
    where = "" if layer is None else f" in layer {layer}"
    sentence = (
        f"The first value that differs is {name}{where}: {OPERATIONS[name].what}. "
        f"{first['differ']:.2%} of its elements differ, by at most {first['max']:.2g}; everything "
        "computed before it is equal bit for bit."
    )
    if hidden := evidence.result["unobservable"]:
        sentence = sentence.replace("The first value", "Of the values that were compared the first")
        sentence = sentence.replace(" computed before it", " compared before it")
        sentence += f" {len(hidden)} could not be compared."
    beyond = None if name.endswith(("/input", "_read")) else first["float32_only"]
    compute = evidence.learner_recipe.compute_dtype
    if beyond in ("rollout", "learner") and str(compute) == "bfloat16":
        sentence += f" The {beyond}'s values there are not rounded to bf16."
        advice = f"round them on the {beyond}'s side, as the other does; {advice}"
    return _verdict(name, sentence, advice, layer)


def _logprob(evidence: Evidence) -> dict | None:
    """Returns the verdict if all values before the logits or the log-probability are equal."""
    logits = evidence.result["logits"]
    if logits is None:
        return None
    if logits["differ"]:
        which = "The compared" if evidence.result["unobservable"] else "The"
        return _verdict(
            "head",
            f"{which} hidden states are equal bit for bit, and {logits['differ']:.2%} of the "
            f"logits differ, by at most {logits['max']:.2g}: the output head is not the same.",
            "multiply by the same head through block_matmul on both sides",
        )
    sides = evidence.alternatives
    expected = sides["expected"]
    odd = [side for side in ("rollout", "learner") if sides[side] != expected]
    what = {
        "without temperature": "leaves the temperature out",
        "kept tokens": "renormalises over the tokens that top-k and top-p keep",
        "full vocabulary": "takes the whole vocabulary, also tokens that top-k and top-p leave out",
        "another": "follows another definition",
        expected: "follows the definition, and the last bits differ",
    }
    said = [f"the {side} {what[sides[side]]}" for side in odd or ("learner",)]
    return _verdict(
        "logprob",
        "All logits are equal bit for bit, so the log-probability itself is computed differently: "
        + ", and ".join(said)
        + ".",
        "compute it by logprobs_of_logits(scaled_logits(logits, temperature), token) on both "
        f"sides, over the {expected}",
    )
