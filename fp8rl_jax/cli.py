"""The command line: `fp8rl train | eval | sample | drift | bench | recipe | report`.

Exit status: 0 done; 2 the user's to mend, one sentence on standard error; 1 ours, a traceback,
or a bound that `fp8rl drift --fail-above` was given and found exceeded.
"""

from __future__ import annotations

import errno
import os
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import flags

from fp8rl_jax.errors import NonFiniteError, UserError

_USAGE = """\
fp8rl: reinforcement learning of language models in FP8, rollout and learner through one forward

usage: fp8rl COMMAND --config FILE [--config.SECTION.FIELD=VALUE ...] [options]

commands:
  train    warm-up, then GRPO; writes metrics, checkpoints and report.html to run.dir
           [--resume]  continue the run in run.dir, bit for bit
  eval     held-out accuracy of the newest checkpoint in run.dir, or of a directory by its name:
           fp8rl eval --checkpoint DIR [--task=TASK] [--task-options=NAME=VALUE,...]
           [--questions=N] [--reward=R] [--batch-size=N] and the options of sample after --prompt
  sample   answers of the newest checkpoint to questions given as arguments, or text of a
           directory by its name, shown while it is made:
           fp8rl sample --checkpoint DIR --prompt TEXT [--prompt TEXT ...]
           [--chat] [--system=TEXT] [--chat-options=NAME=VALUE,...] [--max-new-tokens=N]
           [--temperature=T] [--top-k=K] [--top-p=P] [--seed=S] [--precision=fp8|bf16|f32]
           DIR is that of a run, or of a Hugging Face model; neither needs --config
  drift    where rollout and learner differ, if they do: compares the two programs bit by bit
           [--checkpoint=RUN_DIR]  with its newest weights instead of random ones
           [--prompts=N] [--out=DIR] [--fail-above=X]  status 1 if a |dlogp| is above X
  bench    time of rollout and train step under several recipes, in one process
           [--recipes=fp8,bf16,f32] [--repeats=5]
           fp8rl bench drift-cost --config FILE: what zero drift costs, exact programs against
           naive ones  [--recipes=fp8,bf16] [--repeats=5]
           fp8rl bench gemm-error: error of every recipe's matrix products, beside a published
           table; no config  [--recipes=fp8,mxfp8,...] [--out=runs/gemm_error]
  recipe   fp8rl recipe list: the names of all recipes
           fp8rl recipe show NAME: formats, blocks and scaling policies of every GEMM
  report   fp8rl report RUN_DIR [OTHER_RUN ...]: writes RUN_DIR/report.html again, with a
           comparison if other runs are named

`fp8rl COMMAND --help` lists every config field.
"""


def _parse(
    command: str, arguments: Sequence[str], options: Mapping[str, tuple[str, object, str]]
) -> tuple[flags.FlagValues, list[str], list[str]]:
    """Splits arguments into options, config overrides and positional ones.

    `options` maps a name to (kind, default, meaning); a kind is 'string', 'strings' (may be given
    several times), 'bool', 'int', 'float'. Names have underscores here and hyphens on the command
    line, where either will do.
    """
    values = flags.FlagValues()
    define: dict[str, Callable[..., object]] = {
        "string": flags.DEFINE_string, "strings": flags.DEFINE_multi_string,
        "bool": flags.DEFINE_bool, "int": flags.DEFINE_integer, "float": flags.DEFINE_float,
    }  # fmt: skip
    for name, (kind, default, meaning) in options.items():
        define[kind](name, default, meaning, flag_values=values)
    overrides = [a for a in arguments if a.startswith(("--config.", "-config."))]
    rest = [_underscored(a, options) for a in arguments if a not in overrides]
    try:
        positional = values([command, *rest])[1:]
    except flags.Error as error:
        text = " ".join(str(error).split())
        raise UserError(f"fp8rl {command}: {text}; see `fp8rl {command} --help`") from None
    return values, overrides, positional


def _underscored(argument: str, options: Mapping[str, object]) -> str:
    """'--fail-above=1' -> '--fail_above=1', if there is such an option."""
    name, equals, value = argument.partition("=")
    known = name.lstrip("-").replace("-", "_")
    return f"--{known}{equals}{value}" if name.startswith("--") and known in options else argument


_CONFIG = {"config": ("string", "", "the config file")}


def _config(command: str, values: flags.FlagValues, overrides: list[str]):
    from fp8rl_jax.config import load_config

    if not values.config:
        raise UserError(
            f"fp8rl {command}: name a config, for example --config configs/tiny_arithmetic.py"
        )
    return load_config(values.config, overrides)


