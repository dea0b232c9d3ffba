"""What the tests on FlashInfer's real code share."""

import pytest
import torch


@pytest.fixture
def dirty_memory():
    """What torch.empty() returns is full of ones, as memory that was in use before may be.

    `use_deterministic_algorithms()` does the same and imports torch's compiler, which takes seconds.
    """
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture
def fp8(sites):
    """One site, for what does not differ between them."""
    return next(site for site in sites if site.kind == "fp8")
