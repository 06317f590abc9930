"""The command `fp8rl`: one file for each group of subcommands.

::

    words -> main.run -> Command of runs, sample_eval, bench, ... -> arguments.Command.parse
                |                                                        | values
                |                        start.prepare (JAX loads, processes join)
                |                                                        |
                +---- status <------- Command.run(values), which imports the library

An error that the user can fix is a UserError: one sentence, status 2 (`main.run`). `tree` makes the
parsers that help, completion and the documentation share; `output` keeps a run going without its
terminal; `interrupt` ends it with a checkpoint. Read `main` first, then `arguments`. Modules here
import JAX and the library only inside functions, so that help answers at once.
"""

import signal
import sys
from collections.abc import Sequence
from typing import Any

from fp8rl_jax.cli.output import flush, is_gone, prepare_streams, silence

_INTERRUPTED = 128 + signal.SIGINT
_CLOSED = 128 + signal.SIGPIPE


def run(arguments: Sequence[str], **commands: Any) -> int:
    """Runs one command, of `fp8rl` or of other `commands` (`main.run`), and returns the exit
    status; bugs propagate as exceptions."""
    from fp8rl_jax.cli import main

    return main.run(arguments, **commands)


def entry(**commands: Any) -> None:
    """Runs the console script, of `fp8rl` or of other `commands` (`main.run`); handles Ctrl-C and
    an output that cannot be written."""
    prepare_streams()
    from fp8rl_jax.cli import main
    from fp8rl_jax.cli.arguments import note

    try:
        status = main.run(sys.argv[1:], starting=note, **commands)
        flush(sys.stdout)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = _INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)
        status = _CLOSED
    except OSError as error:
        if not is_gone(sys.stdout):
            raise
        silence(sys.stdout)
        print(f"error: standard output cannot be written ({error.strerror})", file=sys.stderr)
        status = 2
    sys.exit(status)
