"""What a user gets wrong costs one sentence: exit status 2, nothing compiled, nothing written.

Each case runs the command line in this process, up to the point where a run would begin. The
sentence must hold the words given with the case: the place of the mistake and the way out.
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections import namedtuple

import jax
import pytest
from marks import slow

from fp8rl_jax import cli, train
from fp8rl_jax.cli import main
from fp8rl_jax.config import all_fields, checks, load_config
from fp8rl_jax.errors import UserError
from fp8rl_jax.kernels.reference import products
from fp8rl_jax.policy import evaluate
from fp8rl_jax.training import sft
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.logs import RunLogs
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.runtime import make_runtime, state_bytes

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CONFIG = """\
import ml_collections


def get_config():
    return ml_collections.ConfigDict({
        "run": {"dir": "run", "cache_dir": "cache", "steps": 1},
        "model": {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        },
        "env": {
            "train_questions": 8,
            "task_options": {
                "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1,
                "operators": ["+"], "allow_parentheses": False, "allow_negation": False,
            },
        },
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4},
        "sft": {"steps": 2, "questions": 8, "batch_size": 4, "evaluations": 1},
        "eval": {"questions": 2, "batch_size": 2},
    })
"""
_compiled: list[str] = []


def _note(event: str, duration: float, **details) -> None:
    if "backend_compile" in event:
        _compiled.append(event)


class Begun(BaseException):
    """The input was accepted: training would begin."""


class _NoRun:
    def __init__(self, *_):
        raise Begun


@pytest.fixture(scope="module", autouse=True)
def _count_compilations():
    products.bf16_dot_mode()  # tries this CPU's products, once a process
    jax.monitoring.register_event_duration_secs_listener(_note)
    yield
    jax.monitoring.unregister_event_duration_listener(_note)
    gc.collect()  # failed reads of orbax complain when they are collected: here, not later


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """An empty current directory with `tiny.py`; runs end where they would begin, without the
    self-check, which compiles the programs of a step."""
    (tmp_path / "tiny.py").write_text(_CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setattr(train, "_Run", _NoRun)
    _without_self_check(monkeypatch)


def _without_self_check(monkeypatch) -> None:
    """It compiles, after all that is refused here."""
    monkeypatch.setattr(train, "_self_check", lambda runtime: None)


def _files(directory: pathlib.Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.fixture
def refused(capsys, tmp_path):
    """refused(*arguments) runs a command, checks the manner of its refusal, gives the sentence."""

    def run(*arguments: str) -> str:
        files, compiled = _files(tmp_path), len(_compiled)
        capsys.readouterr()
        status = cli.run(arguments)
        output, error = capsys.readouterr()
        assert status == 2
        assert output == ""
        assert re.fullmatch(r"error: [^\n]+\n", error), f"not one sentence: {error!r}"
        assert _compiled[compiled:] == [], "something was compiled first"
        assert _files(tmp_path) == files, "files were written or changed"
        return error

    return run


@pytest.fixture
def refused_fields(refused):
    """refused_fields('rollout.top_p=2', ...) trains with tiny.py and these overrides."""
    return lambda *fields: refused(*_train(*fields))


def _train(*fields: str, config: str = "tiny.py") -> list[str]:
    return ["train", "--config", config, *(f"--config.{field}" for field in fields)]


def _begins(*arguments: str) -> bool:
    try:
        cli.run(arguments)
    except Begun:
        return True
    return False


def _assert_words(message: str, words: list[str]) -> None:
    for word in words:
        assert word in message, f"{word!r} is missing in: {message}"


# The measure itself.


def test_a_good_config_begins():
    """The base of all cases is accepted, so each refusal is due to its own mistake."""
    assert _begins(*_train())


def test_compilations_are_counted():
    """The counter that every case relies on sees a compilation."""
    before = len(_compiled)
    jax.jit(lambda x: x * 3 + 17)(1.0)
    assert len(_compiled) > before


# Help.


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help(arguments, capsys):
    """Help is no error: status 0, on standard output, with every command."""
    assert cli.run(arguments) == 0
    output, error = capsys.readouterr()
    assert error == ""
    _assert_words(output, [f"    {command}" for command in main.COMMANDS])


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_of_a_command(name, capsys):
    """Its options, and every field of a config if it takes one; the rest may be wrong."""
    command = main.COMMANDS[name]
    assert cli.run([*name.split(), "junk", "--help"]) == 0
    output, error = capsys.readouterr()
    assert error == ""
    options = [names[0] for names, _ in command.arguments if names[0].startswith("-")]
    _assert_words(output, [f"usage: fp8rl {name} ", *options])
    fields = [f"--config.{path}=" for path in all_fields()]
    assert all((field in output) == command.config for field in fields)


# Commands and arguments.

_ARGUMENTS = {
    "unknown command": (["trian"], ["trian", "train"]),
    "option as a command": (["--config", "tiny.py"], ["--config", "train"]),
    "no config": (["train"], ["--config"]),
    "no config for eval": (["eval"], ["--config"]),
    "no config for sample": (["sample", "1 + 1"], ["--config"]),
    "no config for bench": (["bench"], ["--config"]),
    "config without a value": (["train", "--config"], ["--config"]),
    "empty config": (["train", "--config="], ["--config"]),
    "missing file": (["train", "--config", "nope.py"], ["nope.py", "no file"]),
    "directory": (["train", "--config", "."], ["--config", "no file"]),
    "no Python file": (["train", "--config", "notes.txt"], ["notes.txt", ".py"]),
    "positional": (["train", "--config", "tiny.py", "junk"], ["junk", "--config.SECTION.FIELD"]),
    "positional for eval": (["eval", "--config", "tiny.py", "junk"], ["junk"]),
    "positional for bench": (["bench", "--config", "tiny.py", "junk"], ["junk"]),
    "value after a blank": (
        ["train", "--config", "tiny.py", "--config.run.steps", "3"],
        ["--config.SECTION.FIELD=VALUE"],
    ),
    "unknown option": (["train", "--config", "tiny.py", "--junk=3"], ["junk", "--help"]),
    "option of another command": (["eval", "--config", "tiny.py", "--resume"], ["resume"]),
    "no question": (["sample", "--config", "tiny.py"], ["prompt"]),
    "no repeats": (["bench", "--config", "tiny.py", "--repeats=0"], ["--repeats", "at least 1"]),
    "repeats in words": (["bench", "--config", "tiny.py", "--repeats=x"], ["repeats"]),
    "unknown recipe to time": (["bench", "--config", "tiny.py", "--recipes=fp9"], ["fp9", "'fp8'"]),
    "no recipe to time": (["bench", "--config", "tiny.py", "--recipes="], ["fp8_blockwise"]),
    "eval without a run": (["eval", "--config", "tiny.py"], ["run.dir", "train first"]),
    "sample without a run": (["sample", "--config", "tiny.py", "1 + 1"], ["run.dir", "train"]),
    "no run to report": (["report"], ["run directory"]),
    "report of nothing": (["report", "nope"], ["nope", "does not exist"]),
    "report of a file": (["report", "tiny.py"], ["tiny.py"]),
    "report of another directory": (["report", "."], ["config.json"]),
    "report with a field": (["report", ".", "--config.run.steps=3"], ["--config.run.steps=3"]),
}


@pytest.mark.parametrize("case", _ARGUMENTS)
def test_arguments(case, refused, tmp_path):
    """Commands, options and paths that are missing or not known."""
    (tmp_path / "notes.txt").write_text("hello\n")
    arguments, words = _ARGUMENTS[case]
    _assert_words(refused(*arguments), words)
    assert not (tmp_path / "run").exists()


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    paths = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "fp8rl_jax.cli", *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )


def test_exit_status_of_the_process():
    """What `run` returns is the status of the process, and the sentence its whole output."""
    process = _python("train", "--config", "nope.py")
    assert process.returncode == 2
    assert process.stdout == ""
    assert re.fullmatch(r"error: [^\n]*nope\.py[^\n]*\n", process.stderr)
    process = _python("train", "--help")
    assert process.returncode == 0
    assert "--config.rollout.group_size=" in process.stdout


# Config files.

_HEAD = "import ml_collections\ndef get_config():\n    c = ml_collections.ConfigDict()\n"
_FILE = {
    "no get_config": ("x = 1", ["get_config()"]),
    "syntax": ("def get_config(:", ["SyntaxError"]),
    "raises": ("raise ValueError('bad thing')", ["ValueError", "bad thing"]),
    "raises two lines": (r"raise ValueError('one\ntwo')", ["ValueError", "one", "two"]),
    "missing import": ("import no_such_module_here", ["no_such_module_here"]),
    "exits": ("import sys; sys.exit(0)", ["SystemExit"]),
    "get_config raises": ("def get_config():\n    return {}['key']", ["KeyError", "key"]),
    "get_config exits": ("def get_config():\n    raise SystemExit(3)", ["SystemExit"]),
    "get_config is no function": ("get_config = 3", ["get_config"]),
    "get_config wants arguments": ("def get_config(name): return name", ["get_config", "name"]),
    "returns nothing": ("def get_config(): return None", ["NoneType", "ConfigDict"]),
    "returns a dict": ("def get_config(): return {'run': {}}", ["dict", "ConfigDict"]),
    "unknown field": (
        f"{_HEAD}    c.rollout = dict(group_sise=3)\n    return c",
        ["'rollout.group_sise'", "rollout.group_size"],
    ),
    "unknown section": (f"{_HEAD}    c.rolout = dict(x=3)\n    return c", ["'rolout'", "rollout"]),
    "field without a section": (f"{_HEAD}    c.seed = 3\n    return c", ["'seed'"]),
    "section as a field": (f"{_HEAD}    c.rollout = 3\n    return c", ["rollout", "FIELD"]),
    "number for text": (
        f"{_HEAD}    c.env = dict(task=3)\n    return c",
        ["env.task", "3", "text such as"],
    ),
    "text for a number": (
        f"{_HEAD}    c.rollout = dict(group_size='3')\n    return c",
        ["rollout.group_size", "'3'", "a whole number such as"],
    ),
    "fraction for a whole number": (
        f"{_HEAD}    c.rollout = dict(group_size=3.5)\n    return c",
        ["rollout.group_size", "3.5", "a whole number such as"],
    ),
    "bool for a number": (
        f"{_HEAD}    c.rollout = dict(temperature=True)\n    return c",
        ["rollout.temperature", "True", "a number such as"],
    ),
    "number for a bool": (
        f"{_HEAD}    c.algo = dict(normalize_std=1)\n    return c",
        ["algo.normalize_std", "True or False"],
    ),
    "options that are no dict": (
        f"{_HEAD}    c.env = dict(task_options=3)\n    return c",
        ["env.task_options", "dict"],
    ),
}


@pytest.mark.parametrize("case", _FILE)
def test_config_file(case, refused, tmp_path):
    """A file that cannot be read or says something unknown; its path is in the sentence."""
    source, words = _FILE[case]
    (tmp_path / "mine.py").write_text(source + "\n")
    _assert_words(refused(*_train(config="mine.py")), ["mine.py", *words])


# Single fields on the command line.

_FIELDS = {
    # names and types
    "rollout.group_sise=3": ["'rollout.group_sise'", "rollout.group_size"],
    "rolout.group_size=3": ["'rolout.group_size'", "rollout.group_size"],
    "trainer.x=3": ["'trainer.x'"],
    "rollout=3": ["'rollout'"],
    "=3": ["command line"],
    "rollout.group_size": ["rollout.group_size", "no value"],
    "rollout.group_size=abc": ["rollout.group_size", "abc", "whole number"],
    "rollout.group_size=1.5": ["rollout.group_size", "1.5", "whole number"],
    "rollout.group_size=": ["rollout.group_size", "whole number"],
    "rollout.temperature=hot": ["rollout.temperature", "hot", "a number"],
    "algo.normalize_std=maybe": ["algo.normalize_std", "maybe", "True or False"],
    # precision
    "precision.rollout=fp9": ["precision.rollout", "'fp9'", "'fp8'"],
    "precision.learner=qqqqq": ["precision.learner", "'qqqqq'", "fp8_blockwise", "bf16"],
    "precision.rollout=": ["precision.rollout", "fp8_blockwise", "bf16"],
    # rollout
    "rollout.temperature=0": ["rollout.temperature", "above 0"],
    "rollout.temperature=-1": ["rollout.temperature", "above 0"],
    "rollout.temperature=nan": ["rollout.temperature"],
    "rollout.temperature=inf": ["rollout.temperature"],
    "rollout.top_p=0": ["rollout.top_p", "(0, 1]"],
    "rollout.top_p=1.01": ["rollout.top_p", "(0, 1]"],
    "rollout.top_p=nan": ["rollout.top_p", "(0, 1]"],
    "rollout.top_k=1000": ["rollout.top_k", "1000"],
    "rollout.max_prompt_tokens=5": ["rollout.max_prompt_tokens", "5", "raise it to", "Calculate"],
    "rollout.max_new_tokens=1": ["rollout.max_new_tokens", "raise it to"],
    # batches
    "learner.micro_batches=3": ["learner.micro_batches", "4", "3", "equal parts"],
    "algo.updates_per_rollout=3": ["algo.updates_per_rollout", "4", "3", "equal parts"],
    "sft.batch_size=9": ["sft.batch_size", "9", "sft.questions", "8"],
    "rollout.prompts_per_step=9": ["rollout.prompts_per_step", "9", "env.train_questions", "8"],
    # numbers out of their range
    "optimizer.learning_rate=nan": ["optimizer.learning_rate"],
    "optimizer.learning_rate=inf": ["optimizer.learning_rate"],
    "model.rope_theta=nan": ["model.rope_theta"],
    "algo.clip_low=-0.1": ["algo.clip_low"],
    "algo.clip_high=-0.1": ["algo.clip_high"],
    "algo.tis_cap=-1": ["algo.tis_cap"],
    "optimizer.b1=1.5": ["optimizer.b1"],
    "optimizer.b2=-0.5": ["optimizer.b2"],
    "optimizer.weight_decay=-1": ["optimizer.weight_decay"],
    "sft.b2=1.5": ["sft.b2"],
    "sft.weight_decay=-1": ["sft.weight_decay"],
    "sft.end_fraction=-1": ["sft.end_fraction"],
    "run.seed=-1": ["run.seed"],
    # model
    "model.hidden_size=0": ["model.hidden_size", "above 0"],
    "model.num_hidden_layers=-1": ["model.num_hidden_layers", "above 0"],
    "model.num_attention_heads=0": ["model.num_attention_heads", "above 0"],
    "model.num_key_value_heads=3": ["model.num_key_value_heads", "multiple"],
    "model.head_dim=15": ["model.head_dim", "even"],
    "model.head_dim=258": ["model.head_dim", "256"],
    "model.num_experts=-1": ["model.num_experts", "0 for a dense model"],
    "model.num_experts=1": ["model.num_experts_per_tok = 2", "model.num_experts = 1"],
    "model.moe_intermediate_size=0": ["model.moe_intermediate_size", "above 0"],
    # mesh, on one device
    "mesh.data=2": ["mesh.data", "2 places", "1 devices"],
    "mesh.data=0": ["mesh", "at least 1"],
    "mesh.fsdp=-1": ["mesh", "at most one"],
    "mesh.tensor=2": ["mesh.tensor", "2 places", "1 devices"],
    "mesh.fsdp=2": ["mesh.fsdp", "2 places"],
    # task, reward, tokenizer
    "env.task=basic_arithmetics": ["env.task", "'basic_arithmetics'", "'basic_arithmetic'"],
    "env.task=zzzzzz": ["env.task", "'zzzzzz'", "reasoning_gym"],
    "env.task_options.min_terms=0": ["env.task_options", "min_terms"],
    "env.task_options.min_terms=3": ["env.task_options", "max_terms"],
    "env.task_options.min_terms=two": ["env.task_options.min_terms", "two"],
    "env.task_options.nope=3": ["env.task_options", "nope"],
    "env.task_options.a.b=3": ["env.task_options", "a.b"],
    "env.task_options.size=3": ["env.task_options", "size"],
    "env.task_options=3": ["env.task_options", "write"],
    "env.train_questions=100000": ["env.task", "100000", "'train'", "lower"],
    "env.reward=no_such_module:f": ["env.reward", "no_such_module", "PYTHONPATH"],
    "env.reward=math:nope": ["env.reward", "math", "nope"],
    "env.reward=exact_mach": ["env.reward", "exact_match", "'module:function'"],
    "env.reward=math": ["env.reward", "'module:function'"],
    "env.reward=:f": ["env.reward", "'module:function'"],
    "env.reward=math:pi": ["env.reward", "'math:pi'", "function"],
    "data.tokenizer=nope.json": ["data.tokenizer", "nope.json", "'byte'"],
    "data.tokenizer=tiny.py": ["data.tokenizer", "tiny.py"],
    # places that cannot be written
    "run.dir=tiny.py": ["run.dir", "tiny.py"],
    "run.dir=tiny.py/run": ["run.dir", "tiny.py/run"],
    "run.dir=/proc/run": ["run.dir", "/proc/run"],
    "run.dir=" + "x" * 300: ["run.dir", "xxx"],
    "run.cache_dir=tiny.py/cache": ["run.cache_dir", "tiny.py/cache"],
}


@pytest.mark.parametrize("field", _FIELDS, ids=lambda field: field[:40])
def test_field(field, refused_fields):
    """One field with a value that cannot work."""
    _assert_words(refused_fields(field), _FIELDS[field])


@pytest.mark.parametrize("path", [p for p, f in all_fields().items() if f.least is not None])
def test_field_below_its_least_value(path, refused_fields):
    """Every bound of the table is enforced, and stands in the sentence."""
    least = all_fields()[path].least
    _assert_words(refused_fields(f"{path}={least - 1}"), [path, f"at least {least}"])


@pytest.mark.parametrize("path", [p for p, f in all_fields().items() if f.choices])
def test_field_outside_its_choices(path, refused_fields):
    """A word that is none of the choices: all of them are named."""
    choices = all_fields()[path].choices
    _assert_words(refused_fields(f"{path}=perhaps"), [path, "'perhaps'", *choices])


# Several fields.

_TENSORWISE = ["precision.rollout=fp8_tensorwise", "precision.learner=fp8_tensorwise"]
_SEVERAL = {
    "group of one": (["rollout.group_size=1"], ["rollout.group_size", "at least 2"]),
    "group of one without std": (
        ["rollout.group_size=1", "algo.normalize_std=False"],
        ["rollout.group_size", "at least 2"],
    ),
    "tensorwise": (_TENSORWISE, ["fp8_tensorwise", "precision.zero_drift='report'"]),
    "tensorwise required": (
        [*_TENSORWISE, "precision.zero_drift=required"],
        ["fp8_tensorwise", "fp8_blockwise", "precision.zero_drift='report'"],
    ),
    "differing recipes required": (
        ["precision.learner=bf16", "precision.zero_drift=required"],
        ["precision.zero_drift", "fp8_blockwise", "bf16", "'report'"],
    ),
    "correction without log-probabilities": (
        ["algo.correction=tis", "algo.old_logprobs=rollout"],
        ["algo.correction", "algo.old_logprobs='auto'"],
    ),
    "cosine shorter than its warm-up": (
        ["sft.end_fraction=0.5", "sft.steps=10", "sft.warmup_steps=30"],
        ["sft.warmup_steps", "sft.steps"],
    ),
}


@pytest.mark.parametrize("case", _SEVERAL)
def test_fields_that_contradict(case, refused_fields):
    """Fields that are good one by one and do not fit together."""
    fields, words = _SEVERAL[case]
    _assert_words(refused_fields(*fields), words)


@pytest.mark.parametrize(
    "fields",
    [
        ["precision.learner=bf16"],
        [*_TENSORWISE, "precision.zero_drift=report"],
        ["precision.rollout=fp8", "precision.learner=fp8_blockwise"],
        ["rollout.max_prompt_tokens=20"],
        ["sft.steps=0", "sft.batch_size=9"],
    ],
)
def test_the_other_side_of_a_bound(fields):
    """What is just inside, or was asked to be reported only, is accepted."""
    assert _begins(*_train(*fields))


@pytest.mark.parametrize(
    "field",
    ["rollout.max_prompt_tokens=5", "rollout.max_new_tokens=1"],
)
def test_the_number_advised_is_enough(field, refused_fields):
    """Whoever writes the number of the sentence is not sent back with a larger one."""
    (number,) = re.findall(r"raise it to (\d+)", refused_fields(field))
    assert _begins(*_train(f"{field.split('=')[0]}={number}"))


def test_the_setting_advised_is_accepted(refused_fields):
    """The same for a sentence that offers a setting."""
    message = refused_fields("rollout.group_size=1")
    if "algo.normalize_std=False" in message:
        assert _begins(*_train("rollout.group_size=1", "algo.normalize_std=False")), message


# XLA flags.

_FAST = ["xla_cpu_enable_fast_math", "xla_gpu_enable_fast_min_max", "xla_cpu_enable_fast_min_max"]


@pytest.mark.parametrize("name", _FAST)
@pytest.mark.parametrize("value", ["=true", "=1", "=True", "", "= --xla_x=1", " --xla_x=false"])
def test_fast_math_is_refused(name, value, refused_fields, monkeypatch):
    """In every spelling that switches it on, wherever it stands in XLA_FLAGS."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=1 --{name}{value}")
    _assert_words(refused_fields(), ["XLA_FLAGS", f"--{name}", "remove", "zero_drift='report'"])


