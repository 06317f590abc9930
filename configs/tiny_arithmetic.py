"""tmp"""

import ml_collections


def get_config():
    config = ml_collections.ConfigDict()
    config.env = ml_collections.ConfigDict()
    config.env.task = "basic_arithmetic"
    config.env.task_options = ml_collections.ConfigDict(
        dict(
            min_terms=3,
            max_terms=5,
            min_digits=1,
            max_digits=1,
            operators=["+"],
            allow_parentheses=False,
            allow_negation=False,
        )
    )
    config.rollout = ml_collections.ConfigDict(dict(max_prompt_tokens=36, max_new_tokens=4))
    return config
