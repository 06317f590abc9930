"""What a user gets wrong about a data set costs one sentence, before anything compiles."""

from __future__ import annotations

import json

import pytest
from refusals import REFUSALS, assert_words, begins, train_command

pytestmark = REFUSALS


@pytest.fixture
def rows(place, tmp_path):
    """`rows.jsonl` with 40 questions, and a module of rewards, in the current directory."""
    lines = [json.dumps({"question": f"{i} + 1?", "answer": str(i + 1)}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "two_arguments.py").write_text("def two(prompt, answer):\n    return 1\n")


_FIELDS = {
    "template": ("env.prompt_template=Solve this:", ["prompt_template", "{question}"]),
    "pattern": ("env.answer_pattern=(", ["answer_pattern", "no regular expression", "write one"]),
    "no file": ("env.task=row.jsonl", ["row.jsonl does not exist", "rows.jsonl"]),
    "another kind": ("env.task=./tiny.py", ["kind that is not known", ".jsonl", ".parquet"]),
    "no column": ("env.question_key=q", ["rows.jsonl:1", "'q'", "question, answer"]),
    "too long": ("rollout.max_prompt_tokens=5", ["40 are too long", "max_prompt_tokens = 5", "9"]),
    "too long, an error": ("env.overlong=error", ["a prompt takes", "raise it to 9"]),
    "too few": ("env.max_questions=1", ["1 questions are left for the split 'train'", "takes 2"]),
    "none held out": ("env.eval_fraction=0", ["'eval'", "env.eval_fraction", "env.eval_task"]),
    "no evaluation": ("env.eval_task=chain_som", ["no task 'chain_som'", "chain_sum"]),
    "an empty set": ("env.eval_task=gsm_symbolic,chain_sum", ["set 'gsm_symbolic'", "too long"]),
    "reward": ("env.reward=gsm8k, 2*two_arguments:two", ["two_arguments:two", "(prompt, answer)"]),
}


@pytest.mark.parametrize("case", _FIELDS)
def test_refused(case, rows, refused):
    field, words = _FIELDS[case]
    slots = 8 if case == "too long, an error" else 30
    fields = [f"rollout.max_prompt_tokens={slots}", "sft.steps=0", field]
    assert_words(refused(*train_command("env.task=rows.jsonl", *fields)), words)


def test_a_data_set_begins(rows):
    """The base of all cases is accepted; train_questions is not asked of a data set."""
    fields = [
        "env.task=rows.jsonl",
        "sft.steps=0",
        "rollout.prompts_per_step=4",
        "env.train_questions=1",
    ]
    assert begins(*train_command(*fields))
