"""Study `cases`: its verdicts on planted figures, keys of cells, beginnings of runs, and the
quick command, killed and resumed."""

import dataclasses
import gzip
import json
import math
import pathlib
import re
import types

import numpy as np
import pytest
from small_models import UNEVEN
from study_cells import fake_subject

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import default_config, saved_config
from fp8rl_jax.quant import get_recipe
from studies import __main__ as commands
from studies import cases, cells, runs, step0, subjects, writing
from studies.cells import Cells
from studies.frame import Found, Plan, Size
from studies.measures import Pair, measure
from studies.progress import silent
from studies.runs import SERIES, arm_cells, arm_config
from studies.scoring import Comparison, Scores, View
from studies.step0 import Scoring

_ROWS, _GROUP, _SLOTS = 24, 2, 5
_POW2, _ENDS = "bf16 / fp8_blockwise_pow2", "bf16 / fp8, first and last layer bf16"
# D of a learner's tokens against an FP8 rollout, and KL from the reference.
_SIZES = {"case1": (0.3, 0.0), "case2": (0.03, 0.004), "case3": (0.03, 0.004), "case4": (0, 0.004)}


def _pair(d: np.ndarray, kl: float) -> dict:
    """Numbers of a pair whose tokens have these D and the same KL."""
    ones = np.ones((_ROWS, _SLOTS))
    found = Comparison(d, kl * ones, ones, ones, None)
    scores = Scores(
        slice(0, _ROWS), {"a": -ones.astype(np.float32)}, {"a": ones}, {}, lambda a, b: found
    )
    lengths = np.full(_ROWS, 9)
    return measure([scores], {"pair": ("a", "b")}, ones, lengths, _GROUP)["pair"]


def _cell(seed: int = 0, sizes: dict | None = None, unequal: float = 0.0) -> dict[str, dict]:
    """Numbers of a seed at step 0: of the FP8 rollout and of the bf16 one."""
    rng = np.random.default_rng(seed)
    shape, pairs = (_ROWS, _SLOTS), {}
    for case, (size, kl) in (sizes or _SIZES).items():
        pairs[f"{case} / rollout"] = _pair(rng.normal(0, size, shape), 0.0)
        pairs[f"{case} / reference"] = _pair(np.zeros(shape), kl)
    pairs["case3 / case2"] = _pair(np.zeros(shape), 0.0)
    d = rng.normal(0, (sizes or _SIZES)["case1"][0], shape)
    pairs[_POW2], pairs[_ENDS] = _pair(1.5 * d, 0.0), _pair(0.5 * d, 0.0)
    decode = {"unequal": unequal, "most": 0.0, "tokens": _ROWS * _SLOTS}
    for other in ("fp8, bf16 KV", "mxfp8", "fp8_tensorwise"):
        pairs[f"bf16 / {other}"] = pairs[_POW2]
    bf16 = {"pairs": {}, "decode": dict(decode, unequal=0.0)}
    return {"fp8": {"pairs": pairs, "decode": decode}, "bf16": bf16}


def _runs(seeds: int = 3, last: float = 0.0) -> dict[str, list[dict]]:
    """RL runs of 4 steps: mismatch 0.02 of case 1, 0.01 of cases 2 and 3, 0 of case 4."""
    rng = np.random.default_rng(0)

    def run(mismatch: float) -> dict:
        series = {name: [0.5] * 4 for name in SERIES if name != "calibrate_frac"}
        series["train_rollout_logprob_abs_diff"] = (mismatch * rng.uniform(0.9, 1.1, 4)).tolist()
        series["tis_clipfrac"] = [mismatch] * 4
        accuracy = {"accuracy_greedy": 0.5, "accuracy_sampled": 0.25}
        return {"series": series, "own": accuracy, "bf16": accuracy}

    sizes = {"case1": 0.02, "case2": 0.01, "case3": 0.01, "case4": last}
    return {case: [run(size) for _ in range(seeds)] for case, size in sizes.items()}


