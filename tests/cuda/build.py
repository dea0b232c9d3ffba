"""Build the simulated CUDA runtime for the installed torch: `build(folder)`, or ``python tests/cuda/build.py FOLDER``.

One library stands in for all of NVIDIA's that torch's own are linked against, under their names. What `runtime/` does
not define of the functions that they want is an error by name. It takes g++ and binutils, and two small wheels for
CUDA's headers.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

SOURCES = sorted(Path(__file__).with_name("runtime").iterdir())
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
LIBRARY = re.compile(r"lib(cu|nv|nccl)")
FUNCTION = re.compile(r"(__cuda|cu[A-Zbdfprs]|nv[rst]|nvshmem|nccl|nvrtc)(?!.*::)")
BY_NAME = re.compile(r"(cu[A-Z]|nvml)\w+")  # asked of the driver and of NVML at run time


def _told(*command: object) -> list[str]:
    return subprocess.run([*map(str, command)], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def wanted(torch_lib: Path) -> tuple[set[str], dict[str, str]]:
    """Read which of NVIDIA's libraries torch's are linked against, and which functions they want: name to version."""
    libraries, functions = {"libcuda.so.1", "libnvidia-ml.so.1"}, {}
    for path in sorted(torch_lib.glob("lib*.so")):
        needed = re.findall(r"NEEDED.*\[(.*?)\]", "\n".join(_told("readelf", "-d", path)))
        libraries |= {name for name in needed if LIBRARY.match(name)}
        for line in _told("nm", "-D", "--undefined-only", path):
            name, _, version = line.split()[-1].partition("@")
            if FUNCTION.match(name):
                functions[name] = version.lstrip("@")
    for name in _told("strings", "-n", 4, torch_lib / "libc10_cuda.so"):
        if BY_NAME.fullmatch(name):
            functions.setdefault(name, "")
    return libraries, functions


def headers(folder: Path) -> Path:
    """Return the folder of CUDA's headers, from wheels that are no part of the environment."""
    include = folder / "headers" / "nvidia" / "cu13" / "include"
    if not include.exists():
        # Not into site-packages: torch looks for libraries there before it looks in LD_LIBRARY_PATH.
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder / "headers"), *HEADERS], check=True)
    return include


def build(folder: Path) -> Path:
    """Return the folder for LD_LIBRARY_PATH, built anew where a source is newer."""
    torch = find_spec("torch")
    assert torch and torch.origin
    lib, target = folder / "lib", folder / "lib" / "libfakecuda.so"
    newest = max(path.stat().st_mtime for path in (*SOURCES, Path(__file__), Path(torch.origin)))
    if target.exists() and target.stat().st_mtime > newest:
        return lib
    lib.mkdir(parents=True, exist_ok=True)
    include = headers(folder)
    # Built where it runs, so for this very machine.
    compiler = ["g++", "-std=c++17", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
    compiler += ["-Wno-deprecated-declarations", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
    compiler += [f"-I{include}"]
    sources = [path for path in SOURCES if path.suffix == ".cpp"]
    objects = [folder / f"{path.stem}.o" for path in sources]
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(wanted, Path(torch.origin).parent / "lib")
        list(pool.map(lambda made: _told(*compiler, "-c", made[0], "-o", made[1]), zip(sources, objects, strict=True)))
        libraries, functions = reading.result()
    missing = sorted(set(functions) - {line.split()[-1] for line in _told("nm", "--defined-only", *objects) if line})
    stubs, versions = folder / "stubs.c", folder / "versions.map"
    stubs.write_text(
        "int fakecuda_missing(const char*);\n"
        + "".join(f'int {name}(void) {{ return fakecuda_missing("{name}"); }}\n' for name in missing)
    )
    # Torch's libraries ask for some functions by version.
    versions.write_text(
        "".join(
            f"{version} {{ {'; '.join(name for name in functions if functions[name] == version)}; }};\n"
            for version in sorted(set(functions.values()) - {""})
        )
    )
    _told("gcc", "-w", "-fno-builtin", "-fPIC", "-c", stubs, "-o", folder / "stubs.o")
    script = f"-Wl,--version-script={versions}"
    _told("g++", "-shared", "-o", target, *objects, folder / "stubs.o", script, "-pthread", "-ldl")
    for name in libraries:
        link = lib / name
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
    print(f"{target}: {len(functions)} functions wanted, {len(missing)} of them stubs, as {len(libraries)} libraries")
    return lib


if __name__ == "__main__":
    build(Path(sys.argv[1]))
