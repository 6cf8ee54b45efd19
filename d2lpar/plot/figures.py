"""The book's own figures: data-parallel steps, three ways to split a network, ranks and nodes.

Written as SVG, like ``drawing``; notebooks show them through ``plot``. A thin line stays on a
device, a thick arrow is sent from one device to another. The devices' colours stand
beside their names.
"""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from .drawing import GREY, INK, PALETTE, WIDTH, Picture, picture, text, text_width

BOLD = 'font-weight="bold"'
CENTRED = 'text-anchor="middle"'
HALO = 'paint-order="stroke" stroke="#FFF" stroke-width="5"'  # around text that crosses a line


def data_parallel(k: int = 2) -> Picture:
    """Draw one step of data-parallel training on ``k`` devices, from the batch to the update.

    Raises ValueError unless 1 <= k <= 4.
    """
    if not 1 <= k <= 4:
        raise ValueError(f"k = {k}, but only 1 to 4 devices fit into the picture")
    rows = [84 + 84 * i for i in range(k)]
    middle = sum(rows) / k
    parts = [
        _box(complex(62, middle), 84, 76, ["batch", "X, y"]),
        _box(complex(526, middle), 76, 76, ["sum"]),
    ]
    for i, y in enumerate(rows):
        replica, gradient = complex(220, y), complex(378, y)
        parts += [
            _box(replica, 116, 52, [f"device {i}", f"shard {i}, replica {i}"], PALETTE[i]),
            _box(gradient, 100, 52, ["gradient", f"of shard {i}"], PALETTE[i]),
            _box(complex(682, y), 112, 52, ["same step", f"on replica {i}"], PALETTE[i]),
            _arrow(complex(104, middle), replica - 58, 3),
            _arrow(replica + 58, gradient - 50),
            _arrow(gradient + 50, complex(488, middle), 3),
            _arrow(complex(564, middle), complex(626, y), 3),
        ]
    columns = {132: "1. split", 299: "2. backward", 526: "3. allreduce", 682: "4. update"}
    parts += [text(complex(x, 24), words, f"{CENTRED} {BOLD}") for x, words in columns.items()]
    alt = (
        f"One step on {k} devices. 1: the batch is split into {k} shards, one for each device. "
        "2: each device computes the gradient of its shard with its own replica of the parameters. "
        "3: an allreduce sums the gradients. 4: every device takes the same step on its replica."
    )
    return picture("".join(parts), WIDTH, rows[-1] + 44, alt)


def three_splits() -> Picture:
    """Draw a network of four layers on two devices, cut in each of the three ways."""
    panels = (
        ("1. between layers", _between_layers, "activations, where it is cut"),
        ("2. inside layers", _inside_layers, "activations, at every layer"),
        ("3. between examples", _between_examples, "all gradients, once per step"),
    )
    body = ""
    for i, (title, draw, sent) in enumerate(panels):
        body += (
            f'<g transform="translate({20 + 250 * i} 0)">{text(24j, title, BOLD)}'
            f"{''.join(draw())}{text(236j, 'Sent: ' + sent)}</g>"
        )
    body += _arrow(20 + 262j, 60 + 262j, 3) + text(70 + 262j, "sent from one device to another")
    body += _arrow(300 + 262j, 340 + 262j) + text(350 + 262j, "stays on a device")
    alt = (
        "A network of four layers on two devices. Cut between layers: device 0 has the first two "
        "layers, device 1 the last two, and activations are sent where it is cut. Cut inside "
        "layers: each device has half of every layer, and activations are sent at every layer. Cut "
        "between examples: each device has all layers and half of the batch, and gradients are "
        "sent once."
    )
    return picture(body, WIDTH, 284, alt)


