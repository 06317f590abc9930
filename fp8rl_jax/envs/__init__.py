"""Questions, their rewards, and the form of an environment.

::

    env.task -> sources -> tasks (reasoning_gym), or rows of a data set:
                           files (text_rows, arrow_rows), tfds (tfds_prepare), a user's function
                   |
                   v
                load: rows -> Question, split by `question` and `splits`, counted, hashed (digest)
                   |
                   v
    responses -> rewards.scoring -> (B,) rewards, nan where a response is not scored

Read `question`, `load` and `rewards` first. `step` defines the form of an environment with several
replies; no run calls it yet. Not done: streaming data sets, several turns, images.
"""

from fp8rl_jax.envs.load import Data, load_questions
from fp8rl_jax.envs.question import SPLITS, Question, split_of
from fp8rl_jax.envs.rewards.scoring import Scoring, Tally, extract_answers
from fp8rl_jax.envs.rewards.terms import Term, load_rewards, reward_names
from fp8rl_jax.envs.rows import NO_ANSWER
from fp8rl_jax.envs.sources import check_source, eval_tasks, is_generated
from fp8rl_jax.envs.step import Step, StepFunction, one_reply
from fp8rl_jax.envs.tasks import check_task, make_questions
