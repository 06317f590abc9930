"""The library's exceptions. The command line prints a UserError's message and exits with 2."""

import contextlib
import difflib
import errno
import re
import resource
from collections.abc import Iterable, Iterator

_LONGEST = 4000
# Control characters, direction marks and lone surrogates.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""Escapes the control characters of a text, which a terminal would obey, as in '\x1b'."""
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


class UserError(ValueError):
    """An error that the user can fix. Its message says what is wrong, where, and what to write.

    It may quote foreign files, so it is made `visible`, and shortened in the middle if very long.
    """

    def __init__(self, sentence: str):
        if len(sentence) > _LONGEST:
            half = _LONGEST // 2
            sentence = f"{sentence[:half]} ... {sentence[-half:]}"
        super().__init__(visible(sentence))


def did_you_mean(
    word: str,
    known: Iterable[str],
    otherwise: str,
    form: str = "{}",
    cutoff: float = 0.6,
    most: int = 1,
) -> str:
    """Returns a hint for an error message about an unknown name.

    Args:
      word: the name as it was written.
      known: the valid names.
      otherwise: the hint if no valid name is similar.
      form: format of a name in the hint: '{}', '{!r}'.
      cutoff: least similarity, from 0 to 1 (`difflib.get_close_matches`).
      most: largest number of names in the hint.
    """
    near = difflib.get_close_matches(word, known, most, cutoff)
    return f"did you mean {' or '.join(map(form.format, near))}?" if near else otherwise


def limit_reached(error: BaseException) -> str | None:
    """Returns the beginning of a message if a limit (`ulimit`) caused an error, else None."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno in (errno.EMFILE, errno.ENFILE):
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"too many files are open, and {most} may be in this process (`ulimit -n`)"
        if isinstance(one, OSError) and one.errno == errno.EFBIG:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            if most != resource.RLIM_INFINITY:
                return f"a file may have {most} bytes in this process (`ulimit -f`), and needs more"
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return None


def raised(error: BaseException) -> str:
    """Formats an exception of foreign code as one line: its type, and the beginning of its text."""
    try:
        text = " ".join(str(error).split())[:300]
    except BaseException:  # the exception's class is foreign code too
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def refused(what: str, remedy: str = "put the file back, or take another") -> Iterator[None]:
    """Turns an exception of the `with` block into a UserError, '`what` (the exception): `remedy`';
    a UserError, KeyboardInterrupt or SystemExit passes unchanged.

    Use this context for libraries that raise bare Exception. A panic of a library written in Rust,
    which is not an Exception, is turned into a UserError too.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what} ({raised(error)}): {remedy}") from None


@contextlib.contextmanager
def refused_by_system(what: str, remedy: str = "") -> Iterator[None]:
    """Turns an OSError of the `with` block into a UserError, '`what` (the system's reason):
    `remedy`'."""
    try:
        yield
    except OSError as error:
        end = f": {remedy}" if remedy else ""
        raise UserError(f"{what} ({error.strerror}){end}") from None


class RewardError(UserError):
    """All calls of a reward failed, or none can be made. The message may end with a traceback of
    the user's code, in several lines."""


class DriftError(RuntimeError):
    """Drift appeared in a run that requires zero drift; the run saved that step and stopped."""


class NonFiniteError(RuntimeError):
    """The loss or a gradient became NaN or infinite; the run stopped with its last good state."""
