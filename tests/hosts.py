"""The real sources of vLLM and SGLang, fetched once into ``tests/.hosts``.

A vLLM wheel is 300 MB of kernels around a few text files. pip can read single members of a remote wheel by HTTP range,
so a release costs about 1 MB. Where that fails (an old pip, a mirror without ranges, a local index), the whole wheel
is downloaded instead, and the rest thrown away. ``python tests/hosts.py`` fetches everything.
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VLLM_RELEASES = ("0.24.0", "0.28.0", "0.33.0")
SGLANG_RELEASES = ("0.5.14", "0.5.20", "0.5.23")

_FOLDER = Path(__file__).parent / ".hosts"

# What is kept: these files, and the .py files of these folders; with each wheel's METADATA, so that
# importlib.metadata knows the version. No package's own __init__.py: those import the whole host.
_KEEP = {
    "vllm": (
        "vllm/envs.py",
        "vllm/logger.py",
        "vllm/logging_utils/",
        "vllm/model_executor/warmup/kernel_warmup.py",
        "vllm/plugins/__init__.py",
        "vllm/v1/attention/backends/mla/cutlass_mla.py",
        "vllm/v1/worker/gpu_worker.py",
    ),
    "sglang": (
        "sglang/srt/environ.py",
        "sglang/srt/plugins/",
    ),
}

# The same wheel whatever machine and Python run the tests: its text files do not depend on either.
_WHEEL_FOR = ["--no-deps", "--only-binary", ":all:", "--python-version", "3.12", "--ignore-requires-python"]
_WHEEL_FOR += [
    argument
    for glibc in ("2_17", "2_28", "2_31", "2_34", "2_35")
    for argument in ("--platform", f"manylinux_{glibc}_x86_64")
]


def vllm(release):
    """Folder with the real vLLM files of `release`; holds `vllm/...` and the wheel's METADATA."""
    return _fetch("vllm", release)


def sglang(release):
    """Folder with the real SGLang files of `release`."""
    return _fetch("sglang", release)


def _fetch(name, release):
    folder = _FOLDER / f"{name}-{release}"
    marker = folder / ".kept"
    keep = "\n".join(_KEEP[name])
    if marker.exists() and marker.read_text() == keep:
        return folder

    _FOLDER.mkdir(exist_ok=True)
    (_FOLDER / ".gitignore").write_text("*\n")
    with tempfile.TemporaryDirectory(dir=_FOLDER, prefix=".new-") as scratch:
        new = Path(scratch, "new")
        requirement = f"{name}=={release}"
        try:
            _read_members(requirement, name, new)
        except (subprocess.CalledProcessError, ValueError, LookupError) as error:
            print(f"{requirement}: {error}; downloading the whole wheel", file=sys.stderr)
            _download(requirement, name, new)
        # File by file and the marker last: two processes may do this at the same time, with the same bytes.
        Path(scratch, "kept").write_text(keep)
        for path in new.rglob("*"):
            if path.is_file():
                target = folder / path.relative_to(new)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
        os.replace(Path(scratch, "kept"), marker)
    return folder


def _read_members(requirement, name, target):
    """Let pip say where the wheel is, then read the members that are kept through pip's own session."""
    report = _pip("install", "--dry-run", "--ignore-installed", "--report", "-", *_WHEEL_FOR,
                  "--target", str(target), requirement)  # fmt: skip
    url = json.loads(report)["install"][0]["download_info"]["url"]
    subprocess.run([sys.executable, __file__, url, name, str(target)], check=True, capture_output=True, text=True)


def _download(requirement, name, target):
    with tempfile.TemporaryDirectory(dir=_FOLDER, prefix=".wheel-") as scratch:
        _pip("download", *_WHEEL_FOR, "--dest", scratch, requirement)
        (wheel,) = Path(scratch).glob("*.whl")
        _extract(wheel, name, target)


def _pip(*arguments):
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _extract(wheel, name, target):
    """Extract what is kept of `wheel`, a path or a file object."""
    with zipfile.ZipFile(wheel) as archive:
        kept = [
            member
            for member in archive.namelist()
            if (member.startswith(_KEEP[name]) and member.endswith(".py")) or member.endswith(".dist-info/METADATA")
        ]
        archive.extractall(target, kept)


def _extract_remote(url, name, target):
    """In a process of its own, since it imports pip: as `pip --use-feature=fast-deps` reads a wheel's metadata."""
    from pip._internal.commands.download import DownloadCommand
    from pip._internal.network.lazy_wheel import LazyZipOverHTTP

    command = DownloadCommand("download", "")
    with command.main_context():
        session = command.get_default_session(command.parse_args([url])[0])
        _extract(LazyZipOverHTTP(url, session), name, target)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _extract_remote(*sys.argv[1:])
    else:
        for release in VLLM_RELEASES:
            print(vllm(release))
        for release in SGLANG_RELEASES:
            print(sglang(release))
