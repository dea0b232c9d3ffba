"""Whether new processes come up activated, and by what: tried in children, never in this process."""

import os
from typing import Any, NamedTuple

from ...detection import Verdict
from ..installed import source_of, version_of
from .children import FRESH, IMPORT, NAME, PLAIN, SPAWNED, NoAnswer, python


class Host(NamedTuple):
    """A server: its package, the group of its plugins, its module that loads them, and its allow-list; "" for none."""

    name: str
    package: str
    group: str
    loader: str
    variable: str


HOSTS = (
    Host("vLLM", "vllm", "vllm.general_plugins", "vllm.plugins", "VLLM_PLUGINS"),
    Host("SGLang", "sglang", "sglang.srt.plugins", "sglang.srt.plugins", "SGLANG_PLUGINS"),
    Host("TensorRT-LLM", "tensorrt_llm", "", "", ""),
)


class Activation(NamedTuple):
    """What was tried, and what it showed."""

    rows: list[dict[str, Any]]  # as in the report
    everywhere: bool  # every new interpreter is activated
    inherited: bool  # but only where it inherits this PYTHONPATH
    plugins: dict[str, bool]  # by package of an installed server: whether its workers are, by our plugin
    fresh: dict[str, Any]  # the answer to FRESH, empty where there was none
    real: Verdict | None  # on FlashInfer, after a child imported it
    untried: str  # why no child could import it

    def covers(self, package: str | None = None) -> bool:
        """Say whether the workers of the server ``package`` are activated; None: of all servers that are installed."""
        wanted = [package] if package else list(self.plugins)
        return self.everywhere or (bool(wanted) and all(self.plugins.get(name) for name in wanted))


NOTHING_TRIED = Activation([], False, False, {}, {}, None, "")


def allowed(host: Host) -> bool:
    """Say whether the host's allow-list lets our plugin in, read as the host reads it."""
    text = os.environ.get(host.variable)
    if host.package == "vllm":
        return text is None or NAME in text.split(",")  # not stripped, and an empty one lets none in
    return not text or NAME in map(str.strip, text.split(","))  # an empty one lets all in


def try_activation(moving: bool) -> Activation:
    """Start children and see which come up activated; where FlashInfer has sites, also import it in one."""
    rows: list[dict[str, Any]] = []

    def tell(where: str, active: bool | None, routes: list[str], sentence: str) -> None:
        rows.append({"where": where, "active": active, "routes": routes, "sentence": sentence})

    def start(where: str, code: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = python(code, environment=environment)
        except NoAnswer as why:
            tell(where, None, [], f"could not be tried: {why}")
            return {}
        active, routes = answer["active"], answer["routes"]
        tell(where, active, routes, f"active, by {', '.join(routes)}" if active else "NOT active")
        return answer

    fresh = start("a fresh interpreter", FRESH)
    start("a spawned process", SPAWNED)
    seen = [row["active"] for row in rows]
    everywhere = True in seen and False not in seen
    inherited = False
    if everywhere and "PYTHONPATH" in os.environ:
        bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        inherited = not start("an interpreter without this PYTHONPATH", PLAIN, bare).get("active")
    plugins = {}
    for host in HOSTS:
        has_loader = bool(host.loader) and source_of(host.loader) is not None
        if not has_loader and version_of(host.package) is None:
            continue
        loads = has_loader and host.group in fresh.get("declared", ()) and allowed(host)
        plugins[host.package] = loads
        if host.group:
            sentence = f"{host.name} would {'' if loads else 'NOT '}load our plugin"
            tell(f"workers of {host.name}", loads, ["plugin"] * loads, sentence)
        else:
            sentence = f"{host.name} loads no plugins: its workers are guarded by the start-up file alone"
            tell(f"workers of {host.name}", everywhere and not inherited, [], sentence)
    real, untried = None, ""
    if moving and (everywhere or any(plugins.values())):
        where = "a process that imports FlashInfer" if everywhere else "a worker that imports FlashInfer"
        try:
            group = next((host.group for host in HOSTS if plugins.get(host.package)), "")
            answer = python(IMPORT, group, seconds=120)
            real = Verdict(answer["state"], answer["reason"], tuple(answer["sites"]))
            tell(where, real.state == "guarded", [], real.reason)
        except NoAnswer as why:
            untried = f"FlashInfer could not be imported here ({why})"
            tell(where, None, [], untried)
    return Activation(rows, everywhere, inherited, plugins, fresh, real, untried)
