"""`flashinfer-wsfix enable` and `disable`: what they write, where, what it does in an interpreter, that it goes."""

import os
import re
import shutil
import stat
import sys

import pytest
from environments import Environment, output, package, run

FILE = "flashinfer_wsfix.pth"
ON = "['start-up file']"


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "environment").copy_package()


@pytest.fixture
def enabled(environment):
    ran = environment.cli("enable")
    assert (ran.returncode, ran.stderr) == (0, "")
    return environment


def test_enable_then_disable(environment):
    """One file, two lines and one, an activated interpreter between, and the folder as it was."""
    before = environment.files()
    ran = environment.cli("enable")
    assert ran.stdout == (
        f"{environment.site / FILE} is written, and a fresh {environment.python} comes up activated by it.\n"
        "Restart the server. Undo: flashinfer-wsfix disable\n"
        f"No FlashInfer is installed for {environment.python}: if the server uses another Python, run enable with that"
        " one.\n"
    )
    assert environment.files() - before == {FILE}
    assert environment.routes() == ON
    ran = environment.cli("disable")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"Removed {environment.site / FILE}.\n", "")
    assert environment.files() == before
    assert environment.routes() == "None"


def test_both_may_be_repeated(enabled):
    assert enabled.cli("enable").returncode == 0
    assert [enabled.cli("disable").returncode for _ in range(3)] == [0, 0, 0]
    assert "There is no start-up file of ours in" in enabled.cli("disable").stdout


def test_with_a_flashinfer_no_other_python_is_mentioned(environment):
    (environment.site / "flashinfer").mkdir()
    assert "No FlashInfer" in environment.cli("enable").stdout  # a mere folder
    (environment.site / "flashinfer/__init__.py").write_text("raise RuntimeError")
    assert "No FlashInfer" not in environment.cli("enable").stdout


@pytest.mark.parametrize("fails", ["check", "write"])
def test_a_second_enable_that_fails_leaves_what_the_first_wrote(enabled, fails):
    """Also what an older version wrote, to the byte."""
    old = '# Written by "flashinfer-wsfix enable". Older.\nimport sys\n'
    (enabled.site / FILE).write_text(old)
    (enabled.site / "flashinfer_wsfix.start").write_text(old)
    before = enabled.files()
    if fails == "check":
        (enabled.site / "wrapt").rename(enabled.folder / "wrapt")
        ran = enabled.cli("enable")
        assert "is again what it was before" in ran.stderr
        (enabled.folder / "wrapt").rename(enabled.site / "wrapt")
    else:
        block = f"import os; os.mkdir(f'{enabled.site / FILE}.{{os.getpid()}}')"
        ran = run([enabled.python, "-c", block + WRITE])
        next(enabled.site.glob(FILE + ".*")).rmdir()
        assert "nothing was changed" in ran.stderr
    assert (ran.returncode, enabled.files()) == (1, before)
    assert [(enabled.site / name).read_text() for name in (FILE, "flashinfer_wsfix.start")] == [old] * 2


def test_where_the_package_is_in_a_folder_of_its_own_the_advice_names_both_entries(environment, tmp_path):
    """As after `pip install --target`: the folder of our sitecustomize alone leads to no package."""
    shutil.copytree(environment.site / "flashinfer_wsfix", tmp_path / "target/flashinfer_wsfix")
    other = Environment(tmp_path / "other")
    code = "from flashinfer_wsfix.cli import startup_file; print(startup_file._without_it())"
    told = output([other.python, "-c", code], PYTHONPATH=str(tmp_path / "target"))
    (path,) = re.findall("PYTHONPATH=([^ ]+)", told)
    assert path == f"{tmp_path}/target/flashinfer_wsfix/bootstrap:{tmp_path}/target"
    assert other.routes(PYTHONPATH=path) == "['sitecustomize']"


def test_a_reviewer_can_read_it(enabled):
    """A comment that says whose it is and how to remove it, one line of code, nothing but ASCII."""
    text = (enabled.site / FILE).read_text(encoding="ascii")
    comment, line = text.splitlines()
    assert comment.startswith("#") and "flashinfer-wsfix disable" in comment
    assert line.startswith("import ") and len(line) < 550
    assert stat.S_IMODE((enabled.site / FILE).stat().st_mode) & 0o444 == 0o444


