"""Scaling policies and recipes that a user writes wrong, as text or as functions: one sentence.

The sentence holds the words given here. Proven for policies that are not understood, that
have impossible arguments, whose module or function is missing, fails or returns something else,
whose three functions do not fit, and that read the whole batch under zero drift; for recipes as
'module:function' likewise; and every form that is valid is accepted and arrives in the recipe.
"""

from __future__ import annotations

import itertools
import sys

import pytest
import refusals as bad
from test_bad_precision import _LOCAL, _begins, _both, _cases, _full

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.quant import get_scaling_policy, recipe_names

pytestmark = bad.REFUSALS

_NUMBERS = itertools.count()
_HEAD = """\
import jax.numpy as jnp, numpy as np
from fp8rl_jax.quant import Operand, Recipe, ScalingPolicy, delayed
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(source) -> name of a new module of the user's. (Policies are kept by their text, so
    no two tests may use one name.)"""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def write(source: str) -> str:
        names.append(f"users_numerics_{next(_NUMBERS)}")
        (tmp_path / f"{names[-1]}.py").write_text(source + "\n")
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def _policy(init="jnp.zeros", scale="lambda s, a, m: m / (1 + s)", update="lambda s, a: a"):
    """Source of a policy; as it stands it is good."""
    return f"{_HEAD}f = lambda: ScalingPolicy({init}, {scale}, {update})"


def _recipe(fields: str):
    return f"{_HEAD}f = lambda: Recipe('mine', {fields})"


# Policies as text.

_FORMS = ["dynamic", "delayed(history=1024, margin=0)", "static(amax=8.0)", "power_of_two(dynamic)"]
_FORMS += ["'package.module:function'"]
_NOT_UNDERSTOOD = [
    "zzzzz",
    "dynamc",
    "Dynamic",
    "delayd(history=4)",
    "fp8_delayed",
    "math",
    "math.sqrt",
    " ",
    "delayed(histroy=4)",
    "delayed(history='4')",
    "delayed(history=[4])",
    "delayed(1, 2, 'max')",
    "delayed(history: 4)",
    "delayed(",
    "delayed)",
    "dynamic(history=3)",
    "dynamic + delayed",
    "dynamic;",
    "'dynamic'",
    "1",
    "None",
    "static",
    "static()",
    "static(amax='8')",
    "static(amax=None)",
    "static(amax=8.0, x=1)",
    "power_of_two",
    "power_of_two()",
    "power_of_two(dynamc)",
    "power_of_two(dynamic, dynamic)",
    "power_of_two(math:sqrt)",
]


def test_policy_not_understood(refused_fields):
    """Unknown names, wrong arguments and what is no policy at all: every form is shown."""
    for text in _NOT_UNDERSTOOD:
        with pytest.raises(UserError) as refusal:
            get_scaling_policy(text)
        bad.assert_words(str(refusal.value), [repr(text), "write", *_FORMS])
    message = refused_fields(f"precision.weight_policy={text}")
    bad.assert_words(message, ["precision.weight_policy", repr(text), "write", *_FORMS])


_ARGUMENTS = {
    "zzzzz": ["'zzzzz'", *_FORMS],
    "delayed(history=0)": ["history=0", "from 1 to 65536"],
    "delayed(history=-3)": ["history=-3", "from 1 to 65536"],
    "static(amax=0)": ["amax=0", "from 1e-30 to 1e+30"],
    "static(amax=-1)": ["amax=-1", "from 1e-30 to 1e+30"],
    "static(amax=1e400)": ["amax=inf", "from 1e-30 to 1e+30"],
    "power_of_two(static(amax=0))": ["amax=0", "from 1e-30 to 1e+30"],
    "no_such_module_here:f": ["no_such_module_here", "'package.module:function'"],
    "math:no_such_function": ["math", "no_such_function", "'package.module:function'"],
    "math:": ["'math:'", "'package.module:function'"],
    ":f": ["':f'", "'package.module:function'"],
}


_FIRST = next(iter(_ARGUMENTS))


@pytest.mark.parametrize(
    ("field", "text"),
    [("weight_policy", text) for text in _ARGUMENTS]
    + [("activation_policy", _FIRST), ("gradient_policy", _FIRST)],
)
def test_policy_of_each_operand(field, text, refused_fields):
    """The same checks for weights, activations and gradients: arguments, modules, functions."""
    bad.assert_words(refused_fields(f"precision.{field}={text}"), _ARGUMENTS[text])


