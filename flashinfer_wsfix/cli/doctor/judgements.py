"""Which of the four defects apply here, and whether new processes are guarded against them."""

from collections.abc import Collection
from typing import Any, NamedTuple

from ... import detection
from ...detection import Function, Verdict
from ...names import CUTLASS_MLA
from ...sites import CUDNN_FIXED, GATES, LANES, SM100_WORKSPACE
from ..installed import source_of
from .environment import cudnn_versions, has_gpu, parsed

APPLIES, ABSENT, UNKNOWN = "applies", "does not apply", "unknown"
FIXED = ".".join(map(str, CUDNN_FIXED))
GATED = " and ".join(GATES)
# The lanes that the gate cannot take cuDNN out of, by FlashInfer's own functions.
UNGATED = ", ".join(lane.removesuffix("_workspace") for lane, gate in LANES.items() if gate is None)


class Judgement(NamedTuple):
    """Whether a defect applies here, whether new processes are set up to be guarded against it, and why."""

    state: str
    guarded: bool
    sentence: str


def judge_d1_d2(
    verdict: Verdict | None, guarded: bool, tried: bool, environment: dict[str, Any]
) -> tuple[Judgement, Judgement]:
    """Judge the workspace that moves, and that it does not start zeroed; ``verdict`` None: there is no FlashInfer."""
    if verdict is None:
        none = Judgement(ABSENT, False, "FlashInfer is not installed here")
        return none, none
    if verdict.sites and guarded and not tried:
        moves = f"FlashInfer {environment['flashinfer']} moves its cuDNN workspace at {len(verdict.sites)} sites"
        unseen = "a guard is set up, and whether it goes in is not tried"
        return Judgement(APPLIES, True, f"{moves}: {unseen}"), Judgement(APPLIES, True, f"as D1: {unseen}")
    if verdict.sites and guarded:
        zeroed = "every buffer that a site gets starts zeroed"
        return Judgement(APPLIES, True, verdict.reason), Judgement(APPLIES, True, zeroed)
    if verdict.sites or verdict.state == "unsupported":
        flashinfer = f"FlashInfer {environment['flashinfer']}"
        moves = f"{flashinfer} moves its cuDNN workspace at {len(verdict.sites)} sites, NOT guarded here"
        sentence = moves if verdict.sites else verdict.reason
        return Judgement(APPLIES, False, sentence), Judgement(APPLIES, False, "as D1: NOT guarded here")
    left = "its workspaces do not start zeroed; whether that alone does harm is not known, and nothing is done about it"
    return Judgement(ABSENT, False, verdict.reason), Judgement(UNKNOWN, False, left)


def judge_d3(
    environment: dict[str, Any], functions: Collection[Function] | None, gates: Collection[str], tried: bool
) -> Judgement:
    """Judge cuDNN's fault on SM12x. ``functions``: FlashInfer's, None where unknown; ``gates``: those in force."""
    auto_tuned = {function for _, function in GATES.values()}
    if functions is not None and auto_tuned.isdisjoint(function.name for function in functions):
        return Judgement(ABSENT, False, "no FlashInfer that auto-tunes cuDNN's runners is installed here")
    versions, sm12x = cudnn_versions(environment), has_gpu(environment, "12")
    cudnn = " or ".join(versions)
    if sm12x is False:
        return Judgement(ABSENT, False, "only SM12x GPUs have it (RTX PRO 6000, RTX 50xx, GB10)")
    old = [parsed(version) < CUDNN_FIXED for version in versions]
    if versions and not any(old):
        return Judgement(ABSENT, False, f"cuDNN {cudnn} is not older than {FIXED}")
    having = f"SM12x GPUs have it with cuDNN before {FIXED}"
    if sm12x is None:
        unknown = environment["gpus_unknown"]
        missing = f"which GPU is here is unknown ({unknown})" if unknown else "no GPU was found here"
        return Judgement(UNKNOWN, False, f"{having}, and {missing}")
    if not versions:
        return Judgement(UNKNOWN, False, f"{having}, and no cuDNN was found here")
    if not all(old):
        return Judgement(UNKNOWN, False, f"{having}, and which is loaded here, {cudnn}, could not be asked")
    left_in, keeps = [gate for gate in GATES if gate not in gates], "keeps" if tried else "would keep"
    done = f"NOT kept out of the {' and '.join(left_in)}" if left_in else f"the gate {keeps} it out of the {GATED}"
    others = f"other lanes keep it ({UNGATED}), and whether D3 reaches those is not known"
    return Judgement(APPLIES, not left_in, f"cuDNN {cudnn} on SM12x: {done} auto-tuning; {others}")


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
    """Judge vLLM's own workspace, which only SM100 GPUs use."""
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
    unknown = environment["gpus_unknown"]
    missing = f"which GPU is here is unknown ({unknown}); " if unknown else "no GPU was found here; "
    sentence = f"{missing if sm100 is None else ''}{how}, {'' if guarded else 'NOT '}guarded here"
    return Judgement(APPLIES if sm100 else UNKNOWN, bool(sm100) and guarded, sentence)