def _found(scores: list[dict], made: dict[str, list[dict]] | None = None, layers: int = 4) -> Found:
    """Scores of each seed, and RL runs of as many or more."""
    seeds = max(len(scores), len(next(iter((made or {"": []}).values()))))
    numbers: list[dict] = [{} for _ in range(seeds)]
    for seed, found in enumerate(scores):
        numbers[seed] |= found
    for case, trained in (made or {}).items():
        for seed, run in enumerate(trained):
            numbers[seed][case] = run
    return Found([fake_subject(seed, layers=layers) for seed in range(seeds)], Size(), numbers)


def _judged(*found, **options) -> dict[str, dict]:
    return {verdict["name"]: verdict for verdict in cases.STUDY.judge(_found(*found, **options))}


def _verdicts(*found, **options) -> dict[str, str]:
    return {name: verdict["verdict"] for name, verdict in _judged(*found, **options).items()}


def test_verdicts_of_what_is_expected():
    found = _verdicts([_cell(seed) for seed in range(3)], _runs())
    assert found.pop("accepted") == "not supported", "mean e^|D| of 0.3 normal is 1.28"
    assert set(found.values()) == {"supported"}, found
    assert set(found) == {
        "reference",
        "same_forward",
        "kl_equal",
        "zero",
        "zero_bf16",
        "imitation",
        "clipped",
        "curve_zero",
        "curve_order",
        "curve_clipped",
        "pow2",
        "ends",
    }
    small = dict(_SIZES, case1=(0.02, 0.0))
    assert _verdicts([_cell(0, small)])["accepted"] == "supported"


def test_verdicts_of_the_contrary():
    """The order of the cases decides, not the size of a figure."""
    swapped = dict(_SIZES, case1=_SIZES["case2"], case2=_SIZES["case1"], case3=(0.3, 0.0))
    swapped["case4"] = (0.3, 0.008)
    with np.errstate(all="ignore"):  # case 2's KL is 0
        found = _verdicts([_cell(seed, swapped, unequal=0.01) for seed in range(3)], _runs(3, 0.01))
    for name in ("reference", "zero", "imitation", "clipped", "curve_zero"):
        assert found[name] == "not supported", name
    doubled = dict(_SIZES, case4=(0, 0.008))
    assert _verdicts([_cell(0, doubled)])["kl_equal"] == "not supported"
    order = _runs()
    order["case1"], order["case3"] = order["case3"], order["case1"]
    found = _verdicts([_cell()], order)
    assert found["curve_order"] == found["curve_clipped"] == "not supported"


def test_recipes_of_the_rollout():
    """Each is compared with plain FP8; a recipe that a small model lacks is left out."""
    found = _cell()
    pairs = found["fp8"]["pairs"]
    pairs[_POW2], pairs[_ENDS] = pairs[_ENDS], pairs[_POW2]
    verdicts = _verdicts([found])
    assert verdicts["pow2"] == verdicts["ends"] == "not supported"
    del pairs[_ENDS]
    assert set(_verdicts([found], layers=2)) == set(verdicts) - {"ends"}


def test_nothing_clipped_shows_nothing():
    """Cases without a clipped token do not refute that one clips more than the other."""
    small = dict(_SIZES, case1=(0.03, 0.0))
    runs = _runs()
    for made in runs.values():
        for cell in made:
            cell["series"]["tis_clipfrac"] = [0.0] * 4
    found = _judged([_cell(0, small), _cell(1, small)], runs)
    for name, reason in (
        ("clipped", "(no token has such a ratio)"),
        ("curve_clipped", "(no token was clipped)"),
    ):
        assert found[name]["verdict"] == "not resolved" and reason in found[name]["sentence"]


def test_seeds_must_agree():
    """One seed on the other side leaves a hypothesis open, whatever all of them say together."""
    weak = dict(_SIZES, case1=(0.05, 0.0))  # 1.7 times case 2's
    found = [_cell(0), _cell(1), _cell(2, weak)]
    assert _verdicts(found)["imitation"] == "not resolved"
    assert _verdicts([_cell(0), _cell(1, unequal=1e-3)])["zero"] == "not resolved"
    assert _verdicts([_cell()], _runs(1))["curve_order"] == "not resolved", "one seed, no interval"


