"""`flashinfer-wsfix doctor` in made-up environments: real virtual environments with the real sources of the hosts."""

import configparser
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from flashinfer_wsfix.cli import doctor
from flashinfer_wsfix.cli.doctor import children, printer
from flashinfer_wsfix.cli.doctor import environment as environment_of
from flashinfer_wsfix.hook import CUTLASS_MLA

import covered
import hosts
import releases

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flashinfer_wsfix"
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
RTX, B200, H100 = ("RTX PRO 6000", "12.0"), ("B200", "10.0"), ("H100", "9.0")
KEYS = {
    "": {"sentence", "problem", "environment", "defects", "activation", "findings", "not_this_bug"},
    "defects": {"name", "what", "state", "guarded", "sentence"},
    "activation": {"where", "active", "routes", "sentence"},
    "findings": {"name", "problem", "sentence", "advice"},
}


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

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run our command, with no variable set but `variables`."""
        variables = {"HOME": str(self.folder), "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", **self.variables}
        variables.update(covered.VARIABLES)
        cwd = self.cwd or self.folder / "empty"
        command = [str(self.python), *(arguments if arguments[0] == "-c" else ("-m", PACKAGE.name, *arguments))]
        return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)

    def ask(self) -> dict[str, Any]:
        """Return the doctor's report, which is consistent in itself and fits an 80-column terminal."""
        ran = self.run("doctor", "--json")
        assert ran.stderr == ""
        found: dict[str, Any] = json.loads(ran.stdout)
        assert ran.returncode == found["problem"]
        assert found["problem"] == any(finding["problem"] for finding in found["findings"])
        assert found["problem"] == ("NOT guarded" in found["sentence"])
        # Commands and paths, which are there to be copied, are not cut in two.
        assert max(len(re.sub(r"`[^`]*`|\S{30,}", "", line)) for line in printer.lines(found)) < 80
        return found


UNTRIED = (
    "This machine is affected (D1, D2) and set up to be guarded, which could not be tried: FlashInfer's import fails"
    " here."
)


def states(found: dict[str, Any]) -> str:
    """Each defect's state in one letter: Guarded, Open, Absent, Unknown."""
    letters = {"applies": "O", "does not apply": "A", "unknown": "U"}
    return "".join("G" if row["guarded"] else letters[row["state"]] for row in found["defects"])


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


# --- the five machines of issue 5: the advice is right, and following it cures ----------------------------------------


def test_affected_and_not_enabled(affected: Environment) -> None:
    """The advice is `enable`, which cures; `disable` takes that back."""
    found = affected.ask()
    assert found["sentence"] == "This machine is affected (D1, D2) and NOT guarded."
    assert findings(found) == ["not active"]
    assert states(found) == "OOUA"
    assert "flashinfer-wsfix enable" in advice(found, "not active")
    assert affected.run("enable").returncode == 0
    found = affected.ask()
    assert found["sentence"] == UNTRIED
    assert states(found) == "GGUA"
    assert [row["routes"] for row in found["activation"][:2]] == [["start-up file"]] * 2
    assert findings(found) == []
    assert affected.run("disable").returncode == 0
    assert affected.ask()["problem"]


@pytest.mark.parametrize("release", ["0.7.4", "0.6.11.post3"])
def test_not_affected(environment: Environment, release: str) -> None:
    """Upstream's fix and the code before the defect: nothing to do, and whoever crashes looks elsewhere."""
    environment.add(releases.fetch(release))
    environment.put_gpu(*H100)
    found = environment.ask()
    assert states(found) == "AUAA"
    assert "can be removed" in found["sentence"]
    assert "another cause" in found["sentence"]
    assert findings(found) == []


@pytest.mark.parametrize("fixture", ["bare", "environment"])
def test_no_flashinfer(request: pytest.FixtureRequest, fixture: str) -> None:
    """There is nothing to do, also where wrapt is missing."""
    found = request.getfixturevalue(fixture).ask()
    assert found["sentence"].startswith(f"FlashInfer is not installed for {found['environment']['executable']}")
    assert states(found) == "AAAA"
    assert findings(found) == []


