"""The one exception for mistakes of input."""


class UserError(ValueError):
    """A mistake of input: the rule, the numbers and the remedy.

    `launch.run` prints it once for the whole world, without a traceback, and exits with status 2.
    """
