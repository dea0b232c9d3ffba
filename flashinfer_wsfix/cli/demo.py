"""``flashinfer-wsfix demo``: the real crash and the real fix, on the installed FlashInfer's own code.

Two child processes take the same steps, one on FlashInfer's stock code (``FLASHINFER_WSFIX=0``) and one guarded. Each
calls a real site on the real cached workspace, keeps the address that ``execute`` was given as a CUDA graph would, has
the next plan ask for 256 B more, and replays the graph's write. On a CPU the stock child dies there, since glibc unmaps
a freed block of 32 MiB. The guarded child then asks for 64 MiB, so that its lane has to grow, and replays once more.
Only cuDNN's graph object and handle are stand-ins, and on a CPU the stream.

On a CUDA device the write is captured in a real ``torch.cuda.CUDAGraph``, and a tensor of another owner takes the freed
block: the stock child's replay overwrites it. That part has not been run on a GPU yet.

``--json`` prints one object::

    {"flashinfer": "0.6.18.post1", "device": "cpu",     both null where no child ran
     "shown": true, "sentence": "...",                  what was seen, or why there is nothing to see
     "children": {"stock": CHILD, "guarded": CHILD}}    empty where no child ran

    CHILD: {"state": "guarded", "reason": "...",        the child's own verdict on its FlashInfer
            "steps": [CALL, REPLAY, CALL, REPLAY],      as far as it came
            "ended": "lived",                           or "SIGSEGV", "overwrote another tensor", "failed"
            "log": ["..."]}                             its standard error, line by line
    CALL:   {"step": "captured" or "grown", "asked": bytes that the plan asks for,
             "address": and "nbytes": of what execute was given, "moved": the address is not that of the last call,
             "zeroed": all zeros when the address was first seen, null where it had been seen before,
             "generation": of the lane, null in the stock child}
    REPLAY: {"step": "replayed", "asked": bytes written, "address": where, "survived": false where that did harm}
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

from .. import activate, report, settings
from ..names import GEMM_BASE, UTILS
from ..settings import MIB, PREFIX
from . import say
from .installed import read_flashinfer

SITE = "execute_cudnn_gemm_fp8_graph"
LANE = "bmm_fp8_workspace"
CAPTURED = 32 * MIB
GROWN = (CAPTURED + 256, 64 * MIB)
LEFT_OVER = 0x5A  # what a kernel leaves in its workspace
SENTINEL = 0xA5  # what fills the tensor of the other owner

HARMED = 3  # exit code of a child whose replay overwrote the other tensor
OVERWROTE = "overwrote another tensor"
TO_SEE = "To see it, run the one-line demo of the README, which brings an affected FlashInfer of its own."
# The parent's own search path: the child finds the same FlashInfer, whatever folder it is started in.
CHILD = f"import sys; sys.path[:] = sys.argv[1:]; from {__name__} import take_steps; take_steps()"


def run(as_json: bool) -> int:
    """Show the crash and the fix, as text or as JSON, and return the exit code.

    0: the stock child came to harm and the guarded one did not, or this FlashInfer is not affected. 1: anything else,
    such as no FlashInfer, no torch, a child that did not start, or a guarded child that is not guarded.
    """
    result: dict[str, Any] = {"flashinfer": None, "device": None, "shown": False, "sentence": "", "children": {}}
    verdict, _ = read_flashinfer()
    code = 1
    if verdict is None:
        result["sentence"] = f"FlashInfer is not installed for {sys.executable}, so nothing can be shown. {TO_SEE}"
    elif verdict.state != "guarded":
        result["sentence"] = f"Nothing to show: {verdict.reason}. {TO_SEE}"
        code = int(verdict.state == "unsupported")
    elif find_spec("torch") is None:
        result["sentence"] = f"PyTorch is not installed for {sys.executable}: install it to see the demo"
    else:
        stock = _watch({**os.environ, PREFIX: "0"})
        guarded = _watch(dict(os.environ))  # with the user's own settings: switched off, it has to crash
        for key in ("flashinfer", "device"):
            result[key] = stock.pop(key, None) and guarded.pop(key, None)
        result["children"] = {"stock": stock, "guarded": guarded}
        result["shown"], result["sentence"] = _conclude(stock, guarded)
        if not result["shown"] and settings.read()[0].mode != "on":
            result["sentence"] += f" {PREFIX}={os.environ[PREFIX]} is set: unset it to see the guard."
        code = int(not result["shown"])
    if as_json:
        say(json.dumps(result, indent=2))
    else:
        say("\n".join(draw(result, sys.stdout.isatty() and not os.environ.get("NO_COLOR"))))
    return code


def _watch(environment: dict[str, str]) -> dict[str, Any]:
    """Run the steps in a child and return what it told (CHILD in the module's docstring), however it ended."""
    command = [sys.executable, "-c", CHILD, *sys.path]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, errors="replace")
    child: dict[str, Any] = {"state": None, "reason": None, "steps": []}
    for line in done.stdout.splitlines():
        if not line.startswith("{"):  # a start-up file of somebody's printed it
            continue
        record = json.loads(line)
        if "step" in record:
            child["steps"].append(record)
        elif "survived" in record:
            child["steps"][-1].update(record)
        else:
            child.update(record)
    if done.returncode < 0:
        child["ended"] = signal.Signals(-done.returncode).name
    else:
        child["ended"] = {0: "lived", HARMED: OVERWROTE}.get(done.returncode, "failed")
    child["log"] = done.stderr.splitlines()
    return child


