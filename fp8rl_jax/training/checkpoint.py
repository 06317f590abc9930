"""Checkpoints of a run through orbax: complete or absent, verified when read.

A checkpoint is the `TrainState` and a small JSON with the phase, the step, the sizes of the run's
log files and checksums of every byte of the state. Orbax writes into a temporary directory and
renames it, so a killed run leaves complete checkpoints only. In a run of one process it writes
while the run goes on, but for a directory's first checkpoint, which is read back at once.

Orbax and tensorstore take some names for patterns or addresses (`[lr=1e-4]`, `a\\b`, `gs:`), and
would write a checkpoint that nothing can read. They get a path by the directory's open descriptor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import io
import json
import logging
import os
import pathlib
import re
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import traverse_util
from orbax.checkpoint import checkpoint_managers as policies

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError, refused_by_system
from fp8rl_jax.base.exact_jit import exact_jit
from fp8rl_jax.models import array_checksums, chained
from fp8rl_jax.models.masters import frozen, with_frozen
from fp8rl_jax.models.stacks import Path, path_of
from fp8rl_jax.training.offload import is_on_host, to_device
from fp8rl_jax.training.run_directory import STORE_ERRORS

_MISREAD = re.compile(r"[*?\[\]\\:]")
_PART_BYTES = 2**28  # largest size of arrays that are read back together
_LONGEST_WRITE = 7 * 24 * 3600  # seconds that a checkpoint may take
_ARRAYS = "arrays"  # the item of a checkpoint that has `Beside.arrays`
_OTHER_WRITES = 3.0  # seconds to wait for writes in flight after one has failed


def _of_others(record: logging.LogRecord) -> bool:
    """Returns whether a log record is not orbax's, which reports every phase of a save, and logs
    the errors that it raises."""
    return "orbax" not in record.pathname


class _OtherState(ValueError):
    """The saved state has other arrays than the state to restore."""


class _Damage(ValueError):
    """Damage that this module has found; its text says which."""


@dataclasses.dataclass(frozen=True)
class Beside:
    """What a checkpoint keeps beside the state.

    Attributes:
      meta: values of its JSON.
      arrays: arrays on the host by name, `A/B/C`, for `read_arrays`.
      trees: trees of arrays on the devices by name, for `read_other`.
    """

    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    trees: Mapping[str, Any] = dataclasses.field(default_factory=dict)


NOTHING = Beside()


class Checkpoints:
    """The checkpoints of one directory, by increasing number.

    Args:
      directory: directory, made if it does not exist.
      keep: number of newest checkpoints to keep.
      kept: numbers of checkpoints to keep for good.
      own: whether nothing else writes there; then leftovers of killed processes are removed:
        incomplete checkpoints, and old ones beyond `keep`.

    Raises:
      UserError: the directory cannot be made or opened.
    """

    _base_checksum: int | None = None  # of the frozen base, the same at every save

    def __init__(
        self, directory: pathlib.Path, keep: int, own: bool = False, kept: Sequence[int] = ()
    ):
        logging.getLogger("absl").addFilter(_of_others)
        self._directory = directory.resolve()
        remedy = "mend that, or choose another run.dir"
        with refused_by_system(f"{self._directory} cannot be used", remedy):
            self._directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        self._release = weakref.finalize(self, os.close, descriptor)
        self._path = _nameless(self._directory, descriptor)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(
                [policies.LatestN(keep), policies.CustomSteps(kept)]
            ),
            create=True,
            cleanup_tmp_directories=own,
            # In several processes a failed write would leave the others at a barrier of orbax's.
            enable_async_checkpointing=processes.count() == 1,
            async_options=ocp.AsyncOptions(timeout_secs=_LONGEST_WRITE),
        )
        self._manager = ocp.CheckpointManager(self._path, options=options)
        processes.barrier("the checkpoints are known")  # to all, before one is deleted
        for number in sorted(self._manager.all_steps())[:-keep] if own else ():
            if number not in kept:
                self._manager.delete(number)

    def latest(self) -> int | None:
        """Returns the number of the newest complete checkpoint, or None."""
        self.finish()
        return self._manager.latest_step()

    def newest(self, count: int, upto: int | None = None) -> list[int]:
        """Returns the numbers of the `count` newest complete checkpoints, or of all, ascending; of
        those up to number `upto`, if it is one of them."""
        self.finish()
        numbers = sorted(self._manager.all_steps())
        if upto is not None:
            numbers = numbers[: numbers.index(upto) + 1] if upto in numbers else []
        return numbers[-count:]

    def save(
        self, number: int, state: Any, meta: Mapping[str, Any], beside: Beside = NOTHING
    ) -> None:
        """Starts to write a checkpoint, unless one of that number exists; `finish` waits for it.
        A frozen base is left out, for it is what the run began with; its checksum is kept.

        The state may be donated to a program at once: its arrays are in host memory on return, or
        JAX keeps those that are there from being overwritten. A directory's first checkpoint is
        complete on return, and read back.

        Raises:
          UserError: it is the directory's first checkpoint, and cannot be read back.
          OSError: it, or the one before it, cannot be written.
        """
        self.finish()
        there = self._manager.all_steps()
        base = frozen(state)
        if number in there:
            return
        state = with_frozen(state, None)
        sums = _array_checksums(state)
        content = {
            **meta,
            **beside.meta,
            "checksum": state_checksum(state, sums),
            "arrays": dict(zip(_names(state), sums, strict=True)),
            "structure": _structure(state),
            "others": {name: _array_checksums(tree) for name, tree in beside.trees.items()},
            "on_host": {name: _described(array) for name, array in beside.arrays.items()},
        }
        if base is not None:
            self._base_checksum = self._base_checksum or state_checksum(base)
            content["base"] = self._base_checksum
        content["digest"] = _digest(content)
        trees = {"state": state} | {name: _as_bytes(tree) for name, tree in beside.trees.items()}
        if beside.arrays:
            trees[_ARRAYS] = traverse_util.unflatten_dict(dict(beside.arrays), sep="/")
        saves = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        args = ocp.args.Composite(meta=ocp.args.JsonSave(content), **saves)
        with _one_error():
            self._manager.save(number, args=args, force=True)
        if not there:
            self.finish()
            processes.everywhere(lambda: self._read_back(number, state, sums))

    def finish(self) -> None:
        """Waits until the newest checkpoint is complete; raises OSError if it cannot be written."""
        with _one_error():
            self._manager.wait_until_finished()

    def _read_back(self, number: int, state: Any, sums: list[int]) -> None:
        """Restores the checkpoint just saved, some arrays at a time, and compares checksums.

        Raises:
          UserError: the checkpoint cannot be read, or has other bytes.
        """
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        how = ocp.checkpoint_utils.construct_restore_args(shapes)
        leaves, structure = jax.tree.flatten(shapes)
        try:
            self.read_meta(number)
            for part in _parts(leaves):
                chosen = [x if i in part else ocp.PLACEHOLDER for i, x in enumerate(leaves)]
                args = ocp.args.PyTreeRestore(
                    jax.tree.unflatten(structure, chosen), restore_args=how
                )
                with ocp.PyTreeCheckpointer() as reader:
                    tree = reader.restore(self._path / str(number) / "state", args=args)
                found = jax.tree.leaves(tree)
                if _array_checksums([found[i] for i in part]) != [sums[i] for i in part]:
                    raise _Damage("other bytes came back")
        except Exception as error:  # see read_meta
            raise UserError(
                f"{self._directory / str(number)} was written and cannot be read back "
                f"({self._said(error)}): set run.dir on another file system"
            ) from None

    def read_meta(self, number: int) -> dict[str, Any]:
        """Returns a checkpoint's metadata: the JSON next to its arrays; UserError if damaged."""
        try:
            args = ocp.args.Composite(meta=ocp.args.JsonRestore())
            meta = self._manager.restore(number, args=args)["meta"]
            if not isinstance(meta, dict) or meta.get("digest") != _digest(meta):
                raise _Damage("its metadata does not match its digest")
            return _checked(meta)
        except Exception as error:  # orbax and tensorstore raise many types
            raise self._unreadable(number, error) from None

    def restore(self, number: int, like: Any) -> Any:
        """Returns a checkpoint's state, shaped and sharded as `like` (ShapeDtypeStructs or arrays),
        on the frozen base of `like`.

        Raises:
          UserError: the checkpoint is truncated, damaged, of another model, or of another base.
        """
        meta = self.read_meta(number)
        base = frozen(like)
        # What earlier versions wrote beside a run's own checkpoints has no such checksum.
        if base is not None and meta.get("base", "") not in ("", state_checksum(base)):
            raise UserError(
                f"{self._directory / str(number)} holds adapters of another base than "
                "model.checkpoint, or the seed, gives here: put the files back with which the run "
                "began"
            )
        like = with_frozen(like, None)
        try:
            if meta.get("structure") != _structure(like):
                raise _OtherState()
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
            with _one_error(0.0):
                state = self._manager.restore(number, args=args)["state"]
            if state_checksum(state) != meta.get("checksum"):
                raise _Damage("its bytes do not match their checksum")
            return with_frozen(state, base)
        except Exception as error:  # see read_meta
            raise self._unreadable(number, error) from None

    def read_other(self, number: int, name: str, like: Any) -> Any:
        """Returns one of the `Beside.trees` of a checkpoint, shaped and sharded as `like`.

        Raises:
          UserError: as for `restore`.
        """
        meta = self.read_meta(number)
        try:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_bytes(like))
            args = ocp.args.Composite(**{name: ocp.args.StandardRestore(abstract)})
            with _one_error(0.0):
                found = self._manager.restore(number, args=args)[name]
            tree = _of_bytes(found, like)
            if _array_checksums(tree) != meta.get("others", {}).get(name):
                raise _Damage(f"the bytes of {name} do not match their checksums")
            return tree
        except Exception as error:  # see read_meta
            raise self._unreadable(number, error) from None

    def read_arrays(self, number: int) -> dict[str, np.ndarray]:
        """Returns the arrays on the host that a checkpoint has beside its state, by name.

        Raises:
          UserError: as for `restore`.
        """
        described = self.read_meta(number).get("on_host")
        if described is None:
            raise self._unreadable(number, _OtherState())
        if not described:
            return {}
        try:
            like = {name: np.empty(shape, dtype) for name, (dtype, shape, _) in described.items()}
            tree = ocp.args.StandardRestore(traverse_util.unflatten_dict(like, sep="/"))
            with _one_error(0.0):
                args = ocp.args.Composite(**{_ARRAYS: tree})
                found = self._manager.restore(number, args=args)[_ARRAYS]
            arrays = traverse_util.flatten_dict(found, sep="/")
            for name, array in arrays.items():
                if _described(array) != described[name]:
                    raise _Damage(f"the bytes of {name} do not match their digest")
            return arrays
        except Exception as error:  # see read_meta
            raise self._unreadable(number, error) from None

    def read_params(self, number: int, like: Any) -> Callable[[Path], np.ndarray]:
        """Returns ``read(path)``, which reads one parameter of a checkpoint into host memory.

        Args:
          number: number of the checkpoint.
          like: a TrainState of the same shapes, or its ShapeDtypeStructs.

        Returns:
          A function of a parameter's path within `params`; it checks the parameter's checksum.

        Raises:
          UserError: as for `restore`; damage of a parameter is found when it is read.
        """
        meta = self.read_meta(number)
        if meta.get("structure") != _structure(like):
            raise self._unreadable(number, _OtherState())
        keys = {
            path_of(where): f".params{jax.tree_util.keystr(where)}"
            for where, _ in jax.tree_util.tree_leaves_with_path(like.params)
        }
        shapes = traverse_util.flatten_dict(like.params)
        settings = ocp.RestoreArgs(restore_type=np.ndarray)

        def read(path: Path) -> np.ndarray:
            one_leaf = (traverse_util.unflatten_dict({path: x}) for x in (shapes[path], settings))
            wanted, how = ({"params": tree} for tree in one_leaf)
            args = ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True)
            try:
                with _one_error(0.0), ocp.PyTreeCheckpointer() as one:
                    found = one.restore(self._path / str(number) / "state", args=args)
                array = traverse_util.flatten_dict(found["params"])[path]
                with _on_cpu():  # it may be larger than an accelerator
                    sums = _array_checksums(array)
                if sums != [meta["arrays"][keys[path]]]:
                    raise _Damage(f"the bytes of {'.'.join(path)} do not match their checksum")
                return array
            except Exception as error:  # see read_meta
                raise self._unreadable(number, error) from None

        return read

    def _unreadable(self, number: int, error: Exception) -> UserError:
        """Returns the error for a checkpoint that cannot be read, or is damaged."""
        path = self._directory / str(number)
        if isinstance(error, _OtherState):
            return UserError(
                f"{path} holds a state of another model or optimiser than this configuration gives "
                "here: continue with the configuration and the versions that the run began with"
            )
        no_room = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        obstacle = error if no_room else _obstacle(path)
        named = self._said(obstacle or error)
        if obstacle:
            return UserError(f"{path} cannot be read ({named}): mend that and try again")
        back = "start again with another run.dir"
        if others := [n for n in self._manager.all_steps() if n < number]:
            back = f"move that directory away to go back to checkpoint {max(others)}"
        return UserError(f"{path} is no complete checkpoint of this run ({named}); {back}")

    def _said(self, error: Exception) -> str:
        """Returns what an error says, without what only orbax and tensorstore know; with the file,
        if it names one of the checkpoint."""
        if isinstance(error, _Damage):
            return str(error)
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return "there is not enough memory"
        said = f"{error} {error.__cause__ or error.__context__}"
        names = re.findall(re.escape(f"{self._path}/") + r"([\w./-]*\w)", said)
        file = max((n for n in names if not (self._path / n).is_dir()), key=len, default="")
        return f"a file of it is damaged or missing{file and f': {file}'}"

    def close(self) -> None:
        """Finishes, and frees the directory."""
        try:
            self.finish()
        finally:
            self._manager.close()
            self._release()


