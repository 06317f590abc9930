"""Text to arrays and back, and the order of examples."""

import collections
import types

import hypothesis
import numpy as np
import pytest
import tokenizers
from hypothesis import strategies as st

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.data import ByteTokenizer, Stream, encode_prompt, join, load_tokenizer, pad_prompts

_BYTES = ByteTokenizer()
_PAD, _BOS, _EOS = 256, 257, 258


# Byte tokenizer.


@hypothesis.given(st.text())
@hypothesis.example("")
@hypothesis.example("naïve Ω 漢字 🦜 \x00\n")
def test_bytes_round_trip(text):
    """Every Unicode text comes back whole, through ids 0..255 only."""
    ids = _BYTES.encode(text)
    assert ids == list(bytearray(text, "utf-8"))
    assert _BYTES.decode(ids) == text
    assert _BYTES.decode(np.asarray(ids, np.int32)) == text


@pytest.mark.parametrize("special", [_PAD, _BOS, _EOS])
def test_bytes_decode_stops_at_the_first_special_token(special):
    """What stands behind a special token is no part of the text."""
    assert _BYTES.decode([104, 105, special, 33]) == "hi"


def test_bytes_decode_replaces_what_is_no_utf8():
    """A model may emit half a character: U+FFFD, not an exception."""
    assert _BYTES.decode([0xC3]) == "\ufffd"
    assert _BYTES.decode([97, 0xFF, 98]) == "a\ufffdb"


def test_bytes_ids_are_distinct_and_inside_the_vocabulary():
    """Special ids lie behind the 256 bytes and below vocab_size."""
    ids = [_BYTES.pad_id, _BYTES.bos_id, _BYTES.eos_id]
    assert ids == [_PAD, _BOS, _EOS]
    assert all(256 <= i < _BYTES.vocab_size for i in ids)


# Tokenizer of a file.

_VOCAB = ["<pad>", "<bos>", "<eos>", "<unk>", "one", "two", "plus"]


def _write_tokenizer(path, vocab):
    model = tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    # A template that would add <bos> by itself: the library's encode must not do so.
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    tokenizer.save(str(path))


def _config(path, **changes):
    fields = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return types.SimpleNamespace(tokenizer=str(path), **(fields | changes))


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    _write_tokenizer(path, {word: i for i, word in enumerate(_VOCAB)})
    return path


def test_load_tokenizer_byte():
    assert isinstance(load_tokenizer(_config("byte")), ByteTokenizer)


def test_file_tokenizer_ids(tokenizer_file):
    """Special ids by name, no special token added by encode, decode up to the end token."""
    tokenizer = load_tokenizer(_config(tokenizer_file))
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.vocab_size == len(_VOCAB)
    assert tokenizer.encode("one plus two") == [4, 6, 5]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([4, 6, 5]) == "one plus two"
    assert tokenizer.decode(np.int32([4, 2, 5])) == "one"
    assert tokenizer.decode([5, 0, 4]) == "two"
    assert encode_prompt("one", tokenizer) == [1, 4]


