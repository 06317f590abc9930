"""Loads a trained policy or a released model, samples from it, evaluates and exports it.

::

    a run's directory, or a Hugging Face model
        |
      source     its configuration: the saved one, or defaults with the model's settings
        |
      load       newest checkpoint or released weights -> Runtime -> refit -> Policy
        |
        +-- generate   `fp8rl sample`: text, piece by piece
        +-- evaluate   `fp8rl eval`: accuracy on held-out questions
        +-- export     `fp8rl convert RUN_DIR DST`: a Hugging Face directory

Read `load` first. Not done: serving, and merging of checkpoints.
"""