def test_a_ratio_to_nothing_is_not_resolved():
    """Imitated FP8 without any error: study.json stays JSON."""
    nothing = dict(_SIZES, case2=(0.0, 0.0), case1=(0.0, 0.0))
    with np.errstate(all="ignore"):
        found = _judged([_cell(0, nothing)], _runs(1))
    assert found["imitation"]["verdict"] == found["kl_equal"]["verdict"] == "not resolved"
    json.dumps(list(found.values()), allow_nan=False)


def _result(made: dict) -> dict:
    pairs = _cell()["fp8"]["pairs"]
    return {
        "name": "tiny",
        "questions": 12,
        "group": _GROUP,
        "subjects": [{}, {}],
        "steps": 4,
        "runs": made,
        "pooled": {name: Pair(numbers).summary() for name, numbers in pairs.items()},
    }


def test_table_and_figure():
    result = _result(_runs())
    text = cases.STUDY.tables(result)
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| case")]
    assert len({len(row) for row in rows[:9]}) == 1
    mean = result["pooled"]["case1 / rollout"]["mean_abs"]
    assert f"| case1 / rollout | {mean.value:.3g} [{mean.low:.3g}, {mean.high:.3g}] |" in text
    assert "| case4 / rollout | 0 | 0 | 1 | 0 |" in text
    assert "RL, 4 steps" in text and len(cases.STUDY.figure(result).axes) == 3
    without = dict(result, runs={})
    assert "RL" not in cases.STUDY.tables(without) and len(cases.STUDY.figure(without).axes) == 3


def test_running_means():
    """Of 32 steps, two at a time; at the first step the mean is its own value."""
    steps = np.arange(32.0)
    assert writing._running_mean(steps).tolist() == [0.0, *(steps[1:] - 0.5)]
    assert writing._running_mean(steps[:4]).tolist() == [0.0, 1.0, 2.0, 3.0]


# Cells of scores.


@dataclasses.dataclass
class _Batch:
    mask: np.ndarray
    lengths: np.ndarray
    old_logprobs: np.ndarray


def _subject(**fields) -> subjects.Subject:
    """A subject that nothing is made for."""
    config = saved_config({"eval": {"questions": 8}, "rollout": {"prompts_per_step": 4}}, "a test")
    config.update(fields)
    runtime = types.SimpleNamespace(
        config=config,
        questions={"eval": list(range(8))},
        resolved=types.SimpleNamespace(model=UNEVEN),
        data_digest="",
    )
    return subjects.Subject("tiny", runtime, lambda: {"w": np.ones(3, np.float32)})


@pytest.fixture
def scores(monkeypatch):
    """Scores of 8 questions in two parts, of views 'one' and 'two'; one token of 'one' is an ulp
    from what the sampler recorded."""
    logp = np.full((8, 3), -0.5, np.float32)
    mask = np.arange(3) < np.array([3, 2] * 4)[:, None]
    off = logp.copy()
    off[5, 1] = np.nextafter(off[5, 1], np.float32(0))
    off[1, 2] = -9.0  # beyond the mask
    margins = np.arange(8.0)[None, :, None] * np.ones((2, 1, 4))

    class FakeScorer:
        def __init__(self, runtime, views, note):
            assert list(views) == ["one", "two"]

        def score(self, params, batch):
            for rows in (slice(0, 4), slice(4, 8)):
                found = Comparison(*(np.zeros((4, 3)) for _ in range(4)), None)
                values = {"one": off[rows], "two": logp[rows] - 1}
                yield Scores(
                    rows,
                    values,
                    values,
                    {"one": margins[:, rows], "two": 0 * margins[:, rows]},
                    lambda a, b, found=found: found,
                )

    batch = _Batch(mask.astype(np.float32), np.array([4, 2] * 4), logp)
    monkeypatch.setattr(step0, "sample", lambda *_: batch)
    monkeypatch.setattr(step0, "Scorer", FakeScorer)


