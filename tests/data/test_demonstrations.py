"""What fine-tuning teaches: the tokens behind a prompt, and the end that a rollout stops at."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
import tiny_checkpoint
import tokenizers
from tokenizers import decoders, pre_tokenizers

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import (
    ByteTokenizer,
    ChatFormat,
    ChatTemplate,
    PretrainedTokenizer,
    encode_demonstration,
    encode_prompt,
    load_tokenizer,
    merges,
    pad_demonstrations,
    with_turn_end,
)

_BYTES = ByteTokenizer()
_PAD, _BOS, _EOS = 256, 257, 258


def test_layout():
    """Prompt, answer and end token; the last two under the mask, padding not."""
    found = pad_demonstrations([("a", "42"), ("bc", "")], _BYTES, 5, 4)
    tokens, lengths, targets, ends, mask = found
    np.testing.assert_array_equal(ends, [3, 1])
    assert tokens.dtype == lengths.dtype == targets.dtype == np.int32 and mask.dtype == bool
    np.testing.assert_array_equal(tokens, [[_BOS, 97, 10, _PAD, _PAD], [_BOS, 98, 99, 10, _PAD]])
    np.testing.assert_array_equal(lengths, [3, 4])
    np.testing.assert_array_equal(targets, [[52, 50, _EOS, _PAD], [_EOS, _PAD, _PAD, _PAD]])
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0], [1, 0, 0, 0]])


def test_what_does_not_fit_is_refused():
    """The end token needs a slot too."""
    found = pad_demonstrations([("a", "1234")], _BYTES, 3, 5)
    assert found.mask.all() and found.targets[0, -1] == _EOS
    with pytest.raises(UserError, match=r"takes 6 tokens .* is 5: raise it to 6 \('12345'\)"):
        pad_demonstrations([("a", "1234"), ("b", "12345")], _BYTES, 3, 5)
    with pytest.raises(UserError, match=r"a prompt takes 4 tokens .* is 3: raise it to 4"):
        pad_demonstrations([("a", "1"), ("bc", "1")], _BYTES, 3, 5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Byte-level BPE; the end of a document is <|end|> (0), that of a turn <|stop|> (2)."""
    path = tmp_path_factory.mktemp("model") / "model"
    names = {"eos_token": "<|end|>", "bos_token": "<|turn|>"}
    tiny_checkpoint.write(path, tokenizer_config=names, generation_config={"eos_token_id": None})
    return PretrainedTokenizer(path)


# Templates by the manner of a family; what each writes behind a question and an answer of "4".
_TURNS = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
_BEGIN = "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
_MANNERS = {
    # Both a turn's and a document's end behind the last answer.
    "phi": (_TURNS + _BEGIN + "{% if not add_generation_prompt %}<|end|>{% endif %}", "4<|stop|>"),
    "chatml": (_TURNS + _BEGIN, "4<|stop|>"),
    # A blank before the end token.
    "llama 2": (
        "{% for m in messages %}{{ '[I] ' ~ m.content ~ ' [/I]' if m.role == 'user' else "
        "' ' ~ m.content ~ ' <|end|>' }}{% endfor %}",
        " 4 <|end|>",
    ),
    # No end token: the tokenizer's own.
    "words": (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}",
        "4\n\n<|end|>",
    ),
    # Empty reasoning before an answer that has none.
    "qwen3": (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n\n"
        "</think>\n\n{% endif %}{{ m.content }}<|stop|>\n{% endfor %}" + _BEGIN,
        "<think>\n\n</think>\n\n4<|stop|>",
    ),
    # The answer that is asked for begins with reasoning, an earlier one does not.
    "r1": (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
        "<|stop|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n<think>{% endif %}",
        "4<|stop|>",
    ),
}


