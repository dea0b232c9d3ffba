"""Draw what a lane costs in device memory, from what FlashInfer's real code and the guard hold after the same calls.

``python benchmarks/pictures.py > docs/lane.svg``, with what the tests need: tensors are on the CPU, cuDNN's graph is a
fake that asks for what real plans ask for. ``python benchmarks/pictures.py CASE`` prints the bytes of one case.
"""

import json
import subprocess
import sys
from html import escape
from pathlib import Path

import costs  # puts the repository and its tests on the import path

import picture

RELEASE = "0.6.18.post1"
LANE = "bmm_fp8_workspace"
# What plans ask for, in order: little, cuDNN's flat request, and more than any plan of cuDNN's that was seen.
STEPS = {"first use": 1 << 20, "cuDNN's flat request": costs.FLAT, "a plan of 48 MiB": costs.LARGE}
CASES = {
    "stock": "stock FlashInfer",
    "guarded": "guarded",
    "late": "guarded late: FlashInfer had made its buffer",
}
KINDS = {"now": "in use", "kept": "kept for graphs", "gone": "freed, under captured graphs"}

WIDTH, LEFT, TOP, ROW, GAP = 860, 200, 62, 30, 34  # pixels
PER_MIB = 4


def measure(case: str) -> list[dict[str, int]]:
    """Return, after each step, the bytes of a lane that are in use, kept, and freed so far, each storage once."""
    costs.import_flashinfer(RELEASE)
    import flashinfer_wsfix.workspace as workspace
    from flashinfer_wsfix import activate, deactivate

    import arguments
    import fakes

    deactivate()  # importing the package is a route, too
    if case == "guarded":
        activate()
    own = costs.own_buffer(LANE)
    if case == "late":
        activate()
    (site,) = (site for site in arguments.SITES if site.function == "execute_cudnn_gemm_fp8_graph")
    seen, found = {}, []
    with fakes.install(sys.modules["flashinfer"]):
        for nbytes in STEPS.values():
            storages = [own.untyped_storage()]
            seen[storages[0].data_ptr()] = storages[0].nbytes()
            site.live()(costs.Plan(nbytes), *arguments.tensors(site), own)
            generations = workspace.lane_of(own).generations if case != "stock" else []
            storages = [tensor.untyped_storage() for tensor in (own, *generations)]
            held = {storage.data_ptr(): storage.nbytes() for storage in storages}
            now = storages[-1].nbytes()
            gone = sum(size for address, size in seen.items() if address not in held)
            found.append({"now": now, "kept": sum(held.values()) - now, "gone": gone})
            seen |= held
    return found


def draw(measured: dict[str, list[dict[str, int]]]) -> str:
    """Return the SVG."""
    height = TOP + len(measured) * (len(STEPS) * ROW + GAP) + 8
    spoken = "; ".join(f"{CASES[case]}: {_mib(held_by(found[1]))} MiB" for case, found in measured.items())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"',
        f' role="img" aria-label="{escape(spoken)}"><style>{picture.STYLE}</style>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" class="paper"/>',
        picture.text(16, 28, f"Device memory of one lane, FlashInfer {RELEASE}, MiB"),
    ]
    for number, (kind, meaning) in enumerate(KINDS.items()):
        x = LEFT + number * 150
        lines.append(f'<rect x="{x}" y="38" width="14" height="12" rx="2" class="{kind}"/>')
        lines.append(picture.text(x + 22, 49, meaning, "dim"))
    y = TOP
    for case, found in measured.items():
        lines.append(picture.text(16, y + 20, CASES[case]))
        y += GAP
        for step, sizes in zip(STEPS, found, strict=True):
            x = LEFT
            lines.append(picture.text(24, y + 15, step, "dim"))
            for kind in KINDS:
                if sizes[kind]:
                    width = sizes[kind] / costs.MIB * PER_MIB
                    lines.append(f'<rect x="{x}" y="{y}" width="{width:.0f}" height="20" rx="3" class="{kind}"/>')
                    lines.append(picture.text(x + 6, y + 15, _mib(sizes[kind])))
                    x += width + 2
            y += ROW
    return "\n".join([*lines, "</svg>"])


def held_by(sizes: dict[str, int]) -> int:
    """The bytes that a lane holds: in use and kept."""
    return sizes["now"] + sizes["kept"]


def _mib(nbytes: int) -> str:
    return f"{nbytes / costs.MIB:.4g}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        # Each case in a process of its own: what was activated stays so.
        children = {case: [sys.executable, Path(__file__), case] for case in CASES}
        ran = {case: subprocess.run(child, check=True, capture_output=True) for case, child in children.items()}
        # The last line: FlashInfer prints, too.
        print(draw({case: json.loads(done.stdout.splitlines()[-1]) for case, done in ran.items()}))
