"""`launch/gpu_check.sh` as far as a CPU can: its sections on the reference, its files, refusals."""

from __future__ import annotations

import base64
import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from fp8rl_jax import deviceless, gpu_check
from fp8rl_jax.bench import (
    attention_checks,
    gradient_checks,
    headline,
    kernel_checks,
    kernels,
    rollout_ways,
    target_config,
    whole_programs,
)
from fp8rl_jax.bench.rollout import Cell

_ROOT = pathlib.Path(__file__).resolve().parents[1]
# A topology as JAX 0.11.2 serialises it: of an H200 as `deviceless` described it, one field apart
# (65,535 registers a block), which tells the two fields of registers apart.
_TOPOLOGY = base64.b64decode(
    "CKGBqurTvKjZOhIEY3VkYRoLTlZJRElBIEgyMDBK6QEKKHR5cGUuZ29vZ2xlYXBpcy5jb20veGxhLkdwdVRvcG9s"
    "b2d5UHJvdG8SvAEaC05WSURJQSBIMjAwIAEoATABQoIBCmkIgAgQIBiAgAMggKAOKIAQMIQBOIABQP////8HSP//"
    "A1D//wNYgICustmLAWCAgIAebaRw/T9wgIDAzbEEeICYDoIBBAgJGAKQAYCABJgB//8DygEGMTMuMC4wkgILTlZJ"
    "RElBIEgyMDAiBENVREE6C05WSURJQSBIMjAwQgIIDUoiChh4ODZfNjQtdW5rbm93bi1saW51eC1nbnUSBnpudmVy"
    "NQ=="
)
_BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ImportError("not on a bare machine: " + name)
sys.meta_path.insert(0, Blocked())
"""
_ABSENT = (
    "absl", "grain", "math_verify", "matplotlib", "ml_collections", "orbax", "reasoning_gym",
    "tensorboardX", "tensorflow_datasets", "tokenizers",
)  # fmt: skip


@pytest.mark.slow
def test_correctness_of_the_reference():
    """Section (d) holds on a CPU for all that has a reference, and one line says how many."""
    ok, lines, data = gpu_check.correctness("reference")
    assert ok and len(gpu_check.dense_checks()) >= 14
    attention = len(attention_checks.CASES) + 2 * len(gradient_checks.CASES)
    assert len(data) == len(gpu_check.dense_checks()) + attention
    assert lines[0].startswith(f"- float64: {len(data)} of {len(data)} hold")
    json.dumps(data)


@pytest.mark.slow
def test_kernels_fail_without_a_gpu():
    """What cannot run is a failed check that says so, never a skipped one."""
    ok, lines, data = gpu_check.tiles()
    assert not ok and all(not o["ok"] for o in data)
    assert len(data) == 2 * sum(map(len, kernel_checks.TILES.values()))
    assert lines[0].startswith("- FAILED tiles: fp8 200 x 1024 x 520 -> float32: 64 x 32 against")


def test_time_limit_of_a_section(monkeypatch):
    """A section that decides and is not finished does not hold."""
    outcomes = [kernel_checks.Outcome("rows", str(n), True) for n in range(3)]
    ok, lines, data = gpu_check._outcomes(outcomes, -1.0)
    assert not ok and len(data) == 1 and lines[0].startswith("- FAILED: not finished after 1")
    assert gpu_check._outcomes(outcomes, 60.0)[0]
    assert gpu_check._outcomes(outcomes[:1], -1.0)[0], "finished, if late"


@pytest.mark.slow
def test_whole_programs_do_not_drift(monkeypatch):
    """Section (f): on a CPU the learner's log-probabilities are the sampler's, bit for bit."""
    monkeypatch.setattr(whole_programs, "PROMPTS", 2)
    monkeypatch.setattr(whole_programs, "NEW", 6)
    small = dataclasses.replace(
        whole_programs.DENSE, vocab_size=128, hidden_size=64, num_hidden_layers=1
    )
    ok, lines, (found,) = gpu_check.programs([("fp8", small)])
    assert ok is None
    assert found["drift_max"] == 0 and found["equal"] == 1 and found["tokens"] > 8
    assert found["checksum_ok"] and found["finite"] and found["updated"]
    assert found["kernels"] == "reference"
    assert found["tokens_unequal"] == found["bits_from_sampler"] == found["bits_from_learner"] == 0
    assert "It is zero here, bit for bit." in lines[-1]


def test_differing_bits():
    one, mask = np.float32([1, 2, 3]), np.array([True, True, False])
    assert whole_programs._differing_bits(one, one, mask) == 0
    assert whole_programs._differing_bits(one, np.nextafter(one, np.float32(0)), mask) > 1
    assert whole_programs._differing_bits(one, np.float32([1, 2, 4]), mask) == 0


@pytest.mark.slow
def test_long_rollout(monkeypatch):
    """Section (i): both cases draw the tokens that long_tail says, and the text counts them."""
    monkeypatch.setitem(rollout_ways.WAYS, "continuous", rollout_ways.make_static)
    small = dataclasses.replace(
        whole_programs.DENSE, vocab_size=128, hidden_size=64, num_hidden_layers=1
    )
    ok, lines, found = gpu_check.headline(60.0, small, Cell(4, 3, 16, 2))
    wanted = int(rollout_ways.long_tail(8, 16).sum())
    assert ok is None and [f["case"] for f in found] == ["bf16", "fp8"]
    assert [f["tokens"] for f in found] == [wanted] * 2 and found[0]["over_first"] == 1
    assert f"| bf16 | {wanted} |" in lines[2]
    assert lines[-1].startswith("8 responses of 1 to 16 tokens to prompts of 3, 4 at a time")


def test_length_of_a_long_rollout():
    """Responses are halved until they fit, and never planned shorter than what was tried."""
    step = 0.01
    assert headline.longest(128 * step, 123.0, 4096) == 4096
    assert headline.longest(128 * step, 122.0, 4096) == 2048
    assert headline.longest(128 * step, 0.0, 4096) == 64


def test_without_the_way_it_says_so(monkeypatch):
    monkeypatch.delitem(rollout_ways.WAYS, "continuous", raising=False)
    with pytest.raises(headline.UserError, match="no way 'continuous'"):
        gpu_check.headline(1.0)


def test_failed_program_is_reported(monkeypatch):
    def fails(model, recipe):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(whole_programs, "run", fails)
    _, lines, found = gpu_check.programs([("fp8", whole_programs.SPARSE)])
    assert found == [] and lines[0] == "- FAILED: fp8, 8 experts: RuntimeError: out of memory"
    assert "zero is not promised" in lines[-1]


def _report(tmp_path) -> gpu_check.Report:
    report = gpu_check.Report(tmp_path)
    report.run("a", "holds", lambda: (True, ["- all well"], {"x": 1}), True)
    return report


def test_report(tmp_path):
    """Both files whole after every section; one that raises does not end the next."""
    report = _report(tmp_path)
    assert json.loads((tmp_path / "gpu_check.json").read_text())["ok"]
    assert "Nothing failed." in (tmp_path / "gpu_check.md").read_text()

    def raises():
        raise ValueError("no\nluck")

    report.run("b", "breaks", raises, True)
    report.run("e", "reports", lambda: (None, ["- FAILED: one of them"], []), False)
    assert not report.ok
    written = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [s["ok"] for s in written["sections"]] == [True, False, None]
    assert "ValueError" in written["sections"][1]["data"]["traceback"]
    text = (tmp_path / "gpu_check.md").read_text()
    top = text.index("## Failures")
    assert top < text.index("- (b) the section ended with ValueError: no luck")
    assert text.index("- (e) one of them") < text.index("| (a) | holds | holds |")
    assert "| (b) | breaks | FAILED |" in text and "|  | total |" in text
    assert "- all well" in text
    assert {p.name for p in tmp_path.iterdir()} == {"gpu_check.json", "gpu_check.md"}


def test_only_deciding_sections_decide(tmp_path):
    report = _report(tmp_path)
    report.run("f", "speed", lambda: 1 / 0, False)
    assert report.ok and "FAILED" not in report.markdown().split("## (f)")[0].split("| (f)")[1]


def test_suggested_name(tmp_path):
    report = gpu_check.Report(tmp_path)
    report.environment |= {"date": "2026-11-21T10:00:00+00:00", "device": "NVIDIA H200"}
    report.environment["versions"] = {"jax": "0.11.2", "triton": "3.6.0", "jax-triton": None}
    assert report.suggested_name == "2026_11_21_nvidia_h200_jax_0.11.2_triton_3.6.0"


def test_device_of_a_topology():
    """Every field that `deviceless` names is found again, and an unequal one is seen."""
    info = target_config.device_info(_TOPOLOGY)
    rows = target_config.compare(info, deviceless.H200)
    named = [row for row in rows if not row[0].startswith("field ")]
    assert len(named) == len(target_config.described(deviceless.H200)) == 17
    unequal = [row for row in named if row[1] != row[2]]
    assert unequal == [("registers_per_block_limit", "65535", "65536")]


@pytest.mark.parametrize("data", [b"", b"\x08\x01", _TOPOLOGY[:40], b"\xff" * 5])
def test_other_bytes_are_no_topology(data):
    with pytest.raises(ValueError):
        target_config.device_info(data)


def test_device_without_a_topology():
    """On a CPU there is none to read; the attributes are there."""
    _, lines, found = gpu_check.device()
    assert found["attributes"]["platform"] == "cpu" and "info" not in found
    assert lines[-1].startswith("The topology cannot be read: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["no GPU", "'cpu'", "H200"]),
        (["--out", "somewhere"], ["no GPU"]),
        (["junk"], ["'junk'", "--out DIR"]),
        (["--out="], ["--out DIR"]),
        (["--out", "a", "b"], ["--out DIR"]),
        (["--only=dz"], ["--only LETTERS", "abcdefghi"]),
        (["--only=di", "--out", "a"], ["no GPU"]),
    ],
)
def test_refusals(arguments, words, tmp_path, monkeypatch, capsys):
    """Off a GPU, and for mistakes: one sentence, exit status 2, nothing written."""
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main(arguments) == 2
    output, error = capsys.readouterr()
    assert output == "" and re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error
    assert not list(tmp_path.iterdir())


def test_unwritable_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "on_gpu", lambda: True)
    (tmp_path / "file").write_text("")
    assert gpu_check.main([f"--out={tmp_path}/file"]) == 2
    assert "nothing can be written to --out=" in capsys.readouterr().err


def test_exit_status(tmp_path, monkeypatch, capsys):
    """The sections in their order; 1 if one that decides fails; the name to keep results under."""
    monkeypatch.setattr(kernels, "on_gpu", lambda: True)
    deciding = ("machine", "tiles", "rows", "correctness", "pairs")
    for name in (*deciding, "programs", "device"):
        decides = name in deciding
        monkeypatch.setattr(gpu_check, name, lambda d=decides: (True if d else None, ["x"], {}))
    monkeypatch.setattr(gpu_check, "speed", lambda seconds: (None, [f"{seconds:.0f}"], {}))
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert re.findall(r"^## \((.)\)", output, re.M) == list("abcdefgh")
    assert "commit them as docs/gpu_results/" in output
    assert gpu_check.main([f"--out={tmp_path}", "--only=cf"]) == 0
    assert re.findall(r"^## \((.)\)", capsys.readouterr().out, re.M) == ["c", "f"]
    monkeypatch.setattr(gpu_check, "rows", lambda: (False, ["- FAILED: row 3"], {}))
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    assert "- (c) row 3" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["fp8rl_jax.gpu_check", "fp8rl_jax.bench.kernels"])
def test_imports_on_a_bare_machine(module):
    """Nothing is imported that a machine with JAX, flax and optax alone may lack."""
    flax_needs = ("absl", "orbax")  # by flax itself, not by us
    names = tuple(name for name in _ABSENT if name not in flax_needs)
    code = _BLOCKED.format(names=names) + f"import {module}"
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_launch_script():
    """It parses, and holds no result of its own: off a GPU it is the module's refusal."""
    script = _ROOT / "launch" / "gpu_check.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    done = subprocess.run(
        ["bash", str(script)], env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable,
                                    "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "JAX finds no GPU here" in done.stderr
