"""Functions of the user's that a configuration names, as 'module:function'."""

from __future__ import annotations

import re
from collections.abc import Collection

import ml_collections

from fp8rl_jax.envs import reward_names
from fp8rl_jax.errors import UserError

_FUNCTION = re.compile(r"(?!tfds:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def named_functions(config: ml_collections.ConfigDict) -> dict[str, str]:
    """{'module:function': the field that names it}."""
    algo, env = config.algo, config.env
    texts = {
        "env.reward": reward_names(env.reward), "env.task": [env.task],
        "env.eval_task": env.eval_task.split(","), "algo.loss": [algo.loss],
        "algo.correction": algo.correction.split(","),
        **{f"precision.{name}": [text] for name, text in config.precision.items()},
    }  # fmt: skip
    return {
        text.strip(): field
        for field, found in texts.items()
        for text in found
        if isinstance(text, str) and _FUNCTION.fullmatch(text.strip())
    }


def check_permitted(
    config: ml_collections.ConfigDict, permitted: Collection[str], where: str
) -> None:
    """A configuration that was found beside weights is data: what it names is not imported unless
    the user has said so.

    Args:
      config: that was read from a directory.
      permitted: 'module:function', or 'module' for all in it.
      where: the file it was read from.

    Raises:
      UserError: it names a function that is not permitted.
    """
    refused = {
        name: field
        for name, field in named_functions(config).items()
        if name not in permitted and name.partition(":")[0] not in permitted
    }
    if refused:
        names = ", ".join(f"{name} ({field})" for name, field in refused.items())
        modules = ",".join(dict.fromkeys(name.partition(":")[0] for name in refused))
        raise UserError(
            f"{where} names code that would be imported and called: {names}; if you trust it, add "
            f"--allow-import={modules}"
        )
