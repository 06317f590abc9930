"""Which field a person means who writes another name: a slip of the pen, a habit, or the name that
TRL, verl, NeMo RL or transformers have for the same thing.

Names are compared by their last word: `actor_rollout_ref.actor.optim.lr` is `lr`. Sources: the
fields of TRL's `GRPOConfig`, of verl's `ppo_trainer.yaml` and of NeMo RL's GRPO configurations.
"""

from __future__ import annotations

import difflib

from fp8rl_jax.config.fields import FIELDS, all_fields

# Last word of another name -> our field.
MEANT = {
    # what people type
    "lr": "optimizer.learning_rate",
    "batch_size": "rollout.prompts_per_step",
    "max_steps": "run.steps",
    "num_steps": "run.steps",
    "total_steps": "run.steps",
    "max_tokens": "rollout.max_new_tokens",
    "max_length": "rollout.max_new_tokens",
    "n": "rollout.group_size",
    "num_samples": "rollout.group_size",
    "name_or_path": "model.checkpoint",
    "path": "model.checkpoint",
    "dataset": "env.task",
    "beta": "algo.kl_coef",
    "algorithm": "algo.preset",
    "out": "run.dir",
    "grad_clip": "optimizer.clip_norm",
    "dtype": "precision.rollout",
    # TRL and transformers
    "model_name_or_path": "model.checkpoint",
    "dataset_name": "env.task",
    "reward_funcs": "env.reward",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "rollout.prompts_per_step",
    "generation_batch_size": "rollout.prompts_per_step",
    "num_generations": "rollout.group_size",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "rollout.max_prompt_tokens",
    "num_train_epochs": "run.steps",
    "num_iterations": "algo.epochs",
    "steps_per_generation": "algo.num_minibatches",
    "epsilon": "algo.clip_low",
    "epsilon_high": "algo.clip_high",
    "delta": "algo.dual_clip",
    "loss_type": "algo.preset",
    "scale_rewards": "algo.scale",
    "importance_sampling_level": "algo.loss",
    "vllm_importance_sampling_correction": "algo.correction",
    "vllm_importance_sampling_cap": "algo.correction",
    "mask_truncated_completions": "algo.mask_truncated",
    "max_grad_norm": "optimizer.clip_norm",
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "warmup_ratio": "optimizer.warmup_steps",
    "gradient_checkpointing": "learner.remat",
    "save_steps": "run.checkpoint_every",
    "save_total_limit": "run.keep_checkpoints",
    "eval_steps": "eval.every",
    "report_to": "run.loggers",
    "chat_template_kwargs": "data.chat_options",
    # verl
    "train_files": "env.task",
    "val_files": "env.eval_task",
    "train_batch_size": "rollout.prompts_per_step",
    "max_response_length": "rollout.max_new_tokens",
    "prompt_key": "env.question_key",
    "filter_overlong_prompts": "env.overlong",
    "ppo_epochs": "algo.epochs",
    "ppo_mini_batch_size": "algo.num_minibatches",
    "ppo_micro_batch_size": "learner.gradient_accumulation_steps",
    "ppo_micro_batch_size_per_gpu": "learner.gradient_accumulation_steps",
    "clip_ratio": "algo.clip_low",
    "clip_ratio_low": "algo.clip_low",
    "clip_ratio_high": "algo.clip_high",
    "clip_ratio_c": "algo.dual_clip",
    "kl_loss_coef": "algo.kl_coef",
    "use_kl_loss": "algo.kl_coef",
    "kl_loss_type": "algo.kl_estimator",
    "use_kl_in_reward": "algo.kl_in",
    "loss_agg_mode": "algo.loss_aggregation",
    "adv_estimator": "algo.preset",
    "norm_adv_by_std_in_grpo": "algo.scale",
    "rollout_is": "algo.correction",
    "rollout_is_threshold": "algo.correction",
    "enable_gradient_checkpointing": "learner.remat",
    "optimizer_offload": "learner.offload",
    "tensor_model_parallel_size": "mesh.tensor",
    "fsdp_size": "mesh.fsdp",
    "total_training_steps": "run.steps",
    "total_epochs": "run.steps",
    "save_freq": "run.checkpoint_every",
    "test_freq": "eval.every",
    "logger": "run.loggers",
    "project_name": "run.project",
    "default_local_dir": "run.dir",
    # NeMo RL
    "model_name": "model.checkpoint",
    "num_prompts_per_step": "rollout.prompts_per_step",
    "num_generations_per_prompt": "rollout.group_size",
    "max_num_steps": "run.steps",
    "reference_policy_kl_penalty": "algo.kl_coef",
    "ratio_clip_min": "algo.clip_low",
    "ratio_clip_max": "algo.clip_high",
    "use_leave_one_out_baseline": "algo.baseline",
    "normalize_rewards": "algo.scale",
    "tensor_parallel_size": "mesh.tensor",
    "expert_parallel_size": "mesh.expert",
    "val_period": "eval.every",
    "checkpoint_dir": "run.dir",
}


def field_meant(path: str) -> str | None:
    """The field that a name which is none probably stands for; None if no name is near.

    Args:
      path: a name without `--config.`, such as 'optimizer.lr', 'steps' or 'trainer.save_freq'.
    """
    path = path[:100].replace("-", "_").removeprefix("config.")  # the search takes its square
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
