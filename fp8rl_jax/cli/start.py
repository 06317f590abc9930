"""Prepares a parsed command: loads JAX, fixes settings and joins the processes.

Not used for help, --version and errors in the command line, so they answer at once.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Iterator

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.meeting import this_place
from fp8rl_jax.cli.arguments import Command

_OPEN_FILES = 64  # open at once: a checkpoint, its arrays, the workers of a reward
# Modules of the packages of the extra [train].
_TRAIN = (
    "cloudpickle grain huggingface_hub importlib_resources jinja2 math_verify matplotlib "
    "ml_collections optax orbax pyarrow reasoning_gym rich safetensors scipy shtab tensorboardX "
    "tensorflow_datasets tokenizers"
)


def prepare(command: Command) -> None:
    """Loads JAX, fixes its settings, and joins the processes that the environment names.

    Raises:
      UserError: JAX does not start here, a setting or a limit is refused, the command cannot run in
        several processes, or `processes.join` fails.
    """
    _load_jax()
    from fp8rl_jax.base import processes
    from fp8rl_jax.base.jax_settings import USABLE, hold_settings

    hold_settings()
    # JAX alone would take 75% of a GPU. It refuses both names of this variable together.
    if "XLA_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(USABLE))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if command.config and most < _OPEN_FILES:  # checkpoints would fail half-way
        raise UserError(
            f"{command.words} may open {most} files at a time (`ulimit -n`): allow "
            f"{_OPEN_FILES} or more"
        )
    asked = this_place().processes
    if asked > 1 and not command.processes:
        raise UserError(
            f"{command.words} runs in one process, and this is one of {asked}: start it "
            "once, without JAX_NUM_PROCESSES or FP8RL_PROCESSES and outside srun"
        )
    processes.join()


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Returns the message for a missing package of the extra [train]; None for other packages."""
    package = (error.name or "").partition(".")[0]
    if package not in _TRAIN.split():
        return None
    return (
        f"the package {package} is not installed, which fp8rl's commands need: "
        "pip install 'fp8rl_jax[train]'"
    )


def _load_jax() -> None:
    """Imports JAX.

    Raises:
      UserError: JAX refuses this CPU, or the value of an environment variable.
    """
    try:
        with _interruptible():
            from fp8rl_jax.base import jax_settings, processes  # noqa: F401
    except RuntimeError as error:  # jaxlib refuses a CPU without AVX
        if "AVX" not in str(error):
            raise
        raise UserError(f"JAX does not start on this CPU: {error}") from None
    except ValueError as error:  # JAX or Flax does not know the value of a setting
        if not any(name in str(error).upper() for name in ("JAX", "FLAX")):
            raise
        raise UserError(f"{error}: correct that variable, or unset it") from None


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process at once: while libraries are imported, they lose a
    KeyboardInterrupt or turn it into another error."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