@_cases(
    {
        "half a step": ("delayed(history=1.5)", ["history=1.5", "write"]),
        "margin in words": ("delayed(margin='a')", ["margin='a'", "write"]),
        "overflowing margin": ("delayed(margin=-1e9)", ["margin=-1", "write"]),
        "vanishing margin": ("delayed(margin=2000)", ["margin=2000", "write"]),
        "infinite margin": ("delayed(margin=1e400)", ["margin=inf", "write"]),
        "vanishing scale": ("static(amax=1e50)", ["amax=1e+50", "write"]),
        "overflowing scale": ("static(amax=1e-40)", ["amax=1e-40", "write"]),
    }
)
def test_arguments_that_no_scale_follows_from(given, words, refused_fields):
    """Arguments of the wrong kind, and those whose float32 multiplier overflows or vanishes."""
    bad.assert_words(refused_fields(f"precision.weight_policy={given}"), words)


@pytest.mark.parametrize(
    "text",
    ["static(amax='8')", "delayed(history=[4])", "delayed(margin=nan)", " ", "power_of_two()"],
)
def test_sentence_is_in_the_users_words(text, refused_fields):
    """Why a text is not understood is said in words that its writer knows."""
    message = refused_fields(f"precision.weight_policy={text}")
    jargon = ["object at 0x", "<unknown>", "not supported between", "to unpack", "unhashable"]
    assert [word for word in jargon if word in message] == []


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ("lambda s, a, m: jnp.full(a.shape, jnp.nan, jnp.float32)", "at the start .* nan"),
        ("lambda s, a, m: jnp.zeros(a.shape, jnp.float32)", "at the start .* returned 0 "),
        ("lambda s, a, m: -m / (1 + a)", "returned -448 for an amax of 0"),
        ("lambda s, a, m: m / a", "returned inf for an amax of 0"),
        ("lambda s, a, m: m / (1 + s) - (s > 1)", "after an update .* amax of 448"),
    ],
)
def test_scales_that_are_no_numbers(scale, words, module):
    """A scale of the probe that is not finite and positive names the policy, and the amax."""
    name = module(_policy(scale=scale))
    fields = [f"precision.{side}=fp8_delayed" for side in ("rollout", "learner")]
    with pytest.raises(UserError, match=f"'{name}:f': .*{words}"):
        resolve_config(load_config("tiny.py", [*fields, f"precision.gradient_policy={name}:f"]))


_GOES = "def goes(*_): raise {}\nclass Odd(BaseException): pass\n"
_CHECKED = {
    "init": _policy("goes"),
    "scale": _policy(scale="goes"),
    "update": _policy(update="goes"),
    "scale on numbers": _policy(
        scale="lambda s, a, m: m / (1 + s) if isinstance(a, jax.core.Tracer) else goes()"
    ),
}


_PLACES = [*_CHECKED, "algo.loss", "algo.correction"]


@pytest.mark.parametrize(
    ("where", "error"),
    [(where, "Odd('bad')") for where in _PLACES]
    + [(_PLACES[0], "SystemExit(0)"), (_PLACES[0], "GeneratorExit")],
)
def test_functions_that_end_the_process(where, error, module):
    """Whatever they raise while they are tried is one sentence, and no end without a word."""
    source = "import jax\n" + _GOES.format(error) + _CHECKED.get(where, "")
    name = module(source)
    field = where if where.startswith("algo.") else "precision.gradient_policy"
    function = f"{name}:{'goes' if where.startswith('algo.') else 'f'}"
    fields = [f"precision.{side}=fp8_delayed" for side in ("rollout", "learner")]
    with pytest.raises(UserError, match=f"'{function}' fails .*{error.partition('(')[0]}"):
        resolve_config(load_config("tiny.py", [*fields, f"{field}={function}"]))


# Policies and recipes as functions.

