"""Predicts what a configuration needs of its devices (bytes, FLOPs, times) from shapes alone.

::

    Resolved, mesh -- rollout.py -- RolloutPlan: slots and pages --.
                   -- learner.py -- LearnerPlan: the train step ---+-- `fp8rl plan` prints them
                   -- times.py ---- StepCost, decode_seconds ------'
                                    fixes.py: changes of a configuration with which it fits
                   -- refuse.py --- UserError for a run that cannot fit

bytes.py counts all bytes. Read learner.py first, and docs/plan.md for what is counted and what is
estimated. `training` uses rollout.py to allocate pages, and refuse.py before it compiles;
planned.py makes the input of `fp8rl plan`, with a mesh of devices that need not exist.

Not done: the memory of a calibration and of scoring (old and reference log-probabilities), the
times of prefill, of a frozen model, rewards and evaluations. h200.py compiles programs for GPUs
that this machine need not have; training/aot.py applies it to a run's programs.
"""
