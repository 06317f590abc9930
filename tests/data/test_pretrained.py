"""Tokenizers of Hugging Face directories: special tokens, end ids, text that comes in pieces."""

from __future__ import annotations

import json
import types

import hypothesis
import pytest
import tiny_checkpoint
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, processors

from fp8rl_jax.data import (
    ByteTokenizer,
    PretrainedTokenizer,
    encode_prompt,
    load_tokenizer,
    pad_prompts,
    tokenizer_files,
)
from fp8rl_jax.data.tokenizer import ReaderTokenizer
from fp8rl_jax.errors import UserError


@pytest.fixture
def write(tmp_path):
    return lambda **changes: tiny_checkpoint.write(tmp_path / "model", **changes)


def test_ends_are_those_of_both_files(write):
    """The tokenizer's end token is first; generation_config.json adds others, once each."""
    tokenizer = PretrainedTokenizer(write())
    assert (tokenizer.eos_id, tokenizer.eos_ids) == (2, (2, 0))
    assert tokenizer.pad_id == 3 and tokenizer.bos_id is None
    ids = tokenizer.encode("the cat")
    for end in (0, 2):
        assert tokenizer.decode([*ids, end, *ids]) == "the cat"
    assert tokenizer.decode([1, *ids, 3]) == "the cat", "other special tokens have no text"


@pytest.mark.parametrize(
    ("changes", "eos_ids"),
    [
        ({"generation_config": {"eos_token_id": 1}}, (2, 1)),
        ({"generation_config": {"eos_token_id": None}}, (2,)),
        (
            {"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [0, 1]}},
            (2, 0, 1),
        ),
        ({"tokenizer_config": {"eos_token": None}}, (0, 2)),
    ],
)
def test_where_ends_come_from(changes, eos_ids, write):
    assert PretrainedTokenizer(write(**changes)).eos_ids == eos_ids


def test_padding_without_a_name_is_the_end(write):
    """Masks carry the truth, so the end token may fill the slots behind it."""
    tokenizer = PretrainedTokenizer(write(tokenizer_config={"pad_token": None}))
    assert tokenizer.pad_id == tokenizer.eos_id


def test_special_tokens_map_and_template_file(write):
    """The older file names tokens; a template file wins over the one in the settings."""
    path = write(tokenizer_config={"eos_token": None}, generation_config={"eos_token_id": None})
    (path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|end|>"}}')
    (path / "chat_template.jinja").write_text("{{ eos_token }}!")
    tokenizer = PretrainedTokenizer(path)
    assert tokenizer.eos_ids == (0,)
    assert tokenizer.chat_template.render([]) == "<|end|>!"


def test_several_templates_by_name(write):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = write(tokenizer_config={"chat_template": named})
    assert PretrainedTokenizer(path).chat_template.render([]) == "d"
    path = write(tokenizer_config={"chat_template": None})
    assert PretrainedTokenizer(path).chat_template is None


@pytest.mark.parametrize(("setting", "begins"), [(None, True), (False, False), (True, True)])
@pytest.mark.parametrize("processor", [True, False])
def test_begin_of_sequence(setting, begins, processor, write):
    """add_bos_token decides; without it the post-processor of tokenizer.json does."""
    path = write(tokenizer_config={"bos_token": "<|turn|>", "add_bos_token": setting})
    if processor:
        reader = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        reader.post_processor = processors.TemplateProcessing(
            single="<|turn|> $A", special_tokens=[("<|turn|>", 1)]
        )
        reader.save(str(path / "tokenizer.json"))
    tokenizer = PretrainedTokenizer(path)
    begins = begins if setting is not None else processor
    assert tokenizer.bos_id == (1 if begins else None)
    assert encode_prompt("the", tokenizer)[:1] == ([1] if begins else tokenizer.encode("the")[:1])
    assert 1 not in tokenizer.encode("the")


def test_special_tokens_in_a_text_become_ids(write):
    """A rendered template is text; its markers must be the tokens that the model knows."""
    tokenizer = PretrainedTokenizer(write())
    assert tokenizer.encode("<|turn|>the<|stop|>")[0] == 1
    assert tokenizer.encode("<|turn|>the<|stop|>")[-1] == 2


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, r"has no tokenizer\.json"),
        ("tokenizer.json", "{}", r"is no tokenizer\.json"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is damaged"),
        ("tokenizer_config.json", "[]", r"it holds no object"),
        ("tokenizer_config.json", '{"eos_token": "<x>"}', r"'<x>' as eos_token"),
        ("tokenizer_config.json", '{"chat_template": "{%"}', r"no Jinja"),
        ("generation_config.json", "{}", r"names no end of sequence"),
    ],
)
def test_directories_that_cannot_be_read(file, content, words, write):
    path = write(tokenizer_config={"eos_token": None})
    if content is None:
        (path / file).unlink()
    else:
        (path / file).write_text(content)
    with pytest.raises(UserError, match=words) as error:
        PretrainedTokenizer(path)
    assert "\n" not in str(error.value)


