"""`flashinfer-wsfix run`, and the folder for PYTHONPATH: our sitecustomize is first, the shadowed one still runs."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from environments import BOOTSTRAP, PROBE, Environment, has_distribution_sitecustomize, output, package, run

OTEL = ("opentelemetry-distro", "opentelemetry-instrumentation")
QUIET = {f"OTEL_{name}_EXPORTER": "none" for name in ("TRACES", "METRICS", "LOGS")}
ON = "['sitecustomize']"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("environment")).copy_package()


@pytest.fixture
def shadowed(tmp_path):
    """A folder with another sitecustomize, whose source a test writes."""

    def write(source: str) -> str:
        (tmp_path / "sitecustomize.py").write_text(source)
        return str(tmp_path)

    return write


def launched(environment: Environment, *command: object, **variables: str):
    return environment.cli("run", *command, **variables)


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_commands_exit_code_is_the_exit_code(environment, code):
    ran = launched(environment, environment.python, "-c", f"{PROBE}\nsys.exit({code})")
    assert (ran.returncode, ran.stdout, ran.stderr) == (code, f"{ON}\n", "")


def test_the_command_is_not_a_child_but_the_process_itself(environment):
    """So signals of a supervisor reach it, and its own signal is what the supervisor sees."""
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert launched(environment, environment.python, "-c", kill).returncode == -15


def test_the_command_gets_the_signals_that_python_ignores(environment):
    """`yes | head` ends in silence, as it does without us."""
    ran = launched(environment, "bash", "-c", "yes | head -n 1; exit ${PIPESTATUS[0]}")
    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + signal.SIGPIPE, "y\n", "")


def test_options_of_the_command_are_the_commands(environment):
    echo = "import sys; print(sys.argv[1:])"
    ran = launched(environment, environment.python, "-c", echo, "--json", "--", "-h", "two words")
    assert ran.stdout.strip() == "['--json', '--', '-h', 'two words']"


@pytest.mark.parametrize("nothing", [[], ["--"]])
def test_without_a_command(environment, nothing):
    ran = launched(environment, *nothing)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert "run needs a command" in ran.stderr


@pytest.mark.parametrize(
    "command, code", [("no-such-command", 127), ("/no/such/command", 127), ("/", 126), (__file__, 126)]
)
def test_a_command_that_cannot_be_run(environment, command, code):
    """It does not exist, is a folder, or may not be executed: one sentence, and the code that a shell gives."""
    ran = launched(environment, command)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (code, "", 1)
    assert f"cannot run {command!r}: " in ran.stderr


@pytest.mark.parametrize("before", [None, "", "/a", "/a:/b", "FOLDER", "/a:FOLDER"])
def test_our_folder_is_first_on_pythonpath_and_there_once(environment, before):
    """Also where the launcher was nested, and what else is on it stays."""
    folder = str(environment.site / BOOTSTRAP)
    variables = {} if before is None else {"PYTHONPATH": before.replace("FOLDER", folder)}
    code = "import os; print(os.environ['PYTHONPATH'])"
    python = environment.python
    nested = launched(environment, python, "-m", "flashinfer_wsfix", "run", python, "-c", code, **variables)
    others = [entry for entry in (before or "").split(":") if entry.startswith("/")]
    assert nested.stdout.strip() == ":".join([folder, *others])


# --- the shadowed sitecustomize --------------------------------------------------------------------------------------


def test_the_shadowed_sitecustomize_runs_as_the_sitecustomize(environment, shadowed):
    """Under its name, from its file, and what it does to sys.path stays."""
    folder = shadowed("import sys; sys.path.append('/added'); name = __name__")
    code = "import sitecustomize as s, sys; print(s.name, s.__file__, s.__spec__.origin == s.__file__, sys.path[-1])"
    ran = launched(environment, environment.python, "-c", code + PROBE, PYTHONPATH=folder)
    assert ran.stdout.splitlines() == [f"sitecustomize {folder}/sitecustomize.py True /added", ON]


def test_our_folder_stays_on_the_path_in_its_place(environment, shadowed):
    folder = shadowed("")
    code = "import sys; print(sys.path[1:3])"
    ran = launched(environment, environment.python, "-c", code, PYTHONPATH=folder)
    assert ran.stdout.strip() == str([str(environment.site / BOOTSTRAP), folder])


@pytest.mark.parametrize(
    "source",
    ["raise RuntimeError('theirs')", "import no_such_module", "1/0", "def", "raise SystemExit(5)"],
)
def test_its_errors_are_what_they_were(environment, shadowed, source):
    """Python reports them, or ends, exactly as it does without us; we are in all the same."""
    folder = shadowed(source)
    command = [environment.python, "-c", f"print('ran'){PROBE}"]
    alone = run(command, PYTHONPATH=folder)
    ours = run(command, PYTHONPATH=f"{environment.site / BOOTSTRAP}:{folder}")
    assert ours.returncode == alone.returncode
    assert ours.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]
    assert "During handling" not in ours.stderr
    assert ours.stdout == alone.stdout.replace("None", ON)


@pytest.mark.skipif(has_distribution_sitecustomize(), reason="this Python has a sitecustomize of its own")
def test_where_there_is_none_ours_is_the_sitecustomize(environment):
    ran = launched(environment, environment.python, "-c", "import sitecustomize; print(sitecustomize.__file__)")
    assert (ran.stdout.strip(), ran.stderr) == (str(environment.site / BOOTSTRAP / "sitecustomize.py"), "")


def test_two_copies_of_ours_end(environment, tmp_path):
    """One of another installation comes second: it runs, and hands on to the next."""
    shutil.copy(environment.site / BOOTSTRAP / "sitecustomize.py", tmp_path)
    third = tmp_path / "third"
    third.mkdir()
    (third / "sitecustomize.py").write_text("print('third')")
    ran = launched(environment, environment.python, "-c", PROBE, PYTHONPATH=f"{tmp_path}:{third}")
    assert (ran.stdout.splitlines(), ran.stderr) == (["third", ON], "")


def test_loaded_by_its_path_it_activates_and_takes_nobodys_place(environment):
    """As somebody's own sitecustomize may do, whose folder is not ours."""
    code = f"import runpy; runpy.run_path('{environment.site / BOOTSTRAP / 'sitecustomize.py'}')"
    assert output([environment.python, "-c", code + PROBE]) == ON


