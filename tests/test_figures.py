import xml.etree.ElementTree as ET

import pytest

from d2lpar import plot
from d2lpar.figures import data_parallel, three_splits

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture):
    return [element.text for element in ET.fromstring(picture.svg).iter(SVG + "text")]


def arrows(picture, thick):
    paths = ET.fromstring(picture.svg).iter(SVG + "path")
    return sum(path.get("stroke-width") == str(thick) for path in paths)


@pytest.mark.parametrize("k", range(1, 5))
def test_data_parallel_shows_every_device_and_what_is_sent(k):
    picture = data_parallel(k)
    words = texts(picture)
    for i in range(k):
        assert f"device {i}" in words and f"of shard {i}" in words
    assert words.count("same step") == k and words.count("sum") == 1
    assert arrows(picture, 3) == 3 * k  # a shard, a gradient and the sum, for each device
    assert arrows(picture, 1) == k
    assert f"{k} devices" in picture.alt and "allreduce" in picture.alt


@pytest.mark.parametrize("k", [0, 5])
def test_data_parallel_refuses_what_does_not_fit(k):
    with pytest.raises(ValueError, match=f"k = {k}, but only 1 to 4"):
        data_parallel(k)


def test_the_three_splits_send_where_they_cut():
    picture = three_splits()
    words = texts(picture)
    assert words.count("device 0") == words.count("device 1") == 3
    assert [w for w in words if w.startswith("Sent")] == [
        "Sent: activations, where it is cut",
        "Sent: activations, at every layer",
        "Sent: each layer's gradient, once a step",
    ]
    # there and back: at one cut, at three joints, at four layers; and one in the key
    assert arrows(picture, 3) == 2 * 1 + 2 * 3 + 2 * 4 + 1
    assert all(
        way in picture.alt for way in ("between layers", "inside layers", "between examples")
    )


def test_they_are_shown_through_plot():
    assert plot.data_parallel is data_parallel and plot.three_splits is three_splits
