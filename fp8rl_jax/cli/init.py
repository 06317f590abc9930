"""`fp8rl init FILE`: writes a config for a model, questions and a reward of the user's."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex

from fp8rl_jax.base.errors import UserError, refused_by_system
from fp8rl_jax.cli.arguments import Command, a_path, argument

_TEXT = '''"""{title}

Command:   fp8rl train {file}
Fields:    fp8rl train --help-config [SECTION]
"""

import ml_collections


def get_config():
    return ml_collections.ConfigDict(
        {{
{sections}
        }}
    )
'''


def _init(values: argparse.Namespace) -> int:
    if not values.file or not values.data:
        raise UserError(
            "fp8rl init: name a file and questions, for example `fp8rl init my_config.py "
            "--data questions.jsonl --reward exact_match --model checkpoints/Qwen3-0.6B`"
        )
    path = pathlib.Path(values.file)
    if path.suffix != ".py":
        raise UserError(f"fp8rl init: {path} is no name of a config; write {path}.py")
    if os.path.lexists(path):
        raise UserError(f"fp8rl init: {path} is there already; delete it, or write another name")
    from fp8rl_jax.base.whole_file import write_whole
    from fp8rl_jax.training.questions import few_held_out
    from fp8rl_jax.training.starter import paid, starter

    fields = {"run.dir": f"runs/{path.stem}"}
    for name in ("question_key", "answer_key"):
        if getattr(values, name) is not None:
            fields[f"env.{name}"] = getattr(values, name)
    sections, runtime = starter(values.model, values.data, values.reward, fields, "fp8rl init")
    reward = paid(runtime, "fp8rl init")
    title = f"GRPO on {values.data}, " + (
        f"from {values.model}."
        if values.model
        else "from a small decoder that learns the answers of the questions first."
    )
    lines = [f'            "{name}": {_written(fields)},' for name, fields in sections.items()]
    named = shlex.quote(str(path))
    text = _TEXT.format(
        title=_in_docstring(title), file=_in_docstring(named), sections="\n".join(lines)
    )
    with refused_by_system(f"fp8rl init: {path} cannot be written", "name another file"):
        write_whole(path, text)
    rollout = sections["rollout"]
    lines = [
        f"{path}: prompts of up to {rollout['max_prompt_tokens']} tokens, responses of up to "
        f"{rollout['max_new_tokens']}, {rollout['prompts_per_step']} x {rollout['group_size']} "
        f"samples a step; {reward}",
        few_held_out(runtime.questions["eval"]),
        f"look at the questions:  fp8rl data show --config {named}",
        f"train:                  fp8rl train {named}",
    ]
    print("\n".join(filter(None, lines)))
    return 0


def _written(fields: dict) -> str:
    """Returns a section as Python source; JSON writes texts of ASCII as Python does."""
    plain = {k for k, v in fields.items() if isinstance(v, str) and v.isascii()}
    values = ((k, json.dumps(v) if k in plain else repr(v)) for k, v in fields.items())
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values) + "}"


def _in_docstring(text: str) -> str:
    """Escapes what would end or change a docstring: quotes, backslashes, control characters."""
    return repr(text)[1:-1].replace('"', r"\"")


INIT = Command(
    "init",
    "writes a config for your model, questions and reward, with lengths taken from the questions",
    _init,
    (
        argument("file", "a new file, such as my.py", "FILE", nargs="?", type=a_path),
        argument(
            "--model",
            "directory of a Hugging Face model, or the name of a published one, for its "
            "shapes with random weights; a small decoder if left out",
            "DIR_OR_NAME",
            type=a_path,
            default="",
        ),
        argument(
            "--data",
            "a .jsonl, .json, .csv or .parquet file, or what else env.task may be",
            "TASK",
            default="",
        ),
        argument(
            "--reward",
            "as env.reward: a built-in one, or module:function (default: auto)",
            "NAME",
            default="auto",
        ),
        argument("--question-key", "column of the questions (env.question_key)", "COLUMN"),
        argument("--answer-key", "column of the answers (env.answer_key)", "COLUMN"),
    ),
    starts="reads the questions and the tokenizer; about ten seconds",
)
