"""Finds the files of a local data set, and the split of each.

A file is JSONL, a JSON list, CSV (`text_rows`) or parquet (`arrow_rows`). A directory is laid out
as on the Hub (such files, named after splits) or as by `save_to_disk` (Arrow files). Only regular
files are read, and only names within the directory. Links are followed, since Hugging Face's cache
consists of links.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
import zlib
from collections.abc import Iterable
from typing import Any, NoReturn

from fp8rl_jax.base.errors import UserError, did_you_mean, refused_by_system
from fp8rl_jax.base.json_file import check_regular, is_file_name, read_json
from fp8rl_jax.base.paths import expanded
from fp8rl_jax.envs import arrow_rows, text_rows
from fp8rl_jax.envs.rows import Rows, names_of
from fp8rl_jax.envs.splits import HELD_OUT, TRAIN, splits_named

_ARROW = ".arrow"
_TEXTS = (*text_rows.JSONL, *text_rows.CSV, *text_rows.JSON)
_HUB = (arrow_rows.PARQUET, *text_rows.JSONL)  # read in a directory; if it has none, CSV, else JSON
_FORMS = "a .jsonl, .parquet, .csv or .json file, or a directory of such files"
# Kinds of files that may hold data. A note names those that are not read, and any unread file that
# is named after a split.
_OTHER_KINDS = re.compile(
    r"\.(json|ndjson|jsonlines|csv|tsv|txt|xml|arrow|feather|pq|parq|orc|avro|tfrecord|zst|xz|bz2|lz4|"
    r"br|zip|7z|tar|tgz|gz|pkl|pickle|npy|npz|h5|hdf5|pt|db|sqlite|xls|xlsx)\Z"
)
_ABOUT = re.compile(r"(dataset_(dict|infos?)|features|state)\.json")  # metadata
_CACHE = re.compile(r"cache-[0-9a-f]{16}(_\d+_of_\d+)?\.arrow")  # written by `datasets`
_INDICES = ("_indices_data_files", "_indices_files")  # in state.json, by version of `datasets`
_SHARD = re.compile(r"[-_.]?\d+(-of-\d+.*)?$")
_NO_NAME = re.compile(  # a shard's name that names no split: its folder does
    r"(data|part|shard|chunk)?[-_.]?\d+(-of-\d+|-[0-9a-f]{8}-.*)?", re.IGNORECASE
)
# Name of one of several files, up to its suffix; the Hub once put a hash behind it.
_PART = re.compile(r"(.*?)(\d+)-of-(\d+)(-[0-9a-f-]+)?", re.IGNORECASE)
_ANY_NAME = re.compile("data|dataset|part|shard|chunk|file|rows|examples", re.IGNORECASE)
_ONE_WORD = re.compile("[^a-z]*[a-z]+[^a-z]*", re.IGNORECASE)
_MOST_ENTRIES = 100_000  # of a directory
_ERRORS = (OSError, EOFError, zlib.error)


@dataclasses.dataclass(frozen=True)
class Found:
    """The files of a data set.

    Attributes:
      splits: {split: files}.
      named: the held-out split that the user's path is named after; '' for none.
      unread: names of data files in the directory that are not read; for a single file that is
        called 'k-of-n', names of the other n - 1 files.
    """

    splits: dict[str, list[pathlib.Path]]
    named: str = ""
    unread: tuple[str, ...] = ()


def suffix(name: str) -> str:
    """Returns the suffix of a data file's name, such as '.jsonl.gz'; '' for any other name."""
    return next((s for s in (arrow_rows.PARQUET, *_TEXTS, _ARROW) if name.lower().endswith(s)), "")


def find(name: str) -> Found:
    """Finds the files of a path; a single file is the split 'train'.

    Raises:
      UserError: the path does not exist, holds no data, or holds several data sets.
    """
    path = pathlib.Path(expanded(name, "the path", "dataset"))
    if os.path.isdir(path):
        files = _find_in_directory(path)
    elif not os.path.exists(path):
        hint = did_you_mean(str(path)[-300:], _beside(path), f"name {_FORMS}", cutoff=0.8)
        raise UserError(f"{name} does not exist; {hint}")
    elif not suffix(path.name):
        raise UserError(f"{name} is of a kind that is not known; name {_FORMS}")
    else:
        stem = _stem(path)
        folder = path.parent.name
        # A folder of several words may be a project, such as my_test_of_x.
        alone = _ANY_NAME.fullmatch(stem) and _ONE_WORD.fullmatch(folder)
        words = folder if alone or _NO_NAME.fullmatch(stem) else stem
        files = Found({TRAIN: [path]}, _held_out_name(words), _missing_parts([path]))
    for file in itertools.chain(*files.splits.values()):
        with refused_by_system(f"{file} cannot be read"):
            check_regular(file)
    return files


