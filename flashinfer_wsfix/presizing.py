"""Make lanes ahead of capture."""

import logging
import sys
from collections.abc import Iterable

import torch

from . import report, state
from .allocation import is_capturing
from .importer import is_complete
from .lanes import lane
from .names import GEMM_BASE, UTILS
from .sites import LANES


def presize(
    device: torch.device | str | int | None = None,
    nbytes: int | None = None,
    lanes: Iterable[str] | None = None,
) -> None:
    """Make the first generation of lanes ahead of capture.

    ``device``: the CUDA device; None, or a process without CUDA, is a no-op. ``nbytes``: bytes for each lane; None
    means what ``FLASHINFER_WSFIX_WORKSPACE_MIB`` says. ``lanes``: names of lanes, such as "bmm_fp8_workspace"; None
    means all that FlashInfer's sites use. A lane that is large enough is left alone.

    FlashInfer's own buffer of each lane is made too, zeroed and at its stock size, where it does not exist yet. Before
    FlashInfer is imported, and while the current stream is capturing, nothing is done but a warning. Raises ValueError
    for an unknown lane or a negative size, and torch.OutOfMemoryError where memory runs out.
    """
    if device is None or not torch.cuda.is_available():
        return
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    names = list(LANES if lanes is None else lanes)
    for name in names:
        if name not in LANES:
            raise ValueError(f"FlashInfer has no workspace {name!r}; the lanes are {', '.join(LANES)}")
    if nbytes is not None and nbytes < 0:
        raise ValueError(f"a workspace cannot have {nbytes} bytes")
    problem = "FlashInfer is not imported yet. Import it first"
    if is_complete(UTILS) and is_complete(GEMM_BASE):
        problem = "a CUDA graph is being captured. Call it before the first capture" if is_capturing(where) else ""
    if problem:
        return report.once(logging.WARNING, problem, f"presize() did nothing: {problem}.")
    utils, size = sys.modules[UTILS], state.first_bytes if nbytes is None else nbytes
    for name in names:
        own: torch.Tensor | None = utils._cache_buf.get((name, where))
        stock = sys.modules[GEMM_BASE].DEFAULT_WORKSPACE_SIZE if own is None else own.numel()
        if size and report.verdict_of("flashinfer").state == "guarded":
            # Before FlashInfer's own buffer, which becomes the beginning of it.
            found = lane(name, where)
            found.high_water = max(found.high_water, nbytes or 0)
            found.grow(max(size, stock))
        if own is None:
            # By position: the size's parameter is `bytes` up to 0.6.x and `num_bytes` from 0.7.0 on, and `zero_init`,
            # which would make no difference to a lane of ours, is not there up to 0.5.3.
            made = utils._get_cache_buf(name, stock, where)
            if "resize_" not in vars(made):  # a lane's own was born zeroed, and may be in use
                made.zero_()
