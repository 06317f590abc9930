"""Configuration: defaults, then the file, then the command line; names and types are checked."""

import math
import pathlib
import pwd
import re

import jax
import ml_collections
import pytest

from fp8rl_jax import cli, sharding
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import (
    FIELDS,
    all_fields,
    checks,
    default_config,
    flatten,
    literal,
    load_config,
    set_options,
)
from fp8rl_jax.config.files import packaged
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.envs import check_source
from fp8rl_jax.models import param_shapes, param_shardings
from fp8rl_jax.models.presets import preset

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_NAMES = list(all_fields())


@pytest.fixture
def load(tmp_path):
    """load(fields of the file, *overrides) -> the configuration."""

    def run(fields: dict, *overrides: str) -> ml_collections.ConfigDict:
        path = tmp_path / "config.py"
        path.write_text(
            "import ml_collections\n\n\n"
            f"def get_config():\n    return ml_collections.ConfigDict({fields!r})\n"
        )
        return load_config(str(path), [f"--config.{o}" for o in overrides])

    return run


def test_defaults_where_nothing_is_said(load):
    """An empty file gives every default, and nothing else."""
    assert load({}).to_dict() == default_config().to_dict()
    assert set(flatten(load({}))) == set(_NAMES)


def test_file_beats_defaults_and_command_line_beats_file(load):
    """The three layers, seen at one field each and in the order of their strength."""
    default = FIELDS["rollout"]["group_size"].default
    fields = {"rollout": {"group_size": default + 1, "max_new_tokens": 31}}
    assert load({}).rollout.group_size == default
    assert load(fields).rollout.group_size == default + 1
    config = load(fields, f"rollout.group_size={default + 2}", "run.seed=5")
    assert config.rollout.group_size == default + 2
    assert config.rollout.max_new_tokens == 31
    assert config.run.seed == 5
    untouched = {k: v for k, v in flatten(config).items() if not k.startswith(("rollout.", "run."))}
    assert untouched.items() <= flatten(default_config()).items()


def test_last_override_wins(load):
    """Of two values for one field the later one holds."""
    assert load({}, "run.steps=3", "run.steps=4").run.steps == 4


def test_loading_leaves_the_defaults_alone(load):
    """A configuration shares nothing with the next one."""
    before = default_config().to_dict()
    config = load({"env": {"task_options": {"min_terms": 2}}}, "run.steps=3")
    config.env.task_options.min_terms = 7
    config.model.hidden_size = 1
    assert default_config().to_dict() == before
    assert load({}).to_dict() == before


@pytest.mark.parametrize("value", [0, 2, 3.5])
def test_numbers_for_a_float_field(load, value):
    """A float field takes whole numbers too, and always holds a float."""
    for config in (load({"algo": {"kl_coef": value}}), load({}, f"algo.kl_coef={value}")):
        assert config.algo.kl_coef == value
        assert type(config.algo.kl_coef) is float


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("rollout.group_size=16", "rollout.group_size", 16),
        ("rollout.temperature=0.5", "rollout.temperature", 0.5),
        ("optimizer.learning_rate=1e-5", "optimizer.learning_rate", 1e-5),
        ("algo.dynamic_sampling=False", "algo.dynamic_sampling", False),
        ("model.tie_word_embeddings=true", "model.tie_word_embeddings", True),
        ("precision.rollout=bf16", "precision.rollout", "bf16"),
        ("run.dir=a=b c", "run.dir", "a=b c"),
        ("env.reward=module:function", "env.reward", "module:function"),
    ],
)
def test_values_from_the_command_line(load, override, path, value):
    """Text becomes the type of the field."""
    found = flatten(load({}, override))[path]
    assert found == value
    assert type(found) is type(value)


def test_single_dash(load, tmp_path):
    """-config.x.y=1 is what --config.x.y=1 is."""
    load({})
    assert load_config(str(tmp_path / "config.py"), ["-config.run.steps=7"]).run.steps == 7


_OPTIONS = {"min_terms": 2, "operators": ["+", "-"], "allow_negation": False}


