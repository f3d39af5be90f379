"""The one exception that speaks to the person at the keyboard."""


class UserError(Exception):
    """Something a person can mend: the message says what was given, what is allowed and what to do.

    `train.py` and `eval.py` print it as `error: ...` without a traceback and exit with status 2.
    """
