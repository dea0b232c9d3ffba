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
ADDRESSES, GENERATIONS, CAPTURED, CALLS, ERRORS, GATE = (
    f"real/test_{name}.py::test_" for name in ("addresses", "generations", "captured", "calls", "errors", "gate")
)
ACTIVATION, HALF_IMPORTS, IMPORT_HOOKS = (
    f"test_{name}.py::test_" for name in ("activation", "half_imports", "import_hooks")
)
DIRECT = GATE + "direct_callers_are_covered_and_their_list_is_not_changed"
SHAPE = "test_detection.py::test_source_of_an_unknown_shape"
COPIES = IMPORT_HOOKS + "a_second_copy_of_the_package"
VLLM = "test_vllm.py::test_growth_keeps_the_old_buffer_and_zeroes_the_new_one[before-vllm-0.24.0]"

# The fault, the file, the test that must find it; then what is there exactly once, and what takes its place.
# fmt: off
FAULTS = {name: row for name, *row in (
    ("free on retire", "lanes.py", MACHINE, "self.generations.append(buffer)", "self.generations[:] = [buffer]"),
    ("no zero-fill", "allocation.py", MACHINE, "arm(torch.zeros(nbytes", "arm(torch.empty(nbytes"),
    ("no zero-fill of a call's own", "lanes.py", MACHINE, "return allocation.zeros(size, self.device)",
     "return arm(torch.empty(size, dtype=torch.uint8, device=self.device))"),
    ("publish under capture", "lanes.py", MACHINE, "capturing, scratch = is_capturing(self.device),",
     "capturing, scratch = False,"),
    ("coarse lanes: by name", "lanes.py", MACHINE, "setdefault((name, device), Lane",
     "setdefault((name, torch.device('cpu')), Lane"),
    ("coarse lanes: by device", "lanes.py", MACHINE, "setdefault((name, device), Lane",
     "setdefault(('one', device), Lane"),
    ("lost lock", "lanes.py", MACHINE, "        with growing:\n", "        if True:\n"),
    ("displaced buffers freed", "workspace.py", ADDRESSES + "1_what_no_graph_can_hold_costs_what_stock_costs",
     "RetiringCache.retired.append(buffer)", "pass"),
    ("displaced buffers are all kept", "workspace.py", ADDRESSES + "1_what_no_graph_can_hold_costs_what_stock_costs",
     "(_is_lanes(key, buffer) or is_capturing(buffer.device)):", "True:"),
    ("a fetch under capture is not seen", "workspace.py", ADDRESSES + "1_what_no_graph_can_hold_costs_what_stock_costs",
     "(_is_lanes(key, buffer) or is_capturing(buffer.device)):", "_is_lanes(key, buffer):"),
    ("the cache does not compile", "workspace.py", ADDRESSES + "1_a_caller_of_the_cold_cache_compiles_as_on_stock",
     "if torch.compiler.is_dynamo_compiling() or self._may_enter(", "if self._may_enter("),
    ("FlashInfer's buffer is not born zeroed", "workspace.py",
     GENERATIONS + "2_the_first_call_of_a_lane_may_be_a_captured_one",
     "tensor.set_(generation.untyped_storage(), 0, (nbytes,), (1,))", "pass"),
    ("FlashInfer's own growth frees", "workspace.py",
     ADDRESSES + "3_flashinfers_own_code_may_still_grow_its_buffer_and_frees_nothing",
     "            buffer.resize_ = _Resize(buffer)\n", ""),
    ("presize wipes what is in use", "presizing.py", "real/test_presize.py::test_presize_wipes_nothing_that_is_in_use",
     'if "resize_" not in vars(made):', "if True:"),
    ("a late file is read again", "guards.py",
     "test_detection.py::test_a_file_that_cannot_be_read_any_more_takes_no_guard_away",
     "if path not in _read:", "if True:"),
    ("packages below are not read", "installed.py",
     "test_detection.py::test_sites_that_moved_to_a_sibling_are_unsupported", "        if found.ispkg:\n",
     "        if found.ispkg:\n            continue\n"),
    ("born under capture: all are kept", "workspace.py",
     ADDRESSES + "3_a_lane_that_is_first_used_under_capture_costs_no_buffer_a_call", "self.born[key] = buffer  #",
     "keep(key, buffer)  #"),
    ("made under capture, left in the cache", "workspace.py",
     ADDRESSES + "3_a_buffer_that_flashinfer_makes_under_capture_is_not_left_to_others",
     "    return not capturing\n", "    return True\n"),
    ("settles too late", "lanes.py", "real/test_state_machine.py::"
     "test_a_lane_settles_on_no_buffer_once_another_thread_has_made_a_generation",
     "if not capturing and not self.generations:", "if not capturing:"),
    ("growth: twice or nothing", "lanes.py", GENERATIONS + "where_only_the_doubled_size_fails_less_is_published",
     "for each in (*wanted, size)}", "for each in wanted[:1]}"),
    ("growth: asked at each call", "lanes.py",
     GENERATIONS + "a_growth_that_fails_is_tried_again_seldom_and_keeps_nothing_alive",
     "return size < self.refused or self.waited in TRIES", "return True"),
    ("growth: keeps the host's frames", "allocation.py",
     GENERATIONS + "a_growth_that_fails_is_tried_again_seldom_and_keeps_nothing_alive",
     "        raise (torch.OutOfMemoryError if short_of_memory else RuntimeError)(why)\n",
     "        said.append(torch.OutOfMemoryError(why))\n        raise said[1]\n"),
    ("a lane is forgotten", "workspace.py", CAPTURED + "8_scratch_is_zeroed_once_and_freed_with_its_tensor",
     "        setattr(tensor, ATTRIBUTE, found)\n", ""),
    ("a thread at the end", "allocation.py", "test_faults.py::test_a_call_while_the_interpreter_ends",
     "if sys.is_finalizing():", "if False:"),
    ("called while an error is handled", "guards.py", CALLS + "9_an_exception_of_the_site_comes_out_unchanged",
     "                size, buffer = overflow.args[0], None\n",
     "                size, buffer = overflow.args[0], None\n                if by_position:\n"
     "                    other = _buffer_for(size, tensor)\n"
     "                    return wrapped(*args[:position], other, *args[position + 1 :])\n"),
    ("executed twice", "guards.py", CALLS + "9_a_plan_runs_once_with_what_the_caller_gave",
     "                    return wrapped(*arguments, **kwargs)\n",
     "                    wrapped(*arguments, **kwargs)\n                    return wrapped(*arguments, **kwargs)\n"),
    ("FlashInfer's tensor is passed on", "guards.py", ADDRESSES + "4_the_callers_own_tensor_is_not_touched",
     "arguments[position] = buffer", "arguments[position] = tensor"),
    ("site: off by one", "guards.py", ADDRESSES + "4_the_callers_own_tensor_is_not_touched",
     "make(position, parameter)", "make(position + 1, parameter)"),
    ("an error of ours in a call is not shown", "report.py",
     ERRORS + "where_we_fail_flashinfers_own_code_runs_and_that_is_said_once",
     "state.errors.setdefault(target, reason)", "pass"),
    ("what is fetched is not what is held", "workspace.py", ADDRESSES + "1_what_is_fetched_is_what_is_held",
     "        buffer = super().__getitem__(key)\n", "        buffer = super().get(key)\n        "
     "self._fetched(key, buffer)\n        return super().__getitem__(key)\n"),
    ("the one that was held is dropped", "workspace.py", ADDRESSES + "1_what_was_held_is_kept_whoever_comes_after_it",
     "        if old is not None and old is not buffer:\n", "        if False:\n"),
    ("compiled: the one that was held is dropped", "workspace.py",
     ADDRESSES + "1_what_was_held_is_kept_whoever_comes_after_it", "self.retired.append(self.held[key])", "pass"),
    ("two let go at once", "workspace.py", ADDRESSES + "1_each_displaced_buffer_is_counted_once",
     "                del self.held[key]\n        if held:",
     "                pass\n        if held and self.held.pop(key):"),
    ("what is no tensor is held", "workspace.py", ADDRESSES + "1_what_is_no_tensor_is_let_be",
     "if self.keeps and isinstance(buffer, torch.Tensor):", "if self.keeps:"),
    ("an error of ours leaves a dirty buffer", "workspace.py",
     ADDRESSES + "3_a_buffer_is_born_zeroed_after_an_error_of_ours_too",
     "        report.failed(\"flashinfer\", error, \"a buffer of FlashInfer's\")\n", "        raise\n"),
    ("the last size that failed counts", "lanes.py",
     GENERATIONS + "a_growth_that_failed_is_tried_seldom_whatever_the_sizes",
     "self.refused = min(self.refused, size)", "self.refused = size"),
    ("vLLM: what is known is taken again", "vllm.py",
     "test_vllm.py::test_instances_that_share_a_buffer_have_it_once_each",
     "if buffer.data_ptr() not in known and", "if getattr(buffer, VIEW, None) is not buffer and"),
    ("half an import of dynamo", "guards.py",
     ERRORS + "what_a_guard_runs_is_not_compiled_where_torch_compile_is_in_use", " if is_complete(name) else {}", ""),
    ("observing: a replaced buffer", "workspace.py", ERRORS + "observing_wraps_the_sites_and_looks_at_the_cache",
     "if not self.keeps and old is not None:", "if False:"),
    ("gate: on every architecture", "guards.py", GATE + "other_architectures_are_untouched",
     "if torch.cuda.get_device_capability(device)[0] == 12:", "if True:"),
    ("gate: empties the list", "guards.py", GATE + "a_list_of_cudnn_alone_is_never_emptied",
     " and set(left) - NOT_GENERAL and isinstance", " and isinstance"),
    ("gate: leaves tinygemm alone", "guards.py", GATE + "tinygemm_alone_is_not_left",
     'NOT_GENERAL = {"tinygemm"}', "NOT_GENERAL: set[str] = set()"),
    ("gate: bf16 with a fixed cuDNN", "guards.py", GATE + "both_gates_together",
     'return not (name == "bf16" and _cudnn_is_fixed())', "return True"),
    ("gate: reorders", "guards.py", GATE + "the_list_that_is_handed_on_keeps_its_order",
     'left = [runner for runner in runners if runner != "cudnn"]', 'left = sorted({*runners} - {"cudnn"})'),
    ("gate: edits the caller's list", "guards.py", DIRECT, 'state.count("gated_calls")\n',
     'state.count("gated_calls")\n        runners.remove("cudnn") if isinstance(runners, list) else None\n'),
    ("gate: off by one", "guards.py", DIRECT, "names.index(RUNNERS), names", "names.index(RUNNERS) + 1, names"),
    ("another copy's guard is not known", "detection.py", COPIES, 'getattr(type(layer), "is_wsfix_guard", False)',
     'type(layer) is getattr(sys.modules.get(f"{__package__}.guards"), "Guard", None)'),
    ("another copy's cache is not known", "guards.py", COPIES,
     'getattr(type(cache), "is_wsfix_cache", False)', "isinstance(cache, workspace.RetiringCache)"),
    ("site: resizes no parameter", "detection.py", SHAPE,
     '(name in parameters(code), "does', '(True, "does'),
    ("site: decorated", "detection.py", SHAPE, '(site.direct and not code', '(not code'),
    ("site: in a sibling module", "detection.py", "test_detection.py::test_a_site_in_another_module_is_unsupported",
     '(site.module in SITE_MODULES, "is', '(True, "is'),
    ("nothing read is an all-clear", "detection.py", "test_detection.py::test_source_with",
     "if not executors and not sites:", "if False:"),
    ("late modules are not read", "guards.py",
     "test_detection.py::test_an_overlay_with_two_stock_sites_is_guarded_from_the_start",
     "_read[path] = list(gemm_functions(path, live))", "_read[path] = []"),
    ("unknown code passes", "detection.py", IMPORT_HOOKS + "a_workspace_that_is_moved_by_other_means_is_unsupported",
     "(*map(_problem, sites), *map(_unknown, functions))", "map(_problem, sites)"),
    ("judged by version", "detection.py", "test_detection.py::test_a_number_of_a_version_decides_nothing",
     "    if sites:\n", "    if sites and version < '0.7':\n"),
    ("endless wrappers", "detection.py", IMPORT_HOOKS + "wrappers_without_an_end",
     "for _ in range(64):", "while True:"),
    ("looking loads", "detection.py", IMPORT_HOOKS + "names_that_gemm_base_holds_are_not_loaded_by_looking",
     "if not callable(value) or getattr", "if getattr"),
    ("looking activates", "__init__.py", "test_report.py::test_looking_does_not_activate",
     "if _is_asked_for():", "if True:"),
    ("half an import is not watched", "importer.py",
     HALF_IMPORTS + "while_another_thread_imports[flashinfer.gemm-found]",
     'if getattr(spec, "_initializing", False):', "if False:"),
    ("what is not complete is judged", "activation.py",
     IMPORT_HOOKS + "lazy_loader[ours-flashinfer.gemm]",
     "if is_complete(name):", "if name in sys.modules:"),
    ("half a package is judged", "activation.py", ACTIVATION + "before", "name != GEMM and not is_complete(GEMM):",
     "False:"),
    ("one finder of two is left", "importer.py", ACTIVATION + "a_finder_that_is_there_twice_is_taken_out_wholly",
     "    while self in sys.meta_path:", "    if self in sys.meta_path:"),
    ("a module without a spec", "importer.py", IMPORT_HOOKS + "a_module_that_does_away_with_its_spec",
     "            spec = spec_of(module)\n", "            spec = module.__spec__\n"),
    ("told twice", "importer.py", COPIES,
     'if getattr(spec, "tells_wsfix", False) or getattr(execute, "tells_wsfix", False):', "if False:"),
    ("no rollback", "patching.py", "test_faults.py::test_activation_after_import",
     "        with state.lock:\n            undo(target)\n        raise\n", "        raise\n"),
    ("copies are not rebound", "patching.py", ACTIVATION + "deactivate_restores_the_very_objects",
     "for patch in [*patches, *_copies(patches)]:", "for patch in patches:"),
    ("a reloaded module's buffers freed", "workspace.py", ACTIVATION + "a_reload_of_utils_frees_no_buffer",
     "self.retired.extend(buffer for", "list(buffer for"),
    ("vLLM: old buffer freed", "vllm.py", VLLM, "newest = max(lane.generations[-1],",
     "del lane.generations[:-1]; newest = max(lane.generations[-1],"),
    ("vLLM: not zeroed", "allocation.py", VLLM, "arm(torch.zeros(nbytes", "arm(torch.empty(nbytes"),
    ("vLLM: a call's own is not zeroed", "vllm.py", "test_vllm.py::test_nothing_is_published_under_capture",
     "setattr(newest, VIEW, newest.detach())", "setattr(newest, VIEW, torch.empty_like(newest))"),
    ("vLLM: another's buffer is dropped", "vllm.py",
     "test_vllm.py::test_a_buffer_that_somebody_else_put_there_is_taken_over",
     "lane.generations.insert(0 if smaller else len(known), buffer)",
     "lane.generations[:] = lane.generations or [buffer]"),
    ("vLLM: presizes gated lanes", "vllm.py",
     "test_vllm.py::test_warm_up_presizes_the_lanes_in_use[before-vllm-0.24.0]",
     "return [name for name in chosen if not (", "return [name for name in chosen if True or ("),
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
