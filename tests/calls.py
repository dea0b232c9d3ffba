"""Calls of a site on small buffers, and what became of its lane.

A graph's replay is stood in for by a write to the address that a cuDNN execute was given.
"""

import contextlib
import inspect
import sys

import pytest
import torch
from flashinfer_wsfix import lanes

import arguments
import fakes
from memory import Handed

MIB = 1 << 20
# To be quick, FlashInfer's own buffers have 1 MiB here and first generations 2 MiB, where nothing else is said.
OWN, FIRST = MIB, 2 * MIB
MORE = OWN + 256  # more than FlashInfer's buffer has, less than a first generation
NAME = "bmm_fp8_workspace"
CPU, CPU_0 = torch.device("cpu"), torch.device("cpu", 0)  # one device under two keys of FlashInfer's cache
SENTINEL = b"graph\0\0\1"
SMALL = {"FLASHINFER_WSFIX_WORKSPACE_MIB": "2"}


def own(name=NAME, nbytes=OWN, device=CPU, late=False):
    """FlashInfer's own buffer of a lane, from its own function. ``late``: it was there before us, so no lane began."""
    if late:
        sys.modules["flashinfer.utils"]._cache_buf.take({(name, device): torch.zeros(nbytes, dtype=torch.uint8)})
    return sys.modules["flashinfer.utils"]._get_cache_buf(name, nbytes, device, zero_init=True)


def call(site, nbytes, tensor, **options):
    """Call a site whose plan asks for ``nbytes``; return its one execution."""
    graph = fakes.Graph(nbytes, look=options.pop("look", True), write=options.pop("write", None))
    arguments.call(site, graph, tensor, **options)
    [execution] = graph.executions
    return execution


def hand(site, nbytes, tensor, **options):
    """The same, keeping of the execution only the address that a graph would."""
    return Handed.of(call(site, nbytes, tensor, look=False, **options).workspace)


def lane(name=NAME, device=CPU):
    return lanes._lanes[name, device]


def same(one, other):
    """Whether two tensors are the same memory in the same shape."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def wrong_calls_fail_as_in_stock(site):
    """Missing, doubled and unknown arguments, and a workspace that is no tensor."""
    guarded, stock = site.live(), inspect.unwrap(site.live())
    full = [fakes.Graph(1000), *arguments.tensors(site), own()]
    wrong = [(full[:count], {}) for count in range(len(full))]
    wrong += [(full, {site.parameter: full[-1]}), (full, {"unknown": 1}), ([*full[:-1], None], {})]
    wrong += [(full[:-1], {site.parameter: None}), ([*full, None, None, None, None], {})]
    for args, kwargs in wrong:
        errors = []
        for function in (stock, guarded):
            with pytest.raises((TypeError, AttributeError)) as caught:
                function(*args, **kwargs)
            errors.append((type(caught.value), str(caught.value), caught.value.__context__))
        assert errors[0] == errors[1]


@contextlib.contextmanager
def switching_often():
    """Have threads take turns at nearly every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