def test_orphaned_start_up_file(affected: Environment) -> None:
    """It is named; removing it is enough for tidiness, installing the package again guards."""
    affected.run("enable")
    affected.uninstall()
    affected.cwd = ROOT
    found = affected.ask()
    assert findings(found) == ["not installed", "orphaned start-up file"]
    file = affected.site_packages / "flashinfer_wsfix.pth"
    assert f"`rm {file}`" in advice(found, "orphaned start-up file")
    contents = file.read_text()
    file.unlink()
    assert findings(affected.ask()) == ["not installed"]
    file.write_text(contents)
    shutil.rmtree(affected.site_packages / "wrapt-2.0.dist-info")
    (affected.site_packages / "wrapt").unlink()
    affected.install()
    affected.cwd = None
    assert states(affected.ask()) == "GGUA"


@pytest.mark.parametrize("value", ["other", "", "other, flashinfer_wsfix"])
def test_plugin_kept_out_of_vllm(affected: Environment, value: str) -> None:
    """vLLM takes no name with a space, and none from an empty list. The advised value cures, and so does `enable`."""
    affected.add(hosts.vllm("0.28.0"))
    affected.variables["VLLM_PLUGINS"] = value
    found = affected.ask()
    assert findings(found) == ["plugin kept out"]
    assert affected.run("enable").returncode == 0
    assert states(affected.ask()) == "GGUU"
    assert affected.run("disable").returncode == 0
    assignment = advice(found, "plugin kept out").split()[1]
    affected.variables.update([assignment.split("=")])
    found = affected.ask()
    assert found["sentence"] == UNTRIED
    assert findings(found) == ["plugin only"]


def test_plugins_of_sglang(affected: Environment) -> None:
    """SGLang strips names, and an empty list lets all in."""
    affected.add(hosts.sglang("0.5.20"))
    for value in ("", " flashinfer_wsfix ,other"):
        affected.variables["SGLANG_PLUGINS"] = value
        assert states(affected.ask()) == "GGUA"
    affected.variables["SGLANG_PLUGINS"] = "other"
    found = affected.ask()
    assert findings(found) == ["plugin kept out"]
    assert "Set SGLANG_PLUGINS=other,flashinfer_wsfix or unset it" in advice(found, "plugin kept out")


# --- defects ----------------------------------------------------------------------------------------------------------


def test_old_cudnn_on_sm12x(affected: Environment) -> None:
    """D3: the gate guards, where it is not switched off."""
    affected.put_gpu(*RTX)
    affected.declare("nvidia-cudnn-cu12", "9.20.0.48")
    assert affected.ask()["sentence"] == "This machine is affected (D1, D2, D3) and NOT guarded."
    affected.run("enable")
    assert states(affected.ask()) == "GGGA"
    affected.variables["FLASHINFER_WSFIX_GATE"] = "bf16"
    found = affected.ask()
    assert found["sentence"] == "This machine is affected (D1, D2, D3) and NOT guarded against D3."
    assert findings(found) == ["gate off"]
    assert found["findings"][0]["sentence"].endswith("leaves cuDNN in for fp8.")


def test_old_cudnn_on_sm12x_with_flashinfer_07(environment: Environment) -> None:
    """There is no gate of ours: the advice is cuDNN itself, which cures."""
    environment.add(releases.fetch("0.7.4"))
    environment.put_gpu(*RTX)
    environment.declare("nvidia-cudnn-cu13", "9.23.0.10")
    found = environment.ask()
    assert (states(found), findings(found)) == ("AUOA", ["old cuDNN"])
    assert "cuDNN backend to 9.23.1 or newer" in advice(found, "old cuDNN")
    shutil.rmtree(environment.site_packages / "nvidia_cudnn_cu13-9.23.0.10.dist-info")
    environment.declare("nvidia-cudnn-cu13", "9.23.1.2")
    assert states(environment.ask()) == "AUAA"


