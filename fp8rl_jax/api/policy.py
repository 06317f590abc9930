"""A policy as an immutable value: load, sample, score, train_step, compare.

Each call runs the programs of the main job (`training.engine`), on the policy's mesh. Prompt slots
are padded to a multiple of 16, and the number of prompts to a power of two, so that calls of
similar size share a compiled program. Padding changes no bit of samples and log-probabilities, and
counts in no loss and no metric of experts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
import reprlib
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from fp8rl_jax.api.fields import with_fields
from fp8rl_jax.api.programs import Programs
from fp8rl_jax.base.compilation_cache import use_compilation_cache
from fp8rl_jax.base.errors import NonFiniteError, UserError
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.base.json_file import plain
from fp8rl_jax.batch import Batch, make_batch
from fp8rl_jax.config.functions import OF_REPLIES
from fp8rl_jax.config.load import reset
from fp8rl_jax.data import Prompt, Tokenizer, encode_demonstration, encode_prompt, join, pad_rows
from fp8rl_jax.drift.compare import by_row
from fp8rl_jax.learner import TrainState
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.models.presets import PRESETS
from fp8rl_jax.policy.load import load_trained, round_slots
from fp8rl_jax.policy.source import directory_config, is_released
from fp8rl_jax.quant import Recipe
from fp8rl_jax.quant.kv import is_fresh
from fp8rl_jax.rl import mismatch_metrics
from fp8rl_jax.rollout import Rollout
from fp8rl_jax.sharding import batch_divisor
from fp8rl_jax.training import sample_step
from fp8rl_jax.training.engine import Prompts
from fp8rl_jax.training.learn import NonFiniteUpdate, learn, scored, weighed
from fp8rl_jax.training.runtime import Runtime, make_runtime
from fp8rl_jax.training.step_metrics import update_metrics

# Static batches of one reply, and one update on all samples of a call.
_RESET = (
    *("env.step", "env.tools", *OF_REPLIES),
    *("rollout.slots", "rollout.ahead", "rollout.most_versions", "mesh.rollout"),
    *("algo.epochs", "algo.num_minibatches"),
)


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """A policy under a recipe. It is immutable: `train_step` returns a new one.

    Attributes:
      programs: compiled programs of the configuration; the policy after an update shares them.
      state: parameters, optimiser state (empty before the first update), scaling states.
    """

    programs: Programs
    state: TrainState

    @property
    def params(self) -> dict[str, Any]:
        """The parameters in float32."""
        return self.state.params

    @property
    def model(self) -> ModelConfig:
        """The model's shapes."""
        return self.programs.runtime.resolved.model

    @property
    def config(self):
        """The complete configuration, which cannot be changed."""
        return self.programs.runtime.config

    @property
    def recipe(self) -> Recipe:
        """The learner's recipe; `rollout_recipe` is the sampler's."""
        return self.programs.runtime.resolved.learner_recipe

    @property
    def rollout_recipe(self) -> Recipe:
        return self.programs.runtime.resolved.rollout_recipe

    @property
    def tokenizer(self) -> Tokenizer:
        return self.programs.runtime.tokenizer

    @property
    def step(self) -> int:
        """Number of finished RL steps."""
        return int(self.state.step)

    @functools.cached_property
    def weights(self) -> Any:
        """The sampler's weights: the quantised parameters."""
        return self.programs.runtime.engine.refit(self.state).weights

    def __repr__(self) -> str:
        size = sum(x.size for x in jax.tree.leaves(self.params))
        recipes = dict.fromkeys((self.rollout_recipe.name, self.recipe.name))
        return f"Policy({size / 1e6:.2f}M parameters, {'/'.join(recipes)}, step {self.step})"


