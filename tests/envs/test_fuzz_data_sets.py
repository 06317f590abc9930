"""No data set, whatever its bytes, is a traceback or a hang: see helpers/fuzz.py."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import pathlib
import pickle
import random
import shutil

import pyarrow as pa
import pyarrow.parquet
import pytest
from data_files import ROWS, arrow, env, jsonl, parquet, trl, verl
from fuzz import FEW, MANY, fuzz
from marks import slow
from test_arrow_rows import COLUMNS

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import ByteTokenizer, ChatFormat, ChatTemplate, encode_prompt
from fp8rl_jax.envs import check_source, load_questions

_CHAT = ChatFormat(
    ChatTemplate("{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools }}tool_calls", {}, "")
)
_FEW_ROWS = [
    *ROWS[:3],
    verl(ROWS[3]),
    trl(ROWS[4]),
    {"instruction": "a", "input": "b", "output": 1e400},
    {"question": "\0", "answer": 10**400, "x": [[{"a": None}]], "context": "\u2028"},
    {
        "prompt": [{"role": "user", "content": "a", "name": "b"}],
        "answer": ["\U0001f99c"],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
]


def _use(path: pathlib.Path) -> None:
    """All that a run does with a data set, but for the model."""
    for fields in ({"question_key": "prompt", "answer_key": "x"}, {"eval_task": str(path)}):
        with contextlib.suppress(UserError):
            _load(path, **fields)
    _load(path)


def _load(path: pathlib.Path, **fields) -> None:
    section = env(path, **fields)
    check_source(section)
    fits = lambda split, q: len(encode_prompt(q.prompt, ByteTokenizer(), _CHAT)) < 500
    data = load_questions(section, {"sft": 5, "train": 1, "eval": 9}, 0, fits)
    data.note.encode()
    pickle.dumps([q.row for part in data.questions.values() for q in part])


def _jsonl(rows: list, end: str = "\n") -> bytes:
    return b"".join((json.dumps(row) + end).encode() for row in rows)


_JSONL = [
    *(_jsonl([row]) for row in _FEW_ROWS),
    _jsonl(ROWS[:4], "\r\n"),
    b"\xef\xbb\xbf" + _jsonl(ROWS),
    b'{"question": "a", "question": "b", "answer": "1"}\n',
    b'{"question": "\\ud800", "answer": 1}',
    b'{"question": "a", "answer": NaN}\n{"question": "b", "answer": -Infinity}\n\n\n',
    b'{"question": "a", "answer": "b", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}\n",
    _jsonl(ROWS[:2]).decode().encode("utf-16"),
    b'{"question": "a", "answer": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("count", [FEW, slow(MANY)])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz"])
def test_jsonl(suffix, count, tmp_path):
    """Plain and compressed; of the latter the bytes themselves and what is inside of them."""
    path = tmp_path / f"a.{suffix}"
    good = _JSONL if suffix == "jsonl" else [*_JSONL, *map(gzip.compress, _JSONL[:9])]

    def read(content: bytes) -> None:
        inside = suffix == "jsonl.gz" and not content.startswith(b"\x1f\x8b")
        path.write_bytes(gzip.compress(content, 1) if inside else content)
        _use(path)

    fuzz(suffix, read, good, count)


_CSV = [
    b'question,answer,x\r\n"a ""b"",\nc",1,\n\n2,3\n',
    b"\xef\xbb\xbfquestion,answer\na,007\nb,1e400\n",
    b"question,question,answer\n1,2,3\n",
    b"question;answer\n1;2\n",
    b'question,answer\n"a,1\n',
    b"question\tanswer\n",
    b"question,answer\r1,2\r3,4\r",
    b'"",""\n"\0",1\n',
]
_JSON = [json.dumps(_FEW_ROWS).encode(), b'{"data": [{"question": "a"}]}', _JSONL[8], _JSONL[9]]


@pytest.mark.parametrize("count", [FEW, slow(MANY)])
@pytest.mark.parametrize(("suffix", "good"), [("csv", _CSV), ("json", _JSON)])
def test_csv_and_lists(suffix, good, count, tmp_path):
    path = tmp_path / f"a.{suffix}"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        _use(path)

    fuzz(suffix, read, good, count)


def _tables() -> list[pa.Table]:
    columns = {"question": pa.array(["a", "b"]), "answer": pa.array(["1", "2"])}
    odd = columns | {name: column for name, (column, _) in COLUMNS.items()}
    twice = pa.table([["a"], ["1"], ["2"]], names=["question", "answer", "answer"])
    return [
        pa.Table.from_pylist(ROWS),
        pa.Table.from_pylist(list(map(verl, ROWS))),
        pa.Table.from_pylist(list(map(trl, ROWS[:5]))),
        pa.table(odd),
        twice,
        *(pa.table(columns | {"x": column}) for column, _ in COLUMNS.values()),
    ]


def _as_parquet() -> list[bytes]:
    found = []
    for options in (
        {},
        {"compression": "zstd"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "gzip", "data_page_version": "2.0", "write_page_index": True},
        {"store_schema": False, "write_statistics": False},
    ):
        for table in _tables():
            sink = io.BytesIO()
            try:
                pa.parquet.write_table(table, sink, **options)
            except pa.ArrowNotImplementedError:  # views and others, without a schema
                continue
            found.append(sink.getvalue())
    return found


def _as_stream() -> list[bytes]:
    found = []
    for table in _tables():
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        found.append(sink.getvalue())
    return found


@pytest.mark.parametrize("count", [FEW, slow(MANY)])
@pytest.mark.parametrize(("suffix", "make"), [("parquet", _as_parquet), ("arrow", _as_stream)])
def test_columns(suffix, make, count, tmp_path):
    """Files of every type and encoding."""
    path = tmp_path / f"a.{suffix}"

    def read(content: bytes) -> None:
        path.unlink(missing_ok=True)  # the last one may still be mapped
        path.write_bytes(content)
        _use(path)

    fuzz(suffix, read, make(), count)


# Directories: a tree that a hash of the content draws, with the content in one of its files.

_NAMES = (
    "train.jsonl",
    "test.jsonl",
    "train-00000-of-00002.parquet",
    "test-00000-of-00001.parquet",
    "data.jsonl",
    "train.jsonl.gz",
    "TRAIN.JSONL",
    "val.csv",
    "train-test.jsonl",
    "README.md",
    ".hidden.jsonl",
    "dev/0000.parquet",
    "train/a.jsonl",
    "a/b/c/d/test.jsonl",
    "x" * 255,
    "train.parquet/part-0.parquet",
    "dataset_dict.json",
    "state.json",
    "dataset_info.json",
    "features.json",
    "cafe\u0301\u202e.jsonl",
    "new\nline.jsonl",
    "\udcff.jsonl",
    "-.jsonl",
    "train/state.json",
    "test/state.json",
    "test.csv",
    "train.json",
)
_STATES = (
    b'{"splits": ["train", "test"]}',
    b'{"_data_files": [{"filename": "data-0.arrow"}]}',
    b'{"_data_files": [{"filename": "../train.jsonl"}], "_split": "test"}',
    b'{"splits": [5]}',
    b'{"splits": ["..", "/etc"]}',
    b'{"fileFormat": "array_record", "name": "a"}',
)


def _entry(path: pathlib.Path, content: bytes, rng: random.Random, good: dict[str, bytes]) -> None:
    """One entry of a tree: a file, or what stands in the place of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = rng.randrange(24)
    if kind < 18:
        path.write_bytes(good.get(path.suffix.lower(), b""))
    elif kind == 18:
        path.write_bytes(rng.choice(list(good.values())))
    elif kind == 19:
        path.write_bytes(content)
    elif kind == 20:
        os.mkfifo(path)
    elif kind == 21:
        path.mkdir()
    elif kind == 22:
        targets = ("/dev/zero", "/etc/passwd", "gone", ".", "..", path.name, "../outside.jsonl")
        path.symlink_to(rng.choice(targets))
    else:
        path.write_bytes(rng.choice(_STATES))
        path.chmod(0)


