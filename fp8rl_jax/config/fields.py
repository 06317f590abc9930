"""The table of all fields of a configuration, a row for each: all that is said of a field.

Sizes in section `model` are fields of `models.ModelConfig`, which also checks them; their bounds,
and those of numbers that are parameters of a function too, are in `fp8rl_jax.base.bounds`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_collections

from fp8rl_jax.base.bounds import (
    BELOW_1,
    BOUNDS,
    COEFFICIENT,
    COUNT,
    LAYERS,
    QUESTIONS,
    WIDTH,
    Bounds,
    above,
    check_number,
    check_options,
    whole,
)
from fp8rl_jax.base.errors import UserError, did_you_mean
from fp8rl_jax.config.cases import CASES
from fp8rl_jax.envs.rewards.terms import BUILT_IN, IN_WORKERS
from fp8rl_jax.models import REMAT, ModelConfig
from fp8rl_jax.models.families import BY_TYPE, FAMILIES
from fp8rl_jax.models.presets import PRESETS as MODELS
from fp8rl_jax.quant.recipe import BACKWARDS
from fp8rl_jax.rl.advantages import BASELINES, SCALES
from fp8rl_jax.rl.aggregation import AGGREGATIONS
from fp8rl_jax.rl.corrections import CORRECTIONS
from fp8rl_jax.rl.kl import ESTIMATORS
from fp8rl_jax.rl.losses import LOSSES
from fp8rl_jax.rl.presets import PRESETS


class Field(NamedTuple):
    """A field of the configuration.

    Attributes:
      default: value of a field that is not set; the field has its type.
      meaning: text of `--help-config` and of the documentation.
      choices: values that a text field may have; any text if empty.
      bounds: those of a number.
      needs: {condition: reason}, what must hold where the field is not at its default. A condition
        is 'SECTION.FIELD' (that field is set, too), 'SECTION.FIELD=VALUE', or several of these with
        ' or ' between them; a reason may be ''.
      names: names that other libraries have for it, with blanks between them (`config.names`).
      unlike: what the field counts, and other libraries' names for it that count something else.
      options: {option of a dict of options: what it is}; {} where this table does not know them.
      is_path: whether `~` and `hf:ORG/NAME` are expanded; one with a default may not be empty.
    """

    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    bounds: Bounds | None = None
    needs: Mapping[str, str] = {}
    names: str = ""
    unlike: tuple[str, str] = ("", "")
    options: Mapping[str, str] = {}
    is_path: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the field is a dict of options that this table does not know."""
        return isinstance(self.default, ml_collections.ConfigDict)

    def is_set(self, value: Any) -> bool:
        """Returns whether a value, as `load.flatten` returns it, is not the default."""
        return value != ({} if self.is_free else self.default)

    def check(self, path: str, value: Any) -> None:
        """Raises UserError if the field, called `path`, cannot have a value of its type."""
        if self.bounds:
            check_number(path, value, self.bounds)
        if self.is_free:
            check_options(path, value)
        if self.is_path and self.default and not value:
            raise UserError(f"{path} is empty; write a path")
        if self.choices and value not in self.choices:
            known = [choice for choice in self.choices if choice]
            hint = did_you_mean(value.lower(), known, "", "{!r}")
            if path == "algo.preset" and value in LOSSES:
                hint = f"for that loss write algo.loss={value}, else"
            advice = f"{hint} write one of {', '.join(known)}".strip()
            raise UserError(f"{path} is {value!r}; {advice}")


_OPTIONS = ml_collections.ConfigDict()
# Shapes that only a published model has, whose context was made longer.
_OF_CHECKPOINTS = (
    "rope_type",
    "rope_factor",
    "rope_original_max_position_embeddings",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_truncate",
    "rope_mscale",
    "rope_mscale_all_dim",
)
# Rules that `model.family` decides.
_OF_FAMILIES = (
    "qk_norm",
    "qk_norm_by_head",
    "qkv_bias",
    "o_bias",
    "attention_sinks",
    "sandwich_norms",
    "pre_norms",
    "unit_offset_norms",
    "hidden_act",
    "scale_embeddings",
    "rope_local_base_freq",
    "rope_interleave",
    "partial_rotary_factor",
    "moe_bias",
)
_MEANINGS = {field.name: field.metadata["meaning"] for field in dataclasses.fields(ModelConfig)}
# {size that few families have: the families}.
_OPTIONS_OF_FAMILIES = {
    name: [family.model_type for family in FAMILIES if name in family.options]
    for name in _MEANINGS
    if any(name in family.options for family in FAMILIES)
}
# Default shapes of the model; a shape that is not here has ModelConfig's default.
_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_SHAPES = {
    field.name: Field(
        _SMALL.get(field.name, field.default),
        _MEANINGS[field.name],
        bounds=BOUNDS.get(f"model.{field.name}"),
    )
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ("vocab_size", *_OF_CHECKPOINTS, *_OF_FAMILIES, *_OPTIONS_OF_FAMILIES)
}