def test_task_options_from_the_file(load):
    """The free-form section takes any key, and a later file value replaces all of it."""
    config = load({"env": {"task_options": _OPTIONS}})
    assert flatten(config)["env.task_options"] == _OPTIONS
    assert load({"env": {"task_options": {}}}).env.task_options.to_dict() == {}


def test_task_options_of_the_file_changed_by_the_command_line(load):
    """A single option of the file can be overridden; the others stay."""
    config = load(
        {"env": {"task_options": _OPTIONS}},
        "env.task_options.min_terms=5",
        "env.task_options.allow_negation=True",
    )
    expected = {**_OPTIONS, "min_terms": 5, "allow_negation": True}
    assert config.env.task_options.to_dict() == expected


def test_task_options_as_one_dict(load):
    """The whole section written as a dict replaces the file's."""
    config = load({"env": {"task_options": _OPTIONS}}, "env.task_options={'level': 3}")
    assert config.env.task_options.to_dict() == {"level": 3}


@pytest.mark.parametrize(
    ("text", "value"), [("3", 3), ("0.5", 0.5), ("True", True), ("easy", "easy")]
)
def test_task_options_that_only_the_command_line_has(load, text, value):
    """An option that the file does not have is free-form too: its text is read as Python."""
    options = load({}, f"env.task_options.level={text}").env.task_options.to_dict()
    assert options == {"level": value}


def test_task_options_that_are_lists(load):
    """A list of the file is overridden by a list, or refused in a sentence that names it."""
    fields = {"env": {"task_options": _OPTIONS}}
    try:
        config = load(fields, 'env.task_options.operators=["*"]')
    except UserError as error:
        assert "env.task_options.operators" in str(error)
    else:
        assert list(config.env.task_options.operators) == ["*"]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("rollout.group_sise", "rollout.group_size"),
        ("rolout.group_size", "rollout.group_size"),
        ("run.sead", "run.seed"),
    ],
)
def test_unknown_field_names_the_nearest(load, wrong, near):
    """In the file and on the command line alike; the place is named."""
    section, name = wrong.split(".")
    with pytest.raises(UserError) as in_file:
        load({section: {name: 1}})
    assert "config.py" in str(in_file.value)
    with pytest.raises(UserError) as on_line:
        load({}, f"{wrong}=1")
    assert "command line" in str(on_line.value)
    assert wrong in str(on_line.value) and near in str(on_line.value)


@pytest.mark.parametrize(("wrong", "near"), [("rolout", "rollout"), ("optimiser", "optimizer")])
def test_unknown_section_names_the_nearest_section(load, wrong, near):
    """A misspelt section is answered with a section, not with some field of another one."""
    with pytest.raises(UserError) as error:
        load({wrong: {"group_size": 4}})
    hint = str(error.value).rpartition("did you mean ")[2]
    assert hint.rstrip("?").strip("'\"") in (near, f"{near}.group_size"), str(error.value)


def test_more_tokens_than_a_published_vocabulary():
    """Known from the model's name, before any tokenizer is read."""
    config = default_config()
    config.model.name, config.rollout.top_k = "qwen3_0p6b", 151_937
    with pytest.raises(UserError, match=r"^rollout\.top_k is 151937, more than .* 151936 tokens"):
        resolve_config(config)


# Configs that start from a checkpoint, which is not here: the published shapes in its place.
_PUBLISHED = {
    "qwen3_4b": "qwen3_4b",
    "qwen3_8b": "qwen3_8b",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
    "qwen3_235b_a22b": "qwen3_235b_a22b",
    "llama3p1_8b": "llama3p1_8b",
    "moonlight_16b": "moonlight_16b_a3b",
    "qwen3_1p7b_gsm8k": "qwen3_1p7b",
    "qwen2p5_1p5b_lora": "qwen2p5_1p5b",
    "qwen3_8b_lora_1gpu": "qwen3_8b",
    "qwen3_30b_a3b_lora_2gpu": "qwen3_30b_a3b",
    "deepseek_v3_671b": "deepseek_v3",
    "kimi_k2_1t": "kimi_k2",
}
_TINY = ("tiny_arithmetic", "tiny_calculator", "tiny_counting", "tiny_guessing")
_SMALL = ("smollm2_135m", *_TINY)
_SHAPES_ALONE = (
    "--config.model.checkpoint=",
    "--config.data.tokenizer=byte",
    "--config.data.chat=False",
    "--config.data.system_prompt=",
)