_PLAIN = {"one": View(get_recipe("fp8")), "two": View(get_recipe("bf16"))}


def _score(path, subject=None, **others):
    scoring = Scoring(_PLAIN, {"pair": ("one", "two")}, "one", questions=8, group=1)
    cell = dataclasses.replace(scoring, **others).cell("s", subject or _subject(), silent)
    return Cells(path, resume=True).get("s", cell)


def test_cell_of_scores(scores, tmp_path):
    """An ulp between sampler and score is seen, padding is not; margins are of real tokens."""
    numbers = _score(tmp_path)["numbers"]
    ulp = float(np.spacing(np.float32(0.25)))
    assert numbers["decode"] == {"tokens": 20, "unequal": 1 / 20, "most": pytest.approx(ulp)}
    assert sum(numbers["pairs"]["pair"]["tokens"]) == 20
    real = 2 * [float(row) for row in range(8) for _ in range((4, 2)[row % 2])]
    for level in np.linspace(0.05, 0.95, 19):
        assert numbers["margins"][f"{level:.2f}"] == pytest.approx(np.quantile(real, level))


def test_keys_of_cells(scores, tmp_path):
    """A cell is used again for what it was measured of, and for nothing else."""
    first = _score(tmp_path)
    assert _score(tmp_path) == first
    other = dataclasses.replace(get_recipe("fp8"), first_layers=1)
    unquantised = dataclasses.replace(get_recipe("fp8"), kv="none")
    for differs, change in (
        ("views", {"views": _PLAIN | {"one": View(other)}}),
        ("views", {"views": _PLAIN | {"one": View(unquantised)}}),
        ("views", {"views": _PLAIN | {"two": View(get_recipe("bf16"), "experts", "one")}}),
        ("pairs", {"pairs": {"pair": ("two", "one")}}),
        ("rollout", {"rollout": "two"}),
        ("group", {"group": 2}),
        ("questions", {"questions": 4}),
    ):
        with pytest.raises(UserError, match=rf"another configuration \({differs} differ\)"):
            _score(tmp_path, **change)
    given = dataclasses.replace(_subject(eval={"questions": 9}), trained=False)
    _score(tmp_path, given)
    other = dataclasses.replace(_subject(eval={"questions": 8}), trained=False)
    with pytest.raises(UserError, match="config differ"):
        _score(tmp_path, other)
    given.runtime.data_digest = "of other questions"
    with pytest.raises(UserError, match="data differ"):
        _score(tmp_path, given)


def test_too_few_questions(tmp_path):
    for count in (9, 6):
        with pytest.raises(UserError) as error:
            _score(tmp_path, questions=count)
        assert f"step 0 takes {count} held-out questions" in str(error.value)
        assert "there are 8" in str(error.value)


def test_tags_of_subjects():
    """A tag depends on what weights follow from: on the seed, and not on where the run is."""
    plain = _subject()
    assert plain.tag == _subject(run={"dir": "elsewhere", "cache_dir": "there"}).tag
    assert plain.tag != _subject(run={"seed": 1}).tag
    assert plain.tag != _subject(sft={"steps": 1}).tag
    given = dataclasses.replace(plain, trained=False)
    assert given.tag == subjects.digest({"w": np.ones(3, np.float32)})
    assert given.tag != subjects.digest({"w": np.ones(3, np.float32) * 2})
    assert given.settings["config"]["rollout.prompts_per_step"] == 4


# Where runs begin.


