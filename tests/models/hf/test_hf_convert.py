"""`fp8rl convert`: weights in another format, the tokenizer's files beside them."""

from __future__ import annotations

import json
import math
import pathlib
import struct

import jax
import numpy as np
import pytest
from hf_checkpoints import (
    CONFIGS,
    add_fields,
    bf16,
    fp8_tensors,
    named,
    params_of,
    write,
    write_gguf,
)

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.cli.main import run
from fp8rl_jax.data import PretrainedTokenizer
from fp8rl_jax.models import hf
from fp8rl_jax.models.hf.config_json import config_json
from fp8rl_jax.models.hf.gguf_file import GGUF
from fp8rl_jax.models.hf.gguf_tokenizer import write_tokenizer


def _source(tmp_path):
    fields = config_json(CONFIGS["qwen3"], "bfloat16") | {
        "eos_token_id": 7,
        "rope_parameters": None,
    }
    params = named(CONFIGS["qwen3"], params_of("qwen3"))
    source = write(tmp_path / "source", fields, {k: bf16(v) for k, v in params.items()})
    (source / "tokenizer.json").write_text("{}")
    (source / "README.md").write_text("not copied")
    return source


def _equal(a, b) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_there_and_back(tmp_path, capsys):
    """bf16 -> fp8 is what the library quantises; fp8 -> fp8 keeps it, fp8 -> bf16 rounds values."""
    source = _source(tmp_path)
    assert run(["convert", str(source), str(tmp_path / "fp8"), "--dtype", "fp8"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "fp8")
    names = {path.name for path in (tmp_path / "fp8").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    fields = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert fields["eos_token_id"] == 7 and fields["quantization_config"]["fmt"] == "e4m3"
    config, params = hf.load(tmp_path / "fp8", dtype="fp8")
    hand = write(tmp_path / "hand", fields, fp8_tensors("qwen3"))
    _equal(params, hf.load(hand, dtype="fp8")[1])  # norms stay bf16, as in the source

    again = ["convert", str(tmp_path / "fp8"), str(tmp_path / "fp8_2"), "--dtype=fp8"]
    assert run([*again, "--max-shard-gb=0.0001"]) == 0
    _equal(params, hf.load(tmp_path / "fp8_2", dtype="fp8")[1])
    assert run(["convert", str(tmp_path / "fp8"), str(tmp_path / "bf16"), "--dtype=bf16"]) == 0
    back, values = hf.load(tmp_path / "bf16", dtype="bfloat16")
    assert back == config
    assert "quantization_config" not in json.loads((tmp_path / "bf16/config.json").read_text())
    _equal(values, hf.load(tmp_path / "fp8", dtype="bfloat16")[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["fp8rl convert SRC DST --dtype"]),
        (["a", "b"], ["--dtype"]),
        (["a", "b", "--dtype=int8"], ["--dtype", "int8", "bf16"]),
        (["a", "b", "c", "--dtype=fp8"], ["SRC DST"]),
        (["a", "b", "--dtype=fp8", "--config.run.seed=1"], ["--config.run.seed"]),
        (["nowhere", "b", "--dtype=fp8"], ["nowhere", "no directory"]),
        (["a/b.c", "b", "--dtype=fp8"], ["no directory", "hf download a/b.c --local-dir"]),
        (["SOURCE", "SOURCE", "--dtype=fp8"], ["source", "exists already"]),
        (["SOURCE", "new", "--dtype=fp8", "--max-shard-gb=-1"], ["max_shard_gb", "-1"]),
    ],
)
def test_refusals_are_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = str(_source(tmp_path))
    assert run(["convert", *(source if a == "SOURCE" else a for a in arguments)]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and error.count("\n") == 1
    for word in words:
        assert word in error
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(("kind", "error"), [("F32", 0), ("BF16", 2**-8), ("Q8_0", 0.02)])
def test_gguf(kind, error, tmp_path):
    """Names, the order of rotated rows, and the tokenizer."""
    params = write_gguf(tmp_path / "model.gguf", kind)
    target = tmp_path / "out"
    assert run(["convert", str(tmp_path / "model.gguf"), str(target), "--dtype=bf16"]) == 0
    config, loaded = hf.load(target)
    fields = vars(CONFIGS["llama"])
    different = {name for name, value in vars(config).items() if value != fields[name]}
    assert different <= {name for name in fields if name.startswith("rope_")} - {"rope_theta"}
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        y = bf16(y).astype(np.float32)
        assert np.abs(np.asarray(x) - y).max() <= error * np.abs(y).max()
    about = json.loads((target / "config.json").read_text())
    assert about["max_position_embeddings"] == 77 and about["eos_token_id"] == 0

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    ids = tokenizer.encode("ab ab12<tool><|end|>").tokens
    assert ids == ["ab", "Ġab", "1", "2", "<tool>", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("ab ab12<|end|>").ids) == "ab ab12"
    assert PretrainedTokenizer(target).bos_id is None
    about = json.loads((target / "tokenizer_config.json").read_text())
    assert about["eos_token"] == "<|end|>" and about["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_gguf_of_other_architectures(architecture, tmp_path):
    """Rows of q and k keep their order; biases, norms of heads; the words of Qwen2's tokenizer."""
    file, target = tmp_path / "model.gguf", tmp_path / "out"
    params = write_gguf(file, architecture=architecture)
    config, loaded = GGUF(file).load("float32")
    _equal(loaded, params)
    assert run(["convert", str(file), str(target), "--dtype=bf16"]) == 0
    assert hf.load(target)[0] == config

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.encode("ab ab12<tool><|end|>").tokens[:4] == ["ab", "Ġab", "1", "2"]
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("ab, ab12  IT'S\n\n x")
    assert [piece for piece, _ in cut] == ["ab", ",", "Ġab", "1", "2", "Ġ", "ĠIT", "'S", "ĊĊ", "Ġx"]


def test_gguf_of_gemma3(tmp_path):
    """Four norms of 1 + weight, windows, the scale of scores, a rotary embedding of two kinds."""
    file = tmp_path / "model.gguf"
    params = write_gguf(file, architecture="gemma3")
    config, loaded = GGUF(file).load("float32")
    expected = vars(CONFIGS["gemma3"]) | {"query_pre_attn_scalar": 24}  # the size of its heads
    assert vars(config) == expected
    for x, y in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-22)  # of gains: 1 was added
    assert run(["convert", str(file), str(tmp_path / "out"), "--dtype=bf16"]) == 0
    assert hf.load(tmp_path / "out")[0] == config


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_gguf_of_llama3(factor, tmp_path):
    """Of Llama 3.1's and 3.2's rotary embedding the file has what frequencies are divided by."""
    divisors = []
    for pair in range(16):  # of heads of 32 features
        wavelength = 2 * math.pi * CONFIGS["llama"].rope_theta ** (pair / 16)
        smooth = min(max((8192 / wavelength - 1) / 3, 0), 1)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    assert sum(1 < x < factor for x in divisors) > 1 and divisors[-1] == factor
    file, target = tmp_path / "model.gguf", tmp_path / "out"
    params = write_gguf(file, **{"rope_freqs.weight": np.array(divisors, np.float32)})
    assert run(["convert", str(file), str(target), "--dtype=bf16"]) == 0
    config, loaded = hf.load(target)
    found = {name: value for name, value in vars(config).items() if name.startswith("rope_")}
    assert found["rope_type"] == "llama3" and found["rope_factor"] == factor
    assert (found["rope_low_freq_factor"], found["rope_high_freq_factor"]) == (1, 4)
    assert found["rope_original_max_position_embeddings"] == 8192
    _equal(loaded, jax.tree.map(lambda x: bf16(x).astype(np.float32), params))


def _header(path, architecture: str, **fields):
    """A GGUF file without tensors: fields of the tokenizer, and those `of__` the architecture."""
    gguf = pytest.importorskip("gguf", reason="GGUF files are read with it (the extra 'gguf')")
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        name = f"tokenizer.ggml.{name.replace('__', '.')}"
        name = name.replace("tokenizer.ggml.of.", f"{architecture}.")
        add_fields(writer, {name: value})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUF(path)


_SIZES = dict(of__block_count=2, of__embedding_length=96, of__attention__head_count=4)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"sliding_window": 0, "query_pre_attn_scalar": 32}),
        ({"of__attention__sliding_window": 512}, {"sliding_window": 512}),
        ({"of__rope__freq_base_swa": 50.0}, {"rope_local_base_freq": 50.0}),
        ({"of__block_count": 62}, {"query_pre_attn_scalar": 24}),  # 27B: width / heads
        ({"of__rope__scaling__type": "linear", "of__rope__scaling__factor": 0.0}, {}),
        ({"eot_token_id": 1, "eos_token_id": 3}, {"eos_token_id": [3, 1]}),
        ({"eos_token_id": 0}, {"eos_token_id": [0, 2]}),  # by its text
    ],
    ids=str,
)
def test_gguf_defaults_of_gemma3(fields, expected, tmp_path):
    """What a header leaves out is what llama.cpp takes for it."""
    tokens = ["<eos>", "a", "<end_of_turn>", "b"]
    sizes = {**_SIZES, "of__attention__key_length": 32, "tokens": tokens}
    found = _header(tmp_path / "x.gguf", "gemma3", **sizes | fields).fields().values
    assert {name: found[name] for name in expected} == expected
    assert "rope_scaling" not in found


