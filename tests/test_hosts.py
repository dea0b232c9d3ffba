"""What the real vLLM and SGLang do without us: the facts that the other tests build on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fresh
from hosts import SGLANG_RELEASES, VLLM_RELEASES

TESTS = Path(__file__).parent
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
LOAD = {
    "vllm": "import vllm.plugins; vllm.plugins.load_general_plugins()",
    "sglang": "import sglang.srt.plugins; sglang.srt.plugins.load_plugins()",
}
EACH_HOST = pytest.mark.parametrize(
    ("host", "release"),
    [("vllm", release) for release in VLLM_RELEASES] + [("sglang", release) for release in SGLANG_RELEASES],
)
EACH_VLLM = pytest.mark.parametrize("release", VLLM_RELEASES)


def inherited():
    """The environment of this process without what chooses plugins."""
    return {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "SGLANG_PLUGINS")}


def run(code, *path, **environment):
    """Run `code` in a fresh interpreter with `host_modules` as `hm`; the completed process."""
    path = os.pathsep.join(map(str, (TESTS, *path)))
    return subprocess.run(
        [sys.executable, "-c", f"import host_modules as hm\n{code}"],
        env={**inherited(), "PYTHONPATH": path, **environment}, capture_output=True, text=True,
    )  # fmt: skip


def lines(code, *path, **environment):
    """What `code` printed, which must have run without an error."""
    ran = run(code, *path, **environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def lines_with_torch(code):
    """The same in a fork of an interpreter that has imported torch."""
    ran = fresh.script(f"import host_modules as hm\n{code}", TESTS, **inherited())
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def declare(folder, group, source, **plugins):
    """An installed distribution in `folder` with `source` as its module `probe` and entry points `plugins`."""
    info = folder / "probe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    declared = "".join(f"{name} = probe:{target}\n" for name, target in plugins.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{declared}")
    (folder / "probe.py").write_text(source)


@EACH_HOST
def test_metadata_names_the_release(host, release):
    code = f"hm.{host}('{release}'); from importlib.metadata import version; print(version('{host}'))"
    assert lines(code) == [release]


ALL, NONE = ["alpha", "beta"], []


@EACH_HOST
@pytest.mark.parametrize(
    ("allowed", "vllm_runs", "sglang_runs"),
    [
        pytest.param(None, ALL, ALL, id="unset"),
        pytest.param("alpha", ["alpha"], ["alpha"], id="one"),
        pytest.param("beta,alpha", ALL, ALL, id="both"),
        pytest.param("other", NONE, NONE, id="another"),
        pytest.param("", NONE, ALL, id="empty"),
        pytest.param(" alpha", NONE, ["alpha"], id="blank-before"),
    ],
)
def test_allow_list(tmp_path, host, release, allowed, vllm_runs, sglang_runs):
    """Unset means all; empty means none to vLLM and all to SGLang; vLLM does not strip blanks, SGLang does."""
    declare(
        tmp_path, GROUPS[host], "def alpha(): print('alpha')\ndef beta(): print('beta')", alpha="alpha", beta="beta"
    )
    environment = {} if allowed is None else {f"{host.upper()}_PLUGINS": allowed}
    printed = lines(f"hm.{host}('{release}'); {LOAD[host]}", tmp_path, **environment)
    assert sorted(printed) == (vllm_runs if host == "vllm" else sglang_runs)


@EACH_HOST
def test_a_second_load_does_nothing(tmp_path, host, release):
    declare(tmp_path, GROUPS[host], "def alpha(): print('alpha')", alpha="alpha")
    assert lines(f"hm.{host}('{release}'); {LOAD[host]}; {LOAD[host]}", tmp_path) == ["alpha"]


@EACH_HOST
def test_an_entry_point_that_does_not_load_is_skipped(tmp_path, host, release):
    declare(tmp_path, GROUPS[host], "def alpha(): print('alpha')", broken="missing", alpha="alpha")
    assert lines(f"hm.{host}('{release}'); {LOAD[host]}", tmp_path) == ["alpha"]


@EACH_HOST
def test_vllm_lets_a_plugin_raise_and_sglang_does_not(tmp_path, host, release):
    declare(tmp_path, GROUPS[host], "def alpha(): raise RuntimeError('from alpha')", alpha="alpha")
    ran = run(f"hm.{host}('{release}'); {LOAD[host]}; print('went on')", tmp_path)
    assert "RuntimeError: from alpha" in ran.stderr
    assert (ran.returncode, ran.stdout) == ((1, "") if host == "vllm" else (0, "went on\n"))


@EACH_HOST
def test_loading_plugins_needs_no_torch(host, release):
    assert lines(f"hm.{host}('{release}'); {LOAD[host]}; import sys; print('torch' in sys.modules)") == ["False"]


@EACH_VLLM
def test_stock_ensure_size_moves_the_buffer(release):
    """D4: a request of 256 bytes above 128 MiB moves the buffer of the instance that was made on import."""
    code = f"""
