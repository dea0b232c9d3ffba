"""Python environments that have the package, and the interpreters to make them with. Does not import the package."""

import configparser
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import covered

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
BOOTSTRAP = "flashinfer_wsfix/bootstrap"

# By which routes the interpreter that runs this was activated, and whether the hook is in; None where it was not.
PROBE = """
import sys
state = sys.modules.get("flashinfer_wsfix.state")
print(state and state.routes or None)
assert not state or sum(type(finder).__module__ == "flashinfer_wsfix.importer" for finder in sys.meta_path) == 1
"""


def package() -> Path:
    """The folder of the package under test."""
    spec = importlib.util.find_spec("flashinfer_wsfix")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def environment(**variables: str) -> dict[str, str]:
    """The environment of this process without what would decide a test: paths and settings."""
    decides = re.compile(r"PYTHON(?!HASHSEED)|FLASHINFER_WSFIX|(VLLM|SGLANG)_PLUGINS|OTEL_|VIRTUAL_ENV")
    return {**{name: value for name, value in os.environ.items() if not decides.match(name)}, **variables}


def run(command: Sequence[object], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command far from the repository."""
    words = list(map(str, command))
    return subprocess.run(words, cwd="/", env=environment(**variables), capture_output=True, text=True)


def output(command: Sequence[object], **variables: str) -> str:
    """What a command printed, which ended well and said nothing on standard error."""
    ran = run(command, **variables)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return ran.stdout.strip()


class Environment:
    """A virtual environment in `folder`, empty but for wrapt and what is put into it."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        if python == sys.executable:
            venv.create(folder, symlinks=True)
        else:
            output([python, "-m", "venv", "--without-pip", folder])
        self.folder, self.python = folder, folder / "bin/python"
        (self.site,) = folder.glob("lib/python3*/site-packages")
        wrapt = importlib.util.find_spec("wrapt")
        assert wrapt is not None and wrapt.submodule_search_locations
        (self.site / "wrapt").symlink_to(wrapt.submodule_search_locations[0])
        covered.measure(self.site)

    def copy_package(self) -> "Environment":
        """Put the package in, with the entry points that setup.cfg declares for it, as a wheel's installation does."""
        shutil.copytree(package(), self.site / "flashinfer_wsfix", ignore=shutil.ignore_patterns("__pycache__"))
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        info = self.site / "flashinfer_wsfix-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-wsfix\nVersion: 0\n")
        groups = setup["options.entry_points"].items()
        (info / "entry_points.txt").write_text("".join(f"[{name}]\n{points}\n" for name, points in groups))
        return self

    def see_host(self) -> "Environment":
        """Let it import what the tests themselves run with: torch and wrapt."""
        (self.site / "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return self

    def install(self, *what: object) -> None:
        """Have pip install something without its requirements."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", "install", "-q"]
        ran = run([*pip, "--no-deps", *what])
        assert ran.returncode == 0, ran.stderr

    def cli(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ours."""
        return run([self.python, "-m", "flashinfer_wsfix", *arguments], **variables)

    def routes(self, *flags: str, **variables: str) -> str:
        """By which routes a fresh interpreter of this environment comes up activated: a list, or "None"."""
        return output([self.python, *flags, "-c", PROBE], **variables)

    def files(self) -> set[str]:
        """What lies in its site-packages, but for what Python caches."""
        return {str(path.relative_to(self.site)) for path in self.site.rglob("*") if "__pycache__" not in str(path)}


@functools.cache
def interpreters() -> dict[str, str]:
    """The interpreters to be had here, by version: on PATH, or next to the one that runs this."""
    found = {}
    for version in ("3.10", "3.11", "3.12", "3.13"):
        siblings = sorted(map(str, Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}")))
        for python in (shutil.which(f"python{version}"), *siblings):
            if python and run([python, "-m", "venv", "--help"]).returncode == 0:
                found[version] = python
                break
    found["{}.{}".format(*sys.version_info)] = sys.executable
    return found


@functools.cache
def has_distribution_sitecustomize(python: object = sys.executable) -> bool:
    """Say whether a sitecustomize lies in the standard library of `python`, as on Debian and Ubuntu."""
    code = "import os, sysconfig; print(os.path.exists(sysconfig.get_path('stdlib') + '/sitecustomize.py'))"
    return output([python, "-c", code]) == "True"