def _no_positional(command: str, positional: list[str]) -> None:
    if positional:
        raise UserError(
            f"fp8rl {command}: {positional[0]!r} is not understood; config fields are written "
            "--config.SECTION.FIELD=VALUE"
        )


def _train(arguments: Sequence[str]) -> int:
    options = {**_CONFIG, "resume": ("bool", False, "continue the run in run.dir")}
    values, overrides, positional = _parse("train", arguments, options)
    _no_positional("train", positional)
    config = _config("train", values, overrides)
    from fp8rl_jax.summary import summarise
    from fp8rl_jax.train import train

    outcome = train(config, values.resume)
    if outcome.report is not None:
        summary = summarise(config.run.dir)
        for line in (summary["sentence"], *summary["notes"], f"report: {outcome.report}"):
            print(line)
    return 0


# Options of sample and eval that name a policy by its directory.
_POLICY = {
    **_CONFIG,
    "checkpoint": ("string", None, "directory of a run, or of a Hugging Face model"),
    "chat": ("bool", None, "prompts are the user's messages in the model's chat template"),
    "system": ("string", None, "a system message, with --chat"),
    "chat_options": ("string", "", "variables of the chat template, as NAME=VALUE,..."),
    "max_new_tokens": ("int", None, "most tokens of an answer"),
    "seed": ("int", None, "seed of sampling, and of the questions"),
    "precision": ("string", None, "recipe: fp8, bf16, f32, ..."),
}
_FIELD_OF = {
    "chat": "data.chat", "system": "data.system_prompt", "max_new_tokens": "rollout.max_new_tokens",
    "seed": "run.seed", "top_k": "rollout.top_k", "top_p": "rollout.top_p", "task": "env.task",
    "reward": "env.reward", "questions": "eval.questions", "batch_size": "eval.batch_size",
}  # fmt: skip


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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


def _policy_config(command: str, values: flags.FlagValues, overrides: list[str]):
    """The configuration of --checkpoint and the options beside it."""
    from fp8rl_jax.policy import policy_config

    if values.config:
        raise UserError(
            f"fp8rl {command}: --config and --checkpoint both name a policy; leave one out"
        )
    if not values.checkpoint or not pathlib.Path(values.checkpoint).is_dir():
        raise UserError(
            f"fp8rl {command}: --checkpoint={values.checkpoint} is no directory; name that of a "
            "run, or of a Hugging Face model"
        )
    given = values.flag_values_dict()
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
    config = policy_config(values.checkpoint, fields, overrides)
    config.data.chat_options.update(_pairs(command, "chat-options", values.chat_options))
    return config


def _only_with_checkpoint(command: str, values: flags.FlagValues) -> None:
    for name, value in values.flag_values_dict().items():
        if name != "config" and value not in (None, "", []):
            name = name.replace("_", "-")
            raise UserError(
                f"fp8rl {command}: --{name} goes with --checkpoint DIR; with --config, set the "
                f"field (`fp8rl {command} --help`)"
            )


def _eval(arguments: Sequence[str]) -> int:
    import json

    options = {
        **_POLICY,
        "task": ("string", None, "a task of reasoning_gym"),
        "task_options": ("string", "", "keywords of the task, as NAME=VALUE,..."),
        "questions": ("int", None, "held-out questions"),
        "reward": ("string", None, "exact_match, math_equal, or 'module:function'"),
        "batch_size": ("int", None, "questions at a time"),
    }
    values, overrides, positional = _parse("eval", arguments, options)
    _no_positional("eval", positional)
    if values.checkpoint is None:
        _only_with_checkpoint("eval", values)
        from fp8rl_jax.inference import evaluate_checkpoint

        print(json.dumps(evaluate_checkpoint(_config("eval", values, overrides))))
        return 0
    config = _policy_config("eval", values, overrides)
    from fp8rl_jax.policy import evaluate_policy, is_released

    task = values.task or any(a.lstrip("-").startswith("config.env.task=") for a in overrides)
    if is_released(config) and not task:
        raise UserError("fp8rl eval: name a task, for example --task=basic_arithmetic")
    if task:  # of a run: the options were the other task's
        config.env.task_options = type(config.env.task_options)()
    with config.env.task_options.ignore_type():
        config.env.task_options.update(_pairs("eval", "task-options", values.task_options))
    print(json.dumps(evaluate_policy(config, _note)))
    return 0


