"""Finds the field that a wrong name stands for: a typo, or the name that TRL, verl, NeMo RL or
transformers use.

Names are compared by their last word: `actor_rollout_ref.actor.optim.lr` is `lr`. Sources: the
fields of TRL's `GRPOConfig`, of verl's `ppo_trainer.yaml` and of NeMo RL's GRPO configurations.
"""

from __future__ import annotations

import difflib

from fp8rl_jax.config.fields import FIELDS, all_fields

# Field -> the last words of its other names.
_OTHER_NAMES = {
    "run.dir": "out output_dir default_local_dir checkpoint_dir",
    "run.steps": (
        "max_steps num_steps total_steps num_train_epochs total_training_steps total_epochs "
        "max_num_steps"
    ),
    "run.loggers": "report_to logger",
    "run.project": "project_name",
    "run.checkpoint_every": "save_steps save_freq",
    "run.keep_checkpoints": "save_total_limit",
    "model.checkpoint": "name_or_path path model_name_or_path model_name",
    "precision.rollout": "dtype",
    "precision.head": "cast_lm_head_to_fp32 enable_fp32_lm_head fp32_lm_head lm_head_fp32",
    "lora.rank": "lora_rank lora_r r peft_config",
    "lora.alpha": "lora_alpha",
    "lora.modules": "target_modules lora_target_modules",
    "mesh.fsdp": "fsdp_size",
    "mesh.tensor": "tensor_model_parallel_size tensor_parallel_size",
    "mesh.expert": "expert_parallel_size",
    "data.chat_options": "chat_template_kwargs",
    "env.task": "dataset dataset_name train_files",
    "env.reward": "reward_funcs",
    "env.step": "environment_factory rollout_func interaction_config_path env_class",
    "env.tools": "tool_config_path",
    "env.max_turns": (
        "max_assistant_turns max_user_turns max_tool_calling_iterations max_rollout_turns"
    ),
    "env.question_key": "prompt_key",
    "env.eval_task": "val_files",
    "env.overlong": "filter_overlong_prompts",
    "rollout.prompts_per_step": (
        "batch_size per_device_train_batch_size generation_batch_size train_batch_size "
        "num_prompts_per_step"
    ),
    "rollout.group_size": "n num_samples num_generations num_generations_per_prompt",
    "rollout.max_prompt_tokens": "max_prompt_length",
    "rollout.ahead": "max_trajectory_age_steps staleness_threshold max_head_offpolicyness",
    "rollout.most_versions": "partial_rollout",
    "rollout.max_observation_tokens": "max_tool_response_length",
    "rollout.max_new_tokens": "max_tokens max_length max_completion_length max_response_length",
    "algo.preset": "algorithm loss_type adv_estimator",
    "algo.baseline": "use_leave_one_out_baseline",
    "algo.scale": "scale_rewards norm_adv_by_std_in_grpo normalize_rewards",
    "algo.loss": "importance_sampling_level",
    "algo.clip_low": "epsilon clip_ratio clip_ratio_low ratio_clip_min",
    "algo.clip_high": "epsilon_high clip_ratio_high ratio_clip_max",
    "algo.dual_clip": "delta clip_ratio_c",
    "algo.loss_aggregation": "loss_agg_mode",
    "algo.kl_coef": "beta kl_loss_coef use_kl_loss reference_policy_kl_penalty",
    "algo.kl_estimator": "kl_loss_type",
    "algo.kl_in": "use_kl_in_reward",
    "algo.teacher": "teacher_model_name_or_path teacher_model teacher",
    "algo.mask_truncated": "mask_truncated_completions",
    "algo.correction": (
        "vllm_importance_sampling_correction vllm_importance_sampling_cap rollout_is "
        "rollout_is_threshold"
    ),
    "algo.epochs": "num_iterations ppo_epochs",
    "algo.num_minibatches": "steps_per_generation ppo_mini_batch_size",
    "learner.gradient_accumulation_steps": "ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "learner.tokens_per_batch": (
        "use_dynamic_bsz ppo_max_token_len_per_gpu log_prob_max_token_len_per_gpu max_token_len "
        "train_mb_tokens padding_free packing"
    ),
    "learner.share_prompts": "prefix_sharing use_prefix_grouper shared_prompt tree_training",
    "learner.remat": "gradient_checkpointing enable_gradient_checkpointing",
    "learner.offload": "optimizer_offload",
    "optimizer.learning_rate": "lr",
    "optimizer.warmup_steps": "warmup_ratio",
    "optimizer.b1": "adam_beta1",
    "optimizer.b2": "adam_beta2",
    "optimizer.clip_norm": "grad_clip max_grad_norm",
    "eval.batch_size": "per_device_eval_batch_size val_batch_size",
    "eval.every": "eval_steps test_freq val_period",
}
# What the field counts -> other names of it that count something else.
_UNITS = {
    "steps, not epochs": "num_train_epochs total_epochs",
    "prompts, not responses": "per_device_train_batch_size generation_batch_size",
    "minibatches, not the size of one": "ppo_mini_batch_size",
    "micro-batches, not the size of one": "ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "tokens of a row": "use_dynamic_bsz padding_free packing",
    "steps, not a share of them": "warmup_ratio",
}
_UNIT_OF = {name: unit for unit, names in _UNITS.items() for name in names.split()}
MEANT = {name: field for field, names in _OTHER_NAMES.items() for name in names.split()}


def override_meant(path: str, value: str) -> str | None:
    """Returns the override that a wrong name and its value stand for; None if no name is near.

    Example:
      >>> override_meant("num_generations", "8")
      '--config.rollout.group_size=8'
      >>> override_meant("ppo_mini_batch_size", "64")
      '--config.algo.num_minibatches=N, minibatches, not the size of one'
    """
    field = field_meant(path)
    unit = _UNIT_OF.get(path.replace("-", "_").rpartition(".")[2])
    if field and unit:
        return f"--config.{field}=N, {unit}"
    return field and f"--config.{field}={value}"


def field_meant(path: str) -> str | None:
    """Returns the field that a wrong name probably stands for; None if no name is near.

    Args:
      path: a name without `--config.`, such as 'optimizer.lr', 'steps' or 'trainer.save_freq'.
    """
    path = path[:100].replace("-", "_").removeprefix("config.")  # the search's time is quadratic
    fields = all_fields()
    if path in fields:
        return path
    section, last = path.partition(".")[0], path.rpartition(".")[2]
    meant = MEANT.get(last, "")
    if section in FIELDS:
        if (own := f"{section}.{meant.partition('.')[2]}") in fields:
            return own
        if near := difflib.get_close_matches(last, FIELDS[section], 1, 0.6):
            return f"{section}.{near[0]}"
    if same := [name for name in fields if name.endswith("." + last)]:
        return same[0] if len(same) == 1 or not meant else meant
    if meant:
        return meant
    by_leaf = {name.partition(".")[2]: name for name in reversed(fields)} | MEANT
    near = difflib.get_close_matches(last, by_leaf, 1, 0.75)
    return by_leaf[near[0]] if near else None
