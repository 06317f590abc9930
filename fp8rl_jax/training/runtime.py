"""`Runtime`: a checked configuration with its devices, tokenizer and questions, which makes layout
and engine.

`train`, `evaluate`, `sample` and `bench` build one `Runtime`, so they all run the same programs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.sharding import Mesh

from fp8rl_jax import sharding
from fp8rl_jax.base import processes
from fp8rl_jax.base.errors import UserError
from fp8rl_jax.base.jax_settings import hold_settings
from fp8rl_jax.base.json_file import plain
from fp8rl_jax.batch import Batch, make_batch, slots_of
from fp8rl_jax.config import checks, flatten
from fp8rl_jax.config.resolve import resolve_config
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.data import (
    ChatFormat,
    Tokenizer,
    Turns,
    join,
    load_tokenizer,
    pad_demonstrations,
    pad_prompts,
    with_turn_end,
)
from fp8rl_jax.envs import Data, Question, Tally, check_calls, tool_functions, tool_schemas
from fp8rl_jax.kernels.reference.probe import cpu_way
from fp8rl_jax.plan.refuse import check_rollout_memory
from fp8rl_jax.training.conversations import Conversations
from fp8rl_jax.training.engine import JaxEngine
from fp8rl_jax.training.environment import begun, check_process, environment
from fp8rl_jax.training.frozen_model import check_frozen_model
from fp8rl_jax.training.layout import Layout
from fp8rl_jax.training.questions import load_data


@dataclasses.dataclass(frozen=True)
class Runtime:
    """A checked configuration with its devices, tokenizer and questions; see `make_runtime`.

    Attributes:
      resolved: the configuration, and the model, recipes and functions that it names; all that
        layout and engine have of the run.
      mesh: the devices, or those of the learner.
      tokenizer: tokenizer of prompts and responses.
      chat: format that makes a question a conversation; None without `data.chat`.
      questions: {split: questions of the task}.
      rollout_mesh: devices for rollouts alone; None if all devices do both.
      turns: form of conversations with an environment; None for responses of one reply.
      cache_slots: slots of each sequence in the KV cache; 0 for prompt + response.
      data_note, data_digest: `Data.note` and `Data.digest` of the questions.
    """

    resolved: Resolved
    mesh: Mesh
    tokenizer: Tokenizer
    chat: ChatFormat | None
    questions: dict[str, list[Question]]
    rollout_mesh: Mesh | None = None
    turns: Turns | None = None
    cache_slots: int = 0
    data_note: str = ""
    data_digest: str = ""

    @functools.cached_property
    def config(self) -> ml_collections.FrozenConfigDict:
        return self.resolved.config

    @functools.cached_property
    def layout(self) -> Layout:
        alone = self.config.mesh.rollout > 0 and self.rollout_mesh is None
        return Layout(self.resolved, self.mesh, alone)

    @functools.cached_property
    def engine(self) -> JaxEngine:
        return JaxEngine(
            self.resolved,
            self.layout,
            self.tokenizer.eos_ids,
            self.tokenizer.pad_id,
            self.cache_slots,
        )

    @functools.cached_property
    def sampling(self) -> Runtime:
        """The runtime on the devices that sample."""
        if self.rollout_mesh is None:
            return self
        return dataclasses.replace(self, mesh=self.rollout_mesh, rollout_mesh=None)

    @functools.cached_property
    def own_rows(self) -> np.ndarray:
        """(B,) bool, which responses of an RL step are on this process's devices."""
        versions = self.config.rollout.most_versions
        rows = processes.own_rows(self.layout.rows, versions * self.resolved.step_samples)
        return sharding.apart(rows, versions, sharding.batch_divisor(self.mesh))[0]

    def for_sampling(self, weights: Any) -> Any:
        """Returns rollout weights of this runtime's `refit` on the devices that sample."""
        if self.rollout_mesh is None:
            return weights
        return jax.block_until_ready(
            processes.copy_within(weights, self.sampling.layout.weight_shardings)
        )

    def prompts(self, questions: list[Question]) -> tuple[np.ndarray, np.ndarray]:
        """Returns prompt tokens (P, Tp) int32 and lengths (P,) int32 of questions."""
        return pad_prompts(
            [question.prompt for question in questions],
            self.tokenizer,
            self.config.rollout.max_prompt_tokens,
            self.chat,
        )

    def demonstrations(self, questions: list[Question]) -> Batch:
        """Returns a batch, on the host, of questions with their demonstrations as responses."""
        rollout = self.config.rollout
        found = pad_demonstrations(
            [(question.prompt, question.demonstration) for question in questions],
            self.tokenizer,
            rollout.max_prompt_tokens,
            rollout.max_new_tokens,
            self.chat,
            self.turns,
        )
        return make_batch(
            join(found.prompts, found.lengths, found.targets, self.tokenizer.pad_id),
            found.lengths,
            found.targets,
            found.mask,
            np.ones(len(questions), np.float32),
            lengths=found.lengths + found.ends,
        )

    def decode(self, tokens: np.ndarray, mask: np.ndarray) -> list[str]:
        """Returns the texts of responses: tokens (B, R) where the mask (B, R) is True."""
        return [
            self.tokenizer.decode(row[keep].tolist())
            for row, keep in zip(tokens, mask, strict=True)
        ]

    def conversations(
        self, questions: Sequence[Question], own_rows: np.ndarray, tally: Tally
    ) -> Conversations | None:
        """Returns the conversations of a rollout; None if responses have one reply.

        Args:
          questions: the question of each response.
          own_rows: (B,) bool, as for `Rewards`.
          tally: tally that counts the calls of the environment's step.
        """
        if self.resolved.step is None or self.turns is None:
            return None
        return Conversations(
            self.turns,
            self.resolved.step,
            questions,
            own_rows,
            self.config.rollout.max_new_tokens,
            tally,
        )

    def with_slots(self, **slots: int) -> Runtime:
        """Returns the runtime, checked again, with other `max_prompt_tokens` or `max_new_tokens`.

        Raises:
          UserError: the configuration cannot work with these numbers.
        """
        config = ml_collections.ConfigDict(self.config.to_dict())
        config.rollout.update(slots)
        if capacity := config.learner.tokens_per_batch:  # what is sampled may be longer
            longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
            config.learner.tokens_per_batch = max(capacity, slots_of(longest))
        resolved = resolve_config(config).with_vocabulary(self.tokenizer.vocab_size)
        checks.check_mesh(
            config,
            sharding.batch_divisor(self.mesh),
            sharding.batch_divisor(self.rollout_mesh or self.mesh),
        )
        return dataclasses.replace(self, resolved=resolved)


