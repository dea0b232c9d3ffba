"""`flashinfer-wsfix doctor` in made-up environments: what it advises where nothing, or something, activates us."""

import json
import shutil

import pytest

import hosts
import machines
import releases
from machines import AFFECTED, BY_PLUGIN, H100, ROOT, RTX, UNTRIED, Environment, advice, findings, states

bare, environment, affected = machines.bare, machines.environment, machines.affected


def test_affected_and_not_enabled(affected: Environment) -> None:
    """The advice is `enable`, which cures; `disable` takes that back."""
    found = affected.ask()
    assert found["sentence"] == f"NOT guarded: {AFFECTED}"
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


@pytest.mark.parametrize("value", ["other", "", "other, flashinfer_wsfix", "flashinfer-wsfix"])
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
    assert "flashinfer-wsfix" not in assignment
    affected.variables.update([assignment.split("=")])
    found = affected.ask()
    assert found["sentence"] == BY_PLUGIN
    assert findings(found) == ["plugin only"]


def test_the_plugin_by_pythonpath_alone(environment: Environment) -> None:
    """As after `pip install --target`: guarded, so that it is not installed here is no problem, and yet told."""
    environment.add(releases.fetch("0.6.14"))
    environment.add(hosts.vllm("0.28.0"))
    target = environment.folder / "target"
    target.mkdir()
    for path in ("flashinfer_wsfix", "flashinfer_wsfix-0.1.0.dist-info"):
        (environment.site_packages / path).rename(target / path)
    environment.variables["PYTHONPATH"] = str(target)
    found = environment.ask()
    assert (found["sentence"], states(found), findings(found)) == (BY_PLUGIN, "GGUU", ["not installed"])
    assert "only this PYTHONPATH leads to it" in str(found["findings"])


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
    assert (states(found), findings(found)) == ("GGGA", ["D3 beyond the gate", *["auto-tune cache"] * 2])
    assert all("runner 1 times" in row["sentence"] for row in found["findings"] if row["name"] == "auto-tune cache")


def test_sglang_with_the_plugin_alone(affected: Environment) -> None:
    """Some of its processes never load plugins: they are named, and `enable` is advised, which guards them."""
    affected.add(hosts.sglang("0.5.20"))
    found = affected.ask()
    assert (found["sentence"], findings(found)) == (BY_PLUGIN, ["plugin only"])
    named = next(row["sentence"] for row in found["findings"] if row["name"] == "plugin only")
    assert all(word in named for word in ("scheduler actor of --use-ray", "diffusion workers", "encoder workers"))
    assert advice(found, "plugin only").startswith("Run `flashinfer-wsfix enable`")
    affected.run("enable")
    found = affected.ask()
    assert (found["sentence"], findings(found)) == (UNTRIED, [])


def test_tensorrt_llm(affected: Environment) -> None:
    """It loads no plugins, and its MPI workers need not get PYTHONPATH: the start-up file."""
    affected.declare("tensorrt_llm", "1.3.0rc18")
    found = affected.ask()
    assert findings(found) == ["not active"]
    assert found["environment"]["tensorrt_llm"] == "1.3.0rc18"
    affected.variables["PYTHONPATH"] = str(affected.site_packages / "flashinfer_wsfix" / "bootstrap")
    found = affected.ask()
    assert findings(found) == ["PYTHONPATH alone"]
    assert "by this PYTHONPATH, where it is inherited" in found["sentence"]
    (row,) = (row for row in found["activation"] if row["where"] == "workers of TensorRT-LLM")
    assert row["active"] is False
    affected.run("enable")
    assert findings(affected.ask()) == []


def test_ray_with_pythonpath_alone(affected: Environment) -> None:
    """A worker of a cluster that was started elsewhere comes up without it."""
    affected.declare("ray", "2.50")
    affected.variables["PYTHONPATH"] = str(affected.site_packages / "flashinfer_wsfix" / "bootstrap")
    found = affected.ask()
    assert found["sentence"] == UNTRIED.replace("guarded;", "guarded by this PYTHONPATH, where it is inherited;")
    assert findings(found) == ["PYTHONPATH alone"]
    assert "Ray workers of a cluster that was started elsewhere" in str(found["findings"])
    affected.run("enable")
    assert findings(affected.ask()) == []


def test_the_second_ray_executor_of_vllm_copies_the_environment(affected: Environment) -> None:
    """There only the Ray data-parallel backend goes by the prefixes."""
    affected.run("enable")
    affected.add(hosts.vllm("0.28.0"))
    affected.declare("ray", "2.50")
    executor = affected.site_packages / "vllm" / "v1" / "executor"
    executor.mkdir(parents=True)
    (executor / "ray_executor_v2.py").touch()
    affected.variables = {"FLASHINFER_WSFIX_WORKSPACE_MIB": "64"}
    (told,) = (row["sentence"] for row in affected.ask()["findings"] if row["name"] == "Ray")
    assert "workers of its Ray data-parallel backend do not get" in told
    affected.variables["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "0"
    (told,) = (row["sentence"] for row in affected.ask()["findings"] if row["name"] == "Ray")
    assert "vLLM's Ray workers do not get" in told


def test_binaries_of_another_version_than_flashinfer(affected: Environment) -> None:
    """That crashes on its own, with the check bypassed; a build's suffix is no other version."""
    affected.run("enable")
    affected.declare("flashinfer-jit-cache", "0.6.14+cu130")
    assert findings(affected.ask()) == []
    affected.declare("flashinfer-cubin", "0.6.12")
    found = affected.ask()
    assert findings(found) == ["mismatched FlashInfer"]
    told = "flashinfer-cubin is 0.6.12 and FlashInfer 0.6.14: that crashes on its own"
    assert told in found["findings"][-1]["sentence"] + found["findings"][0]["sentence"]
    affected.variables["FLASHINFER_DISABLE_VERSION_CHECK"] = "1"
    assert "FLASHINFER_DISABLE_VERSION_CHECK lets it pass" in str(affected.ask()["findings"])


def test_a_start_up_file_that_fails(affected: Environment) -> None:
    """Its error is told, by a doctor that runs from elsewhere; what it says in each interpreter is the same."""
    affected.run("enable")
    (affected.site_packages / "flashinfer_wsfix" / "activation.py").write_text("raise RuntimeError('broken')")
    affected.cwd = ROOT
    ran = affected.run("doctor")
    assert ran.returncode == 1
    assert "The start-up file fails in new processes: RuntimeError('broken')." in ran.stdout
    assert ran.stderr.startswith("flashinfer-wsfix: NOT guarded here, its start-up file failed")