# {section: {field: Field}}, in the order of `--help-config`.
FIELDS: dict[str, dict[str, Field]] = {
    "run": {
        "dir": Field(
            "runs/default",
            "directory of the run: metrics, checkpoints, report",
            names="out output_dir default_local_dir checkpoint_dir",
            is_path=True,
        ),
        "seed": Field(0, "seed of data, initialisation and sampling", bounds=whole(0, 2**31 - 1)),
        "steps": Field(
            100,
            "RL steps; 0 runs supervised fine-tuning only",
            bounds=whole(0, COUNT),
            names="max_steps num_steps total_steps total_training_steps max_num_steps",
            unlike=("steps, not epochs", "num_train_epochs total_epochs"),
        ),
        "cache_dir": Field(
            "",
            "where results of supervised fine-tuning and passed self-checks are "
            "kept; '' for ~/.cache/fp8rl_jax",
            is_path=True,
        ),
        "compilation_cache": Field(
            "",
            "directory of compiled programs, which later starts load instead of compiling; off: "
            "none; '' for $FP8RL_COMPILATION_CACHE, else ~/.cache/fp8rl_jax/compilation",
            is_path=True,
        ),
        "samples": Field(4, "transcripts written at each evaluation", bounds=whole(0, QUESTIONS)),
        "loggers": Field(
            "tensorboard",
            "where metrics go besides the run's .jsonl files: tensorboard, wandb, "
            "mlflow, or several with commas",
            names="report_to logger",
        ),
        "project": Field(
            "fp8rl", "project (wandb) or experiment (mlflow) of the run", names="project_name"
        ),
        "checkpoint_every": Field(
            20,
            "RL steps between checkpoints (supervised fine-tuning saves at each evaluation)",
            bounds=whole(1, COUNT),
            names="save_steps save_freq",
        ),
        "check_every": Field(
            10,
            "with rollout.ahead: steps between two that wait for a rollout to compute its drift",
            bounds=whole(1, COUNT),
        ),
        "keep_checkpoints": Field(
            2, "newest checkpoints to keep", bounds=whole(1, COUNT), names="save_total_limit"
        ),
        "keep_every": Field(
            0,
            "RL steps between two checkpoints that are kept for good, from the start of RL on, so "
            "that `fp8rl replay` begins near any step; 0: none",
            bounds=whole(0, COUNT),
        ),
    },
    "model": {
        "checkpoint": Field(
            "",
            "directory of a Hugging Face model, or hf:ORG/NAME[@REVISION] for one that "
            "`hf download` fetched: shapes and initial parameters; '' for random ones",
            names="name_or_path path model_name_or_path model_name",
            is_path=True,
        ),
        "name": Field(
            "",
            "shapes of a published model; leave the fields below at their defaults",
            choices=("", *MODELS),
        ),
        "family": Field(
            "qwen3",
            "family that decides the form of the layers (norms, biases, activation), named as "
            "the model_type of its config.json; the fields below are the sizes",
            choices=tuple(BY_TYPE),
            names="model_type",
        ),
        "family_options": Field(
            _OPTIONS,
            "sizes that few families have, such as {'kv_lora_rank': 512}",
            options={
                name: f"of {', '.join(of)}: {_MEANINGS[name]}"
                for name, of in _OPTIONS_OF_FAMILIES.items()
            },
        ),
        "check_finite": Field(True, "refuse a checkpoint with weights that are NaN or infinite"),
        **_SHAPES,
    },
    "precision": {
        "rollout": Field("fp8", "recipe of the sampler: fp8, bf16, f32, ...", names="dtype"),
        "learner": Field("fp8", "recipe of the learner; equal recipes give zero drift"),
        "zero_drift": Field(
            "auto",
            "required: refuse settings under which drift cannot be zero, and end after a step that "
            "drifts, with exit status 3; auto: with equal recipes refuse such settings, and warn "
            "of a step that drifts; report: neither",
            choices=("auto", "required", "report"),
        ),
        "weight_policy": Field(
            "",
            "scaling policy of weights: dynamic, delayed(history=1024), static(amax=8.0), "
            "power_of_two(...), 'package.module:function'; '' for the recipe's own",
        ),
        "activation_policy": Field(
            "", "scaling policy of activations, with the values of precision.weight_policy"
        ),
        "gradient_policy": Field(
            "", "scaling policy of output gradients, with the values of precision.weight_policy"
        ),
        "backward": Field(
            "recipe",
            "products of the backward pass: fp8; dequantized: in bf16, of the bytes of the forward "
            "pass; bf16: of what these were made from; recipe: as the recipe says",
            choices=("recipe", *BACKWARDS),
        ),
        "reference": Field(
            "learner", "recipe that scores the reference policy: learner, or a recipe's name"
        ),
        "first_layers_bf16": Field(
            0, "number of first layers whose linear layers run in bf16", bounds=whole(0, LAYERS)
        ),
        "last_layers_bf16": Field(
            0, "number of last layers whose linear layers run in bf16", bounds=whole(0, LAYERS)
        ),
        "bf16_modules": Field("", "linear layers in bf16, by pattern: 'down_proj,[qk]_proj'"),
        "kv_cache": Field(
            "recipe",
            "recipe: as the recipe says; bf16; fp8 or int8: a scale per (token, head); "
            "fp8_calibrated(margin=1.05): a scale per layer, measured after each update, with that "
            "factor of headroom; K and V apart: k=int8,v=fp8",
        ),
        "attention": Field(
            "bf16",
            "bf16, or fp8: queries too are quantised (needs kv_cache fp8 or fp8_calibrated)",
            choices=("bf16", "fp8"),
        ),
        "head": Field(
            "recipe",
            "output head: recipe: as the recipe says, bf16; f32: weights and product in float32",
            choices=("recipe", "f32"),
            names="cast_lm_head_to_fp32 enable_fp32_lm_head fp32_lm_head lm_head_fp32",
        ),
        "kernels": Field(
            "auto",
            "auto: kernels on a GPU, jnp elsewhere; reference: jnp; triton, mosaic: kernels, and "
            "all FP8 products by this compiler, in one order of sums; mosaic has run on no GPU yet",
            choices=("auto", "reference", "triton", "mosaic"),
        ),
        "cpu_products": Field(
            "auto",
            "on a CPU: auto: the fastest products whose order holds on this machine; exact: sums "
            "in float64 that no order can change, four to eight times slower",
            choices=("auto", "exact"),
        ),
        "health": Field(True, "count saturated, underflowed and non-finite values"),
        "self_check": Field(True, "before a run that relies on zero drift, try it on two layers"),
    },
    "mesh": {
        "data": Field(
            -1,
            "devices that split the batch; -1 for all that the other axes leave",
            bounds=whole(1, 2**20, -1),
        ),
        "fsdp": Field(
            1,
            "devices that split the batch and shard parameters and optimiser state",
            bounds=whole(1, 2**20, -1),
            names="fsdp_size",
        ),
        "tensor": Field(
            1,
            "devices that shard every layer by output features, and attention by heads",
            bounds=whole(1, 2**20, -1),
            names="tensor_model_parallel_size tensor_parallel_size",
            needs={"rollout.slots=0": "continuous batching does not cut layers by columns"},
        ),
        "expert": Field(
            1,
            "devices that split the batch and share experts (tokens travel); 1 for a dense model",
            bounds=whole(1, 2**20, -1),
            names="expert_parallel_size",
            needs={"model.num_experts": "a dense model has no experts"},
        ),
        "rollout": Field(
            0,
            "devices for rollouts and evaluations alone, beside those of the other axes; 0 if all "
            "devices do both",
            bounds=whole(0, 2**20),
        ),
    },
    "data": {
        "tokenizer": Field(
            "byte",
            "'byte', the path of a tokenizer.json, a Hugging Face "
            "directory, or 'checkpoint' for that of model.checkpoint",
            is_path=True,
        ),
        "chat": Field(False, "questions are the user's messages in the tokenizer's chat template"),
        "system_prompt": Field(
            "", "a system message before the question; '' for none", needs={"data.chat": ""}
        ),
        "chat_options": Field(
            _OPTIONS,
            "variables of the chat template, such as enable_thinking",
            names="chat_template_kwargs",
            needs={"data.chat": ""},
        ),
        "bos_token": Field("<bos>", "begin-of-sequence token in tokenizer.json"),
        "eos_token": Field("<eos>", "end-of-sequence token in tokenizer.json"),
        "pad_token": Field("<pad>", "padding token in tokenizer.json"),
    },
    "env": {
        "task": Field(
            "basic_arithmetic",
            "where questions come from: a task of reasoning_gym; "
            "gsm8k; a .jsonl, .parquet, .csv or .json file; a directory of Hugging "
            "Face's datasets, or hf:ORG/NAME[@REVISION]; tfds:NAME[/CONFIG]; "
            "'module:function', which returns rows",
            names="dataset dataset_name train_files",
        ),
        "task_options": Field(_OPTIONS, "options of a task of reasoning_gym"),
        "reward": Field(
            "auto",
            f"{', '.join(BUILT_IN)}, or a function as 'module:function'; auto: task_score for "
            "tasks of reasoning_gym that have a scorer of their own, else exact_match; several "
            "with weights as 'exact_match, 0.5*module:function', the first of which evaluation "
            "counts",
            names="reward_funcs",
        ),
        "reward_timeout": Field(
            30.0,
            f"seconds that a call of {', '.join(IN_WORKERS)} or your own "
            "function may take; one that takes longer is not scored",
            bounds=Bounds(0.01, 1e6),
        ),
        "reward_memory_gb": Field(
            4.0, "GiB that a process for such calls may take; 0 for any", bounds=Bounds(0, 1e6)
        ),
        "step": Field(
            "",
            "with several replies: the environment, 'module:function' of (state, reply, row), or "
            "(state, reply, row, cut), that returns fp8rl_jax.envs.Step; '' for env.tools",
            names="environment_factory rollout_func interaction_config_path env_class",
            needs={"env.max_turns": "nothing is answered after the last reply"},
        ),
        "tools": Field(
            "",
            "'module:NAME' of a list of functions that the policy may call in its replies; a chat "
            "template shows them",
            names="tool_config_path",
            needs={"env.max_turns": "nothing is answered after the last reply"},
        ),
        "max_turns": Field(
            1,
            "most replies of a response",
            bounds=whole(1, COUNT),
            names="max_assistant_turns max_user_turns max_tool_calling_iterations "
            "max_rollout_turns",
            needs={
                "env.step or env.tools": "nothing else answers a reply",
                "rollout.slots": "replies are answered in continuous batching",
            },
        ),
        "observation_role": Field("tool", "with chat: role of what the environment says"),
        "train_questions": Field(
            4096,
            "distinct RL questions to generate (reasoning_gym tasks), in a new order each epoch",
            bounds=whole(1, QUESTIONS),
        ),
        "question_key": Field(
            "",
            "the data set's column with the question or conversation; '' for "
            "the first of question, prompt, problem, instruction, input",
            names="prompt_key",
        ),
        "answer_key": Field(
            "",
            "the column with the answer, such as reward_model.ground_truth; '' "
            "for the first usual one; - for none",
        ),
        "answer_pattern": Field(
            "",
            "regular expression whose first group, at its last match in the column of env."
            "answer_key, is the answer; '' for the text after the last ####, or all of it",
        ),
        "prompt_template": Field("{question}", "text of a prompt, with {question} in it"),
        "eval_task": Field(
            "",
            "held-out questions from another source, written as task is, or from several "
            "with commas; '' for the data set's own split test or validation, else a share of it",
            names="val_files",
        ),
        "eval_fraction": Field(
            0.1,
            "share of a data set held out when it has no test or validation split, by a hash of "
            "the question",
            bounds=Bounds(0, 0.5),
        ),
        "max_questions": Field(
            0,
            "most questions of a data set to train on; 0 for all; of 'module:function' no further "
            "rows are read",
            bounds=whole(0, COUNT),
        ),
        "overlong": Field(
            "drop",
            "a data set's questions that are too long for max_prompt_tokens: drop them, or error",
            choices=("drop", "error"),
            names="filter_overlong_prompts",
        ),
    },
    "rollout": {
        "prompts_per_step": Field(
            16,
            "questions per RL step",
            bounds=whole(1, COUNT),
            names="batch_size train_batch_size num_prompts_per_step",
            unlike=("prompts, not responses", "per_device_train_batch_size generation_batch_size"),
        ),
        "group_size": Field(
            8,
            "samples per question",
            bounds=whole(1, COUNT),
            names="n num_samples num_generations num_generations_per_prompt",
        ),
        "max_prompt_tokens": Field(
            24, "most tokens of a prompt", bounds=whole(2, COUNT), names="max_prompt_length"
        ),
        "max_new_tokens": Field(
            8,
            "most tokens of a response, with those of the environment",
            bounds=whole(1, COUNT),
            names="max_tokens max_length max_completion_length max_response_length",
        ),
        "max_turn_tokens": Field(
            0,
            "tokens at which a reply is cut; 0 for max_new_tokens alone",
            bounds=whole(0, COUNT),
            needs={"env.max_turns": "else a reply is a response"},
        ),
        "max_observation_tokens": Field(
            64,
            "with env.max_turns: most tokens of what the environment says; the rest is cut",
            bounds=whole(1, COUNT),
            names="max_tool_response_length",
        ),
        "ahead": Field(
            0,
            "steps that rollouts run ahead: step t learns from what the weights of step t - ahead "
            "drew, while its own draw for a later step",
            bounds=whole(0, 64),
            names="max_trajectory_age_steps staleness_threshold max_head_offpolicyness",
        ),
        "most_versions": Field(
            1,
            "versions of the policy that may draw one response; above 1 a rollout ends "
            "with its step's responses, and slots that they leave draw for later steps",
            bounds=whole(1, 64),
            names="partial_rollout",
            needs={
                "rollout.slots": "later responses take over those that a step leaves",
                "env.max_turns=1": "how far a conversation gets in a step depends on its "
                "environment's time",
                "algo.dynamic_sampling=False": "a step with dynamic sampling takes further "
                "questions, and responses of later steps have begun",
            },
        ),
        "slots": Field(
            0,
            "sequences that decode at a time, each replaced when it ends (continuous "
            "batching); 0 decodes all samples at once",
            bounds=whole(0, COUNT),
        ),
        "pages": Field(
            0,
            "pages of 64 tokens in the KV cache; 0 for as many as the "
            "slots can fill and the device holds (fp8rl plan --rollout)",
            bounds=whole(0, 2**24),
            needs={"rollout.slots": ""},
        ),
        "part": Field(
            64,
            "with slots: tokens that each slot draws before finished responses and replies are "
            "looked at",
            bounds=whole(1, COUNT),
        ),
        "prefill_chunk": Field(
            0,
            "with slots: most tokens that are prefilled at a time, of one prompt or several short "
            "ones; 0 for 1024 on a GPU, 64 elsewhere",
            bounds=whole(0, COUNT),
        ),
        "temperature": Field(1.0, "sampling temperature, above 0", bounds=Bounds(1e-6, 100)),
        "top_k": Field(
            0, "sample from the k most likely tokens; 0 for all", bounds=whole(0, WIDTH)
        ),
        "top_p": Field(
            1.0,
            "nucleus sampling: keep the most likely tokens up to this probability; 1.0 for all",
            bounds=above(0, 1),
        ),
    },
    "algo": {
        "preset": Field(
            "",
            "a published algorithm, which sets the fields below up to "
            "mask_truncated (fp8rl algo list); '' for the defaults",
            choices=("", *PRESETS),
            names="algorithm loss_type adv_estimator",
        ),
        "baseline": Field(
            "group_mean",
            "what is subtracted from a reward",
            choices=(*BASELINES,),
            names="use_leave_one_out_baseline",
        ),
        "scale": Field(
            "group_std",
            "what advantages are divided by",
            choices=(*SCALES,),
            names="scale_rewards norm_adv_by_std_in_grpo normalize_rewards",
        ),
        "credit": Field(
            "response",
            "what a token's advantage counts: the response's reward, or with turn, of several "
            "replies, the rewards from its reply on",
            choices=("response", "turn"),
            needs={
                "env.max_turns": "",
                "algo.dynamic_sampling=False": "dynamic sampling leaves out groups by the "
                "rewards of whole responses",
            },
        ),
        "loss": Field(
            "ppo",
            f"loss of a token: {', '.join(LOSSES)} (with a teacher), with parameters as in "
            "sapo(1.0, 1.05), or 'module:function'",
            names="importance_sampling_level",
            unlike=("a loss with its number, as in ppo(dual_clip=3.0)", "delta clip_ratio_c"),
        ),
        "clip_low": Field(
            0.2,
            "the policy ratio's lower bound is 1 - clip_low",
            bounds=BOUNDS["algo.clip_low"],
            names="epsilon clip_ratio clip_ratio_low ratio_clip_min",
        ),
        "clip_high": Field(
            0.2,
            "the policy ratio's upper bound is 1 + clip_high",
            bounds=BOUNDS["algo.clip_high"],
            names="epsilon_high clip_ratio_high ratio_clip_max",
        ),
        "loss_aggregation": Field(
            "token_mean",
            f"how the losses of an update's tokens are added: {', '.join(AGGREGATIONS)}(length="
            "rollout.max_new_tokens), which divides by that constant, or 'package.module:function'",
            names="loss_agg_mode",
        ),
        "kl_coef": Field(
            0.0,
            "weight of the KL divergence from the policy before RL",
            bounds=Bounds(0, COEFFICIENT),
            names="beta kl_loss_coef use_kl_loss reference_policy_kl_penalty",
        ),
        "kl_estimator": Field(
            "k3",
            "estimator of the KL divergence in the loss; NAME+ has NAME's value and k2's gradient",
            choices=(*ESTIMATORS,),
            names="kl_loss_type",
        ),
        "kl_in": Field(
            "loss",
            "where the KL divergence counts: in the loss; reward: each token's advantage loses the "
            "k1 divergence from that token on",
            choices=("loss", "reward"),
            names="use_kl_in_reward",
        ),
        "teacher": Field(
            "",
            "directory of a Hugging Face model, or hf:ORG/NAME: the divergence from it, exact over "
            "the whole vocabulary at every token of a response, joins the loss",
            names="teacher_model_name_or_path teacher_model teacher",
            is_path=True,
        ),
        "teacher_coef": Field(
            1.0, "weight of the divergence from algo.teacher", bounds=Bounds(0, COEFFICIENT)
        ),
        "dynamic_sampling": Field(
            False, "sample more questions until the rewards of every group differ"
        ),
        "overlong_buffer": Field(
            0,
            "last tokens before the length limit over which a response "
            "loses reward; -1 for a fifth of rollout.max_new_tokens",
            bounds=whole(0, COUNT, -1),
        ),
        "overlong_penalty": Field(
            1.0, "reward that a response at the length limit loses", bounds=Bounds(0, 1e6)
        ),
        "mask_truncated": Field(
            False,
            "leave responses out of the loss that a limit cut off",
            names="mask_truncated_completions",
        ),
        "dynamic_sampling_rounds": Field(
            10,
            "with dynamic_sampling: most rollouts of a step; groups that are then missing are "
            "filled with ones that do not count",
            bounds=whole(1, 10_000),
        ),
        "correction": Field(
            "auto",
            "for a rollout that differs from the learner: none, "
            f"{', '.join(CORRECTIONS)}, with parameters as in tis(2.0), several with commas, or "
            "'module:function'; auto: tis if the recipes differ and old_logprobs is not 'rollout' "
            "(where the ratio holds the difference)",
            names="vllm_importance_sampling_correction vllm_importance_sampling_cap rollout_is "
            "rollout_is_threshold",
        ),
        "truncated_sampling": Field(
            "renormalised",
            "over what log-probabilities and divergences are: "
            "renormalised, the kept tokens; whole, the vocabulary, a biased gradient",
            choices=("renormalised", "whole"),
            needs={"rollout.top_k or rollout.top_p": "else no token is left out"},
        ),
        "routing_replay": Field(
            "none",
            "what the learner takes from the rollout's routers: none; experts: which experts, in "
            "their order; weights: their weights too",
            choices=("none", "experts", "weights"),
            needs={
                "model.num_experts": "a dense model has no routers",
                "rollout.slots=0": "continuous batching does not record routing",
                "rollout.ahead=0": "a checkpoint keeps no routing of rollouts that are ahead",
                "mesh.rollout=0": "the routing of rollouts on devices of their own does not go to "
                "the learner",
            },
        ),
        "router_aux_loss_coef": Field(
            0.0,
            "weight of the loss that balances the experts' load",
            bounds=Bounds(0, COEFFICIENT),
            needs={"model.num_experts": "a dense model has no routers"},
        ),
        "old_logprobs": Field(
            "auto",
            "source of the old log-probabilities: learner, recomputed before the first update; "
            "rollout, the sampler's; auto, the learner's with a correction, else the sampler's "
            "with rollouts of older policies, or under zero drift until a first update shows a "
            "difference",
            choices=("auto", "learner", "rollout"),
        ),
        "epochs": Field(
            1, "passes over one rollout", bounds=whole(1, 10_000), names="num_iterations ppo_epochs"
        ),
        "num_minibatches": Field(
            1,
            "optimiser updates, each on an equal part of the rollout",
            bounds=whole(1, COUNT),
            names="steps_per_generation",
            unlike=("minibatches, not the size of one", "ppo_mini_batch_size"),
        ),
    },
    "learner": {
        "gradient_accumulation_steps": Field(
            1,
            "micro-batches of an update",
            bounds=whole(1, COUNT),
            unlike=(
                "micro-batches, not the size of one",
                "ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
            ),
            needs={"learner.tokens_per_batch=0": "else the sequences' lengths decide it"},
        ),
        "tokens_per_batch": Field(
            0,
            "tokens that a device computes at a time, of several sequences in one row without "
            "padding between them, in as many micro-batches as the lengths need; 0: one sequence "
            "a row, padded",
            bounds=whole(0, COUNT),
            names="ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu max_token_len "
            "train_mb_tokens",
            unlike=("tokens of a row", "use_dynamic_bsz padding_free packing"),
        ),
        "share_prompts": Field(
            False,
            "compute a prompt once for those of its responses that are in one row of "
            "tokens_per_batch",
            names="prefix_sharing use_prefix_grouper shared_prompt tree_training",
            needs={
                "learner.tokens_per_batch": "a row of one sequence shares nothing",
                "algo.router_aux_loss_coef=0": "the experts' load would count a prompt once "
                "for all responses that share it",
            },
        ),
        "remat": Field(
            "none",
            "none: keep activations; full: recompute layers, not attention",
            choices=REMAT,
            names="gradient_checkpointing enable_gradient_checkpointing",
        ),
        "offload": Field(
            "none",
            "moments: keep the optimiser's moments in the host's memory; the "
            "update moves one array at a time",
            choices=("none", "moments"),
            names="optimizer_offload",
            needs={"lora.rank=0": "the moments of adapters are small"},
        ),
    },
    "optimizer": {
        "learning_rate": Field(
            1e-4, "peak learning rate of RL, after warm-up", bounds=Bounds(0, 100), names="lr"
        ),
        "warmup_steps": Field(
            5,
            "updates of linear warm-up of RL",
            bounds=whole(0, COUNT),
            unlike=("steps, not a share of them", "warmup_ratio"),
        ),
        "end_fraction": Field(
            1.0,
            "cosine decay over all updates of run.steps to this share of the peak learning rate",
            bounds=Bounds(0, 1),
        ),
        "b1": Field(
            0.9, "AdamW's decay of the first moment", bounds=Bounds(0, BELOW_1), names="adam_beta1"
        ),
        "b2": Field(
            0.99,
            "AdamW's decay of the second moment",
            bounds=Bounds(0, BELOW_1),
            names="adam_beta2",
        ),
        "weight_decay": Field(0.0, "AdamW's decoupled weight decay", bounds=Bounds(0, COEFFICIENT)),
        "clip_norm": Field(
            1.0,
            "largest global norm of a gradient",
            bounds=Bounds(1e-6, 1e30),
            names="grad_clip max_grad_norm",
        ),
    },
    "lora": {
        "rank": Field(
            0,
            "rank of the adapters of linear layers, which alone are trained; 0 trains everything",
            bounds=whole(0, 4096),
            names="lora_rank lora_r r peft_config",
        ),
        "alpha": Field(
            32.0,
            "an adapter's product is multiplied by alpha / rank",
            bounds=above(0, 1e6),
            names="lora_alpha",
            needs={"lora.rank": ""},
        ),
        "modules": Field(
            "*",
            "linear layers with adapters, by pattern: '[qkvo]_proj'",
            names="target_modules lora_target_modules",
            needs={"lora.rank": ""},
        ),
        "checkpoint": Field(
            "",
            "directory of a PEFT adapter that training begins with",
            needs={"lora.rank": ""},
            is_path=True,
        ),
        "base": Field(
            "bf16",
            "how the frozen base is kept: as published models are, in float32, or with linear "
            "layers in FP8, which quantises what is not FP8 already",
            ("bf16", "f32", "fp8"),
            needs={"lora.rank": ""},
        ),
    },
    "sft": {
        "steps": Field(
            600,
            "updates of supervised fine-tuning before RL; 0 leaves it out",
            bounds=whole(0, COUNT),
        ),
        "questions": Field(4096, "distinct demonstrations", bounds=whole(1, QUESTIONS)),
        "batch_size": Field(64, "demonstrations per update", bounds=whole(1, COUNT)),
        "learning_rate": Field(
            4e-3, "peak learning rate of supervised fine-tuning", bounds=Bounds(0, 100)
        ),
        "warmup_steps": Field(
            30, "updates of linear warm-up of supervised fine-tuning", bounds=whole(0, COUNT)
        ),
        "end_fraction": Field(
            1.0, "cosine decay to this share of the peak learning rate", bounds=Bounds(0, 1)
        ),
        "b2": Field(0.98, "AdamW's decay of the second moment", bounds=Bounds(0, BELOW_1)),
        "weight_decay": Field(
            0.01, "AdamW's decoupled weight decay", bounds=Bounds(0, COEFFICIENT)
        ),
        "evaluations": Field(
            6,
            "evaluations of supervised fine-tuning, the last at its end",
            bounds=whole(1, 1_000_000),
        ),
    },
    "eval": {
        "questions": Field(1024, "held-out questions", bounds=whole(1, QUESTIONS)),
        "batch_size": Field(
            256,
            "questions answered at a time",
            bounds=whole(1, COUNT),
            names="per_device_eval_batch_size val_batch_size",
        ),
        "samples": Field(
            1,
            "sampled answers per question, besides the greedy one: pass@k up to this k",
            bounds=whole(1, 1_000_000),
        ),
        "temperature": Field(
            1.0, "temperature of the sampled answers, above 0", bounds=Bounds(1e-6, 100)
        ),
        "top_p": Field(
            1.0,
            "nucleus sampling of the sampled answers: keep the most likely tokens up to this "
            "probability; 1.0 for all",
            bounds=above(0, 1),
        ),
        "every": Field(
            25,
            "RL steps between evaluations; the last step is always evaluated",
            bounds=whole(1, COUNT),
            names="eval_steps test_freq val_period",
        ),
        "average_last": Field(
            1,
            "newest checkpoints whose mean weights fp8rl eval, sample and convert take; "
            "run.keep_checkpoints must keep as many",
            bounds=whole(1, COUNT),
            needs={"lora.rank=0": "the mean of adapters is not that of weights"},
        ),
    },
}


