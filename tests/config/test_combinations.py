"""The table of features that do not work together: every pair is refused, and nothing else."""

from __future__ import annotations

import pytest
from refusals import CONFIG, assert_words

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.config.combinations import FEATURES, PAIRS
from fp8rl_jax.config.resolve import resolve_config

_LATENT = [
    "model.kv_lora_rank=16",
    "model.qk_nope_head_dim=16",
    "model.qk_rope_head_dim=8",
    "model.v_head_dim=16",
    "model.head_dim=24",
    "model.qk_norm=False",
    "model.num_key_value_heads=2",
]
_TENSORWISE = ["precision.rollout=fp8_tensorwise", "precision.learner=fp8_tensorwise"]
_STEP = ["env.step=fp8rl_jax.envs.tiny.guessing:step"]
# Fields that give a configuration each feature; [] for one that tiny.py has.
_ON: dict[str, list[str]] = {
    "dense model": [],
    "latent attention": _LATENT,
    "tensor parallelism": ["mesh.tensor=2"],
    "adapters": ["lora.rank=4"],
    "no adapters": [],
    "fields of adapters": ["lora.alpha=16.0"],
    "moments in host memory": ["learner.offload=moments"],
    "mean weights": ["eval.average_last=2"],
    "expert parallelism": ["mesh.expert=2"],
    "routing replay": ["algo.routing_replay=experts"],
    "balance loss of routers": ["algo.router_aux_loss_coef=0.1"],
    "zero drift": [],
    "required zero drift": ["precision.zero_drift=required"],
    "recipes that differ": ["precision.learner=bf16"],
    "scales of a whole batch": _TENSORWISE,
    "scales from observed values": ["precision.rollout=fp8_delayed"],
    "FP8 attention": ["precision.attention=fp8"],
    "calibrated scales of K and V": ["precision.kv_cache=fp8_calibrated"],
    "K and V in two formats": ["precision.kv_cache=k=int8,v=fp8"],
    "a recipe without K and V in E4M3": [],
    "continuous batching": ["rollout.slots=2"],
    "all samples at once": [],
    "pages": ["rollout.pages=9"],
    "rollouts ahead": ["rollout.ahead=1"],
    "devices for rollouts": ["mesh.rollout=1"],
    "partial rollouts": ["rollout.most_versions=2"],
    "environment": _STEP,
    "no environment": [],
    "one reply": [],
    "tools beside an environment": [*_STEP, "env.tools=fp8rl_jax.envs.tiny.calculator:TOOLS"],
    "several replies": ["env.max_turns=3"],
    "length of a reply": ["rollout.max_turn_tokens=3"],
    "credit by turn": ["algo.credit=turn"],
    "drawing from all tokens": [],
    "log-probabilities over the vocabulary": ["algo.truncated_sampling=whole"],
    "groups of one": ["rollout.group_size=1"],
    "questions without chat": [],
    "system prompt": ["data.system_prompt=Think."],
    "variables of the chat template": ["data.chat_options.enable_thinking=False"],
    "rows without answers": ["env.answer_key=-"],
    "supervised fine-tuning": [],
    "advantages within a group": [],
    "dynamic sampling": ["algo.dynamic_sampling=True"],
    "correction": ["algo.correction=tis"],
    "the rollout's log-probabilities": ["algo.old_logprobs=rollout"],
    "loss reinforce": ["algo.loss=reinforce"],
    "older versions without a correction": ["rollout.ahead=1"],
    "several updates of a rollout": ["algo.num_minibatches=2"],
    "KL in the reward": ["algo.kl_in=reward", "algo.kl_coef=0.1"],
    "another estimator than k1": ["algo.kl_estimator=k2"],
    "another loss than ppo": ["algo.loss=gspo"],
    "dual clip": ["algo.dual_clip=3.0"],
    "no divergence": [],
    "loss none": ["algo.loss=none"],
    "a mean without a constant": [],
    "constant length": ["algo.loss_length=7"],
    "rows of several sequences": ["learner.tokens_per_batch=128"],
    "a row for each sequence": [],
    "shared prompts": ["learner.share_prompts=True"],
    "micro-batches": ["learner.gradient_accumulation_steps=2"],
}
# What a pair needs so that no earlier pair of the table is met.
_BESIDE = {
    ("balance loss of routers", "shared prompts"): [
        "learner.tokens_per_batch=128",
        "model.num_experts=4",
    ],
    ("dynamic sampling", "groups of one"): ["algo.baseline=none", "algo.scale=none"],
    ("all samples at once", "several replies"): _STEP,
    ("questions without chat", "tools beside an environment"): [
        "env.max_turns=3",
        "rollout.slots=2",
    ],
    ("dynamic sampling", "credit by turn"): [*_STEP, "env.max_turns=3", "rollout.slots=2"],
    ("continuous batching", "routing replay"): ["model.num_experts=4"],
    ("partial rollouts", "several replies"): [*_STEP, "rollout.slots=2"],
    ("partial rollouts", "dynamic sampling"): ["rollout.slots=2"],
    ("devices for rollouts", "routing replay"): ["model.num_experts=4"],
    ("rollouts ahead", "routing replay"): ["model.num_experts=4"],
    ("continuous batching", "scales of a whole batch"): ["precision.zero_drift=report"],
}


@pytest.fixture
def resolved(tmp_path):
    """resolved(*fields): tiny.py with these fields."""
    (tmp_path / "tiny.py").write_text(CONFIG)
    overrides = "--config.{}".format
    return lambda *fields: resolve_config(
        load_config(str(tmp_path / "tiny.py"), list(map(overrides, fields)))
    )


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.one} + {pair.other}")
def test_every_pair_is_refused(pair, resolved):
    """A configuration with both features gets this pair's sentence, which names the field."""
    fields = [*_BESIDE.get((pair.one, pair.other), ()), *_ON[pair.one], *_ON[pair.other]]
    with pytest.raises(UserError) as refusal:
        resolved(*fields)
    message = str(refusal.value)
    assert message.endswith(f": {pair.remedy}")
    assert_words(message, [part for part in pair.reason.split("{one}") if part])
    assert "\n" not in message and "{one}" not in message and not message.startswith(",")


def test_features_are_all_of_the_pairs(resolved):
    """No feature without a pair, and the small configuration has only those that it starts with."""
    assert set(FEATURES) == {name for pair in PAIRS for name in (pair.one, pair.other)} == set(_ON)
    assert len({(pair.one, pair.other) for pair in PAIRS}) == len(PAIRS)
    plain = resolved()
    assert {name for name, feature in FEATURES.items() if feature.on(plain)} == {
        name for name, fields in _ON.items() if not fields
    }
