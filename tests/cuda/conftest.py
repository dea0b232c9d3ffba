"""Left out of any other run than that of `tests/cuda/run.py`, which brings the simulated runtime."""

import gc
import os
import sys
from importlib import import_module
from unittest import mock

import pytest
import torch

collect_ignore_glob = [] if "FAKECUDA_CC" in os.environ else ["test_*.py"]

if not collect_ignore_glob:
    sys.modules["cutlass"] = None  # type: ignore[assignment]  # where installed, it wants more of a GPU than there is
    # As on a machine without a GPU: each question is asked in a fork of this process, and CUDA outlives none.
    with mock.patch.multiple("torch.cuda", is_available=lambda: False, device_count=lambda: 0):
        import_module("flashinfer.gemm.gemm_base")
    assert not torch.cuda.is_initialized()
    gc.freeze()  # a capture collects garbage: in a fork, that would copy all that was imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--walks", type=int, default=8, metavar="N", help="how many random walks to take")