# {what was a field: (its default, what to write instead)}: config.json of older runs have them.
REMOVED: dict[str, tuple[Any, str]] = {
    "algo.dual_clip": (0.0, "write it in the loss, as in algo.loss='ppo(dual_clip=3.0)'"),
    "algo.loss_length": (
        0,
        "write it in the aggregation, as in "
        "algo.loss_aggregation='seq_mean_token_sum_norm(length=256)'",
    ),
    "env.data_dir": ("", "set the environment variable TFDS_DATA_DIR"),
    "env.download": (True, "a data set that is not there is downloaded; prepare it beforehand"),
    "precision.kv_margin": (1.05, "write precision.kv_cache='fp8_calibrated(margin=1.05)'"),
    **{
        f"model.{name}": (getattr(ModelConfig, name), instead)
        for names, instead in (
            (
                _OF_CHECKPOINTS,
                "a longer context is that of a published model: set model.checkpoint or model.name",
            ),
            (
                _OF_FAMILIES,
                f"the family decides it: write model.family, one of {', '.join(BY_TYPE)}",
            ),
            *(
                ((name,), f"write model.family_options.{name}, with model.family={' or '.join(of)}")
                for name, of in _OPTIONS_OF_FAMILIES.items()
            ),
        )
        for name in names
    },
}


