"""Several processes of one program: they join, and are one.

Every process runs the same Python on the same host values. Process 0 alone writes files and prints;
what depends on a clock, a file, a signal or a user's function is found out once and told to all.
With one process every function here is what it would be without it, and costs nothing.

`meeting` says how they are found.
"""

from __future__ import annotations

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
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from fp8rl_jax.base.errors import UserError, raised
from fp8rl_jax.base.meeting import JOIN_SECONDS, Place, meet, place_of_environment

_HEARTBEAT_SECONDS = 60  # after which JAX takes a silent process for dead
_LOOK_SECONDS = 2.0  # between looks at whether another process has ended
_SILENT_SECONDS = 30.0  # after which process 0, whose store does not answer, is taken for gone
_GRACE_SECONDS = 15.0  # for a process to end by itself, after another one has
_END, _LEFT = "fp8rl/end", "fp8rl/left"  # keys of the coordinator's store


class Traffic(NamedTuple):
    """What this process has told the others; see `traffic`.

    Attributes:
      gathers: how often.
      bytes: so many, to each of them.
    """

    gathers: int = 0
    bytes: int = 0


_joined = Place()
_traffic = Traffic()


def asked() -> int:
    """How many processes the environment speaks of; UserError as `join`."""
    return place_of_environment().processes


def join() -> None:
    """Joins the processes that the environment speaks of; call it before anything uses a device.

    From here on only process 0 has a standard output. Each process looks every few seconds whether
    another one has ended with an error, and then ends too; see `end`.

    Raises:
      UserError: the environment is incomplete, or the others cannot be reached.
    """
    global _joined
    place = place_of_environment()
    if place.processes == 1:
        return
    # JAX's own service would take SIGTERM, and knows no other signal; see training's `stop`.
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
        options = {"local_device_ids": _visible_devices()}
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=int(JOIN_SECONDS),
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=60,
        )
    except Exception as error:  # of JAX, gRPC and what it reads of Slurm
        raise UserError(
            f"process {place.process} of {place.processes} cannot join the others "
            f"({raised(error)}): start all of them with the same coordinator and "
            "number, each with its own process number, and a port that is free on process 0's host"
        ) from None
    _joined = place
    _own_standard_output(place.process == 0)
    threading.Thread(target=_watch, daemon=True).start()


