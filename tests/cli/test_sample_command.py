"""`fp8rl sample` and `fp8rl eval` of a directory by its name, a Hugging Face model's or a run's."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_checkpoint
from safetensors.numpy import load_file

from fp8rl_jax import cli
from fp8rl_jax.models.stacks import path_of
from fp8rl_jax.policy import generate, load, source
from fp8rl_jax.policy.load import load_trained, open_trained
from fp8rl_jax.rollout import Requests
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.runtime import make_runtime

_OPTIONS = "min_terms=2,max_terms=2,min_digits=1,max_digits=1,operators=['+', '-']"


@pytest.fixture(autouse=True)
def _reader(monkeypatch):
    tiny_checkpoint.record_loads(monkeypatch)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face directory."""
    return tiny_checkpoint.write(tmp_path_factory.mktemp("pretrained") / "model")


@pytest.fixture
def run_dir(tiny_run):
    """A finished run; its newest checkpoint is that of RL step 6."""
    return tiny_run[0] / "run"


def _run(capsys, *arguments: str) -> tuple[str, str]:
    capsys.readouterr()
    status = cli.run([str(a) for a in arguments])
    output, error = capsys.readouterr()
    assert status == 0, error
    return output, error


def _answers(output: str) -> dict[str, str]:
    """{prompt: text} of several prompts' output."""
    parts = re.split(r"^--- (.*)$", output, flags=re.M)[1:]
    return {eval(p): t[1:-1] for p, t in zip(parts[::2], parts[1::2], strict=True)}


_COMMON = ["--precision=f32", "--max-new-tokens=20", "--temperature=1", "--seed=3"]


def test_sample_is_the_sampler(model, capsys):
    """What is shown in pieces is the decoding of what the sampler of training draws."""
    prompts = ["the cat", "Calculate 3 + 4 and what is 12?", "漢字"]
    arguments = [*(f"--prompt={p}" for p in prompts), *_COMMON]
    output, error = _run(capsys, "sample", "--checkpoint", model, *arguments)
    assert re.search(r"\d+ prompt tokens in .* tokens/s", error)

    config = source.directory_config(str(model))
    config.rollout.max_new_tokens, config.run.seed = 20, 3
    config.precision.rollout = config.precision.learner = "f32"
    assert source.usual_temperature(config) == 0.0, "generation_config.json has no do_sample"
    policy = load.load_policy(make_runtime(config, with_questions=False), prompts)
    runtime, rows = policy.runtime, policy.rows
    tokens, lengths = load.pad(runtime, rows)
    ones = np.ones(3, np.float32)
    rollout = runtime.engine.make_sampler(1, 0, 1.0)(
        policy.weights,
        tokens,
        Requests(
            lengths,
            runtime.engine.keys["rollout"],
            np.arange(3, dtype=np.int32),
            ones,
            np.full(3, 20, np.int32),
            runtime.engine.rope,
        ),
    )
    rollout = jax.device_get(rollout)
    expected = runtime.decode(rollout.tokens, rollout.mask)
    pieces: dict[int, list[str]] = {row: [] for row in range(3)}
    ended: list[int] = []
    timing = generate.generate(
        policy,
        1.0,
        lambda row, text: pieces[row].append(text),
        lambda row, by_itself: ended.append(row),
    )
    assert len(set(expected)) == 3
    assert ["".join(texts) for texts in pieces.values()] == expected
    assert any(len([t for t in texts if t]) > 1 for texts in pieces.values()), pieces
    assert sorted(ended) == [0, 1, 2] and timing.prompt_tokens == sum(map(len, rows))
    assert list(_answers(output).items()) == list(zip(prompts, expected, strict=True))


def test_sample_chat_shows_the_conversation_to_the_model(model, capsys, monkeypatch):
    """--chat, --system and --chat-options make the prompt; the answer alone is printed."""
    seen = []
    monkeypatch.setattr(generate, "generate", lambda policy, *_: seen.append(policy))
    _run(
        capsys,
        "sample",
        "--checkpoint",
        model,
        "--prompt=hi",
        "--chat",
        "--system=be brief",
        '--chat-options=enable_thinking=false,list=[{"a.b": null}]',
        "--precision=f32",
    )
    (policy,) = seen
    text = policy.runtime.tokenizer._reader.decode(policy.rows[0], skip_special_tokens=False)
    assert text == (
        "<|turn|>system\nbe brief<|stop|>\n<|turn|>user\nhi<|stop|>\n<|turn|>assistant\n"
        "<think>\n\n</think>\n\n"
    )


def test_settings_of_the_released_model(model, tmp_path):
    """generation_config.json says how a model is sampled when nobody does."""
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    path = tiny_checkpoint.write(tmp_path / "other", generation_config=settings)
    config = source.directory_config(str(path))
    assert (config.rollout.top_k, config.rollout.top_p) == (20, 0.95)
    assert source.usual_temperature(config) == 0.6
    assert source.directory_config(str(model)).rollout.top_k == 0


