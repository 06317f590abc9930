"""The table of all fields of a configuration: default, meaning, and choices of a text field.

The bounds of numbers are in `fp8rl_jax.base.bounds`. Fields of section `model` are those of
`models.ModelConfig`, which also checks them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import ml_collections

from fp8rl_jax.base.errors import UserError, did_you_mean
from fp8rl_jax.config.cases import CASES
from fp8rl_jax.envs.rewards.terms import BUILT_IN, IN_WORKERS
from fp8rl_jax.models import REMAT, ModelConfig
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
    """

    default: Any
    meaning: str
    choices: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether the field is a dict of options that this table does not know."""
        return isinstance(self.default, ml_collections.ConfigDict)


_OPTIONS = ml_collections.ConfigDict()
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
    field.name: Field(_SMALL.get(field.name, field.default), field.metadata["meaning"])
    for field in dataclasses.fields(ModelConfig)
    if field.name != "vocab_size"  # the tokenizer's, or the checkpoint's
}

# {section: {field: Field}}, in the order of `--help-config`.
FIELDS: dict[str, dict[str, Field]] = {
    "run": {
        "dir": Field("runs/default", "directory of the run: metrics, checkpoints, report"),
        "seed": Field(0, "seed of data, initialisation and sampling"),
        "steps": Field(100, "RL steps; 0 runs supervised fine-tuning only"),
        "cache_dir": Field(
            "",
            "where results of supervised fine-tuning and passed self-checks are "
            "kept; '' for ~/.cache/fp8rl_jax",
        ),
        "compilation_cache": Field(
            "",
            "directory of compiled programs, which later starts load instead of compiling; off: "
            "none; '' for $FP8RL_COMPILATION_CACHE, else ~/.cache/fp8rl_jax/compilation",
        ),
        "samples": Field(4, "transcripts written at each evaluation"),
        "loggers": Field(
            "tensorboard",
            "where metrics go besides the run's .jsonl files: tensorboard, wandb, "
            "mlflow, or several with commas",
        ),
        "project": Field("fp8rl", "project (wandb) or experiment (mlflow) of the run"),
        "checkpoint_every": Field(
            20, "RL steps between checkpoints (supervised fine-tuning saves at each evaluation)"
        ),
        "check_every": Field(
            10, "with rollout.ahead: steps between two that wait for a rollout to compute its drift"
        ),
        "keep_checkpoints": Field(2, "newest checkpoints to keep"),
    },
    "model": {
        "checkpoint": Field(
            "",
            "directory of a Hugging Face model, or hf:ORG/NAME[@REVISION] for one that "
            "`hf download` fetched: shapes and initial parameters; '' for random ones",
        ),
        "name": Field(
            "",
            "shapes of a published model, such as qwen3_0p6b; leave the fields below "
            "at their defaults",
        ),
        "check_finite": Field(True, "refuse a checkpoint with weights that are NaN or infinite"),
        **_SHAPES,
    },
    "precision": {
        "rollout": Field("fp8", "recipe of the sampler: fp8, bf16, f32, ..."),
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
        "first_layers_bf16": Field(0, "number of first layers whose linear layers run in bf16"),
        "last_layers_bf16": Field(0, "number of last layers whose linear layers run in bf16"),
        "bf16_modules": Field("", "linear layers in bf16, by pattern: 'down_proj,[qk]_proj'"),
        "kv_cache": Field(
            "recipe",
            "recipe: as the recipe says; bf16; fp8 or int8: a scale per (token, head); "
            "fp8_calibrated: a scale per layer, measured after each update; K and V apart: "
            "k=int8,v=fp8",
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
        ),
        "kv_margin": Field(1.05, "headroom factor of calibrated scales of the KV cache"),
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
        "data": Field(-1, "devices that split the batch; -1 for all that the other axes leave"),
        "fsdp": Field(1, "devices that split the batch and shard parameters and optimiser state"),
        "tensor": Field(
            1, "devices that shard every layer by output features, and attention by heads"
        ),
        "expert": Field(
            1, "devices that split the batch and share experts (tokens travel); 1 for a dense model"
        ),
        "rollout": Field(
            0,
            "devices for rollouts and evaluations alone, beside those of the other axes; 0 if all "
            "devices do both",
        ),
    },
    "data": {
        "tokenizer": Field(
            "byte",
            "'byte', the path of a tokenizer.json, a Hugging Face "
            "directory, or 'checkpoint' for that of model.checkpoint",
        ),
        "chat": Field(False, "questions are the user's messages in the tokenizer's chat template"),
        "system_prompt": Field("", "with chat: a system message before the question; '' for none"),
        "chat_options": Field(
            _OPTIONS, "with chat: variables of the template, such as enable_thinking"
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
        ),
        "task_options": Field(_OPTIONS, "options of a task of reasoning_gym"),
        "reward": Field(
            "auto",
            f"{', '.join(BUILT_IN)}, or a function as 'module:function'; auto: task_score for "
            "tasks of reasoning_gym that have a scorer of their own, else exact_match; several "
            "with weights as 'exact_match, 0.5*module:function', the first of which evaluation "
            "counts",
        ),
        "reward_timeout": Field(
            30.0,
            f"seconds that a call of {', '.join(IN_WORKERS)} or your own "
            "function may take; one that takes longer is not scored",
        ),
        "reward_memory_gb": Field(4.0, "GiB that a process for such calls may take; 0 for any"),
        "step": Field(
            "",
            "with several replies: the environment, 'module:function' of (state, reply, row), or "
            "(state, reply, row, cut), that returns fp8rl_jax.envs.Step; '' for env.tools",
        ),
        "tools": Field(
            "",
            "'module:NAME' of a list of functions that the policy may call in its replies; a chat "
            "template shows them",
        ),
        "max_turns": Field(1, "most replies of a response; above 1 with env.step or env.tools"),
        "observation_role": Field("tool", "with chat: role of what the environment says"),
        "train_questions": Field(
            4096,
            "distinct RL questions to generate (reasoning_gym tasks), in a new order each epoch",
        ),
        "question_key": Field(
            "",
            "the data set's column with the question or conversation; '' for "
            "the first of question, prompt, problem, instruction, input",
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
        ),
        "eval_fraction": Field(
            0.1,
            "share of a data set held out when it has no test or validation split, by a hash of "
            "the question",
        ),
        "data_dir": Field(
            "",
            "prepared data sets of tensorflow-datasets; '' for $TFDS_DATA_DIR, "
            "else ~/tensorflow_datasets",
        ),
        "download": Field(True, "download a data set of tensorflow-datasets that is not there"),
        "max_questions": Field(
            0,
            "most questions of a data set to train on; 0 for all; of 'module:function' no further "
            "rows are read",
        ),
        "overlong": Field(
            "drop",
            "a data set's questions that are too long for max_prompt_tokens: drop them, or error",
            choices=("drop", "error"),
        ),
    },
    "rollout": {
        "prompts_per_step": Field(16, "questions per RL step"),
        "group_size": Field(8, "samples per question"),
        "max_prompt_tokens": Field(24, "most tokens of a prompt"),
        "max_new_tokens": Field(8, "most tokens of a response, with those of the environment"),
        "max_turn_tokens": Field(
            0, "with env.max_turns: tokens at which a reply is cut; 0 for max_new_tokens alone"
        ),
        "max_observation_tokens": Field(
            64, "with env.max_turns: most tokens of what the environment says; the rest is cut"
        ),
        "ahead": Field(
            0,
            "steps that rollouts run ahead: step t learns from what the weights of step t - ahead "
            "drew, while its own draw for a later step",
        ),
        "most_versions": Field(
            1,
            "with slots: versions of the policy that may draw one response; above 1 a rollout ends "
            "with its step's responses, and slots that they leave draw for later steps",
        ),
        "slots": Field(
            0,
            "sequences that decode at a time, each replaced when it ends (continuous "
            "batching); 0 decodes all samples at once",
        ),
        "pages": Field(
            0,
            "with slots: pages of 64 tokens in the KV cache; 0 for as many as the "
            "slots can fill and the device holds (fp8rl plan --rollout)",
        ),
        "part": Field(
            64,
            "with slots: tokens that each slot draws before finished responses and replies are "
            "looked at",
        ),
        "prefill_chunk": Field(
            0,
            "with slots: most tokens that are prefilled at a time, of one prompt or several short "
            "ones; 0 for 1024 on a GPU, 64 elsewhere",
        ),
        "temperature": Field(1.0, "sampling temperature, above 0"),
        "top_k": Field(0, "sample from the k most likely tokens; 0 for all"),
        "top_p": Field(
            1.0, "nucleus sampling: keep the most likely tokens up to this probability; 1.0 for all"
        ),
    },
    "algo": {
        "preset": Field(
            "",
            "a published algorithm, which sets the fields below up to "
            "mask_truncated (fp8rl algo list); '' for the defaults",
            choices=("", *PRESETS),
        ),
        "baseline": Field("group_mean", "what is subtracted from a reward", choices=(*BASELINES,)),
        "scale": Field("group_std", "what advantages are divided by", choices=(*SCALES,)),
        "credit": Field(
            "response",
            "what a token's advantage counts: the response's reward, or with turn, of several "
            "replies, the rewards from its reply on",
            choices=("response", "turn"),
        ),
        "loss": Field(
            "ppo",
            f"loss of a token: {', '.join(LOSSES)} (with a teacher), with parameters as in "
            "sapo(1.0, 1.05), or 'module:function'",
        ),
        "clip_low": Field(0.2, "the policy ratio's lower bound is 1 - clip_low"),
        "clip_high": Field(0.2, "the policy ratio's upper bound is 1 + clip_high"),
        "dual_clip": Field(
            0.0,
            "with ppo: the loss of a negative advantage is at most this many "
            "times |advantage|; above 1, or 0 for no bound",
        ),
        "loss_aggregation": Field(
            "token_mean", "how the losses of an update's tokens are added", choices=(*AGGREGATIONS,)
        ),
        "loss_length": Field(
            0,
            "with loss_aggregation=seq_mean_token_sum_norm: its constant divisor; 0 for "
            "rollout.max_new_tokens",
        ),
        "kl_coef": Field(0.0, "weight of the KL divergence from the policy before RL"),
        "kl_estimator": Field(
            "k3",
            "estimator of the KL divergence in the loss; NAME+ has NAME's value and k2's gradient",
            choices=(*ESTIMATORS,),
        ),
        "kl_in": Field(
            "loss",
            "where the KL divergence counts: in the loss; reward: each token's advantage loses the "
            "k1 divergence from that token on",
            choices=("loss", "reward"),
        ),
        "teacher": Field(
            "",
            "directory of a Hugging Face model, or hf:ORG/NAME: the divergence from it, exact over "
            "the whole vocabulary at every token of a response, joins the loss",
        ),
        "teacher_coef": Field(1.0, "weight of the divergence from algo.teacher"),
        "dynamic_sampling": Field(
            False, "sample more questions until the rewards of every group differ"
        ),
        "overlong_buffer": Field(
            0,
            "last tokens before the length limit over which a response "
            "loses reward; -1 for a fifth of rollout.max_new_tokens",
        ),
        "overlong_penalty": Field(1.0, "reward that a response at the length limit loses"),
        "mask_truncated": Field(False, "leave responses out of the loss that a limit cut off"),
        "dynamic_sampling_rounds": Field(
            10,
            "with dynamic_sampling: most rollouts of a step; groups that are then missing are "
            "filled with ones that do not count",
        ),
        "correction": Field(
            "auto",
            "for a rollout that differs from the learner: none, "
            f"{', '.join(CORRECTIONS)}, with parameters as in tis(2.0), several with commas, or "
            "'module:function'; auto: tis if the recipes differ and old_logprobs is not 'rollout' "
            "(where the ratio holds the difference)",
        ),
        "truncated_sampling": Field(
            "renormalised",
            "with rollout.top_k or top_p, over what log-probabilities and divergences are: "
            "renormalised, the kept tokens; whole, the vocabulary, a biased gradient",
            choices=("renormalised", "whole"),
        ),
        "routing_replay": Field(
            "none",
            "what the learner takes from the rollout's routers: none; experts: which experts, in "
            "their order; weights: their weights too",
            choices=("none", "experts", "weights"),
        ),
        "router_aux_loss_coef": Field(0.0, "weight of the loss that balances the experts' load"),
        "old_logprobs": Field(
            "auto",
            "source of the old log-probabilities: learner, recomputed before the first update; "
            "rollout, the sampler's; auto, the learner's with a correction, else the sampler's "
            "with rollouts of older policies, or under zero drift until a first update shows a "
            "difference",
            choices=("auto", "learner", "rollout"),
        ),
        "epochs": Field(1, "passes over one rollout"),
        "num_minibatches": Field(1, "optimiser updates, each on an equal part of the rollout"),
    },
    "learner": {
        "gradient_accumulation_steps": Field(1, "micro-batches of an update"),
        "tokens_per_batch": Field(
            0,
            "tokens that a device computes at a time, of several sequences in one row without "
            "padding between them, in as many micro-batches as the lengths need; 0: one sequence "
            "a row, padded",
        ),
        "share_prompts": Field(
            False,
            "compute a prompt once for those of its responses that are in one row of "
            "tokens_per_batch",
        ),
        "remat": Field(
            "none", "none: keep activations; full: recompute layers, not attention", choices=REMAT
        ),
        "offload": Field(
            "none",
            "moments: keep the optimiser's moments in the host's memory; the "
            "update moves one array at a time",
            choices=("none", "moments"),
        ),
    },
    "optimizer": {
        "learning_rate": Field(1e-4, "peak learning rate of RL, after warm-up"),
        "warmup_steps": Field(5, "updates of linear warm-up of RL"),
        "end_fraction": Field(
            1.0,
            "cosine decay over all updates of run.steps to this share of the peak learning rate",
        ),
        "b1": Field(0.9, "AdamW's decay of the first moment"),
        "b2": Field(0.99, "AdamW's decay of the second moment"),
        "weight_decay": Field(0.0, "AdamW's decoupled weight decay"),
        "clip_norm": Field(1.0, "largest global norm of a gradient"),
    },
    "lora": {
        "rank": Field(
            0, "rank of the adapters of linear layers, which alone are trained; 0 trains everything"
        ),
        "alpha": Field(32.0, "an adapter's product is multiplied by alpha / rank"),
        "modules": Field("*", "linear layers with adapters, by pattern: '[qkvo]_proj'"),
        "checkpoint": Field("", "directory of a PEFT adapter that training begins with"),
        "base": Field(
            "bf16",
            "how the frozen base is kept: as published models are, in float32, or with linear "
            "layers in FP8, which quantises what is not FP8 already",
            ("bf16", "f32", "fp8"),
        ),
    },
    "sft": {
        "steps": Field(600, "updates of supervised fine-tuning before RL; 0 leaves it out"),
        "questions": Field(4096, "distinct demonstrations"),
        "batch_size": Field(64, "demonstrations per update"),
        "learning_rate": Field(4e-3, "peak learning rate of supervised fine-tuning"),
        "warmup_steps": Field(30, "updates of linear warm-up of supervised fine-tuning"),
        "end_fraction": Field(1.0, "cosine decay to this share of the peak learning rate"),
        "b2": Field(0.98, "AdamW's decay of the second moment"),
        "weight_decay": Field(0.01, "AdamW's decoupled weight decay"),
        "evaluations": Field(6, "evaluations of supervised fine-tuning, the last at its end"),
    },
    "eval": {
        "questions": Field(1024, "held-out questions"),
        "batch_size": Field(256, "questions answered at a time"),
        "samples": Field(
            1, "sampled answers per question, besides the greedy one: pass@k up to this k"
        ),
        "temperature": Field(1.0, "temperature of the sampled answers, above 0"),
        "top_p": Field(
            1.0,
            "nucleus sampling of the sampled answers: keep the most likely tokens up to this "
            "probability; 1.0 for all",
        ),
        "every": Field(25, "RL steps between evaluations; the last step is always evaluated"),
        "average_last": Field(
            1,
            "newest checkpoints whose mean weights fp8rl eval, sample and convert take; "
            "run.keep_checkpoints must keep as many",
        ),
    },
}


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
        lines += ["FILE:CASE sets the precision of a config file:"]
        for case, values in CASES.items():
            lines.append(f"      {case}: " + ", ".join(f"{k}={v}" for k, v in values.items()))
    for path, field in all_fields().items():
        if section in ("", path.partition(".")[0]):
            lines.append(f"--config.{path}={ {} if field.is_free else field.default!r}")
            lines.append(f"      {field.meaning}")
            if named := [choice for choice in field.choices if choice]:
                lines.append(f"      one of: {', '.join(named)}")
    return "\n".join(lines) + "\n"
