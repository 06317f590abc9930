"""Where a model comes from: fields, a published name, or a checkpoint that training begins with."""

from __future__ import annotations

import functools
import json
import os

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
import tiny_checkpoint
import tiny_config
from marks import slow
from random_model import quantized

from fp8rl_jax import cli, models, train
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import default_config, saved_config
from fp8rl_jax.config.model_source import identity, read_model
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.data import PretrainedTokenizer, encode_prompt, load_tokenizer
from fp8rl_jax.models.arrays import LINEAR, SMALL, role_of
from fp8rl_jax.models.families import FAMILIES
from fp8rl_jax.models.families.family import PLAIN
from fp8rl_jax.models.families.fields import Fields
from fp8rl_jax.models.hf.config_json import config_json, family_of, read_config
from fp8rl_jax.models.presets import PRESETS
from fp8rl_jax.models.rope import softmax_scale
from fp8rl_jax.models.stacks import path_of
from fp8rl_jax.policy import export
from fp8rl_jax.quant import is_weight
from fp8rl_jax.training.checkpoint import Checkpoints
from fp8rl_jax.training.environment import environment
from fp8rl_jax.training.optimizer import optimizer_of_phase
from fp8rl_jax.training.run_directory import as_options, differences, open_run
from fp8rl_jax.training.runtime import make_runtime
from fp8rl_jax.training.sft import cache_directory


@pytest.fixture(autouse=True)
def _reader(monkeypatch):
    tiny_checkpoint.record_loads(monkeypatch)


@pytest.fixture
def checkpoint(tmp_path):
    return tiny_checkpoint.write(tmp_path / "model")


def _config(**sections: dict) -> ml_collections.ConfigDict:
    """The tiny run with other fields; `model` as given, alone."""
    fields = tiny_config.get_config().to_dict()
    fields["model"] = {}
    for name, values in sections.items():
        fields[name] = fields.get(name, {}) | values
    return saved_config(fields, "here")


def _pretrained(checkpoint, tmp_path, **sections) -> ml_collections.ConfigDict:
    """The tiny run from a checkpoint, without fine-tuning."""
    given = {
        "model": {"checkpoint": str(checkpoint)},
        "data": {"tokenizer": "checkpoint"},
        "run": {"dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "cache"), "steps": 1},
        "sft": {"steps": 0},
        "rollout": {"max_prompt_tokens": 40, "max_new_tokens": 4},
    }
    return _config(
        **{name: given.get(name, {}) | sections.get(name, {}) for name in {*given, *sections}}
    )


@pytest.mark.parametrize("name", PRESETS)
def test_published_shapes_by_name(name):
    """A name gives the preset, whose vocabulary holds the tokenizer's."""
    config = _config(model={"name": name}, precision={"rollout": "bf16", "learner": "bf16"})
    assert resolve_config(config).with_vocabulary(259).model == PRESETS[name]


def test_a_preset_has_shapes_without_memory():
    """A large model can be looked at: shapes of all parameters, none of them made."""
    runtime = make_runtime(_config(model={"name": "qwen3_0p6b"}))
    count = sum(x.size for x in jax.tree.leaves(runtime.layout.param_shapes))
    assert 590e6 < count < 600e6
    assert runtime.resolved.model.vocab_size == 151_936 and runtime.tokenizer.vocab_size == 259


_REFUSED = {
    "both": ({"name": "qwen3_0p6b", "checkpoint": "x"}, ["model.checkpoint", "model.name"]),
    "unknown name": ({"name": "qwen9"}, ["model.name", "qwen9", "qwen3_0p6b"]),
    "field beside a name": (
        {"name": "qwen3_0p6b", "hidden_size": 64},
        ["model.hidden_size is 64", "model.name", "leave"],
    ),
    "missing directory": (
        {"checkpoint": "nowhere"},
        ["model.checkpoint", "nowhere", "no directory", "safetensors of a Hugging Face model"],
    ),
    "name on the Hub": (
        {"checkpoint": "Qwen/Qwen3-8B"},
        ["no directory", "`hf download Qwen/Qwen3-8B --local-dir checkpoints/Qwen3-8B`"],
    ),
    "missing download": (
        {"checkpoint": "checkpoints/Qwen3-8B"},
        ["no directory; name one with the config.json"],
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_sources_that_contradict(case):
    fields, words = _REFUSED[case]
    with pytest.raises(UserError) as error:
        resolve_config(_config(model=fields))
    for word in words:
        assert word in str(error.value)


def test_fields_beside_a_checkpoint(checkpoint, tmp_path):
    """Another shape than the checkpoint's is refused; a field at its default says nothing."""
    resolve_config(_pretrained(checkpoint, tmp_path, model={"hidden_size": 128}))
    with pytest.raises(UserError, match=r"model\.hidden_size is 64.*its own shapes"):
        resolve_config(_pretrained(checkpoint, tmp_path, model={"hidden_size": 64}))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"tokenizer": "byte"}}, r"data\.tokenizer='checkpoint'"),
        ({"rollout": {"max_new_tokens": 100}}, r"= 140 is more than the 128 positions"),
        ({"data": {"system_prompt": "be brief"}}, r"data\.system_prompt.*needs data\.chat"),
        ({"data": {"chat_options": {"a": 1}}}, r"data\.chat_options is \{'a': 1\}"),
    ],
)
def test_config_beside_a_checkpoint(sections, words, checkpoint, tmp_path):
    with pytest.raises(UserError, match=words):
        make_runtime(_pretrained(checkpoint, tmp_path, **sections))


