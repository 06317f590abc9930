"""Rewards in worker processes: whatever a user's function does, the run goes on or says why not."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
from marks import slow
from tiny_run import CONFIG, overrides, reproducible

from fp8rl_jax import cli
from fp8rl_jax.base.errors import RewardError, UserError
from fp8rl_jax.envs import Question, Scoring, Tally, extract_answers, load_rewards
from fp8rl_jax.envs.rewards import pool, printed, scoring
from fp8rl_jax.envs.rewards.pool import Pool

# What a response asks for. All but the last few fail.
_SOURCE = """
import ctypes, math, os, random, signal, subprocess, sys, time

def act(prompt, response, answer):
    if response == "exit": sys.exit(0)
    if response == "os._exit": os._exit(0)
    if response == "segfault": ctypes.string_at(0)
    if response == "memory": return len(bytearray(8 << 30))
    if response == "interrupt": raise KeyboardInterrupt
    if response == "raise": raise LookupError("nothing\\x1b[2J")
    if response == "stack": return act(prompt, response, answer)
    if response == "None": return None
    if response == "nan": return math.nan
    if response == "1e39": return 1e39
    if response == "10**400": return 10**400
    if response == "loop":
        while True: pass
    if response == "signal":
        for number in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), number)
    if response == "random": return random.random()
    if response == "numpy":
        import numpy
        return numpy.random.rand()
    if response == "jax": return "jax" in sys.modules or "numpy" in sys.modules
    if response == "pid": return os.getpid()
    if response == "print":
        for number in range(50_000): print("a line", number)
    if response == "child": subprocess.run(["seq", "1", "50000"])
    if response.startswith("say"): print(response)
    if response.startswith("sleep"): time.sleep(float(response[5:]))
    return len(response)

act.extract = lambda response: response.split()[1]

def rows(prompt, response, answer, row):
    return row["level"]

def hang(prompt, response, answer):
    time.sleep(1000)
