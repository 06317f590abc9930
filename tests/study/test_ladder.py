"""Study `scale` and `kv`: what is planted, and verdicts of scores with known differences."""

import jax
import numpy as np
import pytest
from study_cells import fake_subject

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models import ModelConfig, init_params
from studies import __main__ as commands
from studies import frame, kv, scale
from studies.frame import Found, Size
from studies.measures import CAPS, POSITIONS, PROBABILITIES, SUMS, Pair
from studies.outliers import POWERS, RECIPES, plant
from studies.running_sums import DIGITS, rows
from studies.subjects import Subject

_QUESTIONS = 24


def _pair(square: float, flips: float = 0.0, growth: float = 0.5, seed: int = 0) -> dict:
    """Numbers of a `Pair`: twenty-four questions of a hundred tokens, with a given mean square of
    logits' differences, share of flips in each of two layers, and growth of D along an answer."""
    noise = np.random.default_rng(seed).uniform(0.9, 1.1, _QUESTIONS)
    lengths = 2.0 ** np.arange(8)
    prefix = np.stack([np.full(8, 4.0), 4 * lengths ** (2 * growth)])
    sums = dict.fromkeys(SUMS, np.zeros(_QUESTIONS)) | {"square": 100 * square * noise}
    return {
        "tokens": np.full(_QUESTIONS, 100.0),
        "sums": sums,
        "most": 0.0,
        "tail": np.zeros((_QUESTIONS, len(CAPS))),
        "binned": {
            "position": np.full((_QUESTIONS, 2, POSITIONS), 10.0),
            "probability": np.full((_QUESTIONS, 2, len(PROBABILITIES) - 1), 10.0),
        },
        "sequence": np.ones((_QUESTIONS, 3)),
        "prefix": noise[:, None, None] * prefix,
        "flips": np.full((_QUESTIONS, 2), 200 * flips) * noise[:, None],
        "inputs": np.full(_QUESTIONS, 200.0),
    }


def _verdicts(found: list[dict]) -> dict[str, str]:
    return {verdict["name"]: verdict["verdict"] for verdict in found}


def _ladder(seeds: int = 3, unequal: float = 0.0, **rungs: dict) -> dict[str, str]:
    """Verdicts of a ladder of {view: pair} whose seeds have the same figures."""
    subjects = [fake_subject(seed, rung) for rung in rungs for seed in range(seeds)]
    decode = {"unequal": unequal}
    numbers = [{"scores": {"pairs": rungs[s.name], "decode": decode}} for s in subjects]
    return _verdicts(scale.STUDY.judge(Found(subjects, Size(), numbers)))


def test_rungs_are_compared():
    """Each hypothesis comes out either way, by what is planted."""
    plain, replayed = "bf16", "bf16, experts replayed"
    mixed = {
        "m8": {plain: _pair(4, 0.1), replayed: _pair(1)},
        "m32": {plain: _pair(9, 0.2, seed=1), replayed: _pair(1)},
    }
    found = _ladder(d8={plain: _pair(1, seed=2)}, d16={plain: _pair(2, seed=3)}, **mixed)
    assert found == dict.fromkeys(found, "supported")
    assert {
        "zero",
        "mixture_m8_d8",
        "mixture_m32_d8",
        "experts_m32_m8",
        "flips_m32_m8",
        "depth_d16_d8",
        "cause_m8",
        "replay_m8_d8",
    } <= set(found)

    once = _ladder(1, d8={plain: _pair(1, seed=2)}, **mixed)
    within = {"zero", "cause_m8", "cause_m32"}
    assert {name for name, verdict in once.items() if verdict == "supported"} == within

    mixed["m32"], mixed["m8"] = mixed["m8"], mixed["m32"]
    mixed["m32"][replayed] = mixed["m32"][plain]
    d16 = {plain: _pair(2, seed=3)}
    found = _ladder(unequal=0.25, d8={plain: _pair(20)}, d16=d16, **mixed)
    others = {name for name, verdict in found.items() if verdict != "not supported"}
    assert others == {"cause_m8"}


