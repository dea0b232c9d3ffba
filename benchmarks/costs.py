"""What the guard costs, against the bounds that it has to stay under, on FlashInfer's real code.

``python benchmarks/costs.py [--flashinfer RELEASE] [--table]`` prints one JSON document, or a table. A CPU will do,
with what the tests need. cuDNN's graph and the capture are the tests' fakes: times are those of Python, bytes are those
that a real capture would record.
"""

import argparse
import compileall
import contextlib
import gc
import importlib
import inspect
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

MIB = 1 << 20
FLAT = (32 << 20) + 260  # bytes: the flat request of cuDNN's cuBLASLt-backed plans on SM90 and newer
LARGE = 48 * MIB  # more than the 40 MiB of a first generation, and of a FlashInfer 0.7 workspace
UPSTREAM = "0.7.4"  # the release that shows what #4666 does
HEAVY = ("torch", "flashinfer", "wrapt")


class Row(NamedTuple):
    """One line of the promise: a measured value has to be ``limit`` or less, or below it where ``strictly``."""

    name: str
    limit: float
    unit: str
    strictly: bool
    how: str


ROWS = {
    "call": Row(
        "added to a site's call, eager, no growth",
        1.5,
        "us",
        False,
        "fp8 site, workspace by position, a graph that does nothing; median difference of alternating batches",
    ),
    "share": Row(
        "added to a site's call, of a real cuDNN execute", 5, "%", False, "not measured: needs a GPU with cuDNN"
    ),
    "replay": Row(
        "added to a graph replay",
        0,
        "torch operations",
        False,
        "operations dispatched at every site of this release while capturing, guarded less stock, after one eager call",
    ),
    "zeroed": Row(
        "zeroed after warm-up, per 1,000 calls",
        0,
        "bytes",
        False,
        "random sizes up to the largest of the warm-up, over three lanes, every fourth call captured",
    ),
    "retired": Row(
        "retired / current bytes, any sequence of sizes",
        1,
        "ratio",
        True,
        "largest ratio after any step of 400 random sequences of 100 sizes, up to 64 GiB, on torch's meta device",
    ),
    "memory": Row(
        "device memory per cuDNN lane in use, over stock",
        8,
        "MiB",
        False,
        "storages of a lane that FlashInfer opened after us, after plans for nothing, 32 MiB and cuDNN's flat request",
    ),
    "start": Row(
        "start-up of a process without FlashInfer",
        1,
        "ms",
        True,
        "`import flashinfer_wsfix` against `pass`, median difference of pairs of fresh interpreters",
    ),
    "heavy": Row(
        "heavy imports in a process without FlashInfer",
        0,
        "modules",
        False,
        f"{', '.join(HEAVY)} in sys.modules after `import flashinfer_wsfix`",
    ),
    "asked": Row(
        "calls that ask the allocator, growth having failed",
        10,
        "of 1,000",
        False,
        "calls of one lane that needs 48 MiB, on a device where no growth fits",
    ),
    "share_of_import": Row(
        "activation, as a share of `import flashinfer`",
        0.5,
        "%",
        True,
        "time in the import hook, wrapt's import in it, of the whole import, torch's too; median of fresh processes",
    ),
}

# --- in a process of its own with one FlashInfer ----------------------------------------------------------------------


def import_flashinfer(release: str) -> types.ModuleType:
    """Import a release's own code, with cuDNN faked, and return its ``gemm_base``."""
    import fakes
    import releases

    sys.path.insert(0, str(releases.fetch(release)))
    sys.modules["cudnn"] = fakes.cudnn
    sys.modules["cutlass"] = None  # type: ignore[assignment]  # where installed, it asks for a GPU at import
    return importlib.import_module("flashinfer.gemm.gemm_base")


