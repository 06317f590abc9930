"""A GRPO step beside one of TRL, in one run: wall seconds and CPU seconds.

TRL wants packages of its own, so it runs in an environment of its own, as a process that makes one
step whenever it is told to; the two take turns.

    python -m venv trl-env && trl-env/bin/pip install trl torch
    JAX_PLATFORMS=cpu python docs/scripts/beside_trl.py --python=trl-env/bin/python

Both have random weights of one Qwen3 shape of 4.5M parameters, 4 prompts of 64 tokens with 8
samples each, and 128 new tokens at temperature 1 from the whole vocabulary. A step samples, rewards
each sample with its share of even tokens, and makes one AdamW update without a reference.
TRL generates with Hugging Face transformers, in float32 and in bf16 (autocast). In brackets: over
the faster of the two.

With --tail responses have up to 512 tokens and end at each with a probability of 1/128: 125 tokens
in the mean. There one token has a bias on its logit; here the lengths are drawn (of the random
models, whose embeddings are tied here, one repeats itself), slots are filled again when a response
ends, and the learner computes rows of several sequences. TRL's GRPO has padded ones alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import time

import numpy as np

PROMPTS, GROUP, PROMPT = 4, 8, 64
_ENDS = 64  # tokens that end a response with --tail
_SLOTS = 16  # of continuous batching, with --tail
_ROW = 1024  # slots of a packed row
SHAPE = dict(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)


def _new(tail: bool) -> int:
    return 512 if tail else 128


def _serve(dtype: str, tail: bool) -> None:
    """The process with TRL: answers each line with the seconds of one step."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    out, sys.stdout = sys.stdout, sys.stderr  # TRL prints, too
    torch.manual_seed(0)
    words = Tokenizer(WordLevel({str(i): i for i in range(SHAPE["vocab_size"])}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="0", eos_token="1", pad_token="2"
    )
    draw = torch.randint(3, SHAPE["vocab_size"], (64, PROMPT)).tolist()
    tokens = []

    def reward(completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        return [sum(i % 2 == 0 for i in row) / len(row) for row in completion_ids]

    class Turns(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if not sys.stdin.readline():
                raise SystemExit
            self.start = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **_):
            wall, cpu = time.perf_counter(), time.process_time()
            answer = [wall - self.start[0], cpu - self.start[1], tokens.pop()]
            print(json.dumps(answer), file=out, flush=True)

    settings = GRPOConfig(
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=_new(tail),
        generation_kwargs={"sequence_bias": [[[1], math.log(_ENDS)]]} if tail else None,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        beta=0.0,
        learning_rate=1e-4,
        max_steps=1000,
        use_cpu=True,
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        output_dir="/tmp/x",
    )
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, eos_token_id=1, pad_token_id=2))
    data = Dataset.from_dict({"prompt": [" ".join(map(str, row)) for row in draw]})
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.train()


class _Theirs:
    """TRL's process."""

    def __init__(self, python: str, dtype: str, tail: bool):
        command = [python, __file__, f"--serve={dtype}", *["--tail"] * tail]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self) -> tuple[float, float, int]:
        print(file=self.process.stdin, flush=True)
        return tuple(json.loads(self.process.stdout.readline()))


class _Partial:
    """Samples as `rollout.most_versions=2` does: each call completes the responses that the call
    before it has begun, and begins others in the slots that they leave."""

    def __init__(self, sample, rows: int, new: int):
        self._sample, self._rows = sample, rows
        none = np.zeros((rows, new), np.int32)
        self._none = (none, none.astype(np.float32), none[:, 0], none[:, 0] > 0)
        self._limits, self._begun = None, self._none
        self._keys = np.zeros((rows, 2), np.uint32)

    def __call__(self, weights, prompts, requests):
        import jax

        from fp8rl_jax.rollout import Earlier, Requests

        keys = np.tile(jax.random.key_data(requests.key), (self._rows, 1))
        names = ("tokens", "logprobs", "counts", "finished")
        begun = [np.concatenate(pair) for pair in zip(self._begun, self._none, strict=True)]
        earlier = Earlier(
            **dict(zip(names, begun, strict=True)),
            keys=np.concatenate([self._keys, keys]),
            needed=np.int32([self._rows]),
        )
        limits = requests.limits
        twice = Requests(
            lengths=np.concatenate([requests.lengths, requests.lengths]),
            key=requests.key,
            sample_ids=np.concatenate([requests.sample_ids, requests.sample_ids]),
            temperature=np.concatenate([requests.temperature, requests.temperature]),
            limits=np.concatenate([limits if self._limits is None else self._limits, limits]),
            rope=requests.rope,
        )
        both = np.concatenate([prompts, prompts])
        out = jax.device_get(self._sample(weights, both, twice, earlier=earlier))
        arrays = (out.tokens, out.logprobs, out.mask.sum(1, dtype=np.int32), out.finished)
        self._begun, self._limits = tuple(x[self._rows :] for x in arrays), limits
        self._keys = keys
        first = {n: getattr(out, n)[: self._rows] for n in ("tokens", "mask", *names[1::2])}
        return dataclasses.replace(out, **first)


