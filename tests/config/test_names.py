"""Names that other libraries, and habit, have for a field lead to that field."""

from __future__ import annotations

import pytest

from fp8rl_jax.config import all_fields
from fp8rl_jax.config.names import MEANT, field_meant, override_meant


def test_the_table_names_fields_and_no_field_needs_it():
    """Every entry leads to a field that exists; a field's own name leads to itself."""
    fields = all_fields()
    assert set(MEANT.values()) <= set(fields)
    assert all(field_meant(path) == path for path in fields)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("sft.lr", "sft.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("batch_size", "rollout.prompts_per_step"),
        ("sft.batchsize", "sft.batch_size"),
        ("max-steps", "run.steps"),
        ("model.path", "model.checkpoint"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.learning_rate"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size"),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("trainer.save_freq", "run.checkpoint_every"),
        ("num_generations", "rollout.group_size"),
        ("grpo.num_prompts_per_step", "rollout.prompts_per_step"),
        ("rollout.groupsize", "rollout.group_size"),
        ("learning_rat", "optimizer.learning_rate"),
        ("temperature", "rollout.temperature"),
        ("xyzzy", None),
    ],
)
def test_field_meant(written, meant):
    assert field_meant(written) == meant


@pytest.mark.parametrize(
    ("written", "value", "override"),
    [
        ("num_generations", "8", "--config.rollout.group_size=8"),
        (
            "actor.ppo_mini_batch_size",
            "256",
            "--config.algo.num_minibatches=N, minibatches, not the size of one",
        ),
        ("total-epochs", "15", "--config.run.steps=N, steps, not epochs"),
        ("total-steps", "15", "--config.run.steps=15"),
        ("xyzzy", "1", None),
    ],
)
def test_values_in_other_units_are_not_copied(written, value, override):
    assert override_meant(written, value) == override