@pytest.mark.slow
def test_sample_of_a_run_by_either_name(run_dir, tmp_path, capsys):
    """A run directory brings its configuration; a config file that names it gives the same."""
    question = "Calculate 4 + 5 + 6."
    output, error = _run(capsys, "sample", "--checkpoint", run_dir, "--seed=3", question)
    assert "weights of" in error and "rl step 6" in error
    (tmp_path / "c.py").write_text(
        "import ml_collections, json\n"
        f"def get_config(): return ml_collections.ConfigDict(json.load(open({str(run_dir)!r}"
        " + '/config.json')))\n"
    )
    other, _ = _run(capsys, "sample", "--config", tmp_path / "c.py", "--seed=3", question)
    assert other == output and len(output) > 1


def test_eval_of_a_model(model, capsys):
    """One line of JSON; the number of questions and the recipe are those asked for."""
    output, _ = _run(
        capsys,
        "eval",
        "--checkpoint",
        model,
        "--task=basic_arithmetic",
        f"--task-options={_OPTIONS}",
        "--questions=3",
        "--batch-size=2",
        "--chat",
        "--max-new-tokens=4",
        "--precision=f32",
    )
    (line,) = output.splitlines()
    record = json.loads(line)
    assert record["questions"] == 3 and record["precision"] == "f32"
    assert record["checkpoint"] == str(model) and record["task"] == "basic_arithmetic"
    assert 0 <= record["accuracy_greedy"] <= 1 and 0 < record["response_len_mean"] <= 4
    assert record["tokens_per_s_eval"] > 0


@pytest.mark.slow
def test_eval_of_a_run_is_its_own_evaluation(run_dir, capsys):
    """The same questions and random bits as at the newest checkpoint: the same accuracies."""
    allowed = "--allow-import=dense_reward"  # the run's own reward
    output, _ = _run(capsys, "eval", "--checkpoint", run_dir, allowed)
    record, last = json.loads(output), read_jsonl(run_dir / "eval.jsonl")[-1]
    for name in ("phase", "step", "accuracy_greedy", "accuracy_sampled", "response_len_mean"):
        assert record[name] == last[name], name


def test_run_by_its_directory(run_dir, capsys, monkeypatch):
    """A run directory brings its configuration; prompts are its questions, with a line feed."""
    seen = []
    monkeypatch.setattr(generate, "generate", lambda *given: seen.append(given))
    _, error = _run(capsys, "sample", "--checkpoint", run_dir, "1 + 1", "--max-new-tokens=9")
    assert "weights of" in error and "rl step 6" in error
    ((policy, temperature, *_),) = seen
    runtime = policy.runtime
    assert policy.rows == [[257, *b"1 + 1\n"]]
    assert temperature == runtime.config.rollout.temperature
    assert runtime.config.rollout.max_new_tokens == 9 and runtime.resolved.model.hidden_size == 128