_LATENT = {
    "family": "deepseek_v3",
    "family_options": {
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"mesh": {"tensor": 2}}, ["mesh.tensor is 2", "set mesh.tensor=1"]),
        (
            {"precision": {"attention": "fp8", "kv_cache": "fp8"}},
            ["precision.attention", "in bf16"],
        ),
        ({"precision": {"kv_cache": "fp8_calibrated"}}, ["precision.kv_cache", "kv_cache='fp8'"]),
    ],
)
def test_what_latent_attention_lacks(sections, words):
    """One sentence each; the same setting with grouped-query attention is accepted."""
    with pytest.raises(UserError) as error:
        resolve_config(_config(model=_LATENT, **sections))
    for word in (*words, "latent"):
        assert word in str(error.value)
    resolve_config(_config(**sections))
    resolve_config(_config(model=_LATENT))


def test_a_field_that_an_older_version_lacks_had_its_default():
    """Fields that were added since neither forbid to resume, nor hide a change."""
    ours = _config().to_dict()
    theirs = {name: dict(fields) for name, fields in ours.items()}
    del theirs["data"]["chat"], theirs["model"]["checkpoint"]
    assert not differences(theirs, ours)
    ours["data"] = ours["data"] | {"chat": True, "tokenizer": "a b"}
    changed = differences(theirs, ours)
    assert changed == {"data.chat": (False, True), "data.tokenizer": ("byte", "a b")}
    text = as_options(changed)
    assert "data.chat was False, is True, data.tokenizer was 'byte', is 'a b'" in text
    assert text.endswith("give --config.data.chat=False --config.data.tokenizer=byte")


# Questions as conversations.


def test_questions_as_conversations(checkpoint, tmp_path):
    """With data.chat the prompt is the rendered conversation, and nothing is put before it."""
    data = {"chat": True, "system_prompt": "be brief", "chat_options": {"enable_thinking": False}}
    config = _pretrained(checkpoint, tmp_path, data=data, rollout={"max_prompt_tokens": 90})
    runtime = make_runtime(config)
    question = runtime.questions["eval"][0]
    tokens, lengths = runtime.prompts([question])
    text = runtime.tokenizer._reader.decode(tokens[0, : lengths[0]], skip_special_tokens=False)
    assert text == (
        f"<|turn|>system\nbe brief<|stop|>\n<|turn|>user\n{question.text}<|stop|>\n"
        "<|turn|>assistant\n<think>\n\n</think>\n\n"
    )


# Training from a checkpoint.


@pytest.fixture
def only_begin(monkeypatch):
    """Runs end where the RL steps would begin; gives their states."""
    states = []
    monkeypatch.setattr(train, "run_rl", lambda run, state, *_: states.append(state) or state)
    monkeypatch.setattr(train, "write_report", lambda directory: None)
    return states


def _assert_same(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def test_training_begins_with_the_checkpoint(checkpoint, tmp_path, only_begin):
    """RL starts from the loaded parameters; the reference policy is these; resuming reads the run's
    own checkpoint, and the weights never again."""
    config = _pretrained(checkpoint, tmp_path, algo={"kl_coef": 0.1})
    train.train(config)
    expected = models.hf.load(checkpoint)[1]
    (state,) = only_begin
    _assert_same(state.params, expected)
    reference = Checkpoints(tmp_path / "run" / "reference", keep=1)
    policy = {name: getattr(state, name) for name in ("params", "scaling_state")}
    _assert_same(reference.restore(0, policy)["params"], expected)
    reference.close()

    tiny_checkpoint.LOADED.clear()
    settings = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(settings | {"seed": 1}))  # other weights
    train.train(config, resume=True)
    assert tiny_checkpoint.LOADED == []
    _assert_same(only_begin[1].params, expected)


