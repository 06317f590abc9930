"""Loading and saving: values, bytes, memory's layout, and one sentence for every damaged file."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hf_checkpoints import CONFIGS, bf16, fields_of, fp8_tensors, named, params_of, write
from marks import slow
from random_model import quantized
from safetensors import safe_open

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models import ModelConfig, hf
from fp8rl_jax.models.arrays import LINEAR, SMALL, TABLE, role_of
from fp8rl_jax.models.hf import loader
from fp8rl_jax.models.stacks import path_of
from fp8rl_jax.quant import QArray, quantize

_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def _read(directory) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint as its bytes, through the safetensors library."""
    index = directory / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(json.loads(index.read_text())["weight_map"].values())
    found = {}
    for file in files:
        with safe_open(directory / file, "np") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
        with open(directory / file, "rb") as raw:
            (length,) = struct.unpack("<Q", raw.read(8))
            header, data = json.loads(raw.read(length)), raw.read()
        header.pop("__metadata__", None)
        for name, entry in header.items():
            found[name] += (data[slice(*entry["data_offsets"])],)
    return found


def _equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), str(path))


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_moe", "llama", "deepseek_v3", "gpt_oss"])
def test_float32_is_exact_both_ways(name, tmp_path):
    """The table's names and layouts are those of loops written out."""
    params = params_of(name)
    tensors = named(CONFIGS[name], params)
    write(tmp_path / "theirs", fields_of(name), tensors, shards=3)
    config, loaded = hf.load(tmp_path / "theirs")
    assert config == CONFIGS[name]
    _equal(loaded, params)
    hf.save(tmp_path / "ours", config, loaded, dtype="float32")
    written = _read(tmp_path / "ours")
    assert written.keys() == tensors.keys()
    for key, value in tensors.items():
        assert written[key] == ("F32", value.shape, value.tobytes()), key


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_bf16_files_come_back(dtype, tmp_path):
    """However they are held in between, and in as many files as wanted."""
    name = "moonlight"
    tensors = {
        key: value if key.endswith("bias") else bf16(value)
        for key, value in named(CONFIGS[name], params_of(name)).items()
    }
    write(tmp_path / "theirs", fields_of(name), tensors)
    config, params = hf.load(tmp_path / "theirs", dtype=dtype)
    bias = params["layers"]["router"]["e_score_correction_bias"]
    assert bias.dtype == np.float32
    single = {"float32": (*SMALL, LINEAR, TABLE), "bfloat16": SMALL, "fp8": ()}[dtype]
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        role = role_of(path_of(path))
        assert x is bias or x.dtype == (np.float32 if role in single else jnp.bfloat16), path
    hf.save(tmp_path / "ours", config, params, max_shard_gb=1e-4)
    assert _read(tmp_path / "ours") == _read(tmp_path / "theirs")
    sizes = [f.stat().st_size for f in (tmp_path / "ours").glob("model-*.safetensors")]
    assert len(sizes) > 2 and max(sizes) < 1.2e5


