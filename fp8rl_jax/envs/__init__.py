"""Questions and rewards."""

from fp8rl_jax.envs.load import Data, load_questions
from fp8rl_jax.envs.question import SPLITS, Question, split_of
from fp8rl_jax.envs.rewards import Term, load_reward, load_rewards, reward_names
from fp8rl_jax.envs.rows import NO_ANSWER
from fp8rl_jax.envs.scoring import Scoring, Tally, extract_answers
from fp8rl_jax.envs.sources import check_source, eval_tasks, is_generated
from fp8rl_jax.envs.tasks import check_task, make_questions
