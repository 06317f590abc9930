"""On-policy distillation: the exact divergence from a teacher, its gradient, and runs with one."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoint
import tiny_config

import fp8rl_jax
from fp8rl_jax import train
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.config import saved_config
from fp8rl_jax.models import Draws, token_divergences
from fp8rl_jax.quant import get_recipe
from fp8rl_jax.report.metrics import DRIFT_MAX
from fp8rl_jax.rl.losses import none
from fp8rl_jax.training.runtime import make_runtime

_F32 = get_recipe("f32")


def _log_softmax(hidden, head, temperature):
    logits = hidden.astype(np.float64) @ head.astype(np.float64) / temperature[:, None, None]
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("counts", [None, "some"])
def test_the_divergence_and_its_gradient(counts):
    """Against float64, a teacher of another width; chunks without a token that counts are 0."""
    rng = np.random.default_rng(0)
    batch, length, vocabulary = 3, 300, 37
    hidden, other = (rng.standard_normal((batch, length, n)).astype(np.float32) for n in (24, 40))
    head, other_head = (
        (rng.standard_normal((n, vocabulary)) / np.sqrt(n)).astype(np.float32) for n in (24, 40)
    )
    temperature = np.float32([1.0, 0.5, 1.7])
    targets = np.zeros((batch, length), np.int32)
    pull = rng.standard_normal((batch, length)).astype(np.float32)
    mask = np.ones((batch, length), bool)
    if counts:
        mask[:, 70:] = False  # of chunks of 85 tokens the last three hold none
    given = jnp.asarray(mask) if counts else None

    @exact_jit
    def found(hidden, head):
        def value(hidden, head):
            by_token = np.broadcast_to(temperature[:, None], targets.shape)
            draws = Draws(targets, by_token, counts=given)
            return token_divergences(hidden, head, (other, other_head), draws, _F32)

        kl, vjp = jax.vjp(value, hidden, head)
        return kl, vjp(pull * mask)

    kl, (to_hidden, to_head) = jax.device_get(found(hidden, head))
    pairs = (hidden, head), (other, other_head)
    logp, logq = (_log_softmax(*pair, temperature) for pair in pairs)
    expected = (np.exp(logp) * (logp - logq)).sum(-1)
    np.testing.assert_allclose(kl[mask], expected[mask], rtol=2e-5, atol=2e-6)
    assert (kl[:, 85:] == 0).all() == bool(counts)
    slope = np.exp(logp) * (logp - logq - expected[..., None]) / temperature[:, None, None]
    slope *= (pull * mask)[..., None]
    np.testing.assert_allclose(to_hidden, slope @ head.T, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(to_head, np.einsum("btd,btv->dv", hidden, slope), atol=2e-4)


def test_a_policy_that_is_sure():
    """Logits of some hundreds: the divergence is finite and right where exp overflows."""
    rng = np.random.default_rng(2)
    hidden = 40 * rng.standard_normal((1, 8, 24)).astype(np.float32)
    head = rng.standard_normal((24, 37)).astype(np.float32)
    other = rng.standard_normal((1, 8, 24)).astype(np.float32)
    ones = np.ones(1, np.float32)
    draws = Draws(np.zeros((1, 8), np.int32), np.ones((1, 8), np.float32))

    @exact_jit
    def divergences(hidden, head, other):
        return token_divergences(hidden, head, (other, head), draws, _F32)

    found = divergences(hidden, head, other)
    logp, logq = _log_softmax(hidden, head, ones), _log_softmax(other, head, ones)
    assert (logq - logp).max() > 120
    np.testing.assert_allclose(found, (np.exp(logp) * (logp - logq)).sum(-1), rtol=1e-5)


def test_equal_policies_do_not_diverge():
    """The divergence and its gradient are exactly 0, in bf16 too."""
    rng = np.random.default_rng(1)
    hidden = jnp.asarray(rng.standard_normal((2, 9, 16)), jnp.bfloat16)
    head = jnp.asarray(rng.standard_normal((16, 50)), jnp.float32)
    draws = Draws(np.zeros((2, 9), np.int32), np.ones((2, 9), np.float32))

    @exact_jit
    @jax.value_and_grad
    def total(hidden):
        same = jax.lax.stop_gradient(hidden), head
        return token_divergences(hidden, head, same, draws, get_recipe("fp8")).sum()

    value, gradient = total(hidden)
    assert value == 0 and not gradient.any()


def test_the_loss_none():
    """It is 0 without a gradient, and its ratio is the policy's."""
    logp, mask = jnp.asarray([[-1.0, -2.0, 0.0]]), jnp.asarray([[True, True, False]])

    def value(logp):
        each, stats = none()(logp, jnp.asarray([[-1.0, -2.5, 0.0]]), jnp.ones((1, 3)), mask)
        return each.sum(), stats["ratio"]

    (total, ratio), gradient = jax.value_and_grad(value, has_aux=True)(logp)
    assert total == 0 and not gradient.any()
    np.testing.assert_allclose(ratio, [[1.0, np.exp(0.5), 0.0]], rtol=1e-6)