def test_resuming_notices_other_shapes(checkpoint, tmp_path, only_begin):
    """A shape that no array shows, such as rope_theta, is noticed too."""
    config = _pretrained(checkpoint, tmp_path)
    train.train(config)
    tiny_checkpoint.write(checkpoint, config={"rope_theta": 500_000.0})
    with pytest.raises(UserError, match=r"rope_theta = 500000\.0.*began with 10000\.0"):
        train.train(config, resume=True)


def test_sft_begins_with_the_checkpoint(checkpoint, tmp_path, monkeypatch):
    """Fine-tuning of pretrained weights starts from them."""
    states = []

    def sft(run, state):
        states.append(state)
        return state

    monkeypatch.setattr(train, "run_sft", sft)
    monkeypatch.setattr(train, "write_report", lambda directory: None)
    monkeypatch.setattr(train, "run_rl", lambda run, state, monitor: state)
    fields = {"steps": 8, "questions": 16}
    train.train(_pretrained(checkpoint, tmp_path, sft=fields))
    _assert_same(states[0].params, models.hf.load(checkpoint)[1])


def test_the_cached_sft_is_of_one_checkpoint(checkpoint, tmp_path):
    """Other weights, another config.json or another template find no old result."""
    (checkpoint / "model.safetensors").write_bytes(b"0" * 8)
    config = _pretrained(checkpoint, tmp_path, sft={"steps": 2})
    seen = [cache_directory(config)]
    assert cache_directory(config) == seen[0]
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    seen.append(cache_directory(config))
    (checkpoint / "chat_template.jinja").write_text("x")
    seen.append(cache_directory(config))
    before = identity(str(checkpoint))
    tiny_checkpoint.write(checkpoint, config={"rope_theta": 5.0})
    assert identity(str(checkpoint)) != before
    seen.append(cache_directory(config))
    assert len(set(seen)) == 4


def test_an_fp8_checkpoint_is_the_base_of_adapters(checkpoint, tmp_path):
    """As it is: bytes and scales of linear layers, and nothing in float32 but small arrays."""
    models.hf.convert(checkpoint, tmp_path / "fp8", "fp8")
    lora = {"rank": 2, "base": "fp8"}
    runtime = make_runtime(_pretrained(tmp_path / "fp8", tmp_path, lora=lora))
    params = runtime.engine.initial_params()
    base = runtime.engine.new_state(params, optimizer_of_phase(runtime.config, "rl")).params.base
    _, file = models.hf.load(tmp_path / "fp8", dtype="fp8")
    is_small = lambda path: role_of(path_of(path)) in SMALL
    for path, leaf in jax.tree_util.tree_leaves_with_path(base, is_leaf=is_weight):
        other = functools.reduce(lambda tree, key: tree[key], path_of(path), file)
        assert is_weight(leaf) == (role_of(path_of(path)) == LINEAR)
        assert is_weight(leaf) or leaf.dtype == (jnp.float32 if is_small(path) else jnp.bfloat16)
        jax.tree.map(np.testing.assert_array_equal, leaf, other)


