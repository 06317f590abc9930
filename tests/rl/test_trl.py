"""The losses of `rl/` against TRL's GRPOTrainer and GMPOTrainer: value and gradient to 1e-6.

TRL's loss is a method that reads attributes alone; here they are those of a stand-in, and its
model's log-probabilities are given. TRL calculates in float64, the losses of `rl/` in float32.
"""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow
from rl_inputs import B, R, batch_of

from fp8rl_jax.base.by_name import choose
from fp8rl_jax.rl import kl, losses
from fp8rl_jax.rl.aggregation import AGGREGATIONS

LENGTH = 11  # the constant that dr_grpo divides by; no response is that long
# Its arguments; our loss with its arguments; our aggregation.
ASYMMETRIC = {"epsilon_low": 0.2, "epsilon_high": 0.28}
OURS = {"clip_low": 0.2, "clip_high": 0.28}
SEQUENCE = {**ASYMMETRIC, "importance_sampling_level": "sequence"}
CASES = {
    "grpo": (ASYMMETRIC, "ppo", OURS, "seq_mean_token_mean"),
    "dapo": (ASYMMETRIC, "ppo", OURS, "token_mean"),
    "dr_grpo": (ASYMMETRIC, "ppo", OURS, "seq_mean_token_sum_norm"),
    # The mean over the tokens of a micro-batch; we offer the mean over those of the whole update,
    # which is the same where the update is one batch.
    "bnpo": (ASYMMETRIC, "ppo", OURS, "token_mean"),
    "grpo, delta": (
        {**ASYMMETRIC, "delta": 1.9},
        "ppo",
        {**OURS, "dual_clip": 1.9},
        "seq_mean_token_mean",
    ),
    "grpo, sequence": (SEQUENCE, "gspo", OURS, "seq_mean_token_mean"),
    "dapo, sequence": (SEQUENCE, "gspo", OURS, "token_mean"),
    # TRL's bound is of the ratio itself, ours of its distance from 1.
    "cispo": ({"epsilon_high": 1.7}, "cispo", {"clip_low": 1.0, "clip_high": 0.7}, "token_mean"),
    "sapo": (
        {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
        "sapo",
        {"tau_positive": 1.0, "tau_negative": 1.05},
        "seq_mean_token_mean",
    ),
    "gmpo": (ASYMMETRIC, "gmpo", OURS, "seq_mean_token_mean"),
}


def _batch(seed):
    """Every response has a token: TRL's means count those without one, ours do not."""
    rng = np.random.default_rng(seed)
    logp, old, advantages, mask, _ = batch_of(seed, rng.integers(1, R + 1, B), holes=True)
    mask[:, 0] = True
    reference = logp + (rng.integers(-96, 97, (B, R)) / 64).astype(np.float32)
    return logp, old, advantages, mask, reference


def _trl(loss_type, options, beta, batch):
    """(loss, its gradient) of TRL's `_compute_loss`, in float64."""
    import torch

    if loss_type == "gmpo":
        from trl.experimental.gmpo import GMPOTrainer as Trainer
    else:
        from trl import GRPOTrainer as Trainer

    logp, old, advantages, mask, reference = (torch.from_numpy(np.array(a)) for a in batch)
    logp = logp.double().requires_grad_()
    args = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1, **options}
    trainer = types.SimpleNamespace(
        loss_type=loss_type,
        beta=beta,
        args=types.SimpleNamespace(**args),
        importance_sampling_level=options.get("importance_sampling_level", "token"),
        epsilon_low=options.get("epsilon_low"),
        epsilon_high=options.get("epsilon_high"),
        max_completion_length=LENGTH,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        model=types.SimpleNamespace(training=True),
        accelerator=types.SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, torch.zeros_like(logp), None),
    )
    tokens = mask.long()
    loss = Trainer._compute_loss(
        trainer,
        None,
        {
            "prompt_ids": tokens[:, :1],
            "prompt_mask": tokens[:, :1],
            "completion_ids": tokens,
            "completion_mask": tokens,
            "advantages": advantages[:, 0].double(),
            "old_per_token_logps": old.double(),
            "ref_per_token_logps": reference.double(),
            "num_items_in_batch": tokens.sum(),
        },
    )
    loss.backward()
    return loss.item(), logp.grad.numpy()


@pytest.mark.parametrize("beta", [slow(0.0), slow(0.04)])
@pytest.mark.parametrize("case", CASES)
def test_loss(case, beta):
    pytest.importorskip("torch", reason="compares with TRL: pip install trl")
    pytest.importorskip("trl", reason="compares with TRL: pip install trl")
    options, name, arguments, aggregation = CASES[case]
    loss = losses.LOSSES[name](**arguments)
    ((_, weights_of),) = choose(aggregation, AGGREGATIONS, "aggregation", length=LENGTH)

    @jax.jit
    @jax.value_and_grad
    def ours(logp, old, advantages, mask, reference, weights):
        by_token = loss(logp, old, advantages, mask)[0]
        return jnp.sum(weights * (by_token + beta * kl.ESTIMATORS["k3"](logp, reference)))

    for seed in range(5):
        batch = _batch(seed)
        weights = weights_of(batch[3])
        value, gradient = ours(*batch, weights.astype(np.float32))
        wanted = _trl(case.partition(",")[0], options, beta, batch)
        np.testing.assert_allclose(value, wanted[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(gradient, wanted[1], rtol=1e-6, atol=1e-6)
