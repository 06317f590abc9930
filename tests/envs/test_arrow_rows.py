"""Columns of every type of Arrow: what nobody asked for ends no run, what is needed is named."""

from __future__ import annotations

import datetime
import decimal
import json
import pathlib
import struct

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest
from data_files import env

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.envs import arrow_rows, load_questions


def _array(type_: pa.DataType, values: list[int]) -> pa.Array:
    return pa.array(values, pa.int64()).view(type_)


def _texts(*values: bytes) -> pa.Array:
    """An array of texts, whatever their bytes."""
    return pa.array(values, pa.binary()).view(pa.string())


_BAD = _texts(b"\xff\xfe", b"x")
_NS = _array(pa.timestamp("ns"), [1_700_000_000_123_456_789, 0])
_F32 = pa.array([0.1, 2.0], pa.float32())
_TIME = datetime.datetime(2023, 11, 14, 22, 13, 20, 123456)
# Column -> what the reward's rows have of it; None where the first row lacks it.
COLUMNS: dict[str, tuple[pa.Array, object]] = {
    "ns": (_NS, _TIME),
    "duration": (_array(pa.duration("ns"), [123_456_789, 0]), datetime.timedelta(0, 0, 123_456)),
    "time": (_array(pa.time64("ns"), [123_456_789, 0]), datetime.time(0, 0, 0, 123_456)),
    "bad": (_BAD, None),
    "bad dictionary": (_BAD.dictionary_encode(), None),
    "far": (_array(pa.timestamp("s"), [10**15, 0]), None),
    "far day": (pa.array([10**8, 0], pa.int32()).view(pa.date32()), None),
    "long": (_array(pa.duration("s"), [2**60, 0]), None),
    "zone": (_array(pa.timestamp("s", tz="Mars/Phobos"), [1, 0]), None),
    "float": (_F32, 0.1),
    "half": (pa.array([0.1, 2.0], pa.float16()), 0.1),
    "list": (pa.array([[0.1], []], pa.list_(pa.float32())), [0.1]),
    "fixed": (pa.array([[0.1, 1], [0, 0]], pa.list_(pa.float32(), 2)), [0.1, 1]),
    "struct": (pa.StructArray.from_arrays([_NS, _F32], ["t", "f"]), {"t": _TIME, "f": 0.1}),
    "structs": (pa.array([None, {"a": [0.5]}], pa.struct({"a": pa.list_(pa.float32())})), None),
    "bad struct": (pa.StructArray.from_arrays([_NS, _BAD], ["t", "bad"]), None),
    "bad structs": (
        pa.ListArray.from_arrays([0, 1, 2], pa.StructArray.from_arrays([_BAD], ["a"])),
        None,
    ),
    "views of floats": (pa.array([[0.1], []], pa.list_view(pa.float32())), [0.1]),
    "map of times": (pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), _NS), [("a", _TIME)]),
    "map of bad": (pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), _BAD), None),
    "map": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int32())), [("a", 1)]),
    "binary": (pa.array([b"\xff", b""]), b"\xff"),
    "decimal": (pa.array([decimal.Decimal("1.50"), None]), decimal.Decimal("1.50")),
    "null": (pa.nulls(2), None),
    "views": (pa.array(["a", "b"], pa.string_view()), "a"),
    "uint": (pa.array([2**64 - 1, 0], pa.uint64()), 2**64 - 1),
    "extension": (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", "1"])), "{}"),
}


def _load(path: pathlib.Path, **fields):
    section = env(path, eval_fraction=0.0, **fields)
    return load_questions(section, {"train": 1}, 0).questions["train"]


@pytest.fixture(scope="module", params=["parquet", "arrow"])
def path(request, tmp_path_factory) -> pathlib.Path:
    """A file with all of these columns beside question and answer."""
    path = tmp_path_factory.mktemp("columns") / f"a.{request.param}"
    columns = {"question": pa.array(["a", "b"]), "answer": pa.array(["1", "2"])}
    table = pa.table(columns | {name: column for name, (column, _) in COLUMNS.items()})
    if request.param == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table)
    return path


def test_a_type_that_arrow_cannot_cast_is_left_alone(tmp_path):
    columns = {"question": ["a", "b"], "answer": ["1", "2"]}
    columns["runs"] = pyarrow.compute.run_end_encode(_F32)
    table = pa.table(columns)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table)
    assert _load(tmp_path / "a.arrow")[0].row["runs"] == float(_F32[0].as_py())


