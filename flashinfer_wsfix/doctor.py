"""``flashinfer-wsfix doctor``: can this bug be the cause here, do worker processes come up guarded, and what to do.

Neither torch, FlashInfer, vLLM nor SGLang is imported into this process: what they are is read from their metadata and
source, and what has to be tried is tried in children with a time limit. A probe that fails is a line in the report.

``--json`` prints one object; keys may be added to it, never changed:

- ``sentence``: the overall judgement. ``problem``: true where the exit status is 1.
- ``environment``: ``flashinfer``, ``torch``, ``cudnn`` (the backend), ``vllm``, ``sglang``, ``wrapt``, ``python`` and
  ``flashinfer_wsfix``, each a version or null; ``gpus``, a list of ``name``, ``capability`` ("12.0") and ``driver``.
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
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from . import __version__, detection, settings
from .detection import Verdict
from .hook import CUTLASS_MLA, GEMM_BASE, GEMM_BF16_FP4
from .sites import DEFECTS, GATES, SM100_WORKSPACE
from .startup import START_UP_FILE, bootstrap_folder

T = TypeVar("T")

NAME = "flashinfer_wsfix"  # of the package and of its entry points
CUDNN_FIXED = (9, 23, 1)  # the first backend without D3
GATED_RUNNERS = ("CudnnFp8GemmRunner", "CudnnBf16GemmRunner")  # as auto-tune caches name what the gate takes out
APPLIES, ABSENT, UNKNOWN = "applies", "does not apply", "unknown"
ENABLE = "`flashinfer-wsfix enable` in this environment, then restart the server"
INSTALL = "Install flashinfer-wsfix in this environment, as its README says"
WIDTH = 79

ENVIRONMENT = {
    "flashinfer": "FlashInfer",
    "torch": "torch",
    "cudnn": "cuDNN backend",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "wrapt": "wrapt",
    "python": "Python",
    "flashinfer_wsfix": "flashinfer-wsfix",
}

NOT_THIS_BUG = (
    "cuBLAS says CUBLAS_STATUS_NOT_SUPPORTED (flashinfer #3255);",
    "cuBLAS crashes while FlashInfer tunes on a B200 (flashinfer #3085);",
    "the GPU is sm_86, or the process never imports FlashInfer: the same symptom was reported there, of other causes.",
)


class Host(NamedTuple):
    """A server that loads plugins: its package, their group, its file that loads them, and its allow-list."""

    name: str
    package: str
    group: str
    loader: str
    variable: str


HOSTS = (
    Host("vLLM", "vllm", "vllm.general_plugins", "plugins/__init__.py", "VLLM_PLUGINS"),
    Host("SGLang", "sglang", "sglang.srt.plugins", "srt/plugins/__init__.py", "SGLANG_PLUGINS"),
)


# --- children ---------------------------------------------------------------------------------------------------------

_MARK = "flashinfer-wsfix:"  # before the answer: a sitecustomize may print as well

# An expression, so that a spawned process can evaluate it: is our hook there, and who put it there?
_ACTIVE = (
    "(any(type(finder).__module__ == 'flashinfer_wsfix.hook' for finder in __import__('sys').meta_path),"
    " list(getattr(__import__('sys').modules.get('flashinfer_wsfix.hook'), 'routes', ())))"
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
    importlib.import_module("{GEMM_BF16_FP4}")
target = sys.modules["{NAME}.report"].status().targets[0]
print("{_MARK}" + json.dumps(dict(state=target.state, reason=target.reason)))
"""

_GPUS = f"""
import json
from pynvml import *
nvmlInit()
text = lambda value: value.decode() if isinstance(value, bytes) else value
gpus = []
for handle in map(nvmlDeviceGetHandleByIndex, range(nvmlDeviceGetCount())):
    capability = "%d.%d" % tuple(nvmlDeviceGetCudaComputeCapability(handle))
    name, driver = text(nvmlDeviceGetName(handle)), text(nvmlSystemGetDriverVersion())
    gpus.append(dict(name=name, capability=capability, driver=driver))
print("{_MARK}" + json.dumps(gpus))
"""
_NVIDIA_SMI = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]

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
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {seconds:.0f} s") from None
    except OSError as error:
        raise NoAnswer(str(error)) from None
    if ran.returncode:
        lines = ran.stderr.strip().splitlines()
        raise NoAnswer(lines[-1] if lines else f"exit status {ran.returncode}")
    return ran.stdout