@pytest.mark.parametrize("count", [FEW, slow(MANY)])
def test_directories(count, tmp_path):
    """Names of every kind, and what is no file in the places of files."""
    disk = arrow(tmp_path / "disk", ROWS[:3])
    saved = (disk / "data-00000-of-00001.arrow").read_bytes()
    table = parquet(tmp_path / "a.parquet", ROWS[:3]).read_bytes()
    lines = _jsonl(ROWS[:3])
    good = {".jsonl": lines, ".gz": gzip.compress(lines), ".parquet": table, ".json": _STATES[0]}
    root = tmp_path / "root"
    jsonl(tmp_path / "outside.jsonl", ROWS[:3])

    def read(content: bytes) -> None:
        rng = random.Random(hashlib.sha256(content).digest())
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        for name in rng.sample(_NAMES, rng.choice((1, 1, 2, 2, 3, 5))):
            try:
                _entry(root / name, content, rng, good)
            except (FileExistsError, NotADirectoryError):  # of two names in each other's way
                continue
        if rng.random() < 0.3:
            where = root / rng.choice((".", "train", "test"))
            if not os.path.lexists(where) or where.is_dir():
                where.mkdir(exist_ok=True)
                (where / "data-0.arrow").write_bytes(saved)
        _use(root if rng.random() < 0.9 else root / rng.choice(_NAMES))

    fuzz("directory", read, list(_STATES), count)
