"""Checkpoints in Hugging Face's format: `load`, `save` and `convert` (docs/checkpoints.md).

::

    config.json --> config_json.py, by families --> ModelConfig --> tables.py: tensors and pieces
                                                                          |
    *.safetensors --> safetensors_file.py --> reader.py: Checkpoint --> loader.py --> parameters
                                                                          | placement.py
                                                                          |
    a new directory <-- safetensors_file.py <-- writer.py <---------------+

Read first: tables.py (which tensor is which part of which parameter), then loader.py and writer.py.
rope_json.py reads rotary embeddings, blockwise.py and mxfp4.py define FP8 and MXFP4 in checkpoints,
finite.py counts NaN and infinity, peft.py reads and writes adapters: peft_tensors.py says which
tensor is which, peft_file.py checks files.

Not done: weights in torch's own format, GGUF files.
"""

from fp8rl_jax.models.hf import peft
from fp8rl_jax.models.hf.convert import convert
from fp8rl_jax.models.hf.loader import load
from fp8rl_jax.models.hf.loader import read_model_config as read_config
from fp8rl_jax.models.hf.writer import Beside, save
