"""`fp8rl sample` and `fp8rl eval`: of a run by its config, or of a directory by its name."""

from __future__ import annotations

import argparse
import json
import pathlib
import re
from collections.abc import Sequence

from fp8rl_jax.cli.arguments import Command, argument, keep_programs, note, read_config
from fp8rl_jax.errors import UserError

# Options of sample and eval that name a policy by its directory.
_POLICY = (
    argument(
        "--checkpoint", metavar="DIR",
        help="directory of a run, or of a Hugging Face model; in the place of --config",
    ),
    argument(
        "--chat", action="store_true", default=None,
        help="prompts are the user's messages in the model's chat template",
    ),
    argument("--system", metavar="TEXT", help="a system message, with --chat"),
    argument(
        "--chat-options", default="", metavar="NAME=VALUE,...",
        help="variables of the chat template",
    ),
    argument("--max-new-tokens", type=int, metavar="N", help="most tokens of an answer"),
    argument("--seed", type=int, metavar="S", help="seed of sampling, and of the questions"),
    argument("--precision", metavar="RECIPE", help="fp8, bf16, f32, ..."),
)  # fmt: skip
_FIELD_OF = {
    "chat": "data.chat", "system": "data.system_prompt", "max_new_tokens": "rollout.max_new_tokens",
    "seed": "run.seed", "top_k": "rollout.top_k", "top_p": "rollout.top_p", "task": "env.task",
    "reward": "env.reward", "questions": "eval.questions", "batch_size": "eval.batch_size",
}  # fmt: skip


def _pairs(command: str, option: str, text: str) -> dict[str, object]:
    """{name: value} of 'name=value,name=[1,2]', values as Python literals or text."""
    from fp8rl_jax.config import literal

    found = {}
    for part in re.split(r",(?=\w+=)", text) if text else ():
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(
                f"fp8rl {command}: --{option}: {part!r} is not understood; write NAME=VALUE,..."
            )
        found[name] = literal(value)
    return found


def _policy_config(command: str, values: argparse.Namespace):
    """The configuration of --checkpoint and the options beside it."""
    from fp8rl_jax.policy.load import policy_config

    if values.config:
        raise UserError(
            f"fp8rl {command}: --config and --checkpoint both name a policy; leave one out"
        )
    if not values.checkpoint or not pathlib.Path(values.checkpoint).is_dir():
        raise UserError(
            f"fp8rl {command}: --checkpoint={values.checkpoint} is no directory; name that of a "
            "run, or of a Hugging Face model"
        )
    given = vars(values)
    for option in ("system", "chat_options"):
        if given[option] and not values.chat:
            name = option.replace("_", "-")
            raise UserError(
                f"fp8rl {command}: --{name} goes with --chat; add it, or leave {name} out"
            )
    fields = {
        field: given[name] for name, field in _FIELD_OF.items() if given.get(name) is not None
    }
    if values.precision is not None:
        fields |= {"precision.rollout": values.precision, "precision.learner": values.precision}
    config = policy_config(values.checkpoint, fields, values.overrides)
    config.data.chat_options.update(_pairs(command, "chat-options", values.chat_options))
    keep_programs(config.run.compilation_cache)
    return config


def _only_with_checkpoint(command: str, values: argparse.Namespace) -> None:
    for name, value in vars(values).items():
        if name not in ("config", "overrides", "questions_asked") and value not in (None, "", []):
            name = name.replace("_", "-")
            raise UserError(
                f"fp8rl {command}: --{name} goes with --checkpoint DIR; with --config, set the "
                f"field (`fp8rl {command} --help`)"
            )


def _evaluate(values: argparse.Namespace) -> int:
    if values.checkpoint is None:
        _only_with_checkpoint("eval", values)
        from fp8rl_jax.policy.inference import evaluate_checkpoint

        print(json.dumps(evaluate_checkpoint(read_config("eval", values))))
        return 0
    config = _policy_config("eval", values)
    from fp8rl_jax.policy.load import evaluate_policy, is_released

    task = values.task or any(
        a.lstrip("-").startswith("config.env.task=") for a in values.overrides
    )
    if is_released(config) and not task:
        raise UserError("fp8rl eval: name a task, for example --task=basic_arithmetic")
    if task:  # of a run: the options were the other task's
        config.env.task_options = type(config.env.task_options)()
    with config.env.task_options.ignore_type():
        config.env.task_options.update(_pairs("eval", "task-options", values.task_options))
    print(json.dumps(evaluate_policy(config, note)))
    return 0


