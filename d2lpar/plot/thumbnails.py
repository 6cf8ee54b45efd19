"""Images of a data set, side by side."""

import base64
import io
import math
from collections.abc import Sequence

import torch
from PIL import Image

from .picture import CENTRED, WIDTH, Picture, text


def images(X: torch.Tensor, titles: Sequence[str] = (), columns: int = 8) -> Picture:
    """Draw images (N, 1, height, width) or (N, height, width), 0 white to 1 black, with titles."""
    if len(X) == 0 or (titles and len(titles) != len(X)):
        raise ValueError(f"{len(X)} images and {len(titles)} titles")
    pixels = (255 * (1 - X.detach().cpu().float().clamp(0, 1))).byte().numpy()
    cell, line = WIDTH // columns, 20 if titles else 0  # pixels; the title's height
    body = ""
    for i, image in enumerate(pixels):
        x, y = i % columns * cell, i // columns * (cell + line) + line
        png = io.BytesIO()
        Image.fromarray(image.reshape(X.shape[-2:])).save(png, "PNG", optimize=True)
        body += f'<image x="{x + 5}" y="{y + 5}" width="{cell - 10}" height="{cell - 10}" '
        body += 'style="image-rendering:pixelated" xlink:href="data:image/png;base64,'
        body += f'{base64.b64encode(png.getvalue()).decode()}"/>'
        if titles:
            body += text(complex(x + cell / 2, y - 5), titles[i], CENTRED)
    height = math.ceil(len(X) / columns) * (cell + line)
    words = f": {', '.join(titles)}" if titles else ""
    return Picture.around(body, min(columns, len(X)) * cell, height, f"{len(X)} images{words}.")