@pytest.mark.parametrize("name", _FAST)
@pytest.mark.parametrize("value", ["=false", "=0", "=False"])
def test_fast_math_switched_off_is_accepted(name, value, monkeypatch):
    """The flag may stand there if it says false, and other flags may always."""
    monkeypatch.setenv("XLA_FLAGS", f"--{name}{value} --xla_cpu_enable_fast_math_x=true")
    assert _begins(*_train())


def test_fast_math_is_accepted_without_the_promise(monkeypatch):
    """zero_drift='report' promises nothing, so nothing is refused."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert _begins(*_train("precision.zero_drift=report"))


# Rewards.


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (r"raise ValueError('one\ntwo')", ["ValueError", "one"]),
        ("def f(:", ["SyntaxError"]),
        ("import no_such_module_here", ["no_such_module_here"]),
        ("raise SystemExit(0)", ["SystemExit"]),
        ("f = 3", ["not a function"]),
        ("g = print", ["AttributeError"]),
    ],
)
def test_reward_module_that_fails(source, words, refused_fields, tmp_path, monkeypatch):
    """Whatever a user's module does while it is imported ends in one sentence."""
    (tmp_path / "my_reward.py").write_text(source + "\n")
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    try:
        _assert_words(refused_fields("env.reward=my_reward:f"), ["env.reward", "my_reward", *words])
    finally:
        sys.modules.pop("my_reward", None)