@pytest.mark.parametrize("dtype", [slow("bf16"), "fp8"])
def test_a_run_becomes_a_checkpoint_again(checkpoint, tmp_path, dtype, capsys):
    """`fp8rl convert RUN DST`: the run's weights, and all else of the checkpoint it began with."""
    config = _pretrained(checkpoint, tmp_path)
    runtime = make_runtime(config)
    open_run(runtime.resolved, "", environment(runtime.config))
    params = jax.tree.map(lambda x: x * 1.5, runtime.engine.initial_params())
    state = runtime.engine.new_state(params, optimizer_of_phase(config, "rl"))
    if dtype == "fp8":
        expected = quantized(params, "fp8")  # what the sampler serves
    else:
        expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    store = Checkpoints(tmp_path / "run" / "checkpoints", keep=1)
    store.save(1, state, {"phase": "rl", "step": 1, "offsets": {}})
    store.close()
    target = tmp_path / "exported"
    assert cli.run(["convert", str(tmp_path / "run"), str(target), "--dtype", dtype]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{target}\n" and "after rl step 1" in captured.err
    model, found = models.hf.load(target, dtype="fp8")
    assert model == runtime.resolved.model
    pairs = zip(*(jax.tree.leaves(tree["layers"]) for tree in (found, expected)), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (target / name).read_bytes() == (checkpoint / name).read_bytes()
    fields = json.loads((target / "config.json").read_text())
    assert fields["max_position_embeddings"] == 128


@pytest.mark.parametrize("chat", [True, False])
def test_fine_tuning_ends_and_a_rollout_stops_as_the_template_ends_a_turn(chat, tmp_path):
    """The end of a document is <|end|> (0); the template ends a turn with <|stop|> (2)."""
    path = tiny_checkpoint.write(
        tmp_path / "model",
        tokenizer_config={"eos_token": "<|end|>"},
        generation_config={"eos_token_id": None},
    )
    sections = {"data": {"chat": chat}, "sft": {"steps": 1, "questions": 4, "batch_size": 4}}
    sections["data"]["tokenizer"] = "checkpoint"
    sections["rollout"] = {"max_prompt_tokens": 90, "max_new_tokens": 6}
    runtime = make_runtime(_pretrained(path, tmp_path, **sections))
    assert runtime.tokenizer.eos_ids == ((0, 2) if chat else (0,))
    questions = runtime.questions["sft"]
    batch = runtime.demonstrations(questions)
    for question, targets, mask in zip(questions, batch.targets, batch.mask, strict=True):
        taught = np.asarray(targets)[np.asarray(mask) > 0].tolist()
        assert taught == [*runtime.tokenizer.encode(question.answer), 2 if chat else 0]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_run_is_exported_with_its_own_tokenizer(kind, tmp_path):
    """Not with that of the checkpoint: ids are those that the run was trained with."""
    path = tiny_checkpoint.write(tmp_path / "tokenizer")
    (path / "additional_chat_templates").mkdir()
    (path / "chat_template.jinja").write_text("a")
    (path / "additional_chat_templates/tool_use.jinja").write_text("tools")
    target = tmp_path / "out"
    target.mkdir()
    names = {"bos_token": "<|turn|>", "eos_token": "<|stop|>", "pad_token": "<|pad|>"}
    data = ml_collections.ConfigDict({"tokenizer": str(path), **names})
    if kind == "file":
        data.tokenizer = str(path / "tokenizer.json")
    export._copy_tokenizer(data.tokenizer, data, target)
    trained, exported = load_tokenizer(data), PretrainedTokenizer(target)
    assert encode_prompt("the cat", exported) == encode_prompt("the cat", trained)
    assert (exported.eos_id, exported.pad_id) == (trained.eos_id, trained.pad_id)
    assert (exported.chat_template is None) == (kind == "file")
    if exported.chat_template is not None:
        assert exported.chat_template.render([], {"tools": [{}]}) == "tools"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_model_from_sizes_is_one_of_its_family(family):
    """It can be saved as one, and read again it has the same form."""
    config = default_config()
    config.model.family = family.model_type
    if family.mark in ("num_experts", "kv_lora_rank"):
        config.model.num_experts = 8
    model, _ = read_model(config)
    assert family_of(model) is family
    read = read_config(Fields(config_json(model, "float32"), "config.json"))
    for rule in PLAIN.keys() - {"query_pre_attn_scalar"}:
        assert getattr(read, rule) == getattr(model, rule), rule
    assert softmax_scale(read) == softmax_scale(model)
    if family.mark:
        holder = config.model.family_options if family.mark in family.options else config.model
        holder[family.mark] = 0
        with pytest.raises(UserError, match=rf"{family.model_type}.*\.{family.mark} 0"):
            read_model(config)


@pytest.mark.slow
def test_a_whole_run_from_a_checkpoint(checkpoint, tmp_path):
    """RL on a checkpoint, in its own tokens and template, with zero drift, killed and resumed."""
    sections = {"data": {"chat": True}, "rollout": {"max_prompt_tokens": 90, "max_new_tokens": 6}}
    sections["run"] = {"steps": 2, "checkpoint_every": 1}
    train.train(_pretrained(checkpoint, tmp_path, **sections))
    records = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2
    assert all(r["train_rollout_logprob_abs_diff_max"] == 0.0 for r in records)
    assert all(r["refit_checksum_ok"] for r in records)
