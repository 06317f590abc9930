"""What a GPU does with this library's kernels, in one call: `bash launch/gpu_check.sh`.

    python -m fp8rl_jax.gpu_check --out DIR --only LETTERS

Sections, in order: (a) the machine, and that JAX runs a jax-triton kernel; (b) tiles against each
other, bit for bit; (c) rows, from 1 to 4,096 at a time, bit for bit; (d) every kernel against
float64; (e) forms of one kernel against each other, bit for bit; (f) a rollout, statically and by
continuous batching, and a train step end to end; (g) the kernels' speed; (h) what XLA knows of the
device; (i) tokens per second of a long rollout of Qwen3-8B's shapes, FP8 against BF16. `--only=df`
runs these two; without it (i), which takes a call of its own, is left out. Each is caught on its
own, and both results, gpu_check.json and gpu_check.md, are written whole after every one: a machine
that is lost on the way leaves what it had found.

Exit status: 0 if those of (a) to (e) that ran hold, 1 if not, 2 for what the user can mend. (f) to
(i) report.

Runs on a bare machine: of the library's dependencies it needs jax, flax, optax and numpy, and
jax-triton with Triton. It takes at most about nine minutes: sections (b) to (f) begin nothing new
after their share, and a section that decides and was not finished does not hold; the speed has
what time they leave.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from fp8rl_jax import deviceless
from fp8rl_jax.bench import (
    attention_checks,
    attention_times,
    gradient_checks,
    kernel_pairs,
    kernel_shapes,
    kernels,
    target_config,
    whole_programs,
)
from fp8rl_jax.bench import headline as long_rollout
from fp8rl_jax.bench import kernel_checks as checks
from fp8rl_jax.bench.kernel_checks import Dense, Outcome
from fp8rl_jax.bench.kernel_data import Source
from fp8rl_jax.bench.kernel_shapes import Case
from fp8rl_jax.errors import UserError
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.models.presets import preset

SECONDS = 500.0  # of all sections; the speed gets what those before it leave
_LEAST_FOR_SPEED = 60.0
_SHARE = {"tiles": 80.0, "rows": 130.0, "correctness": 90.0, "pairs": 60.0, "programs": 110.0}
_USUAL, _ALL = "abcdefgh", "abcdefghi"
ROWS = (
    1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 191, 192, 193, 256,
    257, 511, 512, 513, 1000, 1024, 2048, 4095, 4096,
)  # fmt: skip
_FEW_ROWS = (1, 31, 32, 33, 64, 1000, 4096)  # of float32, which has one tile
_SMALL = 1 << 24  # elements of the largest operand of the sections (b) to (d)

# What a section returns: whether it holds (None: it only reports), lines of Markdown, data.
Finding = tuple[bool | None, list[str], Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def _note(text: str) -> None:
    """A line of progress on standard error, which holds no results."""
    print(text, file=sys.stderr, flush=True)


def _outcomes(found: Iterable[Outcome], seconds: float) -> Finding:
    start, outcomes, lines = time.monotonic(), [], []
    for outcome in found:
        if lines:
            break
        outcomes.append(outcome)
        if time.monotonic() - start > seconds:
            lines = [f"- FAILED: not finished after {len(outcomes)} checks and {seconds:.0f} s"]
    else:
        lines = []
    holds = not lines and all(o.ok for o in outcomes)
    lines += [f"- {line}" for line in checks.format_outcomes(outcomes).split("\n")]
    return holds, lines, [vars(o) for o in outcomes]


def machine() -> Finding:
    """(a) Versions, device, driver; a product by jax-triton."""
    environment = kernels.environment()
    rows = [(k, v) for k, v in environment.items() if k != "versions"]
    rows += [
        (name, version or "not installed") for name, version in environment["versions"].items()
    ]
    first = checks.check_dense(Dense("bf16", 64, 256, 64), Source(_SMALL), "triton")
    ran = "JAX executes a jax-triton kernel."
    if not first.ok:
        ran = f"- FAILED: a jax-triton kernel: {first.detail}"
    lines = [*table(("what", "value"), rows), "", ran]
    return first.ok, lines, {"environment": environment, "first_kernel": vars(first)}


def tiles() -> Finding:
    """(b) Every tile of kernels/gpu/tiles.py against the first of its kind."""
    source = Source(_SMALL)
    shapes = ((200, 1024, 520), (130, 1000, 1152))
    cases = [Dense(kind, *shape) for kind in checks.TILES for shape in shapes]
    found = (o for case in cases for o in checks.check_tiles(case, source))
    return _outcomes(found, _SHARE["tiles"])


def rows() -> Finding:
    """(c) Calls of 1 to 4,096 rows against the same rows of one call."""

    def found() -> Iterable[Outcome]:
        source = Source(_SMALL)
        for kind in ("fp8", "bf16", "float32"):
            counts = _FEW_ROWS if kind == "float32" else ROWS
            yield from checks.check_rows(Dense(kind, 0, 512, 1152), counts, source, "triton")

    return _outcomes(found(), _SHARE["rows"])


def dense_checks() -> list[Dense]:
    """Dense products of (d): every kernel, ragged shapes, both types of result."""
    ragged, deep = (200, 1000, 520), (130, 4096, 1024)
    found = [Dense("fp8", *shape, dtype=t) for shape in (ragged, deep) for t in _RESULTS]
    found += [Dense("fp8", *ragged, left="float8_e5m2"), Dense("fp8", 1, 128, 128)]
    found += [Dense("fp8", *shape, by_column=True) for shape in (ragged, deep)]
    found += [Dense("bf16", *shape, dtype=t) for shape in (ragged, deep) for t in _RESULTS]
    return [*found, Dense("float32", *ragged), Dense("float32", *deep)]


_RESULTS = ("float32", "bfloat16")
_GROUPED = (
    Case("experts", "fprop", "fp8", 64, 768, 384, 16, 4),
    Case("experts", "fprop", "bf16", 64, 384, 256, 16, 4),
    Case("experts", "fprop", "fp8", 700, 384, 256, 8, 2),
)


def correctness(implementation: str = "triton") -> Finding:
    """(d) Every kernel against float64, then the shapes that (g) times.

    Of the reference, which has no grouped form, the dense ones of this library's own shapes, and
    attention.
    """

    def found() -> Iterable[Outcome]:
        source = Source(_SMALL)
        for case in dense_checks():
            yield checks.check_dense(case, source, implementation)
        for attention in attention_checks.CASES:
            yield attention_checks.check_attention(attention, source, implementation)
        for fast in gradient_checks.CASES:
            yield from gradient_checks.check(fast, source, implementation)
        if implementation == "reference":
            return
        for grouped in _GROUPED:
            yield from checks.check_grouped(grouped, source)
        # Tiles of 128 rows, as the gradient needs them.
        yield checks.check_grouped_wgrad(_GROUPED[2], source)
        bf16 = Case("experts", "fprop", "bf16", 700, 384, 256, 8, 2)
        yield checks.check_grouped_wgrad(bf16, source)
        timed = kernel_shapes.cases(quick=True)
        large = Source(max(max(c.experts, 1) * c.depth * c.columns for c in timed))
        for case in kernels.dense_checks(timed, narrow=False):
            yield checks.check_dense(case, large, implementation)
        for shape in dict.fromkeys(kernels.with_rows(c, 16) for c in timed if c.experts):
            yield from checks.check_grouped(shape, large)

    return _outcomes(found(), _SHARE["correctness"])


def pairs() -> Finding:
    """(e) Norms, gates, log-probabilities and attention in their forms; Mosaic as a report."""
    source = Source(_SMALL)

    def found() -> Iterable[Outcome]:
        yield from kernel_pairs.check_fused(source)
        yield from kernel_pairs.check_head(source)
        yield from kernel_pairs.check_attention(source)
        yield from kernel_pairs.check_pages(source)

    holds, lines, data = _outcomes(found(), _SHARE["pairs"])
    reported = [*kernel_pairs.check_quantiser(source), *kernel_pairs.check_mosaic(source)]
    lines += [f"- {o.case}: {o.detail or 'equal bits'} (reported)" for o in reported]
    return holds, lines, [*data, *map(vars, reported)]


_PROGRAMS = (
    ("fp8", whole_programs.DENSE),
    ("bf16", whole_programs.DENSE),
    ("fp8", whole_programs.SPARSE),
)


def programs(subjects=_PROGRAMS) -> Finding:
    """(f) Sampler and train step of a small decoder; reported, not asserted."""
    start, found, lines = time.monotonic(), [], []
    for recipe, model in subjects:
        name = f"{recipe}, {model.num_experts or 'no'} experts"
        if time.monotonic() - start > _SHARE["programs"]:
            lines.append(f"- {name}: not run, the time was up")
            continue
        try:
            found.append(whole_programs.run(model, recipe))
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            lines.append(f"- FAILED: {name}: {text}")
    exact = len(found) == len(subjects) and all(
        f["drift_max"] == f["tokens_unequal"] == f["bits_from_learner"] == 0 for f in found
    )
    head = (
        "recipe", "experts", "kernels", "tokens", "largest drift", "mean drift", "equal bits",
        "continuous: other tokens", "bits from sampler", "bits from learner", "same weights",
        "loss", "finite", "updated", "s",
    )  # fmt: skip
    rows = [
        (
            f["recipe"], f["experts"], f["kernels"], f["tokens"], f"{f['drift_max']:.3g}",
            f"{f['drift_mean']:.3g}", f"{f['equal']:.1%}", f["tokens_unequal"],
            f["bits_from_sampler"], f["bits_from_learner"], _yes(f["checksum_ok"]),
            f"{f['loss']:.4f}", _yes(f["finite"]), _yes(f["updated"]), f"{f['seconds']:.0f}",
        )
        for f in found
    ]  # fmt: skip
    lines += table(head, rows) if rows else []
    lines += [
        "",
        "Drift is |logp of the train step - logp of the sampler| on the same tokens, without an "
        "update between; bits are those of all log-probabilities of continuous batching. "
        + ("It is zero here, bit for bit." if exact else "On a GPU zero is not promised yet."),
    ]
    return None, lines, found


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def speed(seconds: float) -> Finding:
    """(g) The kernels' times, beside cuBLAS's and PyTorch's; the project's targets."""
    cases = kernel_shapes.cases(quick=True)
    result: dict[str, Any] = {"environment": kernels.environment()}
    result |= kernels.times(cases, attention_times.cases(quick=True), seconds, _note)
    result["targets"] = kernels.targets(result["rows"], result["attention"])
    rows = [
        (t["target"], f"{t['wanted']:g}", "-" if t["found"] is None else f"{t['found']:.4g}",
         kernels.verdict(t))
        for t in result["targets"]
    ]  # fmt: skip
    lines = table(("target", "wanted", "found", "verdict"), rows)
    return None, [*lines, "", "```", kernels.format_table(result), "```"], result


def device() -> Finding:
    """(h) XLA's description of the device beside the one that programs are compiled for."""
    found = target_config.attached()
    lines = table(("attribute", "value"), found["attributes"].items())
    lines += ["", f"Platform: {' '.join(found['platform_version'].split())}", ""]
    if "info" in found:
        compared = target_config.compare(found["info"], deviceless.H200)
        lines += table(("of the device", "here", "in fp8rl_jax/deviceless.py"), compared)
    else:
        lines.append(f"The topology cannot be read: {found['error']}")
    return None, lines, found


