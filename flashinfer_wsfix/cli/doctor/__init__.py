"""``flashinfer-wsfix doctor``: can this bug be the cause here, do worker processes come up guarded, and what to do.

Neither torch, FlashInfer, vLLM nor SGLang is imported into this process: what they are is read from their metadata and
source, and what has to be tried is tried in children with a time limit. A probe that fails is a line in the report.

``--json`` prints one object; keys may be added to it, never changed:

- ``sentence``: the overall judgement. ``problem``: true where the exit status is 1.
- ``environment``: ``flashinfer``, ``torch``, ``cudnn`` (the backend), ``vllm``, ``sglang``, ``wrapt``, ``python`` and
  ``flashinfer_wsfix``, each a version or null; ``executable``, the path of that Python; ``gpus``, a list of ``name``,
  ``capability`` ("12.0") and ``driver``.
- ``defects``: for each of D1 to D4 its ``name``, ``what`` it is, ``state`` ("applies", "does not apply", "unknown"),
  ``guarded`` (true only where it applies and new processes are guarded against it), and the ``sentence``.
- ``activation``: what was tried, each with ``where``, ``active`` (true, false, or null where it could not be tried),
  ``routes`` and the ``sentence``.
- ``findings``: each with ``name``, ``problem`` (true where it leaves processes unguarded), ``sentence`` and ``advice``.
- ``not_this_bug``: sentences that say which failures have another cause.
"""

import json as jsonlib
from collections.abc import Callable
from importlib import util
from typing import Any, TypeVar

from ... import settings
from ...detection import Verdict
from ...sites import DEFECTS
from ..installed import judge_installed
from .environment import ENVIRONMENT, read_environment
from .findings import FINDERS, Case, Finding, overall
from .judgements import APPLIES, UNKNOWN, Judgement, judge_d1_d2, judge_d3, judge_d4
from .printer import lines
from .trials import Activation, try_activation

T = TypeVar("T")

NOT_THIS_BUG = (
    "cuBLAS says CUBLAS_STATUS_NOT_SUPPORTED (flashinfer #3255);",
    "cuBLAS crashes while FlashInfer tunes on a B200 (flashinfer #3085);",
    "the process never imports FlashInfer. On sm_86, too, the same symptom was reported of another cause.",
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
    environment = probe("the environment", read_environment, dict.fromkeys(ENVIRONMENT) | {"gpus": []})
    unread: Verdict | None = Verdict("unsupported", "FlashInfer's source cannot be read: it counts as affected")
    verdict = probe("FlashInfer's source", judge_installed, unread)
    if verdict is not None:
        environment["flashinfer"] = environment["flashinfer"] or "of unknown version"
    moving = verdict is not None and (verdict is unread or bool(verdict.sites))
    activation = probe("activation", lambda: try_activation(moving), Activation([], False, {}, {}, None, ""))
    if verdict is unread and activation.real is not None:  # as where there are .pyc files alone
        verdict = activation.real
    able = config.mode == "on" and util.find_spec("wrapt") is not None
    able = able and (activation.real is None or activation.real.state in ("guarded", "not-needed", "not-affected"))
    d1, d2 = judge_d1_d2(verdict, able and activation.covers())
    unknown = Judgement(UNKNOWN, False, "it could not be looked at")
    d3 = probe("D3", lambda: judge_d3(environment, d1.guarded, config.gate), unknown)
    d4 = probe("D4", lambda: judge_d4(environment, able and config.vllm and activation.covers("vllm")), unknown)
    judged = {"D1": d1, "D2": d2, "D3": d3, "D4": d4}
    case = Case(environment, verdict, activation, judged, config, complaints)
    findings: list[Finding] = []
    for what, finder in FINDERS.items():
        findings += probe(what, lambda finder=finder: list(finder(case)), [])  # type: ignore[misc]
    return {
        "sentence": overall(case),
        "problem": any(row.state == APPLIES and not row.guarded for row in judged.values()),
        "environment": environment,
        "defects": [{"name": row.name, "what": row.what, **judged[row.name]._asdict()} for row in DEFECTS],
        "activation": activation.rows,
        "findings": [finding._asdict() for finding in (*findings, *failed)],
        "not_this_bug": list(NOT_THIS_BUG),
    }


def main(json: bool = False) -> int:
    """Print the report; return 0 where all is well or there is nothing to do, and 1 where there is a problem."""
    found = collect()
    print(jsonlib.dumps(found, indent=2) if json else "\n".join(lines(found)))
    return 1 if found["problem"] else 0