def ranks_and_nodes() -> Picture:
    """Draw two machines with three processes each: their ranks, local ranks and GPUs."""
    body = _bracket(16, 744, 40, "nnodes = 2, world_size = 6")
    body += _node(16, 0, "CUDA_VISIBLE_DEVICES is not set", [0, 1, 2])
    body += _node(388, 1, "CUDA_VISIBLE_DEVICES=0,1,3", [0, 1, 3])
    alt = (
        "Two machines, node 0 and node 1, each with four GPUs and three processes: nnodes = 2, "
        "nproc_per_node = 3, world_size = 6. The ranks count all processes: 0, 1, 2 on node 0 and "
        "3, 4, 5 on node 1. The local ranks count those of one node: 0, 1, 2 on each. Local rank i "
        'uses the device that it sees as "cuda:i". On node 0 that is GPU i, and GPU 3 is unused. '
        'On node 1, CUDA_VISIBLE_DEVICES=0,1,3 hides GPU 2, so that "cuda:2" of local rank 2 is '
        "GPU 3."
    )
    return picture(body, WIDTH, 342, alt)


def columns_and_rows() -> Picture:
    """Draw two layers on two ranks: the first cut into columns, the second into rows."""
    ys = (92, 196)
    body, middle = "", sum(ys) / 2
    body += _box(complex(60, middle), 84, 60, ["X", "on all ranks"])
    body += _box(complex(702, middle), 84, 60, ["Y = Z A", "on all ranks"])
    for i, y in enumerate(ys):
        columns, hidden, rows = complex(222, y), complex(372, y), complex(514, y)
        body += _box(columns, 132, 56, [f"columns {i} of W", "X W, some columns"], PALETTE[i])
        body += _box(hidden, 112, 56, [f"columns {i} of Z", "Z = GELU(X W)"], PALETTE[i])
        body += _box(rows, 104, 56, [f"rows {i} of A", "a part of Z A"], PALETTE[i])
        body += text(complex(372, y - 42), f"rank {i}", f'{CENTRED} {BOLD} fill="{PALETTE[i]}"')
        body += _arrow(complex(102, middle), columns - 66)
        body += _arrow(columns + 66, hidden - 56) + _arrow(hidden + 56, rows - 52)
        body += _arrow(rows + 52, complex(660, middle), 3)
    body += text(complex(142, 24), "copy", f"{CENTRED} {BOLD}")
    body += text(complex(142, 262), "backward: allreduce", CENTRED)
    body += text(complex(142, 242), "forward: nothing", CENTRED)
    body += text(complex(612, 24), "sum", f"{CENTRED} {BOLD}")
    body += text(complex(612, 242), "forward: allreduce", CENTRED)
    body += text(complex(612, 262), "backward: nothing", CENTRED)
    alt = (
        "Two linear layers with a GELU between them, on two ranks. Both have X. Each has some "
        "columns of the first weight W, computes those columns of Z = GELU(X W), and multiplies "
        "them by its rows of the second weight A. Their sum is Y. Where X is copied to the ranks, "
        "nothing is sent forward, and an allreduce is needed backward. Where the parts are summed, "
        "an allreduce is needed forward, and nothing is sent backward."
    )
    return picture(body, WIDTH, 284, alt)


def iteration(traces: Mapping[str, Sequence]) -> Picture:
    """Draw the steps of an iteration, downwards, for each form: {name: ``iteration.trace(…)``}.

    A vertical line is a device. A block on it says that it computes; an arrow from one to another
    is what is sent, as thick as it is large. Raises ValueError for no form or more than three.
    """
    if not 1 <= len(traces) <= 3:
        raise ValueError(f"{len(traces)} forms, but only 1 to 3 fit into the picture")
    most = max(
        (n for steps in traces.values() for step in steps for n in step.bytes.values()), default=1
    )
    width, body, heights, words = WIDTH / len(traces), "", [], []
    for i, (form, steps) in enumerate(traces.items()):
        drawn, height = _sequence(form, steps, width, most or 1)
        body += f'<g transform="translate({i * width:g} 0)">{drawn}</g>'
        heights.append(height)
        sent = [
            f"{n}. {step.name}{_sent(step) and ', ' + _sent(step)}"
            for n, step in enumerate(steps, 1)
        ]
        words.append(f"{form}: {'; '.join(sent)}.")
    return picture(body, WIDTH, max(heights), f"The steps of an iteration. {' '.join(words)}")


