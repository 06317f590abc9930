"""Errors that a user can fix. The command line prints them in one line and exits with 2."""


class UserError(ValueError):
    """What is wrong, where, and what to write instead, in one sentence."""


class RewardError(UserError):
    """Nothing can be learnt from a reward: all calls failed, or none can be made. The message may
    end with a traceback of the user's code, in several lines."""


class NonFiniteError(RuntimeError):
    """The loss or a gradient became NaN or infinite; the run stopped with its last good state."""
