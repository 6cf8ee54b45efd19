"""Charts: their words, their values and what they refuse."""

import pytest
from text_layout import complaints, texts

from d2lpar import plot
from d2lpar.plot import charts


def test_links_shows_every_link_with_its_bytes_the_largest_first():
    picture = plot.links({("host", 0): 1000, (0, 1): 500, (1, 0): 2_000_000})
    names = [word for word in texts(picture) if "→" in word]
    assert names == ["1 → 0", "host → 0", "0 → 1"]  # from the top down
    assert picture.figure.axes[0].yaxis_inverted()
    assert picture.alt == "Bytes per link. : 1 → 0 2 MB, host → 0 1 kB, 0 → 1 500 B."
    picture = plot.links({"star": {(0, 2): 4_000_000, (2, 0): 1_500}, "ring": {(0, 1): 9_000}})
    assert {"star", "ring"} <= set(texts(picture))
    assert picture.alt == (
        "Bytes per link. star: 0 → 2 4 MB, 0 → 1 0 B, 2 → 0 1.5 kB. "
        "ring: 0 → 2 0 B, 0 → 1 9 kB, 2 → 0 0 B."
    )


def test_many_links_are_added_up_per_device():
    picture = plot.links({(a, b): 1_000 * (a + 1) for a in range(8) for b in range(8) if a != b})
    assert not [word for word in texts(picture) if "→" in word]
    assert "7 sends 56 kB" in picture.alt  # 7 times 8 kB
    assert "0 receives 35 kB" in picture.alt  # 2 + 3 + … + 8 kB


def test_bars_carry_names_and_values():
    picture = plot.bars({"a": 0.00123, "b": (2.0, 1.5, 2.5)}, x_label="time", unit="seconds")
    assert {"a", "b", "1.23 ms", "2 s (1.5 s to 2.5 s)", "time"} <= set(texts(picture))
    assert picture.alt == "Bars: time. a 1.23 ms, b 2 s (1.5 s to 2.5 s)."
    assert [bar.get_width() for bar in picture.figure.axes[0].patches] == [0.00123, 2.0]


def test_parts_of_a_stack_lie_side_by_side_in_the_colour_and_hatch_of_their_kind():
    values = {"device 0": {"kept": 3_000_000, "sent": 1_000_000}, "device 1": {"sent": 500}}
    picture = plot.stacks(values, x_label="memory", unit="bytes", title="All")
    words = {"device 0", "device 1", "4 MB", "500 B", "kept", "sent", "memory"}
    assert words <= set(texts(picture))
    assert picture.alt == (
        "Bars: All. device 0 4 MB (kept 3 MB, sent 1 MB); device 1 500 B (sent 500 B)."
    )
    patches = picture.figure.axes[0].patches  # kept of all, and then sent of all
    places = [(part.get_x(), part.get_width()) for part in patches]
    assert places == [(0, 3_000_000), (0, 0), (3_000_000, 1_000_000), (0, 500)]
    kept, _, sent, other = [(part.get_facecolor(), part.get_hatch()) for part in patches]
    assert sent == other and kept[0] != sent[0] and kept[1] != sent[1]


def test_curves_have_labels_units_and_different_dashes_and_markers():
    sizes = [10**i for i in range(3, 9)]
    series = {name: (sizes, [1e-9 * i * x for x in sizes]) for i, name in enumerate("abcd", 1)}
    picture = plot.curves(
        series, "size", "time", log_x=True, log_y=True, x_unit="bytes", y_unit="seconds"
    )
    words = texts(picture)
    assert {"size", "time", "1 MB", "10 ms"} <= set(words)
    assert [word for word in words if word in series] == list("dcba")  # as the curves end
    assert "a: from 1 µs at 1 kB to 100 ms at 100 MB" in picture.alt
    assert len({str(dash) for dash in charts.DASHES}) == len(set(charts.MARKERS)) == 8


def test_the_numbers_along_an_axis_are_those_of_the_devices_and_keep_apart():
    words = texts(plot.curves({"a": ([2, 4, 8], [0.1, 0.2, 0.3])}, "k", "y", log_x=True))
    assert [word for word in words if word in ("2", "3", "4", "5", "8")] == ["2", "4", "8"]
    xs = [1, 2, 4, 8, 1000, 1001]
    curves = plot.curves({"a": (xs, xs)}, "x", "y", log_x=True)
    links = plot.links({name: {(0, 1): 150_000_000} for name in "abcd"})
    for picture in (curves, links):
        assert list(complaints(picture.svg)) == []


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot.bars({}), "0 bars"),
        (lambda: plot.links({}), "0 bars"),
        (lambda: plot.stacks({"a": {}}), "0 kinds of parts, but 1 to 8"),
        (lambda: plot.stacks({"a": dict.fromkeys(range(9), 1)}), "9 kinds of parts"),
        (lambda: plot.curves({}, "x", "y"), "0 series"),
        (lambda: plot.curves({str(i): ([1], [1]) for i in range(9)}, "x", "y"), "9 series"),
        (lambda: plot.curves({"a": ([1, 2, 3], [1, 2])}, "x", "y"), "'a' has 3 x .* 2 y"),
        (lambda: plot.curves({"a": ([], [])}, "x", "y"), "'a' has 0 x .* 0 y"),
        (lambda: plot.curves({"a": ([0, 1], [1, 1])}, "x", "y", log_x=True), "cannot show 0"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_with_the_numbers(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