def test_columns_that_nobody_asked_for(path):
    """They end no run; the rows that a reward gets have what Python can hold."""
    (first, second) = _load(path)
    assert [first.answer, second.answer] == ["1", "2"]
    for name, (_, expected) in COLUMNS.items():
        found = first.row.get(name)
        assert found == expected and type(found) is type(expected), name
    assert (second.row["float"], second.row["half"]) == (2.0, 2.0)
    assert second.row["structs"] == {"a": [0.5]}
    # A column of an Arrow file is sound as a whole, or not read.
    assert second.row.get("bad") == ("x" if path.suffix == ".parquet" else None)


_FLOATS = pa.list_(pa.float32())


@pytest.mark.parametrize(
    "array",
    [
        pa.array([[1, 2], None, [3, 4]], pa.list_(pa.float32(), 2)),
        pa.array([[1], None, [], [3, 4]], pa.large_list(pa.float32())),
        pa.array([[1], None, [2, 3]], pa.list_view(pa.int8())),
        pa.array([{"a": [1.5]}, None, {"a": None}], pa.struct({"a": _FLOATS})),
        pa.array([[{"a": 1}], None, [None, {"a": 2}]]),
        pa.array([[("a", [1.5])], None, []], pa.map_(pa.string(), _FLOATS)),
        pa.array([["x", "y"], None], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        pa.array([{}, None], pa.struct([])),
    ],
    ids=range(8),
)
def test_lists_and_structs_with_gaps(array):
    """Also parts of an array, whose offsets do not begin at 0."""
    for part in (array, array.slice(1), array.slice(1, 1)):
        assert arrow_rows._converted(part) == part.to_pylist()


@pytest.mark.parametrize("name", ["bad", "far", "far day", "long", "zone", "bad dictionary"])
def test_a_needed_column(name, path):
    """Question or answer that cannot be read is named with its row."""
    for field in ("answer_key", "question_key"):
        with pytest.raises(UserError, match=rf"a\.\w+, row 1: '{name}' cannot be read \(\w+"):
            _load(path, **{field: name})


@pytest.mark.parametrize(
    ("name", "answer"), [("float", "0.1"), ("half", "0.1"), ("decimal", "1.5"), ("uint", 2**64 - 1)]
)
def test_numbers_as_answers(name, answer, path):
    assert _load(path, answer_key=name)[0].answer == str(answer)


def test_a_part_of_a_column(tmp_path):
    """A struct is read as a whole: it is named where a part of it is needed."""
    struct = pa.StructArray.from_arrays([_BAD, pa.array(["1", "2"])], ["style", "ground_truth"])
    table = pa.table({"prompt": ["a", "b"], "reward_model": struct})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"row 1: 'reward_model.ground_truth' cannot be read"):
        _load(tmp_path / "a.parquet")
    (first, second) = _load(tmp_path / "a.parquet", answer_key="-")
    assert "reward_model" not in first.row
    assert second.row["reward_model"] == {"style": "x", "ground_truth": "2"}


def test_two_columns_of_one_name(tmp_path):
    """They end a run only where they are needed."""
    for name in ("answer", "other"):
        table = pa.table([["a"], ["1"], ["2"], ["3"]], names=["question", "answer", name, name])
        pa.parquet.write_table(table, tmp_path / f"{name}.parquet")
    (question,) = _load(tmp_path / "other.parquet")
    assert question.row == {"question": "a", "answer": "1"}
    with pytest.raises(UserError, match=r"'answer' cannot be read \(the file has several columns"):
        _load(tmp_path / "answer.parquet")


def test_whole_numbers_that_pandas_made_floats(tmp_path):
    table = pa.table({"question": ["a", "b", "c"], "answer": pa.array([2.0, 4.0, None])})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    assert [q.answer for q in _load(tmp_path / "a.parquet")] == ["2", "4"]


def test_a_damaged_arrow_file_is_read_within_its_bounds(tmp_path):
    """An offset that leads out of its buffer: the column is not read, and no memory beside it."""
    path = tmp_path / "a.arrow"
    table = pa.table({"question": [str(i) for i in range(50)], "answer": ["8 letters"] * 50})
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    content = path.read_bytes()
    offsets = struct.pack("<3i", 81, 90, 99)
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, struct.pack("<3i", 81, 2**31 - 1, 99)))
    with pytest.raises(UserError, match="row 1: 'answer' cannot be read"):
        _load(path)


def test_rows_go_to_workers(path):
    """They can be written as a reward's worker gets them, and hold nothing of Arrow's."""
    assert json.dumps([dict(q.row) for q in _load(path)], default=str)
    assert "Unreadable" not in repr([q.row for q in _load(path)])
