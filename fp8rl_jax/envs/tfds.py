"""Reads prepared data sets of tensorflow-datasets from array_record files, without TensorFlow.

They are found by their directories, DATA_DIR/NAME[/CONFIG]/VERSION, without importing a library.
`tfds_prepare` makes them.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl_jax.base.errors import UserError, raised, refused, refused_by_system
from fp8rl_jax.base.json_file import check_regular, parse_json, read_json
from fp8rl_jax.envs.rows import Rows

FORMAT = "array_record"
JSON_COLUMNS = "fp8rl_json_columns"  # key of the metadata: columns that are stored as JSON
_NAME = re.compile(
    r"(?P<name>[a-z][a-z0-9_]*)(/(?P<config>[\w.+-]+))?(:(?P<version>\d+\.\d+\.\d+))?"
)


def all_prepared(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns {NAME or NAME/CONFIG: directory of the newest version} for data sets in `root`."""
    newest: dict[str, pathlib.Path] = {}
    if not os.path.isdir(root):  # False for an impossible name, too
        return newest
    for depth in ("*/*", "*/*/*"):
        for info in root.glob(f"{depth}/dataset_info.json"):
            name = info.parent.parent.relative_to(root).as_posix()
            if _version(info.parent) > _version(newest.get(name)):
                newest[name] = info.parent
    return newest


def _version(directory: pathlib.Path | None) -> tuple[int, ...]:
    """Returns (1, 0, 0) for '.../1.0.0'; () for any other name."""
    parts = directory.name.split(".") if directory else [""]
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def is_prepared(directory: pathlib.Path) -> bool:
    """Returns whether this is the directory of a version of a prepared data set."""
    return all(os.path.isfile(directory / name) for name in ("dataset_info.json", "features.json"))


def find(name: str, root: pathlib.Path) -> pathlib.Path | None:
    """Returns the directory of a prepared data set; None if there is none.

    Raises:
      UserError: the name is malformed, or has no config where there are several.
    """
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise UserError(f"'tfds:{name}' is not understood; write tfds:NAME[/CONFIG]")
    plain, config, version = parts.group("name", "config", "version")
    there = all_prepared(root)
    names = [n for n in there if n == plain or n.startswith(f"{plain}/")]
    if config is not None:
        names = [n for n in names if n == f"{plain}/{config}"]
    if len(names) > 1:
        raise UserError(f"{root} has {', '.join(sorted(names))}: name one, such as tfds:{names[0]}")
    if not names:
        return None
    directory = there[names[0]]
    if version is not None:
        directory = directory.with_name(version)
        return directory if is_prepared(directory) else None
    return directory


def check_format(directory: pathlib.Path) -> None:
    """Raises UserError if a prepared data set needs TensorFlow, or is damaged."""
    try:
        form = read_json(directory / "dataset_info.json").get("fileFormat")
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{directory}/dataset_info.json is damaged: prepare it again") from None
    for path in sorted(directory.iterdir()):
        with refused_by_system(f"{path} cannot be read", "prepare it again"):
            if not os.path.isdir(path):
                check_regular(path)  # tensorflow-datasets would block on a FIFO
    if form != FORMAT:
        raise UserError(
            f"{directory} is prepared as {form or 'tfrecord'}, which needs TensorFlow: "
            "prepare it as array_record in another directory (`fp8rl data prepare NAME --out=DIR`) "
            "and name that by TFDS_DATA_DIR"
        )


def read(directory: pathlib.Path) -> dict[str, Rows]:
    """Returns {split: rows} of a prepared data set, with bytes decoded to texts.

    Raises:
      UserError: as `check_format`, or a row cannot be read.
    """
    check_format(directory)
    import tensorflow_datasets as tfds

    with refused(f"{directory} cannot be read", "prepare it again"):
        builder = tfds.builder_from_directory(str(directory))
        encoded = list((builder.info.metadata or {}).get(JSON_COLUMNS, ()))
        splits = list(builder.info.splits)
    return {split: _rows(builder, split, encoded) for split in splits}


def _rows(builder: Any, split: str, encoded: Sequence[str]) -> Rows:
    place = f"{builder.data_dir} {split}"
    try:
        source = builder.as_data_source(split)
        for number in range(len(source)):
            place = f"{builder.data_dir} {split}, row {number + 1}"
            row = _plain(source[number])
            yield place, {k: parse_json(v) if k in encoded else v for k, v in row.items()}
    except Exception as error:  # a damaged file: array_record raises many types
        raise UserError(f"{place} cannot be read ({raised(error)}): prepare it again") from None


def _plain(value: Any) -> Any:
    """Converts a value to Python types: bytes to a text, a float32 to the float64 with the same
    shortest decimal."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value  # an error where a text is needed
    if isinstance(value, Mapping):
        return {name: _plain(v) for name, v in value.items()}
    if hasattr(value, "tolist"):
        if str(getattr(value, "dtype", "")) in ("float16", "float32"):
            value = value.astype(str).astype(float)
        value = value.tolist()
        return _plain(value) if isinstance(value, bytes | list) else value
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value
