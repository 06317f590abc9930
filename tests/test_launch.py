"""The files of launch/ for clusters, as far as they can be tried without one.

`launch/slurm_selftest.sh` tries slurm.sbatch on a real Slurm; it needs root and ten minutes.
"""

from __future__ import annotations

import copy
import json
import os
import pathlib
import re
import signal
import subprocess

import jsonschema
import pytest
import yaml

from fp8rl_jax.config import load_config
from fp8rl_jax.plan.planned import read_planned

_LAUNCH = pathlib.Path(__file__).resolve().parents[1] / "launch"
_SCHEMA = json.loads((pathlib.Path(__file__).parent / "helpers/jobset_schema.json").read_text())


@pytest.mark.parametrize("script", sorted(_LAUNCH.glob("*.s*")), ids=lambda path: path.name)
def test_scripts_are_bash(script):
    subprocess.run(["bash", "-n", script], check=True)


def _program(directory: pathlib.Path, name: str, body: str) -> None:
    path = directory / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def _run(tmp_path: pathlib.Path, script: str, *arguments: str, **variables: str):
    """A script of launch/ with the programs in tmp_path before all others."""
    return subprocess.Popen(
        ["bash", str(_LAUNCH / script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables},
    )


@pytest.mark.parametrize(
    ("status", "restarts", "requeued"),
    [
        (75, None, True),
        (75, "1", True),
        (75, "2", False),
        (0, None, False),
        (2, None, False),
        (143, None, False),
    ],
)
def test_slurm_job_requeues_itself_after_a_stop(status, restarts, requeued, tmp_path):
    """Status 75 alone, and at most FP8RL_REQUEUES times."""
    _program(tmp_path, "srun", f'echo "$@" > {tmp_path}/srun.txt; exit {status}')
    _program(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/scontrol.txt')
    variables = {
        "SLURM_SUBMIT_DIR": str(_LAUNCH.parent),
        "SLURM_JOB_ID": "7",
        "FP8RL_REQUEUES": "2",
    }
    if restarts:
        variables["SLURM_RESTART_COUNT"] = restarts
    job = _run(tmp_path, "slurm.sbatch", "--config", "a file.py", **variables)
    assert job.wait() == status
    assert (
        (tmp_path / "srun.txt")
        .read_text()
        .endswith("fp8rl train --auto-resume --config a file.py\n")
    )
    assert (tmp_path / "scontrol.txt").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"


def _jobset() -> dict:
    return yaml.safe_load((_LAUNCH / "jobset.yaml").read_text())


def _examples() -> list[str]:
    """The arguments of `fp8rl train` for clusters, as launch/ and docs/multihost.md write them."""
    (container,) = _jobset()["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    texts = [
        (_LAUNCH / "slurm.sbatch").read_text(),
        (_LAUNCH.parent / "docs/multihost.md").read_text(),
    ]
    found = [" ".join(container["args"]).replace("--config=", "--config ")]
    for text in texts:
        joined = re.sub(r"\\\n#? *", "", text)
        found += re.findall(r"^#? *sbatch .*launch/slurm\.sbatch (.*)$", joined, re.M)
    return found


@pytest.mark.parametrize("arguments", _examples())
def test_examples_name_a_checkpoint_and_a_mesh_that_works(arguments):
    """With the shapes of the model in the place of its files."""
    first, config, *fields = arguments.split()
    assert first == "--config" and any("model.checkpoint=" in field for field in fields)
    fields = [field for field in fields if "model.checkpoint=" not in field]
    loaded = load_config(
        str(_LAUNCH.parent / config), [*fields, f"--config.model.name={pathlib.Path(config).stem}"]
    )
    assert read_planned(loaded).mesh.size % 8 == 0


def test_slurm_options():
    """One task for each GPU, which all see; a signal early enough, and to the tasks."""
    text = (_LAUNCH / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.M))
    assert len(options) == text.count("#SBATCH")
    assert options["gres"] == f"gpu:{options['ntasks-per-node']}"
    assert options["signal"].startswith("TERM@")  # B: would be to the script alone
    assert "requeue" in options and "--gpu-bind=none" in text


def test_pod_receives_its_signal(tmp_path):
    """SIGTERM to the entry's process is SIGTERM to the run, whose status is the pod's."""
    _program(
        tmp_path, "fp8rl", "trap 'exit 75' TERM; echo ready \"$@\"; while :; do sleep 0.1; done"
    )
    pod = _run(tmp_path, "jobset_entry.sh", "--config=c.py")
    assert pod.stdout.readline() == "ready train --auto-resume --config=c.py\n"
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(timeout=30) == 75


def test_environment_keeps_what_is_set(tmp_path):
    _program(
        tmp_path,
        "fp8rl",
        'echo "$FP8RL_COMPILATION_CACHE $NCCL_ALGO $XLA_FLAGS ${https_proxy-none}"',
    )
    pod = _run(
        tmp_path,
        "jobset_entry.sh",
        FP8RL_SHARED="/shared",
        NCCL_ALGO="Tree",
        XLA_FLAGS="--xla_gpu_deterministic_ops=false",
        https_proxy="http://proxy",
    )
    cache, algorithm, *flags, proxy = pod.communicate()[0].split()
    assert (cache, algorithm, proxy) == ("/shared/fp8rl_jax/compilation", "Tree", "none")
    assert flags[-1] == "--xla_gpu_deterministic_ops=false"  # the last one counts


def test_jobset_is_one():
    """Its fields are those of the API; every number of hosts is the same; 75 is not an error."""
    jobset = _jobset()
    jsonschema.validate(jobset, _SCHEMA)
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    variables = {row["name"]: row.get("value") for row in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(variables["FP8RL_PROCESSES"])
    name = jobset["metadata"]["name"]
    assert variables["FP8RL_COORDINATOR"].split(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    codes = [
        rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert codes == [{"containerName": container["name"], "operator": "In", "values": [75]}]
    assert container["command"] == ["bash", "launch/jobset_entry.sh"]


@pytest.mark.parametrize(
    "plant",
    [
        lambda spec: spec["failurePolicy"].update(maxRestart=1),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(completions="2"),
        lambda spec: spec["failurePolicy"]["rules"][0].update(action="Restart"),
    ],
)
def test_schema_finds_a_planted_error(plant):
    jobset = copy.deepcopy(_jobset())
    plant(jobset["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset, _SCHEMA)
