"""What there is to know about this environment, and what to do about it."""

import os
import sys
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple

from ... import settings
from ...detection import Verdict
from ...sites import GATES
from ..startup_file import START_UP_FILE
from .children import NAME
from .environment import version
from .judgements import ABSENT, APPLIES, CUDNN_FIXED, UNKNOWN, Judgement, sm100_workspace
from .trials import HOSTS, Activation, allowed

GATED_RUNNERS = ("CudnnFp8GemmRunner", "CudnnBf16GemmRunner")  # as auto-tune caches name what the gate takes out
ENABLE = "`flashinfer-wsfix enable` in this environment, then restart the server"
INSTALL = "Install flashinfer-wsfix in this environment, as its README says"
UPGRADE = "Upgrade to FlashInfer 0.7.0 or newer, or report it with this output."


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


def _of_defects(case: Case) -> Iterator[Finding]:
    """Advise on what no activation would guard."""
    if case.verdict is not None and case.verdict.state == "unsupported":
        yield Finding("unsupported FlashInfer", True, f"{case.verdict.reason}.", UPGRADE)
    elif case.judged["D3"][:2] == (APPLIES, False):
        left_in = [row.name for row in GATES if row.name not in case.config.gate]
        newer = f"the cuDNN backend to {'.'.join(map(str, CUDNN_FIXED))} or newer"
        if case.verdict is not None and not case.verdict.sites:
            sentence = "D3 applies, and flashinfer-wsfix has no gate for this FlashInfer."
            yield Finding("old cuDNN", True, sentence, f"Upgrade {newer}.")
        elif left_in:
            sentence = f"D3 applies, and {settings.PREFIX}_GATE leaves cuDNN in for {' and '.join(left_in)}."
            yield Finding("gate off", True, sentence, f"Unset {settings.PREFIX}_GATE, or upgrade {newer}.")
    if case.judged["D4"].state == APPLIES and sm100_workspace() != "yes":
        yield Finding("unsupported vLLM", True, f"{case.judged['D4'].sentence}.", "Report it with this output.")
    elif case.judged["D4"].state == APPLIES and not case.config.vllm:
        sentence = f"D4 applies, and {settings.PREFIX}_VLLM is off."
        yield Finding("vLLM left alone", True, sentence, f"Unset {settings.PREFIX}_VLLM.")


def _of_activation(case: Case) -> Iterator[Finding]:
    """Say why a guard that could be in force is not."""
    activation = case.activation
    moving = case.verdict is not None and bool(case.verdict.sites)
    if not moving and not (case.judged["D4"].state == APPLIES and case.config.vllm):
        return
    if case.config.mode != "on":
        sentence = f"{settings.PREFIX}={os.environ[settings.PREFIX]} is set: nothing is guarded."
        yield Finding("switched off", True, sentence, f"Unset {settings.PREFIX}.")
    if util.find_spec("wrapt") is None and activation.fresh.get("installed", True):
        yield Finding("wrapt missing", True, "wrapt is not installed: nothing can be guarded.", "`pip install wrapt`.")
    elif activation.real and activation.real.state in ("unsupported", "failed", "pending"):
        yield Finding("guard failed", True, f"{activation.real.reason}.", UPGRADE)
    elif activation.untried:
        advice = "Make `import flashinfer` work here, or run the doctor where the server runs."
        yield Finding("not tried", False, f"{activation.untried}: that it gets guarded is not verified.", advice)
    if activation.everywhere:
        return
    if not activation.fresh:
        sentence = "It could not be tried whether new processes are guarded."
        yield Finding("not started", True, sentence, f"Make `{sys.executable} -c pass` work here first.")
    elif not activation.fresh["installed"]:
        sentence = "flashinfer-wsfix is not installed in this environment: new processes do not find it."
        yield Finding("not installed", True, sentence, f"{INSTALL}. Then run {ENABLE}.")
    elif activation.covers():
        sentence = "Only the plugin activates flashinfer-wsfix here: other programs than these servers are unguarded."
        yield Finding("plugin only", False, sentence, f"Nothing to do for these servers. For others run {ENABLE}.")
    else:
        kept_out = [host for host in HOSTS if activation.plugins.get(host.package) is False and not allowed(host)]
        for host in kept_out:
            value = os.environ[host.variable]
            names = [name for name in map(str.strip, value.split(",")) if name and name != NAME]
            sentence = f"{host.variable}={value!r} keeps our plugin out of {host.name}'s workers."
            advice = f"Set {host.variable}={','.join([*names, NAME])} or unset it. Or run {ENABLE}."
            yield Finding("plugin kept out", True, sentence, advice)
        if not kept_out:
            yield Finding("not active", True, "New processes of this environment are NOT guarded.", f"Run {ENABLE}.")