def _sequence(form: str, steps: Sequence, width: float, most: int) -> tuple[str, float]:
    """Draw the steps of one form; return the drawing and its height."""
    places = {
        p for step in steps for p in (*step.busy, *(end for link in step.bytes for end in link))
    }
    places = sorted(places, key=lambda p: (isinstance(p, int), p if isinstance(p, int) else 0))
    columns = {p: 30 + (i + 0.5) * (width - 60) / len(places) for i, p in enumerate(places)}
    y, body = 66.0, ""
    for n, step in enumerate(steps, 1):
        name, sent = f"{n}. {step.name}", _sent(step)
        body += text(complex(16, y), escape(name), f"{HALO} {BOLD}")
        if text_width(name, bold=True) + text_width(sent) > width - 40:
            y += 18  # below the name: beside it there is no room
        body += text(complex(width - 16, y), sent, f'{HALO} text-anchor="end"')
        y += 20
        for place in step.busy:
            body += _box(complex(columns[place], y), 16, 16, [], PALETTE[place % len(PALETTE)])
        y += 10 * bool(step.busy)
        for (src, dst), nbytes in sorted(step.bytes.items(), key=str):
            start, end = complex(columns[src], y), complex(columns[dst], y)
            body += _arrow(start, end, 1 + 2.5 * nbytes / most)
            y += 9
        y += 16
    lines = f'<text x="16" y="24" font-size="15" {BOLD}>{escape(form)}</text>'
    for place, x in columns.items():
        colour = PALETTE[place % len(PALETTE)] if isinstance(place, int) else INK
        lines += f'<path d="M{x:g} 52V{y - 10:g}" stroke="{colour}" stroke-dasharray="2 3"/>'
        lines += text(complex(x, 42), escape(str(place)), f'{CENTRED} {BOLD} fill="{colour}"')
    return lines + body, y


