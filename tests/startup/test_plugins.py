"""The plugin functions under the real loaders of vLLM and SGLang, by the entry points that setup.cfg declares."""

from pathlib import Path

import pytest
from environments import PROBE, TESTS, Environment, run

import hosts
from hosts import SGLANG_RELEASES, VLLM_RELEASES

LOAD = {
    "vllm": "from vllm.plugins import load_general_plugins as load",
    "sglang": "from sglang.srt.plugins import load_plugins as load",
}
WORD = {"vllm": "vLLM plugin", "sglang": "SGLang plugin"}
EACH_HOST = pytest.mark.parametrize(
    ("host", "release"),
    [("vllm", release) for release in VLLM_RELEASES] + [("sglang", release) for release in SGLANG_RELEASES],
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment")).copy_package().see_host()


def load(environment: Environment, host: str, release: str, then: str = PROBE, **variables: str) -> str:
    """What a process prints that runs this host's loader of plugins, and then `then`."""
    getattr(hosts, host)(release)  # fetched here: what pip says of it is not the loader's
    code = f"import host_modules\nhost_modules.{host}('{release}')\n{LOAD[host]}\nload()\n{then}"
    ran = run([environment.python, "-c", code], PYTHONPATH=str(TESTS), **variables)
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr and "WARNING" not in ran.stderr, ran.stderr
    return ran.stdout.strip().splitlines()[-1]


@EACH_HOST
@pytest.mark.parametrize(
    ("allowed", "vllm_runs", "sglang_runs"),
    [
        pytest.param(None, True, True, id="unset"),
        pytest.param("flashinfer_wsfix", True, True, id="ours"),
        pytest.param("another,flashinfer_wsfix", True, True, id="ours-too"),
        pytest.param("another", False, False, id="another"),
        pytest.param("", False, True, id="empty"),
        pytest.param("another, flashinfer_wsfix", False, True, id="blank-before-ours"),
    ],
)
def test_allow_lists(environment, host, release, allowed, vllm_runs, sglang_runs):
    """We are loaded under the name flashinfer_wsfix, where a list leaves room for it."""
    variables = {} if allowed is None else {f"{host.upper()}_PLUGINS": allowed}
    expected = f"['{WORD[host]}']" if (vllm_runs if host == "vllm" else sglang_runs) else "None"
    assert load(environment, host, release, **variables) == expected


@EACH_HOST
def test_our_function_may_run_many_times_and_needs_neither_torch_nor_flashinfer(environment, host, release):
    """vLLM calls it bare, so an exception would end the engine."""
    then = f"""
from flashinfer_wsfix import startup
for _ in range(3):
    startup.{host}_plugin()
import sys
assert not {{"torch", "flashinfer", "wrapt"}} & set(sys.modules), "heavy"
{PROBE}"""
    assert load(environment, host, release, then) == f"['{WORD[host]}']"


@pytest.mark.parametrize(("host", "release"), [("vllm", VLLM_RELEASES[1]), ("sglang", SGLANG_RELEASES[1])])
def test_an_error_of_ours_does_not_reach_the_host(environment, host, release):
    """FlashInfer is there already, and looking at it fails: one warning, and the host goes on."""
    first = """
import sys, types
for name in ("flashinfer", "flashinfer.gemm", "flashinfer.gemm.gemm_base"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["wrapt"] = None
"""
    code = f"{first}\nimport host_modules\nhost_modules.{host}('{release}')\n{LOAD[host]}\nload()\n{PROBE}"
    ran = run([environment.python, "-c", code], PYTHONPATH=str(TESTS))
    assert (ran.returncode, ran.stdout.strip().splitlines()[-1]) == (0, f"['{WORD[host]}']"), ran.stderr
    assert "NOT guarded" in ran.stdout + ran.stderr


def test_the_folder_of_the_tests_brings_no_package_of_ours(environment):
    """What is loaded above is the environment's."""
    code = "import flashinfer_wsfix; print(flashinfer_wsfix.__file__)"
    ran = run([environment.python, "-c", code], PYTHONPATH=str(TESTS))
    assert Path(ran.stdout.strip()).parent == environment.site / "flashinfer_wsfix"
