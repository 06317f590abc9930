"""Lengths of questions that the next start does not count again."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pytest
import tiny_checkpoint
import tiny_config

from fp8rl_jax import data
from fp8rl_jax.config import saved_config
from fp8rl_jax.training import kept_lengths, questions, runtime

_FITS = 20


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Loads the questions of a file, as a start does; (questions by split, how many it counted)."""
    monkeypatch.setattr(kept_lengths, "_FEWEST", 2)
    checkpoint = tiny_checkpoint.write(tmp_path / "model")
    file = tmp_path / "rows.jsonl"

    def run(texts, most=_FITS, chat=False, **fields_of_data):
        rows = [{"question": text, "answer": str(i)} for i, text in enumerate(texts)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = tiny_config.get_config().to_dict()
        fields["model"] = {"checkpoint": str(checkpoint)}
        fields["data"] = {"tokenizer": "checkpoint", "chat": chat, **fields_of_data}
        fields["run"] |= {"cache_dir": str(tmp_path / "cache"), "dir": str(tmp_path / "run")}
        fields["env"] = {"task": str(file), "reward": "exact_match", "eval_fraction": 0.2}
        fields["rollout"] |= {"max_prompt_tokens": most, "max_new_tokens": 8, "prompts_per_step": 2}
        fields["sft"] |= {"steps": 1, "batch_size": 1}
        config = saved_config(fields, "here")
        counted = []
        for name in ("encode_prompt", "encode_conversation"):
            plain = getattr(data, name)
            spy = lambda *a, plain=plain: counted.append(a[0]) or plain(*a)
            monkeypatch.setattr(questions, name, spy)
        tokenizer = data.load_tokenizer(config.data, config.model.checkpoint)
        found = questions.load_data(config, tokenizer, runtime._chat_format(config, tokenizer))
        return found, len(counted)

    return run


def _texts(count: int) -> list[str]:
    return [f"What is {i} + {'1' * (i % 30)}?" for i in range(count)]


def test_a_second_start_counts_nothing(start):
    first, counted = start(_texts(60))
    assert counted >= 60
    again, counted = start(_texts(60))
    assert counted == 0 and again == first
    assert "too long" in first.note and 0 < len(first.questions["train"]) < 48
    # Another limit needs no other lengths; further questions are the only ones that are counted.
    other, counted = start(_texts(60), most=30)
    assert counted == 0 and len(other.questions["train"]) > len(first.questions["train"])
    _, counted = start(_texts(70))
    assert counted == 10


def test_what_lengths_depend_on(start, tmp_path):
    start(_texts(40), most=70, chat=True)
    assert start(_texts(40), most=70, chat=True)[1] == 0
    assert start(_texts(40), most=70, chat=False)[1] >= 40
    assert start(_texts(40), most=70, chat=True, system_prompt="Be brief.")[1] >= 40


def test_a_damaged_file_is_counted_anew(start, tmp_path):
    first, _ = start(_texts(40))
    (file,) = (tmp_path / "cache").glob("lengths-*")
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    for number in range(12):
        damaged = bytearray(whole)
        place = [5, 40, len(whole) - 1, *rng.integers(0, len(whole), 6)][number % 9]
        damaged[place] ^= 1 + number
        file.write_bytes([damaged, whole[:place], b"", b"{}"][number // 9 + (number % 9 == 8)])
        again, counted = start(_texts(40))
        assert counted >= 40 and again == first
    assert start(_texts(40))[1] == 0


def test_messages_may_hold_what_json_has_not(tmp_path):
    config = saved_config(tiny_config.get_config().to_dict() | {"model": {}}, "here")
    config.run.cache_dir = str(tmp_path)
    message = {"role": "user", "content": "2 + 3", "at": datetime.datetime(2026, 1, 1)}
    kept, other = (kept_lengths.KeptLengths(config, None) for _ in range(2))
    assert kept.of([[message], None], lambda: (5, 0)) == (5, 0)
    assert kept.of([[dict(reversed(message.items()))], None], lambda: (6, 0)) == (6, 0)
    kept._counted = 1000
    assert not other._known  # nothing is written yet
    kept.keep()
    again = kept_lengths.KeptLengths(config, None)
    assert again.of([[message], None], lambda: (0, 0)) == (5, 0)


def test_a_template_that_tells_the_time(start, tmp_path, monkeypatch):
    """Another run may have another date in its prompts; a resumed one has the same."""
    path = tmp_path / "model" / "tokenizer_config.json"
    template = tiny_checkpoint.TEMPLATE + "{{ strftime_now('%d %b') }}"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    dates = [datetime.datetime(2026, 1, day) for day in (1, 1, 2)]
    counts = []
    for date in dates:
        monkeypatch.setattr(runtime, "begun", lambda directory, date=date: date)
        counts.append(start(_texts(40), most=70, chat=True)[1])
    assert counts[0] >= 40 and counts[1] == 0 and counts[2] >= 40
