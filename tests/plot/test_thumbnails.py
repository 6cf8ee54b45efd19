"""Images are their pixels, in rows."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from text_layout import elements, texts

from d2lpar import plot


def test_images_are_pixels_in_rows_with_titles_where_0_is_white():
    X = torch.rand(10, 1, 28, 28)
    X[3, 0, 0, :3] = torch.tensor([0.0, 0.25, 1.0])
    picture = plot.images(X, titles=[f"title {i}" for i in range(10)], columns=4)
    assert texts(picture) == [f"title {i}" for i in range(10)]
    assert plot.images(X[:, 0], columns=4).svg == plot.images(X, columns=4).svg
    drawn = elements(picture, "image")
    png = drawn[3].get("{http://www.w3.org/1999/xlink}href").partition(",")[2]
    pixels = np.array(Image.open(io.BytesIO(base64.b64decode(png))))
    assert pixels.shape == (28, 28) and pixels[0, :3].tolist() == [255, 191, 0]
    for i, (image, title) in enumerate(zip(drawn, elements(picture, "text"), strict=True)):
        x, y, width = (float(image.get(name)) for name in ("x", "y", "width"))
        assert (x // 190, y // 210) == (i % 4, i // 4)
        assert x + width / 2 == float(title.get("x"))
        assert 0 < y - float(title.get("y")) < 12  # it stands above


def test_titles_that_do_not_fit_and_no_images_are_refused():
    with pytest.raises(ValueError, match="3 images and 1 titles"):
        plot.images(torch.rand(3, 1, 28, 28), ["a"])
    with pytest.raises(ValueError, match="0 images"):
        plot.images(torch.rand(0, 1, 28, 28))
