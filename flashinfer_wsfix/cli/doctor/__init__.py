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
import os
import platform
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ... import __version__, detection, settings
from ...detection import Verdict
from ...names import CUTLASS_MLA, GEMM_BASE, SITE_MODULES
from ...sites import DEFECTS, GATES, SM100_WORKSPACE
from ..installed import judge_installed, source_of
from ..startup_file import START_UP_FILE

T = TypeVar("T")

NAME = "flashinfer_wsfix"  # of the package and of its entry points
CUDNN_FIXED = (9, 23, 1)  # the first backend without D3
GATED_RUNNERS = ("CudnnFp8GemmRunner", "CudnnBf16GemmRunner")  # as auto-tune caches name what the gate takes out
APPLIES, ABSENT, UNKNOWN = "applies", "does not apply", "unknown"
ENABLE = "`flashinfer-wsfix enable` in this environment, then restart the server"
INSTALL = "Install flashinfer-wsfix in this environment, as its README says"
UPGRADE = "Upgrade to FlashInfer 0.7.0 or newer, or report it with this output."
WIDTH = 79

# Each by its name for people and the distributions that bring it, where some do.
ENVIRONMENT = {
    "flashinfer": ("FlashInfer", "flashinfer-python"),
    "torch": ("torch", "torch"),
    "cudnn": ("cuDNN backend", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "vllm": ("vLLM", "vllm"),
    "sglang": ("SGLang", "sglang"),
    "wrapt": ("wrapt", "wrapt"),
    "python": ("Python",),
    "executable": ("",),
    "flashinfer_wsfix": ("flashinfer-wsfix",),
}

NOT_THIS_BUG = (
    "cuBLAS says CUBLAS_STATUS_NOT_SUPPORTED (flashinfer #3255);",
    "cuBLAS crashes while FlashInfer tunes on a B200 (flashinfer #3085);",
    "the process never imports FlashInfer. On sm_86, too, the same symptom was reported of another cause.",
)


class Host(NamedTuple):
    """A server that loads plugins: its package, their group, its module that loads them, and its allow-list."""

    name: str
    package: str
    group: str
    loader: str
    variable: str


HOSTS = (
    Host("vLLM", "vllm", "vllm.general_plugins", "vllm.plugins", "VLLM_PLUGINS"),
    Host("SGLang", "sglang", "sglang.srt.plugins", "sglang.srt.plugins", "SGLANG_PLUGINS"),
)


# --- children ---------------------------------------------------------------------------------------------------------

_MARK = "flashinfer-wsfix:"  # before the answer: a sitecustomize may print as well

# An expression, so that a spawned process can evaluate it: is our hook there, and who put it there?
_ACTIVE = (
    "(any(type(finder).__module__ == 'flashinfer_wsfix.importer' for finder in __import__('sys').meta_path),"
    " list(getattr(__import__('sys').modules.get('flashinfer_wsfix.state'), 'routes', ())))"
)

# What a server sees that is started here: sys.path without the working directory, which `-c` puts first. ``installed``
# asks without PYTHONPATH as well, which need not be set where the server starts.
_FRESH = f"""
import json, os, site, sys
from importlib import metadata, util
active, routes = {_ACTIVE}
path = sys.path[:] = [entry for entry in sys.path if entry]
declared = [entry.group for entry in metadata.entry_points(name="{NAME}")]
importable = util.find_spec("{NAME}") is not None
added = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
sys.path[:] = [entry for entry in path if os.path.abspath(entry) not in added]
installed = util.find_spec("{NAME}") is not None
folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
found = dict(active=active, routes=routes, path=path, declared=declared, folders=folders)
print("{_MARK}" + json.dumps(dict(found, importable=importable, installed=installed)))
"""

_SPAWNED = f"""
import json, multiprocessing
with multiprocessing.get_context("spawn").Pool(1) as pool:
    active, routes = pool.apply(eval, ({_ACTIVE!r},))
print("{_MARK}" + json.dumps(dict(active=active, routes=routes)))
"""

# The real thing. Where nothing activates us at start-up, by our plugin, as a worker of the server would. FlashInfer
# itself imports the module of its last two sites late.
_IMPORT = f"""
import contextlib, importlib, json, sys
if not {_ACTIVE}[0]:
    from importlib.metadata import entry_points
    for entry in entry_points(group=sys.argv[1], name="{NAME}"):
        entry.load()()
import flashinfer.gemm
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module("{SITE_MODULES[1]}")
target = sys.modules["{NAME}.report"].status().targets[0]
print("{_MARK}" + json.dumps(dict(state=target.state, reason=target.reason, sites=target.sites)))
"""

# For containers whose cuDNN did not come from a wheel.
_CUDNN = f"""
import ctypes
print("{_MARK}%d" % ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
"""


class NoAnswer(Exception):
    """A child did not do what it was asked; the message says why, in one line."""


def _run(command: list[str], seconds: float = 30) -> str:
    """Run a command and return its output. Raises NoAnswer where it does not end well in time."""
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {seconds:.0f} s") from None
    except OSError as error:
        raise NoAnswer(str(error)) from None
    if ran.returncode:
        raise NoAnswer([f"exit status {ran.returncode}", *ran.stderr.strip().splitlines()][-1])
    return ran.stdout


def _python(code: str, *arguments: str, seconds: float = 30) -> Any:
    """Run code in a fresh interpreter and return what it printed after the mark. Raises NoAnswer."""
    for line in _run([sys.executable, "-c", code, *arguments], seconds).splitlines():
        if line.startswith(_MARK):
            return jsonlib.loads(line[len(_MARK) :])
    raise NoAnswer("it printed nothing")


# --- the environment --------------------------------------------------------------------------------------------------


def _version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed and says so."""
    for distribution in distributions:
        with suppress(Exception):
            return metadata.version(distribution) or None  # type: ignore[redundant-expr,unused-ignore]
    return None


def _cudnn() -> str | None:
    try:
        number = _python(_CUDNN)  # 92301 for 9.23.1
    except NoAnswer:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _gpus() -> list[dict[str, str]]:
    try:
        listed = _run(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"])
    except NoAnswer:
        return []
    rows = [line.split(", ") for line in listed.splitlines()]
    return [dict(zip(("name", "capability", "driver"), row, strict=True)) for row in rows if len(row) == 3]


def _environment() -> dict[str, Any]:
    found: dict[str, Any] = {key: _version(*brought_by) for key, (_, *brought_by) in ENVIRONMENT.items()}
    found.update(python=platform.python_version(), executable=sys.executable, flashinfer_wsfix=__version__)
    return found | {"cudnn": found["cudnn"] or _cudnn(), "gpus": _gpus()}


def _has_gpu(environment: dict[str, Any], major: str) -> bool | None:
    """Say whether a GPU of this major compute capability is here; None where no GPU is found that says its own."""
    majors = [gpu["capability"].split(".")[0] for gpu in environment["gpus"]]
    return major in majors if any(map(str.isdigit, majors)) else None


# --- activation -------------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """What was tried, and what it showed."""

    rows: list[dict[str, Any]]  # as in the report
    everywhere: bool  # every new interpreter is activated
    plugins: dict[str, bool]  # by package of an installed server: whether its workers are, by our plugin
    fresh: dict[str, Any]  # the answer to _FRESH, empty where there was none
    real: Verdict | None  # on FlashInfer, after a child imported it
    untried: str  # why no child could import it

    def covers(self, package: str | None = None) -> bool:
        """Say whether the workers of the server ``package`` are activated; None: of all servers that are installed."""
        wanted = [package] if package else list(self.plugins)
        return self.everywhere or (bool(wanted) and all(self.plugins.get(name) for name in wanted))


def _allowed(host: Host) -> bool:
    """Say whether the host's allow-list lets our plugin in, read as the host reads it."""
    text = os.environ.get(host.variable)
    if host.package == "vllm":
        return text is None or NAME in text.split(",")  # not stripped, and an empty one lets none in
    return not text or NAME in map(str.strip, text.split(","))  # an empty one lets all in


def _activation(moving: bool) -> Activation:
    """Start children and see which come up activated; where FlashInfer has sites, also import it in one."""
    rows: list[dict[str, Any]] = []

    def tell(where: str, active: bool | None, routes: list[str], sentence: str) -> None:
        rows.append({"where": where, "active": active, "routes": routes, "sentence": sentence})

    def start(where: str, code: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = _python(code)
        except NoAnswer as why:
            tell(where, None, [], f"could not be tried: {why}")
            return {}
        active, routes = answer["active"], answer["routes"]
        tell(where, active, routes, f"active, by {', '.join(routes)}" if active else "NOT active")
        return answer

    fresh = start("a fresh interpreter", _FRESH)
    start("a spawned process", _SPAWNED)
    seen = [row["active"] for row in rows]
    everywhere = True in seen and False not in seen
    plugins = {}
    for host in HOSTS:
        has_loader = source_of(host.loader) is not None
        if has_loader or _version(host.package) is not None:
            loads = has_loader and host.group in fresh.get("declared", ()) and _allowed(host)
            plugins[host.package] = loads
            sentence = f"{host.name} would {'' if loads else 'NOT '}load our plugin"
            tell(f"workers of {host.name}", loads, ["plugin"] * loads, sentence)
    real, untried = None, ""
    if moving and (everywhere or any(plugins.values())):
        where = "a process that imports FlashInfer" if everywhere else "a worker that imports FlashInfer"
        try:
            group = next((host.group for host in HOSTS if plugins.get(host.package)), "")
            real = Verdict(**_python(_IMPORT, group, seconds=120))
            tell(where, real.state == "guarded", [], real.reason)
        except NoAnswer as why:
            untried = f"FlashInfer could not be imported here ({why})"
            tell(where, None, [], untried)
    return Activation(rows, everywhere, plugins, fresh, real, untried)


# --- defects ----------------------------------------------------------------------------------------------------------


class Judgement(NamedTuple):
    """Whether a defect applies here, whether new processes are guarded against it, and why."""

    state: str
    guarded: bool
    sentence: str


def _d1_d2(verdict: Verdict | None, guarded: bool) -> tuple[Judgement, Judgement]:
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


def _d3(environment: dict[str, Any], guarded: bool, gate: tuple[str, ...]) -> Judgement:
    gemm_base = source_of(GEMM_BASE) or ""
    if not any(row.function in gemm_base for row in GATES):
        return Judgement(ABSENT, False, "no FlashInfer that auto-tunes cuDNN's runners is installed here")
    cudnn, sm12x, fixed = environment["cudnn"], _has_gpu(environment, "12"), ".".join(map(str, CUDNN_FIXED))
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


def _sm100_workspace() -> str:
    """Say whether the vLLM that is installed moves its ``SM100Workspace``: "no", "yes", or "in an unknown way"."""
    _, name, method, buffer = SM100_WORKSPACE
    functions = detection.source_functions(CUTLASS_MLA, source_of(CUTLASS_MLA) or "")
    moving = [function for function in functions if "resize_" in function.code.co_names]
    if not moving:
        return "no"
    known = [function.name for function in moving] == [f"{name}.{method}"]
    return "yes" if known and detection.resizes_only(moving[0].code, buffer) else "in an unknown way"


def _d4(environment: dict[str, Any], guarded: bool) -> Judgement:
    if environment["vllm"] is None and source_of(CUTLASS_MLA) is None:
        return Judgement(ABSENT, False, "vLLM is not installed here")
    vllm = f"vLLM {environment['vllm'] or 'of unknown version'}"
    sm100, moves = _has_gpu(environment, "10"), _sm100_workspace()
    if moves == "no":
        return Judgement(ABSENT, False, f"{vllm} has no {SM100_WORKSPACE[1]} that moves")
    if sm100 is False:
        return Judgement(ABSENT, False, f"{vllm} has it on SM100 GPUs only (B200, GB200)")
    guarded = guarded and moves == "yes"
    how = f"{vllm} moves it with CUTLASS MLA on SM100{'' if moves == 'yes' else ', ' + moves}"
    found = "no GPU was found here; " if sm100 is None else ""
    sentence = f"{found}{how}, {'' if guarded else 'NOT '}guarded here"
    return Judgement(APPLIES if sm100 else UNKNOWN, bool(sm100) and guarded, sentence)


# --- findings ---------------------------------------------------------------------------------------------------------


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
    if case.judged["D4"].state == APPLIES and _sm100_workspace() != "yes":
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
        kept_out = [host for host in HOSTS if activation.plugins.get(host.package) is False and not _allowed(host)]
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
    if case.environment["vllm"] is None or _version("ray") is None:
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


# --- the report -------------------------------------------------------------------------------------------------------


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
    environment = probe("the environment", _environment, dict.fromkeys(ENVIRONMENT) | {"gpus": []})
    unread: Verdict | None = Verdict("unsupported", "FlashInfer's source cannot be read: it counts as affected")
    verdict = probe("FlashInfer's source", judge_installed, unread)
    if verdict is not None:
        environment["flashinfer"] = environment["flashinfer"] or "of unknown version"
    moving = verdict is not None and (verdict is unread or bool(verdict.sites))
    activation = probe("activation", lambda: _activation(moving), Activation([], False, {}, {}, None, ""))
    if verdict is unread and activation.real is not None:  # as where there are .pyc files alone
        verdict = activation.real
    able = config.mode == "on" and util.find_spec("wrapt") is not None
    able = able and (activation.real is None or activation.real.state in ("guarded", "not-needed", "not-affected"))
    d1, d2 = _d1_d2(verdict, able and activation.covers())
    unknown = Judgement(UNKNOWN, False, "it could not be looked at")
    d3 = probe("D3", lambda: _d3(environment, d1.guarded, config.gate), unknown)
    d4 = probe("D4", lambda: _d4(environment, able and config.vllm and activation.covers("vllm")), unknown)
    judged = {"D1": d1, "D2": d2, "D3": d3, "D4": d4}
    case = Case(environment, verdict, activation, judged, config, complaints)
    findings: list[Finding] = []
    for what, finder in FINDERS.items():
        findings += probe(what, lambda finder=finder: list(finder(case)), [])  # type: ignore[misc]
    return {
        "sentence": _overall(case),
        "problem": any(row.state == APPLIES and not row.guarded for row in judged.values()),
        "environment": environment,
        "defects": [{"name": row.name, "what": row.what, **judged[row.name]._asdict()} for row in DEFECTS],
        "activation": activation.rows,
        "findings": [finding._asdict() for finding in (*findings, *failed)],
        "not_this_bug": list(NOT_THIS_BUG),
    }


def _overall(case: Case) -> str:
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


def _wrapped(first: str, text: str) -> list[str]:
    """Wrap after ``first``. A command stays whole, to be copied: its blanks are no blanks while the text is wrapped."""
    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), text)
    indent = " " * len(first)
    wrapper = textwrap.TextWrapper(WIDTH, first, indent, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\0", " ") for line in wrapper.wrap(whole)]


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Lay the report out for people, in less than 80 columns."""
    yield from _wrapped("", found["sentence"])
    yield from ("", "Environment")
    for key, (name, *_) in ENVIRONMENT.items():
        yield from _wrapped(f"  {name:<18}", found["environment"][key] or "none found")
    for gpu in found["environment"]["gpus"] or [None]:
        text = "{name}, compute capability {capability}, driver {driver}".format(**gpu) if gpu else "none found"
        yield from _wrapped(f"  {'GPU':<18}", text)
    yield from ("", "Defects")
    for defect in found["defects"]:
        state = f"{defect['state']}{', guarded' if defect['guarded'] else ''}"
        yield from _wrapped(f"  {defect['name']}  ", f"{state}: {defect['what']}")
        yield from _wrapped("      - ", f"{defect['sentence']}.")
    yield from ("", "Activation")
    for row in found["activation"]:
        yield from _wrapped("  - ", f"{row['where']}: {row['sentence']}.")
    yield from ("", "Findings, and what to do")
    for finding in found["findings"]:
        yield from _wrapped("  ! " if finding["problem"] else "  - ", finding["sentence"])
        yield from _wrapped("    -> ", finding["advice"])
    if not found["findings"]:
        yield "  - none"
    yield from ("", "It is not this bug if")
    for sentence in found["not_this_bug"]:
        yield from _wrapped("  - ", sentence)


def main(json: bool = False) -> int:
    """Print the report; return 0 where all is well or there is nothing to do, and 1 where there is a problem."""
    found = collect()
    print(jsonlib.dumps(found, indent=2) if json else "\n".join(_lines(found)))
    return 1 if found["problem"] else 0