def test_file_tokenizer_takes_tokens_by_their_configured_names(tokenizer_file):
    """The names come from the configuration, in the right order."""
    tokenizer = load_tokenizer(_config(tokenizer_file, bos_token="one", eos_token="two"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (4, 5, 0)


def test_file_tokenizer_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.json is no file; write 'byte'"):
        load_tokenizer(_config(tmp_path / "nowhere.json"))


@pytest.mark.parametrize("content", ["not json", "{}", '{"model": 3}'])
def test_file_tokenizer_broken_file(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"broken\.json is no tokenizer\.json \(.+\)"):
        load_tokenizer(_config(path))


@pytest.mark.parametrize("field", ["bos_token", "eos_token", "pad_token"])
def test_file_tokenizer_missing_token(tokenizer_file, field):
    with pytest.raises(UserError, match=r"has no token '<\|other\|>'; name one that it has"):
        load_tokenizer(_config(tokenizer_file, **{field: "<|other|>"}))


def test_file_tokenizer_vocabulary_covers_every_id(tmp_path):
    """Ids with a gap: the embedding must have a row for the largest one."""
    path = tmp_path / "gap.json"
    _write_tokenizer(path, {word: i for i, word in enumerate(_VOCAB)} | {"far": 50})
    tokenizer = load_tokenizer(_config(path))
    assert max(tokenizer.encode("one far")) < tokenizer.vocab_size


# Streams.


def _take(items, batch_size, seed, count, position=0):
    stream = Stream(items, batch_size, seed)
    stream.position = position
    return [stream.next() for _ in range(count)]


def _flat(items, batch_size, seed, total):
    batches = _take(items, batch_size, seed, -(-total // batch_size))
    return [x for batch in batches for x in batch][:total]


@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(
    st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31 - 1), st.integers(0, 8)
)
def test_stream_resumes_from_any_position(size, batch_size, seed, position):
    """A stream set to a position gives the batches that an unbroken one gives from there."""
    whole = _take(range(size), batch_size, seed, position + 3)
    assert all(len(batch) == batch_size for batch in whole)
    assert _take(range(size), batch_size, seed, 3, position) == whole[position:]


def test_stream_position_counts_batches():
    stream = Stream(range(10), 4, 0)
    assert stream.position == 0
    stream.next(), stream.next()
    assert stream.position == 2


@hypothesis.settings(deadline=None, max_examples=8)
@hypothesis.given(st.integers(1, 20), st.integers(1, 24), st.integers(0, 2**31 - 1))
def test_stream_epochs_are_permutations(size, batch_size, seed):
    """Each run of len(items) examples holds every item once, across batch borders."""
    flat = _flat(range(size), batch_size, seed, 3 * size)
    for epoch in range(3):
        assert sorted(flat[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_stream_epochs_and_seeds_differ():
    """Twelve orders of 20 items (4 epochs, 3 seeds) are all different, and none is sorted."""
    orders = {tuple(epoch) for seed in range(3) for epoch in _take(range(20), 20, seed, 4)}
    assert len(orders) == 12
    assert tuple(range(20)) not in orders


def test_stream_order_does_not_depend_on_the_batch_size():
    """The batch size only cuts the sequence."""
    assert _flat(range(13), 5, 3, 39) == _flat(range(13), 1, 3, 39)


def test_stream_shuffles_evenly():
    """Over 150 seeds each of 3 items comes first about 50 times (5 sigma of a fair draw)."""
    first = collections.Counter(_take(range(3), 1, seed, 1)[0][0] for seed in range(150))
    assert all(20 < first[item] < 80 for item in range(3))


def test_stream_gives_the_items_themselves():
    """Items are arbitrary objects and are not turned into arrays."""
    items = [("a", 1), ("b", 2)]
    assert sorted(_flat(items, 2, 0, 2)) == items


# Padding.


def test_pad_prompts_layout():
    """Begin token, question, line feed, then padding to the right."""
    tokens, lengths = pad_prompts(["ab", "", "c"], _BYTES, 5)
    assert tokens.dtype == np.int32 and lengths.dtype == np.int32
    np.testing.assert_array_equal(
        tokens, [[_BOS, 97, 98, 10, _PAD], [_BOS, 10, _PAD, _PAD, _PAD], [_BOS, 99, 10, _PAD, _PAD]]
    )
    np.testing.assert_array_equal(lengths, [4, 2, 3])


def test_pad_prompts_takes_a_full_row_and_refuses_one_token_more():
    """The limit itself fits; the message names both numbers and the question."""
    tokens, lengths = pad_prompts(["abc"], _BYTES, 5)
    assert lengths[0] == 5 and _PAD not in tokens
    with pytest.raises(UserError, match=r"takes 6 tokens .* is 5: raise it to 6.*'abcd'"):
        pad_prompts(["abc", "abcd"], _BYTES, 5)


def test_join_puts_responses_behind_prompts():
    """No gap between prompt and response, padding behind both."""
    prompts = np.int32([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
    responses = np.int32([[7, 8], [9, 0], [10, 11]])
    tokens = join(prompts, np.int32([3, 1, 2]), responses, 0)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, [[1, 2, 3, 7, 8], [4, 9, 0, 0, 0], [5, 6, 10, 11, 0]])
    np.testing.assert_array_equal(prompts[1], [4, 0, 0])  # the argument is left alone


@hypothesis.given(st.data(), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_join_is_concatenation_row_by_row(data, rows, prompt_slots, response_slots):
    """Against Python lists: prompt[:length] + response + padding."""
    ids = st.integers(0, 99)
    matrix = lambda width: data.draw(
        st.lists(st.lists(ids, min_size=width, max_size=width), min_size=rows, max_size=rows)
    )
    prompts, responses = matrix(prompt_slots), matrix(response_slots)
    lengths = data.draw(st.lists(st.integers(1, prompt_slots), min_size=rows, max_size=rows))
    prompts = [p[:n] + [-1] * (prompt_slots - n) for p, n in zip(prompts, lengths, strict=True)]
    expected = [
        p[:n] + r + [-1] * (prompt_slots - n)
        for p, n, r in zip(prompts, lengths, responses, strict=True)
    ]
    joined = join(np.int32(prompts), np.int32(lengths), np.int32(responses), -1)
    np.testing.assert_array_equal(joined, expected)
