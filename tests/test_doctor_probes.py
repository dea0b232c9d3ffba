"""What the doctor looks at and tries, that nothing of it can fail, and how it is told."""

import json
import os
import py_compile
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from flashinfer_wsfix.cli import doctor
from flashinfer_wsfix.cli.doctor import children, printer
from flashinfer_wsfix.cli.doctor import environment as environment_of

import hosts
import machines
import releases
from machines import AFFECTED, ROOT, RTX, SITE_PACKAGES, UNTRIED, Environment, findings, make_flashinfer, states

environment, affected = machines.environment, machines.affected

KEYS = {
    "": {"sentence", "problem", "environment", "defects", "activation", "findings", "still_dies", "not_this_bug"},
    "defects": {"name", "what", "state", "set_up", "guarded", "sentence"},
    "activation": {"where", "active", "routes", "sentence"},
    "findings": {"name", "problem", "sentence", "advice"},
}


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
    assert row["sentence"].startswith("guarded: all 10 sites of FlashInfer 0.6.14")
    assert row["active"]


def test_guard_that_fails_when_tried(environment: Environment) -> None:
    """By its source this FlashInfer can be guarded; imported, its cache is of an unknown kind. The trial counts."""
    make_flashinfer(environment, "[]")
    environment.run("enable")
    found = environment.ask()
    assert (states(found), findings(found)) == ("OOAA", ["guard failed"])


def test_flashinfer_without_source(environment: Environment) -> None:
    """Compiled alone it is read just the same."""
    source = make_flashinfer(environment, "{}")
    py_compile.compile(str(source), str(source.with_suffix(".pyc")))
    source.unlink()
    found = environment.ask()
    assert (states(found), findings(found)) == ("OOAA", ["not active"])
    environment.run("enable")
    found = environment.ask()
    assert states(found) == "GGAA"
    assert found["sentence"] == f"Guarded: {AFFECTED}"


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
    assert (found["problem"], found["still_dies"]) == (False, [])
    assert [(row["set_up"], row["guarded"]) for row in found["defects"][:2]] == [(True, False)] * 2
    printed = affected.run("doctor").stdout
    assert printed.count("applies, set up, not tried: ") == 2
    assert "guarded: all" not in printed and "Guarded, and it still dies" not in printed


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
    monkeypatch.setattr(environment_of, "version_of", lambda wheel: None)
    assert environment_of._cudnn() == {"cudnn": "9.23.1", "cudnn_asked": False, "cudnn_wheels": {}}


def test_children_have_a_time_limit() -> None:
    with pytest.raises(children.NoAnswer, match=r"^no answer within 0 s$"):
        children.run([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.1)


def test_report_for_people(affected: Environment) -> None:
    """The overall sentence comes first; no colour; the exit status is the JSON's."""
    ran = affected.run("doctor")
    assert ran.returncode == 1
    assert ran.stdout.splitlines() == list(printer.lines(affected.ask()))
    assert ran.stdout.startswith("NOT guarded: this machine is affected (D1 workspace moves under graphs, D2\n")
    assert "\x1b" not in ran.stdout
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in ran.stdout
    assert "\n  - the GPU is of sm_86, where the same symptom was reported" in ran.stdout


def test_who_reads_only_its_first_lines_gets_its_exit_status(environment: Environment) -> None:
    """`set -o pipefail; flashinfer-wsfix doctor | head`: 0 where there is nothing to do, 1 where there is."""
    closed = "import os; from flashinfer_wsfix.__main__ import main; read, write = os.pipe(); os.close(read)\n"
    closed += "os.dup2(write, 1); raise SystemExit(main(['doctor']))"
    for status in (0, 1):
        ran = environment.run("-c", closed)
        assert (ran.returncode, ran.stderr) == (status, "")
        environment.add(releases.fetch("0.6.14"))


def test_wrong_usage(environment: Environment) -> None:
    assert environment.run("doctor", "--yaml").returncode == 2


def test_json_has_the_documented_keys(affected: Environment) -> None:
    found = affected.ask()
    assert found.keys() == KEYS[""]
    for name in ("defects", "activation", "findings"):
        assert all(row.keys() == KEYS[name] for row in found[name])
    affected.put_gpu(*RTX)
    made = affected.ask()["environment"]
    assert made.keys() == environment_of.NOTHING.keys()
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


def test_a_hung_program_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver may never let it go: it is not waited for, not even by way of a child that holds its pipe."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\nsleep 60 &\ntrap '' TERM\nsleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(environment_of, "NVIDIA_SMI", [str(script)])
    monkeypatch.setattr(environment_of, "NVIDIA_SMI_SECONDS", 1)
    began = time.monotonic()
    found = environment_of._gpus()
    assert time.monotonic() - began < 20
    assert found == {"gpus": [], "gpus_unknown": "nvidia-smi: no answer within 1 s"}


def test_equal_gpus_are_one_line() -> None:
    gpus = [{"name": name, "capability": "12.0", "driver": "580.95"} for name in ("A", "B", "A", "A")]
    environment = dict.fromkeys(environment_of.ENVIRONMENT) | environment_of.NOTHING | {"gpus": gpus}
    lines = [line.split(None, 1)[1] for line in printer._environment(environment) if " GPU " in line]
    assert lines == [
        "3 x A, compute capability 12.0, driver 580.95",
        "B, compute capability 12.0, driver 580.95",
    ]


def test_children_come_up_with_the_flags_of_the_doctor(affected: Environment) -> None:
    """Under -I and -E a sitecustomize on PYTHONPATH is ignored: what is started so is not guarded."""
    ours = affected.site_packages / "flashinfer_wsfix" / "bootstrap"
    affected.variables["PYTHONPATH"] = str(ours)
    assert states(affected.ask()) == "GGUA"
    for flags in (["-I"], ["-E"]):
        found = affected.ask(*flags)
        assert (states(found), findings(found)) == ("OOUA", ["not active"])
    affected.variables.clear()
    affected.run("enable")
    assert states(affected.ask("-I")) == "GGUA"
    affected.variables["PYTHONPATH"] = f"{affected.site_packages}:{releases.fetch('0.6.14')}"
    assert states(affected.ask("-S")) == "OOUA"


def test_the_trial_imports_what_servers_import(environment: Environment) -> None:
    """What only a module shows that FlashInfer imports late is not tried, since no server may ever import it."""
    source = make_flashinfer(environment, "{}")
    late = source.with_name("gemm_bf16_fp4_cudnn.py")
    late.write_text("open(__file__ + '.was-imported', 'w')\n")
    environment.run("enable")
    assert states(environment.ask()) == "GGAA"
    assert not late.with_name(late.name + ".was-imported").exists()


def test_what_to_gather_where_it_is_guarded_and_still_dies(affected: Environment) -> None:
    assert "still dies" not in affected.run("doctor").stdout
    affected.run("enable")
    affected.add(SITE_PACKAGES)  # torch
    printed = affected.run("doctor").stdout
    gather = printed[printed.index("Guarded, and it still dies") :]
    for word in ("status()", "FLASHINFER_WSFIX=observe", "core dump", "--enforce-eager", "--json"):
        assert word in gather
