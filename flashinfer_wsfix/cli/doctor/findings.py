"""What follows for this environment: what to know, and what to do about it."""

import os
import sys
from collections.abc import Iterator
from importlib import util
from typing import Any, NamedTuple

from ... import settings
from ...detection import Verdict
from ...sites import GATES
from ..installed import version_of
from .children import NAME
from .judgements import ABSENT, APPLIES, FIXED, UNGATED, UNKNOWN, Judgement, sm100_workspace
from .trials import HOSTS, Activation, allowed

ENABLE = "`flashinfer-wsfix enable` in this environment, then restart the server"
INSTALL = "Install flashinfer-wsfix in this environment, as its README says"
RESTART = "in the server's environment, then restart it"
UPGRADE = "Upgrade to FlashInfer 0.7.0 or newer, or report it with this output."
NEWER = f"the cuDNN backend to {FIXED} or newer"


class Finding(NamedTuple):
    """One thing to know, and what to do about it. ``problem``: it leaves processes unguarded."""

    name: str
    problem: bool
    sentence: str
    advice: str


class Case(NamedTuple):
    """All that the findings follow from."""

    environment: dict[str, Any]
    verdict: Verdict | None
    activation: Activation
    judged: dict[str, Judgement]
    config: settings.Settings
    complaints: list[str]


def of_defects(case: Case) -> Iterator[Finding]:
    """Advise on what no activation would guard."""
    if case.verdict is not None and case.verdict.state == "unsupported":
        yield Finding("unsupported FlashInfer", True, f"{case.verdict.reason}.", UPGRADE)
    elif case.judged["D3"].state == APPLIES:
        yield from _of_d3(case)
    if case.judged["D4"].state == APPLIES and sm100_workspace() != "yes":
        yield Finding("unsupported vLLM", True, f"{case.judged['D4'].sentence}.", "Report it with this output.")
    elif case.judged["D4"].state == APPLIES and not case.config.vllm:
        sentence = f"D4 applies, and {settings.PREFIX}_VLLM is off."
        yield Finding("vLLM left alone", True, sentence, f"Unset {settings.PREFIX}_VLLM {RESTART}.")


def _of_d3(case: Case) -> Iterator[Finding]:
    left_in = [gate for gate in GATES if gate not in case.config.gate]
    if case.judged["D3"].guarded:
        sentence = (
            f'cuDNN stays in {UNGATED}, and wherever backend="cudnn" is asked for: whether D3 reaches those is not'
            " known."
        )
        yield Finding("D3 beyond the gate", False, sentence, f"If it still dies, upgrade {NEWER}.")
    elif case.verdict is not None and not case.verdict.sites:
        sentence = "D3 applies, and flashinfer-wsfix has no gate for this FlashInfer."
        yield Finding("old cuDNN", True, sentence, f"Upgrade {NEWER}.")
    elif left_in:
        sentence = f"D3 applies, and {settings.PREFIX}_GATE leaves cuDNN in for {' and '.join(left_in)}."
        yield Finding("gate off", True, sentence, f"Unset {settings.PREFIX}_GATE {RESTART}. Or upgrade {NEWER}.")


