"""`fp8rl plan`: what it prints and refuses, and that its fixes fit."""

from __future__ import annotations

import pathlib
import re
import sys

import pytest

from fp8rl_jax import cli, models
from fp8rl_jax.config import load_config
from fp8rl_jax.models.presets import preset
from fp8rl_jax.plan.gpus import DECODE_LAUNCHES, STEP_LAUNCHES
from fp8rl_jax.plan.planned import read_planned
from fp8rl_jax.plan.rollout import plan_rollouts

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_TINY, _QWEN = (str(_ROOT / "configs" / f"{n}.py") for n in ("tiny_arithmetic", "qwen3_8b"))
_GIB = 2**30


@pytest.fixture
def plan(capsys, monkeypatch, tmp_path):
    """plan(*arguments) runs the command: (status, output, error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.run(["plan", *arguments])
        return (status, *capsys.readouterr())

    return run


def _row(output: str, name: str) -> list[float]:
    (line,) = (line for line in output.splitlines() if line.startswith(name))
    return [float(text.replace(",", "")) for text in re.findall(r"  ([\d.,]+)\b", line)]


@pytest.mark.parametrize("memory", [80, 141])
def test_qwen3_8b(plan, memory):
    """Shapes by name where the checkpoint is not there, eight GPUs that are not there."""
    status, output, error = plan(
        "--rollout",
        "--config",
        _QWEN,
        "--config.model.name=qwen3_8b",
        f"--memory-gb={memory}",
        "--config.rollout.slots=512",
    )
    assert (status, error) == (0, "")
    assert f"8 devices of {memory}.00 GiB" in output
    assert "fp8 *" in output
    weights, state, work = (_row(output, n) for n in ("weights", "train state", "workspace"))
    # 6.95e9 numbers in linear layers and 1.24e9 in tables, of bf16 in either case.
    assert weights == pytest.approx([9.44e9 / _GIB, 16.38e9 / _GIB], rel=0.002)
    assert state == pytest.approx([12 * 8.19e9 / 8 / _GIB] * 2, rel=0.002)
    # 36 layers of 8 heads, k and v: 128 bytes and a scale, or 128 numbers of bf16.
    assert _row(output, "KV of a token") == [36 * 16 * 132 / 1024, 36 * 16 * 256 / 1024]
    for column, pages in enumerate(_row(output, "pages that fit")):
        left = 0.92 * memory - weights[column] - state[column] - work[column]
        assert pages * _row(output, "a page")[column] * 1024 == pytest.approx(left * _GIB, rel=0.01)
        assert _row(output, "slots of 4608")[column] == (pages - 4) // 72
        assert _row(output, "slots of 2304")[column] == (pages - 4) // 36
    fitting = min(64 * 72 + 4, _row(output, "pages that fit")[0])
    assert f"64 slots and {fitting:.0f} pages a device" in output


def test_predicted_decode_times(plan):
    """Ratios to bf16 with equal sequences, and with those that the table above says fit."""
    moe = str(_ROOT / "configs" / "qwen3_30b_a3b.py")
    status, output, _ = plan("--rollout", "--config", moe, "--config.model.name=qwen3_30b_a3b")
    assert status == 0
    assert "H200, sequences of 1280 tokens on average: a prediction from bytes" in output
    assert "not a measurement" in output and "FP8 products 1.87 TB/s, bf16" in output
    assert "2.2 us for another kernel, 0.2 us for a launch" in output
    plans, decode = output.split("Decoding on each")
    equal, fit = decode.split("sequences that fit")
    # 48 layers of 4 heads, k and v; gate, up and down of 32 experts, 2048 x 768; 32 x 4 tokens.
    cache = 32 * 1280 * 48 * 4 * 2 * 128
    layers = 48 * (2048 * 128 * (32 + 2 * 4 + 32) + 32 * (1 - (15 / 16) ** 128) * 3 * 2048 * 768)
    head = 2 * 151936 * 2048
    kernels, large = DECODE_LAUNCHES["experts"]
    others = (48 * (kernels - large) + STEP_LAUNCHES) * 2.2e-3
    others += (48 * kernels + STEP_LAUNCHES) * 0.2e-3
    times = [
        1e-9 * (weight * layers / product + kv * cache / attention + head / 3.84) + others
        for weight, product, kv, attention in (
            (2, 2.78, 2, 4.08),
            (1, 1.87, 2, 4.08),
            (2, 2.78, 132 / 128, 3.6),
            (1, 1.87, 132 / 128, 3.6),
        )
    ]
    assert _milliseconds(equal, "a step") == pytest.approx(times, rel=0.01)
    found = _row(equal, "  time of a token")
    assert found == pytest.approx([time / times[0] for time in times], abs=0.01)
    assert _row(equal, "  tokens/s") == pytest.approx([times[0] / x for x in times], abs=0.02)
    counts = [float(text.replace(",", "")) for text in fit.splitlines()[0].split()]
    both, bf16 = _row(plans, "slots of 1280")
    assert (counts[0], counts[3]) == (bf16, both)
    rates = [n / time for n, time in zip(counts, _milliseconds(fit, "a step"), strict=True)]
    assert _row(fit, "  tokens/s") == pytest.approx([x / rates[0] for x in rates], abs=0.02)
    assert _row(fit, "  time of") == pytest.approx([rates[0] / x for x in rates], abs=0.01)


def _milliseconds(output: str, name: str) -> list[float]:
    (line,) = (line for line in output.splitlines() if line.startswith(f"  {name}  "))
    return [float(x) for x in re.findall(r"([\d.]+) ms", line)]


def test_decode_times_of_what_does_not_fit(plan):
    """If no sequence fits in bf16, no ratio to bf16 is printed."""
    name = "--config.model.name=qwen3_8b"
    status, output, _ = plan("--rollout", "--config", _QWEN, name, "--memory-gb=29")
    assert status == 0
    fit = output.partition("sequences that fit")[2]
    assert re.match(r" +0 +18 +0 +35\n", fit)
    assert re.search(r"a step +- +[\d.]+ ms +- +[\d.]+ ms\n", fit)
    assert "over bf16's" not in fit


def test_static_batching_names_the_best_slots(plan):
    """Where the samples do not fit at their greatest length: as many as fit at half of it, no more
    than a step has."""
    name = "--config.model.name=qwen3_8b"
    for memory, slots in ((80, 0), (40, 512), (30, None)):
        status, output, _ = plan("--rollout", "--config", _QWEN, name, f"--memory-gb={memory}")
        assert status == 0
        best = int((re.search(r"rollout\.slots=(\d+)", output) or [0, 0])[1])
        assert best == (8 * _row(output, "slots of 2304")[0] if slots is None else slots)
    status, output, error = plan("--rollout", "--config", _QWEN, name, "--memory-gb=22")
    assert status == 2
    assert "pages that fit" in output
    assert re.fullmatch(r"error: beside [^\n]* raise mesh\.fsdp [^\n]*\n", error)


def test_tiny_config_and_other_recipes(plan):
    """The config's own recipe stands first, and beside it what it is not."""
    status, output, _ = plan("--rollout", "--config", _TINY, "--devices=4")
    assert status == 0
    assert "4 devices" in output and "data 4" in output
    assert "32 samples" in output
    status, output, _ = plan("--rollout", "--config", _TINY, "--config.precision.rollout=f32")
    assert status == 0
    assert re.search(r"f32 \* +fp8 +bf16", output)


