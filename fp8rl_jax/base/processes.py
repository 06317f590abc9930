"""Several processes that run one program (SPMD): joining, exchanging host values, ending.

Every process runs the same Python on the same host values. Only process 0 writes files and prints.
Values that depend on a clock, a file, a signal or a user's function are evaluated in one process
and sent to all. With one process every function here is trivial and costs nothing.

`join` finds the other processes by `meeting`, unless the program that calls us has initialised
`jax.distributed` before.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax._src import distributed  # its state and its store have no public names
from jax.experimental import multihost_utils
from jax.experimental.layout import Format
from jax.sharding import SingleDeviceSharding

from fp8rl_jax.base.errors import UserError, raised
from fp8rl_jax.base.meeting import JOIN_SECONDS, Place, meet, this_place

_HEARTBEAT_SECONDS = 60  # without a heartbeat JAX declares a process dead
_LOOK_SECONDS = 2.0  # between two checks whether another process has ended
_SILENT_SECONDS = 30.0  # process 0 counts as ended if its store does not answer for so long
_GRACE_SECONDS = 15.0  # from another process's failure until this one is ended
# Keys of the coordinator's store.
_END = "fp8rl/end"
_LEFT = "fp8rl/left"
_FOREVER_MS = 10 * 24 * 3600 * 1000  # `_watch` ends a process that waits for one that has ended
_PART = 1 << 20  # bytes of a value in the store


_by_store = False
_exchanges: collections.Counter[str] = collections.Counter()  # made through the store, by thread


def join() -> None:
    """Joins the processes that the environment names; call it before anything uses a device.

    If `jax.distributed` has been initialised, its processes are taken, and nothing is joined.
    Afterwards only process 0 has a standard output. Each process checks every few seconds whether
    another one has ended with an error, and then ends too; see `end`.

    Raises:
      UserError: the environment is incomplete, names a launcher whose processes cannot join, or
        another process cannot be reached.
    """
    place = this_place()
    if place.processes == 1:
        return
    if not jax.distributed.is_initialized():
        _initialize(place)
    _begin()


def check_joined() -> None:
    """Raises UserError if the environment says that this is one of several processes, and they have
    not joined: each of them would do what all shall do together."""
    place = this_place()
    if place.processes > count():
        raise UserError(
            f"the environment says that this is process {place.process} of {place.processes}, and "
            "they have not joined: call fp8rl_jax.base.processes.join() first, before anything "
            "uses a device"
        )


def _initialize(place: Place) -> None:
    """Lets JAX join the processes.

    Raises:
      UserError: another process cannot be reached.
    """
    # JAX's service would take SIGTERM, and knows no other signal; see cli/interrupt.py.
    jax.config.update("jax_enable_preemption_service", False)
    options: dict[str, Any] = {}
    if place.coordinator:
        meet(place)
        options = {
            "coordinator_address": place.coordinator,
            "num_processes": place.processes,
            "process_id": place.process,
            "cluster_detection_method": "deactivate",
        }
    elif os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0] == "1":
        # JAX would give the only task of a host one GPU; name all of them (None without GPUs).
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        options = {"local_device_ids": [*range(visible.count(",") + 1)] if visible else None}
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=int(JOIN_SECONDS),
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=60,
        )
    except BaseException as error:  # JAX and gRPC raise many types
        vars(distributed.global_state).clear()  # it holds the numbers of the attempt: see `count`
        if not isinstance(error, Exception):
            raise
        raise UserError(
            f"process {place.process} of {place.processes} cannot join the others "
            f"({raised(error)}): start all of them with the same coordinator and "
            "number, each with its own process number, and a port that is free on process 0's host"
        ) from None


@functools.cache  # once, however often commands are run in this process
def _begin() -> None:
    """Prepares one of several processes: its standard output, and its end with the others."""
    _own_standard_output(first())
    threading.Thread(target=_watch, daemon=True).start()


def _own_standard_output(mine: bool) -> None:
    """Redirects the output of libraries to standard error, so that standard output holds results
    alone. Python's `print` still writes to standard output if it is `mine`, else nowhere."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = open(  # noqa: SIM115
        kept if mine else os.devnull, "w", encoding="utf-8", errors="replace"
    )


