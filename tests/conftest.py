"""What all tests share.

GPU tests are skipped without a GPU, random tests are repeatable, and functions of a
file of tests travel to ranks by value.
"""

import cloudpickle
import helpers
import pytest
import torch
from hypothesis import HealthCheck, settings

# No deadline per example: on a shared machine one of them is always slow. A whole test
# has one, of tools/time_limit.py.
pytest_plugins = ["time_limit"]
settings.register_profile(
    "d2lpar",
    deadline=None,
    max_examples=50,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(  # make test-everywhere's; it prints how to repeat an example
    "random", settings.get_profile("d2lpar"), derandomize=False, print_blob=True
)
settings.load_profile("d2lpar")


@pytest.fixture(autouse=True)
def seeded():
    """The same random numbers in every run of a test."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    for module in {helpers, *(item.module for item in items)}:
        # ranks cannot import a file of tests
        cloudpickle.register_pickle_by_value(module)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def one_thread():
    """For small batches: more threads only wait for each other, on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
