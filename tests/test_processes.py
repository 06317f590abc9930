"""Several processes of one run, on this machine, against one process with as many devices.

The quick test compares the digests of a step with golden ones; the slow ones compare all records,
and end runs in every way, and each must end as docs/multihost.md says.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest
import read_part
from hf_checkpoints import CONFIGS, fields_of, fp8_tensors, named, params_of, write
from jax._src import distributed
from tiny_run import BITS, CONFIG, ONE_STEP, overrides, reproducible

from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import load_config
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.replay.bisect import parting
from fp8rl_jax.sharding import between_hosts
from fp8rl_jax.train import train
from fp8rl_jax.training.logs import read_jsonl

_ROOT = pathlib.Path(__file__).parents[1]
_SMALL = {
    **ONE_STEP,
    "mesh.data": 2,
    "env.reward": "dense_reward:share_of_even_bytes",
    "precision.self_check": False,
    "precision.rollout": "f32",
    "precision.learner": "f32",
}


_CLI = ["-m", "fp8rl_jax.cli"]
# The same with JAX's three variables instead of ours, and in a program that has joined by itself.
_BY_JAX = [
    "-c",
    "import os\n"
    "from fp8rl_jax.cli import entry\n"
    "os.environ['JAX_COORDINATOR_ADDRESS'] = os.environ.pop('FP8RL_COORDINATOR')\n"
    "os.environ['JAX_NUM_PROCESSES'] = os.environ.pop('FP8RL_PROCESSES')\n"
    "os.environ['JAX_PROCESS_ID'] = os.environ.pop('FP8RL_PROCESS_ID')\n"
    "entry()\n",
]
_JOINED_BEFORE = [
    "-c",
    "import os, jax\n"
    "from fp8rl_jax.cli import entry\n"
    "jax.distributed.initialize(\n"
    "    os.environ.pop('FP8RL_COORDINATOR'),\n"
    "    int(os.environ.pop('FP8RL_PROCESSES')),\n"
    "    int(os.environ.pop('FP8RL_PROCESS_ID')),\n"
    ")\n"
    "entry()\n",
]


def _train(
    root: pathlib.Path, count: int, devices: int, *more: str, program=_CLI, **fields
) -> subprocess.Popen:
    """`fp8rl train` as `count` processes with so many devices each; `program`: what Python runs."""
    given = overrides(root, **{name.replace("__", "."): v for name, v in (_SMALL | fields).items()})
    command = [*program, "train", "--config", str(CONFIG), *given, *more]
    return _launch(root, count, devices, *command)


def _launch(root: pathlib.Path, count: int, devices: int, *command: str) -> subprocess.Popen:
    """Python as `count` processes with so many devices each."""
    launch = ["bash", str(_ROOT / "launch" / "multihost.sh"), str(count), "--devices", str(devices)]
    return subprocess.Popen(
        [*launch, sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(CONFIG.parent)},
        cwd=root,
        text=True,
    )


def _finished(process: subprocess.Popen, status: int = 0) -> str:
    """Waits; the text on standard error."""
    _, error = process.communicate(timeout=900)
    assert process.returncode == status, error[-3000:]
    return error


def _checksums(root: pathlib.Path) -> dict[str, int]:
    found = (root / "run" / "checkpoints").glob("*/meta/metadata")
    return {path.parts[-3]: json.loads(path.read_text())["checksum"] for path in found}


_CONVERSATIONS = {
    "env.step": "echo_env:step",
    "env.max_turns": 4,
    "rollout.max_turn_tokens": 9,
    "rollout.slots": 8,
    "rollout.part": 6,
}


def test_two_processes_have_the_golden_bits(tmp_path):
    """Prompts, tokens, rewards, record and state of an FP8 step are those of one device, on every
    CPU, as tests/golden/bits.json has them: a change that moves one bit fails here."""
    _finished(_train(tmp_path, 2, 1, **BITS))
    found, compared = parting(_ROOT / "tests" / "golden" / "bits.json", tmp_path / "run")
    assert found is None and compared == 1, f"{found}; on purpose? python tests/golden/record.py"
    (record,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert record["train_rollout_logprob_abs_diff_max"] == 0.0
    assert record["grad_norm"] > 0.1  # the reward has a gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "program"),
    [({}, _CLI), (_CONVERSATIONS, _BY_JAX), ({}, _JOINED_BEFORE)],
    ids=["one reply", "conversations, JAX's variables", "joined before"],
)
def test_two_processes_are_one(more, program, tmp_path):
    """Every record, times aside, and the states: two processes of one device, one of two. What an
    environment says to one process's responses reaches the other."""
    roots = [tmp_path / "two", tmp_path / "one"]
    for root, (count, devices) in zip(roots, ((2, 1), (1, 2)), strict=True):
        root.mkdir()
        _finished(_train(root, count, devices, program=program, **more))
    two, one = map(reproducible, roots)
    for record in (*two["metrics"], *one["metrics"]):
        assert record.get("turns_mean", 3.0) >= 3.0
        for name in [name for name in record if name.startswith("rollout_")]:
            del record[name]  # depends on time
    assert two == one
    assert all(r["grad_norm"] > 0.1 for r in two["metrics"])  # the reward has a gradient
    assert {r["train_rollout_logprob_abs_diff_max"] for r in two["metrics"]} == {0.0}
    assert _checksums(roots[0]) == _checksums(roots[1]) != {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"rollout.ahead": 2, "rollout.slots": 8, "rollout.most_versions": 2},
        {"rollout.ahead": 1, **_CONVERSATIONS},
    ],
    ids=["partial", "conversations"],
)
def test_devices_for_rollouts(more, tmp_path):
    """Two processes, each of which has a device for rollouts alone, are two without: rollouts run
    in a thread beside the learner, and both exchange values between the processes."""
    roots = [tmp_path / "own", tmp_path / "shared"]
    fields = {"run.steps": 4, "run.check_every": 2, **more}
    for root, devices, own in zip(roots, (2, 1), ({"mesh.rollout": 2}, {}), strict=True):
        root.mkdir()
        _finished(_train(root, 2, devices, **fields, **own))
    own, shared = map(reproducible, roots)
    for record in (*own["metrics"], *shared["metrics"]):
        if "env.step" in more:
            for name in [name for name in record if name.startswith("rollout_")]:
                del record[name]  # depends on time
    assert own == shared and len(own["metrics"]) == 4
    drifts = [r.get("train_rollout_logprob_abs_diff_max", 0.0) for r in own["metrics"]]
    assert set(drifts) == {0.0}
    assert _checksums(roots[0]) == _checksums(roots[1]) != {}