def _of_start_up_files(case: Case) -> Iterator[Finding]:
    """Look for start-up files that are left over, as a fresh interpreter saw them."""
    fresh = case.activation.fresh
    for file in (Path(folder, START_UP_FILE) for folder in fresh.get("folders", ()) if not fresh["importable"]):
        if file.is_file():
            sentence = f"{file} is left over: it does nothing, since {NAME} cannot be imported there."
            advice = f"{INSTALL}, if it is needed here; else `rm {file}`."
            yield Finding("orphaned start-up file", _is_unguarded(case), sentence, advice)


def _of_sitecustomize(case: Case) -> Iterator[Finding]:
    """Look for a sitecustomize that would activate us and does not run, as a fresh interpreter saw them."""
    folders = [Path(entry) for entry in case.activation.fresh.get("path", ())]
    places = [place for folder in folders for place in (folder / "sitecustomize", folder / "sitecustomize.py")]
    files = [place / "__init__.py" if place.is_dir() else place for place in places]
    found = [file for file in files if file.is_file()]
    if not found or _mentions_us(found[0]) or case.activation.everywhere:  # the launcher's runs what it shadows
        return
    for file in found[1:]:
        if _mentions_us(file):
            sentence = f"{found[0]} shadows {file}, which would activate flashinfer-wsfix."
            advice = f"Start with `flashinfer-wsfix run` last, right before the program. Or run {ENABLE}."
            yield Finding("shadowed sitecustomize", _is_unguarded(case), sentence, advice)


def _mentions_us(file: Path) -> bool:
    return NAME in file.read_text(encoding="utf-8", errors="replace")


def _is_unguarded(case: Case) -> bool:
    return any(row.state == APPLIES for row in case.judged.values()) and not case.activation.everywhere


def _of_removal(case: Case) -> Iterator[Finding]:
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


def _of_settings(case: Case) -> Iterator[Finding]:
    for complaint in case.complaints:
        yield Finding("setting", False, f"{complaint}.", "Correct it or unset it.")
    if case.environment["vllm"] is None or version("ray") is None:
        return
    variable = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    prefixes = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
    names = [part.strip() for part in os.environ.get("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "").split(",")]
    ours = [name for name in sorted(os.environ) if name.startswith(settings.PREFIX)]
    lost = [name for name in ours if name not in names and not name.startswith(tuple(prefixes))]
    if lost:
        sentence = f"vLLM's Ray workers do not get {', '.join(lost)}: there the defaults hold."
        yield Finding("Ray", False, sentence, f"Set {variable}={','.join([*prefixes, settings.PREFIX])}.")


def _auto_tune_caches() -> Iterator[Path]:
    """List the files where vLLM and SGLang keep what FlashInfer tuned; FlashInfer itself has no place of its own."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    vllm = os.environ.get("VLLM_CACHE_ROOT", f"{cache}/vllm") + "/flashinfer_autotune_cache"
    sglang = os.environ.get("SGLANG_CACHE_DIR", "~/.cache/sglang") + "/flashinfer/autotune"
    override = os.environ.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    for folder, name in ((override or vllm, "autotune_configs.json"), (sglang, "rank_*.json")):
        yield from sorted(Path(folder).expanduser().glob(f"**/{name}"))


def _of_auto_tune_caches(case: Case) -> Iterator[Finding]:
    for file in _auto_tune_caches() if case.judged["D3"].state == APPLIES else ():
        text = file.read_text(encoding="utf-8", errors="replace")
        chosen = sum(text.count(f'"{runner}"') for runner in GATED_RUNNERS)
        if chosen:
            sentence = f"{file} chooses cuDNN's fp8 or bf16 runner {chosen} times."
            advice = "Nothing to do once guarded: the gate passes over them."
            yield Finding("auto-tune cache", False, sentence, advice)


FINDERS: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "what the defects ask for": _of_defects,
    "why nothing is active": _of_activation,
    "start-up files": _of_start_up_files,
    "sitecustomize": _of_sitecustomize,
    "removal": _of_removal,
    "settings": _of_settings,
    "auto-tune caches": _of_auto_tune_caches,
}


def overall(case: Case) -> str:
    judged, activation = case.judged, case.activation
    names = [name for name, row in judged.items() if row.state == APPLIES]
    exposed = [name for name in names if not judged[name].guarded]
    affected = f"This machine is affected ({', '.join(names)})"
    if exposed:
        return f"{affected} and NOT guarded{'' if exposed == names else ' against ' + ', '.join(exposed)}."
    if names and activation.untried:
        return f"{affected} and set up to be guarded, which could not be tried: FlashInfer's import fails here."
    if names:
        return f"{affected} and guarded{'' if activation.everywhere else ', by the plugin'}."
    unsure = [name for name in ("D3", "D4") if judged[name].state == UNKNOWN]
    if unsure:
        return f"No defect is known to apply here; whether {' or '.join(unsure)} does could not be told."
    if case.verdict is None:
        return f"FlashInfer is not installed for {sys.executable}: if your server has it, ask with the server's Python."
    return "This machine is not affected: flashinfer-wsfix can be removed here, and a crash here has another cause."
