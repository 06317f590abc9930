"""CSV with a header and JSON lists: what is a row, what stays a text, what is refused."""

from __future__ import annotations

import csv
import gzip
import json
import pathlib

import pytest
from data_files import ROWS, env, jsonl

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import check_source, files, load_questions

_CSV = (
    b'\xef\xbb\xbfquestion,answer,level\r\n"What is ""a"",\r\nand b?",007,1\r\nq2,24.0,\r\n'
    b"q3,,3\r\n\r\nq4\r\n"
)


def _read(path: pathlib.Path) -> list[tuple[str, dict]]:
    (paths,) = files.find(str(path)).splits.values()
    return [(place.removeprefix(f"{path}"), dict(row)) for place, row in files.read(paths)]


def _load(path: pathlib.Path, **fields):
    section = env(path, **fields)
    check_source(section)
    return load_questions(section, {"train": 1, "eval": 1000}, 0)


@pytest.mark.parametrize("name", ["a.csv", "A.CSV.GZ"])
def test_cells_are_the_texts_that_are_written(name, tmp_path):
    """Numbers are not converted; quotes, line breaks, a byte order mark, missing cells."""
    content = gzip.compress(_CSV) if name.endswith("GZ") else _CSV
    (tmp_path / name).write_bytes(content)
    assert _read(tmp_path / name) == [
        (":3", {"question": 'What is "a",\r\nand b?', "answer": "007", "level": "1"}),
        (":4", {"question": "q2", "answer": "24.0", "level": ""}),
        (":5", {"question": "q3", "answer": "", "level": "3"}),
        (":7", {"question": "q4", "answer": "", "level": ""}),
    ]
    data = _load(tmp_path / name, eval_fraction=0.0)
    assert [q.answer for q in data.questions["train"]] == ["007", "24.0"]
    assert "2 without an answer" in data.note


def test_the_same_rows_in_every_kind(tmp_path):
    """JSON Lines, a list, lines in a .json file, and what Python's csv writes."""
    want = [row for _, row in _read(jsonl(tmp_path / "a.jsonl", ROWS))]
    (tmp_path / "list.json").write_bytes(b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=1).encode())
    jsonl(tmp_path / "lines.json", ROWS)
    with open(tmp_path / "a.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    for name in ("list.json", "lines.json", "a.csv"):
        assert [row for _, row in _read(tmp_path / name)] == want
    assert _read(tmp_path / "list.json")[1][0] == ", row 2"


def test_values_that_a_type_for_each_column_would_change(tmp_path):
    """Arrow's reader refuses the first two rows together, and changes the other values."""
    rows = [
        {"answer": 42},
        {"answer": "x"},
        {"answer": "2024-01-05"},
        {"answer": 10**30 + 1},
        {"answer": [{"a": 1}, {"b": None}]},
    ]
    assert [row for _, row in _read(jsonl(tmp_path / "a.jsonl", rows))] == rows


def test_columns_without_a_name_or_with_one_twice(tmp_path):
    """The first as pandas names it; the second is missing, and an error where it is the answer."""
    (tmp_path / "a.csv").write_text(",question,answer,x,x\n0,q,1,2,3\n")
    assert _load(tmp_path / "a.csv").note.endswith("columns not shown: Unnamed: 0, x")
    with pytest.raises(UserError, match=r"a.csv:2: 'x' cannot be read .*several columns"):
        _load(tmp_path / "a.csv", answer_key="x")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "question;answer\nq;1\n", "has one column, 'question;answer': save it"),
        ("a.csv", "question\tanswer\nq\t1\n", r"has one column, .*: save it separated by commas"),
        ("a.csv", "question,answer\n1,2\n3,4,5\n", "a.csv:3 has 3 cells, and the header 2: put"),
        ("a.csv", 'question,answer\n"q,1\nr,2\n', r"a.csv:2 is not CSV \(unexpected end of data\)"),
        ("a.csv", 'question,answer\n"say "a" b",1\n', "a.csv:2 is not CSV .*write a quote in them"),
        ("a.csv", "question,answer\n\xe9,1\n", "a.csv:2 is not CSV .*0xe9.*save it as UTF-8"),
        ("a.csv", 'question,answer\n"' + 3000 * (8000 * "a" + "\n"), "a.csv:2 is not CSV .*limit"),
        ("a.csv", "question,answer\n" + 2**25 * "a", "a.csv:2 has more than 16,777,216 bytes"),
        ("a.csv", "question,answer\n", "has no rows"),
        (
            "a.json",
            '{"data": [{"question": "q", "answer": 1}]}',
            "1: no column .*; the row has data",
        ),
        ("a.json", '{\n"data": []}', "a.json:1 is not JSON .*a line, .* or .* a list of objects"),
        ("a.json", "[1, 2]", "a.json, row 1 is int; write one object a line"),
        ("a.json", '[{"question": "q"},', "a.json is not JSON .*write one object a line"),
        ("a.json", '[{"question": "\xe9"}]', "a.json is not JSON .*0xe9.*: write .* in UTF-8"),
        ("a.json", "[" * 200_000, "a.json is not JSON .*nested too deeply"),
        ("a.json", "[]", "has no rows"),
    ],
)
def test_what_is_not_read_is_one_sentence(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message) as caught:
        _load(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "read", "unread"),
    [
        (["train.csv", "test.csv", "notes.json"], "csv", "; not read: notes.json"),
        (["train.json", "test.json", "dataset_infos.json"], "json", ""),
    ],
)
def test_directories(names, read, unread, tmp_path):
    """CSV where there is neither JSONL nor parquet, else JSON; not what `datasets` says of them."""
    for number, name in enumerate(names):
        rows = ROWS[20 * number : 20 * (number + 1)]
        if name.endswith(".csv"):
            lines = (f"{row['question']},{number}" for row in rows)
            (tmp_path / name).write_text("\n".join(["question,answer", *lines]))
        else:
            (tmp_path / name).write_text(json.dumps(rows))
    data = _load(tmp_path)
    assert [len(data.questions[split]) for split in ("train", "eval")] == [20, 20]
    assert data.note.endswith(f"(its split 'test'){unread}")