def _sample(values: argparse.Namespace) -> int:
    if values.checkpoint is not None:
        return _sample_directory(values, [*values.prompt, *values.questions_asked])
    _only_with_checkpoint("sample", values)
    config = read_config("sample", values)
    if not values.questions_asked:
        raise UserError('fp8rl sample: give questions, for example "Calculate 12 + 7."')
    from fp8rl_jax.policy.inference import sample_checkpoint

    for question, answer in sample_checkpoint(config, values.questions_asked):
        print(f"{question!r} -> {answer!r}")
    return 0


def _sample_directory(values: argparse.Namespace, prompts: list[str]) -> int:
    if not prompts:
        raise UserError('fp8rl sample: give a prompt, for example --prompt "Once upon a time"')
    if values.temperature is not None and not 0 <= values.temperature < float("inf"):
        raise UserError(
            f"fp8rl sample: --temperature is {values.temperature}; write 0 for the most likely "
            "token, or a number above 0"
        )
    config = _policy_config("sample", values)
    from fp8rl_jax.policy.generate import generate
    from fp8rl_jax.policy.load import prepare

    temperature = values.temperature
    with prepare(config, prompts, note) as (runtime, weights, rows, usual):
        writer = _Writer(prompts)
        timing = generate(
            runtime, weights, rows, usual if temperature is None else temperature,
            writer.show, writer.finished,
        )  # fmt: skip
    note(str(timing))
    return 0


class _Writer:
    """Prints answers one after the other, the first that is not complete as it is made."""

    def __init__(self, prompts: Sequence[str]):
        self._prompts, self._row = prompts, -1
        self._waiting = [""] * len(prompts)
        self._ended: dict[int, bool] = {}
        self._next()

    def _next(self) -> None:
        self._row += 1
        if self._row < len(self._prompts):
            if len(self._prompts) > 1:
                print(f"--- {self._prompts[self._row]!r}", flush=True)
            print(self._waiting[self._row], end="", flush=True)

    def show(self, row: int, text: str) -> None:
        if row == self._row:
            print(text, end="", flush=True)
        else:
            self._waiting[row] += text

    def finished(self, row: int, by_itself: bool) -> None:
        self._ended[row] = by_itself
        while self._row in self._ended:
            print(flush=True)
            if not self._ended[self._row]:
                note("(cut: --max-new-tokens=N allows more)")
            self._next()


COMMANDS = (
    Command(
        "eval",
        "held-out accuracy of the newest checkpoint in run.dir, or of a directory",
        _evaluate,
        (
            *_POLICY,
            argument("--task", help="a task of reasoning_gym"),
            argument(
                "--task-options", default="", metavar="NAME=VALUE,...", help="keywords of the task"
            ),
            argument("--questions", type=int, metavar="N", help="held-out questions"),
            argument("--reward", help="exact_match, math_equal, or module:function"),
            argument("--batch-size", type=int, metavar="N", help="questions at a time"),
        ),
        config=True,
    ),
    Command(
        "sample",
        "answers of the newest checkpoint to questions, or text of a directory's policy, shown\n"
        "while it is made",
        _sample,
        (
            argument("questions_asked", nargs="*", metavar="QUESTION", help="or a prompt"),
            *_POLICY,
            argument(
                "--prompt", action="append", default=[], metavar="TEXT",
                help="a prompt; may be given several times",
            ),
            argument(
                "--temperature", type=float, metavar="T",
                help="sampling temperature, 0 for the most likely token",
            ),
            argument(
                "--top-k", type=int, metavar="K", help="sample from this many tokens; 0 for all"
            ),
            argument(
                "--top-p", type=float, metavar="P",
                help="sample from this much probability; 1.0 for all",
            ),
        ),
        config=True,
    ),
)  # fmt: skip
