"""Checkpoints come back bit for bit, or are refused in a sentence; never something in between."""

import gc
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from marks import slow

import fp8rl_jax
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.learner import TrainState, new_state
from fp8rl_jax.training import checkpoint
from fp8rl_jax.training.checkpoint import Checkpoints, state_checksum
from fp8rl_jax.training.optimizer import learning_rates, make_optimizer

# A read that fails leaves coroutines of orbax behind, which complain when they are collected:
# that is made to happen here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.usefixtures("_collect"),
]

_META = {"phase": "rl", "step": 1, "offsets": {"metrics": 30, "eval": 40}}


_OPTIMIZER = make_optimizer(learning_rates(1e-2, 1), 0.9, 0.99, 0.1, 1.0)
_UPDATE = jax.jit(_OPTIMIZER.update)


@jax.jit
def _begin(params, rng) -> TrainState:
    return new_state(params, _OPTIMIZER, rng, "fp8_delayed")


@jax.jit
def _advance(state: TrainState) -> TrainState:
    changes, opt_state = _OPTIMIZER.update(state.params, state.opt_state, state.params)
    return state.replace(params=optax.apply_updates(state.params, changes), opt_state=opt_state)


def make_state(seed: int, width: int = 24, updates: int = 0) -> TrainState:
    """A TrainState with the leaves of a real one: float32, int32 and uint32, optax's included."""
    draw = np.random.default_rng(seed).standard_normal
    params = {
        "embed_tokens": draw((13, width)).astype(np.float32),
        "layers": {"self_attn": {"q_proj": {"kernel": draw((2, width, 8)).astype(np.float32)}}},
        "norm": {"weight": np.ones(width, np.float32)},
    }
    state = _begin(params, np.uint32([seed, 7 * seed]))
    for _ in range(updates):
        state = _advance(state)
    return state.replace(step=jnp.int32(seed), data_state=jnp.int32(3 * seed + 1))


def assert_same_bits(found, expected) -> None:
    """Fails at the first leaf that differs in shape, dtype or any bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    leaves = zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, ours), theirs in leaves:
        name, ours, theirs = jax.tree_util.keystr(path), np.asarray(ours), np.asarray(theirs)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        assert ours.tobytes() == theirs.tobytes(), name


@pytest.fixture(scope="module")
def _collect():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def state() -> TrainState:
    """A state after two updates; it holds NaN, infinity, -0 and a denormal."""
    state = make_state(1, updates=2)
    odd = jnp.array([np.nan, -np.inf, -0.0, 1e-42], jnp.float32)
    weight = state.params["norm"]["weight"].at[:4].set(odd)
    return state.replace(params={**state.params, "norm": {"weight": weight}})


@pytest.fixture(scope="module")
def other() -> TrainState:
    """Same shapes as `state`, other values everywhere."""
    return make_state(2)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory) -> pathlib.Path:
    """A directory that holds `state` as checkpoint 1. Copied by the tests, never changed."""
    directory = tmp_path_factory.mktemp("saved") / "checkpoints"
    checkpoints = Checkpoints(directory, keep=2)
    checkpoints.save(1, state, _META)
    checkpoints.close()
    return directory


@pytest.fixture
def copy(saved, tmp_path) -> pathlib.Path:
    """A copy of `saved` that a test may damage."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def read(directory: pathlib.Path, like):
    """(meta, state) of the newest checkpoint, opened as a new process would."""
    checkpoints = Checkpoints(directory, keep=2)
    try:
        number = checkpoints.latest()
        return checkpoints.read_meta(number), checkpoints.restore(number, like)
    finally:
        checkpoints.close()


def assert_refused(directory: pathlib.Path, like, number: int = 1) -> str:
    """Reading fails with one sentence that names the checkpoint; returns the sentence."""
    with pytest.raises(UserError) as error:
        read(directory, like)
    message = str(error.value)
    assert str(directory / str(number)) in message
    assert "\n" not in message
    return message


# Round trips.