def _python(code: str, *arguments: str, seconds: float = 30) -> Any:
    """Run code in a fresh interpreter and return what it printed after the mark. Raises NoAnswer."""
    for line in _run([sys.executable, "-c", code, *arguments], seconds).splitlines():
        if line.startswith(_MARK):
            return jsonlib.loads(line[len(_MARK) :])
    raise NoAnswer("it printed nothing")


# --- the environment --------------------------------------------------------------------------------------------------


def _version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cudnn() -> str | None:
    version = _version("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
    if version is not None:
        return version
    try:
        number = _python(_CUDNN)  # 92301 for 9.23.1
    except NoAnswer:
        return None
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _gpus() -> list[dict[str, str]]:
    try:
        found: list[dict[str, str]] = _python(_GPUS)
        return found
    except NoAnswer:
        pass
    try:
        rows = [line.split(", ") for line in _run(_NVIDIA_SMI).splitlines()]
    except NoAnswer:
        return []
    return [dict(zip(("name", "capability", "driver"), row, strict=True)) for row in rows if len(row) == 3]


def _environment() -> dict[str, Any]:
    return {
        "flashinfer": _version("flashinfer-python"),
        "torch": _version("torch"),
        "cudnn": _cudnn(),
        "vllm": _version("vllm"),
        "sglang": _version("sglang"),
        "wrapt": _version("wrapt"),
        "python": platform.python_version(),
        "flashinfer_wsfix": __version__,
        "gpus": _gpus(),
    }


def _has_gpu(environment: dict[str, Any], major: str) -> bool | None:
    """Say whether a GPU of this major compute capability is here; None where no GPU is found."""
    gpus = environment["gpus"]
    return any(gpu["capability"].split(".")[0] == major for gpu in gpus) if gpus else None


def _source(package: str, relative: str) -> str | None:
    """Read a file of an installed package, which is not imported; None where there is no such file."""
    spec = util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, relative)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def _source_of(module: str) -> str | None:
    package, _, rest = module.partition(".")
    return _source(package, rest.replace(".", "/") + ".py")


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
        # Every other route imports the package too, so "import" counts alone only.
        routes = [route for route in answer["routes"] if route != "import"] or answer["routes"]
        tell(where, answer["active"], routes, f"active, by {', '.join(routes)}" if answer["active"] else "NOT active")
        return answer

    fresh = start("a fresh interpreter", _FRESH)
    start("a spawned process", _SPAWNED)
    seen = [row["active"] for row in rows]
    everywhere = True in seen and False not in seen
    plugins = {}
    for host in HOSTS:
        if _version(host.package) is not None:
            declared = host.group in fresh.get("declared", ())
            loads = declared and _allowed(host) and _source(host.package, host.loader) is not None
            plugins[host.package] = loads
            loads_or_not = "loads" if loads else "does NOT load"
            tell(f"workers of {host.name}", loads, ["plugin"] * loads, f"{host.name} {loads_or_not} our plugin")
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

Judgement = tuple[str, bool, str]  # state, guarded, sentence


def _d1_d2(verdict: Verdict | None, guarded: bool) -> tuple[Judgement, Judgement]:
    if verdict is None:
        none = (ABSENT, False, "FlashInfer is not installed here")
        return none, none
    if verdict.sites:
        moves = verdict.reason if guarded else verdict.reason.partition(",")[0] + ", NOT guarded here"
        starts = "every buffer that a site gets starts zeroed" if guarded else "as D1: NOT guarded here"
        return (APPLIES, guarded, moves), (APPLIES, guarded, starts)
    if verdict.state == "unsupported":
        return (APPLIES, False, verdict.reason), (APPLIES, False, "as D1: nothing is guarded")
    left = "its workspaces do not start zeroed; whether that alone does harm is not known, and nothing is done about it"
    return (ABSENT, False, verdict.reason), (UNKNOWN, False, left)