@functools.cache
def all_fields() -> dict[str, Field]:
    """Returns {'section.field': its `Field`}."""
    return {
        f"{section}.{name}": field
        for section, fields in FIELDS.items()
        for name, field in fields.items()
    }


def describe_fields(section: str = "") -> str:
    """Returns the text of `--help-config`: fields with their defaults, meanings and choices.

    Args:
      section: name of the section to show; '' for all.

    Raises:
      UserError: there is no such section.
    """
    if section and section not in FIELDS:
        hint = did_you_mean(section, FIELDS, "write one of " + ", ".join(FIELDS))
        raise UserError(f"--help-config: there is no section {section!r}; {hint}")
    lines = []
    if section in ("", "precision"):
        lines += [
            "FILE:CASE sets the precision of a config file:",
            *(
                f"      {case}: " + ", ".join(f"{name}={value}" for name, value in values.items())
                for case, values in CASES.items()
            ),
        ]
    for path, field in all_fields().items():
        if section in ("", path.partition(".")[0]):
            lines.append(f"--config.{path}={ {} if field.is_free else field.default!r}")
            choices = ", ".join(filter(None, field.choices))
            needs = ", and ".join(field.needs)
            row = (
                field.meaning,
                choices and f"one of: {choices}",
                str(field.bounds or ""),
                needs and f"needs {needs}",
                *(f"{name} {meaning}" for name, meaning in field.options.items()),
            )
            lines += [f"      {part}" for part in row if part]
    return "\n".join(lines) + "\n"