def _beside(path: pathlib.Path) -> list[str]:
    """Lists at most 1,000 entries of the directory that a path is in."""
    try:
        with os.scandir(path.parent) as entries:
            return [str(path.parent / entry.name) for entry in itertools.islice(entries, 1000)]
    except (OSError, ValueError):
        return []


def _stem(path: pathlib.Path) -> str:
    return path.name[: -len(suffix(path.name))]


def _held_out_name(name: str) -> str:
    """Returns 'test' or 'validation' if the name has that word and not 'train'; else ''."""
    words = splits_named(name)
    return next((word for word in words if word in HELD_OUT and TRAIN not in words), "")


def _unreadable(path: pathlib.Path, error: BaseException) -> UserError:
    return UserError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})")


def _find_in_directory(root: pathlib.Path) -> Found:
    files = _walk(root)
    data = [path for path in files if path.name.lower().endswith(_HUB)]
    saved = root / "dataset_dict.json"
    root_name = os.path.basename(os.path.abspath(root))
    if os.path.lexists(saved) or os.path.lexists(root / "state.json"):
        if data:
            raise UserError(
                f"{root} holds what save_to_disk writes, and "
                f"{names_of(_in(path, root) for path in data)}: name the one that is meant, or "
                "move the other elsewhere"
            )
        named = ""
        if os.path.lexists(saved):
            splits = {split: _arrow_files(root / split)[0] for split in _saved_splits(saved)}
        else:
            paths, split = _arrow_files(root)
            if splits_named(root_name) or not _held_out_name(split):
                split = TRAIN
                named = _held_out_name(root_name)
            splits = {split: paths}
        return Found(splits, named, _unread(root, files, itertools.chain(*splits.values())))
    for kind in () if data else (text_rows.CSV, text_rows.JSON):
        data = data or [
            path
            for path in files
            if path.name.lower().endswith(kind) and not _ABOUT.fullmatch(path.name)
        ]
    unread = _unread(root, files, data)
    if data:
        splits, said = _by_split(root, data)
        if missing := _missing_parts(data):
            raise UserError(
                f"{root} lacks {names_of(missing)}, by the count in the names of other files: "
                "download it again, or name one file itself"
            )
        return Found(splits, "" if said else _held_out_name(root_name), unread)
    raise UserError(
        f"the directory {root} holds no data (parquet, JSONL, CSV or JSON files, or what "
        f"save_to_disk writes){', but ' + names_of(unread) if unread else ''}; name {_FORMS}"
    )


def _missing_parts(paths: Iterable[pathlib.Path]) -> tuple[str, ...]:
    """Returns the names of files without which others, called 'k-of-n', are not all n of them."""
    numbers: dict[tuple[pathlib.Path, str, str, str], dict[int, str]] = {}
    for path in paths:
        if part := _PART.fullmatch(_stem(path)):
            key = path.parent, part[1], part[3], suffix(path.name)
            numbers.setdefault(key, {})[int(part[2])] = part[2]
    missing: list[str] = []
    for (_, begin, count, end), there in sorted(numbers.items()):
        first = int(0 not in there and int(count) in there)
        wanted = range(first, first + min(int(count), _MOST_ENTRIES))
        width = len(min(there.values()))
        missing += [f"{begin}{k:0{width}}-of-{count}{end}" for k in wanted if k not in there]
    return tuple(missing)


def _unread(
    root: pathlib.Path, files: Iterable[pathlib.Path], read: Iterable[pathlib.Path]
) -> tuple[str, ...]:
    """Returns the names of files that are not read and may hold data: files of known kinds, and any
    file with the name of a split in its path."""
    names = [_in(path, root) for path in sorted({*files} - {*read})]
    return tuple(
        name
        for name in names
        if (_OTHER_KINDS.search(name.lower()) or any(map(splits_named, name.split("/"))))
        and not (_ABOUT.fullmatch(last := os.path.basename(name)) or _CACHE.fullmatch(last))
    )


