"""The chat templates of the families, with their special tokens, and what a run can do with each.

TRL's package has copies of most templates. Those of Mistral, Kimi-K2 and Zephyr are written here,
short and of the form that the published ones have. `python tests/helpers/chat_families.py` prints
the table of docs/models.md.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, pre_tokenizers

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import ChatFormat, ChatTemplate, Turns
from fp8rl_jax.data.tokenizer import ReaderTokenizer
from fp8rl_jax.envs import check_calls
from fp8rl_jax.envs.tools import tool_schema

_MISTRAL = """{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in messages %}
    {%- if m.role != 'tool' and m.tool_calls is not defined %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('roles must alternate user and assistant') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('identifiers of calls have 9 characters') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
            {{- raise_exception('identifiers of calls have 9 characters') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' }}
        {{- m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
_KIMI = """
{%- if tools -%}
    <|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for m in messages -%}
    {%- set name = m.get('name') or m.role -%}
    {%- set mark = {'user': 'user', 'assistant': 'assistant'}.get(m.role, 'system') -%}
    <|im_{{ mark }}|>{{ name }}<|im_middle|>
    {%- if m.tool_calls -%}
        {{- m.content or '' -}}<|tool_calls_section_begin|>
        {%- for call in m.tool_calls -%}
            <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
            {{- call.function.arguments | tojson -}}<|tool_call_end|>
        {%- endfor -%}
        <|tool_calls_section_end|>
    {%- elif m.role == 'tool' -%}
        ## Return of {{ m.tool_call_id }}
{{ m.content }}
    {%- else -%}
        {{- m.content -}}
    {%- endif -%}
    <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|im_assistant|>assistant<|im_middle|>
{%- endif -%}
"""
_ZEPHYR = """{% for m in messages %}
{% if m.role in ('user', 'system', 'assistant') %}
{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
_CHATML = ("<|im_end|>", "<|endoftext|>", "<|im_start|>")
_LLAMA = ("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_GLM = ("<|user|>", "<|observation|>", "<|endoftext|>", "<|assistant|>", "<|system|>", "[gMASK]")
_HARMONY = ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_KIMI_MARKS = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's template and tokens.

    Attributes:
      template: name of TRL's copy, or the text.
      model: architecture in hf_checkpoints.CONFIGS.
      special: special tokens; added: further added tokens.
      ends: how many of the first special tokens end a reply.
      bos: text of the token that begins a prompt.
      thoughts: marks of its thoughts.
    """

    template: str
    model: str
    special: Sequence[str]
    added: Sequence[str] = ()
    ends: int = 1
    bos: str = ""
    thoughts: str = ""

    @property
    def source(self) -> str:
        if "{" in self.template:
            return self.template
        import trl

        folder = pathlib.Path(trl.__file__).parent / "chat_templates"
        return (folder / f"{self.template}.jinja").read_text()


_THINK = "`<think>`, `</think>`"
FAMILIES = {
    "Qwen2.5": Family("qwen2_5", "qwen2", _CHATML, ends=2),
    "Qwen3": Family(
        "qwen3",
        "qwen3",
        _CHATML,
        ("<think>", "</think>", "<tool_call>", "</tool_call>"),
        ends=2,
        thoughts=_THINK,
    ),
    "Qwen3-MoE": Family(
        "qwen3_instruct_2507", "qwen3_moe", _CHATML, ("<tool_call>", "</tool_call>"), ends=2
    ),
    "Llama 3.1": Family("llama3_1", "llama", _LLAMA, ends=2, bos="<|begin_of_text|>"),
    "Mistral": Family(
        _MISTRAL,
        "mistral",
        ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        bos="<s>",
        thoughts="`[THINK]`, `[/THINK]`",
    ),
    "Gemma 3": Family("gemma3", "gemma3", ("<end_of_turn>", "<start_of_turn>"), bos="<bos>"),
    "gpt-oss": Family(
        "gptoss", "gpt_oss", _HARMONY, ends=2, thoughts="channels but `final` and `commentary`"
    ),
    "GLM-4.5": Family("glm4moe", "glm4_moe", _GLM, ("<think>",), ends=3, thoughts=_THINK),
    "DeepSeek-V3": Family(
        "deepseekv3",
        "deepseek_v3",
        ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        bos="<｜begin▁of▁sentence｜>",
        thoughts=_THINK,
    ),
    "Kimi-K2": Family(
        _KIMI, "moonlight", _KIMI_MARKS, ("<|tool_call_begin|>", "<|tool_call_end|>")
    ),
    "TinyLlama, Zephyr": Family(_ZEPHYR, "llama", ("</s>",), bos="<s>"),
}


class Marked(ReaderTokenizer):
    """Bytes, and the tokens of a family."""

    def __init__(self, family: Family):
        self.reader = reader_of(family)
        super().__init__(self.reader)
        ids = [self.reader.token_to_id(token) for token in family.special]
        self.eos_ids = tuple(ids[: family.ends])
        self.eos_id = self.pad_id = ids[0]
        self.bos_id = None


def reader_of(family: Family) -> tokenizers.Tokenizer:
    """A tokenizer of bytes with the family's special and added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    reader = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, [])
    )
    reader.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader.decoder = decoders.ByteLevel()
    reader.add_special_tokens([*family.special, *([family.bos] if family.bos else [])])
    reader.add_tokens(list(family.added))
    return reader


def turns_of(family: Family, role: str, tools: Sequence = (), most: int = 64, **variables) -> Turns:
    """The form of a family's conversations, with the functions `tools`."""
    tokens = {"bos_token": family.bos, "eos_token": family.special[0]}
    template = ChatTemplate(family.source, tokens, "its directory")
    schemas = [tool_schema(function) for function in tools]
    return Turns(Marked(family), ChatFormat(template, "", variables), role, most, schemas)


def add(a: int, b: str) -> str:
    """Adds.

    Args:
      a: a number.
      b: a text.
    """
    return f"{a + int(b)}"


def refusal(turns: Turns, tools: Sequence = ()) -> str:
    """The sentence that refuses conversations or tools; '' if they can be held."""
    try:
        turns.check()
        turns.encode(["an observation"], 0)
        check_calls(tools, turns.reply_with_call)
    except UserError as error:
        return str(error)
    return ""


def row(name: str, family: Family) -> list[str]:
    """The family's row of the table."""
    switches = [{}]
    if "enable_thinking" in family.source:
        switches.append({"enable_thinking": False})
    roles, refused = [], []
    for role in ("tool", "user"):
        found = [refusal(turns_of(family, role, **switch)) for switch in switches]
        if any(found):
            why = found[0].partition("chat template ")[2].partition("; change")[0]
            refused.append(f"`{role}` is refused: it {why.partition(': set')[0]}")
        else:
            roles.append(f"`{role}`")
    turns = turns_of(family, "tool", [add])
    call = refusal(turns, [add])
    if "writes no tools" in call:
        call = "`env.tools` is refused: it writes no tools"
    elif not call:
        call = f"``{' '.join(turns.reply_with_call('add', {'a': 2, 'b': '3'}).split())}``"
    cells = [
        name,
        "; ".join([", ".join(roles), *refused]),
        call,
        family.thoughts,
        "`enable_thinking`" if len(switches) > 1 else "",
        ", ".join(f"`{token}`" for token in family.special[: family.ends]),
    ]
    return [cell.replace("|", "\\|") for cell in cells]


HEAD = ["family", "roles of observations", "a call of a tool", "thoughts", "switch", "reply ends"]


def table() -> list[str]:
    """The lines of the table in docs/models.md."""
    rows = [HEAD, ["---"] * len(HEAD), *(row(*each) for each in FAMILIES.items())]
    return ["| " + " | ".join(cells) + " |" for cells in rows]


if __name__ == "__main__":
    sys.stdout.write("\n".join(table()) + "\n")