def test_vllm_on_sm100(environment: Environment) -> None:
    """D4 matters with FlashInfer 0.7 too; vLLM's plugin guards it, unless that half is off."""
    environment.add(releases.fetch("0.7.4"))
    environment.add(hosts.vllm("0.33.0"))
    environment.put_gpu(*B200)
    assert states(environment.ask()) == "AUAG"
    environment.variables["FLASHINFER_WSFIX_VLLM"] = "0"
    found = environment.ask()
    assert (states(found), findings(found)) == ("AUAO", ["vLLM left alone"])
    environment.variables = {"VLLM_PLUGINS": "other"}
    assert findings(environment.ask()) == ["plugin kept out"]


def test_no_longer_needed(environment: Environment) -> None:
    """The advice takes it out."""
    environment.add(releases.fetch("0.7.4"))
    environment.put_gpu(*H100)
    environment.run("enable")
    found = environment.ask()
    assert (states(found), findings(found)) == ("AUAA", ["not needed"])
    assert "`flashinfer-wsfix disable`" in advice(found, "not needed")
    environment.run("disable")
    assert findings(environment.ask()) == []


def test_vllm_without_a_gpu(environment: Environment) -> None:
    """Whether D4 applies is known where the server runs; what then guards it is said here."""
    environment.add(releases.fetch("0.7.4"))
    environment.add(hosts.vllm("0.33.0"))
    environment.variables["VLLM_PLUGINS"] = "other"
    found = environment.ask()
    assert found["sentence"] == "No defect is known to apply here; whether D3 or D4 does could not be told."
    assert (states(found), findings(found)) == ("AUUU", ["D4 unguarded"])
    assert environment.run("enable").returncode == 0
    assert findings(environment.ask()) == []


def test_vllm_that_resizes_it_in_an_unknown_way(environment: Environment) -> None:
    """What the guard refuses at run time is not called guarded."""
    environment.declare("vllm", "0.99")
    environment.put_gpu(*B200)
    environment.run("enable")
    file = environment.site_packages / (CUTLASS_MLA.replace(".", "/") + ".py")
    file.parent.mkdir(parents=True)
    (environment.site_packages / "vllm" / "__init__.py").touch()
    text = "class SM100Workspace:\n def ensure_size(self, size):\n  self._workspace_buf.resize_(size)\n"
    file.write_text(text)
    assert (states(environment.ask()), findings(environment.ask())) == ("AAAG", [])
    file.write_text(text + "  self.size = size\n")
    found = environment.ask()
    assert (states(found), findings(found)) == ("AAAO", ["unsupported vLLM"])
    assert "in an unknown way, NOT guarded here" in found["defects"][3]["sentence"]


def test_a_gpu_that_does_not_say_its_capability_may_be_any(environment: Environment) -> None:
    environment.add(releases.fetch("0.7.4"))
    environment.put_gpu("GPU", "[N/A]")
    assert states(environment.ask()) == "AUUA"


def test_vllm_that_has_no_such_workspace(environment: Environment) -> None:
    environment.declare("vllm", "0.99")
    assert environment.ask()["defects"][3]["sentence"] == "vLLM 0.99 has no SM100Workspace that moves"


def test_vllm_without_metadata(environment: Environment) -> None:
    """As of a source tree: what is there to be imported counts."""
    (environment.site_packages / "vllm").symlink_to(hosts.vllm("0.33.0") / "vllm")
    environment.put_gpu(*B200)
    found = environment.ask()
    assert (states(found), found["environment"]["vllm"]) == ("AAAG", None)
    assert found["sentence"] == "This machine is affected (D4) and guarded, by the plugin."


def test_vllm_on_another_gpu(environment: Environment) -> None:
    environment.add(hosts.vllm("0.33.0"))
    environment.put_gpu(*H100)
    assert states(environment.ask()) == "AAAA"