# Meshes.


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("rollout.prompts_per_step=2", ["rollout.prompts_per_step = 2", "4 devices", "multiple"]),
        ("learner.micro_batches=4", ["micro-batch", "= 2", "4 devices"]),
        ("sft.batch_size=6", ["sft.batch_size = 6", "4 devices"]),
        ("eval.batch_size=2", ["eval.batch_size = 2", "4 devices"]),
    ],
)
def test_batches_that_do_not_divide_over_devices(field, words):
    """Each batch must give every device the same number of rows."""
    sizes = ["rollout.prompts_per_step=4", "eval.batch_size=4", "sft.batch_size=4"]
    good = load_config("tiny.py", [f"--config.{s}" for s in sizes])
    checks.check_mesh(good, 4)
    bad = load_config("tiny.py", [f"--config.{s}" for s in (*sizes, field)])
    with pytest.raises(UserError) as error:
        checks.check_mesh(bad, 4)
    _assert_words(str(error.value), words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (["mesh.fsdp=3"], ["mesh.fsdp", "3 places", "4 devices"]),
        slow(["mesh.expert=4", "mesh.data=1"], ["mesh.expert", "dense"]),
        slow(
            ["mesh.expert=4", "mesh.data=1", "model.num_experts=6"],
            ["mesh.expert is 4", "model.num_experts = 6"],
        ),
    ],
)
def test_mesh_of_four_devices(fields, words, tmp_path):
    """A real process with four devices refuses meshes that do not fit them or the model."""
    arguments = ["eval", *_train("rollout.prompts_per_step=4", "eval.batch_size=4", *fields)[1:]]
    flags = "--xla_force_host_platform_device_count=4"
    process = _python(*arguments, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert process.returncode == 2, process.stderr
    assert re.fullmatch(r"error: [^\n]+\n", process.stderr)
    _assert_words(process.stderr, words)
    assert not (tmp_path / "run").exists()


# Room.


def test_too_little_room(refused_fields, monkeypatch, tmp_path):
    """The room that the checkpoints need is known before anything compiles."""
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    _assert_words(refused_fields(), ["run.dir", "room", "MB"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "_Run", _NoRun)
    _without_self_check(monkeypatch)
    assert _begins(*_train()), "after making room the same command does not start"


def test_write_that_finds_no_room(refused_fields, monkeypatch):
    """A full disk that shows when the first bytes are forced to it."""

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    _assert_words(refused_fields(), ["run", "no room is left", "run.dir"])


def test_full_file_system(refused, tmp_path):
    """The same on a real file system of 64 kB."""
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "small")]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root and the permission to mount")
    try:
        _assert_words(refused(*_train("run.dir=small/run")), ["small/run", "room", "run.dir"])
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