def make_runtime(config: ml_collections.ConfigDict, with_questions: bool = True) -> Runtime:
    """Checks `config` and makes its runtime; compiles nothing.

    Args:
      config: result of `load_config`.
      with_questions: whether to load the task's questions; without them there are no splits.

    Raises:
      UserError: the configuration cannot work.
    """
    check_process()
    if processes.count() > 1:
        _check_processes(config)
    config = config.copy_and_resolve_references()
    for name in ("dir", "cache_dir"):  # a user's function may change the working directory
        config.run[name] = config.run[name] and os.path.abspath(config.run[name])
    resolved = resolve_config(config)
    mesh, rollout_mesh = sharding.make_meshes(config.mesh.to_dict())
    if rollout_mesh is not None:
        processes.exchange_by_store()  # rollouts run in a thread, beside the learner
    checks.check_mesh(
        config, sharding.batch_divisor(mesh), sharding.batch_divisor(rollout_mesh or mesh)
    )
    if with_questions:
        check_rollout_memory(resolved, rollout_mesh or mesh)
        resolved = resolved.with_tasks()
    tokenizer = load_tokenizer(config.data, config.model.checkpoint)
    chat = _chat_format(config, tokenizer)
    if chat is not None:
        tokenizer = with_turn_end(tokenizer, chat)
    resolved = resolved.with_vocabulary(tokenizer.vocab_size)
    check_frozen_model(resolved)
    turns = None
    if resolved.step is not None:
        turns = _turns(config, tokenizer, chat)
        tokenizer = turns.tokenizer
    data = load_data(config, tokenizer, chat, turns) if with_questions else Data({})
    checks.check_platform(resolved)
    hold_settings()  # the user's modules, imported by now, may have changed them
    return Runtime(
        resolved=resolved,
        mesh=mesh,
        tokenizer=tokenizer,
        chat=chat,
        questions=data.questions,
        rollout_mesh=rollout_mesh,
        turns=turns,
        data_note=data.note,
        data_digest=data.digest,
    )


def _check_processes(config: ml_collections.ConfigDict) -> None:
    """Raises UserError if processes differ in software, options or CPUs."""
    known = {name: value for part in environment(config).values() for name, value in part.items()}
    known |= {f"config.{name}": repr(value) for name, value in flatten(config).items()}
    processes.check_equal(known, "start all of them with the same software and options")
    if config.precision.cpu_products == "auto":
        processes.check_equal(
            {"the way of multiplying": cpu_way().name},
            "run on CPUs of one kind, or set precision.cpu_products='exact'",
        )


def _turns(config, tokenizer: Tokenizer, chat: ChatFormat | None) -> Turns:
    """Returns the form of a configuration's conversations, whose tokenizer ends a reply where they
    do.

    Raises:
      UserError: the chat template or the length of a response does not suit conversations.
    """
    turns = Turns(
        tokenizer,
        chat,
        config.env.observation_role,
        config.rollout.max_observation_tokens,
        tool_schemas(config.env.tools) if chat is not None else (),
    )
    turns.check()
    turns = dataclasses.replace(turns, tokenizer=turns.ending())
    if chat is not None and config.env.tools and not config.env.step:
        check_calls(tool_functions(config.env.tools), turns.reply_with_call)
    least = turns.slots - turns.most + 3
    if config.rollout.max_new_tokens < least:
        raise UserError(
            f"rollout.max_new_tokens is {config.rollout.max_new_tokens}, and two replies with what "
            f"stands between them take {least} at least: raise it to what whole conversations take"
        )
    return turns


def _chat_format(config, tokenizer: Tokenizer) -> ChatFormat | None:
    if not config.data.chat:
        return None
    if tokenizer.chat_template is None:
        raise UserError(
            f"data.chat is True, and the tokenizer {config.data.tokenizer!r} has no chat template: "
            "set data.chat=False, or name the directory of a model that has one"
        )
    return ChatFormat(
        tokenizer.chat_template,
        config.data.system_prompt,
        plain(config.data.chat_options.to_dict()),
        begun(pathlib.Path(config.run.dir)),
    )
