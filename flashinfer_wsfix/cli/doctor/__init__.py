"""``flashinfer-wsfix doctor``: can this bug be the cause here, do worker processes come up guarded, and what to do.

Neither torch, FlashInfer, vLLM nor SGLang is imported into this process: what they are is read from their metadata and
source, and what has to be tried is tried in children with a time limit. A probe that fails is a line in the report.

``--json`` prints one object; keys may be added to it, never changed:

- ``sentence``: the overall judgement. ``problem``: true where the exit status is 1.
- ``environment``: ``flashinfer``, ``flashinfer_cubin``, ``flashinfer_jit_cache``, ``torch``, ``cudnn`` (the backend),
  ``vllm``, ``sglang``, ``tensorrt_llm``, ``wrapt``, ``python`` and ``flashinfer_wsfix``, each a version or null;
  ``cudnn_asked``: that is what cuDNN's frontend loads, not only what its wheel says; ``cudnn_wheels``, version by name;
  ``executable``, the path of that Python; ``gpus``, a list of ``name``, ``capability`` ("12.0") and ``driver``;
  ``gpus_unknown``: why that list is no answer, or null.
- ``defects``: for each of D1 to D4 its ``name``, ``what`` it is, ``state`` ("applies", "does not apply", "unknown"),
  ``set_up`` (true only where it applies and new processes are set up to be guarded against it), ``guarded`` (that, and
  FlashInfer's import did not fail here, so that it could be tried), and the ``sentence``.
- ``activation``: what was tried, each with ``where``, ``active`` (true, false, or null where it could not be tried),
  ``routes`` and the ``sentence``.
- ``findings``: each with ``name``, ``problem`` (true where it leaves processes unguarded), ``sentence`` and ``advice``.
- ``still_dies``: what to gather where all that applies is guarded; else empty.
- ``not_this_bug``: sentences that say which failures have another cause.
"""

import json as jsonlib
from collections.abc import Callable, Iterator
from importlib import util
from typing import Any, TypeVar

from ... import settings
from ...detection import Function, Verdict
from .. import say
from ..installed import read_flashinfer
from . import environment, findings, surroundings
from .defects import DEFECTS
from .findings import Case, Finding
from .headline import overall
from .judgements import APPLIES, UNKNOWN, Judgement, judge_d1_d2, judge_d3, judge_d4
from .printer import lines
from .trials import NOTHING_TRIED, try_activation

T = TypeVar("T")

FINDERS: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "what the defects ask for": findings.of_defects,
    "why nothing is active": findings.of_activation,
    "the start-up file's own errors": surroundings.of_failed_start,
    "start-up files": surroundings.of_start_up_files,
    "sitecustomize": surroundings.of_sitecustomize,
    "FlashInfer's other packages": surroundings.of_packages,
    "cuDNN": surroundings.of_cudnn,
    "GPUs": surroundings.of_gpus,
    "removal": findings.of_removal,
    "settings": surroundings.of_settings,
    "Ray": surroundings.of_ray,
    "auto-tune caches": surroundings.of_auto_tune_caches,
}

NOT_THIS_BUG = (
    "cuBLAS says CUBLAS_STATUS_NOT_SUPPORTED (flashinfer #3255);",
    "cuBLAS crashes while FlashInfer tunes on a B200 (flashinfer #3085);",
    "flashinfer-cubin or flashinfer-jit-cache is of another version than FlashInfer (vLLM #49804);",
    "it dies the same with --enforce-eager, where there are no CUDA graphs: then it is neither D1 nor D3;",
    "the process never imports FlashInfer;",
    "the GPU is of sm_86, where the same symptom was reported of another cause (vLLM #53726).",
)

STILL_DIES = (
    "this output, with `--json`, from the server's environment;",
    "the log line of each worker that says what is guarded in it: a worker without one is not;",
    "`status()` of each worker: start vLLM with `--worker-extension-cls flashinfer_wsfix.report.WorkerStatus`, and ask"
    ' `llm.collective_rpc("flashinfer_wsfix_status")`;',
    f"the log of the same load with `{settings.PREFIX}=observe`, which guards nothing and names every move;",
    "whether it dies with --enforce-eager, too; and a GPU core dump: `CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1`.",
)


def collect() -> dict[str, Any]:
    """Probe this environment; return what ``--json`` prints."""
    failed: list[Finding] = []

    def probe(what: str, look: Callable[[], T], otherwise: T) -> T:
        try:
            return look()
        except Exception as error:
            sentence = f"{what} could not be looked at ({type(error).__name__}: {error})."
            failed.append(Finding("probe failed", False, sentence, "Report it with this output."))
            return otherwise

    config, complaints = settings.read()
    found = probe("the environment", environment.read_environment, environment.NOTHING)
    unread: Verdict | None = Verdict("unsupported", "FlashInfer's code cannot be read: it counts as affected")
    nothing: list[Function] = []
    verdict, functions = probe("FlashInfer's code", read_flashinfer, (unread, nothing))
    if verdict is not None:
        found["flashinfer"] = found["flashinfer"] or "of unknown version"
    moving = verdict is not None and (verdict is unread or bool(verdict.sites))
    activation = probe("activation", lambda: try_activation(moving), NOTHING_TRIED)
    real = activation.real
    able = config.mode == "on" and util.find_spec("wrapt") is not None
    able = able and (real is None or real.state in ("guarded", "not-needed", "not-affected"))
    read = verdict is not unread
    if not read and real is not None:
        verdict = real
    d1, d2 = judge_d1_d2(verdict, able and activation.covers(), not activation.untried, found)
    gates = config.gate if d1.guarded else ()
    unknown = Judgement(UNKNOWN, False, "it could not be looked at")
    d3 = probe("D3", lambda: judge_d3(found, functions if read else None, gates, not activation.untried), unknown)
    d4 = probe("D4", lambda: judge_d4(found, able and config.vllm and activation.covers("vllm")), unknown)
    judged = {"D1": d1, "D2": d2, "D3": d3, "D4": d4}
    case = Case(found, verdict, activation, judged, config, complaints)
    rows: list[Finding] = []
    for what, finder in FINDERS.items():
        rows += probe(what, lambda finder=finder: list(finder(case)), [])  # type: ignore[misc]
    affected = [row for row in judged.values() if row.state == APPLIES]
    well = all(row.guarded for row in affected)

    def shown(name: str) -> dict[str, Any]:
        row = judged[name]
        tried = row._replace(guarded=row.guarded and not activation.untried)
        return {**tried._asdict(), "set_up": row.guarded}

    return {
        "sentence": overall(case),
        "problem": not well,
        "environment": found,
        "defects": [{"name": row.name, "what": row.what, **shown(row.name)} for row in DEFECTS],
        "activation": activation.rows,
        "findings": [row._asdict() for row in sorted((*rows, *failed), key=lambda row: not row.problem)],
        "still_dies": list(STILL_DIES) if affected and well and not activation.untried else [],
        "not_this_bug": list(NOT_THIS_BUG),
    }


def main(json: bool = False) -> int:
    """Print the report; return 0 where all is well or there is nothing to do, and 1 where there is a problem."""
    found = collect()
    say(jsonlib.dumps(found, indent=2) if json else "\n".join(lines(found)))
    return 1 if found["problem"] else 0
