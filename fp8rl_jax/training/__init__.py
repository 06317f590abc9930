"""What a run is made of: runtime, phases, evaluation, checkpoints, logs."""
