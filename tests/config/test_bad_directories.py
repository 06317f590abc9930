"""Run directories that cannot be used cost one sentence: runs that exist, damaged checkpoints and
caches, no room on the disk. The manner of the refusals is asserted by helpers/refusals.py."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import shutil
import sys
from collections import namedtuple

import jax
import pytest
from refusals import (
    CONFIG,
    REFUSALS,
    NoRun,
    assert_words,
    begins,
    python,
    train_command,
    without_self_check,
)

from fp8rl_jax import cli, train
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.policy import evaluate
from fp8rl_jax.training import run_directory, sft
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.environment import environment
from fp8rl_jax.training.logs import RunLogs
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.run_directory import no_room
from fp8rl_jax.training.runtime import make_runtime

pytestmark = REFUSALS


@pytest.fixture(scope="module")
def made_run(tmp_path_factory) -> pathlib.Path:
    """A run directory with the checkpoint of an untrained state, and `../cache` with the same
    state as finished fine-tuning. Copied, never changed."""
    root = tmp_path_factory.mktemp("made")
    (root / "tiny.py").write_text(CONFIG)
    places = [f"--config.run.dir={root / 'run'}", f"--config.run.cache_dir={root / 'cache'}"]
    config = load_config(str(root / "tiny.py"), places)
    runtime = make_runtime(config)
    run_directory.open_run(runtime.resolved, "", environment(runtime.config))
    directory = pathlib.Path(config.run.dir)
    optimizer = optimizer_of_phase(config, "sft")
    state = runtime.engine.new_state(runtime.engine.init_params(), optimizer)
    logs = RunLogs(directory, None, config)
    checkpoints = Checkpoints(directory / "checkpoints", keep=2)
    checkpoints.save(1, state, {"phase": "sft", "step": 1, "offsets": logs.offsets()})
    checkpoints.close()
    logs.close()
    sft.save_cached(runtime, state, directory)
    return directory


@pytest.fixture
def run_dir(made_run, tmp_path) -> pathlib.Path:
    return shutil.copytree(made_run, tmp_path / "run")


def _checkpoint_bytes() -> int:
    """Parameters and two moments of tiny.py's model, float32."""
    shapes = make_runtime(load_config("tiny.py")).layout.param_shapes
    return 3 * sum(4 * x.size for x in jax.tree.leaves(shapes))


def _biggest_array(run_dir: pathlib.Path) -> pathlib.Path:
    files = (run_dir / "checkpoints" / "1" / "state").rglob("d/*")
    return max(files, key=lambda path: path.stat().st_size)


def test_run_that_exists_needs_resume(refused_fields, run_dir):
    """A finished or broken run is never overwritten; --resume is offered, and works."""
    assert_words(refused_fields(), ["run.dir", "run already holds", "--resume"])
    assert begins(*train_command(), "--resume")


def test_a_run_without_its_config(refused_fields, run_dir, capsys):
    """Goes on from its checkpoints with what the command line says, and a warning."""
    (run_dir / "config.json").unlink()
    assert_words(refused_fields(), ["run.dir", "no config.json", "checkpoints", "add --resume"])
    capsys.readouterr()
    assert begins(*train_command(), "--resume")
    said = capsys.readouterr().out
    assert "config.json is gone" in said and said.count("config.json") == 1
    assert (run_dir / "config.json").exists()


def test_a_run_that_does_not_exist(refused, run_dir):
    """A name with an error is no new run, unless the command is for unattended starts."""
    message = refused(*train_command("run.dir=rum"), "--resume")
    assert_words(message, ["rum does not exist", "did you mean 'run'", "--auto-resume"])
    assert not (run_dir.parent / "rum").exists()
    assert begins(*train_command("run.dir=rum"), "--auto-resume")
    assert begins(*train_command(), "--auto-resume")


def test_loggers_are_no_part_of_a_run(run_dir):
    """A service that is gone, or another project, does not hold up a resumption."""
    assert begins(*train_command("run.loggers=", "run.project=other"), "--resume")


def test_a_digest_that_is_no_file(run_dir):
    """Nothing is waited for."""
    os.mkfifo(run_dir / "data.sha256")
    with pytest.raises(UserError, match=r"data.sha256 cannot be read \(it is no regular file\)"):
        run_directory._check_unchanged(run_dir, "digest")


def test_room_for_a_run_that_is_resumed(refused, run_dir, monkeypatch):
    """Two checkpoints of the three that may exist at a time are there: one must fit."""
    shutil.copytree(run_dir / "checkpoints" / "1", run_dir / "checkpoints" / "2")
    size = _checkpoint_bytes()
    usage = lambda free: lambda _: namedtuple("usage", "total used free")(10**9, 0, free)
    monkeypatch.setattr(shutil, "disk_usage", usage(size - 1))
    assert "room" in refused(*train_command(), "--resume")
    monkeypatch.setattr(shutil, "disk_usage", usage(size))
    assert begins(*train_command(), "--resume")