class Plan:
    """The cheapest graph there can be: it asks for ``nbytes`` and does nothing with them."""

    def __init__(self, nbytes: int = 0) -> None:
        self.nbytes = nbytes

    def get_workspace_size(self, *override: Any) -> int:
        return self.nbytes

    def get_execution_plan_count(self) -> int:
        return 1

    def execute(self, variant_pack: Any, workspace: Any, *plan: int, **kwargs: Any) -> None:
        pass

    get_workspace_size_plan_at_index = get_workspace_size
    execute_plan_at_index = execute


class Counted:
    """What torch was asked to do in this thread."""

    operations = 0
    zeroed = 0  # bytes
    allocated = 0  # bytes


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    """Count the operations that torch dispatches: under capture, each of those is a node that every replay repeats."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counted = Counted()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            counted.operations += 1
            if isinstance(result, torch.Tensor):
                counted.zeroed += result.nbytes * ("zero" in name)
                counted.allocated += result.nbytes * ("zeros" in name or "empty" in name or "resize" in name)
            return result

    with Counting():
        yield counted


def own_buffer(name: str) -> Any:
    """Return FlashInfer's own workspace of a lane, at this release's stock size."""
    import torch

    utils, gemm_base = sys.modules["flashinfer.utils"], sys.modules["flashinfer.gemm.gemm_base"]
    return utils._get_cache_buf(name, gemm_base.DEFAULT_WORKSPACE_SIZE, torch.device("cpu"), zero_init=True)


def time_calls(site: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """Time a site stock, in an empty wrapt wrapper, and guarded; microseconds per call."""
    import wrapt

    stock = inspect.unwrap(site)
    empty = wrapt.FunctionWrapper(stock, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs))
    # No dictionary by function: a wrapt proxy hashes and compares as what it wraps.
    functions, batch, rounds = (stock, empty, site), 250, 500
    times: tuple[list[float], ...] = ([], [], [])
    gc.disable()
    # Short batches in turn: whatever else the machine does meets all three alike.
    for _ in range(rounds):
        for function, found in zip(functions, times, strict=True):
            start = time.perf_counter_ns()
            for _ in range(batch):
                function(*arguments, tactic=-1)
            found.append((time.perf_counter_ns() - start) / batch / 1000)
    gc.enable()

    def added(found: list[float]) -> float:
        return statistics.median(mine - base for mine, base in zip(found, times[0], strict=True))

    return {
        "measured": added(times[2]),
        "ratio": statistics.median(times[2]) / statistics.median(times[0]),
        "stock_us": statistics.median(times[0]),
        "empty_wrapper_added_us": added(times[1]),
        "difference_of_minima_us": min(times[2]) - min(times[0]),
    }


def count_replay(sites: list[Any]) -> dict[str, Any]:
    """Capture each site, stock and guarded, and count what was recorded."""
    import arguments
    import fakes

    counts = {"stock": 0, "guarded": 0}
    for site in sites:
        given = [Plan(FLAT - 260), *arguments.tensors(site), own_buffer(f"replay of {site}")]
        for name, function in (("stock", inspect.unwrap(site.live())), ("guarded", site.live())):
            function(*given)
            with fakes.capturing(), counting() as counted:
                function(*given)
            counts[name] += counted.operations
    ratio = counts["guarded"] / counts["stock"] if counts["stock"] else None
    return {"measured": counts["guarded"] - counts["stock"], "ratio": ratio, "sites": len(sites), **counts}


def count_zeroing(site: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """Call a guarded site 1,000 times after a warm-up with the largest size."""
    from flashinfer_wsfix import workspace

    import fakes

    def made() -> int:
        return sum(buffer.numel() for lane in workspace.lanes() for buffer in lane.generations)

    draw = random.Random(0)
    buffers = [own_buffer(f"zeroed {number}") for number in range(3)]
    for buffer in buffers:
        site(Plan(), *arguments, buffer)
        site(Plan(LARGE), *arguments, buffer)
    before = made()
    with counting() as counted:
        for number in range(1000):
            with fakes.capturing() if number % 4 == 0 else contextlib.nullcontext():
                site(Plan(draw.randrange(LARGE)), *arguments, draw.choice(buffers))
    # A generation is zeroed in a thread of its own, where nothing is counted.
    return {"measured": counted.zeroed + made() - before, "growths": made() - before}


def worst_retired(seeds: int = 400, steps: int = 100) -> dict[str, Any]:
    """Grow lanes by random sizes, without memory: the lane is on torch's meta device."""
    import torch
    from flashinfer_wsfix import workspace

    worst, generations = 0.0, 0
    device = torch.device("meta")
    own = torch.empty(0, dtype=torch.uint8, device=device)
    for seed in range(seeds):
        draw = random.Random(seed)
        lane = workspace.Lane(f"seed {seed}", device)
        for _ in range(steps):
            # Sizes of every magnitude, sizes in one narrow band, and the smallest possible overflow each time.
            last = lane.generations[-1].numel() if lane.generations else 0
            size = (draw.randrange(1 << draw.randrange(1, 37)), 40 * MIB + draw.randrange(MIB), last + 1)[seed % 3]
            if last < size < 64 << 30:
                lane.buffer_for(size, own)
                *retired, current = (buffer.numel() for buffer in lane.generations)
                worst = max(worst, sum(retired) / current)
        generations = max(generations, len(lane.generations))
    return {"measured": worst, "generations_of_one_lane": generations}


