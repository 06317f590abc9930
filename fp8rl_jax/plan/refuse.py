"""Refuses sizes that the devices cannot hold, before anything is allocated.

Counts only what must be resident at the same time: a refusal is always right, but what is accepted
may still run out of memory. `fp8rl plan` prints the complete estimate.
"""

from __future__ import annotations

from jax.sharding import Mesh

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config.resolved import Resolved
from fp8rl_jax.models import PAGE
from fp8rl_jax.plan.bytes import device_memory, gib, page_bytes, state_bytes


def check_rollout_memory(resolved: Resolved, mesh: Mesh) -> None:
    """Raises UserError if a rollout of training does not fit on the devices."""
    rollout = resolved.config.rollout
    check_sampling_memory(
        resolved,
        mesh,
        rollout.prompts_per_step,
        rollout.group_size,
        "rollout.prompts_per_step x rollout.group_size",
    )


def check_train_memory(resolved: Resolved, mesh: Mesh, rollout_mesh: Mesh | None) -> None:
    """Raises UserError if the train state, alone or during an evaluation, does not fit; or an
    evaluation on devices for rollouts alone."""
    state = state_bytes(resolved, mesh).on_device
    experts = resolved.model.num_experts
    larger = "raise mesh.fsdp" + (" or mesh.expert" if experts else "")
    if experts and experts % (mesh.shape["fsdp"] * mesh.shape["expert"]):
        larger = f"let mesh.fsdp x mesh.expert divide model.num_experts = {experts}"
    remedy = f"take a smaller model, or {larger}"
    if resolved.config.learner.offload == "none":
        remedy += ", or set learner.offload='moments'"
    _check(state, "the train state (parameters and optimiser moments in float32)", remedy)
    check_eval_memory(resolved, rollout_mesh or mesh, 0 if rollout_mesh else state)


def check_eval_memory(resolved: Resolved, mesh: Mesh, beside: int = 0) -> None:
    """Raises UserError if an evaluation does not fit besides `beside` bytes on each device."""
    settings = resolved.config.eval
    check_sampling_memory(
        resolved,
        mesh,
        settings.batch_size,
        1 + settings.samples,
        "eval.batch_size x (eval.samples + 1)",
        beside=beside,
    )


def check_sampling_memory(
    resolved: Resolved,
    mesh: Mesh,
    prompts: int,
    group: int,
    product: str,
    slots: int | None = None,
    beside: int = 0,
) -> None:
    """Raises UserError if KV cache and logits of `prompts` x `group` responses do not fit.

    Args:
      product: text for `prompts` x `group` in the message.
      slots: slots of continuous batching, 0 without; by default `rollout.slots`.
      beside: bytes of other arrays on each device.
    """
    rollout = resolved.config.rollout
    slots = rollout.slots if slots is None else slots
    rows = prompts * group
    page = page_bytes(resolved.model, resolved.rollout_recipe)
    if slots:
        cache = rollout.pages * page  # 0: as many as fit
        fields = f"rollout.slots = {slots:,} and rollout.pages = {rollout.pages:,}"
    else:  # prompts are stored once
        tokens = prompts * rollout.max_prompt_tokens + rows * rollout.max_new_tokens
        cache = tokens * page // PAGE
        fields = f"{product} = {rows:,} and rollout.max_new_tokens = {rollout.max_new_tokens:,}"
    logits = 4 * (slots or rows) * resolved.model.vocab_size
    _check(
        (cache + logits) // mesh.size + beside,
        f"the KV cache and the logits of {fields}",
        "lower these",
    )


def _check(needed: int, arrays: str, remedy: str) -> None:
    memory = device_memory()
    if memory is not None and needed > memory:
        raise UserError(
            f"{arrays} need {gib(needed)}, and a device here has {gib(memory)}: {remedy}"
        )
