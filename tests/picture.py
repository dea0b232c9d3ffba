"""Draw the README's picture from the demo's own JSON.

``flashinfer-wsfix demo --json > demo.json; python tests/picture.py demo.json > demo.svg``
"""

import json
import sys
from html import escape

# The picture brings its own background: a page may be dark where the reader's system is light.
STYLE = """
svg { color-scheme: light dark; font: 12.5px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.paper { fill: #ffffff; stroke: #d0d7de; } text { fill: #1f2328; } .dim { fill: #59636e; } .line { stroke: #d0d7de; }
.now { fill: #b6d4fe; stroke: #0969da; } .kept { fill: #eaeef2; stroke: #59636e; }
.gone { fill: none; stroke: #cf222e; stroke-dasharray: 4 3; }
.bad { fill: #cf222e; font-weight: bold; } .good { fill: #1a7f37; font-weight: bold; }
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117; stroke: #3d444d; } text { fill: #f0f6fc; } .dim { fill: #9198a1; } .line { stroke: #3d444d; }
.now { fill: #12427d; stroke: #4493f8; } .kept { fill: #262c36; stroke: #9198a1; } .gone { stroke: #f85149; }
.bad { fill: #f85149; } .good { fill: #3fb950; }
}
"""
LABELS, CHILD, ROW, TOP = 180, 325, 76, 78  # pixels: two columns' widths, a row's height, where the rows start
BUFFERS = (0, 130)  # where a child's buffers stand in its column
PER_MIB = 1.75
CLASSES = {"now": "in use", "kept": "retired, kept", "gone": "freed"}


def text(x, y, words, kind=""):
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def box(x, y, nbytes, kind):
    return f'<rect x="{x}" y="{y}" width="{nbytes / 2**20 * PER_MIB:.0f}" height="22" rx="3" class="{kind}"/>'


def child(x, steps, ended):
    """Draw one child's rows: the buffers that it has had so far, and what became of each replay."""
    buffers = {}  # by address: [bytes, what it is now]
    for number, step in enumerate(steps):
        y = TOP + number * ROW
        address = step["address"]
        if address not in buffers:
            for old in buffers.values():
                old[1] = "gone" if step["generation"] is None else "kept"
            buffers[address] = [step["nbytes"], "now"]
        for place, (where, (nbytes, kind)) in zip(BUFFERS, buffers.items(), strict=False):
            yield box(x + place, y, nbytes, kind)
            if where == address:
                yield text(x + place, y + 38, f"{where:#x}")
        place = x + BUFFERS[list(buffers).index(address)]
        if step["step"] == "replayed":
            yield text(
                place, y + 55, "written, survived" if step["survived"] else ended, "good" if step["survived"] else "bad"
            )
        else:
            zeroed = {True: ", zeroed", False: ", not zeroed", None: ""}[step["zeroed"]]
            yield text(place, y + 55, f"{step['nbytes']:,} B{zeroed}", "dim")


def picture(result):
    """Return the SVG for what ``demo --json`` printed."""
    children = result["children"]
    longest = max((each["steps"] for each in children.values()), key=len)
    width, height = LABELS + 2 * CHILD, TOP + len(longest) * ROW + 30
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    yield f' role="img" aria-label="{escape(result["sentence"])}"><style>{STYLE}</style>'
    yield f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" class="paper"/>'
    yield text(16, 28, f"FlashInfer {result['flashinfer']}, fp8 GEMM workspace, on {result['device']}")
    for number, (name, each) in enumerate(children.items()):
        x = LABELS + number * CHILD
        yield text(x, 58, f"{name}: {'alive' if each['ended'] == 'lived' else each['ended']}",
                   "good" if each["ended"] == "lived" else "bad")  # fmt: skip
        yield from child(x, each["steps"], each["ended"])
    for number, step in enumerate(longest):
        y = TOP + number * ROW
        yield f'<line x1="16" x2="{width - 16}" y1="{y - 9}" y2="{y - 9}" class="line"/>'
        yield text(
            16,
            y + 16,
            {"captured": "graph captured", "replayed": "graph replayed"}.get(step["step"], "plan wants more"),
        )
        yield text(16, y + 38, f"{'writes' if step['step'] == 'replayed' else 'asks'} {step['asked']:,} B", "dim")
    for number, (kind, meaning) in enumerate(CLASSES.items()):
        x = LABELS + number * 165
        yield f'<rect x="{x}" y="{height - 25}" width="14" height="12" rx="2" class="{kind}"/>'
        yield text(x + 22, height - 14, meaning, "dim")
    yield "</svg>"


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print("\n".join(picture(json.load(file))))
