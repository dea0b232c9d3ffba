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
    ("free on retire", "lanes.py", MACHINE, "self.generations.append(buffer)", "self.generations[:] = [buffer]"),
    ("no zero-fill", "allocation.py", MACHINE, "    return torch.zeros(nbytes", "    return torch.empty(nbytes"),
    ("no zero-fill of a call's own", "allocation.py", MACHINE, "    return arm(_zeros(nbytes, device))",
     "    return arm(torch.empty(nbytes, dtype=torch.uint8, device=device))"),
    ("publish under capture", "lanes.py", MACHINE, "capturing = is_capturing(self.device)", "capturing = False"),
    ("coarse lanes: by name", "lanes.py", MACHINE, "setdefault((name, device), Lane",
     "setdefault((name, torch.device('cpu')), Lane"),
    ("coarse lanes: by device", "lanes.py", MACHINE, "setdefault((name, device), Lane",
     "setdefault(('one', device), Lane"),
    ("lost lock", "lanes.py", MACHINE, "        with growing:\n", "        if True:\n"),
    ("displaced buffers freed", "workspace.py", MACHINE, "RetiringCache.retired.append(buffer)", "pass"),
    ("displaced buffers are all kept", "workspace.py", GUARD + "1_what_no_graph_can_hold_costs_what_stock_costs",
     "if self.keeps and key in held:", "if self.keeps:"),
    ("a fetch under capture is not seen", "workspace.py", GUARD + "1_what_no_graph_can_hold_costs_what_stock_costs",
     "return key in self and _is_captured(dict.__getitem__(self, key).device)", "return False"),
    ("the cache does not compile", "workspace.py", GUARD + "1_a_caller_of_the_cold_cache_compiles_as_on_stock",
     "            if torch.compiler.is_dynamo_compiling():\n                return False\n", ""),
    ("FlashInfer's buffer is not born zeroed", "workspace.py",
     GUARD + "2_the_first_call_of_a_lane_may_be_a_captured_one",
     "tensor.set_(generation.untyped_storage(), 0, (nbytes,), (1,))", "pass"),
    ("FlashInfer's own growth frees", "workspace.py",
     GUARD + "3_flashinfers_own_code_may_still_grow_its_buffer_and_frees_nothing",
     "    tensor.resize_ = _Resize(tensor)\n", ""),
    ("presize wipes what is in use", "presizing.py", "real/test_presize.py::test_presize_wipes_nothing_that_is_in_use",
     'if "resize_" not in vars(made):', "if True:"),
    ("a late file is read again", "guards.py",
     "test_detection.py::test_a_file_that_cannot_be_read_any_more_takes_no_guard_away",
     "if path not in _read:", "if True:"),
    ("packages below are not read", "installed.py",
     "test_detection.py::test_sites_that_moved_to_a_sibling_are_unsupported", "        if found.ispkg:\n",
     "        if found.ispkg:\n            continue\n"),
    ("born under capture: all are kept", "workspace.py",
     GUARD + "3_a_lane_that_is_first_used_under_capture_costs_no_buffer_a_call", "self.born[key] = buffer  #",
     "keep(key[0], buffer)  #"),
    ("made under capture, left in the cache", "workspace.py",
     GUARD + "3_a_buffer_that_flashinfer_makes_under_capture_is_not_left_to_others",
     "    return not capturing\n", "    return True\n"),
    ("settles too late", "lanes.py", "real/test_state_machine.py::"
     "test_a_lane_settles_on_no_buffer_once_another_thread_has_made_a_generation",
     "if not capturing and not self.generations:", "if not capturing:"),
    ("growth: twice or nothing", "lanes.py", GUARD + "where_only_the_doubled_size_fails_less_is_published",
     "for each in (*wanted, size)}", "for each in wanted[:1]}"),
    ("growth: asked at each call", "lanes.py",
     GUARD + "a_growth_that_fails_is_tried_again_seldom_and_keeps_nothing_alive",
     "self.rest = 4**self.failures", "self.rest = 0"),
    ("growth: keeps the host's frames", "allocation.py",
     GUARD + "a_growth_that_fails_is_tried_again_seldom_and_keeps_nothing_alive",
     "        raise (torch.OutOfMemoryError if short_of_memory else RuntimeError)(why)\n",
     "        said.append(torch.OutOfMemoryError(why))\n        raise said[1]\n"),
    ("a lane is forgotten", "workspace.py", GUARD + "8_scratch_is_zeroed_once_and_freed_with_its_tensor",
     "            setattr(tensor, ATTRIBUTE, found)\n", ""),
    ("a thread at the end", "allocation.py", "test_faults.py::test_a_call_while_the_interpreter_ends",
     "if sys.is_finalizing():", "if False:"),
    ("called while an error is handled", "guards.py", GUARD + "9_an_exception_of_the_site_comes_out_unchanged",
     "                size, buffer = overflow.size, None\n",
     "                size, buffer = overflow.size, None\n                if by_position:\n"
     "                    other = _buffer_for(size, tensor)\n"
     "                    return wrapped(*args[:position], other, *args[position + 1 :])\n"),
    ("executed twice", "guards.py", GUARD + "9_a_plan_runs_once_with_what_the_caller_gave",
     "                    return wrapped(*arguments, **kwargs)\n",
     "                    wrapped(*arguments, **kwargs)\n                    return wrapped(*arguments, **kwargs)\n"),
    ("FlashInfer's tensor is passed on", "guards.py", GUARD + "4_the_callers_own_tensor_is_not_touched",
     "arguments[position] = buffer", "arguments[position] = tensor"),
    ("site: off by one", "guards.py", GUARD + "4_the_callers_own_tensor_is_not_touched",
     "make(parameters(function.code).index(parameter),", "make(parameters(function.code).index(parameter) + 1,"),
    ("an error of ours in a call is not shown", "report.py",
     GUARD + "where_we_fail_flashinfers_own_code_runs_and_that_is_said_once",
     "state.errors.setdefault(target, reason)", "pass"),
    ("half an import of dynamo", "guards.py", GUARD + "what_a_guard_runs_is_not_compiled_where_torch_compile_is_in_use",
     'if disable is None or not is_complete("torch._dynamo"):', "if disable is None:"),
    ("observing: a replaced buffer", "workspace.py", GUARD + "observing_wraps_the_sites_and_looks_at_the_cache",
     "elif not self.keeps and new is not None:", "elif False:"),
    ("gate: on every architecture", "guards.py", GATE + "other_architectures_are_untouched",
     "return is_sm12x(device) and not", "return not"),
    ("gate: empties the list", "guards.py", GATE + "a_list_of_cudnn_alone_is_never_emptied",
     "if not set(left) - NOT_GENERAL or not closes", "if not closes"),
    ("gate: leaves tinygemm alone", "guards.py", GATE + "tinygemm_alone_is_not_left",
     'NOT_GENERAL = {"tinygemm"}', "NOT_GENERAL: set[str] = set()"),
    ("gate: bf16 with a fixed cuDNN", "guards.py", GATE + "both_gates_together",
     ' and not (name == "bf16" and _cudnn_is_fixed())', ""),
    ("gate: reorders", "guards.py", GATE + "the_list_that_is_handed_on_keeps_its_order",
     'left = [runner for runner in runners if runner != "cudnn"]', 'left = sorted({*runners} - {"cudnn"})'),
    ("gate: edits the caller's list", "guards.py", DIRECT, 'state.count("gated_calls")\n',
     'state.count("gated_calls")\n        runners.remove("cudnn") if isinstance(runners, list) else None\n'),
    ("gate: off by one", "guards.py", DIRECT, "names.index(row.parameter), row", "names.index(row.parameter) + 1, row"),
    ("another copy's guard is not known", "detection.py", COPIES, 'getattr(type(layer), "is_wsfix_guard", False)',
     'type(layer) is getattr(sys.modules.get(f"{__package__}.guards"), "Guard", None)'),
    ("another copy's cache is not known", "guards.py", COPIES,
     'not getattr(type(cache), "is_wsfix_cache", False)', "not isinstance(cache, workspace.RetiringCache)"),
    ("site: resizes no parameter", "detection.py", SHAPE,
     "if len(names) != 1 or names[0] not in parameters(site.code):", "if len(names) != 1:"),
    ("site: decorated", "detection.py", SHAPE, "if not site.direct or site.code", "if site.code"),
    ("site: in a sibling module", "detection.py", "test_detection.py::test_a_site_in_another_module_is_unsupported",
     "if site.module not in SITE_MODULES:", "if False:"),
    ("nothing read is an all-clear", "detection.py", "test_detection.py::test_source_with",
     "if not executors and not sites:", "if False:"),
    ("late modules are not read", "guards.py",
     "test_detection.py::test_an_overlay_with_two_stock_sites_is_guarded_from_the_start",
     "_read[path] = list(gemm_functions(path, live))", "_read[path] = []"),
    ("unknown code passes", "detection.py", ACTIVATION + "a_workspace_that_is_moved_by_other_means_is_unsupported",
     "(*map(_problem, sites), *map(_unknown, functions))", "map(_problem, sites)"),
    ("judged by version", "detection.py", "test_detection.py::test_a_number_of_a_version_decides_nothing",
     "    if sites:\n", "    if sites and version < '0.7':\n"),
    ("endless wrappers", "detection.py", ACTIVATION + "wrappers_without_an_end", "for _ in range(64):", "while True:"),
    ("looking loads", "detection.py", ACTIVATION + "names_that_gemm_base_holds_are_not_loaded_by_looking",
     "if not callable(value) or getattr", "if getattr"),
    ("looking activates", "__init__.py", "test_report.py::test_looking_does_not_activate",
     "if _is_asked_for():", "if True:"),
    ("half an import is not watched", "importer.py",
     ACTIVATION + "while_another_thread_imports[flashinfer.gemm-found]",
     'if getattr(spec, "_initializing", False):', "if False:"),
    ("half an import is judged", "activation.py",
     ACTIVATION + "from_inside_the_import[flashinfer.gemm.gemm_base-found]",
     "if is_complete(name):", "if name in sys.modules:"),
    ("half a package is judged", "activation.py", ACTIVATION + "before", "name != GEMM and not is_complete(GEMM):",
     "False:"),
    ("one finder of two is left", "importer.py", ACTIVATION + "a_finder_that_is_there_twice_is_taken_out_wholly",
     "    while self in sys.meta_path:", "    if self in sys.meta_path:"),
    ("a module without a spec", "importer.py", ACTIVATION + "a_module_that_does_away_with_its_spec",
     "            spec = spec_of(module)\n", "            spec = module.__spec__\n"),
    ("told twice", "importer.py", COPIES,
     'if getattr(spec, "tells_wsfix", False) or getattr(execute, "tells_wsfix", False):', "if False:"),
    ("no rollback", "patching.py", "test_faults.py::test_activation_after_import",
     "        for patch in reversed(done):\n            setattr(patch.owner, patch.name, patch.original)\n", ""),
    ("copies are not rebound", "patching.py", ACTIVATION + "deactivate_restores_the_very_objects",
     "for patch in [*patches, *_copies(patches)]:", "for patch in patches:"),
    ("a reloaded module's buffers freed", "patching.py", ACTIVATION + "a_reload_of_utils_frees_no_buffer",
     "workspace.RetiringCache.retired.extend(patch.replacement.values())", "pass"),
    ("vLLM: old buffer freed", "vllm.py", VLLM, "newest = lane.generations[-1]  #",
     "newest = lane.generations[-1]; del lane.generations[:-1]  #"),
    ("vLLM: not zeroed", "allocation.py", VLLM, "    return torch.zeros(nbytes", "    return torch.empty(nbytes"),
    ("vLLM: a call's own is not zeroed", "vllm.py", "test_vllm.py::test_nothing_is_published_under_capture",
     "instance._workspace_buf = buffer.detach()", "instance._workspace_buf = torch.empty_like(buffer)"),
    ("vLLM: another's buffer is dropped", "vllm.py",
     "test_vllm.py::test_a_buffer_that_somebody_else_put_there_is_taken_over",
     "lane.generations.insert(0 if smaller else len(known), buffer)",
     "lane.generations[:] = lane.generations or [buffer]"),
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