def _conclude(stock: dict[str, Any], guarded: dict[str, Any]) -> tuple[bool, str]:
    """Say whether the children showed the defect and the fix, and what was seen. A crash elsewhere shows nothing."""
    if any(step.get("survived") for step in stock["steps"]):
        return False, (
            "NOT shown: the stock child's replay wrote to freed memory and was not caught at once. On a CPU that takes"
            " glibc's own allocator: run the demo without LD_PRELOAD and without MALLOC_ variables."
        )
    for name, child in (("stock", stock), ("guarded", guarded)):
        if not _harmed(child) and child["ended"] != "lived":
            said = child["log"][-1].strip() if child["log"] else "it said nothing"
            return False, f"NOT shown: the {name} child could not take the steps ({child['ended']}: {said})."
    if _harmed(guarded):
        return False, f"NOT shown: the child that should be guarded came to harm as well: {guarded['reason']}."
    end = OVERWROTE if stock["ended"] == OVERWROTE else f"died of {stock['ended']}"
    return True, (
        "Stock: a plan that asked for 256 B more moved the workspace, and the replay wrote to the freed 32 MiB and"
        f" {end}. Guarded: nothing was freed, and both replays wrote to memory that is still the graph's."
    )


def _harmed(child: dict[str, Any]) -> bool:
    """Say whether it was in a replay that the child came to harm."""
    caught = child["ended"] in ("SIGSEGV", "SIGBUS", OVERWROTE)
    return caught and bool(child["steps"]) and child["steps"][-1].get("survived") is False


# --- the picture ------------------------------------------------------------------------------------------------------

WIDTH = 79
LEFT, COLUMN = 22, 28
RED, GREEN, PLAIN = "\033[31m", "\033[32m", "\033[0m"


def draw(result: dict[str, Any], colour: bool = False) -> list[str]:
    """Draw what ``--json`` prints as lines of at most 79 characters: the two children's timelines side by side."""
    children = list(result["children"].values())
    rows: list[tuple[str, ...]] = []
    for step, *others in zip_longest(*(child["steps"] for child in children)):
        known = step or others[0]
        verb = "writes" if known["step"] == "replayed" else "asks"
        labels = (known["step"], f"  {verb} {known['asked']:,} B", "")
        rows += zip(labels, *(_cells(each) for each in (step, *others)), strict=True)
    lines = []
    if rows:
        lines += [f"FlashInfer {result['flashinfer']}, {SITE}, on {result['device']}", ""]
        rows = [("", "STOCK", "GUARDED"), *rows, ("ended", *(_ended(child["ended"]) for child in children))]
        for label, *cells in rows:
            lines.append((f"{label:{LEFT}}" + "".join(_painted(cell, colour) for cell in cells)).rstrip())
        lines.append("")
    lines += textwrap.wrap(result["sentence"], WIDTH, break_on_hyphens=False, break_long_words=False)
    if children and not result["shown"]:
        blamed = next((child for child in children if not child["steps"]), children[-1])
        for line in blamed["log"]:
            lines += textwrap.wrap(line, WIDTH, initial_indent="> ", subsequent_indent="  ")
    return lines