def test_load_tokenizer_takes_directories_and_the_checkpoint(write):
    path = write()
    config = types.SimpleNamespace(tokenizer=str(path))
    assert isinstance(load_tokenizer(config), PretrainedTokenizer)
    config.tokenizer = "checkpoint"
    assert isinstance(load_tokenizer(config, str(path)), PretrainedTokenizer)
    with pytest.raises(UserError, match=r"model\.checkpoint is empty"):
        load_tokenizer(config)
    assert path / "tokenizer_config.json" in tokenizer_files("checkpoint", str(path))
    assert tokenizer_files("byte", str(path)) == []


def test_a_prompt_without_tokens_is_refused(tmp_path):
    """A word-level tokenizer has no token for a blank question: nothing samples from length 0."""
    reader = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "one": 1}, "</s>"))
    reader.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    reader.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = PretrainedTokenizer(tmp_path)
    assert pad_prompts(["one"], tokenizer, 4)[0].tolist() == [[1, 0, 0, 0]]
    with pytest.raises(UserError, match=r"'  ' has no token"):
        pad_prompts(["one", "  "], tokenizer, 4)


# Text in pieces.


def _byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer in SentencePiece's manner: words begin with a mark, unknown letters are bytes."""
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "▁": 257, "a": 258}
    vocab |= {"b": 259, "▁a": 260, "é": 261}
    model = tokenizers.models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>")
    reader = tokenizers.Tokenizer(model)
    reader.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    reader.add_special_tokens(["<s>", "</s>"])
    return reader


def _words() -> tokenizers.Tokenizer:
    reader = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<u>": 0, "one": 1, "two": 2}, "<u>")
    )
    reader.add_special_tokens(["<s>", "</s>"])
    return reader


_READERS = {
    "byte level": (tiny_checkpoint.byte_level(), 2),
    "byte fallback": (_byte_fallback(), 263),
    "words": (_words(), 4),
}


def _detokenizer(reader, *ends: int):
    tokenizer = ReaderTokenizer(reader)
    tokenizer.eos_ids = ends
    return tokenizer.detokenizer()


def _pieces(detokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """Texts of pushing `ids` in pieces of these sizes, and what finish adds."""
    out = []
    for size in sizes:
        out.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    return [*out, detokenizer.push(ids), detokenizer.finish()]


@pytest.mark.parametrize("name", _READERS)
@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(st.data())
def test_pieces_make_the_whole(name, data):
    """Any ids, special, unknown and half characters included, in pieces of any size."""
    reader, end = _READERS[name]
    ids = data.draw(st.lists(st.integers(0, reader.get_vocab_size() + 1), max_size=24))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=6))
    ends = [i for i, token in enumerate(ids) if token == end]
    whole = reader.decode(ids[: ends[0]] if ends else ids)
    pieces = _pieces(_detokenizer(reader, end), ids, sizes)
    assert "".join(pieces) == whole


def test_a_run_of_bytes_goes_on_behind_a_special_token():
    """Special tokens are left out before bytes are decoded: the run around one is a single run."""
    reader, _ = _READERS["byte fallback"]
    good, bad = 100, 182
    for ids in ([good, 262, bad], [good, 262, 999, bad, 258], [good, 262, 258]):
        assert "".join(_pieces(_detokenizer(reader), ids, [1, 1])) == reader.decode(ids)


@pytest.mark.parametrize("name", ["byte level", "bytes"])
@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.text(max_size=12))
@hypothesis.example("漢字🦜é")
def test_no_piece_holds_half_a_character(name, text):
    """Token by token, a good text never shows U+FFFD, and each piece is shown at once."""
    hypothesis.assume("\ufffd" not in text)
    if name == "bytes":
        tokenizer = ByteTokenizer()
        ids, pieces = tokenizer.encode(text), tokenizer.detokenizer()
    else:
        reader, end = _READERS[name]
        ids, pieces = reader.encode(text).ids, _detokenizer(reader, end)
    hypothesis.assume(not any(special in text for special in tiny_checkpoint.SPECIAL))
    shown = [pieces.push([token]) for token in ids]
    assert "\ufffd" not in "".join(shown)
    assert "".join(shown) == text
    assert pieces.finish() == ""


def test_nothing_is_shown_behind_the_end():
    tokenizer = ByteTokenizer()
    pieces = tokenizer.detokenizer()
    assert pieces.push([104, 105, tokenizer.eos_id, 33]) == "hi"
    assert pieces.push([33]) == "" and pieces.finish() == ""


def test_half_a_character_at_the_end_is_shown_by_finish():
    pieces = ByteTokenizer().detokenizer()
    assert pieces.push([97, 0xE6, 0xBC]) == "a"
    assert pieces.finish() == "\ufffd"