# --- interpreters that are not ours ----------------------------------------------------------------------------------


def test_an_interpreter_without_the_package_only_runs_the_shadowed_one(environment, tmp_path, shadowed):
    other = Environment(tmp_path / "other")
    folder = shadowed("print('theirs')")
    ran = launched(environment, other.python, "-c", PROBE, PYTHONPATH=folder)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "theirs\nNone\n", "")


def test_an_interpreter_that_has_flashinfer_and_not_the_package_says_that_it_is_not_guarded(environment, tmp_path):
    """One line; a mere folder of that name is no FlashInfer. With the package's folder on PYTHONPATH it is guarded."""
    other = Environment(tmp_path / "other")
    (other.site / "flashinfer").mkdir()
    assert launched(environment, other.python, "-c", PROBE).stderr == ""
    (other.site / "flashinfer/__init__.py").write_text("raise RuntimeError")
    ran = launched(environment, other.python, "-c", PROBE)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (0, "None\n", 1)
    expected = f"flashinfer-wsfix: NOT guarded: flashinfer_wsfix is not installed for {other.python}, and "
    assert ran.stderr.startswith(expected)
    ran = launched(environment, other.python, "-c", PROBE, PYTHONPATH=str(environment.site))
    assert (ran.stdout, ran.stderr) == (f"{ON}\n", "")


@pytest.mark.parametrize("raised", ["SystemExit(3)", "RuntimeError()", "KeyboardInterrupt()"])
def test_a_broken_package_does_no_more_than_say_so(environment, tmp_path, shadowed, raised):
    other = Environment(tmp_path / "other")
    (other.site / "flashinfer_wsfix.py").write_text(f"raise {raised}")
    ran = launched(environment, other.python, "-c", PROBE, PYTHONPATH=shadowed("print('theirs')"))
    assert (ran.returncode, ran.stdout) == (0, "theirs\nNone\n")
    assert ran.stderr == f"flashinfer-wsfix: NOT guarded here, because of an error of ours: {raised}.\n"


def old_interpreters() -> list[str]:
    """Pythons older than ours, where there are any: on PATH or next to the one that runs this."""
    names = ("2.7", "3.6", "3.7", "3.8", "3.9")
    siblings = Path(sys.base_prefix).parent
    found = [next(siblings.glob(f"{name}.*/bin/python{name}"), None) or shutil.which(f"python{name}") for name in names]
    return [str(python) for python in found if python and run([python, "-V"]).returncode == 0]


def test_an_older_python_only_runs_the_shadowed_one(environment, shadowed):
    """It cannot read the package even where it finds it."""
    pythons = old_interpreters()
    if not pythons:
        pytest.skip("there is no older Python here")
    path = shadowed("import sys; sys.stdout.write('theirs ')") + f":{environment.site}"
    for python in pythons:
        ran = launched(environment, python, "-B", "-c", "import sys; sys.stdout.write('ran')", PYTHONPATH=path)
        assert (python, ran.returncode, ran.stdout, ran.stderr) == (python, 0, "theirs ran", "")