hm.vllm("{release}")
workspace = hm.cutlass_mla().g_sm100_workspace
first = workspace.get_buf()
at, size = first.data_ptr(), first.numel()
workspace.ensure_size(hm.metadata(size), 1)
print(size, workspace.get_buf().data_ptr() == at)
workspace.ensure_size(hm.metadata(size + 256), 1)
print(workspace.get_buf().numel() - size, workspace.get_buf().data_ptr() == at, workspace.get_buf() is first)
print(type(workspace).__module__, type(workspace).ensure_size.__code__.co_names[-1])
"""
    assert lines_with_torch(code) == [
        f"{128 << 20} True",
        "256 False True",
        "vllm.v1.attention.backends.mla.cutlass_mla resize_",
    ]


@EACH_VLLM
@pytest.mark.parametrize("watch_first", [True, False], ids=["hook-then-host", "host-then-hook"])
def test_import_hooks_see_the_real_module(release, watch_first):
    """A finder put first on sys.meta_path, as import hooks are, sees the module's real name, spec and source."""
    watch = """
import importlib.util, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.endswith(".cutlass_mla"):
            sys.meta_path.remove(self)
            print(name, importlib.util.find_spec(name).origin.rpartition("/")[2])
sys.meta_path.insert(0, Watch())
"""
    host = f'hm.vllm("{release}")\n'
    code = (watch + host if watch_first else host + watch) + "hm.cutlass_mla()"
    assert lines_with_torch(code) == ["vllm.v1.attention.backends.mla.cutlass_mla cutlass_mla.py"]


@EACH_VLLM
def test_gpu_worker_holds_kernel_warmup_by_name_and_runs_it_before_capture(release):
    """The real `compile_or_warm_up_model` calls the copied name, positionally, and then captures."""
    code = f"""
hm.vllm("{release}")
import inspect, torch
import vllm.model_executor.warmup.kernel_warmup as warmup
import vllm.v1.worker.gpu_worker as gpu_worker
print(gpu_worker.kernel_warmup is warmup.kernel_warmup, *list(inspect.signature(warmup.kernel_warmup).parameters))

class Runner(hm.Nothing):
    def capture_model(self):
        print("capture")
        return hm.Nothing

worker = hm.worker(torch.device("cpu"), model_runner=Runner())
real = gpu_worker.kernel_warmup
def spy(*args, **kwargs):
    print("warmup", args == (worker,), kwargs)
    return real(*args, **kwargs)
gpu_worker.kernel_warmup = spy
worker.compile_or_warm_up_model()
"""
    parameters = "worker" if release == "0.24.0" else "worker process_local_only"
    assert lines_with_torch(code) == [f"True {parameters}", "warmup True {}", "capture"]


@EACH_VLLM
def test_real_kernel_warmup_runs_on_a_worker_without_a_device(release):
    code = f"""
hm.vllm("{release}")
from vllm.model_executor.warmup.kernel_warmup import kernel_warmup
print(kernel_warmup(hm.worker(None)))
"""
    assert lines_with_torch(code) == ["None"]


@EACH_VLLM
@pytest.mark.parametrize("name", ["vllm.flashinfer_wsfix", "flashinfer_wsfix"])
def test_only_loggers_below_vllm_are_shown(release, name):
    """INFO of a foreign logger is lost; what is below `vllm` comes out, from 0.33 on once vLLM configured logging."""
    configure = "vllm.logger._configure_vllm_root_logger()"
    code = f"hm.vllm('{release}'); import logging, vllm.logger; {configure}; logging.getLogger('{name}').info('seen')"
    ran = run(code)
    assert ran.returncode == 0, ran.stderr
    assert ("seen" in ran.stdout + ran.stderr) == name.startswith("vllm.")


def test_two_processes_may_fetch_at_once(tmp_path):
    code = f"import hosts, pathlib; hosts._FOLDER = pathlib.Path({str(tmp_path)!r}); print(hosts.sglang('0.5.14'))"
    command = [sys.executable, "-c", code]
    both = [subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [str(tmp_path / "sglang-0.5.14")] * 2
    assert (tmp_path / "sglang-0.5.14/sglang/srt/plugins/__init__.py").stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == [".gitignore", "sglang-0.5.14"]