def test_a_process_without_flashinfer_notices_nothing_else(enabled):
    """It has the package and its hook, and no module beyond."""
    modules = "import sys; print(*sorted(sys.modules))"
    with_us = set(output([enabled.python, "-c", modules]).split())
    enabled.cli("disable")
    without = set(output([enabled.python, "-c", modules]).split())
    ours = ("activation", "importer", "names", "state")
    assert with_us - without == {"flashinfer_wsfix", *(f"flashinfer_wsfix.{name}" for name in ours)}


def test_plugin_functions_bring_nothing_else(environment):
    """Nor does the module that vLLM, SGLang and Ray import."""
    code = "import sys; before = set(sys.modules); import flashinfer_wsfix.startup as s; s.vllm_plugin()"
    code += "; s.sglang_plugin(); s.ray_worker(); print(*sorted(set(sys.modules) - before))"
    names = ("activation", "importer", "names", "startup", "state")
    expected = ["flashinfer_wsfix", *(f"flashinfer_wsfix.{name}" for name in names)]
    assert output([environment.python, "-c", code]).split() == expected


FAILED = "flashinfer-wsfix: NOT guarded here, its start-up file failed: {}\n"


@pytest.mark.parametrize("raised", ["SystemExit(3)", "RuntimeError('x')", "ImportError()", "KeyboardInterrupt()"])
def test_nothing_gets_out_of_it(enabled, raised):
    """Whatever the package does when it is imported, the interpreter starts, and one line says what failed."""
    (enabled.site / "flashinfer_wsfix/__init__.py").write_text(f"raise {raised}")
    ran = run([enabled.python, "-c", "print('ran')"])
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ran\n", FAILED.format(raised))


def test_an_error_in_strict_mode_does_not_either(enabled):
    (enabled.site / "flashinfer_wsfix/activation.py").write_text("def activate(route): raise RuntimeError")
    (enabled.site / "flashinfer_wsfix/__init__.py").write_text("")
    ran = run([enabled.python, "-c", "print('ran')"], FLASHINFER_WSFIX_STRICT="1")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ran\n", FAILED.format("RuntimeError()"))


@pytest.mark.parametrize("file", ["activation.py", "importer.py"])
def test_an_installation_that_lost_a_file_says_so(enabled, file):
    """The package is there and cannot guard: that is no uninstalled package."""
    (enabled.site / "flashinfer_wsfix" / file).unlink()
    ran = run([enabled.python, "-c", "print('ran')"])
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (0, "ran\n", 1)
    assert "No module named 'flashinfer_wsfix." in ran.stderr


def test_without_a_standard_error_it_says_nothing(enabled):
    (enabled.site / "flashinfer_wsfix/__init__.py").write_text("raise RuntimeError")
    assert run(["sh", "-c", f"exec {enabled.python} -c 'print(1)' 2>&-"]).stdout == "1\n"


def test_it_is_inert_once_the_package_is_gone(enabled):
    shutil.rmtree(enabled.site / "flashinfer_wsfix")
    assert enabled.routes() == "None"
    (enabled.site / "flashinfer_wsfix/__pycache__").mkdir(parents=True)  # what another version of Python left
    assert enabled.routes() == "None"


def test_the_file_that_version_0_1_0_wrote_goes_on_working(enabled):
    """It lies in environments whose package was upgraded."""
    line = "try:\\n from flashinfer_wsfix.hook import activate; activate('start-up file')\\nexcept BaseException: pass"
    (enabled.site / FILE).write_text(f'# Written by "flashinfer-wsfix enable".\nimport sys; exec("{line}")\n')
    assert enabled.routes() == ON
    assert enabled.cli("disable").returncode == 0
    assert not (enabled.site / FILE).exists()


def test_no_error_of_ours_leaves_half_of_it(environment):
    """Nothing can be written: one sentence, and the folder as it was."""
    before = environment.files()
    code = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (0, r.RLIM_INFINITY))\n"
    code += "from flashinfer_wsfix.cli import startup_file; ended = startup_file.enable()\n"
    code += "r.setrlimit(r.RLIMIT_FSIZE, (r.RLIM_INFINITY,) * 2); raise SystemExit(ended)"
    ran = run([environment.python, "-B", "-c", code])
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "cannot write" in ran.stderr and "nothing was changed" in ran.stderr
    assert environment.files() == before


