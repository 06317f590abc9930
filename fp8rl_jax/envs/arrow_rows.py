"""Reads the rows of parquet and Arrow files.

A value that Python cannot hold (a year after 9999, a text that is not UTF-8, two columns of one
name) becomes an `Unreadable`: an error in a question or an answer, else left out of the row that a
reward gets. So a column that no question needs cannot stop a run.

Python's types do not depend on pandas being installed. Times are cut to microseconds, as Python has
them. A float32 or float16 becomes the float64 with the same shortest decimal: 0.1, not
0.10000000149011612.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from fp8rl_jax.base.errors import raised, refused
from fp8rl_jax.envs.rows import Rows, Unreadable, marked

_BATCH = 1024  # rows
PARQUET = ".parquet"


def read(path: pathlib.Path) -> Rows:
    """Yields the rows of a parquet file, or of an Arrow stream, each with its place.

    Raises:
      UserError: the file is damaged.
    """
    numbers, parquet = itertools.count(1), _is_parquet(path)
    with refused(f"{path} cannot be read", "save the data anew"):
        for batch in _batches(path):
            for row in _rows(batch, trusted=parquet):
                yield f"{path}, row {next(numbers)}", row


def _is_parquet(path: pathlib.Path) -> bool:
    return path.name.lower().endswith(PARQUET)


def _batches(path: pathlib.Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    if _is_parquet(path):
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=_BATCH)
        return
    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        for batch in stream:
            yield from (batch.slice(i, _BATCH) for i in range(0, batch.num_rows, _BATCH))


def _rows(batch: Any, trusted: bool) -> list[dict[str, Any]]:
    """Returns the rows of a pyarrow record batch. `trusted`: its buffers come from the parquet
    reader, hence are valid; Arrow files hold raw buffers, which could be read out of bounds."""
    names = batch.schema.names
    twice = [Unreadable("the file has several columns of that name")] * batch.num_rows
    columns = [
        twice if names.count(name) > 1 else _values(batch.column(index), trusted)
        for index, name in enumerate(names)
    ]
    return [marked(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _values(column: Any, trusted: bool) -> list[Any]:
    """Converts the values of a column to Python types, or `Unreadable`."""
    try:
        if not trusted:
            _with_bytes(column).validate(full=True)
    except Exception as error:  # damaged, or a nested text is not UTF-8
        return [Unreadable(raised(error))] * len(column)
    try:
        return _cast(column).to_pylist()
    except Exception:  # conversions to Python's types raise many types
        return [_value(scalar) for scalar in column]


def _with_bytes(column: Any) -> Any:
    """Views a column of texts as bytes, since each text is checked for UTF-8 separately."""
    import pyarrow as pa

    if pa.types.is_string(column.type):
        return column.view(pa.binary())
    return column.view(pa.large_binary()) if pa.types.is_large_string(column.type) else column


def _cast(column: Any) -> Any:
    """Casts the column to types that Python has; raises where Arrow cannot."""
    import pyarrow as pa

    def with_floats(float32: Any) -> Any:
        def leaf(kind: Any) -> Any:
            if pa.types.is_float16(kind):
                raise NotImplementedError("Arrow has no shortest decimal of it")
            return float32 if pa.types.is_float32(kind) else _micro(kind)

        return _mapped(column.type, leaf)

    # Through text, so that a float32 becomes the float64 with the same shortest decimal.
    texts, plain = with_floats(pa.string()), with_floats(pa.float64())
    if texts != column.type:
        column = column.cast(texts, safe=False)
    return column if plain == texts else column.cast(plain)


def _micro(kind: Any) -> Any:
    """Returns the type with microseconds for nanoseconds."""
    import pyarrow as pa

    if getattr(kind, "unit", "") != "ns":
        return kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")


def _mapped(kind: Any, leaf: Callable[[Any], Any]) -> Any:
    """Applies `leaf` to the primitive types within a type, as far as Arrow can cast them."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_mapped(field.type, leaf)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_mapped(kind.key_type, leaf), _mapped(kind.item_type, leaf))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_mapped(kind.value_type, leaf)))
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = kind.value_field.with_type(_mapped(kind.value_type, leaf))
        return pa.list_(inner, getattr(kind, "list_size", -1))
    # Arrow cannot cast within these kinds.
    view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    if view or pa.types.is_dictionary(kind):
        inner = _mapped(kind.value_type, leaf)
        return kind if inner == kind.value_type else pa.large_list(inner) if view else inner
    return leaf(kind) if pa.types.is_primitive(kind) else kind


def _value(scalar: Any) -> Any:
    """Converts one value; each part that Python cannot hold becomes an `Unreadable`."""
    import numpy as np  # imported late, like pyarrow: reward workers need neither
    import pyarrow as pa

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.ExtensionScalar | pa.DictionaryScalar):
        return _value(scalar.value)
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        if len(set(names)) < len(names):
            return Unreadable("it has several parts of one name")
        return {name: _value(part) for name, part in scalar.items()}
    if pa.types.is_map(kind):
        parts = scalar.values
        return [(_value(key), _value(part)) for key, part in zip(*parts.flatten(), strict=True)]
    if isinstance(scalar, pa.ListScalar):
        return [_value(part) for part in scalar.values]
    try:
        if pa.types.is_float16(kind) or pa.types.is_float32(kind):
            type_ = np.float16 if pa.types.is_float16(kind) else np.float32
            return float(str(type_(scalar.as_py())))
        return scalar.cast(_micro(kind), safe=False).as_py()
    except Exception as error:  # Python's types cannot hold it
        return Unreadable(raised(error))
