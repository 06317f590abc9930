"""`launch/gpu_minutes.sh` where Python, `timeout` and `nvidia-smi` are stand-ins: what it runs and
leaves behind, and what becomes of it when a piece fails, hangs or is killed."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from fp8rl_jax.config import load_config

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_PIECES = {
    "a": ["held", "decode", "probe", "learner", "counters", "rest"],
    "b": ["headline", "peer", "rest"],
    "c": ["tiny_fp8", "tiny_bf16", "table_tiny", "small_fp8", "small_bf16", "table_small", "peer"],
}
# Programs on the PATH. The Python answers what the script asks of it, and runs PIECE for a piece: a
# file NAME.sh if there is one, for a piece whose command has the text NAME.
_PROGRAMS = {
    "nvidia-smi": 'echo "NVIDIA H200, 580.1, 700 W"',
    "nproc": "echo 16",
    "ncu": "echo counted; [ $# -gt 5 ]",
    # Limits of seconds become those of tenths.
    "timeout": '[ "$1 $2 $3" = "-v -k 5" ] && exec /usr/bin/timeout -v -k 1 "0.$4" "${@:5}"',
    "python": """
case "$*" in
  -) echo "$COMMIT" ;;
  *" lacking "*) echo "$LACKING" ;;
  -c* | "-m pip"* | *" wheels "*) exec "$REAL" "$@" ;;
  *)
    for file in "$HERE"/*.sh; do
      name="$(basename "$file" .sh)"
      [[ "$*" != *"$name"* ]] || source "$file"
    done
    echo "figures of $*"
    ;;
esac""",
}
_HOLDS = """
for x in "$@"; do case $x in --out=*) out="${x#--out=}" ;; esac; done
echo '"verdict": "VERDICT"' > "$out/gpu_check.json" """


class Machine:
    """A bare machine with a GPU, as far as the script can see."""

    def __init__(self, directory: pathlib.Path):
        self.programs, self.out = directory / "programs", directory / "results"
        self.programs.mkdir()
        for name, body in _PROGRAMS.items():
            self.program(name, body)
        self.piece("test_gpu_program", _HOLDS.replace("VERDICT", "holds"))
        self.variables = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHON": str(self.programs / "python"),
            "REAL": sys.executable,
            "HERE": str(self.programs),
            "COMMIT": "1234567",
            "LACKING": "",
            "WHEELS": str(directory / "none"),
            "TMPDIR": str(directory),
        }

    def program(self, name: str, body: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)

    def piece(self, text: str, body: str) -> None:
        """`body` runs in the pieces whose command has `text`."""
        (self.programs / f"{text}.sh").write_text(body)

    def start(self, part: str = "a") -> subprocess.Popen:
        script = str(_ROOT / "launch" / "gpu_minutes.sh")
        # Ctrl-C is heard as at a terminal, also if nobody hears it where the tests run.
        command = ["env", "--default-signal=INT", "bash", script, part, str(self.out)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.variables, **pipes)

    def run(self, part: str = "a") -> tuple[int, str]:
        """Exit status and what it said on stderr."""
        job = self.start(part)
        _, said = job.communicate(timeout=120)
        return job.returncode, said

    def summary(self, part: str = "a") -> dict:
        """The last line of the log; nothing else may be left."""
        assert not [path for path in self.out.parent.iterdir() if path.name.startswith("tmp.")]
        return json.loads((self.out / f"{part}.log").read_text().splitlines()[-1])

    def outcomes(self, part: str = "a") -> list[str]:
        return [piece["outcome"] for piece in self.summary(part)["pieces"]]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.mark.parametrize("part", _PIECES)
def test_all_is_well(part, machine):
    assert machine.run(part) == (0, "")
    found = machine.summary(part)
    assert (found["part"], found["ok"], found["stopped"]) == (part, True, "")
    assert found["commit"] == "1234567" and found["card"].startswith("NVIDIA H200")
    assert [piece["name"] for piece in found["pieces"]] == _PIECES[part]
    assert {piece["outcome"] for piece in found["pieces"]} == {"done"}
    text = (machine.out / f"{part}.txt").read_text()
    assert all(f"== {name}: " in text for name in _PIECES[part]) and "figures of -m" in text


def test_what_it_runs_exists(machine):
    """The tests that it names, and the configs with their fields."""
    texts = []
    for part in _PIECES:
        machine.run(part)
        texts.append((machine.out / f"{part}.txt").read_text())
    text = "\n".join(re.findall("^== .*", "\n".join(texts), re.M))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--slow", "--collect-only"]
    done = subprocess.run([*command, "tests/gpu"], cwd=_ROOT, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("tests/gpu/")]
    named = set(re.findall(r"tests/gpu/test_\w+\.py(?:::\w+(?:\[[^]]*\])?)?", text))
    known = {part for test in found for part in (test, test.split("[")[0], test.split("::")[0])}
    assert len(named) > 10 and named <= known, named - known
    runs = re.findall(r" train --config (.*)", text)
    assert len(runs) == 4
    for run in runs:
        config, *fields = run.split()
        load_config(str(_ROOT / config), fields)


def test_a_wrong_result_stops_it(machine):
    machine.piece("test_gpu_program", _HOLDS.replace("VERDICT", "FAILED") + "; exit 1")
    assert machine.run()[0] == 1
    found = machine.summary()
    assert not found["ok"] and found["stopped"].startswith("a test that decides has failed")
    assert [piece["name"] for piece in found["pieces"]] == ["held"]


def test_results_that_were_not_reached_do_not_stop_it(machine):
    """Of the tests that decide some held, and for others the time was up."""
    machine.piece("test_gpu_program", _HOLDS.replace("VERDICT", "holds") + "; exit 1")
    assert machine.run()[0] == 1 and machine.summary()["stopped"] == ""
    assert machine.outcomes() == ["failed", "done", "done", "done", "done", "done"]


def test_no_result_stops_it(machine):
    machine.piece("test_gpu_program", "echo no GPU; exit 2")
    assert machine.run()[0] == 1
    assert machine.summary()["stopped"].startswith("no test that decides has held")


_SLEEP = f"sleep 97.{os.getpid()}"  # of this test alone


def _sleeps() -> bool:
    return not subprocess.run(["pgrep", "-f", f"^{_SLEEP}"], capture_output=True).returncode


def test_a_piece_that_hangs_is_cut_off(machine):
    """With what it said, and with its processes, though they do not listen; the others run."""
    machine.piece("speed_of_decode", f"trap '' TERM; echo 9 ms; {_SLEEP} & {_SLEEP}")
    assert machine.run()[0] == 1
    assert machine.outcomes() == ["done", "cut off", "done", "done", "done", "done"]
    assert "9 ms" in (machine.out / "a.txt").read_text() and not _sleeps()


def test_a_piece_that_is_killed(machine):
    """What it started goes, too; its own end is told from that of a limit."""
    machine.piece("speed_of_reading", f"echo 4 TB/s; {_SLEEP} & kill -KILL $$")
    assert machine.run()[0] == 1
    assert machine.outcomes() == ["done", "done", "killed", "done", "done", "done"]
    assert "4 TB/s" in (machine.out / "a.txt").read_text() and not _sleeps()


def test_interrupted(machine):
    """It ends at once, without children, and its log has what was done."""
    machine.program("timeout", 'exec /usr/bin/timeout -k 1 60 "${@:5}"')
    machine.piece("speed_of_decode", f"echo begun; {_SLEEP} & {_SLEEP}")
    job = machine.start()
    transcript = machine.out / "a.txt"
    while not transcript.exists() or "\nbegun" not in transcript.read_text():
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=10)
    assert job.returncode == 130 and not _sleeps()
    assert machine.summary()["stopped"] == "interrupted"
    assert machine.outcomes() == ["done", "interrupted"]


def test_without_ncu(machine):
    (machine.programs / "ncu").unlink()
    machine.variables["PATH"] = f"{machine.programs}:/usr/bin:/bin"
    assert machine.run()[0] == 0
    assert machine.outcomes() == ["done", "done", "done", "done", "left out", "done"]


def test_a_second_run_into_the_folder(machine):
    """Is refused for the same part, and leaves what is there; another part may share it."""
    machine.run()
    kept = {path: path.read_text() for path in machine.out.iterdir()}
    status, said = machine.run()
    assert status == 2 and "has the results of part a already" in said
    assert kept == {path: path.read_text() for path in machine.out.iterdir()}
    assert machine.run("b")[0] == 0
    machine.variables["COMMIT"] = "7654321"
    status, said = machine.run("c")
    assert status == 2 and "has results of another commit" in said


def _no_gpu(machine: Machine) -> None:
    machine.program("nvidia-smi", "exit 9")


def _no_room(machine: Machine) -> None:
    machine.out.mkdir()
    (machine.out / "a.txt").symlink_to("/dev/full")


def _broken_wheel(machine: Machine) -> None:
    wheels = pathlib.Path(machine.variables["WHEELS"])
    wheels.mkdir()
    (wheels / "nothing_of_the_kind-1.0-py3-none-any.whl").write_text("damaged")


_MISSING = {
    "no GPU": (_no_gpu, "nvidia-smi finds no GPU here"),
    "a wheel": (
        lambda m: m.variables.update(LACKING="jax-triton"),
        "lacks jax-triton, and so does",
    ),
    "a damaged wheel": (_broken_wheel, "cannot be installed"),
    "the commit": (lambda m: m.variables.update(COMMIT=""), "set FP8RL_COMMIT"),
    "room": (_no_room, "nothing can be written to"),
    "a folder": (lambda m: m.out.write_text("a file"), "cannot be made: name another"),
}


@pytest.mark.parametrize("fault", _MISSING)
def test_what_is_missing_is_said_before_time_is_spent(fault, machine):
    make, sentence = _MISSING[fault]
    make(machine)
    status, said = machine.run()
    assert status == 2 and sentence in said
    assert said.splitlines()[-1].startswith("gpu_minutes: ") and "Traceback" not in said
    assert not (machine.out / "a.log").exists()


def test_a_disk_that_fills_up(machine):
    """The pieces go on, since their figures are on the terminal, and the end is no success. Every
    write fails here, because a folder is in the place of the file."""
    full = 'for x in log txt; do rm "$out/a.$x"; mkdir "$out/a.$x"; done'
    machine.piece("test_gpu_program", f"{_HOLDS.replace('VERDICT', 'holds')}; {full}")
    job = machine.start()
    shown, said = job.communicate(timeout=120)
    assert job.returncode == 1 and "not all could be written" in said
    found = json.loads(shown.splitlines()[-1])
    assert not found["ok"] and {piece["outcome"] for piece in found["pieces"]} == {"done"}
    assert "speed_of_learner" in said, "what a piece prints goes to the terminal"


@pytest.mark.parametrize("words", [[], ["d"], ["a", "one", "two"]], ids=str)
def test_other_words_are_refused(words):
    command = ["bash", str(_ROOT / "launch" / "gpu_minutes.sh"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("gpu_minutes: ")


def test_help():
    command = ["bash", str(_ROOT / "launch" / "gpu_minutes.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "FP8RL_COMMIT" in done.stdout and "set -" not in done.stdout


def _install(directory: pathlib.Path, name: str, *needs: str) -> None:
    """Makes an empty package that requires others."""
    folder = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {need}" for need in needs)]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")


def _packages(directory: pathlib.Path, *words: str | pathlib.Path) -> str:
    command = [sys.executable, _ROOT / "launch" / "_packages.py", *words]
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    return subprocess.check_output(command, text=True, env=environment).strip()


def test_what_is_lacking(tmp_path):
    """Also what others require here; a GPU machine's own builds are taken as they are."""
    _install(tmp_path, "top-most", "Middle_One>=9; python_version >= '3'", "never; extra == 'more'")
    _install(tmp_path, "middle-one", "not-there", "not-here; sys_platform == 'win32'", "top-most")
    _install(tmp_path, "triton", "not-needed")
    found = _packages(tmp_path, "lacking", "top_most", "triton", "nor-this")
    assert found == "nor-this, not-there"
    assert _packages(tmp_path, "lacking", "triton") == ""


def test_wheels_of_what_is_lacking(tmp_path):
    _install(tmp_path, "middle-one")
    for name in ("middle_one-2.0-py3-none-any.whl", "Not_There-1.0-py3-none-any.whl", "README"):
        (tmp_path / name).touch()
    assert _packages(tmp_path, "wheels", tmp_path).splitlines() == [
        str(tmp_path / "Not_There-1.0-py3-none-any.whl")
    ]
    assert _packages(tmp_path, "wheels", tmp_path / "none") == ""
