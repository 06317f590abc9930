"""Programs of a run, compiled ahead of time for machines that are not there.

    Resolved -> programs.described_runtime -> Runtime, of shapes alone
             -> trace_train_step, trace_decode_step, traced_programs
             -> compile_for_h200 -> bytes and collectives, as XLA plans them
    h200.py:    the mesh of described devices, and what the text of a compiled program says

Read programs.py first. `fp8rl plan --compile` prints the figures beside those of the package
`plan`, and `fp8rl drift` traces a run's programs to find its products. Nothing here runs a program.
"""
