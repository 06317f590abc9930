"""Files and directories: which split a file is, what is not read, and what leads elsewhere."""

from __future__ import annotations

import decimal
import json
import os
import pathlib

import pytest
from data_files import ROWS, arrow, arrow_dict, env, jsonl, parquet

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import check_source, load_questions
from fp8rl_jax.envs.splits import splits_named

_TRAIN, _TEST = ROWS[:30], ROWS[30:]


def _load(task, counts=None, **fields):
    section = env(task, **fields)
    check_source(section)
    return load_questions(section, counts or {"train": 1, "eval": 1000}, 0)


def _write(root: pathlib.Path, name: str, rows=ROWS) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.lower().endswith(".parquet"):
        parquet(path, rows)
    elif ".jsonl" in name.lower():
        jsonl(path, rows)
    else:
        path.write_text("question,answer\n")


# Splits.


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.jsonl", "test.parquet"),
        ("train.parquet", "test.jsonl"),
        ("train.jsonl.gz", "eval/0000.parquet"),
        ("data/train-00000-of-00001.parquet", "dev.jsonl"),
        ("TRAIN.JSONL", "Test.Parquet"),
        ("part-0.jsonl", "a/b/c/d/validation.parquet"),
        ("train.parquet/part-0.parquet", "test.parquet/part-0.parquet"),
    ],
)
def test_splits_in_files_of_several_kinds(train, test, tmp_path):
    """Each split is what its file says, whatever kind of file another one is."""
    _write(tmp_path, train, _TRAIN)
    _write(tmp_path, test, _TEST)
    data = _load(tmp_path)
    assert [q.text for q in data.questions["train"]] == [row["question"] for row in _TRAIN]
    assert [q.text for q in data.questions["eval"]] == [row["question"] for row in _TEST]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["train.jsonl", "train.parquet"], r"for the split 'train' \(train.jsonl, train.parquet\)"),
        (["a.jsonl", "a.jsonl.gz"], r"for the split 'train' \(a.jsonl, a.jsonl.gz\)"),
        (["train-test.jsonl"], "named after the splits train and test: name the file itself"),
        (["test-00000-of-00001.parquet"], "has the split 'test' alone, which is held out and not"),
        (["validation/0000.parquet"], "has the split 'validation' alone"),
        (["test.jsonl", "train.csv"], "trained on, and train.csv, which is not read: name it by"),
        (["train.tsv", "train.txt"], "holds no data .*, but train.tsv, train.txt;"),
        (["train.csv", "more.csv"], r"for the split 'train' \(more, train\)"),
    ],
)
def test_what_is_not_trained_on_unasked(names, message, tmp_path):
    """Two sources of one split, a held-out split alone, other kinds of files: by name."""
    for name in names:
        _write(tmp_path, name)
    with pytest.raises(UserError, match=message):
        _load(tmp_path)


