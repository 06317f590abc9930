"""Finds the processes of a program by the environment, and waits until all have connected.

The environment holds the three variables of FP8RL_... or of JAX_... (`_OURS`, `_JAX`), or Slurm's.
With the former, all processes connect to the coordinator's port before JAX starts its service
there, so that an error can name the missing processes (JAX would abort at its deadline).
Connections of other programs to that port are ignored.

Other launchers (`_LAUNCHERS`) do not say where process 0 listens, or not in a form that is ours to
use. A process that one of them has started as one of several is refused, since it would do alone
what all shall do together.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from typing import NamedTuple

from fp8rl_jax.base.errors import UserError

# HOST:PORT of process 0, the number of processes, and this process's number.
_OURS = ("FP8RL_COORDINATOR", "FP8RL_PROCESSES", "FP8RL_PROCESS_ID")
_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM_TASKS = "SLURM_STEP_NUM_TASKS"
_SLURM_NUMBERS = (_SLURM_TASKS, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
_HELLO = b"fp8rl process "  # prefix of a process's message to process 0
_ANSWER = b"fp8rl: "  # prefix of process 0's answer
_LONGEST_LINE = 2**15  # bytes of either line; an answer may name thousands of processes
_MOST_STRANGERS = 100  # open connections that have not sent a process's number
JOIN_SECONDS = 300.0  # until all processes must have connected
_GRACE_SECONDS = 15.0  # after that, until process 0 must have answered
_UNKNOWN = "HOST:PORT"  # of process 0, if a launcher does not tell it


class _Launcher(NamedTuple):
    """A program that starts processes.

    Attributes:
      name: its name in messages.
      processes: the variable in which it tells each process how many there are.
      process: the variable in which it tells a process its number.
      coordinator: HOST:PORT of process 0 as a shell can write it, if its variables hold that.
      both: whether `processes` counts only where `process` is set, because other programs use the
        name, too, or a batch script has it.
    """

    name: str
    processes: str
    process: str
    coordinator: str = _UNKNOWN
    both: bool = False


# The launcher with the largest number is named, of equal ones the first: torchrun may run under
# SkyPilot. Not here: what has a number of its own and none of all (PMIx, a Kubernetes Job's
# completion index, Ray), and arrays of independent jobs.
_LAUNCHERS = (
    # torchrun listens at MASTER_PORT itself. DeepSpeed, Accelerate, Ray Train's TorchTrainer and
    # Kubeflow's PyTorchJob set the same variables.
    _Launcher("torchrun or its like", "WORLD_SIZE", "RANK", "$MASTER_ADDR:$((MASTER_PORT + 1))"),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    _Launcher("MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK"),
    _Launcher("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    _Launcher("Horovod", "HOROVOD_SIZE", "HOROVOD_RANK"),
    _Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    _Launcher("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", both=True),
    _Launcher(
        "Kubeflow's JAXJob",
        "NUM_PROCESSES",
        "PROCESS_ID",
        "$COORDINATOR_ADDRESS:$COORDINATOR_PORT",
        both=True,
    ),
    _Launcher(
        "Kubeflow Trainer's torch runtime",
        "PET_NNODES",
        "PET_NODE_RANK",
        "$PET_MASTER_ADDR:$PET_MASTER_PORT",
    ),
    _Launcher(
        "SkyPilot",
        "SKYPILOT_NUM_NODES",
        "SKYPILOT_NODE_RANK",
        '$(echo "$SKYPILOT_NODE_IPS" | head -n1):8476',
    ),
    _Launcher("dstack", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "$DSTACK_MASTER_NODE_IP:8476"),
    _Launcher("LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "$LWS_LEADER_ADDRESS:8476"),
    _Launcher("AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"),
)


class Place(NamedTuple):
    """The number of processes, this process's number, and HOST:PORT of process 0 (None: JAX takes
    the address from Slurm's variables)."""

    processes: int = 1
    process: int = 0
    coordinator: str | None = None


def this_place() -> Place:
    """Returns this process's place: according to JAX if `jax.distributed` has been initialised, by
    `processes.join` or by the program that calls us, else according to the environment.

    Raises:
      UserError: as `place_of_environment`.
    """
    distributed = sys.modules.get("jax._src.distributed")  # not imported here: JAX takes a second
    if distributed is None or distributed.global_state.client is None:
        return place_of_environment()
    state = distributed.global_state
    return Place(state.num_processes, state.process_id, state.coordinator_address)


