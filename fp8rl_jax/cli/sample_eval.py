"""`fp8rl sample` and `fp8rl eval`: use a policy named by its config or by its directory."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.arguments import (
    ALLOW_IMPORT,
    Command,
    a_path,
    argument,
    config_file,
    keep_programs,
    note,
)

# Options of sample and eval that name a policy by its directory.
_POLICY = (
    argument(
        "--checkpoint",
        "directory of a run, or of a Hugging Face model; instead of --config",
        "DIR",
        type=a_path,
    ),
    argument(
        "--chat",
        "prompts are the user's messages in the model's chat template",
        action="store_true",
        default=None,
    ),
    argument("--system", "a system message, with --chat", "TEXT"),
    argument("--chat-options", "variables of the chat template", "NAME=VALUE,...", default=""),
    argument("--max-new-tokens", "most tokens of an answer", "N", type=int),
    argument("--seed", "seed of sampling, and of the questions", "S", type=int),
    argument("--precision", "precision recipe: fp8, bf16, f32, ...", "RECIPE"),
    ALLOW_IMPORT,
)
_FIELD_OF = {
    "chat": "data.chat",
    "system": "data.system_prompt",
    "max_new_tokens": "rollout.max_new_tokens",
    "seed": "run.seed",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "task": "env.task",
    "reward": "env.reward",
    "questions": "eval.questions",
    "batch_size": "eval.batch_size",
    "samples": "eval.samples",
}


def _pairs(command: str, option: str, text: str) -> dict[str, object]:
    """Returns {name: value} of 'name=value,name=[1,2]'; values are read by `literal`."""
    from fp8rl_jax.config import literal

    values = {}
    for part in re.split(r",(?=\w+=)", text) if text else ():
        name, equals, value = part.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(
                f"fp8rl {command}: --{option}: {part!r} is not understood; write NAME=VALUE,..."
            )
        values[name] = literal(value)
    return values


def _same_file(one: str | None, other: str) -> bool:
    """Returns whether two tasks are the same file or directory of questions."""
    return bool(one and os.path.exists(one) and os.path.realpath(one) == os.path.realpath(other))


def _named_config(command: str, values: argparse.Namespace):
    """Reads the configuration of --checkpoint or --config."""
    from fp8rl_jax.config import load_config
    from fp8rl_jax.policy.source import directory_config

    if values.config and values.checkpoint is not None:
        raise UserError(
            f"fp8rl {command}: --config and --checkpoint both name a policy; leave one out"
        )
    if values.checkpoint is None:
        return load_config(config_file(f"fp8rl {command}", values))
    if not os.path.isdir(values.checkpoint):
        raise UserError(
            f"fp8rl {command}: --checkpoint={values.checkpoint} is no directory; name that of a "
            "run, or of a Hugging Face model"
        )
    needed = ("precision", "env") if command == "eval" else ("precision",)
    return directory_config(values.checkpoint, values.allow_import, needed)


def _policy_config(command: str, values: argparse.Namespace):
    """Returns the configuration of --checkpoint or --config, changed by the other options."""
    from fp8rl_jax.config import override, set_options
    from fp8rl_jax.policy.source import is_released

    config = _named_config(command, values)
    options = vars(values)
    for option in ("system", "chat_options"):
        if options[option] and not values.chat:
            name = option.replace("_", "-")
            raise UserError(
                f"fp8rl {command}: --{name} goes with --chat; add it, or leave {name} out"
            )
    fields = _FIELD_OF
    # The file that a run was trained on: ask the questions that the run held out.
    held_out = _same_file(options.get("task"), config.env.task)
    if command == "eval":
        fields = fields | {"temperature": "eval.temperature", "top_p": "eval.top_p"}
    for name, path in fields.items():
        if options.get(name) is not None:
            section, _, field = path.partition(".")
            config[section][field] = options[name]
    if values.precision is not None:
        config.precision.rollout = config.precision.learner = values.precision
    if command == "eval":
        task = values.task or any("config.env.task=" in word for word in values.overrides)
        if is_released(config) and not task:
            raise UserError("fp8rl eval: name a task, for example --task=basic_arithmetic")
        if task and not held_out:  # the options were the other task's
            config.env.task_options = type(config.env.task_options)()
        if values.task and not held_out:
            from fp8rl_jax.envs import is_generated

            in_task = "," not in values.task and is_generated(values.task)
            config.env.eval_task = "" if in_task else values.task
        set_options(
            config.env.task_options,
            _pairs("eval", "task-options", values.task_options),
            "--task-options",
            "fp8rl eval",
        )
    override(config, values.overrides)
    set_options(
        config.data.chat_options,
        _pairs(command, "chat-options", values.chat_options),
        "--chat-options",
        f"fp8rl {command}",
    )
    keep_programs(config.run.compilation_cache)
    return config


def _evaluate(values: argparse.Namespace) -> int:
    config = _policy_config("eval", values)
    from fp8rl_jax.policy.evaluate import evaluate_policy

    for record in evaluate_policy(config, note):
        print(json.dumps(record))
    return 0


def _sample(values: argparse.Namespace) -> int:
    prompts = [*values.prompt, *values.questions_asked]
    if not prompts:
        raise UserError('fp8rl sample: give a prompt, for example --prompt "Calculate 12 + 7."')
    if values.temperature is not None and not 0 <= values.temperature < float("inf"):
        raise UserError(
            f"fp8rl sample: --temperature is {values.temperature}; write 0 for the most likely "
            "token, or a number above 0"
        )
    config = _policy_config("sample", values)
    from fp8rl_jax.plan.refuse import check_sampling_memory
    from fp8rl_jax.policy.generate import generate
    from fp8rl_jax.policy.load import load_policy
    from fp8rl_jax.policy.source import usual_temperature
    from fp8rl_jax.training.runtime import make_runtime

    temperature = usual_temperature(config) if values.temperature is None else values.temperature
    runtime = make_runtime(config, with_questions=False)
    check_sampling_memory(runtime.resolved, runtime.mesh, len(prompts), 1, "prompts", slots=0)
    policy = load_policy(runtime, prompts, note)
    writer = _Writer(prompts)
    note(str(generate(policy, temperature, writer.show, writer.finished)))
    return 0


class _Writer:
    """Prints answers in order; the first unfinished one is printed while it is sampled."""

    def __init__(self, prompts: Sequence[str]):
        self._prompts = prompts
        self._row = -1
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

    def finished(self, row: int, at_its_end: bool) -> None:
        self._ended[row] = at_its_end
        while self._row in self._ended:
            print(flush=True)
            if not self._ended[self._row]:
                note("(cut: --max-new-tokens=N allows more)")
            self._next()


COMMANDS = (
    Command(
        "eval",
        "held-out accuracy of the newest checkpoint in run.dir, or of a Hugging Face model",
        _evaluate,
        (
            *_POLICY,
            argument(
                "--task",
                "a task of reasoning_gym, or a data set (docs/data.md); or several with commas",
            ),
            argument("--task-options", "keywords of the task", "NAME=VALUE,...", default=""),
            argument("--questions", "number of held-out questions", "N", type=int),
            argument("--samples", "sampled answers per question: pass@k up to N", "N", type=int),
            argument("--reward", "as env.reward: a built-in one, or module:function"),
            argument("--batch-size", "questions answered at a time", "N", type=int),
            argument("--temperature", "temperature of the sampled answers", "T", type=float),
            argument(
                "--top-p",
                "nucleus sampling: keep the most likely tokens up to this probability; 1.0 for all",
                "P",
                type=float,
            ),
        ),
        config=True,
        processes=True,
        starts="loads the weights, compiles and answers the questions; a minute or more",
    ),
    Command(
        "sample",
        "answers of the newest checkpoint in run.dir, or of a Hugging Face model, shown while\n"
        "they are made",
        _sample,
        (
            argument("questions_asked", "a prompt, as with --prompt", "QUESTION", nargs="*"),
            *_POLICY,
            argument(
                "--prompt",
                "a prompt; may be given several times",
                "TEXT",
                action="append",
                default=[],
            ),
            argument(
                "--temperature",
                "sampling temperature, 0 for the most likely token",
                "T",
                type=float,
            ),
            argument("--top-k", "sample from the K most likely tokens; 0 for all", "K", type=int),
            argument(
                "--top-p",
                "nucleus sampling: keep the most likely tokens up to this probability; 1.0 for all",
                "P",
                type=float,
            ),
        ),
        config=True,
        starts="loads the weights and compiles; about half a minute to the first token",
    ),
)
