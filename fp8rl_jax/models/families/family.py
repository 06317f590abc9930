"""What a family of models is to this library: a `Family`, in a file of its own.

All families run one forward pass, and differ in the fields of `ModelConfig`. A family says which of
these all its models have alike (`rules`), which of them its config.json states, under which names
and with which defaults, and the published sizes. hf/config_json.py reads and writes the file by
these tables; functions of the family do what no table can say.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fp8rl_jax.base.errors import UserError
from fp8rl_jax.models.config import ModelConfig
from fp8rl_jax.models.families.fields import Fields

# {field of ModelConfig: (its name in config.json, default where the file has null or, unless
# `Family.absent` has another, nothing; None: required)}.
Names = dict[str, tuple[str, Any]]
Values = dict[str, Any]  # fields of ModelConfig
Json = dict[str, Any]  # fields of config.json
# Kinds of layers in config.json.
FULL, WINDOWED = "full_attention", "sliding_attention"
# What tells families apart, as a family has it that says nothing else.
PLAIN: Values = {
    field.name: field.default
    for field in dataclasses.fields(ModelConfig)
    if field.metadata["is_rule"]
} | {"qk_norm": False}
_TYPES = typing.get_type_hints(ModelConfig)


def same(**defaults: Any) -> Names:
    """Returns fields that have one name in ModelConfig and config.json, with their defaults."""
    return {name: (name, default) for name, default in defaults.items()}


def defaults(*names: str) -> Values:
    """Returns fields of ModelConfig with their defaults."""
    return {name: getattr(ModelConfig, name) for name in names}


SHARED = same(
    vocab_size=None,
    hidden_size=None,
    intermediate_size=None,
    num_hidden_layers=None,
    num_attention_heads=None,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
)


def read_names(fields: Fields, names: Names) -> Values:
    """Returns fields of ModelConfig, in their types, from those of a config.json."""
    return {
        ours: fields.get(theirs, _TYPES[ours], default) for ours, (theirs, default) in names.items()
    }


def write_names(config: ModelConfig, names: Names) -> Json:
    """Returns fields of config.json from those of a ModelConfig."""
    return {theirs: _TYPES[ours](getattr(config, ours)) for ours, (theirs, _) in names.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, one model type of config.json.

    Attributes:
      model_type: its name in config.json.
      architecture: its class in transformers.
      is_like: whether a configuration has the mark of the family, be it one of its models or not.
        The last of the families that say so is the nearest.
      rules: {field of ModelConfig: value in all models of the family}, where PLAIN has another, and
        of further fields. A field that `names` or `absent` name differs from model to model.
      names: fields that its config.json has besides SHARED and those of rotary embeddings.
      absent: {field of config.json: transformers' default where the file lacks it}. A family with
        'sliding_window' has windows; with 'sliding_window_pattern', in some of its layers.
      supported: {field of config.json: (values that are supported, what to say of others)}.
      activation: name and only value of the activation in config.json.
      mark: field of ModelConfig that is above 0 in all its models, or ''.
      options: {field of ModelConfig that few families have: value in a model that no file describes
        and `model.family_options` says nothing of}.
      rope_theta: base of the rotary frequencies where the file has none.
      head_dim: width of a head where the file has none; 0 for hidden_size / num_attention_heads.
      aliases: further model types that are read, and written as this one.
      presets: published models by name.
      tensors: {an array's name (`Array.hf`): (name of the tensor in checkpoints that holds it, the
        columns that it takes of an expert if the tensor holds all experts of a layer, else None)}.
      normalise: (fields of a file) -> fields with one name and place for each thing.
      read: (fields, the ModelConfig's fields so far) -> further ones.
      write: (config) -> fields of config.json beside those by the tables.
      more_rules: (config) -> rules that depend on the model.

    `normalise`, `read` and `more_rules` raise UserError for what the family does not support.
    """

    model_type: str
    architecture: str
    is_like: Callable[[ModelConfig], bool]
    rules: Values = dataclasses.field(default_factory=dict)
    names: Names = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    supported: Mapping[str, tuple[tuple[Any, ...], str]] = dataclasses.field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    mark: str = ""
    options: Values = dataclasses.field(default_factory=dict)
    rope_theta: float = 10_000.0
    head_dim: int = 0
    aliases: tuple[str, ...] = ()
    presets: Mapping[str, ModelConfig] = dataclasses.field(default_factory=dict)
    tensors: Mapping[str, tuple[str, slice | None]] = dataclasses.field(default_factory=dict)
    normalise: Callable[[Fields], Fields] = lambda fields: fields
    read: Callable[[Fields, Values], Values] = lambda fields, values: {}
    write: Callable[[ModelConfig], Json] = lambda config: {}
    more_rules: Callable[[ModelConfig], Values] = lambda config: {}

    @property
    def fixed(self) -> Values:
        """Fields of ModelConfig that all models of the family have alike."""
        varying = {*self.names, *self.absent}
        return {n: value for n, value in (PLAIN | self.rules).items() if n not in varying}

    def of_sizes(self, sizes: Values, options: Values) -> ModelConfig:
        """Returns a model of the family that no file describes.

        Args:
          sizes: fields of ModelConfig. Rules that are not among them are the family's; one that its
            files state is that of a file without it.
          options: those of the family's `options` that have another value.

        Raises:
          UserError: an option is not the family's or no such number, or the sizes lack the family's
            mark or contradict themselves.
        """
        fields = Fields(options, "model.family_options")
        for name in options:
            if name not in self.options:
                raise fields.error(
                    name,
                    f"the options of {self.model_type!r} are: {', '.join(self.options) or 'none'}",
                )
        sizes = sizes | {
            name: fields.get(name, _TYPES[name], default) for name, default in self.options.items()
        }
        if self.mark and not sizes[self.mark]:
            section = "model.family_options" if self.mark in self.options else "model"
            raise UserError(
                f"model.family is {self.model_type!r} and {section}.{self.mark} 0, which no model "
                f"of this family has: set {section}.{self.mark}, or name another family"
            )
        stated = {
            ours: self.absent.get(theirs, value) for ours, (theirs, value) in self.names.items()
        }
        rules = {**PLAIN, **self.rules, **stated, **self.absent}
        config = ModelConfig(**{name: rules[name] for name in PLAIN} | sizes)
        return dataclasses.replace(config, **self.more_rules(config))

    @property
    def has_windows(self) -> bool:
        """Whether layers may have sliding windows."""
        return "sliding_window" in self.absent
