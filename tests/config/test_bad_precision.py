"""What a user gets wrong in the section `precision` costs one sentence too, and its neighbours run.

With the fixtures of conftest.py: exit status 2, one sentence on standard
error with the words given here, nothing compiled, nothing written. Proven for fields whose text has
a grammar, and for fields that do not go together: recipes, layers and modules in bf16, the KV
cache, FP8 attention, zero drift. Policies are in test_bad_policies.py. What lies just inside each
bound is accepted.
"""

from __future__ import annotations

import re

import jax
import pytest
import refusals as bad

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import checks, load_config
from fp8rl_jax.config.resolve import resolve_config

pytestmark = bad.REFUSALS


def _cases(table: dict):
    """A decorator: a test for each {name: (input, words)}."""
    params = [pytest.param(*case, id=name) for name, case in table.items()]
    return pytest.mark.parametrize(("given", "words"), params)


def _full(*fields: str) -> list[str]:
    """Fields of the section, which go without its name, in full; others as they are."""
    return [f if "." in f.partition("=")[0] else f"precision.{f}" for f in fields]


def _both(recipe: str) -> list[str]:
    return [f"rollout={recipe}", f"learner={recipe}"]


def _begins(*fields: str) -> bool:
    """Whether a run with these fields begins."""
    if "zero_drift=required" in fields and jax.default_backend() != "cpu":
        pytest.skip("zero drift is promised on the CPU alone")
    return bad.begins(*bad.train_command(*_full(*fields)))


# Single fields.

_VALUES = {
    "kv_cache=FP8": ["recipe", "bf16", "fp8", "fp8_calibrated"],
    "kv_cache=calibrated": ["'calibrated'", "fp8_calibrated"],
    "kv_cache=fp8_calibrated(margin=0.5)": ["precision.kv_cache", "margin is 0.5", "from 1 to 100"],
    "kv_cache=fp8_calibrated(headroom=2)": ["precision.kv_cache", "fp8_calibrated(margin=1.05)"],
    "kernels=triton": ["'triton'", "cpu", "'reference'"],
    "kernels=mosaic": ["'mosaic'", "cpu", "'reference'"],
    "bf16_modules=lm_head": ["'lm_head'", "q_proj", "o_proj", "gate_proj", "down_proj"],
    "bf16_modules=down_proj,down_porj": ["'down_porj'", "q_proj", "down_proj"],
    "bf16_modules=q_proj k_proj": ["'q_proj k_proj'", "q_proj", "k_proj"],
    "bf16_modules=[q": ["'[q'", "q_proj"],
    "weight_polcy=dynamic": ["did you mean precision.weight_policy?"],
    "kvcache=fp8": ["did you mean precision.kv_cache?"],
    "bf16_layers=1": ["did you mean precision."],
}


@pytest.mark.parametrize("field", _VALUES)
def test_field(field, refused_fields):
    """One field with a value that cannot work: the sentence holds it, and what may be written."""
    name = f"precision.{field.partition('=')[0]}"
    bad.assert_words(refused_fields(f"precision.{field}"), [name, *_VALUES[field]])


# Fields that do not go together.

