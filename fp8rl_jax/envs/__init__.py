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

    replies -> step_calls -> Step: what the policy reads next; `step` defines its form, `tools`
                             makes one of Python functions, whose calls `tool_calls` finds; `tiny`
                             has examples

Read `question`, `load` and `rewards` first. Not done: streaming data sets, images.
"""

from fp8rl_jax.envs.load import Data, load_questions
from fp8rl_jax.envs.question import SPLITS, Question, split_of
from fp8rl_jax.envs.rewards.scoring import Scoring, Tally, extract_answers
from fp8rl_jax.envs.rewards.terms import Term, load_rewards, reward_names
from fp8rl_jax.envs.rows import NO_ANSWER
from fp8rl_jax.envs.sources import check_source, eval_tasks, is_generated
from fp8rl_jax.envs.step import Step, StepFunction
from fp8rl_jax.envs.step_calls import Answered, StepCall, load_step, tool_functions, tool_schemas
from fp8rl_jax.envs.tasks import check_task, make_questions
from fp8rl_jax.envs.tools import check_calls, tool_step