# Directories that hold a run.


@pytest.fixture(scope="module")
def made_run(tmp_path_factory) -> pathlib.Path:
    """A run directory with the checkpoint of an untrained state, and `../cache` with the same
    state as finished fine-tuning. Copied, never changed."""
    root = tmp_path_factory.mktemp("made")
    (root / "tiny.py").write_text(_CONFIG)
    places = [f"--config.run.dir={root / 'run'}", f"--config.run.cache_dir={root / 'cache'}"]
    config = load_config(str(root / "tiny.py"), places)
    runtime = make_runtime(config)
    directory = train.open_run(runtime, resume=False)
    optimizer, _ = optimizer_of_phase(config, "sft")
    state = runtime.new_state(runtime.init_params(), optimizer)
    logs = RunLogs(directory, None)
    checkpoints = Checkpoints(directory / "checkpoints", keep=2)
    checkpoints.save(1, state, {"phase": "sft", "step": 1, "offsets": logs.offsets()})
    checkpoints.close()
    logs.close()
    sft.save_cached(runtime, state, directory)
    return directory


@pytest.fixture
def run_dir(made_run, tmp_path) -> pathlib.Path:
    return shutil.copytree(made_run, tmp_path / "run")


def _biggest_array(run_dir: pathlib.Path) -> pathlib.Path:
    files = (run_dir / "checkpoints" / "1" / "state").rglob("d/*")
    return max(files, key=lambda path: path.stat().st_size)


