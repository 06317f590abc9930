"""What a configuration cannot have together: every need and every pair is refused, nothing else."""

from __future__ import annotations

import re

import pytest
from refusals import CONFIG, assert_words

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import all_fields, checks, default_config, literal, load_config
from fp8rl_jax.config.combinations import PAIRS, check_combinations, unmet_needs
from fp8rl_jax.config.resolve import resolve_config

# The needs of every field; dropping one from the table must be noticed.
_SLOTS, _ONE_ROW, _ONE_REPLY = ["rollout.slots"], ["learner.tokens_per_batch"], ["env.max_turns"]
_NEEDS = {
    "mesh.tensor": ["rollout.slots=0"],
    "mesh.expert": ["model.num_experts"],
    "data.system_prompt": ["data.chat"],
    "data.chat_options": ["data.chat"],
    "env.step": _ONE_REPLY,
    "env.tools": _ONE_REPLY,
    "env.max_turns": ["env.step or env.tools", "rollout.slots"],
    "rollout.max_turn_tokens": _ONE_REPLY,
    "rollout.most_versions": [*_SLOTS, "env.max_turns=1", "algo.dynamic_sampling=False"],
    "rollout.pages": _SLOTS,
    "algo.credit": [*_ONE_REPLY, "algo.dynamic_sampling=False"],
    "algo.truncated_sampling": ["rollout.top_k or rollout.top_p"],
    "algo.routing_replay": [
        "model.num_experts",
        "rollout.slots=0",
        "rollout.ahead=0",
        "mesh.rollout=0",
    ],
    "algo.router_aux_loss_coef": ["model.num_experts"],
    "learner.gradient_accumulation_steps": ["learner.tokens_per_batch=0"],
    "learner.share_prompts": [*_ONE_ROW, "algo.router_aux_loss_coef=0"],
    "learner.offload": ["lora.rank=0"],
    "lora.alpha": ["lora.rank"],
    "lora.modules": ["lora.rank"],
    "lora.checkpoint": ["lora.rank"],
    "lora.base": ["lora.rank"],
    "eval.average_last": ["lora.rank=0"],
}
_LATENT = [
    "model.family=deepseek_v3",
    "model.family_options.kv_lora_rank=16",
    "model.family_options.qk_nope_head_dim=16",
    "model.family_options.qk_rope_head_dim=8",
    "model.family_options.v_head_dim=16",
]
# What sets a field, where not the next number or choice does.
_SET = {
    "model.num_experts": ["model.num_experts=4"],
    "data.system_prompt": ["data.system_prompt=Think."],
    "data.chat_options": ["data.chat_options.enable_thinking=False"],
    "env.step": ["env.step=fp8rl_jax.envs.tiny.guessing:step"],
    "env.tools": ["env.tools=fp8rl_jax.envs.tiny.calculator:TOOLS"],
    "lora.modules": ["lora.modules=q_proj"],
    "lora.checkpoint": ["lora.checkpoint=adapter"],
}
_TENSORWISE = ["precision.rollout=fp8_tensorwise", "precision.learner=fp8_tensorwise"]
# What makes tiny.py a configuration with both features of a pair.
_BOTH = {
    ("latent attention", "K and V with a scale per layer, or in two formats"): [
        *_LATENT,
        "precision.kv_cache=k=int8,v=fp8",
    ],
    ("latent attention", "FP8 attention"): [*_LATENT, "precision.attention=fp8"],
    ("latent attention", "layers cut by columns"): [*_LATENT, "mesh.tensor=2"],
    ("FP8 attention", "a recipe without K and V in E4M3"): ["precision.attention=fp8"],
    ("scales from observed values", "recipes that differ"): ["precision.rollout=fp8_delayed"],
    ("required zero drift", "recipes that differ"): [
        "precision.zero_drift=required",
        "precision.learner=bf16",
    ],
    ("zero drift", "scales of a whole batch"): _TENSORWISE,
    ("continuous batching", "scales of a whole batch"): [
        *_TENSORWISE,
        "precision.zero_drift=report",
        "rollout.slots=2",
    ],
    ("tools beside an environment", "questions without chat"): [
        *_SET["env.step"],
        *_SET["env.tools"],
        "env.max_turns=3",
        "rollout.slots=2",
    ],
    ("rows without answers", "supervised fine-tuning"): ["env.answer_key=-"],
    ("comparison within a group", "groups of one"): ["rollout.group_size=1"],
    ("correction", "the rollout's log-probabilities"): [
        "algo.correction=tis",
        "algo.old_logprobs=rollout",
    ],
    ("loss reinforce", "several updates of a rollout"): [
        "algo.loss=reinforce",
        "algo.num_minibatches=2",
    ],
    ("loss reinforce", "older versions without a correction"): [
        "algo.loss=reinforce",
        "rollout.ahead=1",
    ],
    ("loss none", "no divergence"): ["algo.loss=none"],
    ("KL in the reward", "another estimator than k1"): [
        "algo.kl_in=reward",
        "algo.kl_coef=0.1",
        "algo.kl_estimator=k2",
    ],
}