"""
_LINE = {name: i for i, line in enumerate(_SOURCE.split("\n"), 1) for name in line.split('"')[1:2]}


@pytest.fixture(scope="module")
def acting(tmp_path_factory):
    """The directory of a module `acting_rewards`, which can be imported."""
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "acting_rewards.py").write_text(_SOURCE)
    sys.path.insert(0, str(directory))
    yield directory
    sys.path.remove(str(directory))
    sys.modules.pop("acting_rewards", None)


def _terms(name: str = "act", seconds: float = 60.0):
    return load_rewards(f"acting_rewards:{name}", seconds, 2.0)


def _scores(terms, responses, tally: Tally | None = None) -> list[float | None]:
    """Rewards; None of a response that was not scored."""
    questions = [Question(f"q{i}", "a") for i in range(len(responses))]
    values = Scoring(terms, questions, responses).result(tally or Tally("RL step 1"))[0]
    return [None if math.isnan(value) else value for value in values]


def test_calls_that_fail_are_not_scored_and_named_once(acting, caplog, monkeypatch):
    """Each costs one response its reward and no other; the warning names kind, file and line."""
    monkeypatch.setattr(scoring, "_named", set())
    bad = ["exit", "os._exit", "segfault", "memory", "interrupt", "raise", "stack", "None", "nan"]
    bad += ["1e39", "10**400", "raise"]
    responses = [text for pair in zip(bad, ["ab", "cde"] * 6, strict=True) for text in pair]
    tally = Tally("RL step 1")
    assert _scores(_terms(), [*responses, "signal"], tally) == [None, 2, None, 3] * 6 + [6]
    assert tally.errors == len(bad) - 1, "None says that the reward does not apply"
    tally.check()
    assert len(caplog.records) == len(set(bad)) - 2, "1e39 and 10**400 are of one kind"
    file = acting / "acting_rewards.py"
    for what, text in {
        "exit": "SystemExit: 0",
        "segfault": "Segmentation fault (signal 11)",
        "memory": "MemoryError",
        "interrupt": "KeyboardInterrupt",
        "stack": "RecursionError",
        "raise": r"LookupError: nothing\x1b",
    }.items():
        (message,) = (r.getMessage() for r in caplog.records if text in r.getMessage())
        assert "the reward 'acting_rewards:act' failed: " in message
        assert f"({file}, line {_LINE[what]}, in act)" in message
    for text in (
        "ended with status 0",
        "nan, which is no finite",
        "1e+39, which is beyond float32's range",
    ):
        assert text in caplog.text


@pytest.mark.parametrize("how", ["print", "child"])
def test_what_is_printed_is_bounded(how, acting, caplog, capfd, monkeypatch):
    """Lines as they come, until a call prints more than a person reads; named once."""
    monkeypatch.setattr(printed, "_silenced", set())
    own = Pool(2)  # whose workers no other test hears
    monkeypatch.setattr(pool, "_pool", own)
    with contextlib.closing(own):
        _prints(how, caplog, capfd)


def _prints(how, caplog, capfd):
    assert _scores(_terms(), ["say one", "say two"]) == [7, 7]
    said, late = "", time.monotonic() + 20
    while said.count("\n") < 2 and time.monotonic() < late:
        said += capfd.readouterr().out
    assert sorted(said.splitlines()) == ["say one", "say two"]
    assert _scores(_terms(), [how] * 4) == [5] * 4
    while not caplog.records and time.monotonic() < late:
        time.sleep(0.01)
    assert 10_000 < len(capfd.readouterr().out) <= 2**18
    (record,) = caplog.records
    assert "the reward 'acting_rewards:act' prints more than 64 KiB" in record.getMessage()


def test_a_loop_is_ended(acting, caplog, monkeypatch):
    """After `env.reward_timeout`, with the line where it was; the rest of its chunk is scored."""
    monkeypatch.setattr(scoring, "_named", set())
    responses = ["a"] * 20 + ["loop"] + ["bc"] * 20
    assert _scores(_terms(seconds=1.0), responses) == [1] * 20 + [None] + [2] * 20
    assert f"longer than env.reward_timeout = 1 s ({acting}/acting_rewards.py, line " in caplog.text


def test_the_first_calls_all_take_too_long(acting):
    """Nobody waits for 512 of them."""
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"the first 8 calls of the reward .* or raise"):
        _scores(_terms("hang", 0.1), ["r"] * 512, Tally("evaluation"))
    assert time.monotonic() - start < 25


def test_all_calls_fail(acting):
    """The error holds the first traceback; one call that works is enough."""
    tally = Tally("RL step 7")
    _scores(_terms(), ["raise"] * 3, tally)
    with pytest.raises(RewardError) as caught:
        tally.check()
    lines = str(caught.value).split("\n")
    assert lines[0].startswith("RL step 7: all 3 calls of the reward 'acting_rewards:act' failed")
    assert lines[1].startswith("Traceback") and "acting_rewards.py" in lines[2]
    assert lines[-1] == r"LookupError: nothing\x1b[2J"
    _scores(_terms(), ["abc"], tally)
    tally.check()


def test_values_do_not_depend_on_the_workers(acting, monkeypatch):
    """Results come in the order of the responses, though later ones are ready earlier, and random
    numbers follow from prompt and response."""
    responses = ["sleep0.3", "random", "numpy", "sleep.1", "random", "a"]
    found = []
    for size in (1, 3):
        pool = Pool(size)
        monkeypatch.setattr(scoring, "shared_pool", lambda pool=pool: pool)
        found.append(_scores(_terms(), responses))
        found.append(_scores(_terms(), responses))
        pool.close()
    assert found[0] == found[1] == found[2] == found[3]
    sleeps, first, _, _, second, last = found[0]
    assert (sleeps, last) == (8, 1) and 0 < first < 1 and first != second, "prompts differ"


def test_workers_stay_and_import_no_jax(acting):
    """They are the same from call to call, and are not this process."""
    terms = _terms()
    first, second = (set(_scores(terms, ["pid"] * 8)) for _ in range(2))
    assert os.getpid() not in first
    assert len(first | second) <= len(os.sched_getaffinity(0))
    pool = Pool(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "shared_pool", lambda: pool)
        assert _scores(_terms(), ["jax"]) == [0.0]
    pool.close()


def test_rows(acting):
    """A row that cannot be sent fails its own call only."""
    questions = [Question("q", "a", row={"level": level}) for level in (3, lambda: 0, 4)]
    tally = Tally("RL step 1")
    values, by_name = Scoring(_terms("rows"), questions, ["r"] * 3).result(tally)
    assert str(values) == str(by_name["acting_rewards:rows"]) == "[3.0, nan, 4.0]"
    assert tally.errors == 1


def test_extract(acting, caplog, monkeypatch):
    """In a worker too; one that raises finds no answer, and a reward without one has none."""
    monkeypatch.setattr(scoring, "_named", set())
    (term,) = _terms()
    assert extract_answers(term, ["x 5", "", "y 6"], Tally("evaluation")) == ["5", None, "6"]
    assert "extract of the reward 'acting_rewards:act' failed: IndexError" in caplog.text
    assert extract_answers(_terms("hang")[0], ["x"], Tally("evaluation")) is None
    (term,) = load_rewards("math_equal")
    assert extract_answers(term, [r"\boxed{3}", ""], Tally("evaluation")) == ["3", None]


def test_a_module_that_changes(acting, tmp_path, monkeypatch):
    """Workers, whenever they start, call what this process has read, or nothing."""
    file = tmp_path / "changing.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    file.write_text("def f(prompt, response, answer):\n    return 1\n")
    terms = load_rewards("changing:f")
    assert _scores(terms, ["r"] * 4) == [1] * 4
    file.write_text("def f(prompt, response, answer):\n    return 22\n")
    with pytest.raises(RewardError, match="'changing:f' has changed since"):
        _scores([dataclasses.replace(term, digest="another") for term in terms], ["r"])
    importlib.reload(sys.modules["changing"])
    assert _scores(load_rewards("changing:f"), ["r"] * 4) == [22] * 4
    del sys.modules["changing"]


def test_a_module_that_only_this_process_can_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ONLY_HERE", "1")
    (tmp_path / "only_here.py").write_text(
        "import sys\nif 'pytest' not in sys.modules:\n    raise RuntimeError('not here')\n"
        "def f(*_):\n    return 1\n"
    )
    with pytest.raises(RewardError) as caught:
        _scores(load_rewards("only_here:f"), ["r"])
    assert "'only_here:f' cannot be loaded in a worker process" in str(caught.value)
    assert "RuntimeError: not here" in str(caught.value)


def test_a_function_of_the_main_program():
    """It is refused at once: a worker does not run the main program again."""
    sys.modules["__main__"].a_reward = lambda prompt, response, answer: 1
    with pytest.raises(UserError, match=r"'__main__:a_reward' is not in a module that a worker"):
        load_rewards("__main__:a_reward")
    del sys.modules["__main__"].a_reward


def test_a_worker_that_died_while_idle_is_replaced(acting):
    terms = _terms()
    for pid in set(_scores(terms, ["pid"] * 8)):
        os.kill(int(pid), signal.SIGKILL)
    time.sleep(0.1)
    assert _scores(terms, ["abc"] * 8) == [3] * 8


# How the process that uses the workers may end. It has no guard for its main module, and a worker
# that imported it would start workers in turn.
_MAIN = """
import os, sys, threading, time
from fp8rl_jax.envs import Question, Scoring, Tally, load_rewards
how = sys.argv[1]
terms = load_rewards("ending_rewards:f", 3.0)
def use():
    scoring = Scoring(terms, [Question("q", "a")] * 3, ["idle", how, "x"])
    if how != "thread": scoring.result(Tally("RL step 1")) if how == "idle" else None