@dataclasses.dataclass(frozen=True, repr=False)
class Samples:
    """P prompts with G responses each, prompt-major: row p * G + g is response g of prompt p.

    Attributes:
      prompts: the P prompts as given to `sample`.
      texts: texts of the B = P * G responses.
      asked: prompt tokens, temperatures and random key.
      rollout: the responses on the host, with tokens, mask, logprobs and finished.
    """

    prompts: list[Prompt]
    texts: list[str]
    asked: Prompts
    rollout: Rollout

    @property
    def tokens(self) -> np.ndarray:
        """Token ids of the responses, (B, R) int32."""
        return np.asarray(self.rollout.tokens)

    @property
    def mask(self) -> np.ndarray:
        """(B, R) bool, False after the end of a response."""
        return np.asarray(self.rollout.mask)

    @property
    def logprobs(self) -> np.ndarray:
        """The sampler's log-probability of each token, (B, R) float32; 0 outside the mask."""
        return np.asarray(self.rollout.logprobs)

    @property
    def group_size(self) -> int:
        return len(self.texts) // len(self.prompts)

    def __repr__(self) -> str:
        return (
            f"Samples({len(self.prompts)} prompts x {self.group_size}, {int(self.mask.sum())} "
            "tokens)"
        )


@dataclasses.dataclass(frozen=True)
class Drift:
    """Differences between the learner's and the sampler's log-probabilities of the same tokens.

    Attributes:
      max: largest |difference|; 0.0 only if all are equal bit for bit.
      equal: share of tokens with equal log-probabilities.
      tokens: number of tokens.
      by_sequence: {'row', 'tokens', 'mean', 'max'} of |difference|, for each response.
      metrics: results of `rl.mismatch_metrics`, with the names of metrics.jsonl.
    """

    max: float
    equal: float
    tokens: int
    by_sequence: list[dict[str, float]] = dataclasses.field(repr=False)
    metrics: dict[str, float] = dataclasses.field(repr=False)


def load(
    source: str | os.PathLike | None = None,
    recipe: str | None = None,
    *,
    allow_import: Collection[str] = (),
    **fields: Any,
) -> Policy:
    """Loads a policy. Provisional: its arguments may change.

    Args:
      source: directory of a run (its newest checkpoint) or of a Hugging Face model; for random
        weights the name of a published model, or None for the library's tiny model.
      recipe: recipe of sampler and learner; None for that of the run, and 'fp8' where there is no
        run. For different recipes write `rollout="fp8", learner="bf16"`.
      allow_import: functions or modules that a run's configuration may import.
      fields: fields of the configuration by name, such as `learning_rate=1e-5` or `seed=1`.

    Raises:
      UserError: the source is none of these, or a field cannot work.
    """
    if recipe is not None:
        if not isinstance(recipe, str):
            raise UserError(
                f"load: recipe is {recipe!r}; write its name, or 'module:function' that returns it"
            )
        fields = {"rollout": recipe, "learner": recipe, **fields}
    if not isinstance(source, str | os.PathLike | None):
        raise UserError(f"load: source is a {type(source).__name__}; write a directory or a name")
    source = os.fspath(source) if source is not None else None
    base: dict[str, dict[str, Any]] = {}
    if source is None or source in PRESETS:
        base = {"model": {"name": source or ""}}
    elif os.path.exists(os.path.join(source, "config.json")):
        base = plain(directory_config(source, allow_import).to_dict())
    else:
        raise UserError(
            f"load: {source!r} is neither the directory of a run or of a Hugging Face model (it "
            f"has no config.json), nor a published model: {', '.join(PRESETS)}"
        )
    config = with_fields(base, fields, "load")
    reset(config, _RESET)
    keep_programs(config)
    runtime = make_runtime(config, with_questions=False)
    if base.get("run") and not is_released(config):
        state, _ = load_trained(runtime, pathlib.Path(config.run.dir), lambda text: None)
    else:
        state = runtime.engine.new_state(runtime.engine.initial_params(), optax.identity())
    return Policy(Programs(runtime), state)


def keep_programs(config) -> None:
    """Switches the compilation cache on, as the commands do."""
    if problem := use_compilation_cache(config.run.compilation_cache):
        warnings.warn(problem, stacklevel=3)


