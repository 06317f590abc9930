"""Small runs under random faults, each compared with an undisturbed one.

    bash launch/soak.sh HOURS [--seed=N] [--directory=DIR]

A run is started, disturbed at a random moment and resumed until it has finished: signals, SIGKILL,
a full disk (where a tmpfs can be mounted), slow rewards, damaged checkpoints, a second process on
its directory, and a clock that jumps. Then its records and the checksum of its last checkpoint must
be those of an undisturbed run, every exit status must be the documented one, and no process may be
left. A line tells of each run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

from tiny_run import CONFIG, overrides, reproducible

_CHILD = pathlib.Path(__file__).with_name("soak_child.py")
_MOST_FAULTS = 4  # of a run
_SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGHUP": signal.SIGHUP}
_ROOM = 64 << 20  # of the disk that is filled


class Wrong(Exception):
    """Something that must not happen."""


class Run:
    """A run of tiny_config.py in a directory of its own, and the processes that work on it."""

    def __init__(self, root: pathlib.Path, name: str, clock: str = ""):
        self.root = root / name
        self.directory = self.root / "run"
        self.slow = root / f"{name}.slow"
        self.output = ""
        paths = [str(CONFIG.parent), os.environ.get("PYTHONPATH", "")]  # its reward
        self._environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(paths),
            "SOAK": str(root),
            "SOAK_SLOW": str(self.slow),
            "SOAK_CLOCK": clock,
        }

    def start(self) -> subprocess.Popen:
        resume = ["--resume"] if (self.directory / "config.json").exists() else []
        fields = {"env.reward": "dense_reward:share_at_leisure", "run.keep_checkpoints": 3}
        return subprocess.Popen(
            [
                sys.executable,
                str(_CHILD),
                "train",
                "--config",
                str(CONFIG),
                *overrides(self.root, **fields),
                *resume,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
            start_new_session=True,
        )

    def end(self, process: subprocess.Popen, expected: tuple[int, ...]) -> int:
        """The status of a process, which must be one of those expected."""
        self.output, _ = process.communicate(timeout=1200)
        status = process.returncode
        if status not in expected:
            raise Wrong(f"status {status}, expected {expected}: {self.output[-2000:]}")
        if "Traceback" in self.output:
            raise Wrong(f"a traceback: {self.output[-2000:]}")
        return status

    def checkpoints(self) -> list[pathlib.Path]:
        """Complete ones, the oldest first."""
        found = (self.directory / "checkpoints").glob("*")
        return sorted((p for p in found if p.name.isdecimal()), key=lambda p: int(p.name))

    def result(self) -> tuple[dict[str, list[dict]], int]:
        """The records without times, and the checksum of the last checkpoint's state."""
        meta = json.loads((self.checkpoints()[-1] / "meta" / "metadata").read_text())
        return reproducible(self.root), meta["checksum"]


