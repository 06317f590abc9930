"""Generates questions by reasoning_gym: for fine-tuning, training and evaluation, split by text.

Different seeds would not separate them: neighbouring seeds of reasoning_gym overlap, and small
tasks repeat their questions.
"""

from __future__ import annotations

import itertools

from fp8rl_jax.base.errors import UserError, did_you_mean
from fp8rl_jax.envs.question import SPLITS, Question, split_of

_ITEMS_PER_SEED = 1 << 20  # item i of seed s is generated from s + i; these ranges do not overlap


def check_task(name: str, options: dict) -> None:
    """Raises UserError if reasoning_gym has no such task or refuses the options."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        hint = did_you_mean(name, DATASETS, "see reasoning_gym's list of datasets", "{!r}")
        raise UserError(
            f"env.task: reasoning_gym has no task {name!r}; {hint} (`fp8rl data list` names all "
            "tasks)"
        )
    try:
        reasoning_gym.create_dataset(name, size=1, seed=0, **options)[0]
    except Exception as error:  # tasks raise many types for wrong options
        raise UserError(f"env.task_options: task {name!r} refuses {options}: {error}") from None


def has_scorer(name: str) -> bool:
    """Returns whether reasoning_gym has a task of this name with its own scorer (for tasks with
    several right answers)."""
    from reasoning_gym.factory import DATASETS, ProceduralDataset

    if name not in DATASETS:
        return False
    return DATASETS[name][0].score_answer is not ProceduralDataset.score_answer


def make_questions(
    name: str, options: dict, counts: dict[str, int], seed: int
) -> dict[str, list[Question]]:
    """Generates distinct questions for each split.

    Args:
      name: a task of reasoning_gym.
      options: keyword arguments of the task.
      counts: number of questions by split.
      seed: seed of the generator.

    Returns:
      {split: questions}, disjoint by text.

    Raises:
      UserError: the task has too few distinct questions.
    """
    import reasoning_gym  # slow: it imports all tasks

    check_task(name, options)
    data = reasoning_gym.create_dataset(
        name, size=_ITEMS_PER_SEED, seed=1 + seed * _ITEMS_PER_SEED, **options
    )
    by_split: dict[str, dict[str, Question]] = {split: {} for split in SPLITS}
    wanted = {split: counts.get(split, 0) for split in SPLITS}
    without_new = 0
    for index in itertools.count():
        if all(len(by_split[split]) >= wanted[split] for split in SPLITS):
            break
        if index == _ITEMS_PER_SEED or without_new > 20_000:
            short = next(s for s in SPLITS if len(by_split[s]) < wanted[s])
            raise UserError(
                f"env.task: {name!r} with {options} gave only {len(by_split[short])} distinct "
                f"questions for the split {short!r}, {wanted[short]} are asked for: widen "
                "env.task_options or lower the number"
            )
        item = data[index]
        text = item["question"]
        split = split_of(text)
        bucket = by_split[split]
        if len(bucket) < wanted[split] and text not in bucket:
            bucket[text] = Question(text, str(item["answer"]), row=item)
            without_new = 0
        else:
            without_new += 1
    return {split: list(bucket.values()) for split, bucket in by_split.items()}