def place_of_environment() -> Place:
    """Returns this process's place according to the environment.

    Raises:
      UserError: a variable is missing or is not a number, or a launcher has started more processes
        than those that can join.
    """
    # Set by `srun`, not by a batch script.
    in_slurm = os.environ.get(_SLURM_TASKS, "1") != "1"
    place = _place_in_variables(_OURS) or _place_in_variables(_JAX, without_numbers=in_slurm)
    if place is None:
        place = _place_in_slurm() if in_slurm else Place()
    if place.processes == 1 or place.coordinator is None:
        _refuse_more_than(place.processes)
    return place


def _place_in_variables(names: tuple[str, str, str], without_numbers: bool = False) -> Place | None:
    """Returns the place that three variables hold; None if none of them is set.

    Args:
      names: `_OURS` or `_JAX`.
      without_numbers: whether the address may be set alone, which JAX then takes itself.

    Raises:
      UserError: some of them are missing, or not numbers.
    """
    values = {name: os.environ[name] for name in names if os.environ.get(name)}
    if not values or (without_numbers and list(values) == [names[0]]):
        return None
    missing = [name for name in names if name not in values]
    if missing:
        raise UserError(
            f"{', '.join(values)} is set and {', '.join(missing)} is not: set all three, to "
            "HOST:PORT of process 0, the number of processes and the number of this one, or none"
        )
    coordinator, *numbers = values.values()
    host, _, port = coordinator.rpartition(":")
    if not host or not 0 < (_whole(port) or 0) < 2**16:
        raise UserError(
            f"{names[0]} is {coordinator!r}: write HOST:PORT of process 0, with a port from 1 to "
            "65535"
        )
    count, process = map(_whole, numbers)
    if count is None or process is None or process >= count:
        raise UserError(
            f"{names[1]} is {numbers[0]!r} and {names[2]} {numbers[1]!r}: write a number of "
            "processes, and one from 0 to below it"
        )
    return Place(count, process, coordinator)


def _refuse_more_than(processes: int) -> None:
    """Raises UserError if a launcher says that there are more processes than so many."""
    launcher = max(_LAUNCHERS, key=_processes_of)
    if _processes_of(launcher) <= processes:
        return
    address, number_of_all, number = _JAX
    remark = ""
    if launcher.coordinator == _UNKNOWN:
        remark = " with the host of process 0 and a port that is free there"
    raise UserError(
        f"{launcher.processes} is {_processes_of(launcher)}: {launcher.name} has started these "
        f"processes, and they have not joined; write in each of them, before the command, "
        f"`export {address}={launcher.coordinator} {number_of_all}=${launcher.processes} "
        f"{number}=${launcher.process}`{remark}, or `unset {launcher.processes}` to run alone"
    )


def _processes_of(launcher: _Launcher) -> int:
    """Returns the number of processes that a launcher says there are, 1 if it says nothing."""
    if launcher.both and not os.environ.get(launcher.process):
        return 1
    return _whole(os.environ.get(launcher.processes, "")) or 1


def _place_in_slurm() -> Place:
    """Returns this process's place according to Slurm; checks variables that only JAX reads, too.

    Raises:
      UserError: a variable is missing or is not a number, or they contradict each other.
    """
    read = {name: _whole(os.environ.get(name, "")) for name in _SLURM_NUMBERS}
    numbers = {name: number for name, number in read.items() if number is not None}
    wrong = [name for name in _SLURM_NUMBERS if name not in numbers]
    wrong += [] if os.environ.get("SLURM_STEP_NODELIST") else ["SLURM_STEP_NODELIST"]
    if wrong:
        values = ", ".join(f"{name} is {os.environ.get(name)!r}" for name in wrong)
        raise UserError(
            f"this is a step of Slurm with several tasks, and {values}: start the tasks with srun, "
            f"or set {', '.join(_JAX)}"
        )
    tasks, process, of_job = (numbers[name] for name in _SLURM_NUMBERS[:3])
    if not process < tasks == of_job:
        said = ", ".join(f"{name} is {numbers[name]}" for name in _SLURM_NUMBERS[:3])
        raise UserError(
            f"Slurm's variables contradict each other: {said}; start the tasks with srun, or set "
            + ", ".join(_JAX)
        )
    port = os.environ.get("JAX_COORDINATOR_PORT")
    if port and not 0 < (_whole(port) or 0) < 2**16:
        raise UserError(f"JAX_COORDINATOR_PORT is {port!r}: write a port from 1 to 65535")
    return Place(tasks, process)


