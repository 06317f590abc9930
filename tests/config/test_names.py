"""Names that other libraries, and habit, have for a field lead to that field."""

from __future__ import annotations

import pytest

from fp8rl_jax.config import all_fields
from fp8rl_jax.config.names import MEANT, field_meant


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
