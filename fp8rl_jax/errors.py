"""Errors that a user can fix. The command line prints them in one line and exits with 2."""

import contextlib
import re
from collections.abc import Iterator

_LONGEST = 4000
# What a terminal obeys instead of showing it: controls, marks of direction, halves of pairs.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""The text with what would steer a terminal or a page written out: '\x1b' for an escape."""
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


class UserError(ValueError):
    """What is wrong, where, and what to write instead, in one sentence.

    The sentence may quote names and values of files that others wrote: it is made `visible`, and
    its middle is left out where it is very long.
    """

    def __init__(self, sentence: str):
        if len(sentence) > _LONGEST:
            half = _LONGEST // 2
            sentence = f"{sentence[:half]} ... {sentence[-half:]}"
        super().__init__(visible(sentence))


@contextlib.contextmanager
def refused(what: str) -> Iterator[None]:
    """Within it whatever a library raises becomes a UserError: `what`, and what the library said.

    For libraries that raise bare Exception. A panic of one that is written in Rust, which is no
    Exception, is caught too.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{what} ({said}): put the file back, or take another") from None


class RewardError(UserError):
    """Nothing can be learnt from a reward: all calls failed, or none can be made. The message may
    end with a traceback of the user's code, in several lines."""


class DriftError(RuntimeError):
    """Drift appeared in a run that requires zero drift; the run stopped after that step, saved."""


class NonFiniteError(RuntimeError):
    """The loss or a gradient became NaN or infinite; the run stopped with its last good state."""
