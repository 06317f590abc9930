"""Config files that cannot be read or say something unknown: one sentence with the path."""

from __future__ import annotations

import pytest
from refusals import REFUSALS, assert_words, train_command

pytestmark = REFUSALS

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
}


@pytest.mark.parametrize("case", _FILE)
def test_config_file(case, refused, tmp_path):
    """A file that cannot be read or says something unknown; its path is in the sentence."""
    source, words = _FILE[case]
    (tmp_path / "mine.py").write_text(source + "\n")
    assert_words(refused(*train_command(config="mine.py")), ["mine.py", *words])