@pytest.mark.parametrize("name", ["qwen3", pytest.param("latent_fp8", marks=pytest.mark.slow)])
def test_fp8_files_come_back(name, tmp_path):
    """Bytes and scales, through QArrays; as values they are weight * weight_scale_inv."""
    tensors = fp8_tensors(name)
    write(tmp_path / "theirs", fields_of(name, fp8=True), tensors, shards=2)
    config, params = hf.load(tmp_path / "theirs", dtype="fp8")
    linears = [
        x
        for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QArray))
        if isinstance(x, QArray)
    ]
    assert len(linears) >= 7 and all(x.qvalue.dtype == _FP8 for x in linears)
    hf.save(tmp_path / "ours", config, params, dtype="fp8")
    assert _read(tmp_path / "ours") == _read(tmp_path / "theirs")

    _, masters = hf.load(tmp_path / "theirs")
    for key, value in named(config, masters).items():
        scale = tensors.get(key + "_scale_inv")
        expected = tensors[key].astype(np.float32)
        if scale is not None and expected.ndim == 2 and tensors[key].dtype == _FP8:
            for row, column in np.ndindex(*scale.shape):
                block = np.s_[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
                expected[block] *= scale[row, column]
        np.testing.assert_array_equal(np.asarray(value), expected, key)


@pytest.mark.slow  # quick: what the sampler serves, below
@pytest.mark.parametrize("name", ["deepseek_v3", "latent_fp8"])
def test_fp8_export_is_a_fresh_quantisation(name, tmp_path):
    """Of the BF16 weights, in the matrices that the checkpoint holds; the rest is named."""
    params = params_of(name)
    hf.save(tmp_path / "fp8", CONFIGS[name], params, dtype="fp8")
    written, expected = _read(tmp_path / "fp8"), fp8_tensors(name)
    assert written.keys() == expected.keys()
    kept = set()
    for key, value in expected.items():
        dtype, shape, data = written[key]
        if dtype == "F32" and value.dtype != np.float32:  # norms and routers keep float32
            value, kept = named(CONFIGS[name], params)[key], kept | {key}
        assert (shape, data) == (value.shape, value.tobytes()), key
    assert all("norm" in key or key.endswith("mlp.gate.weight") for key in kept) and kept
    about = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    not_converted = set(about.pop("modules_to_not_convert"))
    assert about == fields_of(name, fp8=True)["quantization_config"]
    fp8 = {key.removesuffix(".weight") for key in written if written[key][0] == "F8_E4M3"}
    others = {k.rpartition(".")[0] for k in written if not k.endswith("_scale_inv")} - fp8
    assert not_converted == others


def test_export_is_what_the_sampler_serves(tmp_path):
    """QArrays of `quantize_params` and their masters give the same files, and come back."""
    params = params_of("qwen3")
    weights = quantized(params, "fp8_blockwise")
    for folder, tree in (("masters", params), ("served", weights)):
        hf.save(tmp_path / folder, CONFIGS["qwen3"], tree, dtype="fp8")
    assert _read(tmp_path / "masters") == _read(tmp_path / "served")
    loaded = hf.load(tmp_path / "masters", dtype="fp8")[1]
    _equal(loaded, weights)
    assert [x.dtype for x in jax.tree.leaves(loaded)] == [x.dtype for x in jax.tree.leaves(weights)]


@pytest.mark.parametrize("name", ["qwen3", slow("latent_fp8")])
def test_slices_do_not_show(name, tmp_path, monkeypatch):
    """Read a few rows at a time, also across blocks of 128, tensors are the same."""
    write(tmp_path / "fp8", fields_of(name, fp8=True), fp8_tensors(name))
    whole = {dtype: hf.load(tmp_path / "fp8", dtype=dtype)[1] for dtype in ("float32", "fp8")}
    monkeypatch.setattr(loader, "SLICE_BYTES", 3000)
    for dtype, params in whole.items():
        _equal(hf.load(tmp_path / "fp8", dtype=dtype)[1], params)


def test_half_precision_and_bf16_scales(tmp_path):
    """F16 tensors and BF16 scales, as some published files have them."""
    tensors = fp8_tensors("qwen3")
    for key, value in tensors.items():
        if key.endswith("_scale_inv"):
            tensors[key] = bf16(value)
        elif value.dtype == ml_dtypes.bfloat16:
            tensors[key] = value.astype(np.float16)
    write(tmp_path / "theirs", fields_of("qwen3", fp8=True), tensors)
    params = hf.load(tmp_path / "theirs", dtype="fp8")[1]
    assert params["embed_tokens"].dtype == np.float32
    table = tensors["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["embed_tokens"], table)
    scale = params["layers"]["o_proj"]["kernel"].scale[1].T
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    np.testing.assert_array_equal(scale, tensors[name].astype(np.float32))


def test_names_that_are_passed_over(tmp_path):
    """A tied head, rotary frequencies, modules of DeepSeek and GLM for further tokens."""
    for name, further, more in (
        ("qwen3_tied", "model.layers.0.self_attn.rotary_emb.inv_freq", {}),
        ("moonlight", "model.layers.3.eh_proj.weight", {}),
        ("glm4_moe", "model.layers.3.eh_proj.weight", {"num_nextn_predict_layers": 1}),
    ):
        params = params_of(name)
        tensors = named(CONFIGS[name], params) | {further: np.ones(3, np.float32)}
        if name == "qwen3_tied":
            tensors["lm_head.weight"] = params["embed_tokens"]
        write(tmp_path / name, fields_of(name) | more, tensors)
        _equal(hf.load(tmp_path / name)[1], params)
    with pytest.raises(UserError, match=r"lm_head.weight is not the embedding.*tie_word"):
        tensors = named(CONFIGS["qwen3_tied"], params_of("qwen3_tied"))
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
        hf.load(write(tmp_path / "untied", fields_of("qwen3_tied"), tensors))


_SHARDED = """
import pathlib, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from fp8rl_jax.models import hf, param_shardings
from fp8rl_jax.models.hf.placement import Filling
from fp8rl_jax.sharding import make_mesh

def compare(path, dtype, **mesh):
    mesh = make_mesh({"data": 1, "fsdp": 1, "tensor": 1, "expert": 1} | mesh)
    (config, one), wanted = hf.load(path, dtype=dtype), []
    def place(shapes):
        wanted.append(param_shardings(mesh, shapes))
        return wanted[0]
    many = hf.load(path, dtype=dtype, shardings=place)[1]
    for x, y, sharding in zip(*map(jax.tree.leaves, (one, many, wanted[0])), strict=True):
        assert y.sharding == sharding and x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert any(not y.is_fully_replicated for y in jax.tree.leaves(many))
    for params, folder in ((one, "_one"), (many, "_many")):
        hf.save(path + dtype + folder, config, params, dtype=dtype)
    files = [pathlib.Path(path + dtype + f, "model.safetensors") for f in ("_one", "_many")]
    assert files[0].read_bytes() == files[1].read_bytes()
    return wanted[0]

plain, fp8 = sys.argv[1:]
compare(plain, "float32", expert=2)

# Rows that a device holds a part of, which begins and ends within blocks of 128.
mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 1, "expert": 1})
rng = np.random.default_rng(0)
rows, scales = rng.random((4, 300), np.float32), rng.random((4, 3), np.float32)
for transposed, spec in ((True, ("fsdp", None)), (False, (None, "fsdp"))):
    expected = rows * np.repeat(scales, 128, 1)[:, :300]
    expected = expected.T if transposed else expected
    sharding = NamedSharding(mesh, PartitionSpec(None, *spec))
    filling = Filling((2, *expected.shape), np.float32, sharding)
    for start in (0, 3):
        part = slice(start, start + 3)
        filling.write((1,), (start, 0), rows[part], transposed, scales[part])
    np.testing.assert_array_equal(np.asarray(filling.finish())[1], expected)

tree = compare(fp8, "fp8", tensor=2)
hf.load(fp8, dtype="fp8", shardings=tree)
try:
    hf.load(plain, shardings=tree)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_sharded_is_the_same(tmp_path):
    """On two devices with features, vocabulary or experts in parts; FP8 blocks too."""
    write(
        tmp_path / "a", fields_of("moonlight"), named(CONFIGS["moonlight"], params_of("moonlight"))
    )
    write(tmp_path / "b", fields_of("qwen3", fp8=True), fp8_tensors("qwen3"))
    done = subprocess.run(
        [sys.executable, "-c", _SHARDED, str(tmp_path / "a"), str(tmp_path / "b")],
        capture_output=True,
        text=True,
        env=_environment(XLA_FLAGS="--xla_force_host_platform_device_count=2"),
    )
    assert done.returncode == 0 and "shardings has 21 leaves" in done.stdout, done.stderr


def _environment(**changes: str) -> dict[str, str]:
    import os

    path = os.pathsep.join(p for p in sys.path if p)
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | changes


def _good(tmp_path, shards: int = 2, fp8: bool = False):
    tensors = fp8_tensors("qwen3") if fp8 else named(CONFIGS["qwen3"], params_of("qwen3"))
    return write(tmp_path / "model", fields_of("qwen3", fp8=fp8), tensors, shards), tensors


def _refused(directory, *words: str, dtype: str = "float32") -> None:
    with pytest.raises(UserError) as raised:
        hf.load(directory, dtype=dtype)
    sentence = str(raised.value)
    assert "\n" not in sentence and str(directory) in sentence
    for word in words:
        assert word in sentence, sentence


_Q = "model.layers.1.self_attn.q_proj.weight"
_SCALE = _Q + "_scale_inv"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(_Q), [_Q, "has no tensor", "download"]),
        (lambda t: t.update(extra=np.zeros(3, np.float32)), ["extra", "no place"]),
        (lambda t: t.update({_Q: t[_Q].T.copy()}), [_Q, "[64, 128]", "[128, 64]"]),
        (lambda t: t.update({_Q: t[_Q].astype(np.float64)}), [_Q, "F64", "BF16"]),
        (lambda t: t.update({_Q: t[_Q].astype(_FP8)}), [_Q, "quantization_config"]),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].astype(_FP8)}),
            ["model.norm.weight", "F8_E4M3"],
        ),
    ],
)
def test_wrong_tensor_is_named(change, words, tmp_path):
    _, tensors = _good(tmp_path / "good")
    change(tensors)
    _refused(write(tmp_path / "bad", fields_of("qwen3"), tensors), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(_SCALE), [_SCALE, "no"]),
        (lambda t: t.update({_SCALE: t[_SCALE][:, :0]}), [_SCALE, "[1, 0]", "[1, 1]"]),
        (lambda t: t.update({_SCALE: t[_SCALE].astype(np.float16)}), [_SCALE, "F16", "F32"]),
        (lambda t: t.update({_Q: bf16(t[_Q].astype(np.float32))}), [_SCALE, "no place"]),
    ],
)
def test_wrong_scales_are_named(change, words, tmp_path):
    _, tensors = _good(tmp_path / "good", fp8=True)
    change(tensors)
    _refused(write(tmp_path / "bad", fields_of("qwen3", fp8=True), tensors), *words)


def test_fp8_that_cannot_be_kept(tmp_path):
    """A stack half of which is FP8, and heads that end within a block; as values both load."""
    _, tensors = _good(tmp_path / "good", fp8=True)
    tensors[_Q] = bf16(tensors[_Q].astype(np.float32))
    del tensors[_SCALE]
    mixed = write(tmp_path / "mixed", fields_of("qwen3", fp8=True), tensors)
    _refused(mixed, _Q, "model.layers.0.self_attn.q_proj.weight", "float32", dtype="fp8")
    hf.load(mixed, dtype="bfloat16")
    heads = write(tmp_path / "heads", fields_of("moonlight", fp8=True), fp8_tensors("moonlight"))
    _refused(heads, "kv_b_proj.weight", "128 rows", dtype="fp8")
    hf.load(heads)


def _edit(file, change) -> None:
    data = bytearray(file.read_bytes())
    file.write_bytes(change(data))


def _header(data: bytearray, **changes) -> bytes:
    """The file with another header."""
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name] |= changes
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data[8 + length :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d[:-100], ["ends within tensor", "download it again"]),
        (lambda d: d + b"12345", ["5 bytes after"]),
        (lambda d: d[:5], ["no whole safetensors header"]),
        (lambda d: b"", ["no whole safetensors header"]),
        (lambda d: b"\xff" * 8 + d[8:], ["no whole safetensors header"]),
        (lambda d: d[:20] + b"\0\0" + d[22:], ["not valid"]),
        (lambda d: d[:8] + b"[" + d[9:], ["not valid"]),
        (lambda d: _header(d, shape=[-1, 3]), ["not valid"]),
        (lambda d: _header(d, shape="many"), ["not valid"]),
        (lambda d: _header(d, extra=1), ["not valid"]),
        (lambda d: _header(d, shape=[7, 7]), ["do not fit its shape"]),
        (lambda d: _header(d, data_offsets=[8, 16]), ["do not fit its shape"]),
    ],
)
def test_damaged_file_is_named(change, words, tmp_path):
    directory, _ = _good(tmp_path)
    file = directory / "model-00002-of-00002.safetensors"
    _edit(file, change)
    _refused(directory, str(file), *words)


def test_missing_and_mixed_up_files(tmp_path):
    directory, _ = _good(tmp_path)
    index, shard = (
        directory / name
        for name in ("model.safetensors.index.json", "model-00002-of-00002.safetensors")
    )
    text, data = index.read_text(), shard.read_bytes()
    shard.unlink()
    _refused(directory, shard.name, "lacks the file", "download")
    shard.write_bytes(data)
    weights = json.loads(text)["weight_map"]
    for changes, words in (
        ({"absent": shard.name}, ["absent", shard.name, "does not hold it"]),
        ({_Q: "../model.safetensors"}, [_Q, "no name of a file"]),
        ({_Q: "model-00001-of-00002.safetensors"}, [_Q, "model-00001-of-00002"]),
    ):
        index.write_text(json.dumps({"weight_map": weights | changes}))
        _refused(directory, *words)
    del weights[_Q]
    index.write_text(json.dumps({"weight_map": weights}))
    _refused(directory, _Q, "does not place there")
    for broken in ("{", "[]", '{"weight_map": 3}'):
        index.write_text(broken)
        _refused(directory, "no index with a weight_map")
    index.unlink()
    _refused(directory, "neither")
    for file in directory.glob("*.safetensors"):
        file.unlink()
    _refused(directory, "no model.safetensors")
    (directory / "pytorch_model.bin").touch()
    _refused(directory, "torch's own format")
    (directory / "config.json").write_text("{")
    _refused(directory, "not JSON")
    (directory / "config.json").write_text("[]")
    _refused(directory, "no JSON object")
    (directory / "config.json").unlink()
    _refused(directory, "no config.json")
    _refused(tmp_path / "nowhere", "no directory")
    with pytest.raises(UserError, match="dtype is 'int8'; write one of"):
        hf.load(directory, dtype="int8")


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    "other",
    [
        "model.safetensors",
        "model-00001-of-00003.safetensors",
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "q4.gguf",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "consolidated.00.pth",
        "tf_model.h5",
    ],
)
def test_two_sets_of_weights_are_refused(shards, other, tmp_path):
    """Which of them is meant nobody knows; before a byte of them is read."""
    directory, tensors = _good(tmp_path) if shards == 2 else (tmp_path / "single", None)
    if shards == 1:
        tensors = {name: bf16(x) for name, x in named(CONFIGS["qwen3"], params_of("qwen3")).items()}
        write(directory, fields_of("qwen3"), tensors)
    if (directory / other).exists():  # the single file itself: an index beside it
        other = "model.safetensors.index.json"
        places = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
        (directory / other).write_text(json.dumps({"weight_map": places}))
        _refused(directory, "two sets of weights", other, " and model.safetensors:")
        return
    (directory / other).write_bytes(b"")
    name = "model.safetensors" + (".index.json" if shards == 2 else "")
    _refused(directory, "two sets of weights", f"{name} and {other}:")


def test_files_that_are_no_weights_may_be_there(tmp_path):
    """What a trainer leaves; an index may name the single file."""
    directory, tensors = tmp_path / "single", {}
    for name, x in named(CONFIGS["qwen3"], params_of("qwen3")).items():
        tensors[name] = bf16(x)
    write(directory, fields_of("qwen3"), tensors)
    for name in ("training_args.bin", "optimizer.pt", "rng_state.pth", "tokenizer.model"):
        (directory / name).write_bytes(b"")
    places = dict.fromkeys(tensors, "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    hf.load(directory)


def test_a_directory_of_gguf_files_is_no_checkpoint(tmp_path):
    directory, _ = _good(tmp_path)
    for file in directory.glob("model*"):
        file.unlink()
    for name in ("q8.gguf", "q4.gguf"):
        (directory / name).write_bytes(b"")
    _refused(directory, "q4.gguf, q8.gguf", "by transformers")


@pytest.mark.parametrize("dtype", ["F64", "F8_E5M2", "I64", "U8", "F8_E8M0", "F4"])
@pytest.mark.parametrize("which", ["all", "one"])
def test_types_that_are_not_supported_are_named(dtype, which, tmp_path):
    """Of all tensors or of one: not "download again"."""
    directory, _ = _good(tmp_path)
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        for name in header:
            if name != "__metadata__" and (which == "all" or name == _Q):
                header[name]["dtype"] = dtype
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    _refused(directory, f"has type {dtype}, and F32, BF16, F16")


def test_saving_is_whole_or_not_at_all(tmp_path, monkeypatch):
    """A failure on the way leaves neither the directory nor a part of it."""
    config, params = CONFIGS["qwen3"], params_of("qwen3")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        hf.save(tmp_path / "there", config, params)

    def fail(directory):
        assert (directory / "model.safetensors").is_file()
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        hf.save(tmp_path / "deep" / "new", config, params, beside=hf.Beside(add_files=fail))
    assert not list((tmp_path / "deep").iterdir())
    with pytest.raises(UserError, match="cannot be written"):
        (tmp_path / "file").touch()
        hf.save(tmp_path / "file" / "new", config, params)
    with pytest.raises(UserError, match="max_shard_gb"):
        hf.save(tmp_path / "new", config, params, max_shard_gb=0)
    assert {path.name for path in tmp_path.iterdir()} == {"there", "deep", "file"}


def test_parameters_that_cannot_be_saved(tmp_path):
    config, params = CONFIGS["qwen3"], params_of("qwen3")
    larger = ModelConfig(**vars(config) | {"num_hidden_layers": 4})
    other = params | {"lm_head": jax.jit(lambda x: quantize(x, (1, 32)))(params["lm_head"])}
    for tree, own, words in (
        (params, larger, ["layers", "shape", "(4,"]),
        ({k: v for k, v in params.items() if k != "norm"}, config, ["norm.weight"]),
        (params | {"more": np.ones(3)}, config, ["more", "no place"]),
        (other, config, ["lm_head", "blocks of", "(128, 128)", "masters"]),
    ):
        with pytest.raises(UserError) as raised:
            hf.save(tmp_path / "new", own, tree, dtype="fp8")
        for word in words:
            assert word in str(raised.value), raised.value
    heads = jax.tree_util.tree_map_with_path(_by_head, params_of("moonlight"))
    with pytest.raises(UserError, match=r"v_b_proj.*kv_b_proj.*masters"):
        hf.save(tmp_path / "new", CONFIGS["moonlight"], heads, dtype="fp8")
    assert not list(tmp_path.iterdir())


@jax.jit
def _in_blocks(leaf):
    return quantize(leaf, (128, 128))


def _by_head(path, leaf):
    """FP8 for the matrices of latent attention's keys and values, as the sampler holds them."""
    return _in_blocks(leaf) if "_b_proj" in path[-2:][0].key else leaf
