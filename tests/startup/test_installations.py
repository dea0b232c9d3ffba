"""The built package: a wheel, a wheel from the sdist, both kinds of editable install, and what it leaves as it was."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from environments import PROBE, ROOT, TESTS, Environment, output, run

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


# What wraps functions in the field and holds wrapt down: this release of OpenTelemetry wants it below 2.
NEIGHBOURS = ("opentelemetry-instrumentation==0.60b1", "ddtrace")


def pip(environment: Environment, *arguments: object) -> str:
    """What pip prints when it works on an environment that has none itself."""
    command = [sys.executable, "-m", "pip", "--python", environment.python, "--disable-pip-version-check", *arguments]
    ran = run(command)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.strip()


def bare(folder) -> Environment:
    """An environment without the tests' own wrapt, which pip would write through the link."""
    environment = Environment(folder)
    (environment.site / "wrapt").unlink()
    return environment


def test_an_install_changes_nothing_else(built, tmp_path):
    """A constraint on wrapt is met; beside OpenTelemetry and ddtrace each version stays, and `pip check` is clean."""
    environment = bare(tmp_path / "environment")
    (tmp_path / "constraints.txt").write_text("wrapt<1.17\n")
    pip(environment, "install", "-q", "-c", tmp_path / "constraints.txt", built["wheel"])
    assert pip(environment, "freeze", "--exclude", "flashinfer-wsfix") == "wrapt==1.16.0"

    pip(environment, "uninstall", "-y", "-q", "flashinfer-wsfix")
    pip(environment, "install", "-q", "--no-compile", *NEIGHBOURS)
    before = pip(environment, "freeze")
    assert "wrapt==1.16.0" in before.splitlines()
    pip(environment, "install", "-q", built["wheel"])
    assert pip(environment, "freeze", "--exclude", "flashinfer-wsfix") == before
    assert pip(environment, "check") == "No broken requirements found."


def test_a_folder_of_its_own_without_a_network(built, tmp_path):
    """Wheels that were copied over, installed into a folder: on PYTHONPATH the plugins work, and the sitecustomize."""
    wheels, folder = tmp_path / "wheels", tmp_path / "folder"
    download = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "-w", wheels, built["wheel"]]
    assert run(download).returncode == 0
    environment = bare(tmp_path / "environment")
    before = environment.files()
    pip(environment, "install", "-q", "--no-index", "--find-links", wheels, "--target", folder, "flashinfer-wsfix")
    assert environment.files() == before

    assert environment.routes(PYTHONPATH=str(folder)) == "None"
    plugin = [environment.python, "-c", LOAD_PLUGIN + PROBE]
    assert output(plugin, PYTHONPATH=str(folder)) == "['vLLM plugin']"
    path = output([environment.python, "-m", "flashinfer_wsfix", "path"], PYTHONPATH=str(folder))
    assert path == str(folder / "flashinfer_wsfix/bootstrap")
    assert environment.routes(PYTHONPATH=f"{path}:{folder}") == "['sitecustomize']"


def test_the_guard_at_the_oldest_wrapt(tmp_path):
    """The guard of one site passes its tests on the oldest wrapt that setup.cfg allows."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    name, _, oldest = setup["options"]["install_requires"].strip().partition(">=")
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    assert run([*command, "--target", tmp_path, f"{name}=={oldest}"]).returncode == 0

    first = "import pytest, sys, wrapt; assert wrapt.__version__ == sys.argv.pop(1), wrapt; sys.exit(pytest.main())"
    chosen = [f"real/test_{name}.py" for name in ("addresses", "generations", "captured", "calls", "errors")]
    chosen += ["-k", "fp8 and positional and not mxfp8 and not override"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ran = subprocess.run(
        [sys.executable, "-c", first, oldest, "-q", "-p", "no:cacheprovider", "--flashinfer", "0.6.18.post1", *chosen],
        cwd=TESTS, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) >= 15, ran.stdout
