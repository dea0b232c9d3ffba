"""Which defects the doctor says apply, and against which of them it says that new processes are guarded."""

import shutil

import pytest
from flashinfer_wsfix.names import CUTLASS_MLA

import hosts
import machines
import releases
from machines import B200, H100, RTX, Environment, advice, findings, states

environment, affected = machines.environment, machines.affected


def test_old_cudnn_on_sm12x(affected: Environment) -> None:
    """D3: the gate guards, where it is not switched off."""
    affected.put_gpu(*RTX)
    affected.declare("nvidia-cudnn-cu12", "9.20.0.48")
    assert affected.ask()["sentence"].startswith("NOT guarded: this machine is affected (D1 ")
    affected.run("enable")
    found = affected.ask()
    assert (states(found), findings(found)) == ("GGGA", ["D3 beyond the gate"])
    assert "against D3 in the fp8 and bf16 auto-tuning alone" in found["sentence"]
    assert "the gate would keep it out" in found["defects"][2]["sentence"]  # FlashInfer cannot be imported here
    lanes = ("bmm_bf16", "mm_fp4", "mm_mxfp8", "bmm_mxfp8", "mm_bf16_fp4")
    assert all(lane in found["defects"][2]["sentence"] for lane in lanes)
    affected.variables["FLASHINFER_WSFIX_GATE"] = "bf16"
    found = affected.ask()
    assert found["sentence"].startswith("NOT guarded against D3: this machine is affected (D1 ")
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
    assert found["sentence"] == (
        "Guarded by the plugin, where it is loaded: this machine is affected (D4 vLLM's SM100 workspace moves)."
    )


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
    expected = "Unset FLASHINFER_WSFIX in the server's environment, then restart it."
    assert advice(found, "switched off") == expected


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


# --- what cuDNN's version is, and which GPU this is -------------------------------------------------------------------


def put_frontend(environment: Environment, version: int) -> None:
    """A cuDNN frontend that says which backend it loaded, as FlashInfer asks it."""
    (environment.site_packages / "cudnn.py").write_text(f"def backend_version(): return {version}\n")


def test_the_cudnn_that_is_loaded_counts(affected: Environment) -> None:
    """LD_LIBRARY_PATH may name an older one than the wheel: both are told, and D3 applies."""
    affected.put_gpu(*RTX)
    affected.declare("nvidia-cudnn-cu13", "9.23.1.2")
    assert states(affected.ask()) == "OOAA"
    put_frontend(affected, 91002)
    found = affected.ask()
    assert (states(found), found["environment"]["cudnn"]) == ("OOOA", "9.10.2")
    (finding,) = (row for row in found["findings"] if row["name"] == "unused cuDNN")
    assert "gets cuDNN 9.10.2; nvidia-cudnn-cu13 9.23.1.2 lies unused" in finding["sentence"]
    assert "LD_LIBRARY_PATH" in finding["advice"]
    assert "9.10.2, as cudnn.backend_version() says" in affected.run("doctor").stdout


def test_two_cudnn_wheels(affected: Environment) -> None:
    """Where nobody can be asked which is loaded, nothing is claimed; then the other one is named."""
    affected.put_gpu(*RTX)
    affected.declare("nvidia-cudnn-cu12", "9.10.2.21")
    affected.declare("nvidia-cudnn-cu13", "9.23.1.2")
    assert states(affected.ask()) == "OOUA"
    put_frontend(affected, 92301)
    found = affected.ask()
    assert (states(found), findings(found)) == ("OOAA", ["not active", "unused cuDNN"])
    assert "nvidia-cudnn-cu12 9.10.2.21 lies unused" in found["findings"][1]["sentence"]
    assert "own the same files" in advice(found, "unused cuDNN")


def test_a_gpu_that_does_not_answer_is_not_none(affected: Environment) -> None:
    """As just after an Xid: within seconds it is said that the GPU is unknown."""
    affected.put_gpu(*RTX)
    (affected.folder / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    affected.declare("nvidia-cudnn-cu13", "9.20.0")
    found = affected.ask()
    assert (states(found), findings(found)) == ("OOUA", ["not active", "GPU unknown"])
    assert "which GPU is here is unknown (nvidia-smi: exit status 9)" in found["defects"][2]["sentence"]
    printed = affected.run("doctor").stdout
    assert "unknown (nvidia-smi: exit status 9)" in printed
    assert "GPU was found" not in printed and "GPU\n" not in printed
    assert "restart the machine" not in printed


@pytest.mark.parametrize(
    "script, why",
    [
        ("echo 'it has failed: no driver'; echo 'Install one.'; exit 9", "it has failed: no driver"),
        ("echo 'line 1' >&2; exit 127", "line 1"),
        ("sleep 30", "no answer within 10 s"),
    ],
)
def test_only_a_hung_driver_is_a_reason_to_restart_the_machine(affected: Environment, script: str, why: str) -> None:
    """What fails at once, as in a container without the driver's libraries, is told in its own words."""
    affected.put_gpu(*RTX)
    (affected.folder / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    found = affected.ask()
    assert f"(nvidia-smi: {why})" in str(found["findings"])
    assert ("restart the machine" in advice(found, "GPU unknown")) == script.startswith("sleep")
    assert ("where nvidia-smi works" in advice(found, "GPU unknown")) != script.startswith("sleep")


def test_an_nvidia_smi_that_may_not_be_run(affected: Environment) -> None:
    affected.put_gpu(*RTX)
    (affected.folder / "bin" / "nvidia-smi").chmod(0o644)
    affected.variables["PATH"] = str(affected.folder / "bin")
    found = affected.ask()
    assert "Permission denied" in str(found["findings"])
    assert "where nvidia-smi works" in advice(found, "GPU unknown")
