"""The doctor's word against a process that is started the same way: each set-up that the README names.

FlashInfer is a small one of a single site, and torch a stand-in, since what is asked is whether the site is wrapped.
The plugin loaders of vLLM and SGLang are their own.
"""

import functools
import json
import shutil
import subprocess
from typing import Any, NamedTuple

import pytest
from environments import BOOTSTRAP, ROOT, TESTS, Environment, environment, has_distribution_sitecustomize

import hosts

FILES = {
    "torch.py": "def __getattr__(name):\n    return type(name, (), {})\n",
    "flashinfer/__init__.py": "",
    "flashinfer/utils.py": "_cache_buf = {}\n",
    "flashinfer/gemm/__init__.py": "from .. import utils\nfrom . import gemm_base\n",
    "flashinfer/gemm/gemm_base.py": """
def execute_cudnn_gemm_fp8_graph(graph, workspace):
    if workspace.numel() < 1:
        workspace.resize_(1)
    graph.execute(workspace)
""",
}
# What a server does in a process: its plugins, where it has them, then FlashInfer. Says whether the site is wrapped.
LOADS = {
    "": "",
    "vllm": "import host_modules; host_modules.vllm('0.28.0')\n"
    "from vllm.plugins import load_general_plugins; load_general_plugins()\n",
    "sglang": "import host_modules; host_modules.sglang('0.5.20')\n"
    "from sglang.srt.plugins import load_plugins; load_plugins()\n",
}
TELL = """
import flashinfer.gemm
print(type(flashinfer.gemm.gemm_base.execute_cudnn_gemm_fp8_graph).__name__ == "Guard")
"""
OURS = "SITE/" + BOOTSTRAP