def sample(
    policy: Policy,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_tokens: int | None = None,
    temperature: float | None = None,
    group_size: int = 1,
    seed: int | None = None,
) -> Samples:
    """Samples responses. Provisional: its arguments may change.

    Args:
      policy: from `load` or `train_step`.
      prompts: one question or several, as in training: texts, or conversations with `data.chat`,
        each a list of messages.
      max_tokens: greatest length of a response; None for `rollout.max_new_tokens`.
      temperature: sampling temperature, 0 for greedy; None for `rollout.temperature`.
      group_size: number of responses to each prompt.
      seed: seed of the random bits; None for those of the policy's next RL step.

    Returns:
      The samples, with the log-probability of each token.

    Raises:
      UserError: there is no prompt, a prompt has no token or no text, or the KV cache needs scales
        that were not measured with these weights.
    """
    runtime = policy.programs.runtime
    asked = _asked(prompts, "sample")
    settings = runtime.config.rollout
    rows = [encode_prompt(prompt, runtime.tokenizer, runtime.chat) for prompt in asked]
    sized = policy.programs.sized(
        round_slots(max(map(len, rows))), max_tokens or settings.max_new_tokens
    )
    state = policy.state
    if not is_fresh(state.scaling_state, policy.step):
        raise UserError(
            "sample: the scales of this policy's KV cache were not measured with its weights: load "
            "it with kv_cache='fp8', or from a run that has them"
        )
    if seed is None:
        key = sample_step.rollout_key(state.rng, policy.step)
    else:
        key = jax.random.key(seed, impl="threefry2x32")
    rows += rows[-1:] * (_padded(sized, len(rows), group_size) - len(rows))
    tokens, lengths = pad_rows(
        rows, sized.config.rollout.max_prompt_tokens, runtime.tokenizer.pad_id
    )
    heat = settings.temperature if temperature is None else temperature
    temperatures = np.full(len(rows) * group_size, heat, np.float32)
    sampler = policy.programs.sampler(sized, group_size)
    hold_settings()
    padded = Prompts.numbered(tokens, lengths, key, temperatures)
    count = len(asked) * group_size
    rollout = _first(sized.engine.sample(policy.weights, padded, sampler=sampler), count)
    texts = sized.decode(np.asarray(rollout.tokens), np.asarray(rollout.mask))
    kept = Prompts.numbered(tokens[: len(asked)], lengths[: len(asked)], key, temperatures[:count])
    return Samples(asked, texts, kept, rollout)


def _first(rollout: Rollout, count: int) -> Rollout:
    """Returns the first `count` responses of a rollout."""
    rows = {name: array[:count] for name, array in rollout.rows.items()}
    taps = {name: x[:, :count] for name, x in rollout.taps.items()}
    return dataclasses.replace(rollout, **rows, taps=taps)


def score(
    policy: Policy,
    prompts: Samples | Prompt | Sequence[Prompt],
    responses: str | Sequence[str] | None = None,
    *,
    temperature: float = 1.0,
) -> np.ndarray:
    """Returns log-probabilities of responses by the learner's forward pass. Provisional.

    Under zero drift, ``score(policy, samples)`` equals ``samples.logprobs`` bit for bit.

    Args:
      policy: from `load` or `train_step`.
      prompts: samples of any policy, scored over the tokens that its top-k and top-p kept; or
        questions, which need `responses`, scored over the whole vocabulary.
      responses: one text for each question; the token that ends a response is scored, too.
      temperature: divides the logits for `responses`; samples have recorded their own.

    Returns:
      (B, R) float32, 0 after the end of a response; for texts, R is the longest response.

    Raises:
      UserError: the numbers of questions and responses differ.
    """
    if isinstance(prompts, Samples):
        sized = _sized(policy, prompts)
        batch = sized.engine.batch(prompts.rollout, prompts.asked)
        longest = batch.mask.shape[1]
    else:
        sized, batch = _text_batch(policy, _asked(prompts, "score"), responses, temperature)
        longest = int(batch.mask.sum(1).max())
    rows = len(batch.mask)
    hold_settings()
    logp = sized.engine.score(policy.state, _with_rows(sized, batch, 1))
    return np.where(batch.mask > 0, logp[:rows], np.float32(0))[:, :longest]


def compare(policy: Policy, samples: Samples) -> Drift:
    """Returns the drift of samples: the learner's log-probabilities (`score`) minus those that the
    sampler recorded. Provisional.

    `train_step` measures drift too, with the forward pass from which it takes the gradients.

    Args:
      policy: the policy that sampled them, or one with the same parameters and other recipes.
      samples: from `sample`.
    """
    logp = score(policy, samples)
    metrics = mismatch_metrics(logp, samples.logprobs, samples.mask)
    return Drift(
        max=metrics["train_rollout_logprob_abs_diff_max"],
        equal=metrics["logprob_equal_frac"],
        tokens=int(metrics["drift_tokens"]),
        by_sequence=by_row("row", logp.astype(np.float64) - samples.logprobs, samples.mask),
        metrics=metrics,
    )


