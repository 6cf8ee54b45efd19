"""Arguments are checked once, at the entry: what comes after assumes that they are good."""

from collections.abc import Callable
from functools import wraps


def checked(check: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Decorate a function so that each call begins with ``check`` of the same arguments."""

    def decorate(function: Callable) -> Callable:
        @wraps(function)
        def guarded(*args, **kwargs):
            check(*args, **kwargs)
            return function(*args, **kwargs)

        return guarded

    return decorate
