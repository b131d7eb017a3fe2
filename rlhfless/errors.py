"""Errors that a user can cause. Each message is one line: what is wrong, where, and what would be right.

Commands turn every `RlhflessError` into that line on stderr and exit code 2. Our own bugs are `assert`s.
"""


class RlhflessError(Exception):
    """Base of everything that the user can put right."""


class InputError(RlhflessError):
    """A file, column, name or number that the user gave is missing or wrong."""


class SchemaError(InputError):
    """A file of ours is of an unknown or older schema, or does not have the schema's shape."""


class InfeasibleError(RlhflessError):
    """The request is well formed, but no plan can carry it out (too few GPUs, a response larger than the KV cache)."""


class PlanError(RlhflessError):
    """A plan breaks one of its own laws, for instance a response that no actor decodes."""
