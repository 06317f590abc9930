"""Turns messages into text by the chat template that an instruction-tuned model was trained with.

A template is a Jinja program that comes with a model. It runs in Jinja's sandbox, with the settings
and helpers that templates on the Hugging Face Hub expect: trimmed blocks, `tojson` without HTML
escapes, `raise_exception`, `strftime_now`, loop controls and the tag `{% generation %}`, which only
marks text for training.

As in transformers, the template gets all fields of the messages, and the tools (function schemas)
of the prompt.

Not done: documents, and messages that are not text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from fp8rl_jax.base.errors import UserError

# A text, or messages ({'role', 'content', ...} each), or {'messages', 'tools'}.
Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
_NEEDED = ("tools", "tool_calls")  # a template that lacks these names cannot write them

# Names that `render` and the environment define.
_TAKEN = ("messages", "add_generation_prompt", "strftime_now", "raise_exception")
_CONTENT = "an answer like no other"


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Refusal(Exception):
    """The message that a template gives to raise_exception."""


def _raise(message: str) -> None:
    raise _Refusal(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def sandbox() -> jinja2.Environment:
    """Returns the environment that templates are compiled in, without what depends on chance.

    Nothing is computed before a template runs (`optimized`; a `finalize` with a context does it for
    output), so that what the first rendering did not reach (chat_trial.py) takes no time or memory.
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _Generation],
        optimized=False,
        finalize=jinja2.pass_context(lambda context, value: value),
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"], environment.filters["random"]
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled chat template with the special tokens of its tokenizer.

    Args:
      source: Jinja text.
      special_tokens: tokens by name, {'bos_token': '<s>', ...}, which templates write themselves.
      where: path for error messages.
      for_tools: template that replaces this one for prompts with tools.

    Attributes:
      where: path for error messages.
      unwritten: which of 'tools' and 'tool_calls' it cannot write.
      source: its text, with that of the template for tools.

    Raises:
      UserError: the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        where: str,
        for_tools: ChatTemplate | None = None,
    ):
        self.where = where
        self._tokens = dict(special_tokens)
        self._for_tools = for_tools
        self.source: str = source + (for_tools.source if for_tools else "")
        self.unwritten = [name for name in _NEEDED if name not in source]
        # Whether the text that it writes may depend on the time.
        self.tells_time: bool = "strftime_now" in source or bool(for_tools and for_tools.tells_time)
        try:
            self._template = sandbox().from_string(source)
        except Exception as error:  # Jinja and Python's compiler: syntax, nesting, huge numbers
            said = str(error)[:300] or type(error).__name__
            raise UserError(
                f"{where}: the chat template is no Jinja ({said}); fix it, or leave chat off"
            ) from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        begin_answer: bool = True,
    ) -> str:
        """Renders messages ({'role', 'content', ...} each) as text with special tokens.

        Args:
          messages: the conversation, oldest first.
          variables: further variables of the template, such as {'enable_thinking': False}.
          begin_answer: whether to append the beginning of the assistant's answer.

        Raises:
          UserError: the template refuses the messages, or cannot write their tools or tool calls.
        """
        if self._for_tools is not None and variables.get("tools") is not None:
            return self._for_tools.render(messages, variables, begin_answer)
        for name in self.unwritten:
            if variables.get(name) or any(message.get(name) for message in messages):
                raise UserError(
                    f"{self.where}: the chat template writes no {name}, and a prompt has them: "
                    "take a model whose template does, or leave them out of the data"
                )
        try:
            return self._rendered(messages, variables, begin_answer, _as_object)
        except Exception as error:  # a template is a program and may raise anything
            if any(message.get("tool_calls") for message in messages):
                with contextlib.suppress(Exception):  # DeepSeek's add them to texts
                    return self._rendered(
                        messages,
                        variables,
                        begin_answer,
                        lambda x: x if isinstance(x, str) else _tojson(x),
                    )
            reason = error if isinstance(error, _Refusal) else f"{type(error).__name__}: {error}"
            raise UserError(
                f"{self.where}: the chat template refuses the conversation ({reason}); change the "
                "system prompt or the template's variables"
            ) from None

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        begin_answer: bool,
        arguments: Callable[[Any], Any],
    ) -> str:
        return self._template.render(
            {"tools": None, "documents": None, **self._tokens, **variables},
            messages=[_with_arguments(message, arguments) for message in messages],
            add_generation_prompt=begin_answer,
        )


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """The chat template and the settings that turn a question into a conversation.

    Attributes:
      template: the tokenizer's template.
      system: content of a system message before the question; '' for none.
      variables: further variables of the template.
      now: time for the template's `strftime_now`; None for the present.
    """

    template: ChatTemplate
    system: str = ""
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    now: datetime.datetime | None = None

    def __post_init__(self):
        """Raises UserError if a variable has a reserved name."""
        for name in self.variables:
            if name in _TAKEN:
                raise UserError(
                    f"data.chat_options.{name}: this name is set for every conversation; leave it "
                    "out, or change the template"
                )

    def render(self, question: Prompt, begin_answer: bool = True) -> str:
        """Renders a conversation up to the beginning of the answer, or without it. `system` is not
        added if it begins with a system or developer message; its tools override those in
        `variables`."""
        return self._render(question, begin_answer=begin_answer)

    def answered(self, question: Prompt, answer: str) -> tuple[str, str]:
        """Renders what follows `render(question)` once the assistant has answered.

        Returns:
          The answer as the template writes it, or unchanged if the template begins a finished
          answer differently or omits a part of it (such as reasoning); and the text that the
          template writes after the answer, or ''.
        """
        begun = self.render(question)
        _, found, behind = self._render(question, _CONTENT).rpartition(_CONTENT)
        ending = behind if found else ""
        whole = self._render(question, answer)
        written = whole.removeprefix(begun).removesuffix(ending)
        if whole != begun + written + ending or _letters(answer) not in _letters(written):
            written = answer
        return written, ending

    def _render(
        self, question: Prompt, answer: str | None = None, begin_answer: bool = True
    ) -> str:
        variables = dict(self.variables)
        messages: Sequence[Mapping[str, Any]]
        if isinstance(question, str):
            messages = [{"role": "user", "content": question}]
        elif isinstance(question, Mapping):
            messages = question["messages"]
            variables["tools"] = question["tools"]
        else:
            messages = question
        if self.system and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.now is not None:
            variables["strftime_now"] = self.now.strftime
        if answer is None:
            return self.template.render(messages, variables, begin_answer)
        messages = [*messages, {"role": "assistant", "content": answer}]
        return self.template.render(messages, variables, begin_answer=False)


def _with_arguments(message: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Copies a message, and changes the arguments of its tool calls."""
    message = dict(message)
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        message["tool_calls"] = [_changed(call, change) for call in calls]
    return message


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _changed(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: Any) -> Any:
    """Returns what JSON text holds if it is an object. OpenAI's API gives arguments so, and most
    templates would quote the text."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(value := json.loads(arguments), dict):
                return value
    return arguments


def _letters(text: str) -> str:
    """Removes white space, which templates may change, from a text."""
    return "".join(text.split())