def headline(seconds: float, model: ModelConfig | None = None, cell=long_rollout.CELL) -> Finding:
    """(i) A long rollout by continuous batching, BF16 and FP8; Qwen3-8B's shapes by default."""
    found = long_rollout.run(model or preset("qwen3_8b"), seconds, cell)
    head = ("case", "tokens drawn", "s", "tokens/s", "over bf16", "compiling, s")
    rows = [
        (f["case"], f["tokens"], f"{f['seconds']:.1f}", f"{f['tokens_per_s']:.0f}",
         f"{f['over_first']:.2f}", f"{f['first_s']:.0f}")
        for f in found
    ]  # fmt: skip
    ran = (
        f"{found[0]['samples']} responses of 1 to {found[0]['longest']} tokens to prompts of "
        f"{cell.prompt}, {cell.batch} at a time; random weights. "
        "One call each, counted; nothing extrapolated."
    )
    return None, [*table(head, rows), "", ran], found


def _is_failure(line: str) -> bool:
    return line.startswith("- FAILED")


class Report:
    """The two files, written anew after every section.

    Args:
      directory: where they go.
    """

    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self.start = time.monotonic()
        self.environment = kernels.environment()
        self.sections: list[dict[str, Any]] = []

    def run(self, name: str, title: str, section: Callable[[], Finding], decides: bool) -> None:
        """Runs a section, whatever becomes of it, and writes what there is so far."""
        _note(f"({name}) {title}")
        start = time.monotonic()
        try:
            ok, lines, data = section()
        except Exception as error:
            ok, data = (False if decides else None), {"traceback": traceback.format_exc()}
            text = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            lines = [f"- FAILED: the section ended with {text}"]
        seconds = time.monotonic() - start
        for line in filter(_is_failure, lines):
            _note(line)
        self.sections.append(
            {"name": name, "title": title, "ok": ok, "decides": decides, "seconds": seconds,
             "lines": lines, "data": data}
        )  # fmt: skip
        self.write()

    @property
    def ok(self) -> bool:
        """Whether every section that decides has run and holds."""
        return all(s["ok"] for s in self.sections if s["decides"])

    @property
    def suggested_name(self) -> str:
        """Of the results' copies under docs/gpu_results/: date, chip, versions."""
        versions = self.environment["versions"]
        parts = [self.environment["date"][:10], self.environment["device"]]
        parts += [f"{n}-{versions[n]}" for n in ("jax", "triton", "jax-triton") if versions[n]]
        return re.sub(r"[^a-z0-9.]+", "_", "_".join(parts).lower()).strip("_")

    def markdown(self) -> str:
        """The readable result: failures first, then every section."""
        env = self.environment
        failed = [
            f"- ({s['name']}) {line.removeprefix('- FAILED').lstrip(': ')}"
            for s in self.sections
            for line in filter(_is_failure, s["lines"])
        ]
        total = sum(s["seconds"] for s in self.sections)
        lines = [f"# GPU check: {env['device']}, {env['date'][:10]}", ""]
        lines += ["## Failures", "", *failed, ""] if failed else ["Nothing failed.", ""]
        verdicts = {True: "holds", False: "FAILED", None: "reports"}
        rows = [
            (f"({s['name']})", s["title"], verdicts[s["ok"]], f"{s['seconds']:.0f}")
            for s in self.sections
        ]
        lines += table(("", "section", "verdict", "s"), [*rows, ("", "total", "", f"{total:.0f}")])
        for s in self.sections:
            lines += ["", f"## ({s['name']}) {s['title']}", "", *s["lines"]]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Both files, each whole."""
        result = {
            "environment": self.environment, "ok": self.ok, "name": self.suggested_name,
            "seconds": time.monotonic() - self.start, "sections": self.sections,
        }  # fmt: skip
        text = json.dumps(result, indent=1, default=np.generic.item) + "\n"
        kernels.replace(self.directory / "gpu_check.json", text)
        kernels.replace(self.directory / "gpu_check.md", self.markdown())


def check(directory: pathlib.Path, only: str = _USUAL, seconds: float = SECONDS) -> Report:
    """The sections whose letters are in `only`, in order; see the module."""
    report = Report(directory)

    def left() -> float:
        return seconds - (time.monotonic() - report.start)

    for name, title, section, decides in (
        ("a", "the machine", machine, True),
        ("b", "tiles give equal bits", tiles, True),
        ("c", "rows do not see each other", rows, True),
        ("d", "kernels against float64", correctness, True),
        ("e", "forms of one kernel give equal bits", pairs, True),
        ("f", "rollout and train step", programs, False),
        ("g", "speed", lambda: speed(max(left(), _LEAST_FOR_SPEED)), False),
        ("h", "the device, as XLA sees it", device, False),
        ("i", "a long rollout, FP8 against BF16", lambda: headline(left()), False),
    ):
        if name in only:
            report.run(name, title, section, decides)
    return report


def _options(arguments: Sequence[str]) -> tuple[pathlib.Path, str]:
    """Where the results go, and the letters of the sections.

    Raises:
      UserError: the arguments are not understood.
    """
    words = [part for a in arguments for part in (a.split("=", 1) if "=" in a else [a])]
    found = {"--out": "runs/gpu_check", "--only": _USUAL}
    given = dict(zip(words[::2], words[1::2], strict=False))
    letters = given.get("--only", _USUAL)
    if (
        2 * len(given) != len(words) or set(given) - set(found) or not all(given.values())
        or set(letters) - set(_ALL)
    ):  # fmt: skip
        raise UserError(
            f"gpu_check: {' '.join(arguments)!r} is not understood; it takes --out DIR and --only "
            f"LETTERS, of the sections {_ALL}, and nothing else"
        )
    found |= given
    return pathlib.Path(found["--out"]), found["--only"]


def _make(directory: pathlib.Path) -> None:
    """Makes the directory and begins its files, so that it fails now if at all.

    Raises:
      UserError: nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        kernels.replace(directory / "gpu_check.md", "")
    except OSError as error:
        raise UserError(
            f"gpu_check: nothing can be written to --out={directory} ({error.strerror}): name "
            "another directory"
        ) from None


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    try:
        directory, only = _options(arguments)
        if not kernels.on_gpu():
            raise UserError(
                f"gpu_check: JAX finds no GPU here but {jax.default_backend()!r}: run it on a "
                "machine with an NVIDIA H100 or H200, and unset JAX_PLATFORMS"
            )
        _make(directory)
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    report = check(directory, only)
    print(report.markdown())
    name = f"docs/gpu_results/{report.suggested_name}"
    print(f"results: {directory}/gpu_check.md and {directory}/gpu_check.json")
    print(f"to keep them, commit them as {name}.md and {name}.json")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
