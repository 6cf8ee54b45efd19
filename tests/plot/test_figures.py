import re
import xml.etree.ElementTree as ET

import pytest
import text_layout

from d2lpar import plot
from d2lpar.plot.drawing import GREY, PALETTE
from d2lpar.plot.figures import (
    columns_and_rows,
    data_parallel,
    iteration,
    ranks_and_nodes,
    three_splits,
)
from d2lpar.study.iteration import STEPS as NAMES
from d2lpar.study.iteration import Step

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
        "Sent: all gradients, once per step",
    ]
    # there and back: at one cut, at three joints, at four layers; and one in the key
    assert arrows(picture, 3) == 2 * 1 + 2 * 3 + 2 * 4 + 1
    assert all(
        way in picture.alt for way in ("between layers", "inside layers", "between examples")
    )


def boxes(picture):
    """{(x, y) of the middle: (colour, the lines of text in it)} of the boxes that have text."""
    root = ET.fromstring(picture.svg)
    found = {}
    for rect in root.iter(SVG + "rect"):
        if rect.get("rx") != "6":
            continue
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        inside = [
            element.text
            for element in root.iter(SVG + "text")
            if x + w / 2 == float(element.get("x")) and y < float(element.get("y")) < y + h
        ]
        if inside and h < 100:  # not a whole node
            found[x + w / 2, y + h / 2] = rect.get("stroke"), inside
    return found


def test_ranks_count_all_processes_and_local_ranks_those_of_a_node():
    picture = ranks_and_nodes()
    words = texts(picture)
    assert {"node 0", "node 1", "nnodes = 2, world_size = 6"} <= set(words)
    assert words.count("nproc_per_node = 3") == 2
    assert "CUDA_VISIBLE_DEVICES is not set" in words and "CUDA_VISIBLE_DEVICES=0,1,3" in words
    processes = [lines for _, lines in boxes(picture).values() if lines[0].startswith("rank")]
    assert processes == [
        [f"rank {rank}", f"local rank {rank % 3}", f"cuda:{rank % 3}"] for rank in range(6)
    ]


def test_every_rank_points_to_its_gpu_in_its_own_colour():
    picture = ranks_and_nodes()
    at = boxes(picture)
    lines = [
        [float(number) for number in re.findall(r"[\d.]+", path.get("d"))]
        for path in ET.fromstring(picture.svg).iter(SVG + "path")
        if re.fullmatch(r"M\S+ \S+L\S+ \S+", path.get("d"))
    ]
    tips = [
        float(re.match(r"M([\d.]+)", path.get("d"))[1])
        for path in ET.fromstring(picture.svg).iter(SVG + "path")
        if path.get("d").endswith("z")
    ]
    used = []
    for (start, *_), tip in zip(lines, tips, strict=True):
        [(process, (rank, *_))] = [box for (x, y), box in at.items() if x == start and y < 200]
        [(gpu, (name,))] = [box for (x, y), box in at.items() if x == tip and y > 200]
        assert process == gpu == PALETTE[int(rank[-1])]
        used.append(name)
    assert used == ["GPU 0", "GPU 1", "GPU 2", "GPU 0", "GPU 1", "GPU 3"]
    spare = [lines for colour, lines in at.values() if colour == GREY]
    assert spare == [["GPU 3", "unused"], ["GPU 2", "unused"]]


def test_the_alternative_text_of_ranks_and_nodes_tells_what_is_drawn():
    alt = ranks_and_nodes().alt
    assert "nnodes = 2, nproc_per_node = 3, world_size = 6" in alt
    assert "0, 1, 2 on node 0 and 3, 4, 5 on node 1" in alt
    assert (
        'CUDA_VISIBLE_DEVICES=0,1,3 hides GPU 2, so that "cuda:2" of local rank 2 is GPU 3' in alt
    )


def test_columns_and_rows_send_only_at_the_sum_forward_and_at_the_copy_backward():
    picture = columns_and_rows()
    words = texts(picture)
    for i in (0, 1):
        assert {f"rank {i}", f"columns {i} of W", f"rows {i} of A"} <= set(words)
    assert arrows(picture, 3) == 2  # both parts go into the sum
    sides = {"forward: nothing": "backward: allreduce", "forward: allreduce": "backward: nothing"}
    for forward, backward in sides.items():
        assert words.count(forward) == words.count(backward) == 1
    assert "an allreduce is needed backward" in picture.alt