def test_run_that_exists_needs_resume(refused_fields, run_dir):
    """A finished or broken run is never overwritten; --resume is offered, and works."""
    _assert_words(refused_fields(), ["run.dir", "run already holds", "--resume"])
    assert _begins(*_train(), "--resume")


def test_room_for_a_run_that_is_resumed(refused, run_dir, monkeypatch):
    """Two checkpoints of the three that may exist at a time are there: one must fit."""
    shutil.copytree(run_dir / "checkpoints" / "1", run_dir / "checkpoints" / "2")
    size = state_bytes(make_runtime(load_config("tiny.py")))
    usage = lambda free: lambda _: namedtuple("usage", "total used free")(10**9, 0, free)
    monkeypatch.setattr(shutil, "disk_usage", usage(size - 1))
    assert "room" in refused(*_train(), "--resume")
    monkeypatch.setattr(shutil, "disk_usage", usage(size))
    assert _begins(*_train(), "--resume")


@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize(
    ("field", "before", "now"),
    [
        ("optimizer.learning_rate=0.5", "0.0001", "0.5"),
        ("run.seed=9", "0", "9"),
        ("precision.rollout=bf16", "'fp8'", "'bf16'"),
        ("env.task_options.max_terms=3", "2", "3"),
    ],
)
def test_run_with_another_config(field, before, now, resume, refused, run_dir):
    """The field that differs is named with both values."""
    name = field.split("=")[0].replace(".max_terms", "")
    message = refused(*_train(field), *resume)
    _assert_words(message, ["run.dir", name, before, now, "--config.run.dir"])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": 3}', "\0\0"])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_run_with_a_damaged_config(content, resume, refused, run_dir):
    """A config.json that is cut or of another kind is the user's to fix, and is named."""
    (run_dir / "config.json").write_text(content)
    _assert_words(refused(*_train(), *resume), ["config.json"])