def _sample(arguments: Sequence[str]) -> int:
    options = {
        **_POLICY,
        "prompt": ("strings", [], "a prompt; may be given several times"),
        "temperature": ("float", None, "sampling temperature, 0 for the most likely token"),
        "top_k": ("int", None, "sample from this many tokens; 0 for all"),
        "top_p": ("float", None, "sample from this much probability; 1.0 for all"),
    }
    values, overrides, questions = _parse("sample", arguments, options)
    if values.checkpoint is not None:
        return _sample_directory(values, overrides, [*values.prompt, *questions])
    _only_with_checkpoint("sample", values)
    config = _config("sample", values, overrides)
    if not questions:
        raise UserError('fp8rl sample: give questions, for example "Calculate 12 + 7."')
    from fp8rl_jax.inference import sample_checkpoint

    for question, answer in sample_checkpoint(config, questions):
        print(f"{question!r} -> {answer!r}")
    return 0


def _sample_directory(values: flags.FlagValues, overrides: list[str], prompts: list[str]) -> int:
    if not prompts:
        raise UserError('fp8rl sample: give a prompt, for example --prompt "Once upon a time"')
    if values.temperature is not None and not 0 <= values.temperature < float("inf"):
        raise UserError(
            f"fp8rl sample: --temperature is {values.temperature}; write 0 for the most likely "
            "token, or a number above 0"
        )
    config = _policy_config("sample", values, overrides)
    from fp8rl_jax.generate import generate
    from fp8rl_jax.policy import prepare

    temperature = values.temperature
    with prepare(config, prompts, _note) as (runtime, weights, rows, usual):
        writer = _Writer(prompts)
        timing = generate(
            runtime, weights, rows, usual if temperature is None else temperature,
            writer.show, writer.finished,
        )  # fmt: skip
    _note(str(timing))
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
                _note("(cut: --max-new-tokens=N allows more)")
            self._next()