def count_memory(site: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """Use one lane with the requests that plans make, and add up the memory that is held for it."""
    from flashinfer_wsfix import workspace

    own = own_buffer("mm_fp4_workspace")  # a lane's own name
    stock = own.nbytes
    for nbytes in (0, stock, FLAT):
        site(Plan(nbytes), *arguments, own)
    storages = [buffer.untyped_storage() for buffer in (own, *workspace.lane_of(own).generations)]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return {"measured": (held - stock) / MIB, "ratio": held / stock, "stock_mib": stock / MIB}


def count_asked(site: Callable[..., Any], arguments: list[Any]) -> dict[str, Any]:
    """Call a site 1,000 times with more than its lane has, and count the calls that try to make a generation."""
    from unittest import mock

    import torch
    from flashinfer_wsfix import allocation

    own = own_buffer("mm_mxfp8_workspace")
    short = mock.Mock(side_effect=torch.OutOfMemoryError("no memory"))
    asked = 0
    with mock.patch.object(allocation, "zeroed", short):
        for _ in range(1000):
            before = short.call_count
            site(Plan(LARGE), *arguments, own)
            asked += short.call_count > before
    return {"measured": asked, "asked_for": short.call_count}


def call_local_zeros(site: Callable[..., Any]) -> Callable[..., Any]:
    """Return this release's own site with its ``resize_`` replaced as in #4553: a zeroed buffer for that call."""
    grows = re.compile(r"(\w+)\.resize_\((\w+)\)")
    allocates = r"\1 = torch.zeros(\2, dtype=torch.uint8, device=\1.device)"
    source, count = grows.subn(allocates, inspect.getsource(inspect.unwrap(site)))
    assert count == 1
    namespace = dict(vars(sys.modules[site.__module__]))
    exec(source, namespace)
    made: Callable[..., Any] = namespace[site.__name__]
    return made


def compare(approach: str, site: Callable[..., Any], arguments: list[Any]) -> list[dict[str, Any]]:
    """Run plans that ask for more than FlashInfer's own workspace has, eagerly and captured."""
    import fakes

    found = []
    for request in (FLAT, LARGE):
        record: dict[str, Any] = {"approach": approach, "request_bytes": request}
        for case in ("eager, again", "captured after an eager call", "captured at first sight"):
            own = own_buffer(f"{approach} {request} {case}")
            address = own.data_ptr()
            site(Plan(), *arguments, own)
            if case != "captured at first sight":
                site(Plan(request), *arguments, own)
            error = None
            with contextlib.nullcontext() if case == "eager, again" else fakes.capturing(), counting() as counted:
                try:
                    site(Plan(request), *arguments, own)
                except Exception as raised:
                    error = type(raised).__name__
            outcome = error or ("runs" if own.data_ptr() == address else "the workspace has moved")
            record[case] = {"outcome": outcome, "zeroed_bytes": counted.zeroed, "allocated_bytes": counted.allocated}
        found.append(record)
    return found


def part_guarded(release: str) -> dict[str, Any]:
    """Everything that one process with a guarded FlashInfer can tell."""
    import_flashinfer(release)
    import flashinfer_wsfix

    import arguments
    import fakes

    with fakes.install(sys.modules["flashinfer"]):
        sites = [site for site in arguments.present() if site in arguments.SITES]
        flashinfer_wsfix.activate()  # once more, for the sites of a module that FlashInfer imports late
        (fp8,) = (site for site in sites if site.function == "execute_cudnn_gemm_fp8_graph")
        site, given = fp8.live(), arguments.tensors(fp8)
        time_own = own_buffer("time")
        return {
            "verdict": flashinfer_wsfix.status().targets[0].reason,
            "call": time_calls(site, [Plan(MIB), *given, time_own]),
            "replay": count_replay(sites),
            "zeroed": count_zeroing(site, given),
            "retired": worst_retired(),
            "memory": count_memory(site, given),
            "asked": count_asked(site, given),
            "comparison": [
                *compare(f"stock {release}", inspect.unwrap(site), given),
                *compare("#4553, call-local torch.zeros", call_local_zeros(site), given),
                *compare("flashinfer-wsfix", site, given),
            ],
        }


def part_upstream(release: str) -> dict[str, Any]:
    """What `_gemm_workspace_at_least` does, in the release that has it."""
    gemm_base = import_flashinfer(release)
    import arguments
    import fakes

    warnings.simplefilter("ignore")  # it warns at each such call
    with fakes.install(sys.modules["flashinfer"]):
        (fp8,) = (site for site in arguments.present() if site.function == "execute_cudnn_gemm_fp8_graph")
        assert hasattr(gemm_base, "_gemm_workspace_at_least")
        return {"comparison": compare(f"{release}, #4666", fp8.live(), arguments.tensors(fp8))}


def part_hook(release: str) -> dict[str, Any]:
    """Import the package before FlashInfer, and add up the time that its hook takes; % of the whole import."""
    start = time.perf_counter()
    from flashinfer_wsfix import activation

    spent, loaded = 0.0, activation._FINDER.loaded

    def timed(name: str) -> None:
        nonlocal spent
        begin = time.perf_counter()
        loaded(name)
        spent += time.perf_counter() - begin

    activation.activate("benchmark")
    spent = time.perf_counter() - start
    activation._FINDER.loaded = timed
    begin = time.perf_counter()
    import_flashinfer(release)
    whole = time.perf_counter() - begin
    return {"measured": 100 * spent / whole, "activation_ms": spent * 1e3, "import_ms": whole * 1e3}


PARTS = {"guarded": part_guarded, "upstream": part_upstream, "hook": part_hook}

# --- the parent, which starts them ------------------------------------------------------------------------------------

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_WSFIX")}
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
ENVIRONMENT |= {"FLASHINFER_WSFIX_LOG": "ERROR", "PYTHONPATH": str(ROOT)}


def run_part(part: str, release: str) -> Any:
    """Run one part in a fresh process. FlashInfer prints too: the answer is the last line."""
    command = [sys.executable, __file__, "--flashinfer", release, "--part", part]
    done = subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def median_part(part: str, release: str, processes: int) -> dict[str, Any]:
    runs = [run_part(part, release) for _ in range(processes)]
    return {
        "processes": processes,
        **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
        "least": min(run["measured"] for run in runs),
    }


def time_start(pairs: int = 100) -> dict[str, Any]:
    """Start interpreters in pairs, one bare and one with our import line."""

    def start(line: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", line], env=ENVIRONMENT, check=True)
        return (time.perf_counter() - begin) * 1e3

    start("import flashinfer_wsfix")
    times = [(start("pass"), start("import flashinfer_wsfix")) for _ in range(pairs)]
    command = [sys.executable, "-X", "importtime", "-c", "import flashinfer_wsfix"]
    imports = []
    for _ in range(9):
        report = subprocess.run(command, env=ENVIRONMENT, check=True, stderr=subprocess.PIPE, text=True).stderr
        imports.append(int(report.splitlines()[-1].split("|")[1]) / 1e3)
    bare = statistics.median(first for first, _ in times)
    added = statistics.median(second - first for first, second in times)
    return {
        "measured": added,
        "ratio": (bare + added) / bare,
        "bare_ms": bare,
        "importtime_ms": statistics.median(imports),
        "pairs": pairs,
    }


def count_heavy() -> dict[str, Any]:
    line = "import sys; before = set(sys.modules); import flashinfer_wsfix; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", line], env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True)
    modules = done.stdout.split()
    return {"measured": len(set(HEAVY) & set(modules)), "imported": modules}