def _cells(step: dict[str, Any] | None) -> tuple[str, str, str]:
    """Draw one step of one child in three lines, all empty where it did not come so far."""
    if step is None:
        return "", "", ""
    address = f"{step['address']:#x}"
    if step["step"] == "replayed":
        return (f"o to {address}", "| survived", "|") if step["survived"] else (f"X to {address}", "X freed memory", "")
    where = f" generation {step['generation']}" if step["generation"] else " moved" if step["moved"] else ""
    zeroed = {True: ", zeroed", False: ", not zeroed", None: ""}[step["zeroed"]]
    return f"o {address}{where}", f"| {step['nbytes']:,} B{zeroed}", "|"


def _ended(ended: str) -> str:
    return {"lived": "= alive", "failed": "X failed", OVERWROTE: f"X {OVERWROTE}"}.get(ended, f"X killed by {ended}")


def _painted(cell: str, colour: bool) -> str:
    paint = {"X": RED, "=": GREEN}.get(cell[:1]) if colour else None
    padding = " " * (COLUMN - len(cell))
    return f"{paint}{cell}{PLAIN}{padding}" if paint else cell + padding


# --- in the child -----------------------------------------------------------------------------------------------------


class _Graph:
    """cuDNN's graph object, as far as the site sees it: its plan asks for ``asked`` bytes and writes to all of them."""

    def __init__(self) -> None:
        self.asked = 0
        self.call: dict[str, Any] = {}  # the last one, as it is told
        self.seen: set[int] = set()

    def get_execution_plan_count(self) -> int:
        return 1

    def get_workspace_size(self) -> int:
        return self.asked

    def execute(self, variant_pack: object, workspace: Any, handle: object) -> None:
        address, before = workspace.data_ptr(), self.call.get("address")
        self.call = {
            "asked": self.asked,
            "address": address,
            "nbytes": workspace.numel(),
            "moved": before not in (None, address),
            "zeroed": None if address in self.seen else not workspace.any(),
        }
        self.seen.add(address)
        workspace[: self.asked].fill_(LEFT_OVER)


def take_steps() -> None:
    """Take the steps in this process, which may kill it, and tell each as a line of JSON on standard output."""
    import ctypes
    import resource
    from importlib import import_module

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what FlashInfer prints goes to the log

    def tell(**record: object) -> None:
        print(json.dumps(record), file=told)

    activate("demo")
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    if not on_gpu:
        sys.modules["cutlass"] = None  # type: ignore[assignment]  # where installed, it asks for a GPU at import
        torch.cuda.current_stream = lambda device=None: None
    flashinfer, gemm_base = import_module("flashinfer"), import_module(GEMM_BASE)
    gemm_base._get_cudnn_handle = lambda device, stream: None  # type: ignore[attr-defined]
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # tvm-ffi's handler and Python's print a backtrace
    verdict = report.verdict_of("flashinfer")
    tell(flashinfer=flashinfer.__version__, device=str(device), state=verdict.state, reason=verdict.reason)

    workspace = import_module(UTILS)._get_cache_buf(LANE, gemm_base.DEFAULT_WORKSPACE_SIZE, device)
    matrix = torch.zeros(1, 1, 1, device=device)
    graph = _Graph()

    def call(asked: int) -> dict[str, Any]:
        graph.asked = asked
        getattr(gemm_base, SITE)(graph, matrix, matrix, matrix, matrix, matrix, workspace)
        generation = next((lane.generation for lane in report.status().lanes if lane.name == LANE), None)
        return {**graph.call, "generation": generation}

    first = call(CAPTURED)
    if on_gpu:  # captured after an eager call, as vLLM and SGLang do
        cuda_graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(cuda_graph):
            first["address"] = call(CAPTURED)["address"]
    tell(step="captured", **first)
    for asked in GROWN:
        tell(step="grown", **call(asked))
        tell(step="replayed", asked=CAPTURED, address=first["address"], survived=False)  # as it stays if we die now
        if on_gpu:
            other = torch.full((CAPTURED,), SENTINEL, dtype=torch.uint8, device=device)  # takes a block that was freed
            cuda_graph.replay()
            torch.cuda.synchronize()
            if (other != SENTINEL).any():
                sys.exit(HARMED)
        else:
            ctypes.memset(first["address"], LEFT_OVER, CAPTURED)
        tell(survived=True)