# --- Debian and Ubuntu -----------------------------------------------------------------------------------------------

PYTHONS = filter(os.path.exists, (sys.executable, "/usr/bin/python3"))
DISTRIBUTION = next(filter(has_distribution_sitecustomize, PYTHONS), None)


@pytest.mark.skipif(DISTRIBUTION is None, reason="no Python of Debian or Ubuntu here")
def test_a_distributions_sitecustomize_shadows_one_in_site_packages_and_ours_hands_on_to_it(tmp_path):
    """So the documented line in a venv's own sitecustomize does nothing there; launcher and start-up file work."""
    debian = Environment(tmp_path / "debian", DISTRIBUTION).copy_package()
    (debian.site / "sitecustomize.py").write_text("import flashinfer_wsfix")
    assert debian.routes() == "None"
    where = "import sitecustomize; print(sitecustomize.__file__.startswith('/usr/lib/'))"
    ran = launched(debian, debian.python, "-c", where + PROBE)
    assert (ran.stdout.splitlines(), ran.stderr) == (["True", ON], "")
    assert debian.cli("enable").returncode == 0
    assert debian.routes() == "['start-up file']"


# --- OpenTelemetry ---------------------------------------------------------------------------------------------------

TELL = f"""
import os, subprocess, sys
{PROBE}
print("opentelemetry.instrumentation.auto_instrumentation" in sys.modules, flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "child"])
"""


@pytest.fixture(scope="module")
def otel(tmp_path_factory):
    made = Environment(tmp_path_factory.mktemp("otel")).copy_package()
    pip = [sys.executable, "-m", "pip", "--python", made.python, "--disable-pip-version-check", "install", "-q"]
    ran = run([*pip, "--no-compile", *OTEL])
    assert ran.returncode == 0, ran.stderr
    return made


def test_opentelemetry_first_then_ours_works_in_the_application_and_its_children(otel):
    """Its sitecustomize puts its own folder back to the front of PYTHONPATH; ours goes before it again."""
    launcher = otel.folder / "bin/opentelemetry-instrument"
    ran = run([launcher, otel.python, "-m", "flashinfer_wsfix", "run", otel.python, "-c", TELL], **QUIET)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, [ON, "True"] * 2), ran.stderr


def test_ours_first_then_opentelemetry_cannot_work_and_says_so(otel):
    """OpenTelemetry's sitecustomize comes before ours and does not run it."""
    launcher = otel.folder / "bin/opentelemetry-instrument"
    ran = launched(otel, launcher, otel.python, "-c", TELL, **QUIET)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, ["None", "True"] * 2)
    assert ran.stderr.count("NOT be guarded") == 1
    assert "opentelemetry-instrument flashinfer-wsfix run CMD" in ran.stderr


def test_a_script_that_starts_opentelemetry_is_warned_of_just_the_same(otel):
    """The launcher sees a shell; its child says it. So does one of `PYTHONPATH` alone; with the start-up file none."""
    script = f"{otel.folder}/bin/opentelemetry-instrument {otel.python} -c 'print(1)'"
    ran = launched(otel, "sh", "-c", script, **QUIET)
    assert (ran.returncode, ran.stdout, ran.stderr.count("NOT be guarded")) == (0, "1\n", 1)
    path = {"PYTHONPATH": str(otel.site / BOOTSTRAP)}
    assert run(["sh", "-c", script], **path, **QUIET).stderr.count("NOT be guarded") == 1
    otel.cli("enable")
    assert run(["sh", "-c", script], **path, **QUIET).stderr == ""
    otel.cli("disable")


def test_with_the_start_up_file_opentelemetry_does_not_matter(otel):
    assert otel.cli("enable").returncode == 0
    ran = run([otel.folder / "bin/opentelemetry-instrument", otel.python, "-c", TELL], **QUIET)
    assert (ran.returncode, ran.stdout.splitlines()) == (0, ["['start-up file']", "True"] * 2), ran.stderr
    assert otel.cli("disable").returncode == 0


def test_the_path_command_prints_the_folder_with_our_sitecustomize_alone(environment):
    folder = Path(output([environment.python, "-m", "flashinfer_wsfix", "path"]))
    assert folder == environment.site / BOOTSTRAP
    assert {path.name for path in (package() / "bootstrap").iterdir()} - {"__pycache__"} == {"sitecustomize.py"}


def test_a_leading_double_dash_is_the_launchers(environment):
    """As env, nohup and srun have it."""
    ran = environment.cli("run", "--", environment.python, "-c", PROBE)
    assert (ran.returncode, ran.stdout.strip()) == (0, "['sitecustomize']")