@pytest.mark.parametrize(
    ("checkpoint", "released", "begins", "tokenizer"),
    [
        ("", False, "start", "byte"),
        ("qwen", True, "qwen", "checkpoint"),
        ("qwen", False, "start", "qwen"),  # fine-tuned, or a run that began with it
    ],
)
def test_runs_begin_with_the_subject(
    checkpoint, released, begins, tokenizer, tmp_path, monkeypatch
):
    made = []

    def save(path, model, params, dtype):
        assert dtype == "float32"
        made.append(params["w"].tolist())
        path.mkdir()

    monkeypatch.setattr(runs.hf, "save", save)
    data = {"tokenizer": "checkpoint" if checkpoint else "byte"}
    subject = _subject(model={"checkpoint": checkpoint}, data=data, sft={"steps": 5})
    subject = dataclasses.replace(subject, released=released)
    one, other = (
        arm_config(subject, {"run.steps": 7, "precision.learner": x}, tmp_path / "start")
        for x in ("fp8", "bf16")
    )
    assert pathlib.Path(one.model.checkpoint).name == begins
    assert one.data.tokenizer == tokenizer
    assert (one.sft.steps, one.eval.every, one.precision.self_check) == (0, 7, False)
    assert made == [[1.0, 1.0, 1.0]] * (begins == "start"), "written once"
    fields = [subjects.lasting(config) for config in (one, other)]
    assert set(fields[1]) - set(fields[0]) == {"precision.learner"}, "fp8 is the default"
    assert fields[0].items() <= fields[1].items()
    assert subject.runtime.config.sft.steps == 5, "the subject's own stays"


def test_weights_are_the_checkpoints_or_trained(tmp_path, monkeypatch):
    """Random weights and fine-tuned ones follow from the configuration; what began with a
    checkpoint does not, and only its own weights are `released`."""
    make = lambda config, with_questions: types.SimpleNamespace(config=config)
    monkeypatch.setattr(subjects, "make_runtime", make)
    found = {}
    for checkpoint in ("", "qwen"):
        for steps in (0, 5):
            config = default_config()
            config.model.checkpoint, config.sft.steps = checkpoint, steps
            subject = subjects.of_config(config, tmp_path, print)
            found[checkpoint, steps] = (subject.trained, subject.released)
    assert found == {
        ("", 0): (True, False),
        ("", 5): (True, False),
        ("qwen", 0): (False, True),
        ("qwen", 5): (False, False),
    }


def test_cell_of_a_run(tmp_path, monkeypatch):
    """The series of a run's log; the run is resumed where it was, and its cell used again."""
    calls = []

    def train(config, resume):
        calls.append(resume)
        directory = pathlib.Path(config.run.dir)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text("{}")
        if len(calls) == 1:
            raise KeyboardInterrupt
        rows = [{"reward_mean": 1 / 3, "entropy": step, "other": 1} for step in range(3)]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        names = ("accuracy_greedy", "accuracy_sampled")
        record = {f"{n}{end}": 0.5 for n in names for end in ("", "_se")}
        (directory / "eval.jsonl").write_text(json.dumps(record) + "\n")

    monkeypatch.setattr(runs, "train", train)
    last = lambda config, note, after: {"bf16": {"accuracy_greedy": 0.25}}
    monkeypatch.setattr(runs, "_of_last_weights", last)
    monkeypatch.setattr(runs.hf, "save", lambda *_, dtype: None)

    def get(learner: str) -> dict:
        plan = Plan([], Size(steps=3), tmp_path)
        cells = arm_cells("s", _subject(), plan, {"one": {"precision.learner": learner}})
        return Cells(tmp_path / "cells", True).get("s", cells["one"])

    with pytest.raises(KeyboardInterrupt):
        get("bf16")
    cell = get("bf16")
    assert cell["numbers"]["series"] == {"reward_mean": [0.33333] * 3, "entropy": [0, 1, 2]}
    assert cell["numbers"]["own"]["accuracy_sampled"] == 0.5
    assert get("bf16") == cell
    assert calls == [False, True]
    with pytest.raises(UserError, match="changes differ"):
        get("fp8")
    lacking = runs.series([cell["numbers"]], "mismatch_kl")
    assert lacking.shape == (1, 3) and np.isnan(lacking).all()


# The command.