def train_step(
    policy: Policy, samples: Samples, rewards: Any, *, reference: Policy | None = None
) -> tuple[Policy, dict[str, Any]]:
    """Runs one update of GRPO, or of the algorithm in section `algo`. Provisional.

    If the number of prompts is a power of two, the update has the bits of the main job's RL step
    with equal fields (`grpo` begins with those of `fp8rl init`) and prompt slots. Other numbers are
    padded, and blocks of a weight's gradient span all tokens of a batch, padding included.

    Args:
      policy: the policy before the update; it stays usable and unchanged.
      samples: samples of this policy, in groups of several responses.
      rewards: (P, G), or (B,) in the order of `samples.texts`; nan leaves a response out.
      reference: reference policy for `algo.kl_coef`.

    Returns:
      The new policy, and the metrics of the update, as in metrics.jsonl.

    Raises:
      UserError: rewards have another shape, or the reference is missing.
      NonFiniteError: loss or gradients are not finite.
    """
    values = _by_prompt(rewards, samples)
    sized = _sized(policy, samples)
    if sized.resolved.algorithm.needs_reference and reference is None:
        raise UserError(
            f"train_step: algo.kl_coef is {sized.config.algo.kl_coef}: write reference=POLICY, or "
            "load the policy with kl_coef=0.0"
        )
    engine = sized.engine
    state = policy.state
    if not jax.tree.leaves(state.opt_state):
        begun = engine.new_state(state.params, engine.rl_optimizer, state.scaling_state)
        state = dataclasses.replace(state, opt_state=begun.opt_state)
    hold_settings()
    batch, metrics = _weighed(sized, state, reference, samples, values)
    program = policy.programs.update(sized)
    begin = time.perf_counter()
    try:
        state, update = learn(engine, sized.resolved.algorithm, state, batch, program)
    except NonFiniteUpdate as error:
        raise NonFiniteError(
            f"train_step: loss {float(error.metrics['loss'])}, gradient norm "
            f"{float(error.metrics['grad_norm'])}; the policy is as it was"
        ) from None
    seconds = time.perf_counter() - begin
    record = {
        "step": policy.step + 1,
        "lr": update.learning_rate,
        **metrics,
        "time_learner": seconds,
        **update_metrics(update.updates, sized.resolved.model, sized.resolved.learner_recipe),
        "tokens_per_s_learner": float(batch.mask.sum()) / seconds,
        **mismatch_metrics(update.logp[: len(samples.texts)], samples.logprobs, samples.mask),
        "reward_mean": float(np.nanmean(values)),
    }
    state = engine.calibrate(state, batch)
    state = engine.advance(state, int(state.data_state))
    return dataclasses.replace(policy, state=state), record


def _by_prompt(rewards: Any, samples: Samples) -> np.ndarray:
    """Returns rewards as (P, G) float64.

    Raises:
      UserError: they are no numbers, or have another shape than the samples.
    """
    shape = len(samples.prompts), samples.group_size
    try:
        values = np.asarray(rewards, np.float64)
    except (TypeError, ValueError):
        raise UserError(f"train_step: rewards are no numbers; write {shape} of them") from None
    if values.shape not in (shape, (math.prod(shape),)):
        raise UserError(
            f"train_step: rewards have the shape {values.shape}; write {shape}, or "
            f"({math.prod(shape)},)"
        )
    return values.reshape(shape)


