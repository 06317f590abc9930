"""What a user gets wrong costs one sentence: exit status 2, nothing compiled, nothing written.

Each case runs the command line in this process, up to the point where a run would begin. The
sentence must hold the words given with the case: the place of the mistake and the way out.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple

import jax
import pytest
from marks import slow
from refusals import (
    REFUSALS,
    NoRun,
    assert_words,
    begins,
    python,
    train_command,
    without_self_check,
)

from fp8rl_jax import cli, train
from fp8rl_jax.base.bounds import BOUNDS
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli import main
from fp8rl_jax.config import all_fields, checks, load_config

pytestmark = REFUSALS

# The measure itself.


def test_a_good_config_begins():
    """The base of all cases is accepted, so each refusal is due to its own mistake."""
    assert begins(*train_command())


def test_compilations_are_counted(count_compilations):
    """The counter that every case relies on sees a compilation."""
    before = len(count_compilations)
    jax.jit(lambda x: x * 3 + 17)(1.0)
    assert len(count_compilations) > before


# Help.


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help(arguments, capsys):
    """Help is no error: status 0, on standard output, with every command's first word."""
    assert cli.run(arguments) == 0
    output, error = capsys.readouterr()
    assert error == ""
    assert_words(output, [f"    {command.split()[0]}" for command in main.COMMANDS])


@pytest.mark.parametrize("name", main.COMMANDS)
def test_help_of_a_command(name, capsys):
    """Its options and the commands below it; the rest may be wrong."""
    command = main.COMMANDS[name]
    assert cli.run([*name.split(), "junk", "--help"]) == 0
    output, error = capsys.readouterr()
    assert error == ""
    options = [names[0] for names, _ in command.arguments if names[0].startswith("-")]
    assert_words(output, [f"usage: fp8rl {name} ", *options])
    assert ("--help-config" in output) == command.config
    below = [other for other in main.COMMANDS if other.startswith(name + " ")]
    assert_words(output, [f"    {other.split()[1]}" for other in below])


@pytest.mark.parametrize("section", ["", "algo"])
def test_help_of_fields(section, capsys):
    """Every field with its default, or a section's; the values of closed sets."""
    assert cli.run(["train", "--help-config", *section.split(), "--junk"]) == 0
    output, error = capsys.readouterr()
    assert error == ""
    for path, field in all_fields().items():
        shown = section in ("", path.partition(".")[0])
        assert (f"--config.{path}=" in output) == shown
        assert not shown or all(choice in output for choice in field.choices)


def test_help_of_an_unknown_section(refused):
    assert_words(refused("train", "--help-config=alog"), ["alog", "did you mean algo?"])


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
        ["write --config.run.steps=3"],
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
    assert_words(refused(*arguments), words)
    assert not (tmp_path / "run").exists()


def test_exit_status_of_the_process():
    """What `run` returns is the status of the process, and the sentence its whole output."""
    process = python("train", "--config", "nope.py")
    assert process.returncode == 2
    assert process.stdout == ""
    assert re.fullmatch(r"fp8rl train: [^\n]*\nerror: [^\n]*nope\.py[^\n]*\n", process.stderr)
    process = python("train", "--help-config")
    assert process.returncode == 0
    assert "--config.rollout.group_size=" in process.stdout


