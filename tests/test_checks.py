"""A check says that an exercise is done, or in one sentence what is wrong."""

import linecache
import re

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from d2lpar.checks import STUB, AnswerError, exercise, number, off
from d2lpar.ranks.launch import launch

ZEROS = [torch.zeros(2, 3), torch.zeros(4)]


def cell(source):
    """A function of a cell: its code is in no file."""
    names, lines = {"launch": launch}, source.splitlines(keepends=True)
    linecache.cache["<cell>"] = len(source), None, lines, "<cell>"
    exec(compile(source, "<cell>", "exec"), names)
    return names["answer"]


def said(answer, *args):
    with pytest.raises(AnswerError) as caught, exercise(3):
        answer(*args)
    return str(caught.value)


def test_a_check_that_passes_prints_its_figures_at_the_end(capsys):
    with exercise(2) as done:
        done("Off by 0.")
        done("Sent 8 bytes.")
        assert capsys.readouterr().out == ""
    assert capsys.readouterr().out == "2: done. Off by 0. Sent 8 bytes.\n"


def test_an_assertion_is_shown_alone(capsys):
    with pytest.raises(AnswerError) as caught, exercise(1) as done:
        done("Off by 0.")
        raise AssertionError("off by 2.")
    assert capsys.readouterr().out == ""
    shell = InteractiveShell.instance()
    shell.showtraceback((AnswerError, caught.value, caught.tb))
    assert capsys.readouterr().out.strip() == "1: off by 2."


RANKS = "def answer():\n    launch(inner, 2, timeout=30)\ndef inner(rank, k):\n    "


@pytest.mark.parametrize(
    "source, sentence",
    [
        (f"def answer():\n    {STUB}", r"not solved yet\. Replace raise Not"),
        (RANKS + STUB, r"not solved yet\. Replace raise Not"),
        ("def answer():\n    x = y", r"NameError: name 'y' .*, at: x = y$"),
        ("def answer():\n    assert False", r"AssertionError, at: assert False$"),
        ("def answer():\n    raise ValueError('a\\nb')", r"ValueError: a, at: raise"),
        ("def answer():\n    raise ValueError(999 * 'a')", r"ValueError: a{288}…, at"),
        (f"{RANKS}int('x')", r"rank \d: ValueError: invalid .*, at: int\('x'\)$"),
    ],
)
def test_any_other_error_becomes_a_sentence_with_its_line(source, sentence):
    text = said(cell(source))
    assert re.match(f"3: {sentence}", text) and "\n" not in text, text


def test_what_the_cells_above_should_have_defined_is_named():
    check = "def answer(exercise):\n    with exercise(3):\n        frobnicate()"
    words = r"^3: name 'frobnicate' is not defined\. Run the cells"
    with pytest.raises(AnswerError, match=words):
        cell(check)(exercise)


def test_an_error_of_the_check_itself_shows_no_line_and_interrupts_pass():
    check = "def answer(exercise):\n    with exercise(3):\n        {}['x']"
    with pytest.raises(AnswerError, match=r"^3: KeyError: 'x'$"):
        cell(check)(exercise)
    with pytest.raises(KeyboardInterrupt), exercise(3):
        raise KeyboardInterrupt


def test_off_is_the_largest_difference():
    assert off(torch.zeros(2), torch.zeros(2), "it") == 0.0 == off([], [], "it")
    assert off(torch.zeros(0), torch.zeros(0), "it") == 0.0
    assert off((ZEROS[0] + 1, ZEROS[1] - 3), ZEROS, "it") == 3.0
    assert off(torch.tensor([1]), torch.tensor([2.5], requires_grad=True), "it") == 1.5
    nan, zeros = torch.tensor([0.0, float("nan")]), torch.zeros(2)
    found = off([zeros + 1, nan, zeros], 3 * [zeros], "it")
    assert found != found  # so that it is below no bound


@pytest.mark.parametrize(
    "value, expected, sentence",
    [
        (None, ZEROS[0], "it is None, and should be a tensor of shape (2, 3)."),
        (ZEROS[1], ZEROS[0], "it is a tensor of shape (4,), and should be a tensor of"),
        (ZEROS[:1], ZEROS, "it is a list of length 1, and should be a list of 2 ten"),
        ([ZEROS[0], "x"], ZEROS, "it, entry 1, is 'x', and should be a tensor of shap"),
        ({i: i for i in range(99)}, ZEROS, "it is an object of type dict, and should"),
    ],
)
def test_off_names_what_is_no_such_tensor(value, expected, sentence):
    assert said(off, value, expected, "it").startswith(f"3: {sentence}")


def test_number_takes_numbers_only():
    found = [number(x, "it") for x in (3, 2.5, torch.tensor([7]), np.int64(4))]
    assert found == [3, 2.5, 7, 4]
    for wrong in (None, "3", True, [3], torch.zeros(2)):
        text = said(number, wrong, "it")
        assert re.fullmatch(r"3: it is .*, and should be a number\.", text)
