"""Which of the four defects apply here, and whether new processes are guarded against them."""

import re
from typing import Any, NamedTuple

from ... import detection
from ...detection import Verdict
from ...hook import CUTLASS_MLA, GEMM_BASE
from ...sites import GATES, SM100_WORKSPACE
from ..installed import source_of
from .environment import has_gpu

CUDNN_FIXED = (9, 23, 1)  # the first backend without D3
APPLIES, ABSENT, UNKNOWN = "applies", "does not apply", "unknown"


class Judgement(NamedTuple):
    """Whether a defect applies here, whether new processes are guarded against it, and why."""

    state: str
    guarded: bool
    sentence: str


def judge_d1_d2(verdict: Verdict | None, guarded: bool) -> tuple[Judgement, Judgement]:
    if verdict is None:
        none = Judgement(ABSENT, False, "FlashInfer is not installed here")
        return none, none
    if verdict.sites and guarded:
        zeroed = "every buffer that a site gets starts zeroed"
        return Judgement(APPLIES, True, verdict.reason), Judgement(APPLIES, True, zeroed)
    if verdict.sites or verdict.state == "unsupported":
        moves = verdict.reason.partition(",")[0] + ", NOT guarded here" if verdict.sites else verdict.reason
        return Judgement(APPLIES, False, moves), Judgement(APPLIES, False, "as D1: NOT guarded here")
    left = "its workspaces do not start zeroed; whether that alone does harm is not known, and nothing is done about it"
    return Judgement(ABSENT, False, verdict.reason), Judgement(UNKNOWN, False, left)


def judge_d3(environment: dict[str, Any], guarded: bool, gate: tuple[str, ...]) -> Judgement:
    gemm_base = source_of(GEMM_BASE) or ""
    if not any(row.function in gemm_base for row in GATES):
        return Judgement(ABSENT, False, "no FlashInfer that auto-tunes cuDNN's runners is installed here")
    cudnn, sm12x, fixed = environment["cudnn"], has_gpu(environment, "12"), ".".join(map(str, CUDNN_FIXED))
    if sm12x is False:
        return Judgement(ABSENT, False, "only SM12x GPUs have it (RTX PRO 6000, RTX 50xx, GB10)")
    version = tuple(map(int, re.findall(r"\d+", cudnn or "")[:3]))
    if version >= CUDNN_FIXED:
        return Judgement(ABSENT, False, f"cuDNN {cudnn} is not older than {fixed}")
    if sm12x is None or not version:
        missing = "no GPU" if sm12x is None else "no cuDNN"
        return Judgement(UNKNOWN, False, f"SM12x GPUs have it with cuDNN before {fixed}, and {missing} was found here")
    left_in = [row.name for row in GATES if row.name not in gate or not guarded]
    done = f"NOT kept out of the {' and '.join(left_in)}" if left_in else "the gate keeps it out of the fp8 and bf16"
    return Judgement(APPLIES, not left_in, f"cuDNN {cudnn} on SM12x: {done} auto-tuning")


def sm100_workspace() -> str:
    """Say whether the vLLM that is installed moves its ``SM100Workspace``: "no", "yes", or "in an unknown way"."""
    _, name, method, buffer = SM100_WORKSPACE
    functions = detection.source_functions(CUTLASS_MLA, source_of(CUTLASS_MLA) or "")
    moving = [function for function in functions if "resize_" in function.code.co_names]
    if not moving:
        return "no"
    known = [function.name for function in moving] == [f"{name}.{method}"]
    return "yes" if known and detection.resizes_only(moving[0].code, buffer) else "in an unknown way"


def judge_d4(environment: dict[str, Any], guarded: bool) -> Judgement:
    if environment["vllm"] is None and source_of(CUTLASS_MLA) is None:
        return Judgement(ABSENT, False, "vLLM is not installed here")
    vllm = f"vLLM {environment['vllm'] or 'of unknown version'}"
    sm100, moves = has_gpu(environment, "10"), sm100_workspace()
    if moves == "no":
        return Judgement(ABSENT, False, f"{vllm} has no {SM100_WORKSPACE[1]} that moves")
    if sm100 is False:
        return Judgement(ABSENT, False, f"{vllm} has it on SM100 GPUs only (B200, GB200)")
    guarded = guarded and moves == "yes"
    how = f"{vllm} moves it with CUTLASS MLA on SM100{'' if moves == 'yes' else ', ' + moves}"
    found = "no GPU was found here; " if sm100 is None else ""
    sentence = f"{found}{how}, {'' if guarded else 'NOT '}guarded here"
    return Judgement(APPLIES if sm100 else UNKNOWN, bool(sm100) and guarded, sentence)