def _whole(text: str) -> int | None:
    """Returns the integer in a text of at most nine digits; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


def meet(place: Place) -> None:
    """Waits until all processes have connected to the address that JAX's service will use.

    Raises:
      UserError: process 0 cannot take the port, a process is missing at the deadline, two have the
        same number, or the processes disagree about how many there are.
    """
    host, _, port = (place.coordinator or "").rpartition(":")
    deadline = time.monotonic() + JOIN_SECONDS
    if place.process == 0:
        problem = _receive_all(place, int(port), deadline)
    else:
        problem = _announce_to(host, int(port), place, deadline)
    if problem:
        raise UserError(
            f"process {place.process} of {place.processes} cannot join the others: {problem}; "
            "start all of them with the same coordinator and number of processes, and each with "
            "its own process number"
        )


def _receive_all(place: Place, port: int, deadline: float) -> str:
    """Waits in process 0 for all others; sends them an error message or '', and returns it."""
    callers: list[socket.socket] = []
    heard: dict[socket.socket, bytes] = {}  # received so far from unknown connections
    missing = set(range(1, place.processes))
    with contextlib.ExitStack() as stack:
        try:
            both = socket.has_dualstack_ipv6()
            listener = stack.enter_context(
                socket.create_server(
                    ("", port),
                    family=socket.AF_INET6 if both else socket.AF_INET,
                    dualstack_ipv6=both,
                )
            )
        except OSError as error:
            return f"port {port} cannot be taken here ({error.strerror})"
        listener.setblocking(False)
        problem = ""
        while missing and not problem:
            if (left := deadline - time.monotonic()) <= 0:
                names = ", ".join(map(str, sorted(missing)))
                problem = f"after {JOIN_SECONDS:.0f} s there is no process {names}"
                break
            ready = _ready([listener, *heard], left)
            if listener in ready:
                with contextlib.suppress(OSError):
                    heard[stack.enter_context(listener.accept()[0])] = b""
                if len(heard) > _MOST_STRANGERS:
                    del heard[stranger := next(iter(heard))]
                    stranger.close()
            for caller in [caller for caller in heard if caller in ready]:
                heard[caller] += (piece := _received(caller))
                if heard[caller].endswith(b"\n") and (who := _introduced(heard[caller])):
                    del heard[caller]
                    callers.append(caller)
                    process, processes = who
                    if processes != place.processes:
                        problem = f"process {process} says that there are {processes}"
                    elif process not in missing:
                        problem = f"two say that they are process {process}"
                    missing.discard(process)
                elif not piece or not _may_become(heard[caller], _HELLO):
                    del heard[caller]  # another program
                    caller.close()
        for caller in callers:
            with contextlib.suppress(OSError):
                caller.settimeout(2.0)
                caller.sendall(_ANSWER + problem.encode() + b"\n")
        return problem


def _ready(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Waits at most `seconds`; returns the sockets that can be read. (`select.select` would refuse
    descriptors from 1024 on.)"""
    with selectors.DefaultSelector() as selector:
        for one in sockets:
            selector.register(one, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(seconds)]  # type: ignore[misc]


def _received(caller: socket.socket) -> bytes:
    """Receives the bytes that a readable connection holds; b'' at its end."""
    try:
        return caller.recv(_LONGEST_LINE)
    except OSError:
        return b""


def _may_become(content: bytes, beginning: bytes) -> bool:
    """Returns whether the content is an incomplete line that may start with `beginning`."""
    begins = content.startswith(beginning) or beginning.startswith(content)
    return begins and b"\n" not in content and len(content) < _LONGEST_LINE


def _introduced(line: bytes) -> tuple[int, int] | None:
    """Parses 'fp8rl process I of N' to (I, N); None if another program sent the line."""
    numbers = line.removeprefix(_HELLO).decode(errors="replace").strip().split(" of ")
    process, processes = map(_whole, numbers if len(numbers) == 2 else ("", ""))
    if not line.startswith(_HELLO) or process is None or processes is None:
        return None
    return process, processes


def _announce_to(host: str, port: int, place: Place, deadline: float) -> str:
    """Sends this process's number to process 0. Returns an error message, or ''."""
    while time.monotonic() < deadline:
        with (
            contextlib.suppress(OSError, UnicodeError),  # not a valid host name
            socket.create_connection((host.strip("[]"), port), 5.0) as caller,
        ):
            caller.sendall(_HELLO + f"{place.process} of {place.processes}\n".encode())
            answer = b""
            while _may_become(answer, _ANSWER):  # another program may answer
                # Process 0 answers at its own deadline at the latest.
                caller.settimeout(max(deadline + _GRACE_SECONDS - time.monotonic(), 0.01))
                if not (piece := caller.recv(_LONGEST_LINE)):
                    break
                answer += piece
            if answer.startswith(_ANSWER) and answer.endswith(b"\n"):
                return answer.removeprefix(_ANSWER).decode(errors="replace").strip()
        time.sleep(0.2)
    return f"process 0 is not found at {host}:{port} within {JOIN_SECONDS:.0f} s"