@pytest.mark.parametrize(
    ("arguments", "ladder"),
    [
        (["--config=f.py", "--rungs=d8,m8"], ["d8", "m8"]),
        (["--config=f.py", "--rungs="], ["f.py"]),
        (["--checkpoint=."], ["."]),
    ],
)
def test_models_of_a_ladder(arguments, ladder, tmp_path, monkeypatch, capsys):
    """Several of a file, or one: then what needs no other model is judged."""
    found, asked = [], []

    def subjects(command, values, out, questions):
        name = values.config or values.checkpoint
        asked.append(name)
        return [Subject(name, runtime=None, make_params=dict)]

    def run(study, plan, cells):
        found.extend(subject.name for subject in plan.subjects)
        raise UserError("enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(commands, "_subjects", subjects)
    monkeypatch.setattr(frame, "run", run)
    assert commands.run(["scale", *arguments]) == 2
    assert found == ladder and "enough" in capsys.readouterr().err
    assert asked == ([f"f.py:{rung}" for rung in ladder] if len(ladder) > 1 else ladder)
    assert _ladder(1, own={"bf16": _pair(1)}) == {"zero": "supported"}


def _outliers(broken: dict[tuple[int, str], float], changed: int = 0) -> dict:
    """A cell's numbers: the exact KL is 1, or what `broken` gives for (power, recipe)."""
    return {
        str(k): {"bf16": changed * (k == 8), "f32": 0}
        | {
            r: {"kl": np.full(8, broken.get((k, r), 1.0)).tolist(), "tokens": [1.0] * 8}
            for r in RECIPES
        }
        for k in POWERS
    }


_DENSE = {"bf16": {"rms_logits": (1.0, 0.9, 1.1)}}
_MIXTURE = {
    "bf16": {"rms_logits": (2.0, 1.9, 2.1), "flips_by_layer": [0.1, 0.2]},
    "bf16, experts replayed": {"rms_logits": (1.0, 0.9, 1.1)},
}
_OUTLIERS = {"fp8_blockwise": [1.0] * len(POWERS)}


@pytest.mark.parametrize(
    ("pooled", "outliers", "panels"),
    [
        ({"a": _DENSE, "b": _MIXTURE}, _OUTLIERS, ["rung", "layer", "outlier, power of two"]),
        ({"a": _DENSE}, _OUTLIERS, ["outlier, power of two"]),
        ({"b": _MIXTURE}, {}, ["rung", "layer"]),
        ({"a": _DENSE}, {}, ["rung"]),
    ],
    ids=["ladder", "dense", "experts", "latent"],
)
def test_no_panel_is_empty(pooled, outliers, panels):
    figure = scale.STUDY.figure({"pooled": pooled, "outliers": outliers})
    assert [axes.get_xlabel() for axes in figure.axes] == panels
    assert all(axes.has_data() for axes in figure.axes)


def test_outliers_are_judged():
    coarse = {(k, "fp8_tensorwise"): 4.0 for k in POWERS}  # without an outlier too
    good = coarse | {
        (20, "fp8_blockwise"): 50.0,
        (18, "fp8_tensorwise"): 100.0,
        (18, "fp8_blockwise"): 10.0,
    }
    found = _verdicts(scale._judge_outliers([_outliers(good)]))
    assert found == dict.fromkeys(
        ("exact", "harmless", "breaks", "granularity", "finest"), "supported"
    )
    bad = coarse | {(12, "fp8_blockwise"): 3.0, (18, "fp8_blockwise"): 5.0, (18, "mxfp8"): 9.0}
    bad[18, "fp8_tensorwise"] = 10.0
    found = _verdicts(scale._judge_outliers([_outliers(bad, changed=2)]))
    assert found["exact"] == "not resolved", "zero for some, not for all"
    assert {found[n] for n in ("harmless", "breaks", "granularity", "finest")} == {"not supported"}


@pytest.mark.parametrize(("exponent", "verdict"), [(0.5, "supported"), (1.0, "not supported")])
def test_growth_along_an_answer(exponent, verdict):
    """The exponent is found, whatever the noise between questions."""
    estimate = kv.growth(Pair(_pair(1, growth=exponent)))
    assert estimate.value == pytest.approx(exponent, abs=1e-6)
    assert kv.GROWTH.judge(estimate)["verdict"] == verdict


def test_errors_that_add_up():
    """Independent errors add their squares; a cache that removes the layers' error does not."""
    parts = {name: _pair(20) for name in ("kv calibrated", "both calibrated")}
    parts |= {"linears": _pair(9), "kv": _pair(16, seed=1), "both and q": _pair(36, seed=3)}

    def judged(both: dict, slots: int) -> dict[str, str]:
        subject = fake_subject()
        subject.runtime.config.rollout.max_new_tokens = slots
        numbers = {"scores": {"pairs": parts | {"both": both}}}
        return _verdicts(kv.STUDY.judge(Found([subject], Size(), [numbers])))

    found = judged(_pair(25, seed=2), 64)
    assert found.pop("position") == "supported"
    assert found == dict.fromkeys(found, "supported")
    found = judged(_pair(4, seed=2), kv.LONG - 1)
    assert {found[name] for name in ("both_linears", "both_kv", "independent")} == {"not supported"}
    assert not {"position", "growth"} & set(found), "answers are short"


def test_planted_outliers_keep_the_function():
    """Of each channel the product of gain and row stays, exactly, and one of them is large."""
    config = ModelConfig(
        vocab_size=8,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    params = jax.device_get(init_params(config, jax.random.key(0, impl="threefry2x32")))
    planted = jax.device_get(plant(params, 20))
    before, after = params["layers"], planted["layers"]
    readers = {
        "input_layernorm": [
            tree["self_attn"][n] for n in ("q_proj", "k_proj", "v_proj") for tree in (before, after)
        ],
        "post_attention_layernorm": [
            tree[n] for n in ("gate_proj", "up_proj") for tree in (before, after)
        ],
    }
    for norm, kernels in readers.items():
        gains = before[norm]["weight"], after[norm]["weight"]
        changed = np.flatnonzero((gains[0] != gains[1]).any(axis=0))
        assert changed.tolist() == [42]
        for old, new in zip(kernels[::2], kernels[1::2], strict=True):
            product = [g[:, :, None] * k["kernel"] for g, k in zip(gains, (old, new), strict=True)]
            np.testing.assert_array_equal(*product)
    same = {
        name: tree
        for name, tree in before.items()
        if name not in (*readers, "self_attn", "gate_proj", "up_proj")
    }
    jax.tree.map(np.testing.assert_array_equal, same, {name: after[name] for name in same})


def test_running_sums():
    """Every answer is right, and the rows are always the same."""
    found = list(rows())
    assert found == list(rows())
    for row in found[:50]:
        digits = [int(x) for x in row["question"].removesuffix("=").split()]
        sums = [int(x) for x in row["answer"].split()]
        assert len(digits) == len(sums) == DIGITS
        assert [sum(digits[: i + 1]) for i in range(DIGITS)] == sums
    assert len({row["question"] for row in found}) > 8000
