import inspect

import pytest

from d2lpar.guards import checked


def check_half(x, **_):
    if x < 0:
        raise ValueError(f"x must not be negative, not {x}")


@checked(check_half)
def half(x, digits=1):
    """Return half of x."""
    return round(x / 2, digits)


def test_good_arguments_go_on_bad_ones_do_not_and_guarded_functions_look_the_same():
    assert half(3) == half(x=3) == 1.5 and half(3, digits=0) == 2
    with pytest.raises(ValueError, match="not -1"):
        half(-1)
    with pytest.raises(TypeError, match=r"^half\(\): .*'x'"):  # not of check_half
        half(digits=2)
    assert half.__name__ == "half" and half.__doc__ == "Return half of x."
    assert str(inspect.signature(half)) == "(x, digits=1)"