_ROWS = ["(1, 128)", "rows", "fixed size", "fp8_delayed"]
_SQUARE = ["weight", "(32, 1)", "not square", "a policy without state"]
_DELAYED = ["precision.rollout", "'fp8_delayed'", "another forward pass", "same recipe"]
_DIFFER = ["precision.zero_drift", "'required'", "differ", "precision.zero_drift='report'"]
_LOCAL = ["all tokens of a batch", "different batches", "fp8_blockwise", "fp8_delayed", "'report'"]
_STATIC, _REQUIRED = "activation_policy=static(amax=8.0)", "zero_drift=required"
_TENSORWISE, _BF16 = _both("fp8_tensorwise"), _both("bf16")
_SEVERAL = {
    "activations by row": (["activation_policy=delayed"], ["activation", "delayed(", *_ROWS]),
    "gradients by row": (["gradient_policy=delayed(history=4)"], ["gradient", *_ROWS]),
    "wrapped": (["activation_policy=power_of_two(delayed)"], ["power_of_two(delayed(", *_ROWS]),
    "the user's": (["activation_policy=ema_policy:ema"], ["ema_policy:ema", *_ROWS]),
    "weights of mxfp8": ([*_both("mxfp8"), "weight_policy=delayed"], ["delayed(", *_SQUARE]),
    "the user's for mxfp8": ([*_both("mxfp8"), "weight_policy=ema_policy:ema"], _SQUARE),
    "too many first layers": (["first_layers_bf16=2"], ["first 2", "model's 1", "lower"]),
    "too many last layers": (["last_layers_bf16=2"], ["last 2", "model's 1", "lower"]),
    "more layers than there are": (
        ["first_layers_bf16=2", "last_layers_bf16=2", "model.num_hidden_layers=3"],
        ["first 2", "last 2", "model's 3", "lower"],
    ),
    "one layer twice": (["first_layers_bf16=1", "last_layers_bf16=1"], ["first 1", "last 1"]),
    "attention of a bf16 cache": (["attention=fp8", "kv_cache=bf16"], ["FP8 attention", "K and V"]),
    "attention of recipe bf16": ([*_BF16, "attention=fp8"], ["'bf16'", "FP8 attention", "K and V"]),
    "attention of one recipe bf16": (
        ["rollout=fp8_blockwise", "learner=bf16", "attention=fp8"],
        ["precision.learner"],
    ),
    "attention of INT8": (["attention=fp8"], ["precision.attention", "E4M3", "kv_cache='fp8'"]),
    "delayed rollout": (["rollout=fp8_delayed"], [*_DELAYED, "'fp8'"]),
    "delayed rollout, bf16": (["rollout=fp8_delayed", "learner=bf16"], [*_DELAYED, "'bf16'"]),
    "delayed rollout, report": (["rollout=fp8_delayed", "zero_drift=report"], _DELAYED),
    "tensorwise": (_TENSORWISE, ["'fp8_tensorwise'", *_LOCAL]),
    "tensorwise required": ([*_TENSORWISE, _REQUIRED], ["'fp8_tensorwise'", *_LOCAL]),
    "tensorwise powers": ([*_TENSORWISE, "activation_policy=power_of_two(dynamic)"], _LOCAL),
    "bf16 learner": (["learner=bf16", _REQUIRED], [*_DIFFER, "fp8", "bf16"]),
    "other scales": (["learner=fp8_blockwise_pow2", _REQUIRED], [*_DIFFER, "fp8_blockwise_pow2"]),
    "delayed learner": (["learner=fp8_delayed", _REQUIRED], [*_DIFFER, "fp8_delayed"]),
    "FP8 and its imitation": (
        ["rollout=fp8_blockwise", "learner=fake", _REQUIRED],
        [*_DIFFER, "fp8_blockwise", "fake"],
    ),
    "no gradients quantised": (
        [*_both("fake_forward"), "gradient_policy=zzzzz"],
        ["gradient_policy"],
    ),
    "no module named": (["bf16_modules=,"], ["precision.bf16_modules", "q_proj"]),
    **{
        f"{field} of bf16": ([*_BF16, field], [field.partition("=")[0], "(bf16, bf16)", "fp8"])
        for field in (
            "weight_policy=dynamic",
            "activation_policy=zzzzz",
            "gradient_policy=delayed",
            "first_layers_bf16=1",
            "last_layers_bf16=1",
            "bf16_modules=down_proj",
        )
    },
}


@_cases(_SEVERAL)
def test_fields_that_contradict(given, words, refused_fields):
    """Fields that are good one by one: why they do not fit together, and the ways out."""
    bad.assert_words(refused_fields(*_full(*given)), words)


_FIELD_AT_FAULT = {
    "unknown policy of weights": (["weight_policy=zzzzz"], "weight_policy"),
    "unknown policy of gradients": (["gradient_policy=no_such_module_here:f"], "gradient_policy"),
    "state for rows": (["activation_policy=delayed"], "activation_policy"),
    "state for mxfp8": ([*_both("mxfp8"), "weight_policy=delayed"], "weight_policy"),
    "policy of one side": (["learner=bf16", "weight_policy=delayed"], "weight_policy"),
    "first layers": (["first_layers_bf16=2"], "first_layers_bf16"),
    "last layers": (["last_layers_bf16=2"], "last_layers_bf16"),
    "modules": (["bf16_modules=lm_head"], "bf16_modules"),
    "attention": (["attention=fp8", "kv_cache=bf16"], "attention"),
    "tensorwise": (_TENSORWISE, "rollout"),
    "dynamic activations": (
        [*_both("fp8_delayed"), "activation_policy=dynamic"],
        "activation_policy",
    ),
}


@pytest.mark.parametrize("case", _FIELD_AT_FAULT)
def test_the_field_at_fault_is_named_first(case, refused_fields):
    """Who reads the first field of a sentence and fixes that one has fixed the config."""
    fields, name = _FIELD_AT_FAULT[case]
    message = refused_fields(*_full(*fields))
    assert re.findall(r"precision\.(\w+)", message)[:1] == [name], message