@functools.cache
def make(folder: Any, kinds: frozenset[str]) -> Environment:
    """An environment of these kinds."""
    made = Environment(folder / "-".join(sorted(kinds or {"plain"}))).copy_package()
    for name, text in FILES.items():
        (made.site / name).parent.mkdir(parents=True, exist_ok=True)
        (made.site / name).write_text(text)
    for host in kinds & {"vllm", "sglang"}:
        place = hosts.vllm("0.28.0") if host == "vllm" else hosts.sglang("0.5.20")
        (made.site / f"{host}.pth").write_text(f"{place}\n")
    for name in kinds & {"ray", "tensorrt_llm"}:
        (made.site / f"{name}-1.0.dist-info").mkdir()
        (made.site / f"{name}-1.0.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
    if "own sitecustomize" in kinds:
        (made.site / "sitecustomize.py").write_text("import flashinfer_wsfix\n")
    if "another first" in kinds:
        (made.site / "another").mkdir()
        (made.site / "another/sitecustomize.py").touch()
    if "enabled" in kinds:
        assert made.cli("enable").returncode == 0
    if "no wrapt" in kinds:
        (made.site / "wrapt").unlink()
    if "uninstalled" in kinds:
        shutil.rmtree(made.site / "flashinfer_wsfix")
    if "broken" in kinds:
        (made.site / "flashinfer_wsfix/importer.py").unlink()
    return made


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("matrix")


class Setup(NamedTuple):
    """How a server is started: in which environment, behind the launcher or not, with which flags and variables."""

    kinds: str = ""
    run: bool = False
    flags: str = ""
    variables: dict[str, str] = {}  # noqa: RUF012  # never changed
    load: str = ""

    def start(self, folder: Any, *command: str, cwd: str = "/") -> subprocess.CompletedProcess[str]:
        made = make(folder, frozenset(filter(None, self.kinds.split(", "))))
        variables = {name: value.replace("SITE", str(made.site)) for name, value in self.variables.items()}
        launcher = [str(made.python), "-m", "flashinfer_wsfix", "run"] if self.run else []
        words = [*launcher, str(made.python), *self.flags.split(), *command]
        return subprocess.run(words, cwd=cwd, env=environment(**variables), capture_output=True, text=True)

    def process(self, folder: Any, before: str = "") -> bool:
        """Start a process of the server, and say whether the site is wrapped in it."""
        path = f"import sys; sys.path.append({str(TESTS)!r})\n"
        ran = self.start(folder, "-c", before + path + LOADS[self.load] + TELL)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip() == "True"

    def doctor(self, folder: Any) -> dict[str, Any]:
        """Start the doctor the same way; from a clone where the environment has no package to run."""
        gone = {"uninstalled", "broken"} & set(self.kinds.split(", "))
        ran = self.start(folder, "-m", "flashinfer_wsfix", "doctor", "--json", cwd=str(ROOT if gone else "/"))
        found: dict[str, Any] = json.loads(ran.stdout)
        assert ran.returncode == found["problem"]
        return found


PATH = {"PYTHONPATH": OURS}
SETUPS = {
    "nothing": (Setup(), False),
    "enable": (Setup("enabled"), True),
    "enable and -I": (Setup("enabled", flags="-I"), True),
    "enable and -E -s": (Setup("enabled", flags="-E -s"), True),
    "enable and -S": (Setup("enabled", flags="-S", variables={"PYTHONPATH": "SITE"}), False),
    "run": (Setup(run=True), True),
    "run and -I": (Setup(run=True, flags="-I"), False),
    "run and -E": (Setup(run=True, flags="-E"), False),
    "path": (Setup(variables=PATH), True),
    "path after another's": (Setup("another first", variables={"PYTHONPATH": f"SITE/another:{OURS}"}), False),
    "own sitecustomize": (Setup("own sitecustomize"), True),
    "vLLM": (Setup("vllm", load="vllm"), True),
    "vLLM, ours allowed": (Setup("vllm", load="vllm", variables={"VLLM_PLUGINS": "a,flashinfer_wsfix"}), True),
    "vLLM, another allowed": (Setup("vllm", load="vllm", variables={"VLLM_PLUGINS": "a"}), False),
    "vLLM, none allowed": (Setup("vllm", load="vllm", variables={"VLLM_PLUGINS": ""}), False),
    "vLLM, with a blank": (Setup("vllm", load="vllm", variables={"VLLM_PLUGINS": "a, flashinfer_wsfix"}), False),
    "vLLM, another allowed, enable": (Setup("vllm, enabled", load="vllm", variables={"VLLM_PLUGINS": "a"}), True),
    "vLLM, another allowed, run": (Setup("vllm", run=True, load="vllm", variables={"VLLM_PLUGINS": "a"}), True),
    "SGLang": (Setup("sglang", load="sglang"), True),
    "SGLang, another allowed": (Setup("sglang", load="sglang", variables={"SGLANG_PLUGINS": "a"}), False),
    "SGLang, empty list": (Setup("sglang", load="sglang", variables={"SGLANG_PLUGINS": ""}), True),
    "enable and off": (Setup("enabled", variables={"FLASHINFER_WSFIX": "0"}), False),
    "enable and no wrapt": (Setup("enabled, no wrapt"), False),
    "uninstalled, the start-up file left": (Setup("enabled, uninstalled"), False),
    "a broken package": (Setup("enabled, broken"), False),
}


@pytest.mark.parametrize("name", SETUPS)
def test_the_doctor_says_what_a_process_shows(folder, name):
    setup, guarded = SETUPS[name]
    if "own sitecustomize" in setup.kinds and has_distribution_sitecustomize():
        pytest.skip("the sitecustomize of this distribution wins over one in site-packages")
    found = setup.doctor(folder)
    assert setup.process(folder) == guarded
    assert (found["problem"], found["defects"][0]["guarded"]) == (not guarded, guarded), found["sentence"]
    assert found["sentence"].startswith("Guarded" if guarded else "NOT guarded")


# What the doctor must not promise: where the server's other processes are guarded, this one is not.
ELSEWHERE = "import os; os.environ.update(PYTHONPATH='copied too late')\n"  # as vLLM's Ray executor does
LEFT_OUT = {
    "SGLang's processes that never load plugins": (Setup("sglang"), Setup("sglang"), "scheduler actor of --use-ray"),
    "another program beside vLLM": (Setup("vllm"), Setup("vllm"), "what loads no plugins is unguarded"),
    "a Ray worker of a cluster elsewhere": (Setup("ray", variables=PATH), Setup("ray"), "Ray workers of a cluster"),
    "TensorRT-LLM's MPI worker": (Setup("tensorrt_llm", variables=PATH), Setup("tensorrt_llm"), "MPI workers"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_process_that_is_left_out_is_named_and_enable_cures_it(folder, name):
    setup, process, words = LEFT_OUT[name]
    found = setup.doctor(folder)
    assert not process.process(folder, ELSEWHERE)
    told = [row for row in found["findings"] if words in row["sentence"]]
    assert found["sentence"].startswith("Guarded by ") and len(told) == 1, found
    assert "flashinfer-wsfix enable" in told[0]["advice"]
    cured = process._replace(kinds=f"{process.kinds}, enabled")
    assert cured.process(folder, ELSEWHERE)
    assert not cured._replace(variables=setup.variables).doctor(folder)["findings"]


def test_vllms_ray_worker_of_a_cluster_elsewhere_loads_our_plugin(folder):
    setup = Setup("vllm, ray", variables=PATH, load="vllm")
    (told,) = (row for row in setup.doctor(folder)["findings"] if row["name"] == "PYTHONPATH alone")
    assert setup._replace(variables={}).process(folder, ELSEWHERE)
    assert "(vLLM's load our plugin)" in told["sentence"]


FRONTEND = "import os\ndef backend_version():\n    return 91002 if os.environ['LD_LIBRARY_PATH'] else 92301\n"


def test_the_cudnn_that_counts_is_the_one_that_a_process_gets(folder):
    """A frontend that, as cuDNN's own does, looks into LD_LIBRARY_PATH first."""
    for path, number, version in (("", 92301, "9.23.1"), ("/old", 91002, "9.10.2")):
        setup = Setup("cudnn", variables={"LD_LIBRARY_PATH": path})
        (make(folder, frozenset({"cudnn"})).site / "cudnn.py").write_text(FRONTEND)
        ran = setup.start(folder, "-c", "import cudnn; print(cudnn.backend_version())")
        assert (ran.stdout.strip(), setup.doctor(folder)["environment"]["cudnn"]) == (str(number), version)