@pytest.mark.parametrize("command", ["enable", "disable"])
def test_a_read_only_site_packages(environment, command):
    if command == "disable":
        environment.cli("enable")
    before = environment.files()
    environment.site.chmod(0o555)
    try:
        # root may write anywhere, so it gives that up first
        without = ["setpriv", "--bounding-set", "-dac_override", "--"] if os.geteuid() == 0 else []
        if without and not shutil.which("setpriv"):
            pytest.skip("root, and no setpriv")
        ran = run([*without, environment.python, "-B", "-m", "flashinfer_wsfix", command])
    finally:
        environment.site.chmod(0o755)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert f"{environment.site / FILE}: Permission denied" in ran.stderr
    if command == "enable":
        assert "`flashinfer-wsfix run CMD`" in ran.stderr and "`flashinfer-wsfix path`" in ran.stderr
    assert environment.files() == before


@pytest.mark.parametrize("text", ["import sys\n", "", "/somewhere\n"])
def test_a_file_of_somebody_else_is_left_alone(environment, text):
    """enable does not overwrite it, disable does not remove it; both say so."""
    (environment.site / FILE).write_text(text)
    enable, disable = environment.cli("enable"), environment.cli("disable")
    assert (enable.returncode, disable.returncode) == (1, 0)
    assert "not of our making" in enable.stderr and "not of our making" in disable.stderr
    assert "There is no start-up file of ours in" in disable.stdout
    assert (environment.site / FILE).read_text() == text


def test_a_file_that_does_not_work_is_not_kept(tmp_path):
    """The package is only on PYTHONPATH here, so a server that starts without it would not be guarded."""
    bare = Environment(tmp_path / "bare")
    ran = bare.cli("enable", PYTHONPATH=str(package().parent))
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "(flashinfer_wsfix is not installed there: pip install it first)" in ran.stderr
    assert not any("flashinfer_wsfix" in name for name in bare.files())


def user_site(environment, tmp_path):
    """The user's site-packages of the base interpreter of a venv, in a home of its own, with the package in it."""
    base = output([environment.python, "-c", "import sys; print(sys._base_executable)"])
    home = {"PYTHONUSERBASE": str(tmp_path / "home")}
    site = output([base, "-c", "import site; print(site.getusersitepackages())"], **home)
    shutil.copytree(environment.site, site)
    return base, home, site


def test_a_user_installation_is_enabled_in_the_users_site_packages(environment, tmp_path):
    """Where it also works, and where disable finds it."""
    base, home, site = user_site(environment, tmp_path)
    enable = run([base, "-m", "flashinfer_wsfix", "enable"], **home)
    assert enable.stdout.startswith(f"{site}/{FILE} is written"), enable.stderr
    probe = "import sys; print('flashinfer_wsfix.state' in sys.modules)"
    assert output([base, "-c", probe], **home) == "True"
    assert output([base, "-s", "-c", probe], **home) == "False"
    assert output([base, "-m", "flashinfer_wsfix", "disable"], **home) == f"Removed {site}/{FILE}."
    assert not os.path.exists(f"{site}/{FILE}")