def _resolve(config):
    check_source(config.env)
    return resolve_config(config)


def _shipped(name: str, case: str):
    """A file of configs/, of published shapes in the place of its checkpoint."""
    overrides = ()
    if name not in _TINY:
        overrides = (*_SHAPES_ALONE, f"--config.model.name={_PUBLISHED.get(name, name)}")
    config = load_config(f"{_ROOT}/configs/{name}.py{case}", overrides)
    config.data.chat_options = type(config.data.chat_options)()  # they go with data.chat
    return config


def test_shipped_configs_are_valid():
    """All of them are tested here; those of small models and the defaults pass the checks."""
    assert packaged().keys() == {*_PUBLISHED, *_SMALL}
    for rung in ("d4", "d8", "d16", "m8", "m16", "m32", "s16", "m32x16"):
        model = _resolve(load_config(f"{_ROOT}/studies/ladder.py:{rung}", ())).model
        assert (model.num_experts == 0) == rung.startswith("d")
    with pytest.raises(UserError, match="no rung 'd9': write one of d4, d8"):
        load_config(f"{_ROOT}/studies/ladder.py:d9", ())
    for name in _SMALL:
        _resolve(_shipped(name, ""))
    _resolve(default_config())


_CASES = {
    ":bf16": ("bf16", "bf16"),
    ":case1": ("fp8_blockwise", "bf16"),
    ":case2": ("fp8_blockwise", "fake_forward"),
    ":case3": ("fp8_blockwise", "fake"),
    ":case4": ("fp8_blockwise", "fp8_blockwise"),
    ":fp8_linear": ("fp8_linear", "fp8_linear"),
    "": ("fp8", "fp8"),
}


@pytest.mark.parametrize("name", (*_PUBLISHED, *_SMALL))
def test_every_config_takes_every_case(name):
    """The recipes of both sides; everything else is the file's."""
    plain = _shipped(name, "").to_dict()
    for case, recipes in _CASES.items():
        config = _shipped(name, case)
        found = _resolve(config)
        sides = (found.rollout_recipe, found.learner_recipe)
        assert tuple(side.name for side in sides) == recipes
        if case in (":bf16", ":fp8_linear"):
            assert not any(s.kv_quantized or s.fp8_attention for s in sides)
            assert all(s.quantized == (case == ":fp8_linear") for s in sides)
        changed = config.to_dict()
        changed["precision"] = plain["precision"]
        assert changed == plain


@pytest.mark.parametrize("name", _PUBLISHED)
def test_published_runs_are_valid(name):
    """Batch and mesh fit together, and so do the model's shapes.

    What one device stores of masters and moments (if they are not offloaded) is at most 60 GB.
    """
    config = _shipped(name, "")
    sizes = tuple(config.mesh[axis] for axis in sharding.MESH_AXES)
    mesh = jax.sharding.AbstractMesh(sizes, sharding.MESH_AXES)
    rows = config.rollout.prompts_per_step * config.rollout.group_size
    assert rows % (config.learner.gradient_accumulation_steps * sharding.batch_divisor(mesh)) == 0
    checks.check_mesh(config, *[sharding.batch_divisor(mesh)] * 2)
    shapes = param_shapes(preset(_PUBLISHED[name]))
    specs = jax.tree.leaves(param_shardings(mesh, shapes))
    pairs = zip(jax.tree.leaves(shapes), specs, strict=True)
    stored = sum(math.prod(spec.shard_shape(leaf.shape)) for leaf, spec in pairs)
    copies = 1 if config.learner.offload == "moments" else 3
    each = 2 if config.lora.rank else copies * 4  # a frozen base in bf16 has no moments
    assert 1e9 < each * stored < 60e9


