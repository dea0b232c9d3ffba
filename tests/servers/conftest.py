"""One wheel and one model for all tests of this folder, which are left out where there is no vLLM."""

import importlib.util
from pathlib import Path

import model as tiny
import pytest
import serving

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.build_wheel(tmp_path_factory.mktemp("wheel"))
