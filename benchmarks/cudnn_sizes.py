"""What real cuDNN's plans ask for on FlashInfer's own graphs, by GPU and cuDNN version, against what a workspace has.

``tox -q run -e cudnn -- python benchmarks/cudnn_sizes.py [--minutes M] [--table] [--svg FILE]`` prints one JSON
document, or a table, and draws it. No GPU is needed: cuDNN is told of one. M minutes are spent, on as many graphs as
that allows: few on the newest cuDNN, which compiles each plan that it builds.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "real_cudnn"), str(ROOT / "tests"), str(ROOT)]

import backends  # noqa: E402
from gpus import GPUS, Gpu  # noqa: E402

MIB = 1 << 20
KINDS = ("fp4", "mxfp8", "fp8", "bf16", "bf16_fp4")  # those of FlashInfer's sites, the fewest plans first

# Rows of a batch, and the weights of language models from 2,048 wide to a vocabulary of 151,936; then batched ones.
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
WEIGHTS = (
    (2048, 2048), (4096, 4096), (6144, 4096), (8192, 8192), (14336, 4096), (4096, 14336), (5120, 25600),
    (28672, 8192), (8192, 28672), (151936, 4096),
)  # fmt: skip
BATCHED = ((512, 2048), (2048, 2048), (4096, 4096))


def shapes() -> list[tuple[int, int, int, int]]:
    """List M, N, K and batch of every shape, in an order that is mixed and always the same."""
    listed = [(m, n, k, 1) for m, (n, k) in itertools.product(ROWS, WEIGHTS)]
    listed += [(m, n, k, batch) for batch, m, (n, k) in itertools.product((8, 64), ROWS[::3], BATCHED)]
    random.Random(0).shuffle(listed)
    return listed


def read(minutes: float) -> dict[str, Any]:
    """Build graphs on the cuDNN of this process until the time is over; return what their plans ask for, by GPU."""
    import builders

    stock = builders.gemm_base.DEFAULT_WORKSPACE_SIZE
    rows: dict[str, dict[str, Any]] = {
        gpu.name: {"engine_0": set(), "graphs": 0, "default_over_stock": 0, "plans": 0, "over_stock": 0, "other": 0}
        for gpu in GPUS
    }
    deadline = time.monotonic() + 60 * minutes
    for gpu, kind in itertools.product(GPUS, builders.CUBLASLT):
        with builders.on(gpu):
            graph = builders.PLAIN[kind](builders.Shape(16, 4096, 4096), builders.ENGINE_0)
        rows[gpu.name]["engine_0"].add(graph.get_workspace_size())
    for shape, kind, gpu in itertools.product(shapes(), KINDS, GPUS):
        if time.monotonic() > deadline:
            break
        with builders.on(gpu):
            try:
                plans = builders.plans(builders.PLAIN[kind](builders.Shape(*shape), builders.ALL))
            except builders.cudnn.cudnnGraphNotSupportedError:
                continue
        row = rows[gpu.name]
        row["graphs"] += 1
        row["default_over_stock"] += plans[0].nbytes > stock
        row["plans"] += len(plans)
        row["over_stock"] += sum(plan.nbytes > stock for plan in plans)
        row["engine_0"] |= {plan.nbytes for plan in plans if plan.engine == "eng0"}
        row["other"] = max([row["other"], *(plan.nbytes for plan in plans if plan.engine != "eng0")])
    for row in rows.values():
        row["engine_0"] = sorted(row["engine_0"])
    return {"cudnn": builders.cudnn.backend_version(), "stock": stock, "gpus": rows}


def measure(minutes: float) -> dict[str, Any]:
    """Read both versions, each in a process of its own."""
    backends.prepare()

    def child(version: str) -> Any:
        command = [sys.executable, __file__, "--read", str(minutes)]
        done = subprocess.run(command, env=backends.environment(version), capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"cuDNN {version} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(2) as pool:
        versions = dict(zip(backends.VERSIONS, pool.map(child, backends.VERSIONS), strict=True))
    return {"flashinfer": backends.FLASHINFER, "frontend": backends.FRONTEND, "versions": versions}


def short(version: str) -> str:
    """9.20.0.48 is known as 9.20, and 9.23.2.1 as 9.23.2."""
    return version.rpartition(".")[0].removesuffix(".0")


class Row:
    """One GPU's line: what was read of all versions together."""

    def __init__(self, result: dict[str, Any], gpu: Gpu) -> None:
        rows = {version: each["gpus"][gpu.name] for version, each in result["versions"].items()}
        self.engine_0 = sorted({nbytes for row in rows.values() for nbytes in row["engine_0"]})
        self.other = {version: row["other"] for version, row in rows.items()}
        self.read = {version: row["plans"] for version, row in rows.items()}
        self.over_stock = sum(row["over_stock"] for row in rows.values())
        self.largest = max([*self.engine_0, *self.other.values()])