def _as_bytes(tree: Any) -> dict[str, jax.Array]:
    """Returns a tree's arrays by number; FP8, which tensorstore may lack, as bytes."""
    return {
        str(index): jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x
        for index, x in enumerate(jax.tree.leaves(tree))
    }


def _of_bytes(arrays: Mapping[str, jax.Array], like: Any) -> Any:
    """Returns the tree whose `_as_bytes` these are."""
    leaves, structure = jax.tree.flatten(like)
    found = [
        jax.lax.bitcast_convert_type(arrays[str(index)], x.dtype)
        if x.dtype.itemsize == 1
        else arrays[str(index)]
        for index, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, found)


def _described(array: np.ndarray) -> list[Any]:
    """Returns the dtype, the shape and a hash of the bytes of an array, as JSON has them."""
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return [str(array.dtype), [*array.shape], digest]


def _nameless(directory: pathlib.Path, descriptor: int) -> pathlib.Path:
    """Returns a path to an open directory that does not contain the directory's name.

    Raises:
      UserError: the system has no such path, and orbax may misread the name.
    """
    path = pathlib.Path(f"/proc/self/fd/{descriptor}")
    if path.is_dir():
        return path
    if _MISREAD.search(str(directory)):
        raise UserError(
            f"run.dir: {directory} has one of the characters * ? [ ] \\ : in its name, and without "
            "/proc checkpoints cannot be kept there: choose another name"
        )
    return directory


