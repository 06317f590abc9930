"""Subjects: policies that a study measures, each a model with its weights, task and tokenizer.

Weights are made when a cell needs them: a study whose cells are all finished trains nothing. So a
subject is identified by what determines its weights: the configuration under which they are
trained, or a digest of weights that come from elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.config import default_config, flatten, saved_config
from fp8rl_jax.models import ModelConfig
from fp8rl_jax.policy.load import load_trained
from fp8rl_jax.policy.source import is_released
from fp8rl_jax.train import train
from fp8rl_jax.training.logs import read_jsonl
from fp8rl_jax.training.runtime import Runtime, make_runtime
from studies.progress import Note

# Fields of `run` that change no number: paths of files, what is shown, and when it is saved.
_WITHOUT_EFFECT = (
    "cache_dir checkpoint_every compilation_cache dir keep_checkpoints loggers project samples name"
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that is studied, with its task.

    Attributes:
      name: name in texts and tables.
      runtime: model, tokenizer, questions and mesh.
      make_params: function that returns the float32 parameters, on the host.
      trained: whether the runtime's configuration alone determines the parameters.
      released: whether the parameters are those of `model.checkpoint`.
      directory: run directory of the fine-tuning that makes the parameters, if any.
    """

    name: str
    runtime: Runtime
    make_params: Callable[[], Any]
    trained: bool = True
    released: bool = False
    directory: pathlib.Path | None = None

    @property
    def model(self) -> ModelConfig:
        return self.runtime.resolved.model

    @functools.cached_property
    def params(self) -> Any:
        """Float32 parameters, on the host; made at the first use."""
        return self.make_params()

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What determines the weights, as JSON."""
        model = {
            field.name: value
            for field in dataclasses.fields(self.model)
            if (value := getattr(self.model, field.name)) != field.default
        }
        if self.trained:
            return {"model": model, "trained": lasting(self.runtime.config), **self._data}
        return {"model": model, "weights": digest(self.params)}

    @property
    def _data(self) -> dict[str, str]:
        """The digest of a data set's questions; {} for reasoning_gym's, which fields determine."""
        return {"data": self.runtime.data_digest} if self.runtime.data_digest else {}

    @property
    def settings(self) -> dict[str, Any]:
        """What determines samples and runs besides the weights, as JSON; {} if `identity` does."""
        if self.trained:
            return {}
        fields = lasting(self.runtime.config)
        kept = {name: value for name, value in fields.items() if name != "model.checkpoint"}
        return {"config": kept, **self._data}

    def warmup(self) -> dict[str, float]:
        """Returns the mean loss of the last 20 steps of fine-tuning, and the accuracy after it; {}
        without fine-tuning. `params` must have been made."""
        if self.directory is None:
            return {}
        losses = [record["loss"] for record in read_jsonl(self.directory / "sft.jsonl")][-20:]
        last = read_jsonl(self.directory / "eval.jsonl")[-1]
        return {"loss": float(np.mean(losses)), "accuracy_sampled": last["accuracy_sampled"]}

    @property
    def seed(self) -> int:
        return self.runtime.config.run.seed

    @property
    def tag(self) -> str:
        """A digest of `identity`, 12 characters, for the names of cells."""
        identity = self.identity
        if "weights" in identity:
            return identity["weights"]
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def quick_config(seed: int = 0) -> ml_collections.ConfigDict:
    """Returns a configuration: two layers learn sums of 3 or 4 digits, a minute on two cores."""
    content = {
        "run": {"dir": "two_layers", "seed": seed},
        "model": {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        "precision": {"self_check": False},
        "env": {
            "task": "basic_arithmetic",
            "task_options": {
                "min_terms": 3,
                "max_terms": 4,
                "min_digits": 1,
                "max_digits": 1,
                "operators": ["+"],
                "allow_parentheses": False,
                "allow_negation": False,
            },
            "train_questions": 256,
        },
        "rollout": {
            "prompts_per_step": 16,
            "group_size": 8,
            "max_prompt_tokens": 30,
            "max_new_tokens": 4,
        },
        "algo": {"scale": "none"},
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 2},
        "sft": {"steps": 60, "questions": 1024, "batch_size": 32, "evaluations": 1},
        "eval": {"questions": 128, "batch_size": 128},
    }
    return saved_config(content, "the study's own configuration")


def quick_ladder(seeds: Sequence[int], out: pathlib.Path, note: Note) -> list[Subject]:
    """Returns 'dense', two layers, and 'experts', the same with eight experts, for every seed."""
    ladder = []
    for rung in ("dense", "experts"):
        for seed in seeds:
            config = quick_config(seed)
            if rung == "experts":
                config.run.dir += "_experts"
                config.model.num_experts, config.model.num_experts_per_tok = 8, 2
                config.model.moe_intermediate_size = 128
            ladder.append(dataclasses.replace(of_config(config, out, note), name=rung))
    return ladder


def lasting(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns {path: value} of fields that change a run's numbers and are not at their defaults, so
    that the result stays the same when a later version adds a field."""
    defaults = flatten(default_config())
    left_out = {f"run.{name}" for name in _WITHOUT_EFFECT.split()}
    return {
        name: value
        for name, value in flatten(config).items()
        if name not in left_out and (name not in defaults or value != defaults[name])
    }


