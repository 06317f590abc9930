"""Writes a reward function to a module in the run's directory, if no process could import it else.

This is for functions defined in a notebook, in `__main__` or inside another function. The module
holds the source as a comment, and the function pickled by cloudpickle with the values that it uses.
Worker processes import it as 'module:function', and environment.json has the file's digest.

A resumed run uses the module that it began with if the source is the same; another source is
refused, like another `env.reward`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import inspect
import pathlib
import sys
from collections.abc import Callable

from fp8rl_jax.base.errors import UserError, raised
from fp8rl_jax.base.whole_file import write_whole

_BEGIN = "# The reward of this run, as it was written:\n"
_END = "# And as cloudpickle holds it.\n"


def reward_name(reward: str | Callable, directory: pathlib.Path, resume: bool) -> str:
    """Returns the value of `env.reward` for a reward, which worker processes can import.

    Args:
      reward: a value of `env.reward`, which is returned, or a function.
      directory: the run's directory; the module is written there if the function needs one.
      resume: use the module in the directory if it has the same source.

    Raises:
      UserError: the reward is neither text nor function, or cannot be pickled.
    """
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise UserError(f"reward is {reward!r}; write a function, or the text of env.reward")
    module = getattr(reward, "__module__", "")
    path = getattr(reward, "__qualname__", "")
    if module and _finds(module, path) is reward:
        return f"{module}:{path}"
    name = getattr(reward, "__name__", "")
    name = name if name.isidentifier() else "reward"
    began = resume and (directory / "config.json").exists()
    return f"{_module_of(reward, name, directory.absolute(), began)}:{name}"


def _finds(module: str, name: str):
    """Returns the object that another process would import as `name` from the module; None if it
    cannot import the module, or finds no such name."""
    known = sys.modules.get(module)
    if module == "__main__" or getattr(known, "__spec__", None) is None:
        return None
    return getattr(known, name, None)


def _module_of(reward: Callable, name: str, directory: pathlib.Path, began: bool) -> str:
    """Returns the name of the function's module: an existing one of a resumed run, or a new one.
    Puts the directory on `sys.path`."""
    import cloudpickle  # of the extra [train]

    source = _source(reward)
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # worker processes get this path
    for file in sorted(directory.glob("reward_*.py")) if began and source else ():
        if file.read_text().startswith(f"{_BEGIN}{source}{_END}"):
            return file.stem
    try:
        pickled = base64.b64encode(cloudpickle.dumps(reward)).decode()
    except Exception as error:  # pickling calls code of every object that the function refers to
        raise UserError(
            f"the reward {name!r} cannot be sent to worker processes ({raised(error)}): write it "
            "in a file of its own, without what cannot be pickled, and name it 'module:function'"
        ) from None
    text = (
        f"{_BEGIN}{source}{_END}import base64\n\nimport cloudpickle\n\n"
        f"{name} = cloudpickle.loads(base64.b64decode(\n    {pickled!r}\n))\n"
    )
    module = f"reward_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    directory.mkdir(parents=True, exist_ok=True)
    write_whole(directory / f"{module}.py", text)
    importlib.invalidate_caches()
    return module


def _source(reward: Callable) -> str:
    """Returns the source of a function as a Python comment; '' if the source is unknown."""
    try:
        function = reward if inspect.isroutine(reward) else type(reward)
        return "".join(f"#   {line}\n" for line in inspect.getsource(function).splitlines())
    except (OSError, TypeError):
        return ""