def test_help_needs_no_jax():
    """Help, the version and mistakes in the words answer at once."""
    script = (
        "import sys\nfrom fp8rl_jax import cli\n"
        "assert [cli.run(a.split()) for a in sys.argv[1:]] == [0, 0, 0, 0, 2]\n"
        "assert not {'jax', 'numpy', 'flax', 'ml_collections'} & set(sys.modules)\n"
    )
    words = ["", "--version", "train --help", "study scale --help", "trian"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^fp8rl_jax \S+( \(\w+\))?, jax [\d.]+, Python [\d.]+$", done.stdout, re.M)
    assert "did you mean `fp8rl train`?" in done.stderr


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
        f"{_HEAD}    c.algo = dict(dynamic_sampling=1)\n    return c",
        ["algo.dynamic_sampling", "True or False"],
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
    assert_words(refused(*train_command(config="mine.py")), ["mine.py", *words])


# Single fields on the command line.

_FIELDS = {
    # names and types
    "rollout.group_sise=3": ["'rollout.group_sise'", "rollout.group_size"],
    "rolout.group_size=3": ["'rolout.group_size'", "rollout.group_size"],
    "trainer.x=3": ["'trainer.x'"],
    "rollout=3": ["rollout is a section", "--config.rollout.FIELD=VALUE"],
    "=3": ["command line"],
    "rollout.group_size": ["rollout.group_size", "no value"],
    "rollout.group_size=abc": ["rollout.group_size", "abc", "whole number"],
    "rollout.group_size=1.5": ["rollout.group_size", "1.5", "whole number"],
    "rollout.group_size=": ["rollout.group_size", "whole number"],
    "rollout.temperature=hot": ["rollout.temperature", "hot", "a number"],
    "algo.dynamic_sampling=maybe": ["algo.dynamic_sampling", "maybe", "True or False"],
    # precision
    "precision.rollout=fp9": ["precision.rollout", "'fp9'", "'fp8'"],
    "precision.learner=qqqqq": ["precision.learner", "'qqqqq'", "fp8_blockwise", "bf16"],
    "precision.rollout=": ["precision.rollout", "fp8_blockwise", "bf16"],
    # rollout
    "rollout.temperature=0": ["rollout.temperature", "from 1e-06 to 100"],
    "rollout.temperature=-1": ["rollout.temperature", "from 1e-06 to 100"],
    "rollout.temperature=nan": ["rollout.temperature"],
    "rollout.temperature=inf": ["rollout.temperature"],
    "rollout.temperature=1e9": ["rollout.temperature", "to 100"],
    "eval.temperature=101": ["eval.temperature", "to 100"],
    # numbers that float32 does not have
    "rollout.temperature=1e-40": ["rollout.temperature", "from 1e-06"],
    "rollout.top_p=1e-320": ["rollout.top_p", "0 in float32"],
    "algo.kl_coef=1e30": ["algo.kl_coef", "from 0 to 1000"],
    "optimizer.learning_rate=1e-45": ["optimizer.learning_rate", "0 in float32"],
    # sizes that no machine holds
    "rollout.group_size=100000000": ["rollout.group_size", "200,000,000", "GiB", "lower"],
    "rollout.max_new_tokens=1000000000": ["rollout.max_new_tokens = 1,000,000,000", "GiB"],
    "eval.batch_size=1000000000": ["eval.batch_size", "GiB", "lower"],
    "model.hidden_size=8388608": ["the train state", "GiB", "smaller model", "offload"],
    "rollout.top_p=0": ["rollout.top_p", "above 0, up to 1"],
    "rollout.top_p=1.01": ["rollout.top_p", "above 0, up to 1"],
    "rollout.top_p=nan": ["rollout.top_p", "above 0, up to 1"],
    "rollout.top_k=1000": ["rollout.top_k", "1000"],
    "rollout.max_prompt_tokens=5": ["rollout.max_prompt_tokens", "5", "raise it to", "Calculate"],
    "rollout.max_new_tokens=1": ["rollout.max_new_tokens", "raise it to"],
    # batches
    "learner.gradient_accumulation_steps=3": [
        "learner.gradient_accumulation_steps",
        "4",
        "3",
        "equal parts",
    ],
    "algo.num_minibatches=3": ["algo.num_minibatches", "4", "3", "equal parts"],
    "sft.batch_size=9": ["sft.batch_size", "9", "sft.questions", "8"],
    "rollout.prompts_per_step=9": ["rollout.prompts_per_step", "9", "env.train_questions", "8"],
    # numbers out of their range
    "optimizer.learning_rate=nan": ["optimizer.learning_rate"],
    "optimizer.learning_rate=inf": ["optimizer.learning_rate"],
    "model.rope_theta=nan": ["model.rope_theta"],
    "algo.clip_low=-0.1": ["algo.clip_low"],
    "algo.clip_high=-0.1": ["algo.clip_high"],
    "algo.preset=drgrpo": ["algo.preset", "'drgrpo'", "write one of grpo, dr_grpo"],
    "algo.preset=ppo": ["algo.preset", "for that loss write algo.loss=ppo"],
    "algo.loss=ppo(clip_low=-1)": ["algo.loss", "ppo(clip_low=-1)", "from 0 "],
    "algo.loss=sapo(0.0)": ["algo.loss", "sapo(tau_positive=0.0)", "above 0"],
    "algo.correction=icepop(3.0, 2.0)": ["algo.correction", "icepop(low=3.0)", "from 0 to 1"],
    "algo.loss=pop": ["algo.loss", "'pop'", "cispo"],
    "algo.loss=no_such_module:f": ["algo.loss", "no_such_module"],
    "algo.loss=os:getcwd": ["algo.loss", "'os:getcwd'", "(logp, old, advantages, mask)"],
    "algo.correction=tis(cap=0)": ["algo.correction", "tis(cap=0)", "from 1 to"],
    "algo.correction=tiss": ["algo.correction", "'tiss'", "seq_tis"],
    "algo.correction=os:getcwd": ["algo.correction", "'os:getcwd'", "(weights, keep)"],
    "algo.dual_clip=0.5": ["dual_clip", "0, or a number above 1"],
    "algo.overlong_buffer=5": ["algo.overlong_buffer", "5", "max_new_tokens", "4"],
    "precision.reference=fp9": ["precision.reference", "'fp9'", "'fp8'"],
    "run.loggers=wandbb": ["run.loggers", "'wandbb'", "tensorboard"],
    "optimizer.b1=1.5": ["optimizer.b1"],
    "optimizer.b2=-0.5": ["optimizer.b2"],
    "optimizer.weight_decay=-1": ["optimizer.weight_decay"],
    "sft.b2=1.5": ["sft.b2"],
    "sft.weight_decay=-1": ["sft.weight_decay"],
    "sft.end_fraction=-1": ["sft.end_fraction"],
    "run.seed=-1": ["run.seed"],
    # model
    "model.hidden_size=0": ["model.hidden_size", "from 1 to 16777216"],
    "model.num_hidden_layers=-1": ["model.num_hidden_layers", "from 1 "],
    "model.num_attention_heads=0": ["model.num_attention_heads", "from 1 "],
    "model.num_key_value_heads=3": ["model.num_key_value_heads", "multiple"],
    "model.head_dim=15": ["model.head_dim", "even"],
    "model.head_dim=258": ["model.head_dim", "256"],
    "model.num_experts=-1": ["model.num_experts", "from 0 "],
    "model.num_experts=1": ["model.num_experts_per_tok = 2", "model.num_experts = 1"],
    "model.moe_intermediate_size=0": ["model.moe_intermediate_size", "from 1 "],
    # mesh, on one device
    "mesh.data=2": ["mesh.data", "2 places", "1 devices"],
    "mesh.data=0": ["mesh", "-1, or a whole number from 1 "],
    "mesh.fsdp=-1": ["mesh", "at most one"],
    "mesh.tensor=2": ["mesh.tensor", "2 places", "1 devices"],
    "mesh.fsdp=2": ["mesh.fsdp", "2 places"],
    # task, reward, tokenizer
    "env.task=basic_arithmetics": ["env.task", "'basic_arithmetics'", "'basic_arithmetic'"],
    "env.task=zzzzzz": ["env.task", "'zzzzzz'", "reasoning_gym"],
    "env.task_options.min_terms=0": ["env.task_options", "min_terms"],
    f"env.task_options.min_terms={10**400}": ["env.task_options.min_terms", "401 digits", "2^53"],
    "env.task_options.operators=[1e999]": ["env.task_options.operators.0", "inf", "2^53"],
    "env.task_options.min_terms=3": ["env.task_options", "max_terms"],
    "env.task_options.min_terms=two": ["env.task_options.min_terms", "two"],
    "env.task_options.nope=3": ["env.task_options", "nope"],
    "env.task_options.a.b=3": ["env.task_options", "a.b"],
    "env.task_options.size=3": ["env.task_options", "size"],
    "env.task_options=3": ["env.task_options", "write"],
    "env.train_questions=100000": ["env.task", "100000", "'train'", "lower"],
    "env.reward=no_such_module:f": ["env.reward", "no_such_module", "PYTHONPATH"],
    "env.reward=no_such_package.module:f": ["env.reward", "no_such_package", "PYTHONPATH"],
    "env.reward=__main__:f": ["env.reward", "__main__"],
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
    assert_words(refused_fields(field), _FIELDS[field])


_NUMBERS = [p for p, f in all_fields().items() if type(f.default) in (int, float)]


def test_every_number_has_bounds():
    """A field without bounds, or bounds of nothing, cannot be added unnoticed."""
    sections = {name.split(".")[0] for name in all_fields()}
    of_fields = {name for name in BOUNDS if name.split(".")[0] in sections}
    assert of_fields == {*_NUMBERS, "model.vocab_size"}


@pytest.mark.parametrize("path", _NUMBERS)
def test_field_out_of_its_bounds(path, refused_fields):
    """Every bound of the table is enforced, and stands in the sentence; no size is a traceback."""
    bounds, whole = BOUNDS[path], isinstance(all_fields()[path].default, int)
    below = bounds.least - (not bounds.above)
    below -= below in bounds.also
    assert_words(refused_fields(f"{path}={below}"), [path, str(bounds)])
    config = load_config("tiny.py")
    for value in (
        [bounds.most + 1, 2**63, 10**400, -(10**400)]
        if whole
        else [bounds.most * 1.01, 1e39, math.inf, -math.inf, math.nan, 1e-320]
    ):
        section, _, name = path.partition(".")
        config[section][name] = value
        with pytest.raises(UserError, match=f"^{path} is .*; write .* (from|above) .*$"):
            checks.check_fields(config)


@pytest.mark.parametrize("path", [p for p, f in all_fields().items() if f.choices])
def test_field_outside_its_choices(path, refused_fields):
    """A word that is none of the choices: all of them are named."""
    choices = all_fields()[path].choices
    assert_words(refused_fields(f"{path}=perhaps"), [path, "'perhaps'", *choices])


# Several fields.

_TENSORWISE = ["precision.rollout=fp8_tensorwise", "precision.learner=fp8_tensorwise"]
_SEVERAL = {
    "an estimator that the reward does not take": (
        ["algo.kl_in=reward", "algo.kl_coef=0.1", "algo.kl_estimator=k2"],
        ["algo.kl_estimator", "'k2'", "'k1'", "algo.kl_in='loss'"],
    ),
    "a dual clip without ppo": (
        ["algo.dual_clip=3.0", "algo.loss=gspo"],
        ["algo.dual_clip", "'gspo'", "algo.loss='ppo'"],
    ),
    "a length that divides nothing": (
        ["algo.loss_length=7"],
        ["algo.loss_length", "'token_mean'", "'seq_mean_token_sum_norm'"],
    ),
    "more responses than numbers": (
        [
            "algo.dynamic_sampling=True",
            "algo.dynamic_sampling_rounds=10000",
            "rollout.prompts_per_step=1000",
            "rollout.group_size=1000",
        ],
        ["1,000,000 responses", "10,000 rounds", "lower"],
    ),
    "bands of llama3 in the wrong order": (
        ["model.rope_type=llama3", "model.rope_low_freq_factor=4"],
        ["model.rope_low_freq_factor", "4.0", "model.rope_high_freq_factor"],
    ),
    "turns of yarn in the wrong order": (
        ["model.rope_type=yarn", "model.rope_beta_slow=33"],
        ["model.rope_beta_fast", "model.rope_beta_slow = 33.0"],
    ),
    "group of one": (["rollout.group_size=1"], ["rollout.group_size", "at least 2"]),
    "group of one without std": (
        ["rollout.group_size=1", "algo.scale=none"],
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
    assert_words(refused_fields(*fields), words)


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
    assert begins(*train_command(*fields))


@pytest.mark.parametrize("field", ["rollout.max_prompt_tokens=5", "rollout.max_new_tokens=1"])
def test_the_number_advised_is_enough(field, refused_fields):
    """Whoever writes the number of the sentence is not sent back with a larger one."""
    (number,) = re.findall(r"raise it to (\d+)", refused_fields(field))
    assert begins(*train_command(f"{field.split('=')[0]}={number}"))


def test_the_setting_advised_is_accepted(refused_fields):
    """The same for a sentence that offers a setting."""
    message = refused_fields("rollout.group_size=1")
    assert "algo.preset='reinforce_pp'" in message
    assert begins(*train_command("rollout.group_size=1", "algo.preset=reinforce_pp"))


# XLA flags.

_FAST = ["xla_cpu_enable_fast_math", "xla_gpu_enable_fast_min_max", "xla_cpu_enable_fast_min_max"]


@pytest.mark.parametrize("name", _FAST)
@pytest.mark.parametrize("value", ["=true", "=1", "=True", "", "= --xla_x=1", " --xla_x=false"])
def test_fast_math_is_refused(name, value, refused_fields, monkeypatch):
    """In every spelling that switches it on, wherever it stands in XLA_FLAGS."""
    monkeypatch.setenv("XLA_FLAGS", f"--xla_force_host_platform_device_count=1 --{name}{value}")
    assert_words(refused_fields(), ["XLA_FLAGS", f"--{name}", "remove", "zero_drift='report'"])


@pytest.mark.parametrize("name", _FAST)
@pytest.mark.parametrize("value", ["=false", "=0", "=False"])
def test_fast_math_switched_off_is_accepted(name, value, monkeypatch):
    """The flag may stand there if it says false, and other flags may always."""
    monkeypatch.setenv("XLA_FLAGS", f"--{name}{value} --xla_cpu_enable_fast_math_x=true")
    assert begins(*train_command())


def test_fast_math_is_accepted_without_the_promise(monkeypatch):
    """zero_drift='report' promises nothing, so nothing is refused."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert begins(*train_command("precision.zero_drift=report"))


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
        assert_words(refused_fields("env.reward=my_reward:f"), ["env.reward", "my_reward", *words])
    finally:
        sys.modules.pop("my_reward", None)


# Meshes.


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("rollout.prompts_per_step=2", ["rollout.prompts_per_step = 2", "4 devices", "multiple"]),
        ("learner.gradient_accumulation_steps=4", ["micro-batch", "= 2", "4 devices"]),
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
    assert_words(str(error.value), words)


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
    arguments = [
        "eval",
        *train_command("rollout.prompts_per_step=4", "eval.batch_size=4", *fields)[1:],
    ]
    flags = "--xla_force_host_platform_device_count=4"
    process = python(*arguments, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert process.returncode == 2, process.stderr
    assert re.fullmatch(r"fp8rl eval: [^\n]+\nerror: [^\n]+\n", process.stderr)
    assert_words(process.stderr, words)
    assert not (tmp_path / "run").exists()


# Room.


def test_too_little_room(refused_fields, monkeypatch, tmp_path):
    """The room that the checkpoints need is known before anything compiles."""
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 5000, 5000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert_words(refused_fields(), ["run.dir", "room", "MB"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "Run", NoRun)
    without_self_check(monkeypatch)
    assert begins(*train_command()), "after making room the same command does not start"


def test_write_that_finds_no_room(refused_fields, monkeypatch):
    """A full disk that shows when the first bytes are forced to it."""

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert_words(refused_fields(), ["run", "no room is left", "run.dir"])


def test_full_file_system(refused, tmp_path):
    """The same on a real file system of 64 kB."""
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path / "small")]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root and the permission to mount")
    try:
        assert_words(refused(*train_command("run.dir=small/run")), ["small/run", "room", "run.dir"])
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)