threading.Thread(target=use).start() if how == "thread" else use()
while how != "idle" and not os.path.exists("busy"): time.sleep(0.01)
print("ready", flush=True)
if how == "error": raise SystemError("as it happens")
if how in ("terminated", "killed", "lock", "interrupted"): time.sleep(1000)
"""
_ENDING = """
import os, re, subprocess, time
def f(prompt, response, answer):
    open(f"pids/{os.getpid()}", "w").close()
    if response == "idle":
        time.sleep(0.3)
    elif response == "lock":
        open("busy", "w").close()
        return bool(re.match("(a+)+b", "a" * 60))  # for years, and no other thread runs
    elif response != "x":
        child = subprocess.Popen(["sleep", "1000"])
        open(f"pids/{child.pid}", "w").close()
        open("busy", "w").close()
        while True: pass
    return 1.0
"""


@pytest.mark.parametrize(
    ("how", "status"),
    [
        ("idle", 0),
        ("error", 1),
        slow("thread", 0),
        slow("interrupted", None),
        slow("terminated", -signal.SIGTERM),
        slow("killed", -signal.SIGKILL),
        slow("lock", -signal.SIGKILL),
    ],
)
def test_nothing_is_left_behind(how, status, tmp_path):
    """However the program ends, workers and what their rewards started end with it."""
    (tmp_path / "main.py").write_text(_MAIN)
    (tmp_path / "ending_rewards.py").write_text(_ENDING)
    (tmp_path / "pids").mkdir()
    process = subprocess.Popen(
        [sys.executable, "main.py", how],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    if how in ("terminated", "killed", "interrupted", "lock"):
        name = {"terminated": "TERM", "killed": "KILL", "interrupted": "INT", "lock": "KILL"}[how]
        process.send_signal(signal.Signals[f"SIG{name}"])
    found = process.wait(60)
    assert status is None or found == status
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert pids
    deadline = time.monotonic() + 40
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if _alive(pid)]
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Whether there is such a process that is no zombie."""
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


