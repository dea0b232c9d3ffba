"""Tables of the pages, made from the package's own rows and from what detection reads in the hosts' sources.

``python tests/tables.py`` prints them; `test_readme.py` compares them with README.md and with docs/.
"""

from itertools import groupby
from pathlib import Path

from flashinfer_wsfix import detection, names, settings
from flashinfer_wsfix.cli.doctor.defects import DEFECTS
from flashinfer_wsfix.sites import GATES, SM100_WORKSPACE

import hosts
import releases

# What the table says of a defect of FlashInfer's, by detection's state. D2 and D3 are in every release, but only where
# sites are guarded is the workspace zeroed and the gate in.
CELLS = {
    "D1": {"not-affected": "not there", "guarded": "**guarded**", "not-needed": "fixed"},
    "D2": {"not-affected": "not guarded", "guarded": "**guarded**", "not-needed": "not guarded"},
    "D3": {"not-affected": "not guarded", "guarded": "**guarded**", "not-needed": "not guarded"},
}


def flashinfer_state(release: str) -> str:
    """Judge a release by its source. The gate must be there too where the sites are."""
    functions: list[detection.Function] = []
    for module in names.SITE_MODULES:
        path = Path(releases.fetch(release), *module.split(".")).with_suffix(".py")
        if path.exists():
            functions += detection.source_functions(module, path.read_text())
    state = detection.judge(functions, release).state
    found = {function.name for function in functions}
    assert state != "guarded" or all(function in found for _, function in GATES.values()), release
    return state


def vllm_moves(release: str) -> bool:
    """Say whether a release resizes its `SM100Workspace` where the package guards it, and nowhere else."""
    module, class_name, method, buffer = SM100_WORKSPACE
    source = Path(hosts.vllm(release), *module.split(".")).with_suffix(".py").read_text()
    found = [function for function in detection.source_functions(module, source) if detection.resized(function.code)]
    return [(function.name, detection.resized(function.code)) for function in found] == [
        (f"{class_name}.{method}", [f".{buffer}"])
    ]


def defects() -> str:
    """Say which defect is guarded on which host, and what ends it: a row for each defect, a column for each host."""
    ordered = sorted(releases.DEFAULT, key=_version)
    groups = [(state, list(group)) for state, group in groupby(ordered, key=flashinfer_state)]
    (_, before), (_, affected), _ = groups
    heads = [f"up to {before[-1]}", f"{affected[0]} to {affected[-1]}", f"after {affected[-1]}"]
    moving = [release for release in hosts.VLLM_RELEASES if vllm_moves(release)]
    assert moving == list(hosts.VLLM_RELEASES)
    columns = [f"FlashInfer {head}" for head in heads] + [f"vLLM up to {moving[-1]}"]
    lines = [["defect", *columns, "ended by"], ["---"] * (len(columns) + 2)]
    for row in DEFECTS:
        if row.host == "flashinfer":
            cells = [CELLS[row.name][state] for state, _ in groups] + [""]
        else:
            cells = ["", "", "", "**guarded**"]
        lines.append([f"{row.name}: {row.what}", *cells, row.fixed_by])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Which FlashInfer each release asks for, exactly: read from the metadata of what PyPI has of it, on 2026-12-01.
PINS = {
    "vLLM": {
        "0.20.0": "0.6.8.post1",
        "0.22.1": "0.6.11.post2",
        "0.23.0": "0.6.12",
        "0.24.0": "0.6.12",
        "0.25.0": "0.6.13",
        "0.25.1": "0.6.13",
        "0.26.0": "0.6.14",
        "0.27.0": "0.6.16.post3",
        "0.27.1": "0.6.16.post3",
        "0.28.0": "0.6.16.post3",
        "0.29.0": "0.6.18",
        "0.30.0": "0.6.18.post1",
        "0.31.0": "0.7.0.post1",
        "0.32.0": "0.7.0.post1",
        "0.33.0": "0.7.2.post1",
    },
    "SGLang": {
        "0.5.14": "0.6.12",
        "0.5.15": "0.6.12",
        "0.5.15.post1": "0.6.12",
        "0.5.16": "0.6.14",
        "0.5.17": "0.6.15.post1",
        "0.5.18": "0.6.17",
        "0.5.19": "0.6.18",
        "0.5.20": "0.6.18",
        "0.5.21": "0.6.18",
        "0.5.22": "0.7.1",
        "0.5.23": "0.7.2",
    },
    "TensorRT-LLM": {
        "1.2.1": "0.6.4",
        "1.3.0rc13": "0.6.6",
        "1.3.0rc14": "0.6.9",
        "1.3.0rc15": "0.6.11.post1",
        "1.3.0rc22": "0.6.14",
        "1.3.0rc22.post1": "0.6.15",
        "1.3.0rc23": "0.6.15",
        "1.3.0rc23.post1": "0.6.15",
        "1.3.0rc24": "0.6.16",
        "1.3.0rc25": "0.6.16",
        "1.3.0rc26": "0.6.18",
        "1.3.0rc27": "0.6.18",
        "1.3.0rc28": "0.6.18",
        "1.3.0rc29": "0.6.18",
        "1.4.0rc0": "0.6.18",
        "1.4.0rc1": "0.6.18",
    },
    "aphrodite-engine": {"0.23.0": "0.6.15.post1", "0.24.0": "0.6.18", "0.24.1": "0.6.18"},
    "lsglang": {
        "1.4.15": "0.6.17",
        "1.5.0": "0.6.18",
        "1.5.6": "0.6.18",
        "1.6.0": "0.6.18",
        "1.6.2": "0.7.2",
        "1.6.5": "0.7.2",
    },
    "tokenspeed-kernel": {"0.1.3": "0.6.15.post1", "0.1.4": "0.7.1rc2"},
    "sglang-kt": {"0.7.2": "0.6.3"},
}


def pins() -> str:
    """Say which FlashInfer each release of a host asks for; bold where that one is affected."""
    lines = [["host", "FlashInfer"], ["---"] * 2]
    for host, releases_of_host in PINS.items():
        for pin, group in groupby(releases_of_host.items(), key=lambda item: item[1]):
            bold = "**" if pin in releases.AFFECTED else ""
            lines.append([f"{bold}{host} {', '.join(release for release, _ in group)}{bold}", f"{bold}{pin}{bold}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


MEANINGS = {
    "mode": "on, off, or log every move and change nothing",
    "workspace_bytes": "MiB of a lane's first generation; 0: none before a plan overflows FlashInfer's own buffer",
    "gate": "the auto-tuned lanes that cuDNN is left out of on SM12x",
    "vllm": "vLLM's half: `SM100Workspace` and presizing at warm-up",
    "presize": "the lanes to presize at the end of vLLM's warm-up",
    "strict": "raise our own errors into the host instead of going on without the guard; for tests of a deployment",
    "log": "the least level that is logged",
}


def variables() -> str:
    """Say what each environment variable takes and means."""
    lines = [["variable", "default", "takes", "meaning"], ["---"] * 4]
    for field, row in settings.SETTINGS.items():
        lines.append([f"`{row.variable}`", f"`{row.default}`", row.takes, MEANINGS[field]])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _version(release: str) -> tuple[tuple[int, ...], int]:
    numbers, _, post = release.partition(".post")
    return tuple(map(int, numbers.split("."))), int(post or 0)


if __name__ == "__main__":
    print(defects(), pins(), variables(), sep="\n\n")
