"""A run's configuration: its fields, how it is read, and the checks before anything compiles.

How a configuration becomes what programs take::

    FILE.py[:CASE]      --config.SECTION.FIELD=VALUE      RUN_DIR/config.json
        | files, cases            |                               |
        +----------------------> load <---------------------------+
                                  |  ConfigDict: every field, types checked
       model_source (shapes) -> resolve <- precision (recipes)
                                  |
                      checks, combinations: a UserError of one sentence
                                  |
                               Resolved, which every program takes

Read first: `fields` (default, meaning and choices of every field), `resolve`, and `combinations`
(which features do not work together). `names` knows what other libraries call a field; `functions`
refuses to import code that a configuration saved with weights names. Not done: nesting below
SECTION.FIELD, except for the options of free-form fields such as `env.task_options`.
"""

from fp8rl_jax.config.fields import FIELDS, all_fields, describe_fields
from fp8rl_jax.config.load import (
    default_config,
    flatten,
    literal,
    load_config,
    override,
    saved_config,
    sections_config,
    set_options,
)
