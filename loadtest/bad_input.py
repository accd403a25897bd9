"""What a user of the load test gave wrong, told in one message and without a traceback."""


class BadInputError(Exception):
    """An option or a file that the load test cannot work with."""