def of_activation(case: Case) -> Iterator[Finding]:
    """Say why a guard that could be in force is not, or where it is not."""
    activation = case.activation
    moving = case.verdict is not None and bool(case.verdict.sites)
    if not moving and not (case.judged["D4"].state == APPLIES and case.config.vllm):
        return
    if case.config.mode != "on":
        sentence = f"{settings.PREFIX}={os.environ[settings.PREFIX]} is set: nothing is guarded."
        yield Finding("switched off", True, sentence, f"Unset {settings.PREFIX} {RESTART}.")
    if util.find_spec("wrapt") is None and activation.fresh.get("installed", True):
        yield Finding("wrapt missing", True, "wrapt is not installed: nothing can be guarded.", "`pip install wrapt`.")
    elif activation.real and activation.real.state in ("unsupported", "failed", "pending"):
        yield Finding("guard failed", True, f"{activation.real.reason}.", UPGRADE)
    elif activation.untried:
        advice = "Make `import flashinfer` work here, or run the doctor where the server runs."
        yield Finding("not tried", False, f"{activation.untried}: that it gets guarded is not verified.", advice)
    covered = activation.covers(None if moving else "vllm")  # as D1, else as D4 alone is judged
    if activation.everywhere:
        yield from _of_what_does_not_inherit(activation)
    elif not activation.fresh:
        sentence = "It could not be tried whether new processes are guarded."
        yield Finding("not started", True, sentence, f"Make `{sys.executable} -c pass` work here first.")
    elif not activation.fresh["installed"]:
        so = "only this PYTHONPATH leads to it and its plugin" if covered else "new processes do not find it"
        sentence = f"flashinfer-wsfix is not installed in this environment: {so}."
        yield Finding("not installed", not covered, sentence, f"{INSTALL}. Then run {ENABLE}.")
    elif covered:
        yield from _of_what_loads_no_plugins(activation)
    else:
        yield from _of_what_keeps_us_out(activation)


def _of_what_does_not_inherit(activation: Activation) -> Iterator[Finding]:
    """Name the workers that come up without the PYTHONPATH that alone activates us here."""
    who = []
    if version_of("ray"):
        but = " (vLLM's load our plugin)" if activation.plugins.get("vllm") else ""
        who.append(f"Ray workers of a cluster that was started elsewhere{but}")
    if "tensorrt_llm" in activation.plugins:
        who.append("TensorRT-LLM's MPI workers, where they do not get it")
    if activation.inherited and who:
        sentence = f"Only this PYTHONPATH activates flashinfer-wsfix; without it come up: {', '.join(who)}."
        first = "" if activation.fresh["installed"] else f"{INSTALL}. Then "
        yield Finding("PYTHONPATH alone", False, sentence, f"{first}{'run' if first else 'Run'} {ENABLE}.")


def _of_what_loads_no_plugins(activation: Activation) -> Iterator[Finding]:
    sentence = "Only the plugin activates flashinfer-wsfix here: what loads no plugins is unguarded"
    if "sglang" in activation.plugins:
        sentence += ", and so are SGLang's scheduler actor of --use-ray, its diffusion workers and its encoder workers"
        advice = f"Run {ENABLE}: that guards them, too."
    else:
        advice = f"Nothing to do for vLLM's own workers. For other programs run {ENABLE}."
    yield Finding("plugin only", False, f"{sentence}.", advice)


def _of_what_keeps_us_out(activation: Activation) -> Iterator[Finding]:
    kept_out = [host for host in HOSTS if activation.plugins.get(host.package) is False and not allowed(host)]
    for host in kept_out:
        value = os.environ[host.variable]
        names = [name for name in map(str.strip, value.split(",")) if name and name.replace("-", "_").lower() != NAME]
        sentence = f"{host.variable}={value!r} keeps our plugin out of {host.name}'s workers."
        advice = f"Set {host.variable}={','.join([*names, NAME])} or unset it {RESTART}. Or run {ENABLE}."
        yield Finding("plugin kept out", True, sentence, advice)
    if not kept_out:
        yield Finding("not active", True, "New processes of this environment are NOT guarded.", f"Run {ENABLE}.")


def of_removal(case: Case) -> Iterator[Finding]:
    """Say when the package can go, or has something to do only where a GPU is."""
    if case.verdict is None or case.verdict.state not in ("not-needed", "not-affected"):
        return
    if case.activation.everywhere and case.judged["D4"].state == ABSENT and case.judged["D3"].state != APPLIES:
        sentence = "flashinfer-wsfix is active here and no longer needed."
        advice = "`flashinfer-wsfix disable`, then `pip uninstall flashinfer-wsfix`."
        yield Finding("not needed", False, sentence, advice)
    elif case.judged["D4"].state == UNKNOWN and not case.activation.covers("vllm"):
        sentence = "If this environment serves with CUTLASS MLA on SM100 GPUs, D4 is NOT guarded."
        yield Finding("D4 unguarded", False, sentence, f"In that case run {ENABLE}.")