def _parts(leaves: list) -> Iterator[list[int]]:
    """Yields indices of arrays to read together: at most `_PART_BYTES` in all, or one array."""
    sizes = [int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves]
    part: list[int] = []
    for index, size in enumerate(sizes):
        if part and size + sum(sizes[i] for i in part) > _PART_BYTES:
            yield part
            part = []
        part.append(index)
    yield part


@contextlib.contextmanager
def _one_error(seconds: float = _OTHER_WRITES) -> Iterator[None]:
    """Makes a failing save or restore raise a single error, and drops what it prints and logs.

    When many writes fail together, orbax and asyncio log each of them, and threads of tensorstore
    print that the event loop is closed; they have `seconds` to do so.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            try:
                yield
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
                gc.collect()
                time.sleep(seconds)
                if isinstance(error, OSError):
                    raise
                for number in STORE_ERRORS:  # tensorstore reports them as ValueError
                    if os.strerror(number) in str(error):
                        raise OSError(number, os.strerror(number)) from error
                raise
    finally:
        logging.disable(before)
    sys.stderr.write(printed.getvalue())


def _obstacle(path: pathlib.Path) -> OSError | None:
    """Reads all files of a directory; returns the error that this raises, or None."""

    def fail(error: OSError) -> None:
        raise error

    try:
        for root, _, names in os.walk(path, onerror=fail):
            for name in names:
                with open(os.path.join(root, name), "rb") as file:
                    while file.read(1 << 24):
                        pass
    except FileNotFoundError:  # a missing file is damage, not an obstacle to reading
        return None
    except OSError as error:
        return error
    return None


def _structure(state: Any) -> str:
    """Returns a hash of a state's paths, shapes and dtypes."""
    leaves = zip(_names(state), jax.tree.leaves(state), strict=True)
    shapes = [f"{name} {x.shape} {x.dtype}" for name, x in leaves]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()