def count() -> int:
    """Returns the number of processes: `jax.process_count()`, always.

    It is read where JAX itself reads it when it makes its devices. JAX's function would start the
    devices, which must not happen before processes join or messages are printed. It would also wait
    for a lock that is held while devices start, and a process that has to end because another one
    ended must not wait.
    """
    return distributed.global_state.num_processes


def number() -> int:
    """Returns this process's number, from 0 on: `jax.process_index()`, always (see `count`)."""
    return distributed.global_state.process_id


def first() -> bool:
    """Returns whether this is process 0, which writes and prints."""
    return number() == 0


def _gather(x: Any, tiled: bool = False) -> np.ndarray:
    return np.asarray(multihost_utils.process_allgather(x, tiled=tiled))


# Arrays.


def place(tree, sharding):
    """Puts host arrays that are equal in all processes, or global arrays, on the devices, as
    `jax.device_put` does; `sharding` is one sharding or a tree of them."""
    if count() == 1:
        return jax.device_put(tree, sharding)

    def put(x, sharding):
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda x: put(x, sharding), tree)
    return jax.tree.map(put, tree, sharding)


def fetch(tree):
    """Copies global arrays to the host of every process, as `jax.device_get` does."""
    if count() == 1:
        return jax.device_get(tree)

    def get(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return jax.device_get(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return _gather(x, tiled=True)

    return jax.tree.map(get, tree)


def copy_within(tree, shardings):
    """Copies global arrays to other devices of the same processes: every part that a process's
    devices shall have is on another of its devices. `shardings`: a tree, as for `place`."""
    if count() == 1:
        return jax.device_put(tree, shardings)

    def copy(x: jax.Array, place):
        sharding = getattr(place, "sharding", place)  # of a Format
        held = {_key(shard.index): shard.data for shard in x.addressable_shards}
        parts = []
        for device, index in sharding.addressable_devices_indices_map(x.shape).items():
            where: Any = SingleDeviceSharding(device)
            if place is not sharding:
                where = Format(place.layout, where)
            parts.append(jax.device_put(held[_key(index)], where))
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return jax.tree.map(copy, tree, shardings)


def _key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((part.start, part.stop) for part in index)


def own_rows(sharding: jax.sharding.Sharding, rows: int) -> np.ndarray:
    """Returns (rows,) bool: the batch rows that are this process's; each row has one process."""
    if count() == 1:
        return np.ones(rows, bool)
    owner = np.full(rows, count())
    device: Any  # JAX's stubs lack its attributes
    for device, (index,) in sharding.devices_indices_map((rows,)).items():
        owner[index] = np.minimum(owner[index], device.process_index)
    return owner == number()


# Host values. Every process must make these calls, in the same order; through the store in the same
# order within each thread.


def exchange_by_store() -> None:
    """Lets host values go through the coordinator's store from now on, and not through devices:
    threads that exchange values would start programs on devices in different orders."""
    global _by_store
    _by_store = True


def exchange(value: Any) -> list[Any]:
    """Returns the values of all processes, by process number; pickled, so bits are kept."""
    if count() == 1:
        return [value]
    if _by_store:
        return [pickle.loads(content) for content in _exchange_by_store(pickle.dumps(value))]
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = _gather(np.uint32(len(content)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(content)] = content
    rows = _gather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _exchange_by_store(content: bytes) -> list[bytes]:
    client = _client()
    thread = threading.current_thread().name
    turn = _exchanges[thread]
    _exchanges[thread] += 1
    parts = [content[i : i + _PART] for i in range(0, len(content), _PART)]

    def key(turn: int, process: int) -> str:
        return f"fp8rl/exchange/{thread}/{turn}/{process}"

    for index, part in enumerate(parts):
        client.key_value_set_bytes(f"{key(turn, number())}/{index}", part)
    client.key_value_set(f"{key(turn, number())}/parts", str(len(parts)))
    values = []
    for process in range(count()):
        size = int(client.blocking_key_value_get(f"{key(turn, process)}/parts", _FOREVER_MS))
        names = (f"{key(turn, process)}/{index}" for index in range(size))
        values.append(b"".join(client.blocking_key_value_get_bytes(n, _FOREVER_MS) for n in names))
    if turn:  # all have sent this turn's values, so all have read those of the turn before
        client.key_value_delete(f"{key(turn - 1, number())}/")
    return values


def decided(decide: Callable[[], Any]) -> Any:
    """Calls `decide` in process 0 alone; returns its result in every process."""
    return exchange(decide() if first() else None)[0]


def everywhere(work: Callable[[], Any]) -> list[Any]:
    """Calls `work` in every process; returns all results, by process number.

    Raises:
      UserError: `work` raised it in some process; all raise that of the first such process.
    """
    if count() == 1:
        return [work()]
    try:
        outcome: Any = work()
    except UserError as error:
        outcome = error
    results = exchange(outcome)
    for result in results:
        if isinstance(result, UserError):
            raise result
    return results


def barrier(name: str) -> None:
    """Waits until all processes have called this."""
    if _by_store:
        exchange(name)
    elif count() > 1:
        multihost_utils.sync_global_devices(name)


def check_equal(values: dict[str, Any], remedy: str) -> None:
    """Raises UserError if a value differs between processes."""
    everyone = exchange((socket.gethostname(), values))
    host, expected = everyone[0]
    for number, (other, theirs) in enumerate(everyone[1:], 1):
        for name, value in expected.items():
            if theirs[name] != value:
                raise UserError(
                    f"{name} is {theirs[name]!r} in process {number} on {other} and {value!r} in "
                    f"process 0 on {host}: {remedy}"
                )


@functools.cache
def hosts() -> list[str]:
    """Returns the host name of every process, by process number."""
    return exchange(socket.gethostname())


def described() -> str:
    """Returns ' of N processes on H host(s)', or '' for one process."""
    return f" of {count()} processes on {len(set(hosts()))} host(s)" if count() > 1 else ""


# The end.


def end(status: int, text: str = "") -> int:
    """Ends a command: prints `text` to standard error and returns the status.

    With several processes a `text` means that this one failed: this call does not return, and all
    processes end with the status of the one that failed first, which alone prints its text. Process
    0 ends last, since it holds the store in which the status is written.
    """
    if count() == 1 and text:
        print(text, file=sys.stderr)
    if count() == 1 or not text:
        return status
    client = _client()
    _leave(client, text if _announce(client, status) else "")


def _client():
    return distributed.global_state.client


def _announce(client, status: int) -> bool:
    """Writes this process's status to the store; returns False if another one did so before."""
    try:
        client.key_value_set(_END, json.dumps({"process": number(), "status": status}))
    except Exception as error:
        return "ALREADY_EXISTS" not in str(error)
    return True


def _ended(client) -> dict[str, int] | None:
    """Returns the number and status of the process that ended first; None if none has.

    Raises:
      ConnectionError: process 0's store does not answer.
    """
    try:
        return json.loads(client.key_value_try_get(_END))
    except Exception as error:
        if "NOT_FOUND" in str(error):
            return None
        raise ConnectionError("process 0 does not answer") from error


def _leave(client, text: str) -> NoReturn:
    """Ends this process at once, without waiting for collectives that will never complete."""
    status = 1
    if text:
        print(text, file=sys.stderr)
    try:
        status = (_ended(client) or {"status": 1})["status"]
        client.key_value_set(f"{_LEFT}/{number()}", "")
        deadline = time.monotonic() + 2 * _GRACE_SECONDS
        while first() and time.monotonic() < deadline:
            if len(client.key_value_dir_get(_LEFT)) == count():
                time.sleep(1.0)  # for the other processes to end
                break
            time.sleep(0.2)
    except Exception:  # the store is gone with process 0
        pass
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _watch() -> None:
    """Ends this process after another one failed or process 0's store fell silent: the main thread
    may be waiting for ever in a collective."""
    client = _client()
    heard = time.monotonic()
    while time.monotonic() - heard < _SILENT_SECONDS:
        with contextlib.suppress(ConnectionError):
            ended = _ended(client)
            heard = time.monotonic()
            if ended and ended["process"] == number():
                return
            if ended:
                time.sleep(_GRACE_SECONDS)
                break
        time.sleep(_LOOK_SECONDS)
    _leave(client, "")