def _ours(recipe: str, tail: bool, versions: int = 1):
    """A function that makes one step: (wall seconds, CPU seconds, tokens)."""
    import jax

    from fp8rl_jax.batch import make_batch, pack
    from fp8rl_jax.bench import rollout as bench
    from fp8rl_jax.data import join
    from fp8rl_jax.learner import ForwardPass, GradientProgram, make_train_step, new_state
    from fp8rl_jax.models import ModelConfig, init_params, pages_of
    from fp8rl_jax.quant import get_recipe
    from fp8rl_jax.rl.advantages import group_mean, group_std
    from fp8rl_jax.rollout import Batching, ContinuousSampler, HalvedSampler, make_refit
    from fp8rl_jax.training.optimizer import learning_rates, make_optimizer

    model, rows = ModelConfig(**SHAPE), PROMPTS * GROUP
    new = _new(tail)
    cell = bench.Cell(rows, PROMPT, new, GROUP)
    optimizer = make_optimizer(learning_rates(1e-4, 0), 0.9, 0.999, 0.0, 1.0)
    key = jax.random.key(0, impl="threefry2x32")
    state = new_state(init_params(model, key), optimizer, jax.random.key_data(key), recipe)
    if tail:
        pages = Batching(_SLOTS, 1 + _SLOTS * pages_of(PROMPT + new))
        sample = ContinuousSampler(model, recipe, cell.settings, pages)
        if versions > 1:
            sample = _Partial(sample, rows, new)
    else:
        sample = HalvedSampler(model, recipe, cell.settings)
    refit, gradients = make_refit(recipe), GradientProgram(ForwardPass(model, get_recipe(recipe)))
    train_step = make_train_step(gradients, optimizer)
    weights = refit(state.params)[0]
    limits = np.full(rows, new, np.int32)
    _, prompts, requests = bench.arguments(model, weights, cell, rows, limits)
    repeated, starts = np.repeat(prompts, GROUP, axis=0), np.repeat(requests.lengths, GROUP)
    rng = np.random.default_rng(0)

    def step() -> tuple[float, float, int]:
        nonlocal state, weights, key, limits
        if tail:
            limits = np.minimum(rng.geometric(1 / 128, rows), new).astype(np.int32)
        start = time.perf_counter(), time.process_time()
        key = jax.random.fold_in(key, 0)
        asked = dataclasses.replace(requests, key=key, limits=limits)
        rollout = jax.device_get(sample(weights, prompts, asked))
        rewards = np.where(rollout.mask, rollout.tokens % 2 == 0, 0).sum(1) / rollout.mask.sum(1)
        groups = rewards.reshape(-1, GROUP)
        advantages = group_std(group_mean(groups).reshape(-1, 1), groups, np.ones((rows, 1), bool))
        batch = make_batch(
            tokens=join(repeated, starts, rollout.tokens, 0),
            prompt_lengths=starts,
            targets=rollout.tokens,
            mask=rollout.mask,
            temperature=requests.temperature,
            advantages=advantages,
            old_logprobs=rollout.logprobs,
        )
        if tail:
            batch, _ = pack(batch, PROMPT + new, _ROW, 1)
        state, _, _ = train_step(state, batch, requests.rope)
        weights = jax.block_until_ready(refit(state.params)[0])
        wall, cpu = time.perf_counter(), time.process_time()
        return wall - start[0], cpu - start[1], int(rollout.mask.sum())

    return step


def _compare(python: str, repeats: int, tail: bool) -> None:
    peers = {f"TRL, {dtype}": _Theirs(python, dtype, tail) for dtype in ("float32", "bfloat16")}
    steps = {f"ours, {recipe}": _ours(recipe, tail) for recipe in ("fp8", "bf16")}
    if tail:
        steps["ours, fp8, partial rollouts"] = _ours("fp8", tail, 2)
    steps |= peers
    found = {name: [] for name in steps}
    for step in steps.values():
        step()  # compiles, or allocates
        step()  # the first one that completes what was begun
    for _ in range(repeats):
        for name, step in steps.items():
            found[name].append(step())
    for peer in peers.values():
        peer.process.stdin.close()
    print(f"{PROMPTS} x {GROUP} sequences, {PROMPT} + {_new(tail)} tokens, medians of {repeats}")
    best = np.array(min((found[name] for name in peers), key=lambda rows: np.median(rows, 0)[0]))
    for name, rows in found.items():
        wall, cpu, tokens = np.median(rows, axis=0)
        over = np.median(np.array(rows) / best, axis=0)
        print(
            f"{name:28} {wall:6.2f} s ({over[0]:.2f})  {cpu:6.2f} CPU s ({over[1]:.2f})  "
            f"{tokens:.0f} tokens"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", help="of the environment with TRL")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tail", action="store_true", help="long-tailed responses")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        _serve(chosen.serve, chosen.tail)
    elif not chosen.python:
        parser.error("--python: name the python of the environment with TRL")
    else:
        _compare(chosen.python, chosen.repeats, chosen.tail)


if __name__ == "__main__":
    main()
