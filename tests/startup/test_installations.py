"""The built package: a wheel, a wheel from the sdist, and both kinds of editable install."""

import shutil
import sys
import zipfile

import pytest
from environments import PROBE, ROOT, Environment, output, run

KINDS = ("wheel", "sdist", "editable", "editable-strict")
LOAD_PLUGIN = """
from importlib.metadata import entry_points
(point,) = entry_points(group="vllm.general_plugins", name="flashinfer_wsfix")
point.load()()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what is in the repository, so that building leaves nothing there."""
    folder = tmp_path_factory.mktemp("source") / "flashinfer-wsfix"
    ignore = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder, ignore=ignore)
    return folder


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    """Both distributions; the sdist by setuptools itself, in an environment that has nothing else."""
    folder = tmp_path_factory.mktemp("built")
    builder = Environment(tmp_path_factory.mktemp("builder"))
    builder.install("setuptools")
    code = f"import os; os.chdir('{source}'); from setuptools import build_meta; build_meta.build_sdist('{folder}')"
    ran = run([builder.python, "-c", code])
    assert ran.returncode == 0, ran.stderr
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--disable-pip-version-check", "-w", folder]
    ran = run([*pip, source])
    assert ran.returncode == 0, ran.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def install(source, built, tmp_path_factory):
    def make(kind: str) -> Environment:
        made = Environment(tmp_path_factory.mktemp(kind))
        if kind in built:
            made.install(built[kind])
        else:
            strict = ["--config-settings", "editable_mode=strict"] if kind == "editable-strict" else []
            made.install(*strict, "--editable", source)
        return made

    return make


def test_no_wheel_ships_a_start_up_file(built):
    """The package, its metadata, and the one sitecustomize, in a folder of the package."""
    names = zipfile.ZipFile(built["wheel"]).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"flashinfer_wsfix"}
    assert not [name for name in names if name.endswith((".pth", ".start"))]
    assert [name for name in names if "sitecustomize" in name] == ["flashinfer_wsfix/bootstrap/sitecustomize.py"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_route_works_from_every_kind_of_installation(install, kind):
    """Command, plugin, launcher, folder for PYTHONPATH, start-up file, and the way back."""
    environment = install(kind)
    command = environment.folder / "bin/flashinfer-wsfix"
    before = environment.files()
    assert environment.routes() == "None"
    assert output([environment.python, "-c", LOAD_PLUGIN + PROBE]) == "['vLLM plugin']"
    assert output([command, "run", environment.python, "-c", PROBE]) == "['sitecustomize']"
    assert environment.routes(PYTHONPATH=output([command, "path"])) == "['sitecustomize']"
    assert output([command, "enable"]).startswith(f"{environment.site}/flashinfer_wsfix.pth is written")
    assert environment.routes() == environment.routes("-I") == "['start-up file']"
    output([command, "disable"])
    assert environment.routes() == "None"
    assert environment.files() == before


def test_enable_then_uninstall_then_disable_leaves_nothing(install, tmp_path):
    """After `pip uninstall` the start-up file stays and is silent; disable, run from elsewhere, removes it."""
    environment = Environment(tmp_path / "environment")
    empty = environment.files()
    environment = install("wheel")
    output([environment.folder / "bin/flashinfer-wsfix", "enable"])
    assert environment.routes() == "['start-up file']"

    pip = [sys.executable, "-m", "pip", "--python", environment.python, "--disable-pip-version-check"]
    ran = run([*pip, "uninstall", "-y", "-q", "flashinfer-wsfix"])
    assert ran.returncode == 0, ran.stderr
    assert environment.files() - empty == {"flashinfer_wsfix.pth"}
    assert environment.routes() == "None"

    disable = environment.cli("disable", PYTHONPATH=str(ROOT))
    assert (disable.returncode, disable.stderr) == (0, "")
    assert environment.files() == empty
    assert not [path for path in environment.folder.rglob("*") if "wsfix" in path.name]
