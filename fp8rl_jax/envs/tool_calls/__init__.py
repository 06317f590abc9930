"""The tool calls in a reply of the policy, in the form that its model was trained with.

::

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>                 Hermes, Qwen2.5, Qwen3
    <tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>    Qwen3-Coder
    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>TEXT</arg_value></tool_call>        GLM-4.5
    [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]                     Mistral, to 2024
    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}[TOOL_CALLS]...                    Mistral, from 2025
    <|python_tag|>{"name": ..., "parameters": {...}}; {...}                  Llama 3.1 to 3.3
    <function=NAME>{...}</function>                                          Llama 3.1
    <|python_start|>[NAME(KEY=VALUE, ...), ...]<|python_end|>                Llama 3.2 and 4
    ```tool_code and NAME(KEY=VALUE, ...) or print(NAME(...)), to ```        Gemma
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}           gpt-oss
    <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>  Kimi-K2
    <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>              DeepSeek-V3.1
    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME and a block of JSON        DeepSeek-V3, R1

In Mistral's newer form [CALL_ID]ID and [ARGS] may be missing, in gpt-oss's the recipient may stand
before the channel. In Llama's forms the tags may be missing; then the calls are the whole reply. In
Qwen3-Coder's form the first tag may be missing, and end tags if another follows. A call without
arguments may leave them out, or give null.

Calls in a thought do not count; a thought may begin in the prompt. Texts in JSON may contain any of
these tags; texts of Qwen3-Coder, GLM and in Python none of their own.

    reply     finds the tags, and hands what follows each to its reader
    in_json   reads calls whose arguments are JSON
    in_tags   reads calls whose arguments stand between tags
    in_python reads calls in Python
    call      what the readers return
"""

from fp8rl_jax.envs.tool_calls.call import Refusal, ToolCall
from fp8rl_jax.envs.tool_calls.reply import calls_in, parse_tool_calls