# Runs.

_BROKEN = '''
import os, pathlib
from dense_reward import share_of_even_bytes

def f(prompt, response, answer):
    """Fails while a log of the run has as many lines as the file `broken` says."""
    here = pathlib.Path(__file__).parent
    log, _, count = (here / "broken").read_text().partition(" ")
    file = here / "run" / f"{log}.jsonl"
    if count and file.exists() and len(file.read_text().splitlines()) == int(count):
        raise LookupError("nothing")
    return share_of_even_bytes(prompt, response, answer)
'''


@pytest.mark.slow
def test_a_run_stops_and_resumes_when_its_reward_is_mended(tiny_run, tmp_path, monkeypatch, capfd):
    """In the last evaluation of fine-tuning, before a step, after one, and at the end; each time
    with status 2, a readable traceback and a checkpoint. The records are those of one piece."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_reward.py").write_text(_BROKEN)
    arguments = overrides(tmp_path, **{"env.reward": "broken_reward:f"})
    command = ["train", "--config", str(CONFIG), *arguments]
    for when, where in {
        "sft 8": "evaluation after sft step 8",
        "metrics 2": "RL step 3",
        "metrics 3": "evaluation after rl step 3",
        "metrics 6": "evaluation after rl step 6",
    }.items():
        (tmp_path / "broken").write_text(when)
        assert cli.run(command) == 2
        out, err = capfd.readouterr()
        assert re.search(rf"^error: {where}: all \d+ calls of the reward", err, re.MULTILINE)
        assert "\nTraceback" in err and 'line 11, in f\n    raise LookupError("nothing")\n' in err
        assert re.search(r"the state after (sft|rl) step \d is saved; --resume goes on", out)
        if command[-1] != "--resume":
            command.append("--resume")
    (tmp_path / "broken").write_text("")
    assert cli.run([*command, "--config.env.reward_timeout=60"]) == 0
    assert reproducible(tmp_path) == reproducible(tiny_run[0])
