"""What an environment says, as tokens between two replies: with the template's marks, none twice,
and nothing encoded anew."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import (
    ByteTokenizer,
    ChatFormat,
    ChatTemplate,
    Turns,
    encode_conversation,
    encode_prompt,
    pad_demonstrations,
)
from fp8rl_jax.data.turns import transcript

_CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\x04\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As templates of reasoning models: thoughts of all but the last answer are left out.
_FORGETS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}{% endif %}\x04\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As GLM's: the mark of the next role ends a reply.
_ROLES = (
    "{% for m in messages %}{{ {'user': '\x06', 'tool': '\x07'}.get(m.role, '<|assistant|>') }}"
    "\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_REFUSES = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
_STRICT = _REFUSES + _CHATML
_END = 4  # last token of a reply that the template ends so
_CUT = ord("e")  # last token of a reply that was cut


@dataclasses.dataclass(frozen=True)
class _Bytes(ByteTokenizer):
    """Bytes, of which some end a reply; "\x08" and "\x04" are the marks that Llama ends it with."""

    eos_id: int = 4
    eos_ids: tuple[int, ...] = (4, 5, 6, 7, 8)

    def first_added(self, text: str) -> tuple[int, str] | None:
        if text in ("<|eom_id|>", "<|eot_id|>"):
            return {"<|eom_id|>": (8, "\x08"), "<|eot_id|>": (4, "\x04")}[text]
        return (4, "\x04") if "\x04" in text else None


def _turns(template: str = "", most: int = 20, role: str = "tool") -> Turns:
    chat = ChatFormat(ChatTemplate(template, {}, "here")) if template else None
    return Turns(_Bytes() if template else ByteTokenizer(), chat, role, most)


def _text(tokens: list[int]) -> str:
    return bytes(tokens).decode()


def test_plain_text_is_a_line():
    turns = _turns(most=5)
    assert turns.slots == 6
    assert turns.encode(["<"], 258) == ([*b"<\n"], ["<"])
    assert turns.encode([""], 258) == ([*b"\n"], [""])
    assert turns.encode(["123456"], _CUT) == ([*b"12345\n"], ["12345"])
    assert turns.encode(["1", "2"], _CUT) == ([*b"1\n2\n"], ["1\n2"])


def test_the_template_writes_around_it():
    """After a reply that drew its end token, that token is not written again."""
    turns = _turns(_CHATML)
    tokens, said = turns.encode(["7"], _CUT)
    assert (_text(tokens), said) == ("\x04\n<|tool|>7\x04\n<|assistant|>", ["7"])
    assert _text(turns.encode(["7"], _END)[0]) == "\n<|tool|>7\x04\n<|assistant|>"
    assert turns.slots == 20 + len("\x04\n<|tool|>\x04\n<|assistant|>")


def test_long_observations_are_cut():
    turns = _turns(_CHATML, most=3)
    tokens, said = turns.encode(["äöü"], _END)  # half of a character is left
    assert said == ["ä"] and len(tokens) <= turns.slots
    assert _text(tokens).startswith("\n<|tool|>ä\x04")


def test_an_end_behind_white_space_is_not_repeated():
    """As templates of Llama 2 write it."""
    turns = _turns(_CHATML.replace("\x04", " \x04"))
    assert _text(turns.encode(["7"], _END)[0]) == "\n<|tool|>7 \x04\n<|assistant|>"
    assert _text(turns.encode(["7"], _CUT)[0]).startswith(" \x04\n<|tool|>")


@pytest.mark.parametrize(
    ("template", "role", "last", "behind"),
    [
        (_CHATML, "tool", 4, "\n<|tool|>7\x04\n<|assistant|>"),
        (_CHATML, "tool", 5, "\x04\n<|tool|>7\x04\n<|assistant|>"),
        (_CHATML, "tool", 8, "\n<|tool|>7\x04\n<|assistant|>"),  # Llama's end of a message
        (_ROLES, "tool", 5, "\x07\n7<|assistant|>\n"),
        (_ROLES, "tool", 6, "\x07\n7<|assistant|>\n"),
        (_ROLES, "tool", 7, "\n7<|assistant|>\n"),
        (_ROLES, "user", 6, "\n7<|assistant|>\n"),
        (_ROLES, "user", _CUT, "\x06\n7<|assistant|>\n"),
    ],
)
def test_only_the_end_that_was_drawn_is_left_out(template, role, last, behind):
    turns = _turns(template, role=role)
    assert _text(turns.encode(["7"], last)[0]) == behind
    assert len(turns.encode(["7" * 30], last)[0]) <= turns.slots


def test_the_template_gets_the_tools():
    shown = "{% if tools %}[{{ tools | length }} tools]{% endif %}"
    turns = _turns(_CHATML.replace("{% for", shown + "{% for").replace("<|tool|>", "<|t|>"))
    template = (
        "{% for m in messages %}<{{ m.role if tools else 'none' }}>{{ m.content }}{% endfor %}"
    )
    with_tools = dataclasses.replace(_turns(template), tools=[{"name": "f"}])
    assert _text(with_tools.encode(["7"], _END)[0]) == "<tool>7"
    assert turns.slots == dataclasses.replace(turns, tools=[{}]).slots


def test_a_conversation_is_its_rendering():
    """Prompt, replies and what is said between them, one after another: the template's text."""
    turns = _turns(_CHATML)
    said = [("assistant", "one"), ("tool", "two"), ("assistant", "three"), ("tool", "four")]
    messages = [{"role": role, "content": text} for role, text in said]
    prompt, response, drawn = encode_conversation("ask", messages[:3], _Bytes(), turns.chat, turns)
    assert prompt == encode_prompt("ask", _Bytes(), turns.chat)
    asked = {"role": "user", "content": "ask"}
    whole = turns.chat.template.render([asked, *messages[:3]], begin_answer=False)
    assert _text(prompt + response) == whole.removesuffix("\n")
    own = [token for token, learnt in zip(response, drawn, strict=True) if learnt]
    assert _text(own) == "one\x04three\x04"
    assert transcript(messages) == "one\n[tool] two\nthree\n[tool] four"


