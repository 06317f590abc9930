"""Runs transformers' `generate` on our random weights, as a peer of the sampler.

The weights go through a checkpoint in Hugging Face's format, so both run the same model.
`generate` is called as users call it: eager, with the default attention and cache, sampling from
the full vocabulary at temperature 1. float32 and bf16 are both timed once, and the faster one is
kept: on a CPU without bf16 matrix instructions that is float32. Unlike our sampler it records no
log-probabilities.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import time
from typing import Any

import jax
import numpy as np

from fp8rl_jax.models import ModelConfig

DTYPES = ("float32", "bfloat16")


def versions() -> dict[str, str]:
    """Returns {library: version}.

    Raises:
      ImportError: transformers or torch is not installed.
    """
    import torch
    import transformers

    return {"transformers": transformers.__version__, "torch": torch.__version__}


class Peer:
    """One model in both DTYPES."""

    def __init__(self, config: ModelConfig, params: Any):
        """Loads `params`, float32 masters of `config`.

        Raises:
          UserError: no model type of transformers has the rules of `config`.
        """
        import torch
        import transformers

        from fp8rl_jax.models import hf

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        with tempfile.TemporaryDirectory() as folder:
            path = hf.save(
                pathlib.Path(folder) / "model", config, jax.device_get(params), dtype="float32"
            )
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.models = {
                name: transformers.AutoModelForCausalLM.from_pretrained(
                    path, dtype=getattr(torch, name)
                )
                .to(device)
                .eval()
                for name in DTYPES
            }

    def generate(self, dtype: str, prompts: np.ndarray, new: int, group: int) -> np.ndarray:
        """Samples `group` responses of `new` tokens to each of prompts (P, Tp): (P*group, new)."""
        torch = self._torch
        model = self.models[dtype]
        tokens = torch.tensor(prompts, dtype=torch.long, device=model.device)
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
                num_return_sequences=group,
            )
        return out[:, prompts.shape[1] :].cpu().numpy()

    def faster(self, prompts: np.ndarray, new: int, group: int) -> dict[str, float]:
        """Times a call per dtype after a warm-up; returns {dtype: seconds}, the faster first."""
        seconds = {}
        for dtype in DTYPES:
            self.generate(dtype, prompts, min(new, 8), group)
            start = time.perf_counter()
            self.generate(dtype, prompts, new, group)
            seconds[dtype] = time.perf_counter() - start
        return dict(sorted(seconds.items(), key=lambda item: item[1]))
