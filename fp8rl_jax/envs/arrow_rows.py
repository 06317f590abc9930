"""Reads the rows of parquet and Arrow files.

A value that Python cannot hold (a year after 9999, a text that is not UTF-8, a list or struct with
one) becomes an `Unreadable`: an error in a question or an answer, else left out of the row that a
reward gets. So a column that no question needs cannot stop a run.

Python's types do not depend on pandas being installed. Times are cut to microseconds, as Python has
them. A float32 or float16 becomes the float64 with the same shortest decimal: 0.1, not
0.10000000149011612.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

from fp8rl_jax.base.errors import raised, refused
from fp8rl_jax.envs.rows import TWICE, Rows, Unreadable

_BATCH = 1024  # rows
PARQUET = ".parquet"


def read(path: pathlib.Path) -> Rows:
    """Yields the rows of a parquet file, or of an Arrow stream, each with its place.

    Raises:
      UserError: the file is damaged.
    """
    numbers = itertools.count(1)
    is_parquet = path.name.lower().endswith(PARQUET)
    with refused(f"{path} cannot be read", "save the data anew"):
        for batch in (_of_parquet if is_parquet else _of_stream)(path):
            names = batch.schema.names
            columns = [
                [TWICE] * batch.num_rows if names.count(name) > 1 else _values(column, is_parquet)
                for name, column in zip(names, batch.columns, strict=True)
            ]
            for row in zip(*columns, strict=True):
                yield f"{path}, row {next(numbers)}", dict(zip(names, row, strict=True))


def _of_parquet(path: pathlib.Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_BATCH)


def _of_stream(path: pathlib.Path) -> Iterator[Any]:
    import pyarrow as pa

    with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
        for batch in stream:
            yield from (batch.slice(i, _BATCH) for i in range(0, batch.num_rows, _BATCH))


def _values(column: Any, trusted: bool) -> list[Any]:
    """Converts the values of a column to Python types, or `Unreadable`. `trusted`: its buffers come
    from the parquet reader, hence are valid; Arrow files hold raw buffers, which could be read out
    of bounds."""
    try:
        if not trusted:
            column.validate(full=True)
    except Exception as error:  # damaged, or a text is not UTF-8
        return [Unreadable(raised(error))] * len(column)
    try:
        return _converted(column)
    except Exception:  # conversions to Python's types raise many types
        return [_value(column.slice(index, 1)) for index in range(len(column))]


def _value(one: Any) -> Any:
    """Converts an array of one value."""
    try:
        return _converted(one)[0]
    except Exception as error:
        return Unreadable(raised(error))


def _converted(array: Any) -> list[Any]:
    """Converts an array to Python types; raises an exception if Python cannot hold one value."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_dictionary(kind):
        return _converted(array.dictionary_decode())
    if isinstance(kind, pa.BaseExtensionType):
        return _converted(array.storage)
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        float_ = kind.to_pandas_dtype()  # numpy's, which writes the shortest decimal
        return [None if x is None else float(str(float_(x))) for x in array.to_pylist()]
    if getattr(kind, "unit", "") == "ns":
        return array.cast(_in_microseconds(kind), safe=False).to_pylist()
    if pa.types.is_struct(kind):
        return _structs(array)
    if pa.types.is_nested(kind) and hasattr(array, "flatten"):
        return _lists(array)
    return array.to_pylist()


def _in_microseconds(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")


def _structs(array: Any) -> list[Any]:
    names = [field.name for field in array.type]
    if len({*names}) < len(names):
        raise ValueError("it has several parts of one name")
    parts = [_converted(part) for part in array.flatten()]
    return [
        {name: part[index] for name, part in zip(names, parts, strict=True)} if valid else None
        for index, valid in enumerate(array.is_valid().to_pylist())
    ]


def _lists(array: Any) -> list[Any]:
    """Converts an array of lists; a map becomes a list of pairs, as in Arrow."""
    import pyarrow as pa
    import pyarrow.compute

    kind = array.type
    if pa.types.is_map(kind):
        array = array.cast(pa.list_(pa.struct([kind.key_field, kind.item_field])))
    items = iter(_converted(array.flatten()))
    if pa.types.is_map(kind):
        items = (tuple(item.values()) for item in items)
    lengths = pa.compute.list_value_length(array).to_pylist()
    return [None if length is None else [*itertools.islice(items, length)] for length in lengths]
