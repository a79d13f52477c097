"""The exceptions of the command-line programs."""


class UserError(Exception):
    """Something the user can put right. The programs print its one line and exit with code 2.

    Of several processes all raise it.
    """


class WriteError(Exception):
    """This process cannot write its files, as on a full disk. One line and exit code 2, too."""