@pytest.mark.parametrize("draw", [data_parallel, three_splits, ranks_and_nodes, columns_and_rows])
def test_they_are_shown_through_plot_and_keep_their_bytes(draw):
    assert getattr(plot, draw.__name__) is draw
    assert draw().svg == draw().svg
    assert list(text_layout.complaints(draw().svg)) == []


STEPS = [
    Step("scatter <X & y>", {("host", 0): 400, ("host", 1): 1500}),
    Step("forward", {}, (0, 1)),
    Step("gather", {(1, 0): 2_000_000}),
    Step("loss", {}, (0,)),
    Step("nothing is sent", {}),
]


def test_an_iteration_shows_its_steps_in_order_with_their_bytes():
    picture = iteration({"A & B": STEPS})
    words = texts(picture)
    steps = ["scatter <X & y>", "forward", "gather", "loss", "nothing is sent"]
    numbered = [f"{n}. {step}" for n, step in enumerate(steps, 1)]
    assert [word for word in words if word and word[0].isdigit() and ". " in word] == numbered
    assert {"A & B", "host", "0", "1", "1.9 kB", "2 MB"} <= set(words)
    assert picture.alt == (
        "The steps of an iteration. A & B: 1. scatter <X & y>, 1.9 kB; 2. forward; 3. gather, "
        "2 MB; 4. loss; 5. nothing is sent."
    )
    assert ET.fromstring(picture.svg).get("aria-label") == picture.alt


def test_an_iteration_has_an_arrow_for_each_link_and_a_block_for_each_that_computes():
    root = ET.fromstring(iteration({"A": STEPS}).svg)
    column = {
        element.text: round(float(element.get("x")))
        for element in root.iter(SVG + "text")
        if element.text in ("host", "0", "1")
    }
    assert column["host"] < column["0"] < column["1"]
    arrows = []  # (from, to, how thick)
    for path in root.iter(SVG + "path"):
        line = re.fullmatch(r"M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)", path.get("d"))
        if line:
            begin, y, end, y_end = map(float, line.groups())
            assert y == y_end
            arrows.append((round(begin), begin < end, float(path.get("stroke-width"))))
    assert [arrow[:2] for arrow in arrows] == [
        (column["host"], True),
        (column["host"], True),
        (column["1"], False),
    ]
    thick = [arrow[2] for arrow in arrows]
    assert 1 <= thick[0] < thick[1] < thick[2]
    blocks = [
        round(float(rect.get("x")) + float(rect.get("width")) / 2)
        for rect in root.iter(SVG + "rect")
        if rect.get("rx") == "6"
    ]
    assert blocks == [column["0"], column["1"], column["0"]]


def test_iterations_stand_side_by_side():
    one, three = iteration({"A": STEPS}), iteration({"A": STEPS, "B": STEPS[:2], "<C>": STEPS})
    assert one.svg == iteration({"A": STEPS}).svg
    width = [ET.fromstring(picture.svg).get("viewBox").split()[2] for picture in (one, three)]
    assert width[0] == width[1]
    assert [word for word in texts(three) if word in ("A", "B", "<C>")] == ["A", "B", "<C>"]
    assert "A: 1. scatter" in three.alt and "<C>: 1. scatter" in three.alt
    assert plot.iteration is iteration


def test_an_iteration_has_room_for_its_words():
    link = {(0, 1): 399_999_999, (1, 0): 1, (3, 2): 1}
    forms = {form: [Step(name, link, (0, 3)) for name in names] for form, names in NAMES.items()}
    for count in (1, 2, 3):
        svg = iteration(dict(list(forms.items())[-count:])).svg
        assert list(text_layout.complaints(svg)) == []


def test_an_iteration_may_send_nothing_at_all():
    assert iteration({"A": [Step("forward", {}, (0,))]}).alt.endswith("A: 1. forward.")
    assert "1. send." in iteration({"A": [Step("send", {(0, 1): 0})]}).alt


@pytest.mark.parametrize("forms", [0, 4])
def test_too_many_iterations_or_none_are_refused(forms):
    with pytest.raises(ValueError, match=f"{forms} forms, but only 1 to 3"):
        iteration({str(i): STEPS for i in range(forms)})


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (1, "1 B"),
        (999, "999 B"),
        (999_999, "1 MB"),
        (1000, "1 kB"),
        (1_554_000, "1.55 MB"),
        (2 * 10**12, "2000 GB"),
    ],
)
def test_bytes_are_told_with_three_digits(nbytes, words):
    assert f"1. send, {words}." in iteration({"A": [Step("send", {(0, 1): nbytes})]}).alt