_DAMAGE = {
    "cut": lambda run: os.truncate(_biggest_array(run), 100),
    "deleted": lambda run: _biggest_array(run).unlink(),
    "metadata deleted": lambda run: (run / "checkpoints/1/meta/metadata").unlink(),
    "metadata emptied": lambda run: (run / "checkpoints/1/meta/metadata").write_text("{}"),
    "metadata null": lambda run: (run / "checkpoints/1/meta/metadata").write_text("null"),
    "metadata of a phase unknown": lambda run: _edit_meta(run, phase="other"),
    "offsets changed": lambda run: _edit_meta(run, offsets={"metrics": 99}),
}


def _edit_meta(run_dir: pathlib.Path, **changes) -> None:
    path = run_dir / "checkpoints" / "1" / "meta" / "metadata"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("damage", _DAMAGE)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_damaged_checkpoint(damage, command, run_dir, monkeypatch, capsys):
    """Neither resumed from nor evaluated; the sentence names the checkpoint."""
    monkeypatch.undo()
    monkeypatch.chdir(run_dir.parent)
    _without_self_check(monkeypatch)
    monkeypatch.setattr(train._Run, "_describe", _NoRun)  # the first thing after restoring
    monkeypatch.setattr(evaluate, "evaluate", _NoRun)
    _DAMAGE[damage](run_dir)
    arguments = [command, "--config", "tiny.py", *(["--resume"] if command == "train" else [])]
    assert cli.run(arguments) == 2
    error = capsys.readouterr().err
    errors = [line for line in error.splitlines() if not line.startswith("  ")]
    assert len(errors) == 1, error
    assert errors[0].startswith("error: ")
    assert "run" in errors[0] and ("checkpoints" in errors[0] or "metrics" in errors[0])