def test_round_trip_is_bit_for_bit(saved, state, other):
    """Parameters, optimiser moments and counts, key data, step and stream position."""
    meta, found = read(saved, other)
    assert_same_bits(found, state)
    assert {name: meta[name] for name in _META} == _META
    assert int(found.step) == 1 and int(found.data_state) == 4
    assert int(found.opt_state[1][0].count) == 2, "the state saved has seen no update"
    assert found.rng.dtype == jnp.uint32


# Ten names, each a directory in another: a name is read as a part of a path.
@pytest.mark.parametrize(
    "name", ["[lr=1e-4]/a*b?/a\\b", "a%20b#c/a b\nc/-é漢", "~/gs:/s3:x/[[{a,b}]]"]
)
def test_a_directory_of_any_name(name, tmp_path, state, other):
    """Orbax takes brackets for a pattern, tensorstore a backslash for a slash and `gs:` for an
    address: the name of a run's directory reaches neither. Nothing is written beside it."""
    directory = tmp_path / name / "checkpoints"
    checkpoints = Checkpoints(directory, keep=2)
    checkpoints.save(1, other, _META)
    checkpoints.save(2, state, _META)
    checkpoints.close()
    assert_same_bits(read(directory, other)[1], state)
    checkpoints = Checkpoints(directory, keep=2, own=True)
    embedding = checkpoints.read_params(1, state)(("embed_tokens",))
    checkpoints.close()
    assert np.array_equal(embedding, other.params["embed_tokens"])
    outer = tmp_path
    for inner in name.split("/"):
        assert os.listdir(outer) == [inner]
        outer = outer / inner
    shutil.rmtree(directory / "2" / "state" / "d")
    with pytest.raises(UserError) as error:
        read(directory, state)
    assert str(directory / "2") in str(error.value) and "/proc/" not in str(error.value)


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "file" / "none")
    for name in ("file", "dangling"):
        with pytest.raises(UserError, match=r"file.* cannot be used \(.*\): mend that"):
            Checkpoints(tmp_path / name, keep=1)


def test_names_without_proc(tmp_path, monkeypatch, state):
    """Where a directory has no other name, those that are misread are refused before a run."""
    monkeypatch.setattr(pathlib.Path, "is_dir", lambda path: not str(path).startswith("/proc"))
    with pytest.raises(UserError, match=r"\[lr=1e-4\] has one of the characters"):
        Checkpoints(tmp_path / "[lr=1e-4]", keep=1)
    checkpoints = Checkpoints(tmp_path / "lr=1e-4", keep=1)
    checkpoints.save(1, state, _META)
    checkpoints.close()


@pytest.mark.parametrize("part_bytes", [1, 2000, 2**28])
def test_the_first_checkpoint_is_read_back(part_bytes, tmp_path, monkeypatch, state):
    """What cannot be read again is said at the first save, not at the resumption; also where the
    arrays are read a few at a time."""
    monkeypatch.setattr(checkpoint, "_PART_BYTES", part_bytes)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, state, _META)
    checkpoints.close()
    sums = checkpoint._array_checksums

    def others(tree):
        return [number + isinstance(tree, list) for number in sums(tree)]  # of what is read back

    monkeypatch.setattr(checkpoint, "_array_checksums", others)
    checkpoints = Checkpoints(tmp_path / "[other]", keep=2)
    with pytest.raises(
        UserError, match=r"\[other\]/1 was written and cannot be read back \(other bytes"
    ):
        checkpoints.save(1, state, _META)
    checkpoints.close()


def test_round_trip_into_shapes(saved, state, other):
    """`like` may be ShapeDtypeStructs; nothing of a real `like` enters the result."""
    assert_same_bits(read(saved, jax.eval_shape(lambda: other))[1], state)


def test_restored_state_continues_like_the_saved_one(saved, state, other):
    """The next update of the optimiser gives the same bits from either."""
    _, found = read(saved, other)
    grads = make_state(3).params
    expected = _UPDATE(grads, state.opt_state, state.params)
    assert_same_bits(_UPDATE(grads, found.opt_state, found.params), expected)


