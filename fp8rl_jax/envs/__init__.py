"""Questions, their rewards, and the form of an environment."""

from fp8rl_jax.envs.load import Data, load_questions
from fp8rl_jax.envs.question import SPLITS, Question, split_of
from fp8rl_jax.envs.rewards.scoring import Scoring, Tally, extract_answers
from fp8rl_jax.envs.rewards.terms import Term, load_reward, load_rewards, reward_names
from fp8rl_jax.envs.rows import NO_ANSWER
from fp8rl_jax.envs.sources import check_source, eval_tasks, is_generated
from fp8rl_jax.envs.step import Step, StepFunction, one_reply
from fp8rl_jax.envs.tasks import check_task, make_questions
