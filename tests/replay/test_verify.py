"""`fp8rl verify` names what is forged in a run, and accepts an honest one."""

from __future__ import annotations

import json
import shutil

import pytest

from fp8rl_jax import cli
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import strict_json
from fp8rl_jax.policy.provenance import file_digests
from fp8rl_jax.replay.verify import check_exported, check_records
from fp8rl_jax.training.digests import link, record_digest, rewards_digest
from fp8rl_jax.training.logs import read_jsonl

_IMPORT = "--allow-import=dense_reward"


def _lines(run, name, change):
    """Changes the lines of a log: ``change(lines)``."""
    path = run / f"{name}.jsonl"
    lines = read_jsonl(path)
    change(lines)
    path.write_text("".join(strict_json(line) + "\n" for line in lines))


def _value(name, step, **values):
    def change(lines):
        for line in lines:
            if line.get("step") == step and line.get("phase") != "sft":
                line |= values

    return lambda run: _lines(run, name, change)


def _chained(forge):
    """A forgery whose author has made digests and chain anew."""

    def chained(run):
        forge(run)
        records = {line["step"]: line for line in read_jsonl(run / "metrics.jsonl")}
        rewards = {line["step"]: line for line in read_jsonl(run / "rewards.jsonl")}

        def change(lines):
            previous = ""
            for line in lines:
                if "record" in line:
                    line["record"] = record_digest(records[line["step"]])
                    line["rewards"] = rewards_digest(rewards[line["step"]])
                line["chain"] = previous = link(previous, line)

        _lines(run, "digests", change)

    return chained


def _config(run):
    path = run / "config.json"
    config = json.loads(path.read_text())
    config["optimizer"]["learning_rate"] *= 2
    path.write_text(json.dumps(config))


def _checkpoint(number):
    def forge(run):
        files = [p for p in (run / "checkpoints" / str(number)).rglob("*") if p.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)

    return forge


def _swapped(run):
    """The checkpoint of one step under the number of another."""
    for number, other in (("12", "x"), ("14", "12"), ("x", "14")):
        (run / "checkpoints" / number).rename(run / "checkpoints" / other)


_RECORDS = {
    "a metric": (_value("metrics", 3, loss=0.0), "metrics.jsonl: RL step 3 is not"),
    "a metric of the last step": (_value("metrics", 6, reward_mean=1.0), "RL step 6 is not"),
    "rewards": (_value("rewards", 2, rewards=[[1.0] * 4] * 4), "rewards.jsonl: RL step 2 is not"),
    "a digest": (_value("digests", 4, tokens="0" * 16), "the line of rl step 4 is not the one"),
    "what it was made with": (_value("digests", 0, made_with={}), "the line of rl step 0 is not"),
    "a line left out": (lambda run: _lines(run, "digests", lambda x: x.pop(4)), "in order"),
    "a line twice": (lambda run: _lines(run, "digests", lambda x: x.append(x[-1])), "chain was"),
    "a metric left out": (lambda run: _lines(run, "metrics", lambda x: x.pop(1)), "RL step 2"),
    "the end left out": (lambda run: _lines(run, "digests", lambda x: x.pop()), "RL step 6 is not"),
    "a gap between": (_chained(lambda run: _lines(run, "digests", lambda x: x.pop(4))), "in order"),
}
_FILES = {
    "config.json": (_config, "config.optimizer.learning_rate is 0.0002 here, and the run was"),
    "a checkpoint": (_checkpoint(14), "is no complete checkpoint of this run"),
    "an older checkpoint": (_checkpoint(12), "is no complete checkpoint of this run"),
    "checkpoints swapped": (_swapped, "checkpoint 14: it holds the state after rl step 4"),
    "a state": (_chained(_value("digests", 6, state="0" * 16)), "checkpoint 14: its state is not"),
}
_STEPS = {
    "a metric, made anew": (_chained(_value("metrics", 6, loss=0.0)), "record differ"),
    "rewards, made anew": (_chained(_value("rewards", 5, rewards=[[1.0] * 4] * 4)), "rewards"),
    "tokens, made anew": (_chained(_value("digests", 6, tokens="0" * 16)), "tokens differ"),
    "prompts, made anew": (_chained(_value("digests", 5, prompts="0" * 16)), "prompts differ"),
    "a state, made anew": (_chained(_value("digests", 5, state="0" * 16)), "state differ"),
}


