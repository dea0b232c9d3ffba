"""What else lies in the environment and matters: other causes, left-over files, settings, caches."""

import os
from collections.abc import Iterator
from pathlib import Path

from ... import settings
from ..installed import source_of, version_of
from ..startup_file import START_UP_FILE
from .children import HUNG, NAME
from .environment import ENVIRONMENT, parsed
from .findings import ENABLE, INSTALL, RESTART, Case, Finding
from .judgements import APPLIES

GATED_RUNNERS = ("CudnnFp8GemmRunner", "CudnnBf16GemmRunner")  # as auto-tune caches name what the gate takes out
CHECK_OFF = "FLASHINFER_DISABLE_VERSION_CHECK"  # any value but the empty one


def of_packages(case: Case) -> Iterator[Finding]:
    """Compare FlashInfer's binaries with its code: a mismatch is a cause of its own."""
    flashinfer = case.environment["flashinfer"]
    for key in ("flashinfer_cubin", "flashinfer_jit_cache") if any(parsed(flashinfer)) else ():  # 0.0.0: a source tree
        (name, _), version = ENVIRONMENT[key], case.environment[key]
        if version is None or version.partition("+")[0] == flashinfer.partition("+")[0]:  # 0.6.14+cu130
            continue
        passes = f"{CHECK_OFF} lets it pass" if os.environ.get(CHECK_OFF) else f"only {CHECK_OFF} lets it be imported"
        sentence = f"{name} is {version} and FlashInfer {flashinfer}: that crashes on its own, and {passes}."
        advice = f"`pip uninstall {name}`, or install version {flashinfer} of it. That is not this bug."
        yield Finding("mismatched FlashInfer", False, sentence, advice)


def of_cudnn(case: Case) -> Iterator[Finding]:
    """Name a cuDNN wheel that FlashInfer does not get."""
    found, wheels = case.environment["cudnn"], case.environment["cudnn_wheels"]
    unused = [f"{wheel} {version}" for wheel, version in wheels.items() if parsed(version) != parsed(found)]
    if not case.environment["cudnn_asked"] or not unused:
        return
    sentence = f"FlashInfer gets cuDNN {found}; {' and '.join(unused)} lies unused beside it."
    if len(unused) == len(wheels):
        advice = (
            "If that is not meant, look at LD_LIBRARY_PATH, which comes first. Upgrading the wheel changes nothing."
        )
    else:
        advice = (
            f"Both wheels own the same files: `pip uninstall {' '.join(wheels)}`, then install the one that torch asks"
            " for."
        )
    yield Finding("unused cuDNN", False, sentence, advice)


def of_gpus(case: Case) -> Iterator[Finding]:
    """Say that the GPU is unknown, where nvidia-smi does not tell."""
    if case.environment["gpus_unknown"]:
        sentence = f"Which GPU is here is unknown ({case.environment['gpus_unknown']})."
        advice = "Run the doctor where nvidia-smi works: whether D3 and D4 apply depends on the GPU."
        if HUNG in case.environment["gpus_unknown"]:
            advice = "After an Xid the driver may hang: restart the machine, or reset the GPU, and ask again."
        yield Finding("GPU unknown", False, sentence, advice)


def of_failed_start(case: Case) -> Iterator[Finding]:
    """Say what the start-up file failed of."""
    error = case.activation.fresh.get("error")
    if error:
        sentence = f"The start-up file fails in new processes: {error}."
        advice = f"{INSTALL}. Then run {ENABLE}."
        yield Finding("start-up file fails", _is_unguarded(case), sentence, advice)


def of_start_up_files(case: Case) -> Iterator[Finding]:
    """Look for start-up files that are left over, as a fresh interpreter saw them."""
    fresh = case.activation.fresh
    for file in (Path(folder, START_UP_FILE) for folder in fresh.get("folders", ()) if not fresh["importable"]):
        if file.is_file():
            sentence = f"{file} is left over: it does nothing, since {NAME} cannot be imported there."
            advice = f"{INSTALL}, if it is needed here; else `rm {file}`."
            yield Finding("orphaned start-up file", _is_unguarded(case), sentence, advice)


def of_sitecustomize(case: Case) -> Iterator[Finding]:
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


def of_settings(case: Case) -> Iterator[Finding]:
    for complaint in case.complaints:
        yield Finding("setting", False, f"{complaint}.", f"Correct or unset it {RESTART}.")


def of_ray(case: Case) -> Iterator[Finding]:
    """Name our variables that vLLM's Ray workers would not get."""
    if case.environment["vllm"] is None or version_of("ray") is None:
        return
    variable = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    prefixes = [part.strip() for part in os.environ.get(variable, "").split(",") if part.strip()]
    names = [part.strip() for part in os.environ.get("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "").split(",")]
    ours = [name for name in sorted(os.environ) if name.startswith(settings.PREFIX)]
    lost = [name for name in ours if name not in names and not name.startswith(tuple(prefixes))]
    if not lost:
        return
    # vLLM's second Ray executor, the default from 0.23 on, copies the driver's whole environment.
    copies = source_of("vllm.v1.executor.ray_executor_v2") is not None
    copies = copies and os.environ.get("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "1").strip() != "0"
    which = "workers of its Ray data-parallel backend" if copies else "Ray workers"
    sentence = f"vLLM's {which} do not get {', '.join(lost)}: there the defaults hold."
    yield Finding("Ray", False, sentence, f"Set {variable}={','.join([*prefixes, settings.PREFIX])}.")


def _auto_tune_caches() -> Iterator[Path]:
    """List the files where vLLM and SGLang keep what FlashInfer tuned; FlashInfer itself has no place of its own."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    vllm = os.environ.get("VLLM_CACHE_ROOT", f"{cache}/vllm") + "/flashinfer_autotune_cache"
    sglang = os.environ.get("SGLANG_CACHE_DIR", "~/.cache/sglang") + "/flashinfer/autotune"
    override = os.environ.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    for folder, name in ((override or vllm, "autotune_configs.json"), (sglang, "rank_*.json")):
        yield from sorted(Path(folder).expanduser().glob(f"**/{name}"))


def of_auto_tune_caches(case: Case) -> Iterator[Finding]:
    for file in _auto_tune_caches() if case.judged["D3"].state == APPLIES else ():
        text = file.read_text(encoding="utf-8", errors="replace")
        chosen = sum(text.count(f'"{runner}"') for runner in GATED_RUNNERS)
        if chosen:
            sentence = f"{file} chooses cuDNN's fp8 or bf16 runner {chosen} times."
            advice = "Nothing to do once guarded: the gate passes over them."
            yield Finding("auto-tune cache", False, sentence, advice)
