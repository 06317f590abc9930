"""Data sets in local files: JSONL, parquet, and directories as Hugging Face's datasets has them.

A directory is laid out as on the Hub (parquet or JSONL files whose names say their split) or as
`save_to_disk` writes it (Arrow files). pyarrow reads both; nothing else is needed.
"""

from __future__ import annotations

import difflib
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Iterator

from fp8rl_jax.envs.rows import Rows
from fp8rl_jax.errors import UserError

# Kinds of files, in the order of preference within a directory.
_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".arrow")
_FORMS = "a .jsonl, .jsonl.gz or .parquet file, or a directory of such files"
_WORDS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test",
    "evaluation": "test", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation",
}  # fmt: skip
_SHARD = re.compile(r"[-_.]?\d+(-of-\d+.*)?$")
_ERRORS = (OSError, EOFError, zlib.error)


def looks_like_a_path(name: str) -> bool:
    """Whether the text is the name of a file or a directory, there or not."""
    return "/" in name or name.startswith((".", "~")) or _suffix(name) != ""


def _suffix(name: str) -> str:
    return next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), "")


def find(name: str) -> dict[str, list[pathlib.Path]]:
    """{split: files} of a file or a directory; a single file is the split 'train'.

    Raises:
      UserError: it does not exist, or holds no data, or several data sets.
    """
    path = pathlib.Path(name).expanduser()
    if path.is_dir():
        return _find_in_directory(path)
    if not path.exists():
        there = [str(p) for p in path.parent.glob("*")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), there, 1, 0.8)
        hint = f"did you mean {near[0]}?" if near else f"name {_FORMS}"
        raise UserError(f"{name} does not exist; {hint}")
    if not _suffix(path.name):
        raise UserError(f"{name} is of a kind that is not known; name {_FORMS}")
    return {"train": [path]}


def split_named(name: str) -> str | None:
    """The split that a file or a directory is named after, such as 'test-00000-of-00001'."""
    words = re.split("[^a-z]+", name.lower())
    return next((_WORDS[word] for word in words if word in _WORDS), None)


def _find_in_directory(root: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    saved = root / "dataset_dict.json"
    if saved.exists():
        try:
            names = json.loads(saved.read_bytes())["splits"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{saved} is damaged: save the data set again") from None
        return {name: _arrow_files(root / name) for name in names}
    if (root / "state.json").exists():
        return {"train": _arrow_files(root)}
    there = sorted(p for depth in ("*", "*/*", "*/*/*") for p in root.glob(depth))
    found = [p for p in there if p.is_file() and "/." not in f"/{_in(p, root)}"]
    for suffixes in (_SUFFIXES[:1], _SUFFIXES[1:3]):
        if files := [p for p in found if p.name.endswith(suffixes)]:
            return _by_split(root, files)
    raise UserError(
        f"the directory {root} holds no data (parquet or JSONL files, or what "
        f"save_to_disk writes); name {_FORMS}"
    )


def _in(path: pathlib.Path, root: pathlib.Path) -> str:
    return path.relative_to(root).as_posix()


def _by_split(root: pathlib.Path, files: list[pathlib.Path]) -> dict[str, list[pathlib.Path]]:
    splits: dict[str, list[pathlib.Path]] = {}
    names: dict[str, set[str]] = {}
    for path in files:
        folders = _in(path, root).split("/")[:-1]
        stem = path.name.removesuffix(_suffix(path.name))
        split = split_named(stem) or next(filter(None, map(split_named, folders[::-1])), "train")
        splits.setdefault(split, []).append(path)
        names.setdefault(split, set()).add("/".join([*folders, _SHARD.sub("", stem)]))
    for split, different in names.items():
        if len(different) > 1:
            raise UserError(
                f"{root} holds several data sets for the split {split!r} "
                f"({', '.join(sorted(different)[:6])}): name the directory or the file of one"
            )
    return splits


def _arrow_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files of a data set that `save_to_disk` wrote, in their order."""
    try:
        state = json.loads((directory / "state.json").read_bytes())
        return [directory / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{directory / 'state.json'} is missing or damaged: save the data set again"
        ) from None


def read(paths: list[pathlib.Path]) -> Rows:
    """The rows of files, each with its place.

    Raises:
      UserError: a file cannot be read, or a line is no JSON object in UTF-8.
    """
    for path in paths:
        try:
            yield from _read_jsonl(path) if ".jsonl" in path.name else _read_arrow(path)
        except _ERRORS as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path} cannot be read ({reason})") from None


def _read_jsonl(path: pathlib.Path) -> Rows:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{place} is not UTF-8 (byte {error.start + 1} of the line): save it as UTF-8"
                ) from None
            except ValueError as error:
                raise UserError(f"{place} is not JSON ({error}): write one object a line") from None
            if not text:
                continue
            if not isinstance(row, dict):
                raise UserError(f"{place} is {type(row).__name__}; write one object a line")
            yield place, row


def _read_arrow(path: pathlib.Path) -> Rows:
    import pyarrow

    number = 0
    try:
        for batch in _batches(path):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]})") from None


def _batches(path: pathlib.Path) -> Iterator:
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=1024)
        return
    with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        yield from stream