_FUNCTIONS = {
    "raises": ("def f(): raise RuntimeError('bad')", ["RuntimeError", "bad", "ScalingPolicy"]),
    "two lines": (r"def f(): raise ValueError('one\ntwo')", ["ValueError", "one", "two"]),
    "wants an argument": ("def f(x): pass", ["TypeError", "no argument"]),
    "no function": ("f = 3", ["no argument", "ScalingPolicy"]),
    "returns nothing": ("def f(): pass", ["NoneType", "no argument", "quant.ScalingPolicy"]),
    "returns text": ("f = lambda: 'dynamic'", ["str", "no argument", "quant.ScalingPolicy"]),
    "returns the class": (f"{_HEAD}f = lambda: ScalingPolicy", ["type", "quant.ScalingPolicy"]),
    "no functions in it": (_policy("1", "2", "3"), ["TypeError", "init(shape)"]),
    "init without a shape": (_policy("lambda: 0"), ["TypeError", "init(shape)"]),
    "update of one argument": (_policy(update="lambda s: s"), ["update(state, amax)"]),
    "one scale for all": (_policy(scale="lambda s, a, m: a.max()"), ["scale()", "()", "(3, 2)"]),
    "a number for scales": (_policy(scale="lambda s, a, m: 2.0"), ["scale()", "per amax"]),
    "scales of another shape": (_policy(scale="lambda s, a, m: a.T"), ["scale()", "(2, 3)"]),
    "no scales": (_policy(scale="lambda s, a, m: None"), ["scale()", "None", "per amax"]),
    "two scales": (_policy(scale="lambda s, a, m: (a, a)"), ["scale()", "per amax"]),
    "state of another shape": (_policy(update="lambda s, a: a[0]"), ["update()", "init()"]),
    "state of another kind": (_policy(update="lambda s, a: (s, a)"), ["update()", "init()"]),
    "state of another dtype": (_policy(update="lambda s, a: a > 0"), ["update()", "dtype"]),
    "state is lost": (_policy(update="lambda s, a: None"), ["update()", "init()"]),
    "decides in Python": (_policy(scale="lambda s, a, m: a if a.max() > 0 else s"), ["under jit"]),
    "computes in numpy": (_policy(scale="lambda s, a, m: m / np.asarray(a)"), ["under jit"]),
    "scales in bf16": (
        _policy(scale="lambda s, a, m: (m / (1 + a)).astype(jnp.bfloat16)"),
        ["scale()", "float32"],
    ),
}


@_cases(_FUNCTIONS)
def test_policy_function(given, words, refused_fields, module):
    """A function that fails or returns no policy, and policies whose three functions do not fit."""
    name = f"{module(given)}:f"
    bad.assert_words(refused_fields(f"precision.weight_policy={name}"), [repr(name), *words])


_MODULES = {
    "missing import": ("import no_such_module_here", ["no_such_module_here"]),
    "no such function": ("g = print", ["attribute 'f'", "'package.module:function'"]),
    "syntax": ("def f(:", ["SyntaxError"]),
    "fails": ("x = 1 + 'a'", ["TypeError"]),
    "exits": ("raise SystemExit(0)", ["SystemExit"]),
    "function that exits": ("def f(): raise SystemExit(0)", ["SystemExit"]),
    "raises two lines": (r"raise ValueError('one\ntwo')", ["ValueError", "one", "two"]),
}


@_cases(_MODULES)
def test_module_that_fails(given, words, refused_fields, module):
    """Whatever a user's module does while it is imported ends in one sentence."""
    name = f"{module(given)}:f"
    bad.assert_words(refused_fields(f"precision.rollout={name}"), [name, *words])


_RECIPES = {
    "raises": ("def f(): raise KeyError('k')", ["KeyError", "'k'", "no argument", "quant.Recipe"]),
    "wants an argument": ("def f(x): pass", ["TypeError", "no argument"]),
    "no function": ("f = 3", ["no argument", "quant.Recipe"]),
    "returns text": ("f = lambda: 'fp8'", ["str", "quant.Recipe"]),
    "returns nothing": ("f = lambda: None", ["NoneType", "quant.Recipe"]),
    "returns the class": (f"{_HEAD}f = lambda: Recipe", ["type", "quant.Recipe"]),
    "unknown field": (_recipe("foo=3"), ["TypeError", "foo"]),
    "unknown KV cache": (_recipe("kv='fp8'"), ["'mine'", "kv", "dynamic", "calibrated"]),
    "activations alone": (_recipe("weight=None"), ["'mine'", "weights and activations"]),
    "more layers than there are": (_recipe("first_layers=5"), ["'mine'", "first 5", "model's 1"]),
    "state for rows": (
        _recipe("activation=Operand(policy=delayed())"),
        ["'mine'", "activation", "(1, 128)", "fp8_delayed"],
    ),
    "negative layers": (_recipe("first_layers=-1"), ["first_layers", "-1"]),
    "empty block": (_recipe("weight=Operand(block=(0, 128))"), ["(0, 128)"]),
    "block of three": (_recipe("weight=Operand(block=(1, 2, 3))"), ["(1, 2, 3)"]),
    "no FP8 format": (_recipe("weight=Operand(dtype=jnp.float16)"), ["float16"]),
    "unknown module": (_recipe("bf16_modules=('lm_head',)"), ["bf16_modules"]),
    "modules as text": (_recipe("bf16_modules='down_proj'"), ["bf16_modules"]),
}