def test_metadata_elsewhere_on_the_path_does_not_decide(environment, tmp_path):
    """As of a checkout that PYTHONPATH leads to: the user's installation is what counts."""
    base, home, site = user_site(environment, tmp_path)
    (tmp_path / "flashinfer_wsfix.egg-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: flashinfer-wsfix\nVersion: 0\n"
    (tmp_path / "flashinfer_wsfix.egg-info/PKG-INFO").write_text(metadata)
    enable = run([base, "-m", "flashinfer_wsfix", "enable"], PYTHONPATH=str(tmp_path), **home)
    run([base, "-m", "flashinfer_wsfix", "disable"], **home)  # wherever it went: `base` is not the test's own
    assert enable.stdout.startswith(f"{site}/{FILE} is written"), enable.stderr


def test_a_package_that_ends_the_interpreter_is_no_success(environment):
    """Whatever the import of wrapt ends with, also with what would count as a good end."""
    (environment.site / "wrapt").unlink()
    (environment.site / "wrapt.py").write_text("raise SystemExit(0)")
    before = environment.files()
    ran = environment.cli("enable")
    assert (ran.returncode, ran.stdout, environment.files()) == (1, "", before)


def test_a_venv_does_not_touch_the_users_site_packages(enabled, tmp_path):
    _, home, site = user_site(enabled, tmp_path)
    assert os.path.exists(f"{site}/{FILE}")
    assert enabled.cli("disable", **home).returncode == 0
    assert os.path.exists(f"{site}/{FILE}") and not (enabled.site / FILE).exists()


# --- Python 3.15 (PEP 829) -------------------------------------------------------------------------------------------

WRITE = """
import sys, sysconfig
sys.version_info = (3, 15, 0, "final", 0)
from flashinfer_wsfix.cli import startup_file
raise SystemExit(startup_file.enable())
"""
NEW = {FILE, "flashinfer_wsfix.start", "_flashinfer_wsfix_start.py"}


@pytest.mark.skipif(sys.version_info >= (3, 15), reason="it writes them itself")
def test_before_python_3_15_there_is_no_start_file(enabled):
    assert NEW & enabled.files() == {FILE}


@pytest.fixture
def enabled_3_15(environment):
    ran = run([environment.python, "-c", WRITE])
    assert ran.returncode == 0, ran.stderr
    return environment


def entry_points(environment):
    """The lines that PEP 829 has Python resolve and call, and a program that does so."""
    text = (environment.site / "flashinfer_wsfix.start").read_text(encoding="ascii")
    points = [line for line in text.splitlines() if line and not line.startswith("#")]
    return points, f"import pkgutil\nfor point in {points!r}: pkgutil.resolve_name(point)()\n"


def test_a_start_file_names_a_callable_that_activates(enabled_3_15):
    """Without the .pth file, whose line Python 3.15 does not run where there is a .start file."""
    (enabled_3_15.site / FILE).unlink()
    points, call = entry_points(enabled_3_15)
    assert len(points) == 1 and re.fullmatch(r"\w+:\w+", points[0])
    probe = "import sys; print(sys.modules['flashinfer_wsfix.state'].routes)"
    assert output([enabled_3_15.python, "-c", call + probe]) == ON


def test_a_start_file_is_inert_once_the_package_is_gone(enabled_3_15):
    """Python 3.15 would print a traceback in every interpreter if its callable went with the package."""
    shutil.rmtree(enabled_3_15.site / "flashinfer_wsfix")
    _, call = entry_points(enabled_3_15)
    assert output([enabled_3_15.python, "-c", call + "print('ran')"]) == "ran"


def test_a_start_file_says_in_one_line_what_failed(enabled_3_15):
    """As the .pth file does."""
    _, call = entry_points(enabled_3_15)
    (enabled_3_15.site / FILE).unlink()
    (enabled_3_15.site / "flashinfer_wsfix/__init__.py").write_text("raise RuntimeError('x')")
    ran = run([enabled_3_15.python, "-c", call + "print('ran')"])
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ran\n", FAILED.format("RuntimeError('x')"))


def test_where_the_last_of_the_three_cannot_be_written_none_stays(environment):
    before = environment.files()
    block = "import os, sysconfig; taken = f'{sysconfig.get_path(\"purelib\")}/FILE.{os.getpid()}'; os.mkdir(taken)"
    ran = run([environment.python, "-c", block.replace("FILE", FILE) + WRITE])
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "nothing was changed" in ran.stderr
    assert {name.rpartition(".")[0] for name in environment.files() - before} == {FILE}  # the folder in the way


def test_disable_removes_the_start_file_and_what_python_made_of_its_module(enabled_3_15):
    """And nothing that Python made of another's."""
    _, call = entry_points(enabled_3_15)
    output([enabled_3_15.python, "-c", call])
    assert list(enabled_3_15.site.glob("__pycache__/_flashinfer_wsfix_start*"))
    (enabled_3_15.site / "__pycache__/another.pyc").touch()
    assert enabled_3_15.cli("disable").returncode == 0
    assert not NEW & enabled_3_15.files()
    assert [path.name for path in enabled_3_15.site.glob("__pycache__/*")] == ["another.pyc"]


def test_nothing_is_written_where_wrapt_is_missing(environment):
    """Without it nothing can be guarded: a start-up file would only promise."""
    (environment.site / "wrapt").unlink()
    before = environment.files()
    ran = environment.cli("enable")
    assert (ran.returncode, ran.stdout, environment.files()) == (1, "", before)
    assert "(wrapt is not installed there: pip install it first)" in ran.stderr


def test_noise_of_others_at_start_is_no_failure(environment):
    """What counts is how the fresh interpreter ends, not what other start-up files print."""
    noise = 'import sys; sys.stderr.buffer.write(b"noise\\n")\n'
    (environment.site / "noisy.pth").write_text(noise)
    ran = environment.cli("enable")
    assert ran.returncode == 0
    assert "comes up activated" in ran.stdout