def test_checksum_sees_every_leaf(state):
    """One bit flipped in any single leaf changes the checksum."""
    leaves, structure = jax.tree.flatten(jax.device_get(state))
    before = state_checksum(state)
    for index, leaf in enumerate(leaves):
        bits = np.array(leaf, copy=True).reshape(-1).view(np.uint8)
        bits[-1] ^= 0x40
        changed = bits.view(np.asarray(leaf).dtype).reshape(np.shape(leaf))
        tree = structure.unflatten([*leaves[:index], changed, *leaves[index + 1 :]])
        assert state_checksum(tree) != before, jax.tree.leaves_with_path(state)[index][0]


def test_read_meta(saved):
    """The JSON is what was given, with the checksum of the state."""
    checkpoints = Checkpoints(saved, keep=2)
    meta = checkpoints.read_meta(1)
    assert {name: meta[name] for name in _META} == _META
    with pytest.raises(UserError, match=re.escape(str(saved / "5"))):
        checkpoints.read_meta(5)
    checkpoints.close()


def test_empty_directory_has_no_checkpoint(tmp_path):
    """A directory is made where there is none, and holds nothing."""
    checkpoints = Checkpoints(tmp_path / "a" / "b", keep=1)
    assert checkpoints.latest() is None
    checkpoints.close()
    assert (tmp_path / "a" / "b").is_dir()


# Several checkpoints.


def test_newest_are_kept(tmp_path, other):
    """Of five checkpoints the newest two remain, and each holds its own state."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for number in (1, 2, 4, 8, 16):
        checkpoints.save(number, other.replace(step=jnp.int32(number)), {"step": number})
        assert checkpoints.latest() == number
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["16", "8"]
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() == 16
    for number in (8, 16):
        assert int(checkpoints.restore(number, other).step) == number
        assert checkpoints.read_meta(number)["step"] == number
    checkpoints.close()


def test_keep_limit_holds_after_reopening(copy, other):
    """A resumed run counts the checkpoints that it found, under a new limit too."""
    for keep, number, left in ((2, 2, ["1", "2"]), (2, 3, ["2", "3"]), (1, 4, ["4"])):
        checkpoints = Checkpoints(copy, keep=keep)
        checkpoints.save(number, other, {})
        checkpoints.close()
        assert sorted(p.name for p in copy.iterdir()) == left


def test_existing_number_is_left_alone(copy, state, other):
    """Saving under a number that exists changes nothing."""
    checkpoints = Checkpoints(copy, keep=2)
    checkpoints.save(1, other, {"phase": "sft"})
    checkpoints.close()
    meta, found = read(copy, other)
    assert meta["phase"] == "rl"
    assert_same_bits(found, state)


# Interrupted saves.

_DYING_SAVE = """
import os, pathlib, sys
import test_checkpoint
from fp8rl_jax.training.checkpoint import Checkpoints

directory = pathlib.Path(sys.argv[1])

def die(event, arguments):
    # the last rename gives the finished directory its number
    if event == "os.rename" and os.path.realpath(os.fsdecode(arguments[1])) == str(directory / "2"):
        os._exit(9)

