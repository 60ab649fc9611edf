"""Small folders of real image files."""

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image


@pytest.fixture(scope="session")
def photo():
    """A photograph, [427, 640, 3]."""
    return load_sample_image("china.jpg")


@pytest.fixture
def save(photo):
    """Returns a function that saves a crop of the photograph, another one for each number."""

    def save(path, number=0, height=40, width=60, **options):
        path.parent.mkdir(parents=True, exist_ok=True)
        top, left = (number * 7) % 300, (number * 13) % 500
        Image.fromarray(np.ascontiguousarray(photo[top : top + height, left : left + width])).save(path, **options)
        return path

    return save
