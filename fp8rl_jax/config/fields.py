"""The table of all fields of a configuration: defaults, meanings, choices and bounds."""

from __future__ import annotations

from typing import Any

import ml_collections

# section -> field -> (default, meaning). The order is that of `--help`.
FIELDS: dict[str, dict[str, tuple[Any, str]]] = {
    "run": {
        "dir": ("runs/default", "directory of the run: metrics, checkpoints, report"),
        "seed": (0, "seed of data, initialisation and sampling"),
        "steps": (100, "RL steps; 0 runs the warm-up only"),
        "cache_dir": ("", "where finished warm-ups and passed self-checks are kept; '' for "
                      "~/.cache/fp8rl_jax"),
        "compilation_cache": ("", "directory of compiled programs, which a second start takes from "
                              "there; off: none; '' for $FP8RL_COMPILATION_CACHE, else "
                              "~/.cache/fp8rl_jax/compilation"),
        "samples": (4, "transcripts written at each evaluation"),
        "checkpoint_every": (20, "RL steps between checkpoints (warm-up: at each evaluation)"),
        "keep_checkpoints": (2, "newest checkpoints to keep"),
    },
    "model": {
        "checkpoint": ("", "directory of a Hugging Face model: shapes and initial parameters; '' "
                       "for random ones"),
        "name": ("", "shapes of a published model, such as qwen3_0p6b; the fields below then stay"),
        "hidden_size": (128, "width of the residual stream"),
        "intermediate_size": (384, "width of the gated MLP of a dense layer"),
        "num_hidden_layers": (4, "decoder layers"),
        "num_attention_heads": (4, "query heads"),
        "num_key_value_heads": (2, "key and value heads; divides the query heads"),
        "head_dim": (32, "width of a head, even, at most 128"),
        "qk_norm": (True, "RMSNorm of every query and key head (Qwen3)"),
        "rope_theta": (10_000.0, "base of the rotary frequencies"),
        "rope_interleave": (False, "rotary pairs are neighbours, not halves of a head apart"),
        "rope_type": ("default", "default, llama3 (its bands) or yarn"),
        "rope_factor": (1.0, "of llama3 and yarn: how much longer than the original context"),
        "rope_original_max_position_embeddings": (8192, "of both: the original context, in tokens"),
        "rope_low_freq_factor": (1.0, "of llama3: fewer turns than this are slowed by the factor"),
        "rope_high_freq_factor": (4.0, "of llama3: more turns than this stay"),
        "rope_beta_fast": (32.0, "of yarn: more turns than this stay"),
        "rope_beta_slow": (1.0, "of yarn: fewer turns than this are slowed by the factor"),
        "rope_mscale": (0.0, "of yarn: temperature of attention; 0 for none"),
        "rope_mscale_all_dim": (0.0, "of yarn: its part that multiplies the scores; 0 for none"),
        "rms_norm_eps": (1e-6, "epsilon of every RMSNorm"),
        "tie_word_embeddings": (False, "output head = transposed embedding"),
        "embedding_init_std": (1.0, "standard deviation of the initial embedding"),
        "num_experts": (0, "experts of every layer, in the place of its MLP; 0 for a dense model"),
        "num_experts_per_tok": (2, "experts of a token"),
        "moe_intermediate_size": (128, "width of one expert's gated MLP"),
        "norm_topk_prob": (True, "divide the weights of a token's experts by their sum"),
        "scoring_func": ("softmax", "router: softmax, or sigmoid with a correction bias "
                         "(DeepSeek-V3)"),
        "n_group": (1, "groups of experts"),
        "topk_group": (1, "groups that a token may choose experts from"),
        "routed_scaling_factor": (1.0, "multiplies the weights of the routed experts"),
        "n_shared_experts": (0, "experts that every token uses"),
        "first_k_dense_replace": (0, "so many first layers of a model with experts are dense"),
        "kv_lora_rank": (0, "latent of keys and values (multi-head latent attention); 0 for "
                         "grouped-query attention"),
        "q_lora_rank": (0, "latent of queries; 0 for none"),
        "qk_nope_head_dim": (128, "of latent attention: features of a head without rotation"),
        "qk_rope_head_dim": (64, "of latent attention: features of a head with rotation"),
        "v_head_dim": (128, "of latent attention: features of a value's head"),
    },
    "precision": {
        "rollout": ("fp8", "recipe of the sampler: fp8, bf16, f32, ..."),
        "learner": ("fp8", "recipe of the learner; equal recipes give zero drift"),
        "zero_drift": ("auto", "required: refuse what cannot be exact; report; auto: required "
                       "when the two recipes have the same forward pass, else report"),
        "weight_policy": ("", "scaling policy of weights: dynamic, delayed(history=1024), "
                          "static(amax=8.0), power_of_two(...), 'package.module:function'; "
                          "'' for the recipe's own"),
        "activation_policy": ("", "scaling policy of activations, likewise"),
        "gradient_policy": ("", "scaling policy of output gradients, likewise"),
        "first_layers_bf16": (0, "so many first layers run their linear layers in bf16"),
        "last_layers_bf16": (0, "so many last layers, likewise"),
        "bf16_modules": ("", "linear layers in bf16, by pattern: 'down_proj,[qk]_proj'"),
        "kv_cache": ("recipe", "recipe: as the recipe says; bf16; fp8: a scale per (token, head); "
                     "fp8_calibrated: a scale per layer, measured after each update"),
        "attention": ("bf16", "bf16, or fp8: q too is quantised, as the KV cache is"),
        "kv_margin": (1.05, "headroom of calibrated scales"),
        "kv_percentile": (100.0, "percentile of the sequences' amaxes that calibrates"),
        "kernels": ("auto", "auto: Triton kernels on a GPU, jnp elsewhere; reference: jnp; triton; "
                    "mosaic: triton, and Mosaic for FP8 products of many rows"),
        "health": (True, "count saturated, underflowed and non-finite values"),
        "self_check": (True, "before a run that relies on zero drift, try it on two layers"),
    },
    "mesh": {
        "data": (-1, "devices that split the batch; -1 for all that the others leave"),
        "fsdp": (1, "devices that split the batch and store parameters in parts"),
        "tensor": (1, "devices that split every layer by output features, and attention by heads"),
        "expert": (1, "devices that split the batch and store experts in parts; 1 for a dense "
                   "model"),
    },
    "data": {
        "tokenizer": ("byte", "'byte', the path of a tokenizer.json, a Hugging Face directory, or "
                      "'checkpoint' for that of model.checkpoint"),
        "chat": (False, "questions are the user's messages in the tokenizer's chat template"),
        "system_prompt": ("", "with chat: a system message before the question; '' for none"),
        "chat_options": (ml_collections.ConfigDict(), "with chat: variables of the template, such "
                         "as enable_thinking"),
        "bos_token": ("<bos>", "begin of sequence in tokenizer.json"),
        "eos_token": ("<eos>", "end of sequence in tokenizer.json"),
        "pad_token": ("<pad>", "padding in tokenizer.json"),
    },
    "env": {
        "task": ("basic_arithmetic", "a task of reasoning_gym"),
        "task_options": (ml_collections.ConfigDict(), "keywords of that task"),
        "reward": ("exact_match", "exact_match, math_equal, or a function as 'module:function'"),
        "train_questions": (4096, "distinct questions for RL, in a new order each epoch"),
    },
    "rollout": {
        "prompts_per_step": (16, "questions per RL step"),
        "group_size": (8, "samples per question"),
        "max_prompt_tokens": (24, "prompt slots"),
        "max_new_tokens": (8, "response slots"),
        "cache_slots": (0, "KV slots per sequence; 0 for prompt + response"),
        "slots": (0, "sequences that decode at a time, each replaced when it ends (continuous "
                  "batching); 0 decodes all samples at once"),
        "pages": (0, "with slots: pages of 64 tokens in the KV cache; 0 for as many as the slots "
                  "can fill and the device holds (fp8rl plan --rollout)"),
        "prefill_chunk": (64, "with slots: tokens of a prompt that are prefilled between two "
                          "decode steps"),
        "temperature": (1.0, "sampling temperature, above 0"),
        "top_k": (0, "sample from this many tokens; 0 for all"),
        "top_p": (1.0, "sample from this much probability; 1.0 for all"),
    },
    "algo": {
        "normalize_std": (True, "divide advantages by the group's standard deviation (GRPO); "
                          "False is Dr. GRPO"),
        "clip_low": (0.2, "ratio bound 1 - clip_low"),
        "clip_high": (0.2, "ratio bound 1 + clip_high"),
        "kl_coef": (0.0, "weight of the k3 divergence from the warm-up policy"),
        "correction": ("auto", "tis: truncated importance sampling; none; auto: tis when the "
                       "recipes differ"),
        "tis_cap": (2.0, "cap of the importance weight"),
        "routing_replay": ("none", "what the learner takes from the rollout's routers: none; "
                           "experts: the choice, in its order; weights: their weights too"),
        "router_aux_loss_coef": (0.0, "weight of the loss that balances the experts' load"),
        "old_logprobs": ("auto", "learner: recompute before the first update; rollout: take the "
                         "sampler's own; auto: the sampler's where zero drift is in force, until "
                         "a first update shows a difference, and the learner's elsewhere"),
        "updates_per_rollout": (1, "optimiser updates, each on an equal part of the rollout"),
    },
    "learner": {
        "micro_batches": (1, "parts of an update whose gradients are accumulated"),
        "remat": ("none", "none: keep activations; full: recompute each layer"),
    },
    "optimizer": {
        "learning_rate": (1e-4, "peak, after warm-up"),
        "warmup_steps": (5, "updates of linear warm-up"),
        "b1": (0.9, "AdamW's first decay"),
        "b2": (0.99, "AdamW's second decay"),
        "weight_decay": (0.0, "AdamW's decoupled decay"),
        "clip_norm": (1.0, "largest global norm of a gradient"),
    },
    "warmup": {
        "steps": (600, "supervised updates before RL; 0 leaves the stage out"),
        "questions": (4096, "distinct demonstrations"),
        "batch_size": (64, "demonstrations per update"),
        "learning_rate": (4e-3, "peak"),
        "warmup_steps": (30, "updates of linear warm-up"),
        "end_fraction": (1.0, "cosine decay to this share of the peak"),
        "b2": (0.98, "AdamW's second decay"),
        "weight_decay": (0.01, "AdamW's decoupled decay"),
        "evaluations": (6, "evaluations during the stage, the last at its end"),
    },
    "eval": {
        "questions": (1024, "held-out questions"),
        "batch_size": (256, "questions at a time"),
        "every": (25, "RL steps between evaluations; the last step is always evaluated"),
    },
}  # fmt: skip
FREE_FORM = ("data.chat_options", "env.task_options")
CHOICES = {
    "precision.zero_drift": ("auto", "required", "report"),
    "precision.kv_cache": ("recipe", "bf16", "fp8", "fp8_calibrated"),
    "precision.attention": ("bf16", "fp8"),
    "precision.kernels": ("auto", "reference", "triton", "mosaic"),
    "algo.correction": ("auto", "none", "tis"),
    "algo.old_logprobs": ("auto", "learner", "rollout"),
    "algo.routing_replay": ("none", "experts", "weights"),
}
# Fields of earlier versions, with the one value that they may still have.
REMOVED = {"precision.attention_kernel": "strict"}
# Fields with the least value allowed.
AT_LEAST = {
    "precision.first_layers_bf16": 0, "precision.last_layers_bf16": 0, "precision.kv_margin": 1,
    "precision.kv_percentile": 1,
    "run.seed": 0, "algo.clip_low": 0, "algo.clip_high": 0, "algo.tis_cap": 0,
    "optimizer.weight_decay": 0, "warmup.weight_decay": 0, "warmup.end_fraction": 0,
    "optimizer.b1": 0, "optimizer.b2": 0, "warmup.b2": 0,
    "run.steps": 0, "run.samples": 0, "run.checkpoint_every": 1, "run.keep_checkpoints": 1,
    "env.train_questions": 1, "rollout.prompts_per_step": 1, "rollout.group_size": 1,
    "rollout.max_prompt_tokens": 2, "rollout.max_new_tokens": 1, "rollout.cache_slots": 0,
    "rollout.slots": 0, "rollout.pages": 0, "rollout.prefill_chunk": 1,
    "rollout.top_k": 0, "algo.kl_coef": 0, "algo.router_aux_loss_coef": 0,
    "algo.updates_per_rollout": 1,
    "learner.micro_batches": 1, "optimizer.learning_rate": 0, "optimizer.warmup_steps": 0,
    "optimizer.clip_norm": 1e-6, "warmup.steps": 0, "warmup.questions": 1, "warmup.batch_size": 1,
    "warmup.learning_rate": 0, "warmup.warmup_steps": 0, "warmup.evaluations": 1,
    "eval.questions": 1, "eval.batch_size": 1, "eval.every": 1,
}  # fmt: skip
# Fields with the greatest value allowed.
AT_MOST = {
    "precision.kv_margin": 100, "precision.kv_percentile": 100,
    "run.seed": 2**31 - 1, "warmup.end_fraction": 1,
    "optimizer.b1": 0.9999999, "optimizer.b2": 0.9999999, "warmup.b2": 0.9999999,
}  # fmt: skip