sys.addaudithook(die)
checkpoints = Checkpoints(directory, keep=2)
checkpoints.save(2, test_checkpoint.make_state(2), {"phase": "rl"})
checkpoints.close()
"""


def test_process_that_dies_while_saving(copy, state, other):
    """It leaves the checkpoint before intact and newest, and the next save goes through."""
    here = pathlib.Path(__file__).parent
    paths = [pathlib.Path(fp8rl_jax.__file__).parents[1], here, here.parent / "helpers"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", _DYING_SAVE, str(copy)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert process.returncode == 9, process.stderr
    left = {p.name for p in copy.iterdir()}
    assert "2" not in left and len(left) == 2, "the save was not interrupted half-way"

    assert_same_bits(read(copy, other)[1], state)
    checkpoints = Checkpoints(copy, keep=2)
    checkpoints.save(2, other, {"phase": "rl"})
    checkpoints.close()
    assert_same_bits(read(copy, state)[1], other)
    assert {p.name for p in copy.iterdir()} == {"1", "2"}, "the interrupted save still lies there"


@pytest.mark.parametrize("name", ["7.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-1234", "tmp"])
def test_temporary_directories_are_ignored(copy, state, other, name):
    """Half a checkpoint under a temporary name is never the newest one."""
    shutil.copytree(copy / "1", copy / name)
    shutil.rmtree(copy / name / "meta")
    assert_same_bits(read(copy, other)[1], state)


# Damage.


def _files(directory: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file())


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: pathlib.Path) -> None:
    os.truncate(path, 0)


def _zero(path: pathlib.Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(path: pathlib.Path, place: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def _flip_early(path: pathlib.Path) -> None:
    _flip(path, 0.1)


def _flip_late(path: pathlib.Path) -> None:
    _flip(path, 0.9)


@pytest.mark.parametrize(
    "damage",
    [pathlib.Path.unlink, _truncate, _flip, *map(slow, (_empty, _zero, _flip_early, _flip_late))],
)
def test_no_damaged_file_changes_what_is_read(saved, state, other, tmp_path, damage):
    """Each file of a checkpoint in turn: the state is the saved one, or it is refused.

    Refused must be at least the arrays, their index and the metadata; orbax also writes files
    that it does not need for reading.
    """
    refused = 0
    for index, original in enumerate(_files(saved / "1")):
        directory = shutil.copytree(saved, tmp_path / str(index))
        damage(directory / original.relative_to(saved))
        try:
            meta, found = read(directory, other)
        except UserError as error:
            assert "\n" not in str(error)
            assert not re.search("driver|zarr|[Tt]ensor[Ss]tore|OCDBT|Error|Exception", str(error))
            refused += 1
        else:
            assert_same_bits(found, state)
            assert {name: meta.get(name) for name in _META} == _META, original.name
    assert refused >= 4


@pytest.mark.parametrize("damage", [pathlib.Path.unlink, _truncate, _flip])
def test_damaged_arrays_are_refused(copy, other, damage):
    """The largest file holds the arrays; the sentence says where to go from here."""
    largest = max(_files(copy / "1" / "state"), key=lambda p: p.stat().st_size * ("d" in p.parts))
    damage(largest)
    assert "another run.dir" in assert_refused(copy, other)


@pytest.mark.parametrize("part", ["state", "meta"])
def test_missing_half_is_refused(copy, other, part):
    """Arrays without metadata, or metadata without arrays."""
    shutil.rmtree(copy / "1" / part)
    assert_refused(copy, other)


def _metadata(directory: pathlib.Path) -> pathlib.Path:
    (path,) = (p for p in _files(directory / "1" / "meta") if "commit" not in p.name)
    return path


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "{}", "7", '{"phase": "rl"}'])
def test_metadata_that_is_none_of_ours(copy, other, content):
    """Broken JSON, or JSON of another kind, is refused rather than followed."""
    _metadata(copy).write_text(content)
    assert_refused(copy, other)


@pytest.mark.parametrize(
    ("field", "value"), [("step", 2), ("phase", "sft"), ("offsets", {"metrics": 31, "eval": 40})]
)
def test_changed_metadata_is_refused(copy, other, field, value):
    """Step, phase and log sizes are covered by the checksum as the arrays are."""
    path = _metadata(copy)
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, field: value}))
    assert_refused(copy, other)


def test_changed_checksum_is_refused(copy, other):
    """The checksum is compared, not only stored."""
    path = _metadata(copy)
    meta = json.loads(path.read_text())
    path.write_text(json.dumps({**meta, "checksum": meta["checksum"] ^ 1}))
    assert "checksum" in assert_refused(copy, other)


def test_arrays_of_another_checkpoint_are_refused(copy, other):
    """A whole and readable state under the metadata of another one."""
    checkpoints = Checkpoints(copy, keep=2)
    checkpoints.save(2, other, _META)
    checkpoints.close()
    shutil.rmtree(copy / "1" / "state")
    shutil.move(copy / "2" / "state", copy / "1" / "state")
    shutil.rmtree(copy / "2")
    assert "checksum" in assert_refused(copy, other)


@pytest.mark.parametrize("width", [16, 32, 48])
def test_other_model_shape_is_refused(saved, width):
    """Neither cut nor padded to the shape that was asked for."""
    assert "another model" in assert_refused(saved, make_state(2, width))


def test_other_structure_is_refused(saved, other):
    """Parameters alone, a state with one leaf more, and a state with one leaf less."""
    more = {**other.params, "lm_head": {"kernel": jnp.zeros((24, 13))}}
    less = {name: value for name, value in other.params.items() if name != "norm"}
    for like in (other.params, other.replace(params=more), other.replace(params=less)):
        assert "another model" in assert_refused(saved, like)


def test_other_dtype_is_refused(saved, other):
    """A float32 checkpoint is not rounded into a bf16 state."""
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), other.params)
    assert "another model" in assert_refused(saved, other.replace(params=half))


def test_the_way_back_is_named(copy, state, other):
    """If an older checkpoint is whole, the sentence names it, and following it works."""
    checkpoints = Checkpoints(copy, keep=2)
    checkpoints.save(3, other, _META)
    checkpoints.close()
    _empty(max(_files(copy / "3" / "state"), key=lambda p: p.stat().st_size * ("d" in p.parts)))
    assert "checkpoint 1" in assert_refused(copy, other, number=3)
    shutil.rmtree(copy / "3")
    assert_same_bits(read(copy, other)[1], state)


def test_number_without_content_is_refused(copy, other):
    """An empty directory with a number is no checkpoint, and is not skipped in silence."""
    (copy / "9").mkdir()
    assert "checkpoint 1" in assert_refused(copy, other, number=9)


def test_metadata_of_another_form(tmp_path):
    """Its digest fits: somebody wrote it so."""
    forms = (
        {"phase": 3},
        {"phase": "other"},
        {"step": "1"},
        {"step": -1},
        {"offsets": [1]},
        {"offsets": {"metrics": None}},
        {"offsets": {"metrics": -1}},
    )
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    checkpoints.save(0, {"x": jnp.zeros(3)}, {})  # the first one is read back
    for number, meta in enumerate(forms, 1):
        checkpoints.save(number, {"x": jnp.zeros(3)}, _META | meta)
        with pytest.raises(UserError, match="another form"):
            checkpoints.read_meta(number)
    checkpoints.close()


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_writes_that_fail_together(first, tmp_path, capsys, caplog):
    """Many arrays of a state cannot be written, as on a full disk: one error is raised, and nothing
    is printed or logged. That of a later checkpoint, which is written meanwhile, comes with the
    next call; those before it stay."""
    gc.collect()  # failed reads of other tests complain when they are collected
    caplog.clear()
    checkpoints = Checkpoints(tmp_path, keep=1)
    draw = np.random.default_rng(0).random
    state = {str(n): jnp.asarray(draw((128, 64)), jnp.float32) for n in range(40)}
    if not first:
        checkpoints.save(0, state, {})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpoints.save(1, state, {})
            assert not first
            time.sleep(0.5)
            checkpoints.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    checkpoints.close()
    assert capsys.readouterr().err == "" and caplog.records == []
    assert Checkpoints(tmp_path, keep=1, own=True).latest() == (None if first else 0)


def test_a_state_may_be_donated_while_it_is_written(tmp_path):
    """The update after a save overwrites nothing of it."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    update = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {str(n): jnp.full((256, 1024), n, jnp.float32) for n in range(20)}
    checkpoints.save(0, {"x": jnp.zeros(1)}, {})  # the first one is complete on return
    checkpoints.save(1, state, {})
    for _ in range(5):
        state = jax.block_until_ready(update(state))
    found = checkpoints.restore(1, state)
    assert all((np.asarray(found[name]) == int(name)).all() for name in found)
    checkpoints.close()