class Soak:
    """Faults, one after the other; `counts` says how many of which."""

    def __init__(self, root: pathlib.Path, seed: int):
        self.draw = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.root, self.longest = root, 60.0

    def undisturbed(self) -> tuple[dict[str, list[dict]], int]:
        """The result that every run must have; the second of two runs, which compiles nothing,
        says how long one takes."""
        found = []
        for number in range(2):
            run = Run(self.root, f"undisturbed-{number}")
            begin = time.monotonic()
            run.end(run.start(), (0,))
            self.longest = time.monotonic() - begin
            found.append(run.result())
        if found[0] != found[1]:
            raise Wrong("two undisturbed runs differ")
        return found[1]

    def disturbed(self, number: int) -> tuple[Run, list[str]]:
        """A run that has finished after some faults, and their names."""
        clock = str(number) if self.draw.random() < 0.3 else ""
        run = Run(self.root, f"run-{number}", clock)
        faults = ["clock"] if clock else []
        self.counts.update(faults)
        for _ in range(self.draw.randint(1, _MOST_FAULTS)):
            names = [*_SIGNALS, "SIGKILL", "slow", "damage", "second", "disk"]
            fault = self.draw.choice(names)
            if self._fault(run, fault):
                faults.append(fault)
                self.counts[fault] += 1
            if self._finished(run):
                break
        if not self._finished(run):
            run.end(run.start(), (0,))
        return run, faults

    def _finished(self, run: Run) -> bool:
        return (run.directory / "report.html").exists()

    def _wait(self, process: subprocess.Popen) -> bool:
        """A random while; False if the process has ended by itself."""
        deadline = time.monotonic() + self.draw.uniform(0, self.longest)
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return False
            time.sleep(0.05)
        return process.poll() is None

    def _fault(self, run: Run, name: str) -> bool:
        """Disturbs the run once; False if it was too late, or cannot be done here."""
        if name == "damage":
            return self._damage(run)
        if name == "disk":
            return self._fill_disk(run)
        process = run.start()
        if not self._wait(process):
            run.end(process, (0,))
            return False
        if name == "slow":
            run.slow.touch()
            time.sleep(self.draw.uniform(0, 5))
            run.slow.unlink()
            run.end(process, (0,))
        elif name == "second":
            status = run.end(run.start(), (0, 2))
            if status == 0 and process.poll() is None:
                raise Wrong("two processes worked on one directory")
            run.end(process, (0, 2))
        else:
            number = _SIGNALS.get(name, signal.SIGKILL)
            process.send_signal(number)
            # At once before the run waits for a step's end (Ctrl-C in the first second: 130), and
            # at the end of the last step.
            run.end(process, (75, 0, -number, *([130] if name == "SIGINT" else [])))
        return True

    def _damage(self, run: Run) -> bool:
        """Flips a byte of the newest checkpoint: refused, or without effect."""
        checkpoints = run.checkpoints()
        if self._finished(run) or not checkpoints:
            return False
        newest = checkpoints[-1]
        file = self.draw.choice([p for p in newest.rglob("*") if p.is_file() and p.stat().st_size])
        content = bytearray(file.read_bytes())
        content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        file.write_bytes(content)
        status = run.end(run.start(), (0, 2))
        if status == 2:
            if str(newest) not in run.output:
                raise Wrong(f"the damaged checkpoint is not named: {run.output[-2000:]}")
            if len(checkpoints) > 1:
                shutil.move(newest, self.root / f"damaged-{time.monotonic_ns()}")
            else:
                shutil.rmtree(run.directory)
        return True

    def _fill_disk(self, run: Run) -> bool:
        """Runs on a small disk, which is filled at a random moment."""
        if run.root.exists() or os.geteuid() != 0:
            return False
        run.root.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "tmpfs", str(run.root)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            run.root.rmdir()
            return False
        process, ballast = run.start(), run.root / "ballast"
        try:
            if self._wait(process):
                with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                    while file.write(bytes(1 << 16)):
                        pass
            run.end(process, (0, 2))
            ballast.unlink(missing_ok=True)
            if not self._finished(run):
                run.end(run.start(), (0,))
            kept = self.root / f"{run.root.name}.kept"
            shutil.copytree(run.root, kept)
        finally:
            process.kill()
            process.wait()
            subprocess.run(["umount", str(run.root)], check=True)
        run.root.rmdir()
        kept.rename(run.root)
        return True

    def orphans(self) -> list[str]:
        """Processes of this soak that are still there."""
        found = []
        marker = f"SOAK={self.root}".encode()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if marker in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("hours", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=pathlib.Path, default=pathlib.Path("runs/soak"))
    values = parser.parse_args()
    for number in _SIGNALS.values():  # which `nohup` and a shell's & have set to be ignored
        signal.signal(number, signal.SIG_DFL)
    root = values.directory.resolve()
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    soak = Soak(root, values.seed)
    end = time.monotonic() + 3600 * values.hours
    expected = soak.undisturbed()
    print(f"an undisturbed run takes {soak.longest:.0f} s", flush=True)
    number = wrong = 0
    while time.monotonic() < end:
        number += 1
        begin, faults = time.monotonic(), ["?"]
        try:
            run, faults = soak.disturbed(number)
            verdict = "equal" if run.result() == expected else "DIFFERENT"
            if left := soak.orphans():
                verdict += f"; left behind: {left}"
        except Wrong as problem:
            verdict = f"WRONG: {problem}"
        wrong += verdict != "equal"
        seconds = time.monotonic() - begin
        print(
            f"run {number}: {', '.join(faults) or 'no fault'}: {verdict} ({seconds:.0f} s)",
            flush=True,
        )
    counts = ", ".join(f"{count} {name}" for name, count in sorted(soak.counts.items()))
    print(f"{number} runs, {sum(soak.counts.values())} faults ({counts}); {wrong} not as expected")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