def _visible_devices() -> list[int] | None:
    """All GPUs of a host that has one task, where JAX would take one; None on a CPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return list(range(len(visible.split(",")))) if visible else None


def _own_standard_output(mine: bool) -> None:
    """What libraries print goes to standard error, and what Python prints to standard output in
    one process only: results are not mixed with anything."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    where = kept if mine else os.devnull
    stream = open(where, "w", encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = stream


def count() -> int:
    """Number of processes."""
    return _joined.processes


def number() -> int:
    """This process's, from 0 on."""
    return _joined.process


def first() -> bool:
    """Whether this process writes and prints."""
    return number() == 0


def traffic() -> Traffic:
    """What this process has told the others since it joined."""
    return _traffic


def _gather(x: Any, tiled: bool = False) -> np.ndarray:
    global _traffic
    found = np.asarray(multihost_utils.process_allgather(x, tiled=tiled))
    _traffic = Traffic(_traffic.gathers + 1, _traffic.bytes + found.nbytes // count())
    return found


# Arrays.


def place(tree, sharding):
    """`jax.device_put` for host arrays that are equal in all processes; `sharding` is one, or a
    tree of them. Arrays of all processes' devices may be among the leaves."""
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
    """`jax.device_get`, whole in every process."""
    if count() == 1:
        return jax.device_get(tree)

    def get(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return jax.device_get(x)
        if x.is_fully_replicated:
            return np.asarray(x.addressable_data(0))
        return _gather(x, tiled=True)

    return jax.tree.map(get, tree)


def own_rows(sharding: jax.sharding.Sharding, rows: int) -> np.ndarray:
    """(rows,) bool: the rows of a batch that are this process's to work on; each is one's."""
    if count() == 1:
        return np.ones(rows, bool)
    owner = np.full(rows, count())
    for device, (index,) in sharding.devices_indices_map((rows,)).items():
        owner[index] = np.minimum(owner[index], device.process_index)
    return owner == number()


# What one process knows, told to all. Every process must make these calls, in the same order.


def exchange(value: Any) -> list[Any]:
    """The values of all processes, by their number; they are sent pickled, so numbers keep their
    bits."""
    if count() == 1:
        return [value]
    content = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = _gather(np.uint32(len(content)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(content)] = content
    rows = _gather(padded)
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def decided(decide: Callable[[], Any]) -> Any:
    """What `decide` returns in process 0; the others do not call it."""
    return exchange(decide() if first() else None)[0]


def everywhere(work: Callable[[], Any]) -> list[Any]:
    """What `work` returns in each process.

    Raises:
      UserError: the first that one of them raised, in all.
    """
    if count() == 1:
        return [work()]
    try:
        found: Any = work()
    except UserError as error:
        found = error
    results = exchange(found)
    for result in results:
        if isinstance(result, UserError):
            raise result
    return results


def barrier(name: str) -> None:
    """Waits for all processes to be here."""
    if count() > 1:
        multihost_utils.sync_global_devices(name)


def check_equal(values: dict[str, Any], remedy: str) -> None:
    """Raises UserError if a value differs between processes."""
    everyone = exchange((socket.gethostname(), values))
    host, expected = everyone[0]
    for number, (other, found) in enumerate(everyone[1:], 1):
        for name, value in expected.items():
            if found[name] != value:
                raise UserError(
                    f"{name} is {found[name]!r} in process {number} on {other} and {value!r} in "
                    f"process 0 on {host}: {remedy}"
                )


@functools.cache
def hosts() -> list[str]:
    """The machine of every process, by its number."""
    return exchange(socket.gethostname())


def described() -> str:
    """' of N processes on H host(s)', for a sentence; '' for one process."""
    return f" of {count()} processes on {len(set(hosts()))} host(s)" if count() > 1 else ""


# The end.


def end(status: int, text: str = "") -> int:
    """Ends a command: `text` goes to standard error, and the status is returned.

    Of several processes one that fails ends all of them: with an error this call does not return,
    and all end with the status of the first one, which alone prints its text. Process 0 leaves
    last: it keeps the store in which the others read how it ended.
    """
    if count() == 1 and text:
        print(text, file=sys.stderr)
    if count() == 1 or not text:
        return status
    client = _client()
    _leave(client, text if _announce(client, status) else "")


def _client():
    from jax._src import distributed  # the store has no public name

    return distributed.global_state.client


def _announce(client, status: int) -> bool:
    """Tells the others how this process ends; whether it is the first to do so."""
    try:
        client.key_value_set(_END, json.dumps({"process": number(), "status": status}))
    except Exception as error:
        return "ALREADY_EXISTS" not in str(error)
    return True


def _ended(client) -> dict[str, int] | None:
    """How the first process that ended did so; None if none has.

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
    """Ends this process at once, without waiting for collectives that others will not join."""
    status = 1
    if text:
        print(text, file=sys.stderr)
    try:
        status = (_ended(client) or {"status": 1})["status"]
        client.key_value_set(f"{_LEFT}/{number()}", "")
        deadline = time.monotonic() + 2 * _GRACE_SECONDS
        while first() and time.monotonic() < deadline:
            if len(client.key_value_dir_get(_LEFT)) == count():
                time.sleep(1.0)  # until they have
                break
            time.sleep(0.2)
    except Exception:  # the store is gone with process 0
        pass
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _watch() -> None:
    """Ends this process when another one has ended with an error, and the main thread has not
    noticed: it may wait in a collective for ever."""
    client = _client()
    heard = time.monotonic()
    while time.monotonic() - heard < _SILENT_SECONDS:
        with contextlib.suppress(ConnectionError):
            found = _ended(client)
            heard = time.monotonic()
            if found and found["process"] == number():
                return
            if found:
                time.sleep(_GRACE_SECONDS)
                break
        time.sleep(_LOOK_SECONDS)
    _leave(client, "")


def on_cpu_devices(count: int) -> dict[str, str]:
    """The environment of a child process in which JAX has `count` devices on the CPU."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags = f"{flags} --xla_force_host_platform_device_count={count}"
    return dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