def _checked(meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the metadata; _Damage if a value that a run reads has another type."""
    offsets = meta.get("offsets", {})
    numbers = [meta.get("step", 0), *(offsets.values() if isinstance(offsets, dict) else [None])]
    if meta.get("phase", "rl") not in ("sft", "rl") or any(
        type(n) is not int or n < 0 for n in numbers
    ):
        raise _Damage("its metadata has another form")
    return meta


def _digest(meta: dict[str, Any]) -> str:
    """Returns a hash of the metadata without its digest."""
    content = {key: value for key, value in meta.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _names(state: Any) -> list[str]:
    found = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(keys) for keys, _ in found]


def _on_cpu():
    """Returns a context that runs programs on a CPU, if JAX has a CPU backend."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS does not name the CPU
        return contextlib.nullcontext()


@functools.cache
def _programs():
    return exact_jit(array_checksums), exact_jit(chained)


def _array_checksums(state: Any) -> list[int]:
    """Returns `models.array_checksums` as Python ints. Arrays in host memory are moved to the
    device one at a time."""
    run, _ = _programs()
    leaves = jax.tree.leaves(state)
    away = [x for x in leaves if is_on_host(x)]
    together = iter(run([x for x in leaves if not is_on_host(x)]))
    alone = (run([to_device(x)])[0] for x in away)
    return [int(np.asarray(next(alone if is_on_host(x) else together))) for x in leaves]


def named_checksums(state: Any) -> dict[str, int]:
    """Returns {path: checksum} of a state's arrays, without a frozen base: 'arrays' of a
    checkpoint's metadata."""
    state = with_frozen(state, None)
    return dict(zip(_names(state), _array_checksums(state), strict=True))


def state_checksum(state: Any, sums: list[int] | None = None) -> int:
    """Returns `models.checksum` of a state as an int; `sums`: its `_array_checksums`, if known."""
    _, run = _programs()
    return int(np.asarray(run([np.uint32(one) for one in sums or _array_checksums(state)])))