@pytest.mark.parametrize("mode", ["0", "observe"])
def test_switched_off(affected: Environment, mode: str) -> None:
    affected.run("enable")
    affected.variables["FLASHINFER_WSFIX"] = mode
    found = affected.ask()
    assert (states(found), findings(found)) == ("OOUA", ["switched off"])


def test_wrapt_missing(affected: Environment) -> None:
    affected.run("enable")
    (affected.site_packages / "wrapt").unlink()
    found = affected.ask()
    assert states(found) == "OOUA"
    assert "wrapt missing" in findings(found)


def test_unknown_flashinfer(environment: Environment) -> None:
    """A site of an unknown shape: nothing can be guarded, so no activation is advised."""
    folder = environment.site_packages / "flashinfer" / "gemm"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "gemm_base.py").write_text("def execute(graph, scratch):\n    scratch.resize_(1)\n    graph.execute()\n")
    found = environment.ask()
    assert (states(found), findings(found)) == ("OOAA", ["unsupported FlashInfer"])
    assert found["environment"]["flashinfer"] == "of unknown version"


# --- hazards ----------------------------------------------------------------------------------------------------------


def test_shadowed_sitecustomize(affected: Environment) -> None:
    """Another launcher's sitecustomize stands before ours; the other order, which is advised, cures."""
    other = affected.folder / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys\nif '-c' in sys.orig_argv: print('hello')")
    ours = affected.site_packages / "flashinfer_wsfix" / "bootstrap"
    affected.variables["PYTHONPATH"] = f"{other}:{ours}"
    found = affected.ask()
    assert findings(found) == ["not active", "shadowed sitecustomize"]
    assert "flashinfer-wsfix run` last" in advice(found, "shadowed sitecustomize")
    affected.variables["PYTHONPATH"] = f"{ours}:{other}"
    found = affected.ask()
    assert (states(found), findings(found)) == ("GGUA", [])
    assert found["activation"][0]["routes"] == ["sitecustomize"]
    affected.variables["PYTHONPATH"] = f"{other}:{ours}"
    affected.run("enable")
    assert findings(affected.ask()) == []


def test_sitecustomize_that_is_not_ours(environment: Environment) -> None:
    """Two of others': none of our business."""
    for name in ("first", "second"):
        (environment.folder / name).mkdir()
        (environment.folder / name / "sitecustomize.py").touch()
    environment.variables["PYTHONPATH"] = f"{environment.folder}/first:{environment.folder}/second"
    assert findings(environment.ask()) == []


