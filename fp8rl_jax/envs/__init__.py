"""Prompts and rewards."""

from fp8rl_jax.envs.rewards import load_reward, score
from fp8rl_jax.envs.tasks import Question, check_task, make_questions, split_of

__all__ = ["Question", "check_task", "load_reward", "make_questions", "score", "split_of"]
