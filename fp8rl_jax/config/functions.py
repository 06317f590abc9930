"""User functions that a configuration names as 'module:function'."""

from __future__ import annotations

import re
from collections.abc import Collection

import ml_collections

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.load import reset
from fp8rl_jax.envs import reward_names

# Fields of conversations: they have no meaning where nothing answers a reply.
OF_REPLIES = ("env.max_turns", "rollout.max_turn_tokens", "algo.credit")
_FUNCTION = re.compile(r"(?!tfds:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def named_functions(config: ml_collections.ConfigDict) -> dict[str, str]:
    """Returns {'module:function': path of the field that names it}."""
    env = config.env
    texts = {
        "env.reward": reward_names(env.reward),
        "env.step": [env.step],
        "env.tools": [env.tools],
        "env.task": [env.task],
        "env.eval_task": env.eval_task.split(","),
        "algo.loss": [config.algo.loss],
        "algo.loss_aggregation": [config.algo.loss_aggregation],
        "algo.correction": config.algo.correction.split(","),
        **{f"precision.{name}": [text] for name, text in config.precision.items()},
    }
    return {
        text.strip(): field
        for field, named in texts.items()
        for text in named
        if isinstance(text, str) and _FUNCTION.fullmatch(text.strip())
    }


def permit(
    config: ml_collections.ConfigDict,
    permitted: Collection[str],
    where: str,
    needed: Collection[str],
) -> None:
    """Refuses functions that the user has not permitted.

    A configuration saved with weights is data: importing what it names would run code. In sections
    that are not needed, fields that name such functions are reset to their defaults, and without
    `env.step` and `env.tools` those of conversations, too.

    Args:
      config: configuration that was read from a directory; changed in place.
      permitted: 'module:function', or 'module' for all of its functions.
      where: path of the file that it was read from, for the message.
      needed: sections whose functions will be called.

    Raises:
      UserError: a section that is needed names a function that is not permitted.
    """
    refused = {}
    for name, path in named_functions(config).items():
        if name in permitted or name.partition(":")[0] in permitted:
            continue
        if path.partition(".")[0] in needed:
            refused[name] = path
        else:
            reset(config, [path])
    if not (config.env.step or config.env.tools):
        reset(config, OF_REPLIES)
    if refused:
        names = ", ".join(f"{name} ({path})" for name, path in refused.items())
        modules = ",".join(dict.fromkeys(name.partition(":")[0] for name in refused))
        raise UserError(
            f"{where} names code that would be imported and called: {names}; if you trust it, add "
            f"--allow-import={modules}"
        )
