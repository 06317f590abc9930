"""Writes tool calls as the chat templates of known models do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl_jax.data.chat import ChatTemplate

# How the templates of these models write an assistant's calls, white space and order included.
FORMS = {
    "Hermes": (
        """{{ '\n<tool_call>\n{ "arguments": ' }}{{ f.arguments | tojson }}"""
        """{{ ', "name": "' + f.name + '"}\n</tool_call> ' }}"""
    ),
    "Qwen2.5": (
        """{{ '\n<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}"""
        """{{ f.arguments | tojson }}{{ '}\n</tool_call>' }}"""
    ),
    "Llama": (
        """{{ '; ' if not loop.first }}{"name": "{{ f.name }}", """
        """"parameters": {{ f.arguments | tojson }}}"""
    ),
    "Llama, with its tag": (
        """{{ '<|python_tag|>' if loop.first else ';' }}{"type": "function", "name": """
        """"{{ f.name }}", "parameters": {{ f.arguments | tojson }}}"""
    ),
    "Mistral": (
        """{{ '[TOOL_CALLS] [' if loop.first else ', ' }}{{ (f | tojson)[:-1] }}"""
        """, "id": "123456789"}{{ ']' if loop.last }}"""
    ),
    "Qwen3-Coder": (
        """{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}"""
        """{% for key, value in f.arguments.items() %}{{ '<parameter=' + key + '>\n' }}"""
        """{{ value if value is string else value | tojson if value is mapping or """
        """value is sequence else value | string }}{{ '\n</parameter>\n' }}{% endfor %}"""
        """{{ '</function>\n</tool_call>' }}"""
    ),
}
_TEMPLATES = {
    name: ChatTemplate(
        "{% for call in messages[-1].tool_calls %}{% set f = call.function %}"
        + form
        + "{% endfor %}{# tools #}",
        {},
        name,
    )
    for name, form in FORMS.items()
}


def written(form: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns an assistant's message of the form with calls, (name, arguments) each."""
    functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
    message = {"role": "assistant", "tool_calls": [{"function": f} for f in functions]}
    return _TEMPLATES[form].render([message])