@pytest.fixture
def run(tiny_run, tmp_path):
    """A copy of an honest run."""
    shutil.copytree(tiny_run[0] / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", _RECORDS)
def test_forged_records(name, run):
    assert check_records(run) == []
    forge, said = _RECORDS[name]
    forge(run)
    assert said in " ".join(check_records(run))


def _verify(run, capsys, steps: int, seed: int = 0) -> tuple[int, str]:
    command = ["verify", str(run), f"--steps={steps}", f"--seed={seed}", _IMPORT]
    status = cli.run(command)
    return status, capsys.readouterr().out


def test_what_an_honest_run_has(run, capsys):
    status, out = _verify(run, capsys, 0)
    assert status == 0, out
    assert "intact: the chain, the records of 6 RL steps and the states of checkpoints" in out


def _content(name, **values):
    """Another file, or other values of provenance.json."""

    def forge(exported):
        path = exported / name
        if values:
            path.write_text(json.dumps(json.loads(path.read_text()) | values))
        else:
            path.write_bytes(path.read_bytes() + b" ")

    return forge


def _also_its_digest(exported):
    (exported / "config.json").write_text("{}")
    _content("provenance.json", files=file_digests(exported))(exported)


_EXPORTED = {
    "weights": (_content("model.safetensors"), "model.safetensors is not what the run's"),
    "a file and its digest": (_also_its_digest, "config.json is not what the run's checkpoint"),
    "a chain": (_content("provenance.json", chain="0" * 64), "its chain is not that of this run"),
    "a step": (_content("provenance.json", step=4), "its chain is not that of this run after rl s"),
    "a form": (
        _content("provenance.json", form={"dtype": "fp8", "average_last": 1, "checkpoint": 14}),
        "model.safetensors is not what",
    ),
}


def test_exported(run, tmp_path, capsys):
    """What `fp8rl convert` wrote of an honest run, and what is forged there."""
    exported = tmp_path / "exported"
    assert cli.run(["convert", str(run), str(exported), "--dtype=bf16", _IMPORT]) == 0
    (exported / "README.md").write_text("A model.")
    permitted = (_IMPORT.partition("=")[2],)
    wrong, compared = check_exported(run, exported, permitted)
    assert not wrong and "checkpoint 14, exported again; not of the run: README.md" in compared
    for name, (forge, said) in _EXPORTED.items():
        other = tmp_path / name
        shutil.copytree(exported, other)
        forge(other)
        assert said in " ".join(check_exported(run, other, permitted)[0]), name
    shutil.rmtree(run / "checkpoints" / "14")
    wrong, compared = check_exported(run, exported, permitted)
    assert not wrong and "its files with their digests only" in compared
    assert len(check_exported(run, tmp_path / "weights", permitted)[0]) == 1
    for values in ({"step": "6"}, {"files": []}, {"form": {"dtype": 8}}, {"more": 1}):
        shutil.copy(tmp_path / "weights" / "provenance.json", exported)
        _content("provenance.json", **values)(exported)
        with pytest.raises(UserError, match="which `fp8rl convert` of a run writes"):
            check_exported(run, exported, permitted)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*_FILES, *_STEPS])
def test_forged_run(name, run, capsys):
    """A forgery that is consistent is found by running the step again, others without."""
    forge, said = (_FILES | _STEPS)[name]
    forge(run)
    status, out = _verify(run, capsys, 6 if name in _STEPS else 0)
    assert status == 1 and said in out, out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_an_honest_run_again(run, capsys, seed):
    status, out = _verify(run, capsys, 2, seed)
    assert status == 0 and "equal, run again here: RL steps " in out, out