def _config(tmp_path, checkpoint, teacher, **sections):
    fields = tiny_config.get_config().to_dict()
    del fields["model"]
    given = {
        "run": {"dir": str(tmp_path / "run"), "steps": 2, "loggers": ""},
        "model": {"checkpoint": str(checkpoint)},
        "data": {"tokenizer": "checkpoint"},
        "sft": {"steps": 0},
        "rollout": {"max_prompt_tokens": 40, "max_new_tokens": 24},
        "algo": {"teacher": str(teacher), "loss": "none"},
    }
    for name, values in (*given.items(), *sections.items()):
        fields[name] = fields.get(name, {}) | values
    return saved_config(fields, "here")


def _records(tmp_path, *arguments, **sections):
    train.train(_config(tmp_path, *arguments, **sections))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_policy_is_its_own_teacher(tmp_path):
    """At step 1 the divergence is exactly 0, and so is the gradient: two forward passes of one
    function, in FP8, over rows of several sequences."""
    model = tiny_checkpoint.write(tmp_path / "model")
    first, second = _records(tmp_path, model, model, learner={"tokens_per_batch": 128})
    assert first["teacher_kl"] == second["teacher_kl"] == 0.0
    assert first["grad_norm"] == 0.0 and first["checksum"] == second["checksum"]
    assert first[DRIFT_MAX] == 0.0


def _other_weights(directory, scale):
    """A teacher of another width with the same tokenizer."""
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 96}
    return tiny_checkpoint.write(directory, config=sizes | {"initializer_range": scale})


@pytest.mark.slow
@pytest.mark.parametrize("packed", [0, 128])
def test_a_policy_becomes_its_teacher(packed, tmp_path):
    """The divergence falls by a fifth in 16 steps; drift stays 0."""
    model = tiny_checkpoint.write(tmp_path / "model")
    teacher = _other_weights(tmp_path / "teacher", 0.02)
    found = _records(
        tmp_path,
        model,
        teacher,
        run={"steps": 16},
        rollout={"temperature": 8.0, "max_prompt_tokens": 40, "max_new_tokens": 24},
        optimizer={"learning_rate": 1e-2},
        learner={"tokens_per_batch": packed},
    )
    first, last = (found[i]["teacher_kl"] for i in (0, -1))
    assert first > 0.5 and last < 0.8 * first
    assert max(record[DRIFT_MAX] for record in found) == 0.0


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    """One sentence, before anything compiles."""
    model = tiny_checkpoint.write(tmp_path / "model")
    small = tiny_checkpoint.write(tmp_path / "small", config={"vocab_size": 300})
    with pytest.raises(UserError, match=r"algo\.teacher: .*small has a vocabulary of 300 tokens"):
        make_runtime(_config(tmp_path, model, small), with_questions=False)
    other = tiny_checkpoint.write(tmp_path / "other")
    tokens = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    with pytest.raises(UserError, match="numbers its tokens unlike"):
        make_runtime(_config(tmp_path, model, other), with_questions=False)
    (other / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        make_runtime(_config(tmp_path, model, other), with_questions=False)
    with pytest.raises(UserError, match=r"algo\.teacher: .*absent is no directory"):
        make_runtime(_config(tmp_path, model, tmp_path / "absent"), with_questions=False)


@pytest.mark.slow
def test_from_python(tmp_path):
    """`train_step` of the Python API has the teacher's part of the loss."""
    model = tiny_checkpoint.write(tmp_path / "model")
    teacher = str(_other_weights(tmp_path / "teacher", 0.02))
    policy = fp8rl_jax.load(str(model), teacher=teacher, loss="none", max_new_tokens=24)
    samples = fp8rl_jax.sample(policy, ["What", "12 + 7"], group_size=4, temperature=8.0)
    _, metrics = fp8rl_jax.train_step(policy, samples, np.ones(8))
    assert metrics["teacher_kl"] > 0.5 and metrics["grad_norm"] > 0.01