def test_demonstrations_teach_replies_alone():
    shown = [
        {"role": role, "content": text}
        for role, text in (("assistant", "5"), ("tool", "<"), ("assistant", "42"))
    ]
    found = pad_demonstrations([("a", shown), ("bc", "7")], ByteTokenizer(), 4, 9, turns=_turns())
    eos, pad = ByteTokenizer().eos_id, ByteTokenizer().pad_id
    assert found.targets.tolist()[0] == [*b"5", eos, *b"<\n42", eos, pad, pad]
    assert found.mask.tolist()[0] == [True] * 2 + [False] * 2 + [True] * 3 + [False] * 2
    assert found.ends.tolist() == [7, 2] and found.lengths.tolist() == [3, 4]
    with pytest.raises(UserError, match=r"set env\.step or env\.tools"):
        pad_demonstrations([("a", shown)], ByteTokenizer(), 4, 9)
    for wrong, said in (
        (shown[:2], "ends with a reply of the assistant"),
        (shown[1:], "message 1 has the role 'tool'"),
        ([*shown[:2], {"role": "assistant", "content": None}], "message 3 has no text"),
    ):
        with pytest.raises(UserError, match=said):
            pad_demonstrations([("a", wrong)], ByteTokenizer(), 4, 9, turns=_turns())
    one = pad_demonstrations([("a", shown[:1])], ByteTokenizer(), 4, 9)
    assert one.targets.tolist()[0][:2] == [*b"5", eos], "one reply needs no environment"


def test_templates_that_cannot_go_on():
    _turns(_CHATML).check()
    _turns().check()
    with pytest.raises(UserError, match=r"leaves out a reply .* 'user', or take another template"):
        _turns(_FORGETS).check()
    with pytest.raises(UserError, match="no tools"):
        _turns(_STRICT).check()
    _turns(_STRICT, role="user").check()
    deaf = _CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
    with pytest.raises(UserError, match="leaves out what the environment says: set env"):
        _turns(deaf).check()
    counts = _CHATML.replace("{{ m.content }}", "{{ m.content }}{{ loop.index }}")
    with pytest.raises(UserError, match="behind the first: take another template"):
        _turns(counts, role="user").check()
    thoughts = _CHATML.replace(
        "{{ m.content }}", "{{ m.content if loop.index0 > 1 else 'a thought' + m.content }}"
    )
    _turns(thoughts).check()


def test_an_observation_may_hold_any_text():
    turns = _turns(_CHATML, most=60)
    said = "a reply like no other\x04\n<|tool|>"
    assert _text(turns.encode([said], _CUT)[0]) == f"\x04\n<|tool|>{said}\x04\n<|assistant|>"


# Which families can converse with observations in the role tool and user, by TRL's copies of their
# templates. Gemma 3 knows no role tool; DeepSeek-V3 opens the first answer of tools alone.
_FAMILIES = {
    "qwen2_5": "tool user",
    "qwen3": "tool user",
    "qwen3_training": "tool user",
    "llama3_1": "tool user",
    "gemma3": "user",
    "glm4moe": "tool user",
    "gptoss": "tool user",
    "deepseekv3": "user",
    "phi3": "user",
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_templates_of_families(family):
    trl = pytest.importorskip("trl", reason="needs trl: pip install 'fp8rl_jax[oracles]'")
    file = pathlib.Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja"
    accepted = []
    for role in ("tool", "user"):
        template = ChatTemplate(file.read_text(), {"bos_token": "<s>", "eos_token": "</s>"}, family)
        turns = Turns(ByteTokenizer(), ChatFormat(template), role, 64)
        try:
            turns.check()
        except UserError as error:
            assert "set env.observation_role to 'user'" not in str(error) or role == "tool"
            continue
        assert "LOWER than 17" in turns._between(["LOWER than 17"])
        accepted.append(role)
    assert " ".join(accepted) == _FAMILIES[family]
