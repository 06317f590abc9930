"""What the environment says of several processes, and how they meet at a port that is not theirs
alone."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
import subprocess
import sys
import threading
import time
import types

import pytest

from fp8rl_jax import cli
from fp8rl_jax.base import meeting
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.meeting import Place, meet, place_of_environment, this_place

_OURS = {"FP8RL_COORDINATOR": "a:1", "FP8RL_PROCESSES": "2", "FP8RL_PROCESS_ID": "0"}
_JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}
_SLURM = {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_NODELIST": "node[1-2]",
}


# What launchers tell process 1 of two: the numbers of all and of itself come first.
_LAUNCHERS = {
    "torchrun": {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
    },
    "Open MPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"},
    "MPICH": {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
    "MVAPICH": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"},
    "Horovod": {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "1"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1"},
    "Flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "1", "FLUX_JOB_NNODES": "1"},
    "JAXJob": {
        "NUM_PROCESSES": "2",
        "PROCESS_ID": "1",
        "COORDINATOR_ADDRESS": "a",
        "COORDINATOR_PORT": "6666",
    },
    "torch runtime": {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "auto",
        "PET_MASTER_ADDR": "a",
        "PET_MASTER_PORT": "29400",
    },
    "SkyPilot": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "a\nb"},
    "dstack": {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "a"},
    "LeaderWorkerSet": {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a"},
    "AWS Batch": {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "1"},
}
# Where the launcher's variables hold the coordinator.
_ADDRESSES = {
    "torchrun": "a:29501",
    "JAXJob": "a:6666",
    "torch runtime": "a:29400",
    "SkyPilot": "a:8476",
    "dstack": "a:8476",
    "LeaderWorkerSet": "a:8476",
}


def _set(monkeypatch, variables: dict[str, str | None]) -> None:
    launchers = [name for variables in _LAUNCHERS.values() for name in variables]
    for name in (*_OURS, *_JAX, *_SLURM, "JAX_COORDINATOR_PORT", *launchers):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        if value is not None:
            monkeypatch.setenv(name, value)


def test_environments_that_can_be(monkeypatch):
    for variables, place in [
        ({}, Place()),
        (_OURS, Place(2, 0, "a:1")),
        (_OURS | {"FP8RL_COORDINATOR": "[::1]:65535"}, Place(2, 0, "[::1]:65535")),
        (_JAX, Place(2, 0, "a:1")),
        (_JAX | {"JAX_PROCESS_ID": "1", "JAX_COORDINATOR_PORT": "1"}, Place(2, 1, "a:1")),
        (_JAX | {"JAX_NUM_PROCESSES": "1"}, Place(1, 0, "a:1")),
        (_JAX | _OURS | {"FP8RL_PROCESSES": "3"}, Place(3, 0, "a:1")),
        (_SLURM, Place(2, 1)),
        (_SLURM | _OURS, Place(2, 0, "a:1")),
        (_SLURM | _JAX, Place(2, 0, "a:1")),
        (_SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}, Place(2, 1)),  # JAX takes both
        ({"SLURM_STEP_NUM_TASKS": "1"}, Place()),
        ({"SLURM_JOB_ID": "17", "SLURM_NTASKS": "8"}, Place()),  # a batch script
        ({"JOB_COMPLETION_INDEX": "1"}, Place()),  # of a Kubernetes Job: how many, it does not say
        ({"SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_ID": "1"}, Place()),  # independent jobs
        ({"RAY_JOB_ID": "01000000", "RAY_NODE_ID": "a"}, Place()),
    ]:
        _set(monkeypatch, variables)
        assert place_of_environment() == place


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"FP8RL_PROCESSES": ""}, "FP8RL_COORDINATOR, FP8RL_PROCESS_ID .* FP8RL_PROCESSES is not"),
        ({"FP8RL_COORDINATOR": "here"}, "FP8RL_COORDINATOR is 'here': write HOST:PORT"),
        ({"FP8RL_COORDINATOR": "here:"}, "FP8RL_COORDINATOR is 'here:'"),
        ({"FP8RL_COORDINATOR": "here:0"}, "a port from 1 to 65535"),
        ({"FP8RL_COORDINATOR": "here:65536"}, "a port from 1 to 65535"),
        ({"FP8RL_COORDINATOR": "here:" + "9" * 5000}, "a port from 1 to 65535"),
        ({"FP8RL_COORDINATOR": "here:²"}, "a port from 1 to 65535"),
        ({"FP8RL_PROCESS_ID": "2"}, "'2': write a number of processes, and one from 0"),
        ({"FP8RL_PROCESS_ID": "-1"}, "FP8RL_PROCESS_ID '-1'"),
        ({"FP8RL_PROCESSES": "two"}, "FP8RL_PROCESSES is 'two'"),
        ({"FP8RL_PROCESSES": "9" * 5000}, "FP8RL_PROCESSES is '999"),
        ({"FP8RL_PROCESSES": "0"}, "FP8RL_PROCESSES is '0'"),
    ],
)
def test_variables_of_ours_that_cannot_be(variables, words, monkeypatch):
    _set(monkeypatch, _OURS | variables)
    with pytest.raises(UserError, match=words):
        place_of_environment()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"JAX_NUM_PROCESSES": None, "JAX_PROCESS_ID": None},
            "JAX_COORDINATOR_ADDRESS is set and JAX_NUM_PROCESSES, JAX_PROCESS_ID is not: set all "
            "three, to HOST:PORT of process 0, the number of processes and the number of this one",
        ),
        ({"JAX_COORDINATOR_ADDRESS": None}, "JAX_PROCESS_ID is set and JAX_COORDINATOR_ADDRESS is"),
        ({"JAX_COORDINATOR_ADDRESS": "here"}, "JAX_COORDINATOR_ADDRESS is 'here': write HOST:PORT"),
        ({"JAX_COORDINATOR_ADDRESS": ":1"}, "JAX_COORDINATOR_ADDRESS is ':1': write HOST:PORT"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two' and JAX_PROCESS_ID '0': write"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID '2': write a number of processes, and one from"),
    ],
)
def test_variables_of_jax_that_cannot_be(variables, words, monkeypatch):
    _set(monkeypatch, _JAX | variables)
    with pytest.raises(UserError, match=words):
        place_of_environment()


@pytest.mark.parametrize("name", [*_LAUNCHERS])
def test_one_of_several_is_not_alone(name, monkeypatch):
    """What to write is in the error, and then the processes join."""
    variables = _LAUNCHERS[name]
    processes, process = list(variables)[:2]
    _set(monkeypatch, variables)
    with pytest.raises(UserError, match=f"^{processes} is 2: .*{name}.*unset {processes}") as error:
        place_of_environment()
    line = str(error.value).split("`")[1].replace("HOST:PORT", "b:9")
    shown = subprocess.run(
        ["bash", "-c", f"{line}; echo $JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID"],
        capture_output=True,
        text=True,
        check=True,
    )
    written = dict(zip(_JAX, shown.stdout.split(), strict=True))
    _set(monkeypatch, variables | written)
    assert place_of_environment() == Place(2, 1, _ADDRESSES.get(name, "b:9"))
    _set(monkeypatch, variables | _OURS)
    assert place_of_environment() == Place(2, 0, "a:1")
    for changed in (
        {processes: "1", process: "0"},
        {processes: None},
        {processes: "1:4"},
        {processes: ""},
    ):
        _set(monkeypatch, variables | changed)
        assert place_of_environment() == Place()
    _set(monkeypatch, variables | {process: None})
    if name in ("Flux", "JAXJob"):
        assert place_of_environment() == Place()
    else:
        with pytest.raises(UserError, match=f"^{processes} is 2"):
            place_of_environment()


def test_the_launcher_of_most_processes_is_named(monkeypatch):
    """One within another, and none within Slurm unless it starts more than Slurm does."""
    torchrun = _LAUNCHERS["torchrun"] | {"WORLD_SIZE": "16"}
    _set(monkeypatch, _LAUNCHERS["SkyPilot"] | torchrun)
    with pytest.raises(UserError, match=r"^WORLD_SIZE is 16: torchrun"):
        place_of_environment()
    _set(monkeypatch, _SLURM | torchrun)
    with pytest.raises(UserError, match=r"^WORLD_SIZE is 16: torchrun"):
        place_of_environment()
    _set(monkeypatch, _SLURM | _LAUNCHERS["SkyPilot"] | _LAUNCHERS["MPICH"])
    assert place_of_environment() == Place(2, 1)
    alone = _JAX | {"JAX_NUM_PROCESSES": "1"}  # says nothing of what was started within it
    _set(monkeypatch, alone | _LAUNCHERS["Open MPI"])
    with pytest.raises(UserError, match=r"^OMPI_COMM_WORLD_SIZE is 2: Open MPI"):
        place_of_environment()


def test_a_command_ends_with_status_2(monkeypatch, capsys):
    """In one line, before it reads the configuration; help is for everyone."""
    _set(monkeypatch, _LAUNCHERS["Open MPI"])
    assert cli.run(["train", "--help"]) == cli.run(["--version"]) == 0
    capsys.readouterr()
    assert cli.run(["train", "--config", "there_is_none"]) == 2
    output, error = capsys.readouterr()
    assert error.startswith("error: OMPI_COMM_WORLD_SIZE is 2: Open MPI has started these")
    assert error.count("\n") == 1 and not output
    _set(monkeypatch, _JAX)
    assert cli.run(["report", "there_is_none"]) == 2
    assert "this is one of 2: start it once, without JAX_NUM_PROCESSES" in capsys.readouterr().err


def test_where_jax_has_joined_the_environment_says_nothing(monkeypatch):
    _set(monkeypatch, _LAUNCHERS["torchrun"] | {"WORLD_SIZE": "4"})
    state = types.SimpleNamespace(
        client=object(), num_processes=3, process_id=2, coordinator_address="c:7"
    )
    joined = types.SimpleNamespace(global_state=state)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", joined)
    assert this_place() == Place(3, 2, "c:7")
    state.client = None
    with pytest.raises(UserError, match="WORLD_SIZE is 4"):
        this_place()


@pytest.mark.parametrize("value", [None, "", "x", "1.0", "-1", "9" * 5000])
@pytest.mark.parametrize("name", [*_SLURM])
def test_variables_of_slurm_that_cannot_be(name, value, monkeypatch):
    if value is None and name == "SLURM_STEP_NUM_TASKS":
        return  # a batch script
    if value and name == "SLURM_STEP_NODELIST":
        return  # a name
    _set(monkeypatch, _SLURM | {name: value})
    with pytest.raises(UserError, match=f"{name} is .*: start the tasks with srun, or set JAX_"):
        place_of_environment()


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_PROCID": "2"}, "contradict each other: .* SLURM_PROCID is 2"),
        ({"SLURM_NTASKS": "4"}, "SLURM_STEP_NUM_TASKS is 2, .* SLURM_NTASKS is 4"),
        ({"JAX_COORDINATOR_PORT": "70000"}, "JAX_COORDINATOR_PORT is '70000': write a port"),
        ({"JAX_COORDINATOR_PORT": "x"}, "JAX_COORDINATOR_PORT is 'x': write a port"),
    ],
)
def test_variables_of_slurm_that_do_not_fit(variables, words, monkeypatch):
    _set(monkeypatch, _SLURM | variables)
    with pytest.raises(UserError, match=words):
        place_of_environment()


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _in_thread(place: Place) -> tuple[threading.Thread, list]:
    """`meet` beside this thread; what it raised is put into the list, or None."""
    result: list = []

    def run():
        try:
            result.append(meet(place))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result


def _call(port: int, content: bytes) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            caller = socket.create_connection(("localhost", port), 10.0)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    caller.sendall(content)
    return caller


_STRANGERS = [
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1, 2]\n",
    b"[[], {}]\n",
    b"fp8rl process \n",
    b"fp8rl process 1\n",
    b"fp8rl process one of two\n",
    b"fp8rl process 1 of 2",
    b"\xff" * 50_000,
    b"fp8rl process " + b"1" * 50_000,
    b"fp8rl process -1 of 2\n",
    b"fp8rl process " + b"\0" * 10,
    "fp8rl process ² of ²\n".encode(),
]


def test_strangers_at_the_port_are_ignored():
    """Those that say something, nothing, half of what a process says, or go away: the processes
    meet."""
    port = _free_port()
    first, found = _in_thread(Place(2, 0, f"localhost:{port}"))
    with contextlib.ExitStack() as stack:
        for content in _STRANGERS * 10:  # more than are listened to at a time
            stack.enter_context(_call(port, content))
        _call(port, b"").close()
        second, also = _in_thread(Place(2, 1, f"localhost:{port}"))
        first.join(60)  # of the 300 seconds after which a process would be missing
        second.join(60)
    assert found == also == [None]


def test_many_files_are_open(monkeypatch):
    """Descriptors from 1024 on are as good as others."""
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    create = socket.create_server

    def high(*arguments, **named):
        with create(*arguments, **named) as server:
            return socket.socket(fileno=fcntl.fcntl(server, fcntl.F_DUPFD_CLOEXEC, 1024))

    monkeypatch.setattr(socket, "create_server", high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most, 2000), hard))
    try:
        with create(("", 0)) as server:
            port = server.getsockname()[1]
        first, found = _in_thread(Place(2, 0, f"localhost:{port}"))
        second, also = _in_thread(Place(2, 1, f"localhost:{port}"))
        first.join(20)
        second.join(20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    assert found == also == [None]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"fp8rl process 1 of 3\n", "process 1 says that there are 3"),
        (b"fp8rl process 0 of 2\n", "two say that they are process 0"),
        (b"fp8rl process 7 of 2\n", "two say that they are process 7"),
    ],
)
def test_processes_that_do_not_fit(content, words):
    """They are told, too."""
    port = _free_port()
    first, found = _in_thread(Place(2, 0, f"localhost:{port}"))
    with _call(port, content) as caller:
        first.join(20)
        assert words in str(found[0]) and isinstance(found[0], UserError)
        assert words.encode() in caller.recv(1000)


def test_strangers_do_not_hold_up_the_deadline(monkeypatch):
    """One calls after the other, and the process that is missing does not come."""
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.5)
    port = _free_port()
    first, found = _in_thread(Place(2, 0, f"localhost:{port}"))
    while first.is_alive():
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), 0.1):
            time.sleep(0.01)
    assert "there is no process 1" in str(found[0])


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"x" * 10**6, b"fp8rl: " + b"y" * 10**6]
)
def test_a_stranger_in_the_place_of_process_0(answer, monkeypatch):
    """Whatever it answers, for as long as it likes, is no answer of process 0."""
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.5)
    monkeypatch.setattr(meeting, "_GRACE_SECONDS", 0.1)
    with socket.create_server(("localhost", 0)) as server:
        server.settimeout(5)
        thread, found = _in_thread(Place(2, 1, f"localhost:{server.getsockname()[1]}"))
        while thread.is_alive():
            with contextlib.suppress(OSError):
                server.settimeout(0.1)
                caller, _ = server.accept()
                with caller:
                    caller.sendall(answer)
                    if not answer:
                        thread.join(5)  # says nothing
    assert "process 0 is not found at localhost" in str(found[0])


@pytest.mark.parametrize("host", ["a" * 300, "a..b", "nobody.invalid"])
def test_a_host_that_cannot_be(host, monkeypatch):
    monkeypatch.setattr(meeting, "JOIN_SECONDS", 0.3)
    with pytest.raises(UserError, match="process 0 is not found at"):
        meet(Place(2, 1, f"{host}:1"))