def test_gguf_of_llama_bpe(tmp_path):
    """Llama 3's tokenizer: numbers in threes, whole words before merges, no normal form, and a
    first token unless the file says no."""
    from tokenizers import Tokenizer

    tokens = [
        "<|begin_of_text|>",
        *"0123456789abcé",
        "Ã",
        "©",
        "e",
        "Ì",
        "ģ",
        "12",
        "abc",
        "Ġ",
        "ab",
    ]
    fields = dict(model="gpt2", pre="llama-bpe", tokens=tokens, merges=["1 2", "a b"])
    fields |= dict(token_type=[3] + [1] * (len(tokens) - 1), bos_token_id=0, eos_token_id=1)
    file = _header(tmp_path / "x.gguf", "llama", **fields)
    write_tokenizer(file, tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("12345 IT'S e\u0301")
    assert [piece for piece, _ in cut] == ["123", "45", "ĠIT", "'S", "Ġe", "Ìģ"]
    assert tokenizer.encode("abc").tokens == ["<|begin_of_text|>", "abc"]  # no merge makes it
    assert PretrainedTokenizer(tmp_path).bos_id == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tokens": ["a" * 2000]}, ["1024 characters"]),
        ({"model": "gpt2", "tokens": ["a"]}, ["tokenizer.ggml.pre is None", "llama-bpe"]),
        ({"model": "t5", "tokens": ["a"]}, ["'t5'", "gpt2 and llama"]),
        (
            {"tokens": ["a", "  "], "token_type": [1, 4]},
            ["symbols with spaces", "add_space_prefix"],
        ),
        ({"tokens": ["a"], "scores": ["b"]}, ["tokenizer.ggml.scores is no list of numbers"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_gguf_tokenizers_refused(fields, words, tmp_path):
    fields = {"model": "llama", "scores": [0.0] * len(fields["tokens"])} | fields
    with pytest.raises(UserError) as error:
        write_tokenizer(_header(tmp_path / "x.gguf", "llama", **fields), tmp_path)
    assert all(word in str(error.value) for word in words), error.value


def test_gguf_fields_of_wrong_types(tmp_path):
    fields = {**_SIZES, "of__attention__head_count": [4, 4]}
    with pytest.raises(UserError, match=r"head_count is \[4, 4\], and only one number"):
        _header(tmp_path / "x.gguf", "gemma3", **fields).fields()
    file, name = tmp_path / "y.gguf", b"general.architecture"
    kind = struct.pack("<IIQI", 9, 4, 1, 7)  # an array of one number
    head = struct.pack("<IQQQ", 3, 0, 1, len(name))
    file.write_bytes(b"GGUF" + head + name + kind)
    with pytest.raises(UserError, match=r"of the architecture \[7\]"):
        GGUF(file)


@pytest.mark.parametrize("prefix", [False, True])
def test_gguf_of_sentencepiece(prefix, tmp_path):
    """Texts have the tokens of SentencePiece itself, and decode to what they were."""
    import sentencepiece as spm

    own = ["<turn>"] if prefix else ["\n\n", "▁▁▁", "<turn>"]
    spm.SentencePieceTrainer.train(
        input=str(pathlib.Path(__file__).parents[3] / "README.md"),
        model_prefix=str(tmp_path / "spm"),
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=own,
        minloglevel=2,
    )
    oracle = spm.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    size = oracle.get_piece_size()
    kinds = [
        2 if oracle.is_unknown(i) else 3 if oracle.is_control(i) else 6 if oracle.is_byte(i) else 1
        for i in range(size)
    ]
    pieces = [oracle.id_to_piece(i) for i in range(size)]
    file = _header(
        tmp_path / "spm.gguf",
        "gemma3",
        model="llama",
        # The converter writes symbols with real spaces.
        tokens=[piece.replace("▁", " ") if piece in own else piece for piece in pieces],
        scores=[oracle.get_score(i) for i in range(size)],
        token_type=[4 if piece in own else kind for piece, kind in zip(pieces, kinds, strict=True)],
        bos_token_id=oracle.bos_id(),
        eos_token_id=oracle.eos_id(),
        unknown_token_id=oracle.unk_id(),
        add_bos_token=True,
        **({"add_space_prefix": True} if prefix else {}),  # Gemma has none
    )
    write_tokenizer(file, tmp_path)

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [
        "What fits a GPU? FP8 training, 8 GPUs of 80 GiB.",
        " a  b   c    d\n\n\ne",
        "über 12345 Wörter, 東京 🙂",
        *([] if prefix else ["x<turn>y z"]),  # with Llama 2 a prefix stands behind it, too
        *(pathlib.Path(__file__).parents[3] / "CHANGELOG.md").read_text().splitlines()[:200],
    ]
    for text in texts:
        assert tokenizer.encode(text).ids == [oracle.bos_id(), *oracle.encode(text)], text
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_gguf_refusals(tmp_path, capsys):
    file = tmp_path / "model.gguf"

    def refused(*words: str) -> None:
        assert run(["convert", str(file), str(tmp_path / "out"), "--dtype=bf16"]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and str(file) in error
        for word in words:
            assert word in error, error

    write_gguf(file)
    data = file.read_bytes()
    for damaged in (b"", b"no GGUF", data[:10], data[:2000], data[:-1000]):
        file.write_bytes(damaged)
        refused("no whole GGUF file")
    file.unlink()
    refused("cannot be read")
    write_gguf(file, architecture="phi3")
    refused("'phi3'", "only llama, qwen2, qwen3")
    write_gguf(file, architecture="qwen3", fields={"qwen3.expert_count": 8})
    refused("qwen3 with experts")
    write_gguf(file, **{"rope_freqs.weight": np.full(16, 2, np.float32)})
    refused("rope_freqs.weight", "bands")
    write_gguf(file, **{"rope_freqs.weight": np.ones((2, 8), np.float32)})
    refused("rope_freqs.weight", "list")
    write_gguf(file, architecture="qwen3", **{"rope_freqs.weight": np.ones(16, np.float32)})
    refused("rope_freqs.weight")
    write_gguf(file, **{"model.layers.0.attn_sinks.weight": np.ones(16, np.float32)})
    refused("blk.0.attn_sinks.weight", "no place")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"llama.rope.scale_linear": 2.0},
        {"llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.type": 1, "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scaling.attn_factor": 0.5},
        {"llama.attention.scale": 0.5},
        {"llama.attention.sliding_window": 4096},
        {"llama.attention.causal": False},
        {"llama.logit_scale": 16.0},
        {"llama.residual_scale": 0.2},
        {"llama.embedding_scale": 12.0},
        {"llama.attention.clamp_kqv": 8.0},
        {"llama.attention.value_length": 64},
        {"llama.rope.dimension_count": 16},
        {"llama.attention.layer_norm_epsilon": 1e-5},
        {"llama.a_field_of_tomorrow": 1},
        {"llama.expert_used_count": 2},
        {"split.count": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_gguf_fields_that_change_the_model_are_refused(fields, tmp_path):
    """Old names, new names, and those that nobody here knows."""
    name = next(iter(fields))
    write_gguf(tmp_path / "model.gguf", fields=fields)
    with pytest.raises(UserError, match="parts" if name == "split.count" else name):
        GGUF(tmp_path / "model.gguf").load("float32")


def test_gguf_fields_that_change_nothing(tmp_path):
    """Of a first token and a turn's end the tokenizer hears."""
    path = tmp_path / "model.gguf"
    write_gguf(
        path,
        fields={
            "llama.rope.scale_linear": 1.0,
            "llama.rope.scaling.factor": 1.0,
            "llama.expert_used_count": 0,
            "llama.vocab_size": 60,
            "llama.rope.dimension_count": 32,
            "llama.attention.value_length": 32,
            "llama.logit_scale": 0.0,
            "split.count": 1,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 1,
        },
    )
    assert run(["convert", str(path), str(tmp_path / "out"), "--dtype=bf16"]) == 0
    tokenizer = PretrainedTokenizer(tmp_path / "out")
    assert tokenizer.bos_id == 2 and tokenizer.eos_ids == (0, 1)


def test_gguf_without_the_package(tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gguf", None)
    assert run(["convert", "model.gguf", str(tmp_path / "out"), "--dtype=bf16"]) == 2
    assert "pip install 'fp8rl_jax[gguf]'" in capsys.readouterr().err
