"""Prompts and rewards."""

from fp8rl_jax.envs.rewards import load_reward, score
from fp8rl_jax.envs.tasks import Question, check_task, make_questions, split_of