def measure(release: str) -> dict[str, Any]:
    """Measure every row; release names a FlashInfer that needs the guard."""
    # As an install leaves it: bytecode is there, and no start pays for compiling.
    compileall.compile_dir(ROOT / "flashinfer_wsfix", quiet=1)
    guarded, upstream = run_part("guarded", release), run_part("upstream", UPSTREAM)
    found: dict[str, Any] = {
        **{key: guarded[key] for key in ("call", "replay", "zeroed", "retired", "memory", "asked")},
        "share": {"measured": None},
        "start": time_start(),
        "heavy": count_heavy(),
        "share_of_import": median_part("hook", release, 5),
    }
    rows = []
    for key, row in ROWS.items():
        value, detail = found[key].pop("measured"), found[key]
        within = None if value is None else value < row.limit or (value == row.limit and not row.strictly)
        bound = f"{'<' if row.strictly else '<='} {row.limit:g}"
        ratio = detail.pop("ratio", None)
        rows.append({
            "name": row.name, "bound": bound, "unit": row.unit, "measured": value, "within": within,
            "ratio_to_stock": ratio, "how": row.how, "detail": detail,
        })  # fmt: skip
    return {
        "flashinfer": release,
        "python": sys.version.split()[0],
        "verdict": guarded["verdict"],
        "rows": rows,
        "comparison": [*guarded["comparison"], *upstream["comparison"]],
    }


