"""The one exception of the command-line programs."""


class UserError(Exception):
    """Something the user can put right. The programs print its one line and exit with code 2."""
