"""What a run records of its surroundings, and what a resumption says of changes."""

from __future__ import annotations

import datetime
import json

import jax
import pytest
from tiny_run import CONFIG, overrides

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.training.environment import (
    begun,
    check_environment,
    check_process,
    environment,
    keep_environment,
)


@pytest.fixture
def config(tmp_path, monkeypatch):
    (tmp_path / "environment_rewards.py").write_text("def one(*arguments):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return load_config(
        str(CONFIG), overrides(tmp_path, **{"env.reward": "environment_rewards:one"})
    )


def test_nothing_has_changed(config, tmp_path):
    """A new run and one in the same place: no word; an entry for each start."""
    assert check_environment(tmp_path, environment(config)) is None
    keep_environment(tmp_path, environment(config))
    assert check_environment(tmp_path, environment(config)) is None
    keep_environment(tmp_path, environment(config))
    starts = json.loads((tmp_path / "environment.json").read_text())
    assert len(starts) == 2
    assert starts[0]["versions"]["jax"] == jax.__version__
    assert [path.endswith("environment_rewards.py") for path in starts[0]["functions"]] == [True]
    assert begun(tmp_path) == datetime.datetime.fromisoformat(starts[0]["started"])


def test_changes_are_named(config, tmp_path):
    """Another version of a library, another device, and a reward that was edited."""
    keep_environment(tmp_path, environment(config))
    path = tmp_path / "environment.json"
    (start,) = json.loads(path.read_text())
    start["versions"]["jax"] = "0.1"
    start["devices"]["kind"] = "H100"
    path.write_text(json.dumps([start]))
    (tmp_path / "environment_rewards.py").write_text("def one(*arguments):\n    return 2.0\n")
    line = check_environment(tmp_path, environment(config))
    assert line is not None
    assert f"jax was 0.1, is {jax.__version__}; kind was H100, is cpu; /" in line
    assert "environment_rewards.py has changed; bits may differ" in line


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "[3]", '[{"versions": 7}]', "\0"])
def test_a_damaged_record_stops_nothing(config, tmp_path, content):
    (tmp_path / "environment.json").write_text(content)
    assert check_environment(tmp_path, environment(config)) is None
    assert isinstance(begun(tmp_path), datetime.datetime)
    keep_environment(tmp_path, environment(config))


def test_another_tokenizer_is_refused(config, tmp_path, monkeypatch):
    file = tmp_path / "tokenizer.json"
    file.write_text("one")
    monkeypatch.setattr("fp8rl_jax.training.environment.tokenizer_files", lambda *names: [file])
    keep_environment(tmp_path, environment(config))
    file.write_text("another")
    with pytest.raises(UserError, match=r"data.tokenizer: .*tokenizer\.json has changed since"):
        check_environment(tmp_path, environment(config))


def test_float64_is_refused():
    check_process()
    with jax.enable_x64(True), pytest.raises(UserError, match="JAX_ENABLE_X64 is on"):
        check_process()