def test_a_case_that_does_not_exist(capsys):
    """One sentence with the file, the case and those that exist; exit status 2."""
    path = f"{_ROOT}/configs/qwen3_4b.py"
    for case in ("case9", "Bf16", ""):
        assert cli.run(["train", "--config", f"{path}:{case}"]) == 2
        assert capsys.readouterr().err == (
            f"error: --config: {path} has no precision case {case!r}; after the colon write one of "
            "bf16, case1, case2, case3, case4, fp8_linear\n"
        )
    with pytest.raises(UserError, match="is no file"):
        load_config(f"{_ROOT}/configs/qwen9.py:case1")


def test_a_case_of_a_file_of_ones_own(tmp_path):
    """What a case does not name stays, in bf16 nothing is in FP8, and the command line wins."""
    path = tmp_path / "own.py"
    path.write_text(
        "import ml_collections\n"
        "def get_config(): return ml_collections.ConfigDict(\n"
        "    {'precision': {'learner': 'mxfp8', 'kv_cache': 'fp8', 'attention': 'fp8'}})\n"
    )
    plain, case4, bf16 = (load_config(f"{path}{c}").precision for c in ("", ":case4", ":bf16"))
    assert (plain.learner, case4.learner, case4.kv_cache) == ("mxfp8", "fp8_blockwise", "fp8")
    assert (bf16.rollout, bf16.learner, bf16.kv_cache, bf16.attention) == ("bf16",) * 4
    linear = load_config(f"{path}:fp8_linear").precision
    assert (linear.rollout, linear.kv_cache, linear.attention) == ("fp8_linear", "recipe", "bf16")
    own = load_config(f"{path}:bf16", ["--config.precision.learner=f32"]).precision
    assert (own.rollout, own.learner) == ("bf16", "f32")


def test_argument_of_a_config_file(tmp_path):
    """A get_config that takes an argument gets the text after the colon, in place of a case."""
    path = tmp_path / "own.py"
    path.write_text(
        "import ml_collections\n"
        "_STEPS = {'short': 3, 'case1': 4}\n"
        "def get_config(name='short'):\n"
        "    return ml_collections.ConfigDict({'run': {'steps': _STEPS[name]}})\n"
    )
    assert [load_config(f"{path}{t}").run.steps for t in ("", ":short", ":case1")] == [3, 3, 4]
    assert load_config(f"{path}:case1").precision == default_config().precision
    with pytest.raises(UserError, match="fails with KeyError: 'long'"):
        load_config(f"{path}:long")


_FREE = ("env.task_options.min_terms=3", "data.chat_options.enable_thinking=True")


@pytest.mark.parametrize("free", _FREE)
@pytest.mark.parametrize("locked", [False, True])
def test_options_in_any_order(free, locked, tmp_path):
    """A library locks the configuration at a field; a file may have locked it too."""
    path, name = tmp_path / "config.py", free.split("=")[0]
    path.write_text(
        "import ml_collections\n\n\ndef get_config():\n"
        "    config = ml_collections.ConfigDict(\n"
        "        {'env': {'task_options': {'old': 1}}, 'data': {'chat_options': {'old': 1}}}\n"
        f"    )\n    return config.lock() if {locked} else config\n"
    )
    others = ["--config.run.seed=3", "--config.run.steps=4"]
    for at in range(3):
        config = load_config(str(path), [*others[:at], f"--config.{free}", *others[at:]])
        section, field, option = name.split(".")
        assert config[section][field].to_dict() == {"old": 1, option: literal(free.split("=")[1])}
        assert (config.run.seed, config.run.steps) == (3, 4)


def test_options_of_another_type_than_a_file_gave():
    """`fp8rl sample --chat-options enable=1` where a file says True."""
    options = ml_collections.ConfigDict({"enable": True}).lock()
    set_options(options, {"enable": 1, "more": [2]})
    assert options.to_dict() == {"enable": 1, "more": [2]}