def test_experts_and_latents(plan):
    config = load_config(
        str(_ROOT / "configs" / "moonlight_16b.py"), ["--config.model.name=moonlight_16b_a3b"]
    )
    own, _ = plan_rollouts(read_planned(config))
    latent = own.page / models.PAGE / preset("moonlight_16b_a3b").num_hidden_layers
    assert latent == 512 + 4 + 2 * 64


_MODELS = {  # of configs that are not named after their model
    "moonlight_16b": "moonlight_16b_a3b",
    "qwen3_1p7b_gsm8k": "qwen3_1p7b",
    "qwen2p5_1p5b_lora": "qwen2p5_1p5b",
    "qwen3_8b_lora_1gpu": "qwen3_8b",
    "qwen3_30b_a3b_lora_2gpu": "qwen3_30b_a3b",
    "deepseek_v3_671b": "deepseek_v3",
    "kimi_k2_1t": "kimi_k2",
    **dict.fromkeys(
        (f"tiny_{n}" for n in ("arithmetic", "calculator", "counting", "guessing")), ""
    ),
}


@pytest.mark.parametrize("path", sorted((_ROOT / "configs").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_every_config_fits_its_own_mesh(plan, path):
    """The train step of every config, on the GPUs that its header names; its plan is to change
    nothing, and says how long a step and the run take."""
    name = _MODELS.get(path.stem, path.stem)
    words = [f"--config.model.name={name}"] * bool(name)
    gpu = "h100" if " of 80 GB" in path.read_text() else "h200"
    status, output, _ = plan("--config", str(path), *words, f"--gpu={gpu}")
    assert status == 0
    assert "The train step fits: it needs" in output
    slots = load_config(str(path)).rollout.slots
    assert (f"{slots} decode at a time" if slots else "samples at once") in output
    assert "would do best" not in output
    _check_times(output)
    (sizes, _) = re.findall(r"mesh: data (\d+), fsdp (\d+), tensor (\d+), expert (\d+)", output)
    config = load_config(str(path)).mesh
    assert [int(n) for n in sizes] == [
        max(n, 1) for n in (config.data, config.fsdp, config.tensor, config.expert)
    ]


def _check_times(output: str) -> None:
    """Of the step and the run: the sums of what the plan says of decoding and of an update."""
    number = r"([\d.e+-]+)"
    (update,) = re.findall(rf"An update takes {number} s .*, and {number} s if they", output)
    ((*step, decoding, count),) = re.findall(
        rf"An RL step takes {number} to {number} s: {number} s for ([\d,]+) decode steps", output
    )
    ((updates, steps, *hours),) = re.findall(
        rf" for (\d+) updates?\.\nThe run's ([\d,]+) steps take {number} to {number} hours\.",
        output,
    )
    for i in range(2):
        seconds = float(decoding) + int(updates) * float(update[i])
        assert float(step[i]) == pytest.approx(seconds, rel=0.02)
        run = float(step[i]) * int(steps.replace(",", "")) / 3600
        assert float(hours[i]) == pytest.approx(run, rel=0.02)
    assert "not measured; left out: prefill" in output and int(count.replace(",", "")) > 0


def test_waves_and_epochs_take_their_times(plan):
    """Half of the slots decode twice as long; every pass over a rollout has all its updates."""
    name = "--config.model.name=qwen3_8b"
    status, output, _ = plan(
        "--config", _QWEN, name, "--config.rollout.slots=256", "--config.algo.epochs=3"
    )
    assert status == 0 and "for 8,192 decode steps" in output and "s for 3 updates." in output
    _check_times(output)


def _learner(config: str, *fields: str) -> list[str]:
    return ["--learner", "--config", config, *(f"--config.{field}" for field in fields)]


def test_the_learner_of_a_cluster(plan):
    """Sixty-four devices by arguments alone; what is between hosts follows from the mesh."""
    moe = str(_ROOT / "configs" / "qwen3_30b_a3b.py")
    fields = ["model.name=qwen3_30b_a3b", "mesh.fsdp=8", "mesh.expert=8"]
    fields.append("rollout.prompts_per_step=64")
    status, output, _ = plan(*_learner(moe, *fields), "--devices=64")
    assert status == 0
    assert "64 H200 of 141.00 GiB on 8 hosts (mesh: data 1, fsdp 8, tensor 1, expert 8)" in output
    inside, between = zip(
        *(
            map(float, re.findall(r"([\d.]+) GiB", line))
            for line in output.splitlines()
            if re.match(r"(fsdp|expert): ", line)
        ),
        strict=True,
    )
    assert inside[:3] == (0, 0, 0) and min(between[:3]) > 0  # fsdp
    assert min(inside[3:]) > 0 and set(between[3:]) == {0}
    assert "989 TFLOPS bf16, 1,979 FP8" in output and "NVLink" in output
    status, one, _ = plan(*_learner(moe, *fields), "--devices=64", "--hosts=64")
    assert status == 0 and "on 64 hosts" in one
    assert {float(x) for x in re.findall(r"([\d.]+) GiB +[\d.]+ GiB$", one, re.M)} == {0}


def _fixes(error: str) -> list[tuple[list[str], float]]:
    """(fields, GiB that the plan then needs) of an error's sentence."""
    advice = error.partition(": write ")[2]
    found = re.findall(r"([^()]+) \(([\d.]+) GiB\)", advice)
    return [(re.findall(r"[a-z_]+\.[a-z_]+=\w+", words), float(size)) for words, size in found]


_PADDED = ["learner.tokens_per_batch=0", "learner.gradient_accumulation_steps=16"]


@pytest.mark.parametrize(
    ("fields", "memory", "fixed"),
    [
        (["learner.remat=none"], 60, ["learner.remat"]),
        ([], 50, ["learner.tokens_per_batch", "learner.offload", "mesh.fsdp"]),
        (_PADDED, 50, ["learner.gradient_accumulation_steps", "learner.offload", "mesh.fsdp"]),
        (["mesh.fsdp=4", "mesh.data=2"], 60, ["mesh.data"]),
        (["mesh.fsdp=1", "learner.remat=none"], 60, ["learner.tokens_per_batch"]),
    ],
)
def test_what_does_not_fit_is_fixed_as_the_plan_says(plan, fields, memory, fixed):
    """Status 2 and the fixes by price; each, written into the command, fits with its figure."""
    arguments = _learner(_QWEN, "model.name=qwen3_8b", *fields)
    status, output, error = plan(*arguments, f"--memory-gb={memory}")
    assert status == 2
    assert "together" in output and "The train step fits" not in output
    assert re.fullmatch(r"error: the train step needs [^\n]+\n", error)
    fixes = _fixes(error)
    assert [words[0].partition("=")[0] for words, _ in fixes] == fixed
    for words, size in fixes:
        changed = [f"--config.{word}" for word in words]
        status, output, _ = plan(*arguments, *changed, f"--memory-gb={memory}")
        assert status == 0
        assert f"needs {size:.2f} GiB a device" in output


def test_experts_that_fsdp_does_not_store(plan):
    """32 x 8 devices do not divide 128 experts: every one of 32 stores them. Half as many do."""
    moe = str(_ROOT / "configs" / "qwen3_235b_a22b.py")
    fields = ["model.name=qwen3_235b_a22b", "mesh.fsdp=32", "rollout.prompts_per_step=256"]
    status, _, error = plan(*_learner(moe, *fields), "--devices=256")
    assert status == 2
    assert ["mesh.data=2", "mesh.fsdp=16"] in [words for words, _ in _fixes(error)]


def test_hosts_that_are_not_full(plan):
    """Twenty devices are on four hosts of five, not on three."""
    fields = [
        "mesh.fsdp=20",
        "rollout.prompts_per_step=20",
        "eval.batch_size=20",
        "model.name=qwen3_8b",
    ]
    _, output, _ = plan(*_learner(_QWEN, *fields), "--devices=20")
    assert "on 4 hosts" in output


def test_nothing_makes_it_fit(plan):
    status, _, error = plan(*_learner(_QWEN, "model.name=qwen3_8b"), "--memory-gb=2")
    assert status == 2
    assert "no larger mesh that was tried is enough" in error


def test_both_halves(plan):
    """Without a flag, rollout and learner; the errors of both are joined in one sentence."""
    status, output, _ = plan("--config", _TINY)
    assert status == 0
    assert output.index("slots of 40 tokens") < output.index("\n\nLearner: 1 H200")
    status, output, error = plan(
        "--config", _QWEN, "--config.model.name=qwen3_8b", "--memory-gb=16"
    )
    assert status == 2
    assert "pages that fit" in output and "masters, float32" in output
    assert re.fullmatch(r"error: beside [^\n]*; the train step needs [^\n]*\n", error)


@pytest.mark.parametrize("arguments", ["", "--rollout"])
def test_without_a_config(plan, arguments):
    status, _, error = plan(*arguments.split())
    assert status == 2
    assert re.fullmatch(r"error: [^\n]*name a config[^\n]*\n", error)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--learner --hosts=0", ["--hosts is 0", "at least 1"]),
        ("--learner --devices=4 --hosts=3", ["--hosts is 3", "the 4"]),
        ("--learner --gpu=b200", ["--gpu", "h100"]),
        ("--learner --config.mesh.expert=2", ["mesh.expert is 2"]),
        (
            "--learner --config.mesh.expert=-1 --config.model.num_experts=8",
            ["mesh.expert is -1", "write the number"],
        ),
        ("--rollout --compile", ["--compile", "--learner"]),
        ("--learner --compile --gpu=h100", ["--gpu is h100"]),
        ("--rollout --memory-gb=0", ["--memory-gb is 0.0", "such as 80"]),
        ("--rollout --memory-gb=nan", ["--memory-gb is nan"]),
        ("--rollout --memory-gb=much", ["--memory-gb", "much"]),
        ("--rollout --devices=0", ["--devices is 0", "at least 1"]),
        ("--rollout --devices=3", ["does not divide", "3 devices"]),
        ("--rollout now", ["'now' is not understood"]),
        ("--rollout --config.mesh.tensor=2", ["mesh.tensor is 2"]),
        (
            "--rollout --config.rollout.slots=8 --config.rollout.pages=99999 --memory-gb=1",
            ["rollout.pages is 99999", "or 0"],
        ),
        (f"--rollout --config={_QWEN} --devices=3", ["--config.model.name=qwen3_8b"]),
    ],
)
def test_refused(plan, arguments, words):
    status, _, error = plan("--config", _TINY, *arguments.split())
    assert status == 2
    assert re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error