def test_joined_before(monkeypatch):
    """What the calling program has initialised is used, and nothing is joined."""
    begun = []
    monkeypatch.setattr(processes, "_begin", lambda: begun.append(processes.number()))
    monkeypatch.setattr(jax.distributed, "initialize", None)
    monkeypatch.setattr(distributed.global_state, "client", object())
    monkeypatch.setattr(distributed.global_state, "num_processes", 2)
    monkeypatch.setattr(distributed.global_state, "process_id", 1)
    processes.join()
    processes.check_joined()
    assert begun == [1]
    assert processes.count() == 2 and not processes.first()


def test_not_joined(monkeypatch):
    """A failure of JAX leaves one process, which may say so; it does not train all of the job."""
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")

    def initialize(num_processes, process_id, **others):
        distributed.global_state.num_processes = num_processes
        distributed.global_state.process_id = process_id
        distributed.global_state.client = object()
        raise ValueError("no")

    monkeypatch.setattr(processes, "meet", lambda place: None)
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(UserError, match=r"process 1 of 2 cannot join .* \(ValueError: no\)"):
        processes.join()
    assert processes.count() == 1 and processes.first()
    with pytest.raises(UserError, match="this is process 1 of 2, and they have not joined: call "):
        train(load_config(str(CONFIG)))