def test_a_held_out_split_alone_is_for_evaluation(tmp_path):
    """All of it, where nothing is trained on or as env.eval_task."""
    _write(tmp_path, "sets/test.jsonl", _TEST)
    _write(tmp_path, "train.jsonl", _TRAIN)
    assert len(_load(tmp_path / "sets", {"eval": 1000}).questions["eval"]) == len(_TEST)
    data = _load(tmp_path / "train.jsonl", eval_task=str(tmp_path / "sets"))
    assert {split: len(part) for split, part in data.questions.items()} == {
        "sft": 0,
        "train": len(_TRAIN),
        "eval": len(_TEST),
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test-00000-of-00001.parquet", "trained on although its name says 'test'"),
        ("test/0000.parquet", "trained on although its name says 'test'"),
        ("math_dev.jsonl", "trained on although its name says 'validation'"),
        ("test/data.jsonl", "trained on although its name says 'test'"),
        ("test/Dataset.jsonl", "trained on although its name says 'test'"),
        (
            "dev/part-00000-0a1b2c3d-4e5f-c000.parquet",
            "trained on although its name says 'validation'",
        ),
        ("train.jsonl", ""),
        ("my_train_and_test.jsonl", ""),
        ("test/mine.jsonl", ""),
        ("my_test_of_this/data.jsonl", ""),
    ],
)
def test_a_file_that_is_named_by_the_user(name, said, tmp_path):
    """It is trained on, as its user says, and the first line speaks of its name."""
    _write(tmp_path, name)
    data = _load(tmp_path / name)
    assert data.questions["train"] and data.note.endswith(f"; {said}" if said else "question)")
    if said and "/" in name:  # as the directory itself says
        (folder, _) = name.split("/")
        assert _load(tmp_path / folder).note.endswith(said)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["train-00000-of-00002.parquet"], "train-00001-of-00002.parquet"),
        (["a/train-00001-of-00002.jsonl.gz"], "train-00000-of-00002.jsonl.gz"),
        (["train.jsonl", "test-00001-of-00002.jsonl"], "test-00000-of-00002.jsonl"),
        (["train-00000-of-00002-0a1b2c.parquet"], "train-00001-of-00002.parquet"),
        (["part-2-of-3.csv", "part-3-of-3.csv"], "part-1-of-3.csv"),
        (["00000-of-00004.jsonl", "00002-of-00004.jsonl"], "00001-of-00004.jsonl, 00003-of-"),
        (["train/00000-of-10000.jsonl"], "and 9,987 more"),
    ],
)
def test_files_that_names_promise_and_that_are_not_there(names, missing, tmp_path):
    """A directory of one of two files is a download that was cut off."""
    for name in names:
        _write(tmp_path, name)
    with pytest.raises(UserError) as raised:
        check_source(env(tmp_path))
    assert f"{tmp_path} lacks " in str(raised.value) and missing in str(raised.value)
    if "parquet" in names[0]:  # named by itself
        assert _load(tmp_path / names[0]).note.endswith(f"; not read: {missing}")


@pytest.mark.parametrize("numbers", [("0", "1"), ("1", "2")])
def test_all_files_that_names_promise(numbers, tmp_path):
    for number, rows in zip(numbers, (_TRAIN, _TEST), strict=True):
        _write(tmp_path, f"train-0000{number}-of-00002.jsonl", rows)
    data = _load(tmp_path)
    assert len(data.questions["train"] + data.questions["eval"]) == len(ROWS)


def test_what_is_not_used_is_said(tmp_path):
    """Other kinds of data, and splits that are neither trained on nor held out."""
    for name, rows in {"train.jsonl": _TRAIN, "test.jsonl": _TEST, "dev.jsonl": _TEST[:5]}.items():
        _write(tmp_path, name, rows)
    for name in ("more.csv", "a/b.json", "README.md", "dataset_infos.json", ".hidden.csv"):
        _write(tmp_path, name)
    said = "; not read: a/b.json, more.csv; splits not used: validation"
    assert _load(tmp_path).note.endswith(f"(its split 'test'){said}")
    assert "; splits not used: test, validation" in _load(tmp_path, eval_task="chain_sum").note


@pytest.mark.parametrize(
    "name",
    [
        "test.jsonlines",
        "test.parq",
        "test.pq",
        "test.h5",
        "test.xml",
        "test.pt",
        "test.bin",
        "test.jsonl.br",
        "test",
        "a/my-dev.rows",
        "test/0.dat",
        "more.jsonlines",
        "more.h5",
    ],
)
@pytest.mark.parametrize("saved", [False, True])
def test_files_that_are_not_read_are_named(name, saved, tmp_path):
    """Whatever their suffix, where name or folder speak of a split; beside Arrow files, too."""
    if saved:
        arrow(tmp_path / "set", _TRAIN)
    else:
        _write(tmp_path, "set/train.jsonl", _TRAIN)
    _write(tmp_path, "set/notes.md")
    if ".jsonl" in name:
        (tmp_path / "set" / name).write_bytes(b"x")
    else:
        _write(tmp_path / "set", name)
    assert _load(tmp_path / "set").note.endswith(f"; not read: {name}")