def _d3(environment: dict[str, Any], verdict: Verdict | None, guarded: bool, gate: tuple[str, ...]) -> Judgement:
    source = _source_of(GEMM_BASE) if verdict is not None else None
    if not any(row.function in (source or "") for row in GATES):
        return ABSENT, False, "no FlashInfer that auto-tunes cuDNN's runners is installed here"
    cudnn, sm12x, fixed = environment["cudnn"], _has_gpu(environment, "12"), ".".join(map(str, CUDNN_FIXED))
    if sm12x is False:
        return ABSENT, False, "only SM12x GPUs have it (RTX PRO 6000, RTX 50xx, GB10)"
    if cudnn is not None and tuple(int(part) for part in cudnn.split(".")[:3]) >= CUDNN_FIXED:
        return ABSENT, False, f"cuDNN {cudnn} is not older than {fixed}"
    if sm12x is None or cudnn is None:
        missing = "no GPU" if sm12x is None else "no cuDNN"
        return UNKNOWN, False, f"SM12x GPUs have it with cuDNN before {fixed}, and {missing} was found here"
    if guarded and set(gate) == {row.name for row in GATES}:
        return APPLIES, True, f"cuDNN {cudnn} on SM12x: the gate keeps it out of the fp8 and bf16 auto-tuning"
    return APPLIES, False, f"cuDNN {cudnn} on SM12x: NOT kept out of the fp8 and bf16 auto-tuning here"


def _d4(environment: dict[str, Any], guarded: bool) -> Judgement:
    if environment["vllm"] is None:
        return ABSENT, False, "vLLM is not installed here"
    vllm, source = f"vLLM {environment['vllm']}", _source_of(CUTLASS_MLA)
    method = ".".join(SM100_WORKSPACE[1:3])
    functions = detection.source_functions(CUTLASS_MLA, source) if source else ()
    if not any(function.name == method and "resize_" in function.code.co_names for function in functions):
        return ABSENT, False, f"{vllm} has no {SM100_WORKSPACE[1]} that moves"
    sm100 = _has_gpu(environment, "10")
    if sm100 is None:
        return UNKNOWN, False, f"{vllm} has it on SM100 GPUs, and no GPU was found here"
    if not sm100:
        return ABSENT, False, f"{vllm} has it on SM100 GPUs only (B200, GB200)"
    return APPLIES, guarded, f"{vllm} moves it with CUTLASS MLA on SM100, {'' if guarded else 'NOT '}guarded here"


# --- findings ---------------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """One thing to know, and what to do about it. ``problem``: it leaves processes unguarded."""

    name: str
    problem: bool
    sentence: str
    advice: str


def _unguarded(activation: Activation, config: settings.Settings) -> Iterator[Finding]:
    """Say why a guard that could be in force is not."""
    if config.mode != "on":
        sentence = f"{settings.PREFIX}={os.environ[settings.PREFIX]} is set: nothing is guarded."
        yield Finding("switched off", True, sentence, f"Unset {settings.PREFIX}.")
    if util.find_spec("wrapt") is None:
        yield Finding("wrapt missing", True, "wrapt is not installed: nothing can be guarded.", "`pip install wrapt`.")
    elif activation.real and activation.real.state not in ("guarded", "observing", "disabled"):
        advice = "Upgrade to FlashInfer 0.7.0 or newer, or report it with this output."
        yield Finding("guard failed", True, f"{activation.real.reason}.", advice)
    elif activation.untried:
        advice = "Make `import flashinfer` work here, or run the doctor where the server runs."
        yield Finding("not tried", False, f"{activation.untried}: that it gets guarded is not verified.", advice)
    if activation.everywhere:
        return
    if activation.fresh and not activation.fresh["installed"]:
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


def _of_defects(judged: dict[str, Judgement], verdict: Verdict | None, config: settings.Settings) -> Iterator[Finding]:
    """Advise on what no activation would guard."""
    if verdict is not None and verdict.state == "unsupported":
        advice = "Upgrade to FlashInfer 0.7.0 or newer, or report it with this output."
        yield Finding("unsupported FlashInfer", True, f"{verdict.reason}.", advice)
    elif judged["D3"][:2] == (APPLIES, False):
        left_in = [row.name for row in GATES if row.name not in config.gate]
        upgrade = f"upgrade the cuDNN backend to {'.'.join(map(str, CUDNN_FIXED))} or newer"
        if verdict is not None and not verdict.sites:
            sentence = "D3 applies, and flashinfer-wsfix has no gate for this FlashInfer."
            advice = f"Either {upgrade}, or start vLLM with VLLM_DISABLED_KERNELS=FlashInferFP8ScaledMMLinearKernel."
            yield Finding("old cuDNN", True, sentence, advice)
        elif left_in:
            sentence = f"D3 applies, and {settings.PREFIX}_GATE leaves cuDNN in for {' and '.join(left_in)}."
            yield Finding("gate off", True, sentence, f"Unset {settings.PREFIX}_GATE, or {upgrade}.")
    if judged["D4"][0] == APPLIES and not config.vllm:
        sentence = f"D4 applies, and {settings.PREFIX}_VLLM is off."
        yield Finding("vLLM left alone", True, sentence, f"Unset {settings.PREFIX}_VLLM.")