def table(result: dict[str, Any]) -> Iterator[str]:
    """Format the result: a row for each GPU, in bytes, and a line for each version below."""
    stock, first = stock_of(result), backends.first_generation()
    heads = ["GPU", "SM", "engine 0 asks for"]
    heads += [f"largest other (plans), cuDNN {short(version)}" for version in result["versions"]]
    heads += [f"over {stock // MIB} MiB", f"over {first // MIB} MiB"]
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join(['---'] * len(heads))} |"
    for gpu in GPUS:
        row = Row(result, gpu)
        over = f"{row.over_stock:,} of {sum(row.read.values()):,}"
        if row.over_stock:
            over += ", all engine 0" if max(row.other.values()) <= stock else ", NOT ALL engine 0"
        cells = [gpu.name, str(gpu.sm), " or ".join(f"{nbytes:,}" for nbytes in row.engine_0)]
        cells += [
            f"{nbytes:,} ({row.read[version]:,})" if row.read[version] else "-" for version, nbytes in row.other.items()
        ]
        cells += [over, "none" if row.largest <= first else "YES"]
        yield f"| {' | '.join(cells)} |"
    yield ""
    for version, each in result["versions"].items():
        rows = each["gpus"].values()
        graphs, plans, default = (sum(row[name] for row in rows) for name in ("graphs", "plans", "default_over_stock"))
        yield (
            f"cuDNN {short(version)}: {plans:,} plans of {graphs:,} graphs of FlashInfer {result['flashinfer']};"
            f" {default:,} graphs ask for more than {stock // MIB} MiB by default"
        )


def stock_of(result: dict[str, Any]) -> int:
    return int(next(iter(result["versions"].values()))["stock"])


# --- the picture ------------------------------------------------------------------------------------------------------

LEFT, PER_MIB, LINE, TOP = 172, 9, 30, 84  # pixels: where 0 is, a MiB's width, a row's height, where the rows start


def picture(result: dict[str, Any]) -> Iterator[str]:
    """Draw the result: for each GPU a bar up to the largest of the other plans, and a dot where engine 0 is."""
    from picture import STYLE, text

    stock, first = stock_of(result), backends.first_generation()
    width, height = LEFT + 44 * PER_MIB + 240, TOP + len(GPUS) * LINE + 46
    names = " and ".join(f"{nbytes // MIB} MiB" for nbytes in (stock, first))
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    yield f' role="img" aria-label="What cuDNN\'s plans ask for, by GPU, against {names}."><style>{STYLE}</style>'
    yield f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" class="paper"/>'
    versions = ", ".join(short(version) for version in result["versions"])
    yield text(16, 28, f"Workspace that cuDNN's plans ask for (cuDNN {versions}; FlashInfer {result['flashinfer']})")
    for nbytes, whose, kind, anchor in ((stock, "stock", "bad", -6), (first, "guarded", "good", 6)):
        x = LEFT + nbytes / MIB * PER_MIB
        yield f'<line x1="{x}" x2="{x}" y1="{TOP - 18}" y2="{height - 40}" class="line"/>'
        words = text(x + anchor, TOP - 22, f"{whose}: {nbytes // MIB} MiB", kind)
        yield words.replace("<text", '<text text-anchor="end"') if anchor < 0 else words
    for number, gpu in enumerate(GPUS):
        row, y = Row(result, gpu), TOP + number * LINE
        yield text(16, y + 15, f"{gpu.name}")
        yield text(LEFT - 54, y + 15, f"SM{gpu.sm}", "dim")
        bar = max(row.other.values()) / MIB * PER_MIB
        yield f'<rect x="{LEFT}" y="{y + 3}" width="{max(bar, 1):.1f}" height="16" rx="3" class="kept"/>'
        over = row.engine_0[-1] > stock
        x = LEFT + row.engine_0[-1] / MIB * PER_MIB
        yield f'<circle cx="{x:.1f}" cy="{y + 11}" r="5" class="{"bad" if over else "good"}"/>'
        asked = " or ".join(f"{nbytes:,}" for nbytes in row.engine_0)
        yield text(LEFT + 44 * PER_MIB, y + 15, f"{asked} B", "bad" if over else "dim")
    y = height - 18
    yield f'<circle cx="22" cy="{y - 4}" r="5" class="bad"/>'
    yield text(34, y, "engine 0, the default from SM90 on", "dim")
    yield f'<rect x="{LEFT + 150}" y="{y - 12}" width="14" height="14" rx="3" class="kept"/>'
    yield text(LEFT + 172, y, "largest other plan", "dim")
    yield text(LEFT + 44 * PER_MIB, y, f"stock has {stock:,} B", "dim")
    yield "</svg>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4, help="of reading (default: 4)")
    parser.add_argument("--table", action="store_true", help="print a table")
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw it into this file")
    parser.add_argument("--read", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read is not None:
        print(json.dumps(read(options.read)))
        return
    result = measure(options.minutes)
    print("\n".join(table(result)) if options.table else json.dumps(result, indent=2))
    if options.svg:
        options.svg.write_text("\n".join(picture(result)) + "\n")


if __name__ == "__main__":
    main()
