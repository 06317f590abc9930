"""Fields with values that cannot work, and fields that contradict each other: one sentence.

The sentence must hold the words given with the case: the place of the mistake and the way out.
What follows from a field's row is in test_fields.py, and combinations are in test_combinations.py.
"""

from __future__ import annotations

import re
import sys

import pytest
from refusals import REFUSALS, assert_words, begins, train_command

pytestmark = REFUSALS

# Single fields on the command line.

_FIELDS = {
    # names and types
    "rollout.group_sise=3": ["'rollout.group_sise'", "rollout.group_size"],
    "rolout.group_size=3": ["'rolout.group_size'", "rollout.group_size"],
    "trainer.x=3": ["'trainer.x'"],
    "rollout=3": ["rollout is a section", "--config.rollout.FIELD=VALUE"],
    "=3": ["command line"],
    "rollout.group_size": ["rollout.group_size", "no value"],
    # precision
    "precision.rollout=fp9": ["precision.rollout", "'fp9'", "'fp8'"],
    "precision.learner=qqqqq": ["precision.learner", "'qqqqq'", "fp8_blockwise", "bf16"],
    # rollout
    # numbers that float32 does not have
    "rollout.top_p=1e-320": ["rollout.top_p", "0 in float32"],
    # sizes that no machine holds
    "rollout.group_size=100000000": ["rollout.group_size", "200,000,000", "GiB", "lower"],
    "rollout.max_new_tokens=1000000000": ["rollout.max_new_tokens = 1,000,000,000", "GiB"],
    "eval.batch_size=1000000000": ["eval.batch_size", "GiB", "lower"],
    "model.hidden_size=8388608": ["the train state", "GiB", "smaller model", "offload"],
    "rollout.top_k=1000": ["rollout.top_k", "1000"],
    "rollout.max_prompt_tokens=5": ["rollout.max_prompt_tokens", "5", "raise it to", "Calculate"],
    "rollout.max_new_tokens=1": ["rollout.max_new_tokens", "raise it to"],
    # batches
    "learner.gradient_accumulation_steps=3": [
        "learner.gradient_accumulation_steps",
        "4",
        "3",
        "equal parts",
    ],
    "learner.tokens_per_batch=100": ["learner.tokens_per_batch is 100", "multiple of 64", "write"],
    "algo.num_minibatches=3": ["algo.num_minibatches", "4", "3", "equal parts"],
    "sft.batch_size=9": ["sft.batch_size", "9", "sft.questions", "8"],
    "rollout.prompts_per_step=9": ["rollout.prompts_per_step", "9", "env.train_questions", "8"],
    # numbers out of their range
    "algo.preset=drgrpo": ["algo.preset", "'drgrpo'", "write one of grpo, dr_grpo"],
    "algo.preset=ppo": ["algo.preset", "for that loss write algo.loss=ppo"],
    "algo.loss=ppo(clip_low=-1)": ["algo.loss", "ppo(clip_low=-1)", "from 0 "],
    "algo.loss=sapo(0.0)": ["algo.loss", "sapo(tau_positive=0.0)", "above 0"],
    "algo.correction=icepop(3.0, 2.0)": ["algo.correction", "icepop(low=3.0)", "from 0 to 1"],
    "algo.loss=pop": ["algo.loss", "'pop'", "cispo"],
    "algo.loss=no_such_module:f": ["algo.loss", "no_such_module"],
    "algo.loss=os:getcwd": ["algo.loss", "'os:getcwd'", "(logp, old, advantages, mask)"],
    "algo.correction=tis(cap=0)": ["algo.correction", "tis(cap=0)", "from 1 to"],
    "algo.correction=tis(auto)": ["algo.correction", "write tis(auto, ess=0.9)"],
    "algo.correction=tis(2.0, ess=0.9)": ["algo.correction", "write tis(auto, ess=0.9)"],
    "algo.correction=tis(auto, ess=2)": ["algo.correction", "tis(ess=2)", "from 0 to 1"],
    "algo.correction=veto(auto)": ["algo.correction", "arguments are numbers"],
    "algo.correction=tiss": ["algo.correction", "'tiss'", "seq_tis"],
    "algo.correction=os:getcwd": ["algo.correction", "'os:getcwd'", "(weights, keep)"],
    "algo.loss_aggregation=os:getcwd": ["algo.loss_aggregation", "'os:getcwd'", "takes mask"],
    "algo.loss_aggregation=seq_mean_token_sum_norm(length=0)": ["length=0", "from 1 to"],
    "algo.loss_aggregation=mean": ["algo.loss_aggregation", "'mean'", "seq_mean_token_mean"],
    "algo.loss_length=64": ["algo.loss_length", "seq_mean_token_sum_norm(length=256)"],
    "model.kv_lora_rank=64": ["model.family_options.kv_lora_rank", "model.family=deepseek_v3"],
    "algo.overlong_buffer=5": ["algo.overlong_buffer", "5", "max_new_tokens", "4"],
    "precision.reference=fp9": ["precision.reference", "'fp9'", "'fp8'"],
    "run.loggers=wandbb": ["run.loggers", "'wandbb'", "tensorboard"],
    # model
    "model.num_key_value_heads=3": ["model.num_key_value_heads", "multiple"],
    "model.head_dim=15": ["model.head_dim", "even"],
    "model.num_experts=1": ["model.num_experts_per_tok = 2", "model.num_experts = 1"],
    # mesh, on one device
    "mesh.data=2": ["mesh.data", "2 places", "1 devices"],
    "mesh.fsdp=-1": ["mesh", "at most one"],
    "mesh.fsdp=2": ["mesh.fsdp", "2 places"],
    # task, reward, tokenizer
    "env.task=basic_arithmetics": ["env.task", "'basic_arithmetics'", "'basic_arithmetic'"],
    "env.task_options.min_terms=0": ["env.task_options", "min_terms"],
    f"env.task_options.min_terms={10**400}": ["env.task_options.min_terms", "401 digits", "2^53"],
    "env.task_options.operators=[1e999]": ["env.task_options.operators.0", "inf", "2^53"],
    "env.task_options.min_terms=3": ["env.task_options", "max_terms"],
    "env.task_options.min_terms=two": ["env.task_options.min_terms", "two"],
    "env.task_options.nope=3": ["env.task_options", "nope"],
    "env.task_options.a.b=3": ["env.task_options", "a.b"],
    "env.task_options.size=3": ["env.task_options", "size"],
    "env.train_questions=100000": ["env.task", "100000", "'train'", "lower"],
    "env.reward=no_such_module:f": ["env.reward", "no_such_module", "PYTHONPATH"],
    "env.reward=no_such_package.module:f": ["env.reward", "no_such_package", "PYTHONPATH"],
    "env.reward=__main__:f": ["env.reward", "__main__"],
    "env.reward=math:nope": ["env.reward", "math", "nope"],
    "env.reward=exact_mach": ["env.reward", "exact_match", "'module:function'"],
    "env.reward=math:pi": ["env.reward", "'math:pi'", "function"],
    "data.tokenizer=nope.json": ["data.tokenizer", "nope.json", "'byte'"],
    "data.tokenizer=tiny.py": ["data.tokenizer", "tiny.py"],
    # places that cannot be written
    "run.dir=tiny.py": ["run.dir", "tiny.py"],
    "run.dir=/proc/run": ["run.dir", "/proc/run"],
    "run.dir=" + "x" * 300: ["run.dir", "xxx"],
    "run.cache_dir=tiny.py/cache": ["run.cache_dir", "tiny.py/cache"],
}


