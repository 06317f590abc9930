"""Expands the paths and names that users write, and opens regular files only.

`hf:ORG/NAME[@REVISION]` is a snapshot in the cache of huggingface_hub. Nothing is downloaded: on a
cluster each host would, and a job without a network would wait. A missing one is refused with the
command that downloads it.

Other users may be able to write to a run's directories: a link there would redirect a write, and a
FIFO or a device would block it.
"""

from __future__ import annotations

import errno
import os
import pathlib
import re
import stat

from fp8rl_jax.base.errors import UserError

_PART = r"[A-Za-z0-9][\w.-]*"  # of a repository's name on the Hub
_HUB_ID = re.compile(rf"{_PART}/({_PART})", re.ASCII)
_HUB = "hf:"
_HUB_NAME = re.compile(rf"{_HUB}({_PART}/{_PART})(?:@([\w./-]+))?", re.ASCII)
_SNAPSHOT = re.compile(r"(?:^|/)models--([\w.-]+?)--([\w.-]+)/snapshots/([^/]+)/?$", re.ASCII)
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class MissingSnapshot(UserError):
    """A repository of Hugging Face's Hub is not in the cache."""


def tfds_home() -> pathlib.Path:
    """Returns tensorflow-datasets' directory: $TFDS_DATA_DIR, else ~/tensorflow_datasets."""
    directory = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return pathlib.Path(expanded(directory, "TFDS_DATA_DIR"))


def expanded(path: str, where: str, hub: str = "model") -> str:
    """Replaces a leading `~` or `~name` by the home directory, as a shell does (the name of an
    unknown user stays), and `hf:ORG/NAME[@REVISION]` by the directory of its snapshot.

    Args:
      path: the path as the user wrote it.
      where: the field or argument that begins error messages.
      hub: kind of what `hf:` names: 'model' or 'dataset'.

    Raises:
      UserError: the path begins with `~` and this user has no home directory; holds a NUL; is an
        address (`gs://...`), which would become a local directory of that name; or names a
        repository of Hugging Face's Hub that is not in the cache.
    """
    if path.startswith(_HUB):
        return _snapshot(path, where, hub)
    if "\0" in path:
        raise UserError(f"{where} is {path!r}: no path holds a NUL character; leave it out")
    if _ADDRESS.match(path):
        raise UserError(
            f"{where} is {path!r}, an address: write a path on this machine, such as that under "
            "which the storage is mounted"
        )
    whole = os.path.expanduser(path)
    if whole == path and path.partition("/")[0] == "~":
        raise UserError(
            f"{where} is {path!r}, and this user has no home directory: write the whole path, or "
            "set HOME"
        )
    return whole


def _snapshot(name: str, where: str, kind: str) -> str:
    """Returns the directory of a Hub repository's snapshot in the cache of huggingface_hub."""
    from huggingface_hub import constants, snapshot_download

    named = _HUB_NAME.fullmatch(name)
    if named is None:
        raise UserError(f"{where} is {name!r}: write hf:ORG/NAME or hf:ORG/NAME@REVISION")
    repository, revision = named.groups()
    try:
        return snapshot_download(
            repository, repo_type=kind, revision=revision, local_files_only=True
        )
    except (OSError, ValueError):
        options = f" --repo-type {kind}" * (kind != "model")
        options += f" --revision {revision}" if revision else ""
        raise MissingSnapshot(
            f"{where} is {name!r}, which is not in {constants.HF_HUB_CACHE}: run `hf download "
            f"{repository}{options}` first"
        ) from None


def hub_repository(path: str) -> tuple[str, str] | None:
    """Returns (ORG/NAME, commit) of a snapshot's directory in a cache of huggingface_hub, which is
    what `expanded` makes of `hf:ORG/NAME`; None for any other path."""
    named = _SNAPSHOT.search(path)
    return (f"{named[1]}/{named[2]}", named[3]) if named else None


def hub_download(path: str) -> str:
    """Returns the command that downloads ORG/NAME from Hugging Face's Hub; '' if the path is not of
    that form, or ORG is 'checkpoints', 'runs' or a local directory."""
    named = _HUB_ID.fullmatch(path)
    parent = path.partition("/")[0]
    if named is None or parent in ("checkpoints", "runs") or os.path.isdir(parent):
        return ""
    return f"`hf download {path} --local-dir checkpoints/{named[1]}`"


def open_regular(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a regular file, but not through a link; returns its descriptor.

    Args:
      path: the file; `os.O_CREAT` among the flags creates it.
      flags: flags of `os.open`.

    Raises:
      OSError: the path cannot be opened, or is a link, a FIFO, a device, a socket or a directory.
    """
    if os.path.lexists(path):
        check_status(os.lstat(path))
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        check_status(os.fstat(file))  # it may have been replaced in between
    except OSError:
        os.close(file)
        raise
    return file


def check_status(status: os.stat_result) -> None:
    """Raises OSError if this is the status of anything but a regular file."""
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a symbolic link")
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, "it is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