@pytest.mark.parametrize("fields", [["attention=fp8", "kv_cache=bf16"], [*_BF16, "attention=fp8"]])
def test_attention_without_a_quantised_cache_offers_one(fields, refused_fields):
    """The way out is written as the config takes it."""
    bad.assert_words(refused_fields(*_full(*fields)), ["precision.kv_cache", "fp8_calibrated"])


def test_what_was_refused_is_not_offered(refused_fields):
    """Activations of fp8_delayed with dynamic scales: another recipe is offered, or the field."""
    message = refused_fields(*_full(*_both("fp8_delayed"), "activation_policy=dynamic"))
    assert "fp8_delayed" not in message.partition("use ")[2], message


_ON_A_GPU = {
    "no jax-triton": ("auto", False, ["jax-triton", "fp8rl_jax[cuda]", "'reference'"]),
    "triton": ("triton", True, None),
    "reference": ("reference", False, None),
}


@pytest.mark.parametrize("case", _ON_A_GPU)
def test_kernels_where_jax_has_a_gpu(case, monkeypatch):
    kernels, installed, words = _ON_A_GPU[case]
    config = load_config("tiny.py", [f"--config.precision.kernels={kernels}"])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(checks, "triton_installed", lambda: installed)
    if words is None:
        checks.check_platform(resolve_config(config))
        return
    with pytest.raises(UserError) as refusal:
        checks.check_platform(resolve_config(config))
    bad.assert_words(str(refusal.value), words)


def test_zero_drift_is_required_of_tested_kernels(monkeypatch):
    """On a GPU: of kernels whose tests have held there, and never of XLA's own products."""
    fields = ["--config.precision.zero_drift=required"]
    config = load_config("tiny.py", fields)
    by_xla = load_config("tiny.py", [*fields, "--config.precision.kernels=reference"])
    monkeypatch.setattr(checks, "backend", lambda: "gpu")
    monkeypatch.setattr(checks, "triton_installed", lambda: True)
    monkeypatch.setattr(checks.proven, "is_proven", lambda: False)
    with pytest.raises(UserError) as refusal:
        checks.check_platform(resolve_config(config))
    words = ["gpu_check.sh", "jax ", "triton ", "zero_drift='report'"]
    bad.assert_words(str(refusal.value), words)
    monkeypatch.setattr(checks.proven, "is_proven", lambda: True)
    checks.check_platform(resolve_config(config))
    monkeypatch.setattr(checks, "compiler_options", dict)
    with pytest.raises(UserError, match="zero_drift='report'"):
        checks.check_platform(resolve_config(by_xla))


def test_exact_products_are_a_cpus(monkeypatch):
    config = load_config("tiny.py", ["--config.precision.cpu_products=exact"])
    resolved = resolve_config(config)
    assert resolved.rollout_recipe.kernels == resolved.learner_recipe.kernels == "exact"
    checks.check_platform(resolved)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError) as refusal:
        checks.check_platform(resolved)
    bad.assert_words(str(refusal.value), ["cpu_products", "gpu", "'auto'", "JAX_PLATFORMS=cpu"])


# The other side of every bound.

_GOOD = [
    [*_TENSORWISE, _STATIC, _REQUIRED],
    [*_TENSORWISE, "activation_policy=delayed(history=4)", _REQUIRED],
    [*_TENSORWISE, "activation_policy=ema_policy:ema"],
    [*_TENSORWISE, "zero_drift=report"],
    ["rollout=fp8_tensorwise"],
    [*_both("fp8_delayed"), _REQUIRED],
    ["learner=fp8_delayed"],
    ["rollout=fake_forward", "learner=fake", _REQUIRED],
    ["learner=fp8", _REQUIRED],
    ["learner=fake"],
    [_STATIC],
    ["weight_policy=delayed"],
    ["activation_policy=power_of_two(dynamic)"],
    ["learner=bf16", "weight_policy=dynamic"],
    [*_both("mxfp8"), "weight_policy=static(amax=8.0)"],
    ["first_layers_bf16=1"],
    ["first_layers_bf16=2", "last_layers_bf16=1", "model.num_hidden_layers=3"],
    ["bf16_modules= down_proj , [qk]_proj "],
    ["bf16_modules=*"],
    [*_BF16, "attention=fp8", "kv_cache=fp8"],
    ["attention=fp8", "kv_cache=fp8_calibrated(margin=1)"],
    ["kv_cache=bf16", "health=False", "kernels=reference"],
    ["kv_cache=fp8_calibrated", "learner=bf16"],
    ["cpu_products=exact", "kernels=reference", _REQUIRED],
]


@pytest.mark.parametrize("fields", _GOOD, ids=lambda fields: " ".join(fields))
def test_the_other_side_of_a_bound(fields):
    """What is just inside, or was asked to be reported only, begins."""
    assert _begins(*fields)
