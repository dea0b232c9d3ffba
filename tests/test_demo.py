"""`flashinfer-wsfix demo` in processes of its own: the stock child really dies, and nothing unseen is claimed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from flashinfer_wsfix.cli.demo import TO_SEE, draw

import releases

ROOT = Path(__file__).parent.parent
CALL = {"step", "asked", "address", "nbytes", "moved", "zeroed", "generation"}
REPLAY = {"step", "asked", "address", "survived"}


def demo(release, *options, command=("-m", "flashinfer_wsfix", "demo"), path=(), **environment):
    """Run the demo on a release as if it were installed, or on none."""
    folders = [ROOT, *path, *([releases.fetch(release)] if release else [])]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_WSFIX")}
    environment = {**clean, **environment, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    return subprocess.run([sys.executable, *command, *options], env=environment, capture_output=True, text=True)


def seen(done):
    """The JSON of the demo."""
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["0.6.12", "0.6.18.post1"])
def shown(request):
    """What the demo shows on an affected release."""
    done = demo(request.param, "--json", PYTHONFAULTHANDLER="1")
    assert done.returncode == 0, done
    return request.param, seen(done)


def test_the_stock_child_dies_of_sigsegv_in_the_replay_and_the_guarded_one_lives(shown):
    release, result = shown
    stock, guarded = result["children"]["stock"], result["children"]["guarded"]
    assert (result["flashinfer"], result["device"], result["shown"]) == (release, "cpu", True)
    assert (stock["state"], stock["ended"]) == ("disabled", "SIGSEGV")
    assert (guarded["state"], guarded["ended"]) == ("guarded", "lived")
    assert [step["step"] for step in stock["steps"]] == ["captured", "grown", "replayed"]
    assert [step["step"] for step in guarded["steps"]] == ["captured", "grown", "replayed", "grown", "replayed"]
    assert "died of SIGSEGV" in result["sentence"]


def test_256_bytes_more_move_the_stock_workspace_and_the_replay_writes_to_the_old_one(shown):
    captured, grown, replayed = shown[1]["children"]["stock"]["steps"]
    assert (captured["asked"], grown["asked"]) == (33_554_432, 33_554_688)
    assert (captured["nbytes"], grown["nbytes"]) == (33_554_432, 33_554_688)
    assert (grown["moved"], grown["zeroed"], grown["generation"]) == (True, False, None)
    assert grown["address"] != captured["address"] == replayed["address"]
    assert (replayed["asked"], replayed["survived"]) == (captured["asked"], False)


def test_the_guarded_lane_really_grows_and_both_replays_write_to_its_first_generation(shown):
    captured, same, first, grown, second = shown[1]["children"]["guarded"]["steps"]
    assert (captured["generation"], same["generation"], grown["generation"]) == (1, 1, 2)
    assert (captured["nbytes"], grown["nbytes"]) == (40 << 20, 80 << 20)
    assert (captured["zeroed"], same["zeroed"], grown["zeroed"]) == (True, None, True)
    assert captured["address"] == same["address"] == first["address"] == second["address"] != grown["address"]
    assert (first["survived"], second["survived"]) == (True, True)


def test_the_shape_of_the_json(shown):
    result = shown[1]
    assert list(result) == ["flashinfer", "device", "shown", "sentence", "children"]
    assert list(result["children"]) == ["stock", "guarded"]
    for child in result["children"].values():
        assert set(child) == {"state", "reason", "steps", "ended", "log"}
        for step in child["steps"]:
            assert set(step) == (REPLAY if step["step"] == "replayed" else CALL)


def test_no_child_prints_a_backtrace(shown):
    """The crash is expected: neither Python's fault handler nor tvm-ffi's says anything, and no file is dumped."""
    assert len(shown[1]["children"]["stock"]["log"]) == 1  # ours: FLASHINFER_WSFIX is off


def test_with_the_guard_off_both_children_die_and_the_demo_says_so():
    """Also the text: within 80 columns, ASCII, no colour when piped."""
    done = demo("0.6.18.post1", FLASHINFER_WSFIX="0")
    assert done.returncode == 1
    assert re.search(r"^ended +X killed by SIGSEGV +X killed by SIGSEGV$", done.stdout, re.M)
    assert re.search(r"^NOT shown: .*\n?.*FLASHINFER_WSFIX is off", done.stdout, re.M)
    assert "FLASHINFER_WSFIX=0 is set: unset it to see the guard." in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) < 80
    assert done.stdout.isascii()
    assert "\033" not in done.stdout


def test_observe_logs_the_move_that_then_kills_the_child():
    done = demo("0.6.12", "--json", FLASHINFER_WSFIX="observe")
    result = seen(done)
    guarded = result["children"]["guarded"]
    assert (done.returncode, result["shown"], guarded["ended"]) == (1, False, "SIGSEGV")
    assert result["sentence"].endswith("FLASHINFER_WSFIX=observe is set: unset it to see the guard.")
    captured, grown, _ = guarded["steps"]
    [move] = [line for line in guarded["log"] if "MOVED" in line]
    for number in (captured["nbytes"], hex(captured["address"]), grown["nbytes"], hex(grown["address"])):
        assert str(number) in move


def test_without_growth_by_the_first_call_the_guard_holds_as_well():
    """WORKSPACE_MIB=0: the graph captured FlashInfer's own buffer, and that one is kept."""
    done = demo("0.6.18.post1", "--json", FLASHINFER_WSFIX_WORKSPACE_MIB="0")
    guarded = seen(done)["children"]["guarded"]
    assert (done.returncode, guarded["ended"], guarded["steps"][0]["generation"]) == (0, "lived", 0)


