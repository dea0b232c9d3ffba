"""`--flashinfer RELEASE` runs `tests/real` against that release's own code; without it that folder is left out."""

import gc
import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import arguments
import fakes
import memory
import releases

REAL = Path(__file__).parent / "real"

# The state machine's long run: `--hypothesis-profile long`.
settings.register_profile("long", max_examples=50_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flashinfer", metavar="RELEASE", help="run tests/real on this release of FlashInfer")


def pytest_configure(config: pytest.Config) -> None:
    release = config.getoption("--flashinfer")
    if release:
        sys.path.insert(0, str(releases.fetch(release)))
        sys.modules["cudnn"] = fakes.cudnn
        sys.modules["cutlass"] = None  # type: ignore[assignment]  # where installed, it asks for a GPU at import


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path == REAL and not config.getoption("--flashinfer") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "site" in metafunc.fixturenames:
        metafunc.parametrize("site", arguments.with_bias(arguments.present()), ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    release = config.getoption("--flashinfer")
    marks = {"affected": releases.AFFECTED, "newest": releases.AFFECTED[-1:]}
    left_out = [mark for mark, on in marks.items() if release not in on]
    items[:] = [item for item in items if not any(map(item.get_closest_marker, left_out))]


@pytest.fixture(scope="session")
def release(pytestconfig: pytest.Config) -> str:
    """The release under test."""
    return str(pytestconfig.getoption("--flashinfer"))


@pytest.fixture(scope="session")
def flashinfer(release: str) -> Iterator[types.ModuleType]:
    """FlashInfer itself, on a fake device of compute capability 12.0."""
    module = importlib.import_module("flashinfer")
    assert module.__version__ == release
    importlib.import_module(arguments.GEMM_BASE)
    gc.freeze()  # what has been imported is no test's garbage: collecting takes a tenth of the time
    with fakes.install(module):
        yield module


@pytest.fixture
def gemm_base(flashinfer: types.ModuleType) -> types.ModuleType:
    """FlashInfer's `gemm_base` with no graph built, nothing tuned and a fresh cuDNN."""
    module = sys.modules[arguments.GEMM_BASE]
    fakes.cudnn.reset()
    fakes.forget()
    module.AutoTuner.get().clear_cache()
    return module


@pytest.fixture
def cudnn(gemm_base: types.ModuleType) -> fakes.Cudnn:
    """The cuDNN that FlashInfer sees: what it builds comes from `make_graph` and is kept in `graphs`."""
    return fakes.cudnn


@pytest.fixture
def sites(gemm_base: types.ModuleType) -> list[arguments.Site]:
    """The functions of the table that this release has."""
    return arguments.present()


@pytest.fixture
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    """The settings that `guard` is activated with: those that a file has as its VARIABLES."""
    return getattr(request.module, "VARIABLES", {})


@pytest.fixture
def guard(
    gemm_base: types.ModuleType, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.ModuleType]:
    """The package, active for this test: default settings, no lane, nothing in FlashInfer's cache, counters at zero."""
    import flashinfer_wsfix

    for variable in [name for name in os.environ if name.startswith("FLASHINFER_WSFIX")]:
        monkeypatch.delenv(variable)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    flashinfer_wsfix.deactivate()
    memory.forget_lanes()
    flashinfer_wsfix.activate("test")
    yield flashinfer_wsfix
    flashinfer_wsfix.deactivate()
    memory.forget_lanes()
