"""Plant faults in a copy of the package, one at a time, and show that the named test goes red for each of them.

``python tests/planted.py [FAULT ...]``: two at a time; the state machine takes about a minute for each. Exits with 1
where a fault is not found, or where a test of the table fails on a copy without a fault.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent
RELEASE = "0.6.18.post1"
MACHINE = "real/test_state_machine.py::test_whatever_happens_the_contract_holds"
GUARD, GATE, ACTIVATION = "real/test_guard.py::test_", "real/test_gate.py::test_", "test_activation.py::test_"
DIRECT = GATE + "direct_callers_are_covered_and_their_list_is_not_changed"
SHAPE = "test_detection.py::test_source_of_an_unknown_shape"
COPIES = ACTIVATION + "a_second_copy_of_the_package"
VLLM = "test_vllm.py::test_growth_keeps_the_old_buffer_and_zeroes_the_new_one[before-vllm-0.24.0]"

# The fault, the file, the test that must find it; then what is there exactly once, and what takes its place.
# fmt: off
FAULTS = {name: row for name, *row in (
    ("free on retire", "workspace.py", MACHINE, "self.generations.append(buffer)", "self.generations[:] = [buffer]"),
    ("no zero-fill", "workspace.py", MACHINE, "buffer = torch.zeros(nbytes", "buffer = torch.empty(nbytes"),
    ("no zero-fill of a call's own", "workspace.py", MACHINE,
     "return zeros(size, self.device)", "return arm(torch.empty(size, dtype=torch.uint8, device=self.device))"),
    ("publish under capture", "workspace.py", MACHINE, "capturing = is_capturing(self.device)", "capturing = False"),
    ("coarse lanes: by name", "workspace.py", MACHINE, "lane(*key)", "lane(key[0], torch.device('cpu'))"),
    ("coarse lanes: by device", "workspace.py", MACHINE, "lane(*key)", "lane('one', key[1])"),
    ("lost lock", "workspace.py", MACHINE, "        with growing:\n", "        if True:\n"),
    ("displaced buffers freed", "workspace.py", MACHINE, "self.retired.extend(gone)", "pass"),
    ("settles too late", "workspace.py", "real/test_state_machine.py::"
     "test_a_lane_settles_on_no_buffer_once_another_thread_has_made_a_generation",
     "if not capturing and not self.generations:", "if not capturing:"),
    ("a lane is forgotten", "workspace.py", GUARD + "8_scratch_is_zeroed_once_and_freed_with_its_tensor",
     "setattr(tensor, ATTRIBUTE, found)", "pass"),
    ("a thread at the end", "workspace.py", "test_faults.py::test_a_call_while_the_interpreter_ends",
     "if sys.is_finalizing():", "if False:"),
    ("called while an error is handled", "guards.py", GUARD + "9_an_exception_of_the_site_comes_out_unchanged",
     "                size = overflow.size\n",
     "                size = overflow.size\n                if by_position:\n"
     "                    return wrapped(*args[:position], lane.buffer_for(size, tensor), *args[position + 1 :])\n"),
    ("executed twice", "guards.py", GUARD + "9_a_plan_runs_once_with_what_the_caller_gave",
     "                    return wrapped(*arguments, **kwargs)\n",
     "                    wrapped(*arguments, **kwargs)\n                    return wrapped(*arguments, **kwargs)\n"),
    ("FlashInfer's tensor is passed on", "guards.py", GUARD + "3_flashinfers_buffer_keeps_object_address_and_size",
     "arguments[position] = buffer", "arguments[position] = tensor"),
    ("site: off by one", "guards.py", GUARD + "3_flashinfers_buffer_keeps_object_address_and_size",
     "make(parameters(function.code).index(parameter),", "make(parameters(function.code).index(parameter) + 1,"),
    ("gate: on every architecture", "guards.py", GATE + "other_architectures_are_untouched",
     "if not left or not is_sm12x(matrix.device):", "if not left:"),
    ("gate: empties the list", "guards.py", GATE + "a_list_of_cudnn_alone_is_never_emptied",
     "if not left or not is_sm12x(matrix.device):", "if not is_sm12x(matrix.device):"),
    ("gate: reorders", "guards.py", GATE + "the_list_that_is_handed_on_keeps_its_order",
     'left = [runner for runner in runners if runner != "cudnn"]', 'left = sorted({*runners} - {"cudnn"})'),
    ("gate: edits the caller's list", "guards.py", DIRECT, 'report.count("gated_calls")\n',
     'report.count("gated_calls")\n        runners.remove("cudnn") if isinstance(runners, list) else None\n'),
    ("gate: off by one", "guards.py", DIRECT, "names.index(row.parameter), row", "names.index(row.parameter) + 1, row"),
    ("another copy's guard is not known", "detection.py", COPIES, 'getattr(type(layer), "is_wsfix_guard", False)',
     'type(layer) is getattr(sys.modules.get(f"{__package__}.guards"), "Guard", None)'),
    ("another copy's cache is not known", "guards.py", COPIES,
     'not getattr(type(cache), "is_wsfix_cache", False)', "not isinstance(cache, workspace.RetiringCache)"),
    ("site: resizes no parameter", "detection.py", SHAPE,
     "if len(names) != 1 or names[0] not in parameters(site.code):", "if len(names) != 1:"),
    ("site: decorated", "detection.py", SHAPE, "if not site.direct or site.code", "if site.code"),
    ("unknown code passes", "detection.py", ACTIVATION + "a_workspace_that_is_moved_by_other_means_is_unsupported",
     "(*map(_problem, sites), *map(_unknown, functions))", "map(_problem, sites)"),
    ("judged by version", "detection.py", "test_detection.py::test_a_number_of_a_version_decides_nothing",
     "    if sites:\n", "    if sites and version < '0.7':\n"),
    ("endless wrappers", "detection.py", ACTIVATION + "wrappers_without_an_end", "for _ in range(64):", "while True:"),
    ("half an import is not watched", "hook.py", ACTIVATION + "while_another_thread_imports[flashinfer.gemm-found]",
     'if getattr(spec, "_initializing", False):', "if False:"),
    ("half an import is judged", "hook.py", ACTIVATION + "from_inside_the_import[flashinfer.gemm.gemm_base-found]",
     "if is_complete(name):", "if name in sys.modules:"),
    ("half a package is judged", "hook.py", ACTIVATION + "before", "name != GEMM and not is_complete(GEMM):", "False:"),
    ("one finder of two is left", "hook.py", ACTIVATION + "a_finder_that_is_there_twice_is_taken_out_wholly",
     "    while _FINDER in sys.meta_path:", "    if _FINDER in sys.meta_path:"),
    ("a module without a spec", "hook.py", ACTIVATION + "a_module_that_does_away_with_its_spec",
     "spec = _spec(module)", "spec = module.__spec__"),
    ("told twice", "hook.py", COPIES,
     'if getattr(spec, "tells_wsfix", False) or getattr(execute, "tells_wsfix", False):', "if False:"),
    ("no rollback", "patching.py", "test_faults.py::test_activation_after_import",
     "        for patch in reversed(done):\n            setattr(patch.owner, patch.name, patch.original)\n", ""),
    ("copies are not rebound", "patching.py", ACTIVATION + "deactivate_restores_the_very_objects",
     "for patch in [*patches, *_copies(patches)]:", "for patch in patches:"),
    ("a reloaded module's buffers freed", "patching.py", ACTIVATION + "a_reload_of_utils_frees_no_buffer",
     "workspace.RetiringCache.retired.extend(patch.replacement.values())", "pass"),
    ("vLLM: old buffer freed", "vllm.py", VLLM, "newest = state.lane.generations[-1]",
     "newest = state.lane.generations[-1]; del state.lane.generations[:-1]"),
    ("vLLM: not zeroed", "workspace.py", VLLM, "buffer = torch.zeros(nbytes", "buffer = torch.empty(nbytes"),
    ("vLLM: a call's own is not zeroed", "vllm.py", "test_vllm.py::test_nothing_is_published_under_capture",
     "state.local = buffer.detach()", "state.local = torch.empty_like(buffer)"),
    ("vLLM: presizes gated lanes", "vllm.py",
     "test_vllm.py::test_warm_up_presizes_the_lanes_in_use[before-vllm-0.24.0]",
     "if not gated and (chosen or used):", "if chosen or used:"),
)}
# fmt: on


def run(tests: list[str], file: str = "", old: str = "", new: str = "") -> tuple[str, float, str]:
    """Run tests on a copy of the package with a text replaced: the first that is red, or "green", and why."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(TESTS.parent / "flashinfer_wsfix", Path(folder, "flashinfer_wsfix"))
        if file:
            text = Path(folder, "flashinfer_wsfix", file).read_text()
            if text.count(old) != 1:
                return "NOT PLANTED", 0, f"{text.count(old)} times in {file}: {old!r}"
            Path(folder, "flashinfer_wsfix", file).write_text(text.replace(old, new))
        ask = "import flashinfer_wsfix as package, pytest, sys; print(package.__file__); sys.exit(pytest.main())"
        options = ["-x", "-q", "-p", "no:cacheprovider", *(["--flashinfer", RELEASE] if "real/" in tests[0] else [])]
        done = subprocess.run(
            [sys.executable, "-c", ask, *options, *(str(TESTS / test) for test in tests)],
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if done.returncode not in (0, 1) or not done.stdout.startswith(folder):
            return "BROKEN OFF", 0, done.stdout
    red = re.findall(r"^(?:FAILED|ERROR) \S*?([^/\s]+::.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    why = re.findall(r"^(?:E +(\w.+)|(ended with .+))", done.stdout, re.MULTILINE) or [("", "")]
    errors = re.findall(r"^(\w*Error.*)", done.stdout, re.MULTILINE)  # of a fresh process
    return (red or ["green"])[0], time.monotonic() - start, errors[-1] if errors else "".join(why[0])


def main(names: list[str]) -> int:
    chosen = {name: FAULTS[name] for name in names or FAULTS}
    used = {test for _, test, _, _ in chosen.values()}
    real = {test for test in used if test.startswith("real/")}
    print(f"{'fault':33} {'s':>4}  first red test, and why")
    wrong = 0
    with ThreadPoolExecutor(2) as pool:
        runs = [("(none)", pool.submit(run, sorted(tests))) for tests in (real, used - real) if tests]
        runs += [(name, pool.submit(run, [test], file, old, new)) for name, (file, test, old, new) in chosen.items()]
        for name, running in runs:
            red, seconds, why = running.result()
            print(f"{name:33} {seconds:4.0f}  {red}  {why[:90] if seconds else why}", flush=True)
            wrong += (red == "green") != (name == "(none)") or not seconds
    print(f"{len(chosen)} faults, {wrong} of {len(runs)} runs not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