@pytest.mark.parametrize("field", _FIELDS, ids=lambda field: field[:40])
def test_field(field, refused_fields):
    """One field with a value that cannot work."""
    assert_words(refused_fields(field), _FIELDS[field])


# Several fields.

_TENSORWISE = ["precision.rollout=fp8_tensorwise", "precision.learner=fp8_tensorwise"]
_SEVERAL = {
    "more responses than numbers": (
        [
            "algo.dynamic_sampling=True",
            "algo.dynamic_sampling_rounds=10000",
            "rollout.prompts_per_step=1000",
            "rollout.group_size=1000",
        ],
        ["1,000,000 responses", "10,000 rounds", "lower"],
    ),
    "a pattern of windows without one": (
        [
            "model.family=gpt_oss",
            "model.num_experts=4",
            "model.family_options.sliding_window_pattern=6",
        ],
        ["sliding_window_pattern is 6", "sliding_window 0"],
    ),
    "windows in no layer": (
        ["model.family=gemma3_text", "model.family_options.sliding_window_pattern=1"],
        ["sliding_window_pattern is 1", "from 2"],
    ),
    "an option of another family": (
        ["model.family=glm4_moe", "model.family_options.sliding_window=9"],
        ["model.family_options: sliding_window", "'glm4_moe'", "n_group"],
    ),
    "an option of a family without any": (
        ["model.family_options.kv_lora_rank=9"],
        ["model.family_options: kv_lora_rank", "'qwen3' are: none"],
    ),
    "a size that is none": (
        ["model.family=deepseek_v3", "model.family_options.v_head_dim=many"],
        ["model.family_options: v_head_dim is 'many'", "a whole number"],
    ),
    "a switch that is none": (
        ["model.family=qwen3_moe", "model.family_options.norm_topk_prob=3"],
        ["model.family_options: norm_topk_prob is 3", "true or false"],
    ),
    "groups without experts for each": (
        ["model.family=deepseek_v3", "model.num_experts=4", "model.family_options.n_group=3"],
        ["n_group = 3 must divide model.num_experts = 4"],
    ),
    "gpt-oss without experts": (
        ["model.family=gpt_oss"],
        ["model.family is 'gpt_oss'", "model.num_experts 0", "set model.num_experts"],
    ),
    "a latent of no width": (
        ["model.family=deepseek_v3", "model.family_options.kv_lora_rank=0"],
        ["model.family is 'deepseek_v3'", "model.family_options.kv_lora_rank 0"],
    ),
    "cosine shorter than its warm-up": (
        ["sft.end_fraction=0.5", "sft.steps=10", "sft.warmup_steps=30"],
        ["sft.warmup_steps", "sft.steps"],
    ),
    "cosine of RL shorter than its warm-up": (
        ["optimizer.end_fraction=0.5", "run.steps=2", "algo.epochs=2", "algo.num_minibatches=1"],
        ["optimizer.warmup_steps", "run.steps x algo.epochs", "4 updates"],
    ),
    "a mean of more checkpoints than are kept": (
        ["eval.average_last=3"],
        ["eval.average_last is 3", "run.keep_checkpoints"],
    ),
}