def test_all_of_several_seeds(tmp_path, monkeypatch):
    """`study all` runs every study with each of the seeds."""
    monkeypatch.chdir(tmp_path)
    asked = {}

    def study(name, values, out, cells):
        asked[name] = values.seeds

    monkeypatch.setattr(commands, "_study", study)
    assert commands.run(["all", "--quick", "--seeds=3,4"]) == 0
    studies = ["cases", "kv", "scale", "training", "accuracy", "recipes", "gradients", "staleness"]
    assert asked == {name: [3, 4] for name in studies}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["cases", "--quick", "--steps=-1"], ["--steps", "'-1'", "at least 0"]),
        (["cases", "--quick", "--steps=1.5"], ["--steps", "'1.5'"]),
        (["accuracy", "--quick", "--steps=0"], ["--steps", "'0'", "at least 1"]),
        (["cases", "--quick", "--seeds=0,x"], ["--seeds", "'x'"]),
        (["cases", "--quick", "--seeds=-1"], ["--seeds", "'-1'"]),
        (["cases", "--quick", "--seeds=1,2,1"], ["--seeds", "1 more than once"]),
        (["cases", "--checkpoint=released"], ["no task of its own", "--config.model.checkpoint"]),
        (["cases", "--checkpoint=empty"], ["empty", "config.json"]),
        (["cases", "--quick", "--cells=file"], ["--cells=file", "directory"]),
        (["cases", "--quick", "--cells=other"], ["other", "add --resume"]),
        (["cases", "--quick", "--cells=other", "--resume"], ["damaged", "delete it"]),
    ],
)
def test_mistakes(arguments, words, tmp_path, monkeypatch, capsys):
    """One sentence and exit status 2, before anything is trained."""
    monkeypatch.chdir(tmp_path)
    for name in ("released", "empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "released" / "config.json").write_text('{"model_type": "qwen3"}')
    monkeypatch.setattr(subjects.Subject, "tag", "tag")
    (tmp_path / "other" / "cases.jsonl.gz").write_bytes(gzip.compress(b'{"key": {}, "numbers": ['))
    assert commands.run([*arguments]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: [^\n]+\n", error), error
    for word in words:
        assert word in error


@pytest.mark.slow
def test_killed_and_resumed_is_the_same(tmp_path, monkeypatch, capsys):
    """The quick command, uninterrupted, and killed within its third run: equal study.json."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    command = ["cases", "--quick", "--steps=2"]
    monkeypatch.setattr(cells, "_commit", lambda: "of both")
    assert commands.run([*command, f"--out={whole}"]) == 0
    output = capsys.readouterr().out
    result = json.loads((whole / "study.json").read_text())
    verdicts = {v["name"]: v["verdict"] for v in result["hypotheses"]}
    for name in ("reference", "same_forward", "zero", "zero_bf16", "curve_zero"):
        assert verdicts[name] == "supported", name
    for verdict in result["hypotheses"]:
        assert verdict["sentence"] in output
    assert 1e-3 < result["pooled"]["case1 / rollout"]["mean_abs"][0] < 0.3
    assert result["pooled"]["case4 / rollout"]["max_abs"] == 0
    assert [len(result["runs"][case]) for case in cases.CASES] == [1] * 4
    assert not any(math.isnan(x) for x in result["runs"]["case1"][0]["series"]["kl_ref"])
    assert (whole / "study.png").read_bytes()[:4] == b"\x89PNG"

    measure_run, calls = runs.read_jsonl, []

    def killed(path):
        calls.append(path)
        if len(calls) == 5:  # two files a run
            raise KeyboardInterrupt
        return measure_run(path)

    monkeypatch.setattr(runs, "read_jsonl", killed)
    with pytest.raises(KeyboardInterrupt):
        commands.run([*command, f"--out={parts}"])
    assert commands.run([*command, f"--out={parts}"]) == 2
    assert "add --resume" in capsys.readouterr().err
    assert commands.run([*command, f"--out={parts}", "--resume"]) == 0
    with gzip.open(parts / "cells" / "cases.jsonl.gz") as lines:
        assert len([*lines]) == 6
    for name in ("study.json", "study.md"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