def as_table(document: dict[str, Any]) -> str:
    """The same for reading: each bound beside what was measured."""
    lines = [document["verdict"], "", f"{'what':50} {'bound':>6} {'measured':>9} {'unit':16} {'within':6} ratio"]
    for row in document["rows"]:
        value = "-" if row["measured"] is None else f"{row['measured']:.4g}"
        within = {None: "-", True: "yes", False: "NO"}[row["within"]]
        ratio = "" if row["ratio_to_stock"] is None else f"{row['ratio_to_stock']:.2f}"
        lines.append(f"{row['name']:50} {row['bound']:>6} {value:>9} {row['unit']:16} {within:6} {ratio}")
    lines += ["", f"{'a plan asks for more':30} {'request':>10}  {'when':30} {'zeroed':>10} {'allocated':>10}  outcome"]
    for record in document["comparison"]:
        for case, result in record.items():
            if isinstance(result, dict):
                lines.append(
                    f"{record['approach']:30} {record['request_bytes']:>10}  {case:30} {result['zeroed_bytes']:>10}"
                    f" {result['allocated_bytes']:>10}  {result['outcome']}"
                )
    lines += ["", "Bytes are those of one call; what is captured happens again at every replay."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flashinfer", metavar="RELEASE", default="0.6.18.post1", help="a release that is affected")
    parser.add_argument("--table", action="store_true", help="a text table in place of JSON")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options.flashinfer)))
        return
    document = measure(options.flashinfer)
    print(as_table(document) if options.table else json.dumps(document, indent=2))


if __name__ == "__main__":
    main()