def _bench(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["gemm-error"]:
        return _gemm_error(arguments[1:])
    if arguments[:1] == ["drift-cost"]:
        return _drift_cost(arguments[1:])
    options = {
        **_CONFIG,
        "recipes": ("string", "fp8,bf16,f32", "recipes to time"),
        "repeats": ("int", 5, "timed repetitions, after one that compiles"),
    }
    values, overrides, positional = _parse("bench", arguments, options)
    if positional:
        raise UserError(
            f"fp8rl bench: {positional[0]!r} is not understood here; write `fp8rl bench --config "
            "FILE`, or `fp8rl bench gemm-error` or `fp8rl bench drift-cost` and options after that"
        )
    config = _config("bench", values, overrides)
    from fp8rl_jax.bench import bench, format_table

    print(format_table(bench(config, values.recipes.split(","), values.repeats)))
    return 0


def _drift_cost(arguments: Sequence[str]) -> int:
    command = "bench drift-cost"
    options = {
        **_CONFIG,
        "recipes": ("string", "fp8,bf16", "recipes to time"),
        "repeats": ("int", 5, "timed repetitions, after one that compiles"),
    }
    values, overrides, positional = _parse(command, arguments, options)
    _no_positional(command, positional)
    config = _config(command, values, overrides)
    from fp8rl_jax.bench import drift_cost, format_cost_table

    print(format_cost_table(drift_cost(config, values.recipes.split(","), values.repeats)))
    return 0


def _gemm_error(arguments: Sequence[str]) -> int:
    options = {
        "recipes": ("string", None, "recipes to measure; all that have a name if left out"),
        "out": ("string", "runs/gemm_error", "directory of gemm_error.json and gemm_error.png"),
    }
    command = "bench gemm-error"
    values, overrides, positional = _parse(command, arguments, options)
    if overrides or positional:
        raise UserError(
            f"fp8rl {command}: {[*overrides, *positional][0]!r} is not understood; it takes "
            "--recipes=NAME,NAME and --out=DIR, and no config"
        )
    if not values.out:
        raise UserError(f"fp8rl {command}: --out is empty; name a directory, or leave it out")
    from fp8rl_jax.quant import get_recipe

    recipes = None if values.recipes is None else values.recipes.split(",")
    for name in recipes or ():
        get_recipe(name)
    directory = _writable(command, values.out)
    from fp8rl_jax.bench import format_error_table, gemm_errors, write_gemm_errors

    result = gemm_errors(recipes, note=lambda text: print(text, file=sys.stderr, flush=True))
    print(format_error_table(result))
    try:
        paths = write_gemm_errors(result, directory)
    except OSError as error:
        raise _unwritable(command, values.out, error) from None
    print(*paths, sep="\n")
    return 0


def _recipe(arguments: Sequence[str]) -> int:
    _, overrides, words = _parse("recipe", arguments, {})
    words += overrides
    if not words:
        raise UserError("fp8rl recipe: write `fp8rl recipe list` or `fp8rl recipe show NAME`")
    from fp8rl_jax.quant import recipe_names

    action, *names = words
    if action not in ("list", "show"):
        raise UserError(
            f"fp8rl recipe: {action!r} is not understood; write list, or show and a name"
        )
    if action == "show" and not names:
        raise UserError(
            "fp8rl recipe show: name a recipe, one of " + ", ".join(recipe_names()) + ", or "
            "package.module:function"
        )
    if junk := names[action == "show" :]:
        raise UserError(
            f"fp8rl recipe {action}: {junk[0]!r} is not understood; write "
            f"`fp8rl recipe {action}{' NAME' if action == 'show' else ''}`"
        )
    from fp8rl_jax.recipe_show import list_recipes, show_recipe

    print(show_recipe(*names) if names else list_recipes())
    return 0


def _drift(arguments: Sequence[str]) -> int:
    options = {
        **_CONFIG,
        "checkpoint": ("string", None, "a run directory, whose newest weights to take"),
        "prompts": ("int", None, "questions to sample; those of an RL step if left out"),
        "out": ("string", None, "directory of drift.json and drift.html; run.dir if left out"),
        "fail_above": ("float", None, "exit with status 1 if a |dlogp| is above this"),
    }
    values, overrides, positional = _parse("drift", arguments, options)
    _no_positional("drift", positional)
    if values.prompts is not None and values.prompts < 1:
        raise UserError(f"fp8rl drift: --prompts is {values.prompts}; write at least 1")
    if values.fail_above is not None and not values.fail_above >= 0:
        raise UserError(
            f"fp8rl drift: --fail-above is {values.fail_above}; write a number of at least 0"
        )
    config = _config("drift", values, overrides)
    if values.checkpoint is not None and not pathlib.Path(values.checkpoint).is_dir():
        raise UserError(
            f"fp8rl drift: --checkpoint={values.checkpoint} is no directory; name that of a run"
        )
    directory = _writable("drift", values.out or values.checkpoint or config.run.dir)
    from fp8rl_jax.drift.render import print_analysis, write_analysis
    from fp8rl_jax.inference import analyse_drift

    result = analyse_drift(config, values.checkpoint, values.prompts, _note)
    print_analysis(result)
    try:
        paths = write_analysis(result, directory)
    except OSError as error:
        raise _unwritable("drift", directory, error) from None
    print(*paths, sep="\n")
    largest = result["headline"]["train_rollout_logprob_abs_diff_max"]
    if values.fail_above is not None and not largest <= values.fail_above:
        print(
            f"failed: the largest |dlogp| is {largest:.3g}, above --fail-above="
            f"{values.fail_above:g}",
            file=sys.stderr,
        )
        return 1
    return 0


def _unwritable(command: str, directory: str | pathlib.Path, error: OSError) -> UserError:
    return UserError(
        f"fp8rl {command}: nothing can be written to --out={directory} ({error.strerror}): "
        "name another directory"
    )


def _writable(command: str, directory: str) -> pathlib.Path:
    """The directory, made if need be.

    Raises:
      UserError: nothing can be written to it.
    """
    path = pathlib.Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(command, directory, error) from None
    return path


def _report(arguments: Sequence[str]) -> int:
    _, overrides, directories = _parse("report", arguments, {})
    _no_positional("report", overrides)
    if not directories:
        raise UserError("fp8rl report: name a run directory, for example runs/tiny_arithmetic")
    from fp8rl_jax.report import write_report

    try:
        print(write_report(directories[0], directories[1:]))
    except OSError as error:
        raise UserError(
            f"fp8rl report: {directories[0]}/report.html cannot be written ({error.strerror}): "
            "make room for it, or mend its permissions"
        ) from None
    return 0


_COMMANDS = {
    "train": _train,
    "eval": _eval,
    "sample": _sample,
    "drift": _drift,
    "bench": _bench,
    "recipe": _recipe,
    "report": _report,
}


def run(arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit status. Errors of ours propagate as exceptions."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    command, *rest = arguments
    try:
        if command not in _COMMANDS:
            raise UserError(f"fp8rl: no command {command!r}; write one of {', '.join(_COMMANDS)}")
        if any(a in ("-h", "--help") for a in rest):
            from fp8rl_jax.config import describe_fields

            print(_USAGE + "\nconfig fields and their defaults:\n" + describe_fields())
            return 0
        return _COMMANDS[command](rest)
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except NonFiniteError as error:
        print("stopped:", error, file=sys.stderr)
        return 1


def main() -> None:
    """Entry point of the console script `fp8rl`."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
