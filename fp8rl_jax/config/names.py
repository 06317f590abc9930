"""Finds the field that a wrong name stands for: a typo, or the name that TRL, verl, NeMo RL or
transformers use.

Names are compared by their last word: `actor_rollout_ref.actor.optim.lr` is `lr`. Sources: the
fields of TRL's `GRPOConfig`, of verl's `ppo_trainer.yaml` and of NeMo RL's GRPO configurations.
"""

from __future__ import annotations

import difflib

from fp8rl_jax.config.fields import FIELDS, all_fields

# {name in another library: field}
MEANT = {
    name: path
    for path, field in all_fields().items()
    for name in (*field.names.split(), *field.unlike[1].split())
}


def override_meant(path: str, value: str) -> str | None:
    """Returns the override that a wrong name and its value stand for; None if no name is near.

    Example:
      >>> override_meant("num_generations", "8")
      '--config.rollout.group_size=8'
      >>> override_meant("ppo_mini_batch_size", "64")
      '--config.algo.num_minibatches=N, minibatches, not the size of one'
    """
    field = field_meant(path)
    if field is None:
        return None
    unit, names = all_fields()[field].unlike
    if path.replace("-", "_").rpartition(".")[2] in names.split():
        return f"--config.{field}=N, {unit}"
    return f"--config.{field}={value}"


def field_meant(path: str) -> str | None:
    """Returns the field that a wrong name probably stands for; None if no name is near.

    Args:
      path: a name without `--config.`, such as 'optimizer.lr', 'steps' or 'trainer.save_freq'.
    """
    path = path[:100].replace("-", "_").removeprefix("config.")  # the search's time is quadratic
    fields = all_fields()
    if path in fields:
        return path
    section = path.partition(".")[0]
    last = path.rpartition(".")[2]
    meant = MEANT.get(last, "")
    if section in FIELDS:
        if (in_section := f"{section}.{meant.partition('.')[2]}") in fields:
            return in_section
        if near := difflib.get_close_matches(last, FIELDS[section], 1, 0.6):
            return f"{section}.{near[0]}"
    if same := [name for name in fields if name.endswith("." + last)]:
        return same[0] if len(same) == 1 or not meant else meant
    if meant:
        return meant
    by_leaf = {name.partition(".")[2]: name for name in reversed(fields)} | MEANT
    near = difflib.get_close_matches(last, by_leaf, 1, 0.75)
    return by_leaf[near[0]] if near else None