def digest(tree: Any) -> str:
    """Returns a digest of the bytes of a tree's arrays, 12 characters."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        found.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
    return found.hexdigest()[:12]


def of_config(
    config: ml_collections.ConfigDict, out: pathlib.Path, note: Note, questions: bool = True
) -> Subject:
    """Returns the policy of a configuration before RL: after its supervised fine-tuning in bf16,
    which favours no FP8 recipe; without fine-tuning, random weights or `model.checkpoint`'s.

    Args:
      config: result of `load_config`.
      out: directory of the fine-tuning's run, made when weights are needed.
      note: called with lines of progress.
      questions: whether the study asks the task's questions; if not, there is no fine-tuning.

    Raises:
      UserError: `make_runtime` refuses the configuration.
    """
    config = ml_collections.ConfigDict(config.to_dict())
    if not questions:
        config.sft.steps = 0
    if config.sft.steps:
        config.precision.rollout = config.precision.learner = "bf16"
        config.precision.kv_cache, config.precision.attention = "recipe", "bf16"
    runtime = make_runtime(config, with_questions=questions)
    name = pathlib.Path(config.model.checkpoint).name or pathlib.Path(config.run.dir).name
    if not config.sft.steps:
        make, released = functools.partial(_initial, runtime), bool(config.model.checkpoint)
        return Subject(name, runtime, make, trained=not released, released=released)
    config.run.steps, config.run.dir = 0, str(out / f"warmup-{name}-seed{config.run.seed}")
    make = functools.partial(_warm_up, config, note)
    return Subject(
        name,
        runtime,
        make,
        trained=not config.model.checkpoint,
        directory=pathlib.Path(config.run.dir),
    )


def of_directory(config: ml_collections.ConfigDict, note: Note, questions: bool = True) -> Subject:
    """Returns the model in `run.dir`: a released one, or the newest checkpoint of a run.

    Raises:
      UserError: the study asks questions, and a released model has none; or `make_runtime` refuses
        the configuration.
    """
    if questions:
        check_task(config)
    runtime = make_runtime(config, with_questions=questions)
    name = pathlib.Path(config.run.dir).name
    if is_released(config):
        make = functools.partial(_initial, runtime)
    else:
        make = functools.partial(_newest, runtime, note)
    return Subject(name, runtime, make, trained=False, released=is_released(config))


def check_task(config: ml_collections.ConfigDict) -> None:
    """Raises UserError if `run.dir` is a released model, which has no task."""
    if is_released(config):
        raise UserError(
            f"--checkpoint={config.run.dir} has no task of its own, and this study asks questions: "
            "name a config with that task by --config FILE, and the directory by "
            f"--config.model.checkpoint={config.run.dir}"
        )


def _initial(runtime: Runtime) -> Any:
    return jax.device_get(runtime.engine.initial_params())


def _newest(runtime: Runtime, note: Note) -> Any:
    state, _ = load_trained(runtime, pathlib.Path(runtime.config.run.dir), note)
    return jax.device_get(state.params)


def _warm_up(config: ml_collections.ConfigDict, note: Note) -> Any:
    """Runs or resumes a configuration's fine-tuning, and returns the parameters after it."""
    note(f"supervised fine-tuning of {config.run.dir}")
    train(config, resume=is_begun(pathlib.Path(config.run.dir)))
    return _newest(make_runtime(config, with_questions=False), note)


def is_begun(directory: pathlib.Path) -> bool:
    """Returns whether `directory` holds a run, finished or stopped."""
    return (directory / "config.json").exists()