def _start_up(activation: Activation, affected: bool) -> Iterator[Finding]:
    """Look at start-up files and at sitecustomize modules, as a fresh interpreter saw them."""
    if not activation.fresh:
        return
    unguarded = affected and not activation.everywhere
    for file in filter(Path.is_file, (Path(folder, START_UP_FILE) for folder in activation.fresh["folders"])):
        if not activation.fresh["importable"]:
            sentence = f"{file} is left over: it does nothing, since {NAME} cannot be imported there."
            advice = f"{INSTALL} if it is needed here, else `rm {file}`."
            yield Finding("orphaned start-up file", unguarded, sentence, advice)
        elif not activation.everywhere:
            yield Finding("idle start-up file", unguarded, f"{file} does not activate anything.", f"Run {ENABLE}.")
    found = [file for folder in activation.fresh["path"] for file in _sitecustomize(Path(folder))]
    if not found or str(found[0].parent) == bootstrap_folder():  # ours runs the one that it shadows
        return
    for file in found[1:]:
        if _mentions_us(file) and not _mentions_us(found[0]):
            sentence = f"{found[0]} shadows {file}, which would activate flashinfer-wsfix."
            advice = f"Start with `flashinfer-wsfix run` last, right before the program. Or run {ENABLE}."
            yield Finding("shadowed sitecustomize", unguarded, sentence, advice)
        else:
            sentence = f"{found[0]} shadows {file}, which does not run."
            advice = "Nothing to do for flashinfer-wsfix; ask whoever needs the second."
            yield Finding("shadowed sitecustomize", False, sentence, advice)


def _sitecustomize(folder: Path) -> Iterator[Path]:
    for file in (folder / "sitecustomize" / "__init__.py", folder / "sitecustomize.py"):
        if file.is_file():
            yield file
            return


def _mentions_us(file: Path) -> bool:
    return NAME in file.read_text(encoding="utf-8", errors="replace")


def _removal(judged: dict[str, Judgement], verdict: Verdict | None, activation: Activation) -> Iterator[Finding]:
    """Say when the package can go, or has something to do only where a GPU is."""
    if verdict is None or verdict.state not in ("not-needed", "not-affected"):
        return
    if judged["D4"][0] == ABSENT and activation.everywhere:
        sentence = "flashinfer-wsfix is active here and no longer needed."
        yield Finding(
            "not needed", False, sentence, "`flashinfer-wsfix disable`, then `pip uninstall flashinfer-wsfix`."
        )
    elif judged["D4"][0] == UNKNOWN and not activation.covers("vllm"):
        sentence = "If this environment serves with CUTLASS MLA on SM100 GPUs, D4 is NOT guarded."
        yield Finding("D4 unguarded", False, sentence, f"In that case run {ENABLE}.")


def _settings(complaints: list[str], environment: dict[str, Any]) -> Iterator[Finding]:
    for complaint in complaints:
        yield Finding("setting", False, f"{complaint}.", "Correct it or unset it.")
    if environment["vllm"] is None or _version("ray") is None:
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


