"""A run: its phases, and the files that they keep in its directory.

::

    config -> runtime -+-> layout   shapes and shardings on a mesh
    (make_runtime)     +-> engine   compiled programs: sample, score, update, refit
                       +-> text     tokens of questions, text of responses
                       |
    preflight -> run   +-> sft -> rl      phases; each evaluates (evaluate) and saves (checkpoint)
                                  rl_step: sample_step, rewards, step_record, counters
                       |
    run directory      +-> logs (JSON lines, sinks), checkpoints, environment.json, lock

Read first: rl.py, whose docstring draws a step; engine.py (`Engine`); runtime.py. `train` runs the
phases in order.

Not done: asynchronous rollouts (each part of a step waits for the part before it), and several
engines in a run, though one process can hold two.
"""
