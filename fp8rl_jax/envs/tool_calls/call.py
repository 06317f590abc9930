"""A call of a tool, and a refusal of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the policy wrote it.

    Attributes:
      name: name of the tool, perhaps unknown.
      arguments: values by name, as JSON has them.
      texts: whether all values are texts, as in Qwen3-Coder's form, whatever the tool takes.
      id: what the model calls this call; '' for nothing. No part of what is compared or shown.
    """

    name: str
    arguments: Mapping[str, Any]
    texts: bool = False
    id: str = dataclasses.field(default="", compare=False, repr=False)


# What a reader returns: calls, and lines 'Error: ...' for the policy; and where they end.
Found = tuple[list[ToolCall | str], int]


class Refusal(Exception):
    """A sentence for the policy: what is wrong with its call, and what to write."""
