"""Free-form options: whatever JSON holds, from a file, the command line and a run's config.json."""

from __future__ import annotations

import json

import ml_collections
import pytest
from helpers.tiny_run import CONFIG

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.json_file import plain
from fp8rl_jax.config import flatten, literal, load_config, saved_config, set_options
from fp8rl_jax.training.run_directory import as_saved, differences, read_saved_config

_VALUES = [
    [{"type": "function", "function": {"name": "f", "parameters": {"a.b": [{"c": None}]}}}],
    {"a.b": 1},
    {"__class__": 1},
    {"": {"x": [[{"y": 2}]]}},
    [[1, {"a": []}]],
    {"get": {"items": 1}},
    True,
    None,
    [False, None],
    "text",
]


@pytest.mark.parametrize("field", ["data.chat_options", "env.task_options"])
@pytest.mark.parametrize("value", _VALUES, ids=json.dumps)
def test_what_json_holds_is_kept(field, value, tmp_path):
    """As JSON and as Python, one option and the whole field, frozen, and by way of config.json."""
    for text in (json.dumps(value), repr(value)):
        whole = f"--config.{field}={{'old': 1, 'option': {text}}}"
        for arguments in ([f"--config.{field}.old=1", f"--config.{field}.option={text}"], [whole]):
            config = load_config(str(CONFIG), [f"--config.{field}={{}}", *arguments])
            frozen = ml_collections.FrozenConfigDict(config)
            expected = {"old": 1, "option": value}
            assert flatten(config)[field] == flatten(frozen)[field] == expected
    file = tmp_path / "config.json"
    file.write_text(json.dumps(as_saved(frozen)))
    again = saved_config(read_saved_config(file), str(file))
    assert flatten(again)[field] == expected
    assert not differences(read_saved_config(file), as_saved(frozen))
    assert hash(frozen) == hash(ml_collections.FrozenConfigDict(config))


def test_a_config_file_may_have_dicts_in_lists(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "import ml_collections\ndef get_config():\n    c = ml_collections.ConfigDict()\n"
        "    c.data = {'chat_options': {'tools': [{'a.b': {'c': [1]}}]}}\n    return c\n"
    )
    config = load_config(str(path), ["--config.data.chat_options.enable_thinking=false"])
    found = flatten(ml_collections.FrozenConfigDict(config))["data.chat_options"]
    assert found == {"tools": [{"a.b": {"c": [1]}}], "enable_thinking": False}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (".x={1: 2}", "the name 1 is no text"),
        (".x=[{'a': {None: 2}}]", "the name None is no text"),
        (".x={1, 2}", "set is not JSON"),
        (".x=" + "[" * 90 + "[" * 15 + "1" + "]" * 105, "nested too deeply"),
        (".__class__=1", "write names without dots"),
        ("={'__class__': 1}", "write names without dots"),
        ("={'a.b': 1}", "write names without dots"),
        ("={1: 2}", "write names without dots"),
        ("=3", "write a dict, or its options one by one"),
        (".a.b=1", "holds no dot"),
    ],
)
@pytest.mark.parametrize("field", ["data.chat_options", "env.task_options"])
def test_what_it_does_not_hold_is_refused(field, argument, words):
    with pytest.raises(UserError, match=f"^command line: {field}.*{words}"):
        load_config(str(CONFIG), [f"--config.{field}{argument}"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("false", False),
        ("null", None),
        ("True", True),
        ("[true, None]", [True, None]),
        ("{'a': [null, {\"b\": false}]}", {"a": [None, {"b": False}]}),
        ("'true'", "true"),
        ('"\\ud83d\\ude00"', "\U0001f600"),
        ("truely", "truely"),
        ("NaN", "NaN"),
        ("(1, 2)", (1, 2)),
        *((text, text) for text in ("-" * 5000, "a" + "+a" * 5000, "[" * 5000, "{[]: 1}")),
    ],
    ids=lambda x: str(x)[:20],
)
def test_literals(text, value):
    found = literal(text)
    assert found == value and type(found) is type(value)


def test_options_beside_a_policy_are_checked_alike():
    options = ml_collections.ConfigDict({"tools": 1}).lock()
    set_options(options, {"tools": [{"a.b": 1}]}, "--chat-options", "fp8rl sample")
    assert plain(options.to_dict()) == {"tools": [{"a.b": 1}]}
    with pytest.raises(UserError, match="--chat-options has the options '__class__'"):
        set_options(options, {"__class__": 1}, "--chat-options", "fp8rl sample")


@pytest.mark.parametrize(("top_p", "changed"), [(1.0, []), (0.9, ["algo.truncated_sampling"])])
def test_an_older_run_took_the_whole_vocabulary(top_p, changed):
    """A run of before `algo.truncated_sampling` is not resumed with another objective."""
    config = load_config(str(CONFIG), [f"--config.rollout.top_p={top_p}"])
    ours = as_saved(ml_collections.FrozenConfigDict(config))
    theirs = json.loads(json.dumps(ours))
    del theirs["algo"]["truncated_sampling"]
    assert list(differences(theirs, ours)) == changed
