"""The table of fields: each row is complete, and each field refuses what it cannot have."""

from __future__ import annotations

import dataclasses
import math

import ml_collections
import pytest
from helpers.tiny_run import CONFIG
from refusals import REFUSALS, assert_words

from fp8rl_jax.api.fields import path_of
from fp8rl_jax.base.bounds import BOUNDS
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import (
    FIELDS,
    all_fields,
    checks,
    default_config,
    describe_fields,
    flatten,
    load_config,
    override,
    saved_config,
)
from fp8rl_jax.config.fields import REMOVED
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.training.run_directory import differences

pytestmark = REFUSALS
_FIELDS = all_fields()

# Text fields that take any text (other checks read them); a field that loses its choices is none.
_TEXTS = {
    "run": "dir cache_dir compilation_cache loggers project",
    "model": "checkpoint",
    "precision": "rollout learner weight_policy activation_policy gradient_policy reference "
    "bf16_modules kv_cache",
    "data": "tokenizer system_prompt bos_token eos_token pad_token",
    "env": "task reward step tools observation_role question_key answer_key answer_pattern "
    "prompt_template eval_task",
    "algo": "loss loss_aggregation teacher correction",
    "lora": "modules checkpoint",
}
_KIND = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}
# Values of another type, in a file and on the command line.
_IN_A_FILE = {
    bool: (1, "True", None),
    int: (True, 4.0, "4", None, [4]),
    float: (False, "1.0", None),
    str: (8, None, ["a"], {"a": "b"}),
    ml_collections.ConfigDict: (3, "min_terms", None),
}
_ON_THE_LINE = {
    bool: ("perhaps", "2", ""),
    int: ("four", "4.5", "True", ""),
    float: ("hot", ""),
    str: (),
    ml_collections.ConfigDict: ("3", ""),
}


def _refusal(act, *arguments) -> str:
    """The one sentence with which `act(*arguments)` is refused."""
    with pytest.raises(UserError) as refusal:
        act(*arguments)
    message = str(refusal.value)
    assert "\n" not in message and len(message) < 1000
    return message


def _set(path: str, value) -> ml_collections.ConfigDict:
    config = default_config()
    section, _, name = path.partition(".")
    config[section][name] = value
    return config


def _wrong(field) -> list:
    """Values of a field's type that it cannot have, just outside its bounds and far outside."""
    if field.is_free:
        return [ml_collections.ConfigDict({"a": [10**400]})]
    if field.choices:
        return ["perhaps"]
    if field.bounds is None:
        return [""] if field.is_path and field.default else []
    below = field.bounds.least - (not field.bounds.above)
    below -= below in field.bounds.also
    if isinstance(field.default, int):
        return [below, field.bounds.most + 1, 2**63, 10**400, -(10**400)]
    above = [field.bounds.most * 1.01, 1e39, math.inf]
    return [float(below), *above, -math.inf, math.nan, 1e-320]


@pytest.mark.parametrize("section", FIELDS)
def test_every_field_refuses_what_it_cannot_have(section, tmp_path):
    """Another type, no number in its bounds, no choice: the sentence names field and remedy."""
    path = tmp_path / "config.py"
    for name, field in FIELDS[section].items():
        full, kind = f"{section}.{name}", type(field.default)
        for value in _IN_A_FILE[kind]:
            path.write_text(
                "import ml_collections\ndef get_config(): return ml_collections.ConfigDict("
                f"{{{section!r}: {{{name!r}: {value!r}}}}})\n"
            )
            message = _refusal(load_config, str(path))
            assert_words(message, [f"{path}: {full} is ", "; write ", _KIND.get(kind, "dict")])
        for text in _ON_THE_LINE[kind]:
            message = _refusal(override, default_config(), [f"--config.{full}={text}"])
            assert_words(message, [f"command line: {full} is ", text, "; write "])
        for value in _wrong(field):
            message = _refusal(checks.check_fields, _set(full, value))
            assert message.startswith(f"{full}") and "write " in message, message
            bounds = [str(field.bounds)] if field.bounds else []
            assert_words(message, [*filter(None, field.choices), *bounds])


def test_every_row_is_complete():
    """Bounds of every number, and of no other; choices of every text that is not listed here."""
    texts = {f"{section}.{name}" for section, names in _TEXTS.items() for name in names.split()}
    for path, field in _FIELDS.items():
        assert (type(field.default) in (int, float)) == (field.bounds is not None), path
        assert (isinstance(field.default, str) and path not in texts) == bool(field.choices), path
        assert not field.bounds or field.bounds.hold(field.default), path
        assert not field.choices or field.default in field.choices, path
        assert field.meaning.strip() == field.meaning and len(field.meaning) >= 4, path
        assert "\n" not in field.meaning, path
    shapes = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    numbers = {f"model.{name}" for name, kind in shapes.items() if kind in ("int", "float")}
    assert {name for name in BOUNDS if name.startswith("model.")} == numbers


def test_paths_are_expanded():
    """Which fields `~` is read in."""
    assert {path for path, field in _FIELDS.items() if field.is_path} == {
        "run.dir",
        "run.cache_dir",
        "run.compilation_cache",
        "model.checkpoint",
        "data.tokenizer",
        "algo.teacher",
        "lora.checkpoint",
    }


@pytest.mark.parametrize("path", REMOVED)
def test_a_removed_field_says_what_to_write_instead(path, tmp_path):
    """Wherever it is set; the config.json of an older run may have its default."""
    section, _, name = path.partition(".")
    default, instead = REMOVED[path]
    message = _refusal(override, default_config(), [f"--config.{path}=2"])
    assert message == f"command line: there is no config field {path!r}; {instead}"
    assert path_of(name) == path
    saved = {section: {name: default}}
    assert flatten(saved_config(saved, "config.json")) == flatten(default_config())
    assert not differences(saved, {})
    saved[section][name] = default + 2 if type(default) in (int, float) else "other"
    assert _refusal(saved_config, saved, "config.json").endswith(instead)


@pytest.mark.parametrize(
    "field",
    ["rollout.group_size=1.5", "rollout.top_p=1.01", "algo.scale=perhaps", "env.task_options=3"],
)
def test_a_command_is_refused(field, refused_fields):
    """The same by way of the command: one sentence, nothing compiled, nothing written."""
    name, _, value = field.partition("=")
    assert_words(refused_fields(field), [name, value, "write "])


def test_help_has_every_row():
    """Each field stands there as it would be written on the command line, with all of its row."""
    lines = describe_fields().splitlines()
    for path, field in _FIELDS.items():
        shown = "{}" if field.is_free else repr(field.default)
        at = lines.index(f"--config.{path}={shown}") + 1
        row = [field.meaning]
        row += [f"one of: {', '.join(filter(None, field.choices))}"] * bool(field.choices)
        row += [str(field.bounds)] * bool(field.bounds)
        row += [f"needs {', and '.join(field.needs)}"] * bool(field.needs)
        row += [f"{name} {meaning}" for name, meaning in field.options.items()]
        assert [line.strip() for line in lines[at : at + len(row)]] == row


def test_flatten_lists_every_field_once():
    """One entry a field, under 'section.field'; free-form fields are dicts."""
    flat = flatten(default_config())
    assert flat == {path: {} if f.is_free else f.default for path, f in _FIELDS.items()}
    assert flatten(load_config(str(CONFIG))).keys() == flat.keys()
