"""What a configuration needs of its devices: bytes, FLOPs and times, from shapes alone.

    Resolved, mesh -- rollout.py -- RolloutPlan: slots and pages --.
                   -- learner.py -- LearnerPlan: the train step ---+-- `fp8rl plan` prints them
                   -- times.py ---- StepCost, decode_seconds ------'
                                    fixes.py: changes of a configuration with which it fits
                   -- refuse.py --- the sentence with which a run ends that cannot fit

Every figure counts bytes with bytes.py. Read learner.py first, and docs/plan.md for what is counted
and what is estimated. `training` uses rollout.py to allocate pages and refuse.py before it
compiles; planned.py is where the command begins, with a mesh of devices that need not exist.

Not done: the memory of a calibration and of scoring (old and reference log-probabilities), the
times of prefill, rewards and evaluations. h200.py compiles programs for GPUs that are not there;
training/aot.py applies it to a run's programs.
"""