def _weighed(
    sized: Runtime,
    state: TrainState,
    reference: Policy | None,
    samples: Samples,
    rewards: np.ndarray,
) -> tuple[Batch, dict[str, Any]]:
    """Returns the batch of an update, with the number of rows of `_padded`, and its metrics."""
    _, group_size = rewards.shape
    groups = sample_step.Samples(
        questions=[],
        rollout=samples.rollout,
        versions=np.where(samples.mask, int(state.step), -1),
        prompts=samples.asked,
        rewards=rewards,
        by_name={},
        counts=np.ones(len(rewards), bool),
    )
    batch = _with_rows(sized, sized.engine.batch(samples.rollout, samples.asked), group_size)
    batch = scored(
        sized.engine,
        state,
        None if reference is None else reference.state,
        batch,
        not sized.resolved.takes_rollout_logprobs(False),
    )
    of_samples = jax.tree.map(lambda x: x[: len(samples.texts)], batch)
    of_samples, metrics = weighed(sized.resolved.algorithm, groups, of_samples)
    return _with_rows(sized, of_samples, group_size), metrics


def _asked(prompts: Any, where: str) -> list[Prompt]:
    """Returns one question or several as a list; the messages of a conversation are one.

    Raises:
      UserError: there is no question, or something is none.
    """
    one = isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable)
    asked = [prompts] if one else [*prompts]
    if asked and all(map(_is_message, asked)):
        asked = [asked]
    if not asked:
        raise UserError(f"{where}: there is no prompt; write one or several")
    return [_question(prompt, where) for prompt in asked]


def _question(prompt: Any, where: str) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    tools: Any = ()
    messages = prompt
    if isinstance(prompt, Mapping):
        tools = prompt.get("tools") or ()
        messages = prompt.get("messages")
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    if not (is_list and messages and all(map(_is_message, messages))):
        raise UserError(
            f"{where}: a prompt is {reprlib.repr(prompt)}; write a text, or a list of messages "
            "such as [{'role': 'user', 'content': 'What is 2 + 2?'}]"
        )
    return {"messages": messages, "tools": tools} if tools else messages


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _sized(policy: Policy, samples: Samples) -> Runtime:
    """Returns the Runtime of the samples' sizes."""
    return policy.programs.sized(samples.asked.tokens.shape[1], samples.tokens.shape[1])


def _text_batch(policy: Policy, prompts, responses, temperature: float) -> tuple[Runtime, Batch]:
    """Returns the Runtime of the texts' sizes, and the texts as a training batch."""
    responses = [responses] if isinstance(responses, str) else responses
    if responses is None or len(responses) != len(prompts):
        count = "none" if responses is None else len(responses)
        raise UserError(
            f"score: {len(prompts)} prompts and {count} responses; write a list with one for each"
        )
    chat = policy.programs.runtime.chat
    pad_id = policy.tokenizer.pad_id
    pairs = [
        encode_demonstration(prompt, text, policy.tokenizer, chat)
        for prompt, text in zip(prompts, responses, strict=True)
    ]
    prompt_slots = round_slots(max(len(prompt) for prompt, _ in pairs))
    response_slots = round_slots(max(len(response) for _, response in pairs))
    tokens, lengths = pad_rows([prompt for prompt, _ in pairs], prompt_slots, pad_id)
    targets, taught = pad_rows([response for _, response in pairs], response_slots, pad_id)
    mask = np.arange(response_slots) < taught[:, None]
    rows = join(tokens, lengths, targets, pad_id)
    batch = make_batch(rows, lengths, targets, mask, np.full(len(rows), temperature, np.float32))
    return policy.programs.sized(prompt_slots, response_slots), batch


def _padded(runtime: Runtime, prompts: int, group_size: int) -> int:
    """Returns the padded number of prompts: the next power of two, or the first number from there
    on whose responses divide over devices and micro-batches."""
    parts = batch_divisor(runtime.mesh) * runtime.config.learner.gradient_accumulation_steps
    count = 1 << (prompts - 1).bit_length()
    while count * group_size % parts:
        count += 1
    return count


def _with_rows(runtime: Runtime, batch: Batch, group_size: int) -> Batch:
    """Pads the batch to the size of `_padded` with rows of length 0, which count nowhere.

    In the places of their tokens are the last row's: scaling policies observe all places, and learn
    nothing from these.
    """
    rows = len(batch.mask)
    more = _padded(runtime, rows // group_size, group_size) * group_size - rows

    def padded(x):
        return np.concatenate([x, np.zeros((more, *x.shape[1:]), x.dtype)])

    return dataclasses.replace(
        jax.tree.map(padded, batch),
        tokens=np.concatenate([batch.tokens, np.repeat(batch.tokens[-1:], more, 0)]),
    )