def _walk(root: pathlib.Path) -> list[pathlib.Path]:
    """Lists all entries below a directory except directories and hidden entries, sorted."""
    paths: list[pathlib.Path] = []
    seen: set[tuple[int, int]] = set()
    entries = 0
    try:
        for folder, folders, files in os.walk(root, onerror=_raise, followlinks=True):
            status = os.stat(folder)
            entries += len(folders) + len(files)
            if entries > _MOST_ENTRIES:
                raise UserError(
                    f"{root} holds more than {_MOST_ENTRIES:,} files: name the directory of one "
                    "data set"
                )
            if (status.st_dev, status.st_ino) in seen:  # a cycle of links
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths += [pathlib.Path(folder, name) for name in files if not name.startswith(".")]
    except OSError as error:
        raise _unreadable(pathlib.Path(error.filename or root), error) from None
    return sorted(paths)


def _raise(error: OSError) -> NoReturn:
    raise error


def _in(path: pathlib.Path, root: pathlib.Path) -> str:
    return path.relative_to(root).as_posix()


def _by_split(
    root: pathlib.Path, files: list[pathlib.Path]
) -> tuple[dict[str, list[pathlib.Path]], bool]:
    """Returns {split: files}, and whether any file or folder is named after a split.

    Raises:
      UserError: a split has files of several data sets, or a file has the names of two splits.
    """
    splits: dict[str, list[pathlib.Path]] = {}
    names: dict[str, set[str]] = {}
    said = False
    for path in files:
        *folders, _ = _in(path, root).split("/")
        words = next(filter(None, map(splits_named, [_stem(path), *folders[::-1]])), [])
        if len(words) > 1:
            raise UserError(
                f"{_in(path, root)} in {root} is named after the splits {' and '.join(words)}: "
                "name the file itself, or give it another name"
            )
        said = said or bool(words)
        split = words[0] if words else TRAIN
        splits.setdefault(split, []).append(path)
        name = "/".join([*folders, _SHARD.sub("", _stem(path))])
        names.setdefault(split, set()).add(name + suffix(path.name))
    for split, different in names.items():
        if len(different) > 1:
            plain = {name.removesuffix(suffix(name)) for name in different}
            several = sorted(plain if len(plain) == len(different) else different)
            raise UserError(
                f"{root} holds several data sets for the split {split!r} ({names_of(several)}): "
                "name the directory or the file of one"
            )
    return splits, said


def _saved_splits(path: pathlib.Path) -> list[str]:
    """Returns the names of the splits in dataset_dict.json; each is a directory next to it."""
    names = _of_json(path, "splits")
    if not (isinstance(names, list) and names and all(map(is_file_name, names))):
        raise UserError(f"{path} is damaged: save the data set again")
    return names


def _arrow_files(directory: pathlib.Path) -> tuple[list[pathlib.Path], str]:
    """Returns the files that `save_to_disk` wrote, in order, and the name of their split."""
    state = directory / "state.json"
    files = _of_json(state, "_data_files")
    if any(_of_json(state, key) for key in _INDICES):
        raise UserError(
            f"{directory} is a selection or another order of the rows in its files (its state.json "
            "names indices), which is not read: save it again after flatten_indices()"
        )
    try:
        names = [file["filename"] for file in files]
        if not all(map(is_file_name, names)):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{state} is missing or damaged: save the data set again") from None
    split = _of_json(state, "_split")
    return [directory / name for name in names], split if isinstance(split, str) else ""


def _of_json(path: pathlib.Path, key: str) -> Any:
    """Returns the value of a key in a JSON file; None if the key is missing."""
    try:
        return read_json(path).get(key)
    except (OSError, ValueError, AttributeError):
        raise UserError(f"{path} is missing or damaged: save the data set again") from None


def read(paths: list[pathlib.Path]) -> Rows:
    """Yields the rows of files, each with its place.

    Raises:
      UserError: a file cannot be read, or a row is not what the file's name promises.
    """
    for path in paths:
        try:
            check_regular(path)
            yield from (text_rows if suffix(path.name) in _TEXTS else arrow_rows).read(path)
        except _ERRORS as error:
            raise _unreadable(path, error) from None
