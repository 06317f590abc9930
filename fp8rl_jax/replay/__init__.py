"""What exactness is for: runs a step again, and finds where two runs part::

    again        runs a step of a run again, alone, in a directory of its own
    differences  compares what two directories have recorded of a step
    values       the step's values by name, and a table of one sample

Steps are functions of state, number, configuration and machine, so a step that is run again from
the checkpoint before it has the same bits. Read `again` first.
"""
