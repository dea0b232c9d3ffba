"""Plant faults in a copy of the package, one at a time, that only a device shows; each must turn its test red.

``python tests/cuda/run.py planted [FAULT ...]``, two at a time. Exits with 1 where a fault is not found, or where a
test of the table fails on a copy without a fault. Those that need no device are in `tests/planted.py`.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parents[1]
MEMORY, CAPTURE, GPU = "cuda/test_memory.py::test_", "cuda/test_capture.py::test_", "test_gpu.py::test_"

# The fault, the file, the test that must find it; then what is there exactly once, and what takes its place.
# fmt: off
FAULTS = {name: row for name, *row in (
    ("free on retire", "lanes.py", MEMORY + "the_memory_of_no_call_is_handed_out_again",
     "self.generations.append(buffer)", "self.generations[:] = [buffer]"),
    ("no zero-fill", "allocation.py", MEMORY + "growth_waits_for_nothing_else_on_the_device",
     "arm(torch.zeros(nbytes", "arm(torch.empty(nbytes"),
    ("no zero-fill of a call's own", "lanes.py", CAPTURE + "two_graphs_that_overflow_in_one_pool",
     "return allocation.zeros(size, self.device)",
     "return arm(torch.empty(size, dtype=torch.uint8, device=self.device))"),
    ("no zero-fill under capture", "workspace.py", MEMORY + "a_lane_that_is_born_under_capture_is_zeroed_and_no_others",
     "        buffer.zero_()\n", "        pass\n"),
    ("the fill is not waited for", "allocation.py", GPU + "a_generation_is_zeroed_on_whatever_stream",
     "    done.synchronize()\n", ""),
    ("the fill is on the default stream", "allocation.py", MEMORY + "growth_waits_for_nothing_else_on_the_device",
     "torch.cuda.set_stream(_streams[device])", "pass"),
    ("the mode is not relaxed", "allocation.py", CAPTURE + "growth_while_another_thread_captures",
     "        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))\n", ""),
    ("a wait that can be forbidden", "allocation.py", MEMORY + "growth_in_a_process_that_forbids_synchronization",
     "    done.synchronize()\n", "    torch.cuda.current_stream().synchronize()\n"),
    ("the current device is not set", "allocation.py", MEMORY + "no_context_on_a_device_that_is_not_used",
     "    torch.cuda.set_device(device)", "    torch.cuda.current_device()"),
    ("publish under capture", "lanes.py", GPU + "overflow_under_capture_publishes_nothing",
     "capturing, scratch = is_capturing(self.device),", "capturing, scratch = False,"),
    ("what is born under capture is cached", "workspace.py",
     MEMORY + "a_lane_that_is_born_under_capture_is_zeroed_and_no_others",
     "    return not capturing\n", "    return True\n"),
    ("a lane for all devices", "workspace.py", GPU + "each_device_has_its_own_lane",
     "    found = lane(*key, on=buffer.device)", "    found = lane(key[0], torch.device('cuda', 0))"),
    ("a buffer beside the first generation", "workspace.py", MEMORY + "a_lane_costs_8_mib_over_stock",
     "            _begin(buffer, make(buffer.numel()), buffer.numel())", "            make(buffer.numel())"),
    ("the buffer's own resize_ frees", "workspace.py", MEMORY + "deactivate_frees_nothing_that_a_graph_holds",
     "            buffer.resize_ = _Resize(buffer)\n", ""),
    ("a failed growth is tried again", "lanes.py", MEMORY + "a_growth_that_failed_is_not_tried_at_each_call",
     "return size < self.refused or self.waited in TRIES", "return True"),
    ("a failed growth keeps its error", "lanes.py", MEMORY + "a_growth_that_failed_keeps_nothing_alive",
     "                why = str(error)", "                why = vars(state).setdefault('error', error)"),
    ("scratch is made as generations are", "lanes.py", MEMORY + "scratch_goes_back_to_the_callers_memory",
     "if self.name == SCRATCH:  #", "if False:  #"),
    ("twice or nothing", "lanes.py", MEMORY + "a_growth_that_failed_is_not_tried_at_each_call",
     "*larger, least = sorted(sizes, reverse=True)", "*larger, least = [max(sizes)]"),
)}
# fmt: on


def plant(
    environment: dict[str, str], tests: list[str], file: str = "", old: str = "", new: str = ""
) -> tuple[str, str]:
    """Run tests on a copy of the package with a text replaced: the first that is red, or "green", and why."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TESTS.parent / "flashinfer_wsfix", Path(folder, "flashinfer_wsfix"))
        if file:
            text = Path(folder, "flashinfer_wsfix", file).read_text()
            if text.count(old) != 1:
                return "NOT PLANTED", f"{text.count(old)} times in {file}: {old!r}"
            Path(folder, "flashinfer_wsfix", file).write_text(text.replace(old, new))
        path = os.pathsep.join([folder, environment["PYTHONPATH"]])
        # The package is only looked for: its import would guard the process that asks the stock code as well.
        ask = (
            "import pytest, sys; from importlib.util import find_spec; print(find_spec('flashinfer_wsfix').origin);"
            " sys.exit(pytest.main())"
        )
        names = "|".join(test.partition("::")[2] for test in tests)
        files = sorted({str(TESTS / test.partition("::")[0]) for test in tests})
        done = subprocess.run(
            [sys.executable, "-c", ask, "-x", "-q", "-p", "no:cacheprovider", "-k", names.replace("|", " or "), *files],
            env={**environment, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1) or not done.stdout.startswith(folder):
            return "BROKEN OFF", done.stdout
    red = re.findall(r"^(?:FAILED|ERROR) \S*?([^/\s]+::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    why = re.findall(r"^E +(\w.+)", done.stdout, re.MULTILINE)
    return (red or ["green"])[0], (why or [""])[0]


def main(names: list[str], environment: dict[str, str]) -> int:
    """Plant the faults of these names, all where none is named; return the exit code."""
    chosen = {name: FAULTS[name] for name in names or FAULTS}
    used = {test for _, test, _, _ in chosen.values()}
    wrong = 0
    with ThreadPoolExecutor(2) as pool:
        runs = [
            ("(none)", pool.submit(plant, environment, sorted(test for test in used if (GPU in test) == on_gpu)))
            for on_gpu in (True, False)
            if any((GPU in test) == on_gpu for test in used)
        ]
        runs += [
            (name, pool.submit(plant, environment, [test], file, old, new))
            for name, (file, test, old, new) in chosen.items()
        ]
        for name, running in runs:
            red, why = running.result()
            print(f"{name:38}  {red}  {why[:90] if '::' in red else why}", flush=True)
            wrong += ("::" in red) != (name != "(none)") or red in ("NOT PLANTED", "BROKEN OFF")
    print(f"{len(chosen)} faults, {wrong} of {len(runs)} runs not as they should be")
    return 1 if wrong else 0
