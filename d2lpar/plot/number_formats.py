"""What 32 and 16 bits can hold, drawn as two number lines: notebook 08 shows them."""

import math

import torch

from .drawing import INK, PALETTE, WIDTH, Picture, picture, text
from .figures import BOLD, CENTRED

DASHED = 'stroke-dasharray="4 3"'


def number_lines() -> Picture:
    """Draw what float32, bfloat16 and float16 can hold: how far they reach, and how densely."""
    kinds = torch.float32, torch.bfloat16, torch.float16
    left, right = 100, 730
    unit = (right - left) / 84  # pixels per power of ten, from 1e-45 to 1e39
    parts = [text(complex(16, 24), "how far: from the smallest to the largest number", BOLD)]
    parts += [text(complex(16, 176), "how densely: the numbers from 1 to 1 + 1/32", BOLD)]
    words = []
    for i, kind in enumerate(kinds):
        info, colour, y = torch.finfo(kind), PALETTE[i], 52 + 30 * i
        name = str(kind).removeprefix("torch.")
        least = info.tiny * info.eps  # subnormal: with fewer digits the smaller it is
        x0, x1, x2 = (left + unit * (45 + math.log10(v)) for v in (least, info.tiny, info.max))
        parts += [
            text(complex(16, y), name, f'fill="{colour}" {BOLD}'),
            f'<path d="M{x0:.5g} {y}H{x1:.5g}" stroke="{colour}" stroke-width="4" {DASHED}/>',
            f'<path d="M{x1:.5g} {y}H{x2:.5g}" stroke="{colour}" stroke-width="12"/>',
            text(complex(16, y + 152), name, f'fill="{colour}" {BOLD}'),
            _density(info.eps, left, right, y + 152, colour),
        ]
        words.append(f"{name} from {least:.1e} to {info.max:.1e}, {info.eps:.1e} apart at 1")
    for power in range(-40, 40, 10):
        x = left + unit * (45 + power)
        mark = f'<tspan>10</tspan><tspan dy="-5" font-size="9">{power}</tspan>' if power else "1"
        parts += [
            f'<path d="M{x:.5g} 124v6" stroke="{INK}"/>',
            text(complex(x, 140), mark, CENTRED),
        ]
    for numerator in (0, 1, 2, 3, 4):
        x = left + (right - left) * numerator / 4
        label = "1" if not numerator else f"1 + {numerator}/128"
        anchor = 'text-anchor="end"' if numerator == 4 else CENTRED
        parts.append(text(complex(x, 294), label, anchor))
    alt = f"Two number lines. {'; '.join(words)}. Dashed: subnormal numbers, with fewer digits."
    return picture("".join(parts), WIDTH, 312, alt)


def _density(eps: float, left: float, right: float, y: float, colour: str) -> str:
    """Draw a mark for each number from 1 to 1 + 1/32; a band where they are too many."""
    count = round(1 / 32 / eps)
    if count > 1000:
        return f'<path d="M{left} {y}H{right}" stroke="{colour}" stroke-width="16"/>'
    marks = (f"M{left + (right - left) * i / count:.5g} {y - 8}v16" for i in range(count + 1))
    return f'<path d="{"".join(marks)}" stroke="{colour}" stroke-width="2" fill="none"/>'
