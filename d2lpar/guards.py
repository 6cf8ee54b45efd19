"""Arguments are checked once, at the entry: what comes after assumes they are good."""

import inspect
from collections.abc import Callable
from functools import wraps


def checked(check: Callable[..., None]) -> Callable[[Callable], Callable]:
    """Decorate a function so that ``check`` runs first, given all arguments by name.

    So a function reads as its algorithm, and its check stands beside it.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @wraps(function)
        def guarded(*args, **kwargs):
            try:
                call = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}(): {error}") from None
            call.apply_defaults()
            check(**call.arguments)
            return function(*args, **kwargs)

        return guarded

    return decorate
