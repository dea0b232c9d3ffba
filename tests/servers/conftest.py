"""One wheel and one model for all; skipped where vLLM is not installed: `tox -e vllm` brings it."""

import importlib.util
from pathlib import Path

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*"]

if not collect_ignore_glob:
    import model as tiny
    import serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.wheel(tmp_path_factory.mktemp("wheel"))