def test_files_beside_saved_splits_are_named(tmp_path):
    """Folders that dataset_dict.json lacks, too; not what `datasets` keeps of its own."""
    root = arrow_dict(tmp_path / "disk", {"train": _TRAIN})
    arrow(root / "more", _TEST)
    for name in ("extra.arrow", "test.csv", "train/cache-0123456789abcdef.arrow"):
        _write(root, name)
    said = "; not read: extra.arrow, more/data-00000-of-00001.arrow, test.csv"
    assert _load(root).note.endswith(said)


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_saved_selections_are_refused(key, tmp_path):
    """`filter` and `shuffle` leave all rows in the files, and indices beside them."""
    state = arrow(tmp_path / "set", ROWS) / "state.json"
    content = json.loads(state.read_text())
    state.write_text(json.dumps(content | {key: None}))
    assert _load(tmp_path / "set", eval_fraction=0.0).questions["train"]
    state.write_text(json.dumps(content | {key: [{"filename": "indices.arrow"}]}))
    with pytest.raises(UserError, match=r"set is a selection .* after flatten_indices\(\)"):
        _load(tmp_path / "set")


@pytest.mark.parametrize(
    ("rows", "message"), [([], "has no rows: fill it"), ([{"question": "a", "answer": ""}], "both")]
)
def test_a_split_without_rows_is_named(rows, message, tmp_path):
    _write(tmp_path, "train.jsonl", _TRAIN)
    _write(tmp_path, "test.jsonl", rows)
    with pytest.raises(UserError, match=rf"env\.task: the split 'test' of .* {message}"):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": _TRAIN, "dev": _TEST}, "30 to train on, 10 held out (its split 'dev')"),
        ({"train_sft": _TRAIN, "test_sft": _TEST}, "10 held out (its split 'test_sft')"),
        ({"train": _TRAIN, "train_b": _TEST, "val": _TEST}, "splits not used: train_b"),
        ({"train_a": _TRAIN, "train_b": _TEST}, "several splits for 'train' (train_a, train_b)"),
        ({"eval": _TEST}, "has the split 'eval' alone"),
        ({"a": _TRAIN, "b": _TEST}, "has the splits a, b, and none is called 'train'"),
    ],
)
def test_names_of_saved_splits(parts, message, tmp_path):
    """The words that say a split in a file's name say it in save_to_disk's, too."""
    arrow_dict(tmp_path / "disk", parts)
    try:
        said = _load(tmp_path / "disk").note
    except UserError as error:
        said = str(error)
    assert message in said


def test_a_saved_split_knows_its_name(tmp_path):
    """`load_dataset(..., split="test").save_to_disk("mine")` is a test split under any name."""
    for name, refused in {"mine": True, "test": False, "train": False}.items():
        state = arrow(tmp_path / name, ROWS) / "state.json"
        state.write_text(json.dumps(json.loads(state.read_text()) | {"_split": "test"}))
        if refused:
            with pytest.raises(UserError, match="has the split 'test' alone"):
                _load(tmp_path / name)
        else:
            assert (name == "test") == ("its name says 'test'" in _load(tmp_path / name).note)
    jsonl(tmp_path / "train" / "more.jsonl", ROWS)
    with pytest.raises(UserError, match=r"what save_to_disk writes, and more\.jsonl: name the one"):
        _load(tmp_path / "train")


def test_words_of_splits():
    names = {"test-00000-of-00001": ["test"], "latest": [], "eval_train": ["test", "train"]}
    assert {name: splits_named(name) for name in names} == names


# Files of others.


@pytest.mark.parametrize(
    "content",
    [
        '{"splits": [5]}',
        '{"splits": "train"}',
        '{"splits": {"a": 1}}',
        '{"splits": []}',
        "[]",
        '{"splits": [".."]}',
        '{"splits": ["../train"]}',
        '{"splits": ["/etc"]}',
        "[" * 5000,
        '{"splits": ["a\\u0000"]}',
        '{"splits": ["%s"]}' % ("a" * 300),
        '{"splits": ["\\ud800"]}',
    ],
)
def test_a_damaged_dataset_dict(content, tmp_path):
    """One sentence, and nothing outside of the directory is opened."""
    arrow(tmp_path / "train", ROWS)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/dataset_dict.json").write_text(content)
    with pytest.raises(UserError, match="damaged: save the data set again"):
        _load(tmp_path / "disk")