def test_settings(affected: Environment) -> None:
    """What makes no sense is named; what Ray's workers would not get is named with the variable that helps."""
    affected.run("enable")
    affected.variables["FLASHINFER_WSFIX_GATE"] = "fp4"
    assert findings(affected.ask()) == ["setting"]
    affected.variables = {"FLASHINFER_WSFIX_WORKSPACE_MIB": "64"}
    affected.add(hosts.vllm("0.28.0"))
    assert findings(affected.ask()) == []
    affected.declare("ray", "2.50")
    affected.variables["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] = "MY_"
    found = affected.ask()
    assert findings(found) == ["Ray"]
    name, value = advice(found, "Ray").removeprefix("Set ").rstrip(".").split("=")
    assert value == "MY_,FLASHINFER_WSFIX"
    affected.variables[name] = value
    assert findings(affected.ask()) == []


def test_auto_tune_cache(affected: Environment) -> None:
    """A cache of vLLM's or of SGLang's that names a runner which the gate takes out, where D3 applies."""
    affected.run("enable")
    for place in (
        ".cache/vllm/flashinfer_autotune_cache/0.6.14/120a/x",
        ".cache/sglang/flashinfer/autotune/0.6.14/sm120/x",
    ):
        folder = affected.folder / place
        folder.mkdir(parents=True)
        file = folder / ("rank_tp0_pp0_dp0.json" if "sglang" in place else "autotune_configs.json")
        entries = {"_metadata": {}, "a": ["CudnnFp8GemmRunner", -1], "b": ["CutlassFp8GemmRunner", 3]}
        file.write_text(json.dumps(entries))
    assert findings(affected.ask()) == []
    affected.put_gpu(*RTX)
    affected.declare("nvidia-cudnn-cu13", "9.20.0")
    found = affected.ask()
    assert (states(found), findings(found)) == ("GGGA", ["auto-tune cache"] * 2)
    assert all("runner 1 times" in row["sentence"] for row in found["findings"] if row["name"] == "auto-tune cache")


# --- probes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plugin", [False, True], ids=["start-up file", "plugin"])
def test_flashinfer_is_really_imported_in_a_child(affected: Environment, plugin: bool) -> None:
    """The verdict there is the one that the log gives, and nothing heavy gets into the doctor's own process."""
    affected.add(SITE_PACKAGES)  # torch
    if plugin:
        affected.add(hosts.vllm("0.28.0"))
    else:
        affected.run("enable")
    heavy = ["torch", "flashinfer", "vllm", "wrapt", "pynvml"]
    code = "import sys; from flashinfer_wsfix.cli import doctor; doctor.main(json=True)"
    ran = affected.run("-c", f"{code}; sys.exit(any(map(sys.modules.get, {heavy})))")
    assert (ran.returncode, ran.stderr) == (0, "")
    row = json.loads(ran.stdout)["activation"][-1]
    assert row["sentence"] == "FlashInfer 0.6.14 moves its cuDNN workspace, at sites that are all guarded"
    assert row["active"]


def make_flashinfer(environment: Environment, cache: str) -> Path:
    """A FlashInfer of one site, and torch to import it with; return the file of the site."""
    environment.add(SITE_PACKAGES)
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


def test_guard_that_fails_when_tried(environment: Environment) -> None:
    """By its source this FlashInfer can be guarded; imported, its cache is of an unknown kind. The trial counts."""
    make_flashinfer(environment, "[]")
    environment.run("enable")
    found = environment.ask()
    assert (states(found), findings(found)) == ("OOAA", ["guard failed"])


def test_flashinfer_without_source(environment: Environment) -> None:
    """Compiled alone it cannot be read: it counts as affected until the trial says what it is."""
    source = make_flashinfer(environment, "{}")
    py_compile.compile(str(source), str(source.with_suffix(".pyc")))
    source.unlink()
    found = environment.ask()
    assert states(found) == "OOAA"
    assert findings(found) == ["unsupported FlashInfer", "probe failed"]
    environment.run("enable")
    found = environment.ask()
    assert states(found) == "GGAA"
    assert found["sentence"] == "This machine is affected (D1, D2) and guarded."
    source.with_suffix(".pyc").unlink()
    source.with_name("__init__.py").write_text("from .. import utils\nimport types\ngemm_base = types\n")
    (environment.site_packages / "vllm").symlink_to(hosts.vllm("0.33.0") / "vllm")
    environment.put_gpu(*B200)
    assert states(environment.ask()) == "AUAG"  # it has no site, and vLLM's half guards all the same


def test_what_cannot_be_decoded_hides_nothing(affected: Environment) -> None:
    """Neither output nor metadata nor source: a byte that is not UTF-8 is no reason to say "not guarded"."""
    affected.run("enable")
    says = "import sys; '-c' in sys.orig_argv and sys.stdout.buffer.write(b'\\xe9\\n')\n"
    (affected.site_packages / "says.pth").write_text(says)
    affected.put_gpu("Qu\\351", "9.0")
    info = affected.site_packages / "flashinfer_python-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_bytes(b"Name: \xe9\n")
    ran = affected.run("doctor")
    assert ran.stdout.startswith(UNTRIED.partition(",")[0]), ran.stdout
    assert "probe failed" not in ran.stdout and "could not be looked at" not in ran.stdout


def test_flashinfer_that_does_not_import(affected: Environment) -> None:
    """Here torch is missing: that is said, and the judgement rests on the source."""
    affected.run("enable")
    found = affected.ask()
    row = found["activation"][-1]
    assert row["active"] is None
    assert row["sentence"].startswith("FlashInfer could not be imported here (")
    assert [finding["name"] for finding in found["findings"]] == ["not tried"]


def test_failing_probes(environment: Environment) -> None:
    """Source that cannot be read, nonsense in metadata and a GPU that does not answer end in lines, in no traceback."""
    folder = environment.site_packages / "flashinfer" / "gemm"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "gemm_base.py").write_text("def fp8_gemm_sm100(:")
    environment.put_gpu(*RTX)
    environment.declare("nvidia-cudnn-cu13", "nonsense")
    found = environment.ask()
    assert findings(found) == ["unsupported FlashInfer", "probe failed"]
    (environment.folder / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert environment.ask()["environment"]["gpus"] == []


def test_children_that_do_not_start(affected: Environment) -> None:
    """Nothing is known to be guarded then, and that is what is said."""
    (affected.site_packages / "ends.pth").write_text("import sys; '-c' in sys.orig_argv and sys.exit('no children')\n")
    found = affected.ask()
    assert [row["active"] for row in found["activation"]] == [None, None]
    assert all(row["sentence"].startswith("could not be tried: ") for row in found["activation"])
    assert "no children" in found["activation"][0]["sentence"]
    assert findings(found) == ["not started"]


def test_children_that_say_nothing() -> None:
    with pytest.raises(children.NoAnswer, match=r"^it printed nothing$"):
        children.python("print('hello')")


def test_cudnn_that_came_from_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library says 92301 for 9.23.1."""
    monkeypatch.setattr(environment_of, "python", lambda code: 92301)
    assert environment_of._cudnn() == "9.23.1"


def test_children_have_a_time_limit() -> None:
    with pytest.raises(children.NoAnswer, match=r"^no answer within 0 s$"):
        children.run([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.1)


def test_report_for_people(affected: Environment) -> None:
    """The overall sentence comes first; no colour; the exit status is the JSON's."""
    ran = affected.run("doctor")
    assert ran.returncode == 1
    assert ran.stdout.splitlines() == list(printer.lines(affected.ask()))
    assert ran.stdout.startswith("This machine is affected (D1, D2) and NOT guarded.\n")
    assert "\x1b" not in ran.stdout
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in ran.stdout


def test_wrong_usage(environment: Environment) -> None:
    assert environment.run("doctor", "--yaml").returncode == 2


def test_json_has_the_documented_keys(affected: Environment) -> None:
    found = affected.ask()
    assert found.keys() == KEYS[""]
    for name in ("defects", "activation", "findings"):
        assert all(row.keys() == KEYS[name] for row in found[name])
    affected.put_gpu(*RTX)
    made = affected.ask()["environment"]
    assert made.keys() == environment_of.ENVIRONMENT.keys() | {"gpus"}
    assert made["gpus"] == [{"name": RTX[0], "capability": RTX[1], "driver": "580.95"}]
    documented = str(doctor.__doc__)
    assert all(f"``{key}``" in documented for keys in (*KEYS.values(), made) for key in keys)


@pytest.mark.parametrize("flags", [["-S"], ["-I"], ["-I", "-S"]], ids=" ".join)
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_every_python(version: str, flags: list[str]) -> None:
    """It runs in the isolated modes, where wrapt cannot be found."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "-V"], capture_output=True).returncode:
        pytest.skip(f"there is no Python {version}")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from flashinfer_wsfix.__main__ import main; main(['doctor'])"
    )
    ran = subprocess.run([python, *flags, "-c", code], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
    assert ran.stderr == ""
    assert "probe failed" not in ran.stdout
    assert "a spawned process: NOT active" in ran.stdout