@pytest.mark.parametrize("manner", _MANNERS)
def test_an_answer_in_a_chat_ends_as_the_template_ends_it(manner, tokenizer):
    """Up to the first end token; a rollout stops there, too."""
    source, taught = _MANNERS[manner]
    chat = ChatFormat(ChatTemplate(source, {"eos_token": "<|end|>"}, "here"))
    tokenizer = with_turn_end(tokenizer, chat)
    assert tokenizer.eos_ids == ((0, 2) if taught.endswith("<|stop|>") else (0,))
    assert tokenizer.eos_id == 0
    prompt, response = encode_demonstration("What is 2 + 2?", "4", tokenizer, chat)
    assert prompt == encode_prompt("What is 2 + 2?", tokenizer, chat)
    assert response == tokenizer.encode(taught)
    assert merges([("What is 2 + 2?", "4")], tokenizer, chat) == ""


def test_reasoning_that_a_template_leaves_out_is_taught(tokenizer):
    """An earlier answer loses its reasoning; the one that is taught keeps it."""
    source = _MANNERS["r1"][0].replace("<think>", "")
    chat = ChatFormat(ChatTemplate(source, {}, "here"))
    answer = "<think>2 and 2</think>4"
    _, response = encode_demonstration("?", answer, with_turn_end(tokenizer, chat), chat)
    assert response == tokenizer.encode(answer + "<|stop|>")


@pytest.mark.parametrize("in_chat", [True, False])
def test_an_answer_with_its_end_gets_no_second_one(in_chat, tokenizer):
    chat = ChatFormat(ChatTemplate(_TURNS + _BEGIN, {}, "here")) if in_chat else None
    end = "<|stop|>" if in_chat else "<|end|>"
    if chat:
        tokenizer = with_turn_end(tokenizer, chat)
    both = [encode_demonstration("?", text, tokenizer, chat) for text in ("the", "the" + end)]
    assert both[0] == both[1]


def test_a_template_that_refuses_the_trial_ends_as_the_tokenizer_does(tokenizer):
    source = "{% if messages|length < 3 %}{{ raise_exception('few') }}{% endif %}"
    assert with_turn_end(tokenizer, ChatFormat(ChatTemplate(source, {}, "here"))) is tokenizer


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """In SentencePiece's manner: every text that is encoded begins with the mark of a word."""
    vocab = {"<unk>": 0, "</s>": 1, "▁": 2, "4": 3, "?": 4, "▁4": 5, "\n": 6, "<s>": 7, "▁?": 8}
    model = tokenizers.models.BPE(vocab, [("▁", "4"), ("▁", "?")], unk_token="<unk>")
    reader = tokenizers.Tokenizer(model)
    reader.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    reader.decoder = decoders.Metaspace(prepend_scheme="first")
    reader.add_special_tokens(["</s>", "<s>"])
    path = tmp_path_factory.mktemp("marked")
    reader.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return PretrainedTokenizer(path)


def test_an_answer_has_no_mark_of_a_new_text(marked):
    """Right: what transformers makes of the text as a whole, behind the prompt's tokens."""
    assert marked.encode("4") == [5]
    assert encode_demonstration("?", "4", marked) == ([8, 6], [3, 1])
    assert merges([("?", "4")], marked) == ""
    chat = ChatFormat(ChatTemplate("{{ messages[0].content }}", {}, "here"))
    assert encode_demonstration("?", "4", marked, chat)[1] == [3, 1]


def test_letters_that_merge_with_the_prompt_count_as_the_prompts(tmp_path):
    """As TRL: the text's own tokens, taught behind as many as the prompt has alone; and said."""
    vocab = {"</s>": 0, "a": 1, "\n": 2, "\n\n": 3, "4": 4}
    reader = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("\n", "\n")]))
    reader.add_special_tokens(["</s>"])
    reader.save(str(tmp_path / "tokenizer.json"))
    names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "</s>")
    path = str(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(types.SimpleNamespace(tokenizer=path, **names))
    assert encode_prompt("a", tokenizer) == [0, 1, 2]
    assert encode_demonstration("a", "\n4", tokenizer) == ([0, 1, 3], [4, 0])
    assert encode_demonstration("a", "\n", tokenizer) == ([0, 1, 3], [0])
    assert merges([("a", "\n4"), ("a", "4")], tokenizer).endswith("in 1 of 2 demonstrations")