@pytest.mark.slow
def test_checkpoint_of_another_model(run_dir):
    """A process that resumes from a model of another width: one sentence, status 2."""
    (run_dir / "config.json").unlink()
    process = _python(*_train("model.hidden_size=64"), "--resume", JAX_PLATFORMS="cpu")
    assert process.returncode == 2, process.stderr
    assert re.fullmatch(r"error: [^\n]+\n", process.stderr), process.stderr
    assert "checkpoints" in process.stderr


def test_damaged_sft_cache(made_run, tmp_path, monkeypatch, capsys):
    """Another run.dir would meet the same cache again: the cache is named, to be deleted."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    _without_self_check(monkeypatch)
    monkeypatch.setattr(train, "run_sft", _NoRun)
    monkeypatch.setattr(train._Run, "_rl", _NoRun)
    cache = shutil.copytree(made_run.parent / "cache", tmp_path / "cache")
    assert _begins(*_train("run.dir=first"))
    assert "found in the cache" in "".join(capsys.readouterr()), "the cache is not used"

    files = (path for path in cache.rglob("ocdbt.process_0/d/*"))
    os.truncate(max(files, key=lambda path: path.stat().st_size), 10)
    assert cli.run(_train("run.dir=second")) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    _assert_words(message, ["error: ", str(cache), "delete"])
    assert "another run.dir" not in message


def test_report_of_a_damaged_run(run_dir, refused):
    """A run directory whose config.json is cut has no report."""
    (run_dir / "config.json").write_text("{")
    _assert_words(refused("report", "run"), ["config.json"])


def test_compared_run_that_is_missing(run_dir, refused):
    """The directory that cannot be compared is the one that is named."""
    _assert_words(refused("report", "run", "other"), ["other", "does not exist"])
