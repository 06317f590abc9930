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
    "Mistral, from 2025": ("""{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}"""),
    "Mistral, with identifiers": (
        """{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]123456789[ARGS]' + (f.arguments | tojson) }}"""
    ),
    "Mistral, without [ARGS]": """{{ '[TOOL_CALLS]' + f.name + (f.arguments | tojson) }}""",
    "Kimi-K2": (
        """{{ '<|tool_calls_section_begin|>' if loop.first }}<|tool_call_begin|>functions."""
        """{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"""
        """<|tool_call_end|>{{ '<|tool_calls_section_end|>' if loop.last }}"""
    ),
    "DeepSeek-V3": (
        """{{ '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}<｜tool▁call▁begin｜>function"""
        """<｜tool▁sep｜>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```"""
        """<｜tool▁call▁end｜>{{ '<｜tool▁calls▁end｜>' if loop.last }}"""
    ),
    "DeepSeek-V3.1": (
        """{{ '<｜tool▁calls▁begin｜>' if loop.first }}<｜tool▁call▁begin｜>{{ f.name }}"""
        """<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>"""
        """{{ '<｜tool▁calls▁end｜>' if loop.last }}"""
    ),
    "gpt-oss": (
        """{{ '<|channel|>analysis<|message|>I add.<|end|>' if loop.first else '<|call|>' }}"""
        """<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json"""
        """<|message|>{{ f.arguments | tojson }}"""
    ),
    "gpt-oss, recipient first": (
        """{{ '<|call|><|start|>assistant' if not loop.first }} to=functions.{{ f.name }}"""
        """<|channel|>commentary json<|message|>{{ f.arguments | tojson }}"""
    ),
    "Llama, with the name in its tag": (
        """<function={{ f.name }}>{{ f.arguments | tojson }}</function>"""
    ),
    "GLM-4.5": (
        """{{ '\n<tool_call>' + f.name }}\n{% for key, value in f.arguments.items() %}"""
        """<arg_key>{{ key }}</arg_key>\n<arg_value>"""
        """{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}"""
        """</tool_call>"""
    ),
    "Qwen3-Coder, without its first tag": (
        """{{ '<function=' + f.name + '>\n' }}"""
        """{% for key, value in f.arguments.items() %}{{ '<parameter=' + key + '>\n' }}"""
        """{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}"""
        """{% endfor %}{{ '</function>\n</tool_call>' }}"""
    ),
    "Qwen3-Coder": (
        """{{ '\n<tool_call>\n<function=' + f.name + '>\n' }}"""
        """{% for key, value in f.arguments.items() %}{{ '<parameter=' + key + '>\n' }}"""
        """{{ value if value is string else value | tojson if value is mapping or """
        """value is sequence else value | string }}{{ '\n</parameter>\n' }}{% endfor %}"""
        """{{ '</function>\n</tool_call>' }}"""
    ),
}
# The forms whose arguments are all texts.
IN_TAGS = ("GLM-4.5", "Qwen3-Coder", "Qwen3-Coder, without its first tag")
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
