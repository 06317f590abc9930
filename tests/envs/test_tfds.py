"""Data sets of tensorflow-datasets: prepared, read and missed without TensorFlow or a network."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest
from data_files import ROWS, env, jsonl, trl

from fp8rl_jax import cli
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import Stream
from fp8rl_jax.envs import Question, check_source, load_questions, tfds, tfds_prepare


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> pathlib.Path:
    """A directory with `gsm8k`, by the real builder from local files, and `word_problems`, by a
    builder as users write them."""
    import reasoning_gym
    import tensorflow_datasets as tfds

    root = tmp_path_factory.mktemp("tfds")
    files = {
        "train": jsonl(root / "train.jsonl", ROWS),
        "test": jsonl(root / "test.jsonl", ROWS[:5]),
    }
    tfds_prepare.prepare_gsm8k(files, root)
    made = reasoning_gym.create_dataset("gsm_symbolic", size=200, seed=1)

    class WordProblems(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("2.0.0")

        def _info(self):
            text = tfds.features.Text()
            features = tfds.features.FeaturesDict({"problem": text, "solution": text})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for i in range(200):
                solution = f"We work it out…\n#### {made[i]['answer']}"
                yield i, {"problem": made[i]["question"], "solution": solution}

    WordProblems(data_dir=str(root), file_format="array_record").download_and_prepare()
    return root


def _load(task: str, root: pathlib.Path, **fields):
    section = env(task, **fields)
    with mock.patch.dict(os.environ, TFDS_DATA_DIR=str(root)):
        check_source(section)
        return load_questions(section, {"train": 1, "eval": 9}, 0)


def test_gsm8k_by_its_own_builder(root):
    """Its splits as they are, texts decoded, answers after the mark; a directory is a task too."""
    data = _load("gsm8k", root)
    assert {q.text for q in data.questions["eval"]} == {row["question"] for row in ROWS[:5]}
    assert len(data.questions["train"]) == 35
    text, answer = ROWS[0]["question"], ROWS[0]["answer"]
    assert Question(text, "2", answer) in data.questions["eval"]
    assert data.questions["train"][0].row["short_answer"].isdecimal()
    assert "rows (question in question, answer in answer after ####)" in data.note
    assert _load(str(root / "gsm8k" / "1.0.0"), root).questions == data.questions
    assert _load("tfds:gsm8k:1.0.0", root).digest == data.digest
    assert "tensorflow" not in sys.modules


def test_a_builder_of_a_users(root):
    """The order that grain gives does not depend on where it begins."""
    questions = _load("tfds:word_problems", root).questions["train"]
    assert 150 < len(questions) < 200
    assert questions[0].solution.startswith("We work it out…") and questions[0].answer.isdecimal()
    first, second = (Stream(questions, 8, 0) for _ in range(2))
    batches = [first.next() for _ in range(60)]
    second.position = 31
    assert second.next() == batches[31]


def test_rows_come_back_as_they_were(root):
    """prepare_rows: order, types, and what array_record has no type for."""
    rows = [
        {"question": "é?", "answer": "1", "n": 2**40, "x": 0.1, "none": None, "on": True},
        {"question": "b?", "answer": "2", "n": -1, "x": 3.0, "none": [1, {"a": "ü"}], "on": False},
    ]
    tfds_prepare.prepare_rows("mine", {"train": rows, "test": [{"question": "c?"}]}, root)
    data = _load("tfds:mine", root, answer_key="n", eval_task="basic_arithmetic")
    assert [dict(q.row) for q in data.questions["train"]] == rows
    assert [q.answer for q in data.questions["train"]] == [str(2**40), "-1"]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("tfds:gsm8kk", "has no data set 'gsm8kk'; did you mean gsm8k?"),
        ("tfds:qqqqqqqqqq", "has no data set 'qqqqqqqqqq'; https://.*catalog names them"),
        ("tfds:../x", "is not understood; write tfds:NAME"),
        ("tfds:old", "is prepared as tfrecord, which needs TensorFlow: prepare it as array_record"),
        ("tfds:broken", r"dataset_info\.json is damaged: prepare it again"),
        ("tfds:many", r"has many/a, many/b: name one, such as tfds:many/"),
    ],
)
def test_what_cannot_be_read(task, message, tmp_path):
    for name, text in {
        "old": '{"fileFormat": "tfrecord"}',
        "broken": "{",
        "many/a": "{}",
        "many/b": "{}",
    }.items():
        directory = tmp_path / name / "1.0.0"
        directory.mkdir(parents=True)
        (directory / "dataset_info.json").write_text(text)
    with pytest.raises(UserError, match=message):
        _load(task, tmp_path)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "mine.array_record"])
def test_files_that_would_be_waited_for(name, tmp_path):
    """A FIFO, or a device, in the place of a file of a prepared data set."""
    directory = tmp_path / "mine" / "1.0.0"
    directory.mkdir(parents=True)
    (directory / "dataset_info.json").write_text('{"fileFormat": "array_record"}')
    (directory / "features.json").write_text("{}")
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    for task in ("tfds:mine", str(directory)):
        with pytest.raises(UserError, match=r"cannot be read|is damaged|holds no data"):
            _load(task, tmp_path)


@pytest.mark.parametrize("root", ["a" * 300, "~no_user/sets", __file__])
def test_places_that_cannot_be(root):
    with pytest.raises(UserError, match=r"has no data set 'mine'"):
        _load("tfds:mine", pathlib.Path(root))


def test_values_of_other_types():
    """A float32 by its shortest decimal; a text that is no UTF-8 is no error of its own."""
    row = tfds._plain(
        {
            "f": np.float32(0.1),
            "fs": np.array([[0.1, 2]], np.float16),
            "bad": b"\xff",
            "i": np.int8(3),
            "texts": np.array([b"a", "\u00e9".encode()], object),
        }
    )
    assert row.pop("bad") == b"\xff"
    assert row == {"f": 0.1, "fs": [[0.1, 2.0]], "i": 3, "texts": ["a", "\u00e9"]}


# Without a network.


@pytest.mark.parametrize("blocked", ["refused", "silent"])
def test_no_network_is_one_sentence_soon(blocked, tmp_path, monkeypatch, capsys):
    """Where connections are refused, and where looking up a name takes forever."""

    def connect(*_, **__):
        if blocked == "silent":
            time.sleep(60)
        raise OSError("blocked")

    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr(socket.socket, "connect", connect)
    if blocked == "silent":
        monkeypatch.setattr(tfds_prepare, "_PROBE_SECONDS", 0.2)
    assert 1.5 * tfds_prepare._PROBE_SECONDS < 8
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    begin = time.monotonic()
    assert cli.run(["data", "show", "gsm8k"]) == 2
    assert time.monotonic() - begin < 10
    output, error = capsys.readouterr()
    assert output == "" and error.count("\n") == 1
    for way in (
        "copy a prepared directory gsm8k",
        "--config.env.task=train.jsonl",
        "`fp8rl data prepare gsm8k` on a machine with a network",
    ):
        assert way in error


# The command.


def test_prepare_list_and_show(tmp_path, monkeypatch, capsys):
    """Local files become a data set that is listed, shown, and not written over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "sets"))
    jsonl(tmp_path / "train.jsonl", ROWS)
    jsonl(tmp_path / "test.jsonl", [trl(row) for row in ROWS[:2]])
    assert cli.run(["data", "prepare", "sums", "--from=train.jsonl"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/sets/sums/1.0.0\n"
    assert cli.run(["data", "list"]) == 0
    listed = capsys.readouterr().out
    assert "tfds:sums\n" in listed and "basic_arithmetic" in listed
    assert "gsm8k, or tfds:NAME" in listed and "mnist" not in listed
    assert cli.run(["data", "show", "tfds:sums", "--rows=1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tfds:sums: rows (question in question")
    assert "prompt: What is 1 + 1?\nanswer: 2\nwhole answer: 1+1=<<1+1=2>>\n#### 2\n" in shown
    assert shown.count("--- ") == 2
    for arguments, words in {
        ("prepare",): "name a data set",
        ("prepare", "sums"): "is there already",
        ("prepare", "gsm8k", "--from=train.jsonl,other.jsonl"): "other.jsonl is not one file",
        ("prepare", "Sums", "--from=train.jsonl"): "write tfds:NAME",
        ("prepare", "gsm8k", "--from=test.jsonl", "--out=x"): "name its files as published",
        ("show",): "name a task",
        ("show", "trian.jsonl"): "did you mean train.jsonl?",
        ("show", "a.jsonl", "--rows=0"): "write a whole number of at least 1",
        (): "write `fp8rl data list`",
    }.items():
        assert cli.run(["data", *arguments]) == 2
        output, error = capsys.readouterr()
        assert output == "" and words in error and error.count("\n") == 1, error


@pytest.mark.slow
def test_a_process_has_no_tensorflow(root):
    """Not even as a lazy import of preparing and reading."""
    code = (
        "import sys\n"
        "from fp8rl_jax import cli\n"
        f"assert cli.run(['data', 'show', '{root}/gsm8k/1.0.0']) == 0\n"
        "assert not {'tensorflow', 'torch', 'datasets'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert json.loads((root / "gsm8k/1.0.0/dataset_info.json").read_text())["splits"]