@_cases(_RECIPES)
def test_recipe_function(given, words, refused_fields, module):
    """A function that fails or returns no recipe, and recipes that cannot work."""
    message = refused_fields(f"precision.learner={module(given)}:f")
    bad.assert_words(message, ["precision.learner", *words])


def test_policy_inside_a_recipe(module):
    """The policy of a user's recipe is tried like one that a field names."""
    own = "ScalingPolicy(lambda s: (), lambda s, a, m: a * 0, lambda s, a: s, 'ours')"
    name = module(_recipe(f"weight=Operand(policy={own})"))
    with pytest.raises(UserError, match=r"'ours': at the start .* returned 0 "):
        resolve_config(load_config("tiny.py", _full(*_both(f"{name}:f"))))


_NAMES = {
    "fp8_delayd": ["'fp8_delayed'"],
    "fp8 ": ["'fp8'"],
    "FP8": recipe_names(),
    "math": recipe_names(),
    "": recipe_names(),
    "math:": ["'package.module:function'"],
    "fp8:f": ["'package.module:function'"],
}


@pytest.mark.parametrize("name", _NAMES)
def test_recipe_name(name, refused_fields):
    """A near miss is answered with its neighbour, what is like none with all of them."""
    message = refused_fields(f"precision.learner={name}")
    bad.assert_words(message, ["precision.learner", name.strip(), *_NAMES[name]])


_OWN = f"{_HEAD}p = lambda: ScalingPolicy(jnp.zeros, lambda s, a, m: s + 1, lambda s, a: a)\n"


@pytest.mark.parametrize("fields", [[], ["zero_drift=required"]])
@pytest.mark.parametrize(
    "recipe", ["Recipe('mine')", "Recipe('mine', weight=Operand(block=(-1, -1), policy=p()))"]
)
def test_recipe_of_the_user_on_both_sides(recipe, fields, module):
    """One function named on both sides is one recipe, whatever policy it makes."""
    name = module(f"{_OWN}f = lambda: {recipe}")
    assert _begins(*_both(f"{name}:f"), *fields)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed"])
@pytest.mark.parametrize("init", ["lambda shape: ()", "jnp.zeros"])
def test_policy_of_the_user_that_reads_the_batch(recipe, init, refused_fields, module):
    """A scale of a whole tensor from the amax of now, with a state or without: never under zero
    drift, whatever the recipe; with zero_drift='report' it is accepted."""
    name = module(_policy(init, "lambda s, a, m: m / jnp.maximum(a, 1)", "lambda s, a: s"))
    fields = [*_both(recipe), f"activation_policy={name}:f"]
    bad.assert_words(refused_fields(*_full(*fields)), _LOCAL)
    assert _begins(*fields, "zero_drift=report")


# What is accepted.

_TEXTS = [
    "dynamic",
    "dynamic()",
    " dynamic ",
    "static(amax=8.0)",
    "static(8)",
    "power_of_two(dynamic)",
    "power_of_two(static(amax=8.0))",
    "delayed",
    "delayed()",
    "delayed(history=16, margin=1)",
    "delayed(1, -2)",
    "power_of_two(delayed(history=4))",
    "ema_policy:ema",
]


@pytest.mark.parametrize("text", _TEXTS)
def test_policy_that_is_valid(text):
    """Every form is accepted, and is what the recipe of either side then has."""
    name = "gradient"
    fields = [*_both("fp8_delayed"), f"{name}_policy={text}"]
    if text == _TEXTS[-1]:
        assert _begins(*fields)
    config = load_config("tiny.py", [f"--config.{field}" for field in _full(*fields)])
    resolved = resolve_config(config)
    for recipe in (resolved.rollout_recipe, resolved.learner_recipe):
        assert recipe.operands[name].policy is get_scaling_policy(text)


def test_policy_of_the_user_that_is_good(module):
    """The source that the bad ones are variations of; and one that reads a row alone."""
    reads = _policy("lambda shape: ()", "lambda s, a, m: m / jnp.maximum(a, 1)", "lambda s, a: s")
    fields = [f"weight_policy={module(_policy())}:f", f"activation_policy={module(reads)}:f"]
    assert _begins(*fields)
