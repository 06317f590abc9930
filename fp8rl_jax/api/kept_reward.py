"""A reward function that no other process can import, kept as a module beside its run.

A function of a notebook, of `__main__` or within another function is written into a module in the
run's directory: its source as a comment, and the function as cloudpickle holds it, with what it
reads. From there on it is a reward like any other, named 'module:function': worker processes import
it, and environment.json has the digest of its file.

A resumed run goes on with the function that it began with, if the source is the same; with another
source it is refused, as a run with another `env.reward` is.
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

_BEGIN, _END = "# The reward of this run, as it was written:\n", "# And as cloudpickle holds it.\n"


def reward_name(reward: str | Callable, directory: pathlib.Path, resume: bool) -> str:
    """The text of `env.reward` for a reward, which a worker process of this one can import.

    Args:
      reward: that text already, or a function.
      directory: of the run, where a module for the function is written if it needs one.
      resume: take the module that the run in the directory has, if it is of the same source.

    Raises:
      UserError: it is neither, or cannot be pickled.
    """
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise UserError(f"reward is {reward!r}; write a function, or the text of env.reward")
    module, name = getattr(reward, "__module__", ""), getattr(reward, "__qualname__", "")
    if module and _finds(module, name) is reward:
        return f"{module}:{name}"
    name = getattr(reward, "__name__", "")
    name = name if name.isidentifier() else "reward"
    began = resume and (directory / "config.json").exists()
    return f"{_module_of(reward, name, directory.absolute(), began)}:{name}"


def _finds(module: str, name: str):
    """What another process finds under the name in the module, if it can import that."""
    known = sys.modules.get(module)
    if module == "__main__" or getattr(known, "__spec__", None) is None:
        return None
    return getattr(known, name, None)


def _module_of(reward: Callable, name: str, directory: pathlib.Path, began: bool) -> str:
    """The module with this function in the directory, which is put on `sys.path`."""
    import cloudpickle  # of the extra [train], as all that a run needs

    source = _source(reward)
    if str(directory) not in sys.path:
        sys.path.append(str(directory))  # whence worker processes import it, too
    for file in sorted(directory.glob("reward_*.py")) if began and source else ():
        if file.read_text().startswith(f"{_BEGIN}{source}{_END}"):
            return file.stem
    try:
        pickled = base64.b64encode(cloudpickle.dumps(reward)).decode()
    except Exception as error:  # whatever it refers to may refuse
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
    """The source of a function as lines of a comment; '' where it is not known."""
    try:
        function = reward if inspect.isroutine(reward) else type(reward)
        return "".join(f"#   {line}\n" for line in inspect.getsource(function).splitlines())
    except (OSError, TypeError):
        return ""
