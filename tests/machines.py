"""Made-up environments for the doctor: real virtual environments with the real sources of the hosts."""

import configparser
import json
import re
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flashinfer_wsfix.cli.doctor import printer

import covered
import releases

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flashinfer_wsfix"
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
RTX, B200, H100 = ("RTX PRO 6000", "12.0"), ("B200", "10.0"), ("H100", "9.0")


@dataclass
class Environment:
    """A virtual environment without pip, where nothing is installed at first."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    cwd: Path | None = None

    def __post_init__(self) -> None:
        venv.create(self.folder / "venv", with_pip=False, symlinks=True)
        (self.folder / "bin").mkdir()
        (self.folder / "empty").mkdir()
        covered.measure(self.site_packages)

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        (found,) = (self.folder / "venv" / "lib").glob("python*/site-packages")
        return found

    def declare(self, name: str, version: str, entry_points: str = "") -> None:
        """Install metadata."""
        info = self.site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)

    def add(self, folder: Path) -> None:
        """Install what a folder holds."""
        (self.site_packages / f"{folder.name}.pth").write_text(f"{folder}\n")

    def install(self) -> None:
        """Install flashinfer-wsfix and wrapt, as pip would."""
        shutil.copytree(PACKAGE, self.site_packages / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        groups = setup["options.entry_points"].items()
        self.declare("flashinfer-wsfix", "0.1.0", "".join(f"[{group}]{entries}\n" for group, entries in groups))
        (self.site_packages / "wrapt").symlink_to(SITE_PACKAGES / "wrapt")
        self.declare("wrapt", "2.0")

    def uninstall(self) -> None:
        """Uninstall flashinfer-wsfix, as pip would: a start-up file stays."""
        shutil.rmtree(self.site_packages / PACKAGE.name)
        shutil.rmtree(self.site_packages / "flashinfer_wsfix-0.1.0.dist-info")

    def put_gpu(self, name: str, capability: str) -> None:
        """Put a GPU in, as nvidia-smi tells of it."""
        script = self.folder / "bin" / "nvidia-smi"
        script.write_text(f"#!/bin/sh\necho '{name}, {capability}, 580.95'\n")
        script.chmod(0o755)

    def run(self, *arguments: str, flags: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        """Run our command, with no variable set but `variables`; `flags` are the interpreter's."""
        variables = {"HOME": str(self.folder), "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", **self.variables}
        variables.update(covered.VARIABLES)
        cwd = self.cwd or self.folder / "empty"
        command = [str(self.python), *flags, *(arguments if arguments[0] == "-c" else ("-m", PACKAGE.name, *arguments))]
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)

    def ask(self, *flags: str) -> dict[str, Any]:
        """Return the doctor's report, which is consistent in itself and fits an 80-column terminal."""
        ran = self.run("doctor", "--json", flags=flags)
        assert ran.stderr == ""
        found: dict[str, Any] = json.loads(ran.stdout)
        assert ran.returncode == found["problem"]
        assert found["problem"] == any(finding["problem"] for finding in found["findings"])
        assert found["problem"] == ("NOT guarded" in found["sentence"])
        # Commands and paths, which are there to be copied, are not cut in two.
        assert max(len(re.sub(r"`[^`]*`|\S{30,}", "", line)) for line in printer.lines(found)) < 80
        return found


AFFECTED = "this machine is affected (D1 workspace moves under graphs, D2 workspace not born zeroed)."
UNTRIED = f"Set up to be guarded; not tried, since FlashInfer's import fails here: {AFFECTED}"
BY_PLUGIN = UNTRIED.replace("guarded;", "guarded by the plugin, where it is loaded;")


def states(found: dict[str, Any]) -> str:
    """Each defect's state in one letter: Guarded (or set up to be, where it cannot be tried), Open, Absent, Unknown."""
    letters = {"applies": "O", "does not apply": "A", "unknown": "U"}
    return "".join("G" if row["set_up"] else letters[row["state"]] for row in found["defects"])


def findings(found: dict[str, Any]) -> list[str]:
    """The findings' names, but for the one that every machine without torch has where it is active."""
    return [finding["name"] for finding in found["findings"] if finding["name"] != "not tried"]


def advice(found: dict[str, Any], name: str) -> str:
    (text,) = (finding["advice"] for finding in found["findings"] if finding["name"] == name)
    return str(text)


@pytest.fixture
def bare(tmp_path: Path) -> Environment:
    """Nothing but Python; our package is found in the working directory."""
    return Environment(tmp_path, cwd=ROOT)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """Our package and wrapt are installed."""
    made = Environment(tmp_path)
    made.install()
    return made


@pytest.fixture
def affected(environment: Environment) -> Environment:
    """FlashInfer 0.6.14 is there, too."""
    environment.add(releases.fetch("0.6.14"))
    return environment


def make_flashinfer(environment: Environment, cache: str) -> Path:
    """A FlashInfer of one site, and a stand-in for torch to import it with; return the file of the site."""
    (environment.site_packages / "torch.py").write_text("def __getattr__(name):\n    return type(name, (), {})\n")
    folder = environment.site_packages / "flashinfer"
    (folder / "gemm").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "utils.py").write_text(f"_cache_buf = {cache}\n")
    (folder / "gemm" / "__init__.py").write_text("from .. import utils\nfrom . import gemm_base\n")
    (folder / "gemm" / "gemm_base.py").write_text(
        "def execute_cudnn_gemm_fp8_graph(graph, workspace):\n"
        "    if workspace.numel() < 1:\n        workspace.resize_(1)\n    graph.execute(workspace)\n"
    )
    return folder / "gemm" / "gemm_base.py"