def test_room_for_the_checkpoints_that_are_still_to_come(refused, run_dir, monkeypatch):
    """A run that keeps many checkpoints needs room for no more than it will write: here those
    before RL, and after its only step."""
    size = _checkpoint_bytes()
    usage = lambda free: lambda _: namedtuple("usage", "total used free")(10**9, 0, free)
    many = train_command("run.keep_checkpoints=16")
    monkeypatch.setattr(shutil, "disk_usage", usage(2 * size - 1))
    assert "room" in refused(*many, "--resume")
    monkeypatch.setattr(shutil, "disk_usage", usage(2 * size))
    assert begins(*many, "--resume")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ["no room is left", "free some"]),
        (errno.EACCES, ["may not be written", "permissions"]),
        (errno.EROFS, ["read-only", "writable"]),
        (errno.ENAMETOOLONG, ["too long", "set run.dir elsewhere"]),
        (errno.ENOTDIR, ["a part of the name is a file"]),
        (errno.EMFILE, ["too many files are open", "`ulimit -n`", "raise that limit"]),
        (errno.EIO, ["Input/output error", "set run.dir elsewhere"]),
    ],
)
def test_the_remedy_follows_from_the_cause(number, words):
    """Room is to be freed only where room is what is missing."""
    message = str(no_room(pathlib.Path("here"), OSError(number, os.strerror(number))))
    assert_words(message, words)
    assert ("free some" in message) == (number == errno.ENOSPC)


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
    message = refused(*train_command(field), *resume)
    assert_words(message, ["run.dir", name, before, now, "--config.run.dir"])


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": 3}', "\0\0"])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_run_with_a_damaged_config(content, resume, refused, run_dir):
    """A config.json that is cut or of another kind is the user's to fix, and is named."""
    (run_dir / "config.json").write_text(content)
    way_on = ["move it away"] if resume else []
    assert_words(refused(*train_command(), *resume), ["config.json", *way_on])


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
    without_self_check(monkeypatch)
    monkeypatch.setattr(train, "_describe", NoRun)  # the first thing after restoring
    monkeypatch.setattr(evaluate, "evaluate", NoRun)
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
    process = python(*train_command("model.hidden_size=64"), "--resume", JAX_PLATFORMS="cpu")
    assert process.returncode == 2, process.stderr
    said = r"fp8rl train: [^\n]+\nerror: [^\n]+\n"
    assert re.fullmatch(said, process.stderr), process.stderr
    assert "checkpoints" in process.stderr


def test_damaged_sft_cache(made_run, tmp_path, monkeypatch, capsys):
    """A cache is made again: the run warns, and the next one finds no damage."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    without_self_check(monkeypatch)
    monkeypatch.setattr(train, "run_sft", NoRun)
    monkeypatch.setattr(train, "run_rl", NoRun)
    cache = shutil.copytree(made_run.parent / "cache", tmp_path / "cache")
    assert begins(*train_command("run.dir=first"))
    assert "found in the cache" in "".join(capsys.readouterr()), "the cache is not used"

    files = (path for path in cache.rglob("ocdbt.process_0/d/*"))
    os.truncate(max(files, key=lambda path: path.stat().st_size), 10)
    assert begins(*train_command("run.dir=second")), "it fine-tunes"
    said = "".join(capsys.readouterr())
    assert "warning: the cached fine-tuning cannot be used" in said and str(cache) in said
    assert not list(cache.glob("sft-*"))


def test_report_of_a_damaged_run(run_dir, refused):
    """A run directory whose config.json is cut has no report."""
    (run_dir / "config.json").write_text("{")
    assert_words(refused("report", "run"), ["config.json"])


def test_compared_run_that_is_missing(run_dir, refused):
    """The directory that cannot be compared is the one that is named."""
    assert_words(refused("report", "run", "other"), ["other", "does not exist"])


@pytest.mark.parametrize("name", ["environment.json", "report.html", "data.sha256", "model.json"])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_directory_in_the_place_of_a_file(name, resume, run_dir, refused):
    """It is named before the run begins, and not when all is done."""
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    message = refused(*train_command(), *resume)
    assert_words(message, ["run.dir", f"{run_dir / name} is no file", "move it away"])


def test_a_file_in_the_place_of_a_directory(run_dir, refused):
    shutil.rmtree(run_dir / "checkpoints")
    (run_dir / "checkpoints").write_text("precious")
    message = refused(*train_command(), "--resume")
    assert_words(message, ["run.dir", f"{run_dir / 'checkpoints'} is no directory", "move it away"])


def test_functions_that_change_the_directory(tmp_path, monkeypatch):
    """A relative run.dir is one of the directory in which the command began."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "Run", NoRun)
    without_self_check(monkeypatch)
    (tmp_path / "tiny.py").write_text(CONFIG)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a_loss_that_goes_away.py").write_text(
        "import os\nos.chdir('elsewhere')\ndef f(logp, old, advantages, mask): return logp, {}\n"
    )
    assert begins(*train_command("algo.loss=a_loss_that_goes_away:f"))
    assert (tmp_path / "run" / "environment.json").is_file()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_functions_in_the_current_directory(tmp_path, monkeypatch):
    """A reward in a package there is found and recorded, where Python does not look by itself."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(train, "Run", NoRun)
    without_self_check(monkeypatch)
    (tmp_path / "tiny.py").write_text(CONFIG)
    (tmp_path / "own_rewards").mkdir()
    (tmp_path / "own_rewards" / "__init__.py").touch()
    code = "def score(response, answer): return 1.0\n"
    (tmp_path / "own_rewards" / "scores.py").write_text(code)
    assert begins(*train_command("env.reward=own_rewards.scores:score"))
    (start,) = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [pathlib.Path(name).name for name in start["functions"]] == ["scores.py"]