@pytest.mark.slow
def test_sample_on_two_devices(model):
    """Rows that do not divide over the devices, and layers in parts: the text of one device."""
    shown = []
    arguments = ["sample", "--checkpoint", str(model), *_COMMON]
    arguments += ["--prompt=the cat", "--prompt=Calculate", "--prompt=on the mat"]
    for count, fields in ((1, []), (2, ["data=2"]), (2, ["data=1", "tensor=2"]), (2, ["fsdp=2"])):
        flags = f"--xla_force_host_platform_device_count={count}"
        paths = os.pathsep.join(sys.path)
        process = subprocess.run(
            [sys.executable, "-m", "fp8rl_jax.cli", *arguments]
            + [f"--config.mesh.{field}" for field in fields],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        assert process.returncode == 0, process.stderr
        shown.append(process.stdout)
    assert len(shown[0]) > 40 and set(shown) == {shown[0]}


# What cannot work.

_REFUSED = {
    "no such directory": (["sample", "--checkpoint=nope", "--prompt=x"], ["nope", "no directory"]),
    "no model": (["sample", "--checkpoint=empty", "--prompt=x"], ["empty", "no config.json"]),
    "no prompt": (["sample", "--checkpoint=model"], ["--prompt"]),
    "blank prompt": (["sample", "--checkpoint=model", "--prompt="], ["prompt", "no token"]),
    "config as well": (
        ["sample", "--checkpoint=model", "--config=c.py", "--prompt=x"],
        ["--config", "--checkpoint", "leave one out"],
    ),
    "no policy": (["sample", "--prompt=x"], ["--config", "--checkpoint"]),
    "system without chat": (
        ["sample", "--checkpoint=model", "--prompt=x", "--system=y"],
        ["--system", "--chat"],
    ),
    "chat without a template": (
        ["sample", "--checkpoint=plain", "--prompt=x", "--chat"],
        ["data.chat", "no chat template"],
    ),
    "options that are none": (
        ["sample", "--checkpoint=model", "--prompt=x", "--chat", "--chat-options=3"],
        ["--chat-options", "NAME=VALUE"],
    ),
    "temperature": (
        ["sample", "--checkpoint=model", "--prompt=x", "--temperature=-1"],
        ["--temperature", "above 0"],
    ),
    "no new tokens": (
        ["sample", "--checkpoint=model", "--prompt=x", "--max-new-tokens=0"],
        ["rollout.max_new_tokens", "from 1 to"],
    ),
    "too many tokens": (
        ["sample", "--checkpoint=model", "--prompt=the cat", "--max-new-tokens=128"],
        ["128 positions", "max_new_tokens"],
    ),
    "top-k": (
        ["sample", "--checkpoint=model", "--prompt=x", "--top-k=100000"],
        ["rollout.top_k", "100000", "vocabulary"],
    ),
    "precision": (
        ["sample", "--checkpoint=model", "--prompt=x", "--precision=fp9"],
        ["fp9", "'fp8'"],
    ),
    "a tokenizer too large": (
        ["sample", "--checkpoint=small", "--prompt=x"],
        ["data.tokenizer", "vocabulary has 100"],
    ),
    "a damaged tokenizer": (["sample", "--checkpoint=damaged", "--prompt=x"], ["tokenizer.json"]),
    "no task": (["eval", "--checkpoint=model"], ["--task"]),
    "unknown task": (["eval", "--checkpoint=model", "--task=zzz"], ["env.task", "zzz"]),
    "task options": (
        ["eval", "--checkpoint=model", "--task=basic_arithmetic", "--task-options=nope=3"],
        ["env.task_options", "nope"],
    ),
    "eval of nothing": (["eval", "--task=basic_arithmetic"], ["--config", "--checkpoint"]),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_refused(case, model, tmp_path, monkeypatch, capsys):
    """One sentence, status 2, before weights are read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    shutil.copytree(model, "model")
    tiny_checkpoint.write(tmp_path / "plain", tokenizer_config={"chat_template": None})
    tiny_checkpoint.write(tmp_path / "small", config={"vocab_size": 100})
    (tiny_checkpoint.write(tmp_path / "damaged") / "tokenizer.json").write_text("{}")
    arguments, words = _REFUSED[case]
    assert cli.run(arguments) == 2
    output, error = capsys.readouterr()
    assert output == "" and re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error, error
    assert tiny_checkpoint.LOADED == []


@pytest.mark.parametrize("task", ["rows.jsonl", "./rows.jsonl"])
def test_eval_of_a_runs_own_file_asks_what_it_has_held_out(task, tmp_path, monkeypatch):
    """Another file is asked completely; the run's own is not: it was trained on most of it."""
    from fp8rl_jax.cli import main, sample_eval, tree
    from fp8rl_jax.config import default_config
    from fp8rl_jax.policy import source

    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "others.jsonl"):
        (tmp_path / name).write_text("")
    config = default_config()
    config.env.task = str(tmp_path / "rows.jsonl")
    monkeypatch.setattr(source, "directory_config", lambda *_: config)
    monkeypatch.setattr(source, "is_released", lambda _: False)
    monkeypatch.setattr(sample_eval, "keep_programs", lambda _: None)
    parser = tree.parser(main.COMMANDS)[1]["eval"]
    words = ["--checkpoint=.", f"--task={task}", "--task-options=x=1"]
    values = main.COMMANDS["eval"].parse(parser, words)
    env = sample_eval._policy_config("eval", values).env
    assert env.eval_task == "" and env.task_options.to_dict() == {"x": 1}
    values = main.COMMANDS["eval"].parse(parser, ["--checkpoint=.", "--task=others.jsonl"])
    assert sample_eval._policy_config("eval", values).env.eval_task == "others.jsonl"


def test_mean_of_checkpoints(run_dir, tmp_path, capsys):
    """Every command that reads a run takes the mean of its newest checkpoints: those of steps 4
    and 6."""
    config = source.directory_config(str(run_dir))
    one, two = (open_trained(make_runtime(config, False), run_dir) for _ in range(2))
    reads = [
        found.checkpoints.read_params(number, found.like)
        for found, number in ((one, one.checkpoints.newest(2)[0]), (two, two.numbers[-1]))
    ]
    runtime, said = make_runtime(config, False), []
    state, phase = load_trained(runtime, run_dir, said.append, 2)
    assert (phase, int(state.step), state.scaling_state) == ("rl", 6, {})
    assert said == [f"weights of {run_dir}, the mean of 2 checkpoints, the last after rl step 6"]
    differ = 0
    for keys, found in jax.tree_util.tree_leaves_with_path(state.params):
        before, last = (read(path_of(keys)).astype(np.float64) for read in reads)
        np.testing.assert_array_equal(found, ((before + last) / 2).astype(np.float32))
        differ += (before != last).sum()
    assert differ > 1000
    _run(capsys, "convert", run_dir, tmp_path / "out", "--dtype=bf16", "--average-last=2")
    table = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    mean = (reads[0](("norm", "weight")) + reads[1](("norm", "weight"))) / 2
    np.testing.assert_array_equal(table, mean.astype(ml_dtypes.bfloat16))
    more = ["convert", str(run_dir), str(tmp_path / "x"), "--dtype=bf16", "--average-last=3"]
    assert cli.run(more) == 2
    assert "eval.average_last is 3, and run.keep_checkpoints keeps 2" in capsys.readouterr().err