def _cached_runners() -> Iterator[Finding]:
    for file in _auto_tune_caches():
        entries = jsonlib.loads(file.read_text(encoding="utf-8")).values()
        chosen = sum(isinstance(entry, list) and entry[0] in GATED_RUNNERS for entry in entries)
        if chosen:
            sentence = f"{file} chooses cuDNN's fp8 or bf16 runner {chosen} times."
            advice = "Nothing to do once guarded: the gate passes over them."
            yield Finding("auto-tune cache", False, sentence, advice)


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

    def find(what: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
        none: list[Finding] = []
        return probe(what, lambda: list(look()), none)

    config, complaints = settings.read()
    environment = probe("the environment", _environment, dict.fromkeys(ENVIRONMENT) | {"gpus": []})
    unread: Verdict | None = Verdict("unsupported", "FlashInfer's source cannot be read, so what it does is not known")
    verdict = probe("FlashInfer's source", detection.judge_installed, unread)
    if verdict is not None:
        environment["flashinfer"] = environment["flashinfer"] or "of unknown version"
    moving = verdict is not None and bool(verdict.sites)
    activation = probe("activation", lambda: _activation(moving), Activation([], False, {}, {}, None, ""))
    able = config.mode == "on" and util.find_spec("wrapt") is not None
    able = able and (activation.real is None or activation.real.state == "guarded")
    d1, d2 = _d1_d2(verdict, able and activation.covers())
    unknown = (UNKNOWN, False, "it could not be looked at")
    judged = {
        "D1": d1,
        "D2": d2,
        "D3": probe("D3", lambda: _d3(environment, verdict, d1[1], config.gate), unknown),
        "D4": probe("D4", lambda: _d4(environment, able and config.vllm and activation.covers("vllm")), unknown),
    }
    affected = any(state == APPLIES for state, _, _ in judged.values())
    findings = find("advice", lambda: _of_defects(judged, verdict, config))
    if moving or (judged["D4"][0] == APPLIES and config.vllm):
        findings += find("activation", lambda: _unguarded(activation, config))
    findings += find("start-up files", lambda: _start_up(activation, affected))
    findings += find("removal", lambda: _removal(judged, verdict, activation))
    findings += find("settings", lambda: _settings(complaints, environment))
    if judged["D3"][0] == APPLIES:
        findings += find("auto-tune caches", _cached_runners)
    return {
        "sentence": _overall(verdict, judged, activation),
        "problem": any(state == APPLIES and not guarded for state, guarded, _ in judged.values()),
        "environment": environment,
        "defects": [
            {"name": row.name, "what": row.what, "state": state, "guarded": guarded, "sentence": sentence}
            for row, (state, guarded, sentence) in ((row, judged[row.name]) for row in DEFECTS)
        ],
        "activation": activation.rows,
        "findings": [finding._asdict() for finding in (*findings, *failed)],
        "not_this_bug": list(NOT_THIS_BUG),
    }


def _overall(verdict: Verdict | None, judged: dict[str, Judgement], activation: Activation) -> str:
    names = [name for name, (state, _, _) in judged.items() if state == APPLIES]
    exposed = [name for name in names if not judged[name][1]]
    if names:
        affected = f"This machine is affected ({', '.join(names)})"
        if exposed:
            return f"{affected} and NOT guarded{'' if exposed == names else ' against ' + ', '.join(exposed)}."
        if activation.untried:
            return f"{affected} and set up to be guarded, which could not be tried: FlashInfer's import fails here."
        return f"{affected} and guarded{'' if activation.everywhere else ', by the plugin'}."
    unsure = [name for name in ("D3", "D4") if judged[name][0] == UNKNOWN]
    if unsure:
        return f"No defect is known to apply here; whether {' or '.join(unsure)} does could not be told."
    if verdict is None:
        return "FlashInfer is not installed here: nothing is to be guarded, and a crash here has another cause."
    return "This machine is not affected: flashinfer-wsfix can be removed here, and a crash here has another cause."


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Lay the report out for people, in less than 80 columns."""

    def wrap(first: str, text: str) -> list[str]:
        rest = " " * len(first)
        # A command stays whole, to be copied: its blanks are no blanks while the text is wrapped.
        whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\0"), text)
        lines = textwrap.wrap(
            whole, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
        )
        return [line.replace("\0", " ") for line in lines]

    yield from wrap("", found["sentence"])
    yield from ("", "Environment")
    for key, name in ENVIRONMENT.items():
        yield from wrap(f"  {name:<18}", found["environment"][key] or "none found")
    for gpu in found["environment"]["gpus"] or [None]:
        text = "{name}, compute capability {capability}, driver {driver}".format(**gpu) if gpu else "none found"
        yield from wrap(f"  {'GPU':<18}", text)
    yield from ("", "Defects")
    for defect in found["defects"]:
        state = f"{defect['state']}{', guarded' if defect['guarded'] else ''}"
        yield from wrap(f"  {defect['name']}  ", f"{state}: {defect['what']}")
        yield from wrap("      - ", f"{defect['sentence']}.")
    yield from ("", "Activation")
    for row in found["activation"]:
        yield from wrap("  - ", f"{row['where']}: {row['sentence']}.")
    yield from ("", "Findings, and what to do")
    for finding in found["findings"]:
        yield from wrap("  ! " if finding["problem"] else "  - ", finding["sentence"])
        yield from wrap("    -> ", finding["advice"])
    if not found["findings"]:
        yield "  - none"
    yield from ("", "It is not this bug if")
    for sentence in found["not_this_bug"]:
        yield from wrap("  - ", sentence)


def main(json: bool = False) -> int:
    """Print the report; return 0 where all is well or there is nothing to do, and 1 where there is a problem."""
    found = collect()
    print(jsonlib.dumps(found, indent=2) if json else "\n".join(_lines(found)))
    return 1 if found["problem"] else 0