def _sent(step) -> str:
    """Say how many bytes a step sends in all, with three digits: 1.55 MB."""
    total = int(float(f"{sum(step.bytes.values()):.3g}"))
    power = min(3, max(0, (len(str(total)) - 1) // 3))
    return f"{total / 1000**power:g} {('B', 'kB', 'MB', 'GB')[power]}" if total else ""


def _node(left: float, node: int, environment: str, gpus: list[int]) -> str:
    """Draw a machine with four GPUs, and a process on each of ``gpus``."""
    columns = [left + 178 + 85 * (i - 1.5) for i in range(4)]
    body = _box(complex(left + 178, 192), 356, 268, [], GREY, "#F8F8F8")
    body += text(complex(left + 11, 80), f"node {node}", BOLD)
    body += text(complex(left + 345, 80), environment, 'text-anchor="end"')
    body += _bracket(columns[0] - 39, columns[2] + 39, 124, "nproc_per_node = 3")
    body += text(complex(columns[3], 172), "processes", CENTRED)
    for gpu in {0, 1, 2, 3} - set(gpus):
        body += _box(complex(columns[gpu], 286), 78, 48, [f"GPU {gpu}", "unused"], GREY, GREY)
    for local_rank, gpu in enumerate(gpus):
        rank = len(gpus) * node + local_rank
        process, place = complex(columns[local_rank], 172), complex(columns[gpu], 286)
        lines = [f"rank {rank}", f"local rank {local_rank}", f"cuda:{local_rank}"]
        body += _box(process, 78, 68, lines, PALETTE[rank])
        body += _box(place, 78, 48, [f"GPU {gpu}"], PALETTE[rank])
        body += _arrow(process + 36j, place - 26j)
    return body


def _bracket(left: float, right: float, y: float, words: str) -> str:
    """Draw a bracket over what lies between ``left`` and ``right``, and words over that."""
    path = f'<path d="M{left:g} {y + 7:g}v-7H{right:g}v7" fill="none" stroke="{INK}"/>'
    return path + text(complex((left + right) / 2, y - 12), words, f"{CENTRED} {BOLD}")


def _between_layers() -> list[str]:
    layers = [_layer(i, 126, 100, device=i // 2) for i in range(4)]
    flow = [_flow(0, 126), _arrow(102 + 114j, 116 + 114j, 3), _arrow(116 + 138j, 102 + 138j, 3)]
    names = [text(51 + 62j, "device 0", CENTRED), text(167 + 62j, "device 1", CENTRED)]
    return [*layers, *flow, _flow(2, 126), *names]


def _inside_layers() -> list[str]:
    layers = [_layer(i, y, 44, device) for i in range(4) for device, y in enumerate((98, 154))]
    flow = [_flow(i, y) for i in range(3) for y in (98, 154)]
    for i in range(3):
        x = 45 + 58 * i
        flow += [_arrow(x + 116j, x + 12 + 136j, 3), _arrow(x + 136j, x + 12 + 116j, 3)]
    return [*layers, *flow, *_rows()]


def _between_examples() -> list[str]:
    layers = [_layer(i, y, 44, device) for i in range(4) for device, y in enumerate((92, 160))]
    flow = [_flow(i, y) for i in range(3) for y in (92, 160)]
    for i in range(4):
        x = 22 + 58 * i
        flow += [_arrow(x - 6 + 115j, x - 6 + 137j, 3), _arrow(x + 6 + 137j, x + 6 + 115j, 3)]
    return [*layers, *flow, *_rows()]


def _rows() -> list[str]:
    return [text(109 + 58j, "device 0", CENTRED), text(109 + 198j, "device 1", CENTRED)]


def _layer(i: int, y: float, height: float, device: int) -> str:
    return _box(complex(22 + 58 * i, y), 44, height, [], PALETTE[device])


def _flow(i: int, y: float) -> str:
    """Draw the line from layer i to the next, on one device."""
    return _arrow(complex(45 + 58 * i, y), complex(57 + 58 * i, y))


def _box(
    middle: complex,
    width: float,
    height: float,
    lines: list[str],
    colour: str = INK,
    fill: str = "",
) -> str:
    """Draw a frame with lines of text, the first one bold; without text it is filled."""
    corner = middle - complex(width, height) / 2
    fill = fill or ("#FFF" if lines else colour)
    drawn = (
        f'<rect x="{corner.real:g}" y="{corner.imag:g}" width="{width:g}" height="{height:g}" '
        f'rx="6" fill="{fill}" stroke="{colour}" stroke-width="2"/>'
    )
    for i, line in enumerate(lines):
        place = middle + 17j * (i - (len(lines) - 1) / 2)
        drawn += text(place, line, CENTRED if i else f"{CENTRED} {BOLD}")
    return drawn


def _arrow(start: complex, end: complex, thick: float = 1) -> str:
    """Draw a straight arrow: thick where something is sent, thin within a device."""
    back = (start - end) / abs(start - end) * (4 + 1.5 * thick)
    a, b = end + back * (1 + 0.6j), end + back * (1 - 0.6j)
    neck = end + back
    return (
        f'<path d="M{start.real:.5g} {start.imag:.5g}L{neck.real:.5g} {neck.imag:.5g}" '
        f'stroke="{INK}" stroke-width="{thick:g}"/><path d="M{end.real:.5g} {end.imag:.5g}'
        f'L{a.real:.5g} {a.imag:.5g} {b.real:.5g} {b.imag:.5g}z" fill="{INK}"/>'
    )
