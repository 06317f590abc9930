"""A run: its phases, and the files that they keep in its directory.

::

    config -> runtime -+-> layout   shapes and shardings on a mesh
    (make_runtime)     +-> engine   compiled programs: sample, score, update, refit
                       |
    preflight -> run   +-> sft -> rl      phases; each evaluates (evaluate) and saves (checkpoint)
                                  step (rl_step): ahead, sample_step, conversations, rewards,
                                  learn; step_metrics, counters
                       |
    run directory      +-> logs (JSON lines, sinks), checkpoints, environment.json, lock

Read first: step.py, whose docstring draws a step; engine.py; runtime.py. `train` runs
the phases in order.

Not done: several engines in a run, though one process can hold two.
"""
