"""Workshop. An answer to an exercise is done, or a sentence says what is wrong.

    with exercise(1) as done:
        difference = off(step(X), expected, "step(X)")
        assert difference < 1e-6, f"off by {difference:.1e}: how much does a row count?"
        done(f"Off by {difference:.1e}.")

This prints ``1: done. Off by 2.1e-09.``, or shows ``1: off by 2.5e-05: how much …``
without a traceback. The notebooks of notebooks/exercises use this file.
"""

import math
import numbers
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .ranks.launch import RankError

LONGEST = 300  # characters of an error
STUB = 'raise NotImplementedError("your code")'
# in the traceback of a rank
FRAME = re.compile(r'File "(.*)", line \d+, in \S+\n +(\S.*)')


class AnswerError(AssertionError):
    """An exercise's answer is wrong or missing; the message is a sentence or two."""

    def _render_traceback_(self) -> list[str]:
        """Tell IPython to show the message alone, and not the code of the check."""
        return [str(self)]


@contextmanager
def exercise(number: int) -> Iterator[Callable[[str], None]]:
    """Check an answer in the ``with`` block; then print ``done``, and a remark.

    Raises:
        AnswerError: an ``assert`` failed, or there was another error. It shows the line
            of the answer, if the error comes from there.
    """
    # of the cell with the ``with``
    figures, check = [], sys._getframe(2).f_code.co_filename
    try:
        yield figures.append
    except Exception as error:
        raise AnswerError(f"{number}: {_sentence(error, check)}") from error
    print(f"{number}: done.", *figures)


def off(
    value: Any, expected: torch.Tensor | Sequence[torch.Tensor], what: str
) -> float:
    """Return the largest difference between tensors, or between lists of them.

    ``what`` names the value in the AssertionError for one of another type, length or
    shape.
    """
    if isinstance(expected, torch.Tensor):
        wanted = described(expected)
        same = isinstance(value, torch.Tensor) and value.shape == expected.shape
        assert same, f"{what} is {described(value)}, and should be {wanted}."
        difference = (
            value.detach().cpu().double() - expected.detach().cpu().double()
        ).abs()
        return difference.max().item() if difference.numel() else 0.0
    same = isinstance(value, list | tuple) and len(value) == len(expected)
    assert same, (
        f"{what} is {described(value)}, "
        f"and should be a list of {len(expected)} tensors."
    )
    pairs = enumerate(zip(value, expected, strict=True))
    found = [off(ours, theirs, f"{what}, entry {i},") for i, (ours, theirs) in pairs]
    # NaN is the largest
    return max(found, key=lambda x: (math.isnan(x), x), default=0.0)


def number(value: Any, what: str) -> float | int:
    """Return a number as Python's; the error for anything else names ``what``."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    # NumPy's, too
    right = isinstance(value, numbers.Real) and not isinstance(value, bool)
    assert right, f"{what} is {described(value)}, and should be a number."
    return value


def described(value: Any) -> str:
    """Return what a value is, for a sentence."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of length {len(value)}"
    shown = repr(value)
    short = len(shown) < 40 and "\n" not in shown
    return shown if short else f"an object of type {type(value).__name__}"


def _sentence(error: Exception, check: str) -> str:
    """Say what an error means, and show its line if that is in another cell."""
    text = next(iter(str(error).splitlines()), "")
    if "NotImplementedError" in f"{type(error).__name__} {text}":
        return f"not solved yet. Replace {STUB} with your code, and run that cell."
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, NameError) and frames[-1].filename == check:
        return (
            f"{text}. Run the cells above this one, in order: did one of them end in an"
            " error?"
        )
    if isinstance(error, AssertionError) and text:
        return text
    lines = [(frame.filename, frame.line) for frame in frames]
    lines += FRAME.findall(str(error))
    cells = [
        line
        for file, line in lines
        if line and file != check and not os.path.exists(file)
    ]
    # rank 0: ValueError: …
    kind = "" if isinstance(error, RankError) else type(error).__name__
    sentence = ": ".join(filter(None, [kind, text]))
    where = f", at: {cells[-1]}" if cells else ""
    return sentence[:LONGEST] + "…" * (len(sentence) > LONGEST) + where
