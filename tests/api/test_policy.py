"""A policy from Python: the sampler's bits from `score`, the main job's bits from `train_step`."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from marks import slow

import fp8rl_jax
from fp8rl_jax.api import policy as policy_module
from fp8rl_jax.api.fields import with_fields
from fp8rl_jax.api.policy import Policy, _asked
from fp8rl_jax.base.errors import NonFiniteError, UserError
from fp8rl_jax.config import override
from fp8rl_jax.data import Stream
from fp8rl_jax.training.runtime import make_runtime

_SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_PROMPTS = ["3 + 4?", "12 + 30?", "5?"]


def _bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return fp8rl_jax.load(recipe="fp8", learning_rate=1e-3, **_SMALL)


def _samples(policy: Policy, prompts=_PROMPTS):
    return fp8rl_jax.sample(policy, prompts, group_size=2, max_tokens=5)


@pytest.mark.parametrize("recipe", ["fp8", slow("bf16"), slow("fp8_delayed")])
def test_score_has_the_bits_of_the_sampler(recipe, policy):
    """Of padded batches too: three prompts in the programs of four."""
    if recipe != "fp8":
        policy = fp8rl_jax.load(recipe=recipe, **_SMALL)
    samples = _samples(policy)
    assert len(samples.texts) == 6 and samples.logprobs.dtype == np.float32
    assert (samples.logprobs[samples.mask] < 0).all()
    np.testing.assert_array_equal(_bits(fp8rl_jax.score(policy, samples)), _bits(samples.logprobs))
    drift = fp8rl_jax.compare(policy, samples)
    assert (drift.max, drift.equal, drift.tokens) == (0.0, 1.0, samples.mask.sum())
    assert [row["row"] for row in drift.by_sequence] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_train_step_learns_and_compiles_once(policy, caplog):
    """Responses with a reward become likelier; other samples of the size compile nothing."""
    samples = _samples(policy)
    rewards = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    new, metrics = fp8rl_jax.train_step(policy, samples, rewards)
    assert metrics["train_rollout_logprob_abs_diff_max"] == 0.0 and metrics["reward_mean"] == 0.5
    assert (policy.step, new.step) == (0, 1)
    before, after = (fp8rl_jax.score(p, samples).sum(1).reshape(3, 2) for p in (policy, new))
    gained = after - before
    assert ((gained * (2 * rewards - 1)).sum(1) > 0).all()
    assert fp8rl_jax.compare(new, samples).max > 0
    other = ["1?", "2?", "4 + 44?", "6?"]
    fp8rl_jax.sample(new, other, group_size=2, max_tokens=5)
    with jax.log_compiles():
        samples = fp8rl_jax.sample(new, other, group_size=2, max_tokens=5)
        fp8rl_jax.train_step(new, samples, np.arange(8))
        fp8rl_jax.score(new, samples)
    programs = [r.getMessage() for r in caplog.records if "Finished XLA" in r.getMessage()]
    assert not [text for text in programs if "train_step" in text or "score" in text], programs


_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "router_aux_loss_coef": 0.1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("f32", _EXPERTS | {"kl_coef": 0.1}),
        ("fp8", _EXPERTS | {"kv_cache": "fp8"}),
        ("fp8", _EXPERTS | {"kv_cache": "fp8", "tokens_per_batch": 128}),
        ("fp8_delayed", {}),
    ],
    ids=["f32", "fp8", "packed", "delayed"],
)
def test_padding_counts_nowhere(recipe, fields, monkeypatch):
    """Three prompts in the programs of four, and in programs of three: the experts' loads and
    balance, the calibration and the observations are the same; nothing is NaN."""
    policy = fp8rl_jax.load(recipe=recipe, learning_rate=1e-3, **_SMALL, **fields)
    samples = fp8rl_jax.sample(policy, _PROMPTS, group_size=2, max_tokens=16)
    rewards = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    reference = policy if "kl_coef" in fields else None
    padded, of_padded = fp8rl_jax.train_step(policy, samples, rewards, reference=reference)
    monkeypatch.setattr(policy_module, "_padded", lambda runtime, prompts, group_size: prompts)
    exact, of_exact = fp8rl_jax.train_step(policy, samples, rewards, reference=reference)
    assert of_padded["train_rollout_logprob_abs_diff_max"] == 0.0
    names = ["advantage_std", "entropy", "kept_tokens_frac"]
    if "num_experts" in fields:
        names += ["expert_load_max", "expert_load_entropy", "expert_load_worst"]
        # A sum over rows, whose order follows from how many there are.
        assert of_padded["router_aux_loss"] == pytest.approx(of_exact["router_aux_loss"], rel=1e-6)
    for name in names:
        assert of_padded[name] == of_exact[name], name
    pair = (new.state.scaling_state for new in (padded, exact))
    jax.tree.map(np.testing.assert_array_equal, *pair)
    for ours, theirs in zip(*map(jax.tree.leaves, (padded.params, exact.params)), strict=True):
        assert np.isfinite(ours).all()
        if recipe == "f32":
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_texts_are_scored_with_their_end(policy):
    logp = fp8rl_jax.score(policy, ["3 + 4?", "1 + 1?"], ["7", "12"])
    assert logp.shape == (2, 3) and (logp[logp != 0] < 0).all()
    assert (logp != 0).tolist() == [[True, True, False], [True, True, True]]


_MESSAGES = [{"role": role, "content": "Hi."} for role in ("user", "assistant", "user")]


def test_a_list_of_messages_is_one_conversation():
    assert _asked(_MESSAGES, "sample") == [_MESSAGES] == _asked(_MESSAGES[0:], "sample")
    assert _asked(_MESSAGES[0], "sample") == [_MESSAGES[:1]]
    assert _asked((_MESSAGES, _MESSAGES[:1]), "sample") == [_MESSAGES, _MESSAGES[:1]]
    assert _asked({"messages": _MESSAGES}, "sample") == [_MESSAGES]
    tools = {"messages": _MESSAGES, "tools": [{"type": "function"}]}
    assert _asked(tools, "sample") == [tools]
    assert _asked(np.array(["a", "b"]), "sample") == ["a", "b"] == _asked(iter("ab"), "sample")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: fp8rl_jax.load("nowhere"), "'nowhere' is neither the directory.*qwen3_0p6b"),
        (lambda p: fp8rl_jax.load(recipe="fp9"), "unknown recipe 'fp9'"),
        (lambda p: fp8rl_jax.load(recipe=p.recipe), "write its name"),
        (lambda p: fp8rl_jax.load(lerning_rate=1.0), "did you mean optimizer.learning_rate"),
        (lambda p: fp8rl_jax.sample(p, []), "there is no prompt"),
        (lambda p: fp8rl_jax.sample(p, None), "a prompt is None; write a text, or a list of mess"),
        (lambda p: fp8rl_jax.sample(p, ["a", 5]), "a prompt is 5; write"),
        (lambda p: fp8rl_jax.sample(p, {"text": "a"}), "a prompt is {'text': 'a'}; write"),
        (lambda p: fp8rl_jax.sample(p, _MESSAGES), "a conversation of 3 messages, and data.chat"),
        (lambda p: fp8rl_jax.sample(p, [_MESSAGES, "a"]), "a conversation of 3 messages, and"),
        (lambda p: fp8rl_jax.load(5), "source is a int; write"),
        (lambda p: fp8rl_jax.score(p, ["a", "b"], ["c"]), "2 prompts and 1 responses"),
        (lambda p: fp8rl_jax.score(p, ["a"]), "1 prompts and none"),
        (lambda p: fp8rl_jax.train_step(p, _samples(p), ["good"]), "rewards are no numbers"),
        (lambda p: fp8rl_jax.train_step(p, _samples(p), [1.0]), r"write \(3, 2\), or \(6,\)"),
    ],
)
def test_mistakes_are_one_sentence(call, words, policy):
    with pytest.raises(UserError, match=words):
        call(policy)


@pytest.mark.slow
def test_what_is_not_finite_is_refused(policy):
    params = jax.tree.map(lambda x: x * np.float32(np.nan), policy.params)
    broken = dataclasses.replace(policy, state=dataclasses.replace(policy.state, params=params))
    with pytest.raises(NonFiniteError, match="the policy is as it was"):
        fp8rl_jax.train_step(broken, _samples(policy), [1.0, 0.0, 3.0, 0.0, 1.0, 1.0])


@pytest.mark.slow
def test_train_step_has_the_bits_of_the_main_job(tmp_path):
    """An RL step of the main job, and the same questions by sample and train_step."""
    fields = {
        "dir": str(tmp_path / "run"),
        "steps": 1,
        "sft__steps": 0,
        "prompts_per_step": 8,
        "group_size": 4,
        "max_prompt_tokens": 32,
        "max_new_tokens": 5,
        "eval__questions": 16,
        "task_options": {
            "max_terms": 2,
            "max_digits": 1,
            "allow_parentheses": False,
            "allow_negation": False,
        },
        "train_questions": 64,
        "checkpoint_every": 1,
        "loggers": "",
        "learning_rate": 3e-4,  # the defaults of grpo (those of `fp8rl init`) and load differ
        **_SMALL,
    }
    reward = lambda prompt, response, answer: len({*response}) + 0.25 * (response < "a")
    job = fp8rl_jax.grpo(questions="basic_arithmetic", reward=reward, **fields)

    config = with_fields({}, fields, "test")
    override(config, ["--config.env.task=basic_arithmetic"])
    questions = Stream(make_runtime(config).questions["train"], 8, 0).next()
    policy = fp8rl_jax.load(**fields)
    samples = fp8rl_jax.sample(policy, [q.prompt for q in questions], group_size=4)
    new, metrics = fp8rl_jax.train_step(
        policy, samples, [reward("", text, "") for text in samples.texts]
    )
    (record,) = job.metrics
    for name in ("reward_mean", "loss", "lr"):
        assert record[name] == metrics[name], name
    assert job.policy.step == new.step == 1
    for ours, theirs in zip(*map(jax.tree.leaves, (new.params, job.policy.params)), strict=True):
        np.testing.assert_array_equal(_bits(ours), _bits(theirs))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), new.params, policy.params)
    assert max(jax.tree.leaves(moved)) > 0