def test_exchange_by_store(monkeypatch):
    """Values of two processes, here threads, in many parts; keys that all have read are deleted."""
    store, changed, here = {}, threading.Condition(), threading.local()

    class Client:
        def key_value_set_bytes(self, key, value):
            with changed:
                assert key not in store
                store[key] = value
                changed.notify_all()

        key_value_set = key_value_set_bytes

        def blocking_key_value_get(self, key, timeout_ms):
            with changed:
                changed.wait_for(lambda: key in store, 60)
                return store[key]

        blocking_key_value_get_bytes = blocking_key_value_get

        def key_value_delete(self, directory):
            with changed:
                for key in [key for key in store if key.startswith(directory)]:
                    del store[key]

    class Turns:  # of each process
        def __getitem__(self, thread):
            return vars(here).get("turns", 0)

        def __setitem__(self, thread, turns):
            here.turns = turns

    monkeypatch.setattr(processes, "_client", Client)
    monkeypatch.setattr(processes, "_PART", 16)
    monkeypatch.setattr(processes, "_by_store", True)
    monkeypatch.setattr(processes, "_exchanges", Turns())
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "number", lambda: here.number)
    found = {}

    def process(number: int) -> None:
        here.number = number
        threading.current_thread().name = "rollouts"
        found[number] = [processes.exchange((number, turn, "x" * 99)) for turn in range(5)]

    threads = [threading.Thread(target=process, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[(number, turn, "x" * 99) for number in range(2)] for turn in range(5)]
    assert found == {0: expected, 1: expected}
    assert len({key.split("/")[3] for key in store}) <= 2, "the last two turns are left"


def test_axis_between_hosts():
    """Eight processes of one device, four to a host."""
    devices = [types.SimpleNamespace(process_index=i) for i in range(8)]
    hosts = ["a"] * 4 + ["b"] * 4
    for shape, crosses in (((1, 2, 4), False), ((2, 2, 2), False), ((1, 1, 8), True)):
        mesh = types.SimpleNamespace(
            devices=np.array(devices).reshape(shape), axis_names=("data", "fsdp", "tensor")
        )
        assert between_hosts(mesh, "tensor", hosts) == crosses
    assert between_hosts(mesh, "fsdp", hosts) is False


def _step(root: pathlib.Path, step: int, process: subprocess.Popen) -> None:
    """Waits until a run has logged an RL step."""
    log = root / "run" / "metrics.jsonl"
    while process.poll() is None:
        if log.exists() and len(log.read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(process.communicate()[1][-3000:])


def _pid(launcher: subprocess.Popen, number: int) -> int:
    """The process with this number, of those that a launcher has started."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == launcher.pid and f"FP8RL_PROCESS_ID={number}".encode() in environment:
            return int(path.name)
    raise AssertionError(f"there is no process {number}")


@pytest.mark.slow
def test_a_signal_to_one_stops_all(tmp_path):
    """At the same step, with a checkpoint and status 75; resumed, the run is that of one piece. The
    signal goes to the process that is not the first, which all that is said comes from."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for root in (whole, stopped):
        root.mkdir()
    _finished(_train(whole, 2, 1, run__steps=6))
    process = _train(stopped, 2, 1, run__steps=6)
    _step(stopped, 2, process)
    os.kill(_pid(process, 1), signal.SIGTERM)
    _finished(process, 75)
    assert len(reproducible(stopped)["metrics"]) < 6
    _finished(_train(stopped, 2, 1, "--resume", run__steps=6))
    assert reproducible(stopped) == reproducible(whole)
    newest = max(map(int, _checksums(whole)))
    assert _checksums(stopped)[str(newest)] == _checksums(whole)[str(newest)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_process_ends_the_others(number, tmp_path):
    process = _train(tmp_path, 2, 1, run__steps=200)
    _step(tmp_path, 1, process)
    other = _pid(process, 1 - number)
    os.kill(_pid(process, number), signal.SIGKILL)
    process.communicate(timeout=90)
    assert process.returncode != 0 and not os.path.exists(f"/proc/{other}")


@pytest.mark.slow
def test_an_error_in_one_process_is_said_once(tmp_path):
    """A reward that always fails in process 1: its sentence, its status, a checkpoint."""
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def reward(prompt, response, answer):\n"
        "    return 1 / 0 if os.environ['FP8RL_PROCESS_ID'] == '1' else 0.5\n"
        "def exits(prompt, response, answer):\n"
        "    raise SystemExit\n"
    )
    error = _finished(_train(tmp_path, 2, 1, env__reward="mine:exits"), 2)
    assert error.count("error: evaluation after rl step 0") == 1
    assert "all 64 calls of the reward 'mine:exits' failed" in error
    other = tmp_path / "half"
    other.mkdir()
    (other / "mine.py").write_text((tmp_path / "mine.py").read_text())
    _finished(_train(other, 2, 1, env__reward="mine:reward"))
    assert {r["reward_errors"] for r in reproducible(other)["metrics"]} == {8}  # of 16


@pytest.mark.slow
def test_unequal_processes_are_refused(tmp_path):
    """Another configuration in one process, as another version of a package would be."""
    (tmp_path / "unlike.py").write_text(
        "import os, tiny_config\n"
        "def get_config():\n"
        "    config = tiny_config.get_config()\n"
        "    config.run.seed = int(os.environ['FP8RL_PROCESS_ID'])\n"
        "    return config\n"
    )
    process = _train(tmp_path, 2, 1, "--config", str(tmp_path / "unlike.py"))
    error = _finished(process, 2)
    assert error.count("config.run.seed is '1' in process 1") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_command_of_one_process(tmp_path):
    command = [sys.executable, "-m", "fp8rl_jax.cli", "report", str(tmp_path)]
    launch = ["bash", str(_ROOT / "launch" / "multihost.sh"), "2", *command]
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "fp8rl report runs in one process" in done.stderr


_EXPERTS = {"model.num_experts": 8, "model.moe_intermediate_size": 128}
_FP8 = {"precision.rollout": "fp8", "precision.learner": "fp8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        _FP8 | {"mesh.fsdp": 4, "rollout.slots": 4},
        _FP8 | {"mesh.fsdp": 4, "learner.offload": "moments"},
        {"mesh.tensor": 4},
        _FP8 | {"mesh.expert": 4, "rollout.slots": 4, **_EXPERTS},
        _FP8
        | {
            "mesh.fsdp": 2,
            "mesh.expert": 2,
            **_EXPERTS,
            "algo.routing_replay": "weights",
            "algo.num_minibatches": 2,
            "algo.dynamic_sampling": True,
        },
        _FP8 | {"mesh.fsdp": 4, "learner.tokens_per_batch": 128, "learner.share_prompts": True},
    ],
    ids=["slots_fp8", "offload_fp8", "tensor_f32", "expert_slots_fp8", "replay_fp8", "packed_fp8"],
)
def test_any_mesh_over_processes(fields, tmp_path):
    """Two processes of two devices, and one of four: log-probabilities and all that follows from
    them are equal; gradients of four devices are added in another order."""
    roots = [tmp_path / "two", tmp_path / "one"]
    for root, (count, devices) in zip(roots, ((2, 2), (1, 4)), strict=True):
        root.mkdir()
        given = {"mesh.data": 1, "run.steps": 2, **fields}
        _finished(_train(root, count, devices, **given))
    two, one = map(reproducible, roots)
    for ours, theirs in zip(two["metrics"], one["metrics"], strict=True):
        assert ours["train_rollout_logprob_abs_diff_max"] == 0.0
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert ours["grad_norm"] > 0.1
    # What the first update follows from; after it the parameters' last bits may differ.
    added = dict.fromkeys(("loss", "grad_norm"))
    assert {**two["metrics"][0], **added} == {**one["metrics"][0], **added}
    for name in ("eval", "samples"):
        before = [[r for r in run[name] if r["step"] == 0] for run in (two, one)]
        assert before[0] == before[1] != []


@pytest.mark.slow
def test_checkpoints_go_to_other_numbers_of_processes(tmp_path):
    """Saved by two processes, continued by one, then by four; each compares the checksum of the
    state that it restores with the one saved."""
    for count, steps in ((2, 2), (1, 4), (4, 6)):
        _finished(_train(tmp_path, count, 1, "--auto-resume", mesh__data=-1, run__steps=steps))
    steps = reproducible(tmp_path)["metrics"]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert {r["train_rollout_logprob_abs_diff_max"] for r in steps} == {0.0}


@pytest.mark.slow
def test_refused_before_anything_is_written(tmp_path):
    """Another version of JAX in one process; another kind of CPU; a run.dir of each process's own;
    two coordinators."""
    begin = "import os, sys\nmine = os.environ['FP8RL_PROCESS_ID']\n"
    end = "from fp8rl_jax.cli import entry\nentry()\n"
    other_jax = (
        "import importlib.metadata as m\nplain = m.version\n"
        "m.version = lambda name: '9.9' if name == 'jax' and mine == '1' else plain(name)\n"
    )
    error = _finished(_train(tmp_path, 2, 1, program=["-c", begin + other_jax + end]), 2)
    assert error.count("jax is '9.9' in process 1 on ") == 1
    if cpu_way().bf16_order:
        older = "if mine == '1': os.environ['ONEDNN_MAX_CPU_ISA'] = 'AVX2'\n"
        error = _finished(_train(tmp_path, 2, 1, program=["-c", begin + older + end]), 2)
        assert error.count("ONEDNN_MAX_CPU_ISA is 'AVX2' in process 1 on ") == 1
    own_disk = "os.mkdir(mine)\nos.chdir(mine)\n"
    error = _finished(
        _train(tmp_path, 2, 1, "--config.run.dir=run", program=["-c", begin + own_disk + end]), 2
    )
    assert error.count("run.dir: process 1 does not see what process 0 writes in ") == 1
    two = (
        "from fp8rl_jax.base import meeting\nmeeting.JOIN_SECONDS = 10\n"
        "if mine == '1': os.environ['FP8RL_COORDINATOR'] = 'localhost:1'\n"
    )
    error = _finished(_train(tmp_path, 2, 1, program=["-c", begin + two + end]), 2)
    assert "process 0 of 2 cannot join the others: after 10 s there is no process 1" in error
    assert "process 1 of 2 cannot join the others: process 0 is not found at localhost:1" in error
    twins = "os.environ['FP8RL_PROCESS_ID'] = mine if mine == '0' else '1'\n"
    error = _finished(_train(tmp_path, 3, 1, program=["-c", begin + twins + end]), 2)
    assert error.count("two say that they are process 1") == 3 and "Traceback" not in error
    assert not list(tmp_path.glob("**/*.json*"))


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "expert", "fp8"), [(2, 1, True), (1, 2, False)])
def test_each_process_reads_its_part_of_a_checkpoint(fsdp, expert, fp8, tmp_path):
    """Half of the bytes of what is sharded, and all of what is replicated; the values of a load by
    one process."""
    name = "qwen3_moe" if expert > 1 else "qwen3"
    tensors = fp8_tensors(name) if fp8 else named(CONFIGS[name], params_of(name))
    write(tmp_path / "model", fields_of(name, fp8), tensors, shards=2)
    process = _launch(
        tmp_path,
        2,
        1,
        str(pathlib.Path(read_part.__file__)),
        str(tmp_path / "model"),
        str(fsdp),
        str(expert),
    )
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-3000:]
    found = json.loads(output)
    sharded = lambda key: (
        "experts" in key if expert > 1 else "norm" not in key and "scale" not in key
    )
    half = sum(x.nbytes for key, x in tensors.items() if sharded(key)) / 2
    everything = sum(x.nbytes for x in tensors.values())
    assert found == {"read": [everything - half] * 2, "same": True}


@pytest.mark.slow
def test_times_of_processes(monkeypatch):
    """Both forms train, in turns; only the second one gathers."""
    monkeypatch.setenv("PYTHONPATH", str(CONFIG.parent))
    fields = [f"--config.{name}={value}" for name, value in _SMALL.items()]
    script = CONFIG.parents[2] / "docs" / "scripts" / "processes.py"
    command = [sys.executable, str(script), str(CONFIG), *fields]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    head, one, two, *_ = output.splitlines()
    assert head.split()[-2:] == ["gathers", "KiB"]
    assert one.startswith("1 x 2") and one.split()[-2:] == ["0", "0.0"]
    assert two.startswith("2 x 1") and int(two.split()[-2]) > 4
