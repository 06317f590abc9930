"""Config files are found by path or by name, and may build on each other."""

from __future__ import annotations

import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.config.files import packaged, read_config_file


def test_configs_of_the_package_by_name(tmp_path, monkeypatch):
    """Anywhere, with a case too; a file of that name comes first."""
    monkeypatch.chdir(tmp_path)
    assert {"tiny_arithmetic", "qwen3_8b"} <= set(packaged())
    assert load_config("tiny_arithmetic").run.dir == "runs/tiny_arithmetic"
    assert load_config("tiny_arithmetic:case1").precision.learner == "bf16"
    head = "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict("
    (tmp_path / "tiny_arithmetic").write_text("")
    (tmp_path / "own.py").write_text(head + "{'run': {'dir': 'mine'}})\n")
    assert load_config("own.py").run.dir == "mine"
    with pytest.raises(UserError, match=r"no Python file"):
        read_config_file("tiny_arithmetic")


@pytest.mark.parametrize(
    "line",
    [
        "from fp8rl_jax.configs.tiny_arithmetic import get_config as base",
        "from beside import get_config as base",
        "from here import get_config as base",
    ],
)
def test_a_config_builds_on_another(line, tmp_path, monkeypatch):
    """One of the package, one beside it, one in the current directory."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    head = "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict("
    for path in (tmp_path / "configs" / "beside.py", tmp_path / "cwd" / "here.py"):
        path.write_text(head + "{'sft': {'steps': 400}})\n")
    text = f"{line}\ndef get_config():\n    c = base()\n    c.run = {{'steps': 7}}\n    return c\n"
    (tmp_path / "configs" / "mine.py").write_text(text)
    config = load_config(str(tmp_path / "configs" / "mine.py"))
    assert config.run.steps == 7 and config.sft.steps == 400


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("configs/tiny_arithmetic.py", "write --config tiny_arithmetic"),
        ("tiny_arithmetc", "write --config tiny_arithmetic"),
        ("nope.py", "name a config of your own"),
        ("tiny_arithmetic:case9", "no precision case 'case9'"),
    ],
)
def test_what_is_no_config(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        read_config_file(path)
