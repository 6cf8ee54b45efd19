import threading

import pytest

from d2lpar.ranks import worker


class Sent(list):
    """Records what an output sends."""

    def __call__(self, kind, lines):
        self.append((kind, lines))


def test_an_output_sends_whole_lines_only():
    sent = Sent()
    output = worker._Output("stdout", sent)
    for part in ("a", "b", "c\nd", "\n\n", "e"):
        output.write(part)
    assert sent == [("stdout", ["abc"]), ("stdout", ["d", ""])]
    output.finish()
    output.finish()
    assert sent[2:] == [("stdout", ["e"])]


def test_every_thread_has_its_own_line():
    sent = Sent()
    output = worker._Output("stderr", sent)
    output.write("from the ")
    other = threading.Thread(target=lambda: output.write("from another\n"))
    other.start()
    other.join()
    output.write("first\n")
    assert sent == [("stderr", ["from another"]), ("stderr", ["from the first"])]


def test_what_cannot_be_pickled_is_named():
    assert worker.pickled([1], lambda: "a number")
    with pytest.raises(TypeError, match="the result cannot be sent to another process: cannot"):
        worker.pickled([threading.Lock()], lambda: "the result")


def test_what_values_share_they_share_when_they_are_read():
    shared = [1]
    sent = worker.pickled([shared, {"x": shared}, lambda: shared], lambda: "")
    first, second, third = worker._unpickled(sent)
    assert first == [1] and first is second["x"] and first is third()


def test_a_failure_says_what_where_and_when():
    def divide(x):
        return 1 / x

    try:
        divide(0)
    except ZeroDivisionError as error:
        first = worker._failure(error)
        second = worker._failure(error)
    assert first.what == "ZeroDivisionError: division by zero"
    assert "return 1 / x" in first.details and "in divide" in first.details
    assert first.when <= second.when


def test_no_path_of_a_cell_is_shown():
    text = 'File "/some/where/ipykernel_123/456.py", line 3\nFile "/some/where/x.py", line 4'
    expected = 'File "<cell>", line 3\nFile "/some/where/x.py", line 4'
    assert worker._without_paths_of_cells(text) == expected