@pytest.mark.parametrize("name", ["../a.arrow", "/etc/passwd", "..", "", "a" * 300, 5, None, "\0"])
def test_a_damaged_state(name, tmp_path):
    arrow(tmp_path / "disk", ROWS)
    (tmp_path / "a.arrow").write_bytes(next((tmp_path / "disk").glob("*.arrow")).read_bytes())
    (tmp_path / "disk/state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UserError, match=r"state\.json is missing or damaged"):
        _load(tmp_path / "disk")


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.parquet", "d/test.jsonl", "d/dataset_dict.json", "d/state.json"]
)
def test_fifos_are_not_waited_for(name, tmp_path):
    _write(tmp_path, "d/train.jsonl")
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"no regular file|save_to_disk"):
        _load(tmp_path / name.partition("/")[0])


@pytest.mark.parametrize("name", ["/" + "a" * 300, "a" * 300 + ".jsonl", "a\0.jsonl", "~no_user/a"])
def test_names_that_cannot_be(name):
    with pytest.raises(UserError, match=r"does not exist|holds a NUL"):
        _load(name)


def test_links(tmp_path):
    """Links to files are followed, as Hugging Face's cache has them; one that leads nowhere, in
    which a shard is missing, is named, and a circle ends."""
    _write(tmp_path, "blobs/x.jsonl", _TRAIN)
    root = tmp_path / "snapshot"
    root.mkdir()
    (root / "train-0.jsonl").symlink_to(tmp_path / "blobs/x.jsonl")
    (root / "circle").symlink_to(root)
    assert len(_load(root, eval_fraction=0.0).questions["train"]) == len(_TRAIN)
    (root / "train-1.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"train-1.jsonl cannot be read \(No such file"):
        _load(root)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[" * 1500 + b"]" * 1500, "nested too deeply"),
        (b'{"question": "a", "answer": "b", "x": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"question": "a", "answer": "b", "x": ' + b'{"a":' * 120 + b"1" + b"}" * 121, "deeply"),
        (b"-" + b"1" * 5000, "is Decimal; write one object a line"),
        (b'{"question": "a", "answer": "' + b"b" * 2**24 + b'"}', "has more than 16,777,216 bytes"),
    ],
)
def test_lines_beyond_limits(line, message, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"question": "a", "answer": "b"}\n' + line + b"\n")
    with pytest.raises(UserError, match=rf"a\.jsonl:2 .*{message}"):
        _load(tmp_path / "a.jsonl")


def test_numbers_of_thousands_of_digits(tmp_path):
    """They are what they are, and end no run."""
    huge = "7" * 5000
    good = f'{{"question": "a", "answer": "1", "x": -{huge}, "y": {{"z": [{huge}], "w": 5}}}}'
    (tmp_path / "a.jsonl").write_text(good)
    data = _load(tmp_path / "a.jsonl", eval_fraction=0.0)
    row = data.questions["train"][0].row
    negative, number = map(decimal.Decimal, (f"-{huge}", huge))
    assert row == {"question": "a", "answer": "1", "x": negative, "y": {"z": [number], "w": 5}}
    (tmp_path / "a.jsonl").write_text(f'{{"question": "a", "answer": [{huge}]}}')
    data = _load(tmp_path / "a.jsonl", eval_fraction=0.0)
    assert data.questions["train"][0].answer == huge


def test_keys_that_stand_in_an_object_twice(tmp_path):
    """Neither value is taken silently."""
    for line in (
        '{"question": "a", "answer": "b", "question": "c"}',
        '{"x": {"question": 1, "question": 2}}',
    ):
        (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "1"}\n' + line)
        with pytest.raises(UserError, match=r"a\.jsonl:2 is not JSON \(the key 'question' stands"):
            _load(tmp_path / "a.jsonl")