def test_a_stock_child_that_is_not_caught_is_no_evidence():
    """Where glibc does not unmap what is freed, the write goes unnoticed: the demo does not claim a crash."""
    done = demo("0.6.12", "--json", MALLOC_MMAP_MAX_="0")
    assert done.returncode == 1
    assert "not caught at once" in seen(done)["sentence"]


def test_the_timeline_fits_80_columns(shown):
    lines = draw(shown[1])
    assert max(map(len, lines)) < 80
    assert any(re.fullmatch(r"ended +X killed by SIGSEGV += alive", line) for line in lines)


def test_colour_is_padding_neutral():
    step = {"step": "replayed", "asked": 1, "address": 16, "survived": False}
    child = {"state": None, "reason": None, "steps": [step], "ended": "SIGSEGV", "log": []}
    children = {"stock": child, "guarded": child}
    result = {"flashinfer": "0", "device": "cpu", "shown": True, "sentence": "", "children": children}
    painted = draw(result, colour=True)
    assert any("\033[31m" in line for line in painted)
    plain = [re.sub("\033\\[\\d+m", "", line).rstrip() for line in painted]
    assert plain == draw(result)


def test_a_release_that_is_not_affected():
    done = demo("0.7.4")
    assert done.returncode == 0
    words = " ".join(done.stdout.split())
    assert words.startswith("Nothing to show: FlashInfer 0.7.4 grows its cuDNN workspace without moving it")
    assert words.endswith(TO_SEE)


def test_no_flashinfer():
    done = demo(None, "--json")
    result = seen(done)
    assert done.returncode == 1
    assert result["sentence"].startswith("FlashInfer is not installed")
    assert result["sentence"].endswith(TO_SEE)
    assert (result["flashinfer"], result["children"]) == (None, {})


def test_a_folder_named_flashinfer_is_not_flashinfer(tmp_path):
    (tmp_path / "flashinfer").mkdir()
    assert "FlashInfer is not installed" in demo(None, path=[tmp_path]).stdout


def test_no_torch():
    hidden = "import sys, importlib.util as util; find = util.find_spec;"
    hidden += "util.find_spec = lambda name: None if name == 'torch' else find(name);"
    hidden += "from flashinfer_wsfix.__main__ import main; sys.exit(main(['demo']))"
    done = demo("0.6.12", command=("-c", hidden))
    assert done.returncode == 1
    assert done.stdout.startswith("PyTorch is not installed")


def test_a_flashinfer_that_cannot_be_imported(tmp_path):
    """What the child could not import is named, and it is not taken for a crash."""
    (tmp_path / "tvm_ffi.py").write_text("raise ImportError('no tvm_ffi here')")
    done = demo("0.6.12", "--json", path=[tmp_path])
    result = seen(done)
    assert done.returncode == 1
    assert result["sentence"].startswith("NOT shown: the stock child could not take the steps (failed: ")
    assert "no tvm_ffi here" in result["sentence"]
    assert [child["ended"] for child in result["children"].values()] == ["failed", "failed"]


def test_what_lies_around_changes_nothing(tmp_path, monkeypatch):
    """A cutlass that wants a GPU is hidden, as nvidia-cutlass-dsl does when it is imported; what a start-up file prints
    does no harm; and the children find the FlashInfer that was judged, not a folder where the demo is started.
    """
    path, here = tmp_path / "path", tmp_path / "here"
    (path / "cutlass").mkdir(parents=True)
    (path / "cutlass" / "__init__.py").write_text("raise RuntimeError('no device 0')")
    (path / "sitecustomize.py").write_text("print('hello')")
    (here / "flashinfer").mkdir(parents=True)
    (here / "flashinfer" / "__init__.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(here)
    script = f"import sys; del sys.path[0]; sys.path.insert(0, {str(ROOT)!r});"
    script += "from flashinfer_wsfix.__main__ import main; sys.exit(main(['demo']))"
    done = demo("0.6.18.post1", command=("-c", script), path=[path])
    assert done.returncode == 0, done
    assert done.stdout.startswith("hello\n")


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "more"], ["run"], ["doctor", "--xml"]], ids=str)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments):
    done = demo(None, *arguments, command=("-m", "flashinfer_wsfix"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


def test_who_has_seen_enough_gets_no_traceback():
    """`flashinfer-wsfix doctor | head`, and whatever else writes to a pipe that is closed."""
    done = demo(None, command=("-c", "import os; from flashinfer_wsfix.__main__ import main; read, write = os.pipe();"
                " os.close(read); os.dup2(write, 1); raise SystemExit(main(['path']))"))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_help_names_every_command():
    done = demo(None, "--help", command=("-m", "flashinfer_wsfix"))
    assert done.returncode == 0
    for command in ("demo", "doctor", "run", "enable", "disable", "path"):
        assert f"\n    {command} " in done.stdout


def test_run_takes_the_rest_verbatim():
    """Options behind `run` are the command's own, also one that is ours elsewhere."""
    show = "import sys; print(sys.argv[1:])"
    rest = ["--json", "-h", "--", "a b"]
    done = demo(None, "run", sys.executable, "-c", show, *rest, command=("-m", "flashinfer_wsfix"))
    assert (done.returncode, done.stdout.strip()) == (0, str(rest))


def test_path_prints_the_folder_of_our_sitecustomize():
    done = demo(None, "path", command=("-m", "flashinfer_wsfix"))
    assert Path(done.stdout.strip(), "sitecustomize.py").exists()