@pytest.mark.parametrize("case", _SEVERAL)
def test_fields_that_contradict(case, refused_fields):
    """Fields that are good one by one and do not fit together."""
    fields, words = _SEVERAL[case]
    assert_words(refused_fields(*fields), words)


@pytest.mark.parametrize(
    "fields",
    [
        ["precision.learner=bf16"],
        [*_TENSORWISE, "precision.zero_drift=report"],
        ["precision.rollout=fp8", "precision.learner=fp8_blockwise"],
        ["rollout.max_prompt_tokens=20"],
        ["sft.steps=0", "sft.batch_size=9"],
    ],
)
def test_the_other_side_of_a_bound(fields):
    """What is just inside, or was asked to be reported only, is accepted."""
    assert begins(*train_command(*fields))


@pytest.mark.parametrize("field", ["rollout.max_prompt_tokens=5", "rollout.max_new_tokens=1"])
def test_the_number_advised_is_enough(field, refused_fields):
    """Whoever writes the number of the sentence is not sent back with a larger one."""
    (number,) = re.findall(r"raise it to (\d+)", refused_fields(field))
    assert begins(*train_command(f"{field.split('=')[0]}={number}"))


def test_the_setting_advised_is_accepted(refused_fields):
    """The same for a sentence that offers a setting."""
    message = refused_fields("rollout.group_size=1")
    assert "algo.preset='reinforce_pp'" in message
    assert begins(*train_command("rollout.group_size=1", "algo.preset=reinforce_pp"))


# Rewards.


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (r"raise ValueError('one\ntwo')", ["ValueError", "one"]),
        ("def f(:", ["SyntaxError"]),
        ("import no_such_module_here", ["no_such_module_here"]),
        ("raise SystemExit(0)", ["SystemExit"]),
        ("f = 3", ["not a function"]),
        ("g = print", ["AttributeError"]),
    ],
)
def test_reward_module_that_fails(source, words, refused_fields, tmp_path, monkeypatch):
    """Whatever a user's module does while it is imported ends in one sentence."""
    (tmp_path / "my_reward.py").write_text(source + "\n")
    monkeypatch.delitem(sys.modules, "my_reward", raising=False)
    try:
        assert_words(refused_fields("env.reward=my_reward:f"), ["env.reward", "my_reward", *words])
    finally:
        sys.modules.pop("my_reward", None)
