"""Checks the sources that `env.task` names, and reads the rows of data sets.

A source is a generator of reasoning_gym, or a data set: a file, a directory, a prepared or
downloadable data set of tensorflow-datasets, or a user's function that returns rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fp8rl_jax.base import user_code
from fp8rl_jax.base.errors import UserError, raised
from fp8rl_jax.base.json_file import plain
from fp8rl_jax.base.paths import expanded, tfds_home
from fp8rl_jax.envs import files, tfds, tfds_prepare
from fp8rl_jax.envs.rows import Rows
from fp8rl_jax.envs.tasks import check_task

_TFDS = "tfds:"


@dataclasses.dataclass(frozen=True)
class DataSet:
    """The rows of a data set.

    Attributes:
      rows: rows by split, each with its place.
      named: the held-out split that the user's path is named after; '' for none.
      unread: names of data files in the directory that are not read.
      a_function: whether a user's function yields the rows, which may never end.
    """

    rows: dict[str, Rows]
    named: str = ""
    unread: tuple[str, ...] = ()
    a_function: bool = False


def _kind(task: str) -> str:
    """Classifies a name, and looks for a file: 'generated', 'tfds', 'function' or 'path'."""
    if task == tfds_prepare.GSM8K or task.startswith(_TFDS):
        return "tfds"
    if "/" in task or task.startswith((".", "~")) or files.suffix(task):
        return "path"
    if ":" in task:
        return "function"
    if not os.path.exists(task):
        return "generated"
    from reasoning_gym.factory import DATASETS

    return "generated" if task in DATASETS else "path"


def is_generated(task: str) -> bool:
    """Returns whether the name has the form of a reasoning_gym generator, known or not."""
    return _kind(task) == "generated"


@contextlib.contextmanager
def about(field: str) -> Iterator[None]:
    """Makes the errors within this context begin with the name of a field."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{field}: {str(error).removeprefix('env.task: ')}") from None


def check_source(env: Any) -> None:
    """Raises UserError if section `env` names a source that cannot work; reads no rows."""
    if "{question}" not in env.prompt_template:
        raise UserError(
            f"env.prompt_template is {env.prompt_template!r}; write a text with {{question}} in it"
        )
    try:
        re.compile(env.answer_pattern)
    except re.error as error:
        raise UserError(
            f"env.answer_pattern is {env.answer_pattern!r}, and no regular expression ({error}); "
            r"write one, such as 'Answer: (\d+)'"
        ) from None
    if is_generated(env.task):
        check_task(env.task, plain(env.task_options.to_dict()))
    else:
        with about("env.task"):
            _found(env.task, env)
    for task in eval_tasks(env):
        with about("env.eval_task"):
            if is_generated(task):
                check_task(task, {})
            else:
                _found(task, env)


def eval_tasks(env: Any) -> list[str]:
    """Returns the sources in `env.eval_task`.

    Raises:
      UserError: a source is named twice.
    """
    tasks = [task.strip() for task in env.eval_task.split(",") if task.strip()]
    for task in tasks:
        if tasks.count(task) > 1:
            raise UserError(f"env.eval_task names {task!r} twice: leave one out")
    return tasks


def read_rows(task: str, env: Any) -> DataSet:
    """Opens the rows of a data set; downloads a missing one.

    Raises:
      UserError: as `check_source`, or there is no network.
    """
    return _found(task, env)()


def _found(task: str, env: Any) -> Callable[[], DataSet]:
    """Checks that a data set exists or can be downloaded; returns the function that reads it."""
    kind = _kind(task)
    if kind == "function":
        function = user_code.load(task, "the function")
        return lambda: DataSet(_rows_of_function(task, function), a_function=True)
    if kind == "path":
        path = pathlib.Path(expanded(task, "the path", "dataset"))
        if tfds.is_prepared(path):
            return lambda: DataSet(tfds.read(path))
        data_files = files.find(task)
        rows = {split: files.read(paths) for split, paths in data_files.splits.items()}
        return lambda: DataSet(rows, data_files.named, data_files.unread)
    name = task.removeprefix(_TFDS)
    root = tfds_home()
    directory = tfds.find(name, root)
    if directory is not None:
        tfds.check_format(directory)
    else:
        tfds_prepare.check_known(name)
    unread = (f"./{task}",) if os.path.exists(task) else ()
    return lambda: DataSet(tfds.read(directory or tfds_prepare.prepare(name, root)), unread=unread)


def _rows_of_function(task: str, function: Callable) -> dict[str, Rows]:
    """Calls a user's function, which returns rows or {split: rows}; returns {split: rows}."""
    try:
        value = function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may raise anything, SystemExit too
        raise UserError(
            f"{task!r} fails with {raised(error)}; it takes no argument and returns rows"
        ) from None
    parts = value if isinstance(value, Mapping) else {"train": value}
    return {str(split): _checked(f"{task} {split}", rows) for split, rows in parts.items()}


def _checked(place: str, rows: Any) -> Rows:
    """Yields the rows of a user's function; raises UserError if one is no mapping."""
    try:
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                raise UserError(
                    f"{place}, row {number} is {type(row).__name__}; return dicts, such as "
                    "{'question': TEXT, 'answer': TEXT}"
                )
            yield f"{place}, row {number}", dict(row)  # the function may change its row
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # not iterable, or the user's generator fails
        raise UserError(f"{place} fails with {raised(error)}") from None