@pytest.fixture
def resolved(tmp_path, monkeypatch):
    """resolved(*fields): tiny.py with these fields, whatever contradicts itself in it."""
    (tmp_path / "tiny.py").write_text(CONFIG)
    monkeypatch.setattr(checks, "check", lambda resolved: None)
    overrides = "--config.{}".format
    return lambda *fields: resolve_config(
        load_config(str(tmp_path / "tiny.py"), list(map(overrides, fields)))
    )


def _set(path: str) -> list[str]:
    """Returns what sets a field."""
    if path in _SET:
        return _SET[path]
    field = all_fields()[path]
    others = [choice for choice in field.choices if choice != field.default]
    value = others[0] if others else field.default is False or field.default + 1
    return [f"{path}={value}"]


def _meets(need: str, wanted: bool) -> list[str]:
    """Returns what gives a configuration of defaults a need, or takes it away."""
    path, equals, text = need.partition(" or ")[0].partition("=")
    if equals and literal(text) != all_fields()[path].default:
        return [f"{path}={text}"] if wanted else []
    return _set(path) if wanted != bool(equals) else []


def test_the_needs_of_every_field():
    table = {path: list(field.needs) for path, field in all_fields().items() if field.needs}
    assert table == _NEEDS


@pytest.mark.parametrize("path", _NEEDS)
def test_every_need_is_refused(path, resolved):
    """The sentence names the field and what it needs; where that is met there is none."""
    needs = all_fields()[path].needs
    for missing in needs:
        fields = [field for need in needs for field in _meets(need, need != missing)]
        unmet = [found for found in unmet_needs(resolved(*fields, *_set(path))) if found[0] == path]
        ((_, problem, _),) = unmet
        assert problem.startswith(f"{path} is ") and "\n" not in problem
        assert_words(problem, [f", which needs {missing}", needs[missing]])
    met = [field for need in needs for field in _meets(need, True)]
    assert path not in {name for name, _, _ in unmet_needs(resolved(*met, *_set(path)))}


def test_the_first_need_is_raised(resolved):
    with pytest.raises(UserError, match=r"^rollout\.pages is 9, which needs rollout\.slots: set "):
        check_combinations(resolved("rollout.pages=9"))
    with pytest.raises(
        UserError, match=r"or rollout\.top_p \(.*\): set one of them, or leave algo"
    ):
        check_combinations(resolved("algo.truncated_sampling=whole"))


def test_shapes_are_those_of_the_model(resolved):
    """Experts of a published model are no field of the configuration."""
    config = default_config()
    config.model.name = "qwen3_30b_a3b"
    config.mesh.expert = 2
    assert not list(unmet_needs(resolve_config(config)))


def test_what_a_plan_assumes(resolved):
    """Values in the place of the configuration's."""
    assumed = {"rollout.slots": 2}
    assert not list(unmet_needs(resolved("rollout.pages=9"), assumed))
    assert [path for path, _, _ in unmet_needs(resolved("mesh.tensor=2"), assumed)] == [
        "mesh.tensor"
    ]


def test_every_pair_has_a_case():
    assert [(pair.one, pair.other) for pair in PAIRS] == list(_BOTH)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.one} + {pair.other}")
def test_every_pair_is_refused(pair, resolved):
    """A configuration with both features gets this pair's sentence, and none of tiny.py has."""
    with pytest.raises(UserError) as refusal:
        check_combinations(resolved(*_BOTH[pair.one, pair.other]))
    message = str(refusal.value)
    assert message.endswith(f": {pair.remedy}") and "\n" not in message and "{" not in message
    assert_words(message, re.split(r"\{.*?\}", pair.problem))
    assert not pair.on(resolved())