_RAISES = {
    "class Stop(BaseException): pass\nraise Stop('now')": "Stop: now",
    "raise GeneratorExit": "GeneratorExit",
    "import asyncio\nraise asyncio.CancelledError('late')": "CancelledError: late",
    "raise SystemExit(3)": "SystemExit: 3",
    "raise ExceptionGroup('two', [ValueError('a'), KeyError('b')])": "ExceptionGroup: two",
    "class E(Exception):\n    def __str__(self): raise ValueError\nraise E": "fails with E;",
    "raise ValueError('x' * 100_000)": "ValueError: xxx",
    "def get_config(): return get_config()": "RecursionError",
    "(" * 300: "fails with SyntaxError",
    "\0": "fails with",
}


@pytest.mark.parametrize("source", _RAISES)
def test_whatever_a_config_file_raises(source, tmp_path, capsys):
    """One sentence with the file; what is no Exception too, and an error that has no text."""
    path = tmp_path / "config.py"
    path.write_text(source)
    assert cli.run(["train", "--config", str(path)]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith(f"error: --config: {path} fails with ") and len(sentence) < 1000
    assert _RAISES[source] in sentence and sentence.count("\n") == 1


def test_a_ctrl_c_while_a_config_file_runs(tmp_path):
    (tmp_path / "config.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_config(str(tmp_path / "config.py"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("c.env.task_options.x = c.env.task_options", "env.task_options cannot be written as JSON"),
        ("c.env.task_options.x = l = []; l.append(l)", "env.task_options cannot be written"),
        ("c.env.task_options.x = {1, 2}", "env.task_options cannot be written as JSON"),
        ("c.data.chat_options.x = print", "data.chat_options cannot be written as JSON"),
        ("c.run = {'dir': 'gs://bucket/run'}", "run.dir is 'gs://bucket/run', an address"),
        ("c.env.x = c.env", "there is no config field 'env.x'"),
        ("c.run = {'dir': 'a\0b'}", "run.dir is 'a\\x00b': no path holds a NUL"),
        ("c.model = {'checkpoint': '\0'}", "model.checkpoint is '\\x00': no path holds a NUL"),
    ],
)
def test_what_a_config_cannot_hold(line, words, tmp_path):
    """Dicts and lists that hold themselves, values that config.json cannot hold, NUL in a path."""
    path = tmp_path / "config.py"
    path.write_text(
        "import ml_collections\n\n\ndef get_config():\n    c = ml_collections.ConfigDict(\n"
        "        {'env': {'task_options': {}}, 'data': {'chat_options': {}}})\n    "
        + line.replace("\0", "\\0")
        + "\n    return c\n"
    )
    with pytest.raises(UserError, match=re.escape(words)):
        load_config(str(path))


def test_options_that_are_no_json(load):
    with pytest.raises(UserError, match=r"command line: env.task_options.x cannot be written"):
        load({}, "env.task_options.x={1, 2}")


@pytest.mark.parametrize("name", [path for path, f in all_fields().items() if f.is_path])
def test_home_in_paths(name, load, monkeypatch):
    """`~` alike in every path, from a file and from the command line, as a shell expands it."""
    section, field = name.split(".")
    monkeypatch.setenv("HOME", "/home/me")
    for text, path in [
        ("~/x", "/home/me/x"),
        ("~", "/home/me"),
        ("a/~", "a/~"),
        ("~nobody-has-it/x",) * 2,
        ("~root", pwd.getpwnam("root").pw_dir),
    ]:
        assert load({section: {field: text}})[section][field] == path
        assert load({}, f"{name}={text}")[section][field] == path
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", dict[int, None]().__getitem__)  # KeyError: no account
    with pytest.raises(UserError, match=f"{name} is '~/x', and this user has no home directory"):
        load({}, f"{name}=~/x")
    assert load({}, f"{name}=x")[section][field] == "x"
