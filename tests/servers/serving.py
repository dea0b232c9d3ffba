"""A real vLLM server on the CPU, of a tiny model, in an environment of its own that has the package or has it not.

Asked over HTTP, on the loopback device alone. Its processes are the only ones of their session, and end with it.
"""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from startup.environments import ROOT, Environment, environment, run

HERE = Path(__file__).parent
START = 600  # seconds until it must be healthy: 25 on two quiet cores
ANSWER = 120  # seconds for one answer
SERVE = ("-m", "vllm.entrypoints.cli.main", "serve")
OPTIONS = ("--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256")
# No network, no cache of the user's, little memory, and the endpoint that asks the workers.
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


def build_wheel(folder: Path) -> Path:
    """Build the package from a copy of what is in the repository, so that building leaves nothing there."""
    ignore = shutil.ignore_patterns(".*", "__pycache__", "tests", "benchmarks", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, folder / "source", ignore=ignore)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--disable-pip-version-check", "-w", folder]
    ran = run([*pip, folder / "source"])
    assert ran.returncode == 0, ran.stderr
    (built,) = folder.glob("*.whl")
    return built


def make_environment(folder: Path, *wheels: Path) -> Environment:
    """An environment on top of the one that runs this, with vLLM by its name and our worker extension."""
    made = Environment(folder).see_host()
    (made.site / "extension.pth").write_text(f"{HERE}\n")  # on the path of every child, and last
    # vLLM asks for the version of "vllm", and takes the "cpu" in it for its platform.
    release = metadata.version("vllm-cpu")
    info = made.site / f"vllm-{release}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")
    for each in wheels:
        made.install(each)
    return made


class Server:
    """A server that is up, and how to ask it."""

    def __init__(self, process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
        self.port = port
        self._process, self._log = process, log

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def ask(self, path: str, seconds: float = ANSWER, **body: object) -> Any:
        """POST where there is a body, else GET; return the answer. Raises OSError where there is none, or not 200."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        request.add_header("Content-Type", "application/json")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=seconds) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def workers(self, method: str, *arguments: object) -> list[Any]:
        """What each worker answers to a method of its extension."""
        return list(self.ask("/collective_rpc", method=method, args=list(arguments))["results"])

    def complete(self, prompt: str, tokens: int) -> bool:
        """Say whether a completion of so many tokens is served."""
        try:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            return bool(self.ask("/v1/completions", **body)["usage"]["completion_tokens"] == tokens)
        except (OSError, http.client.HTTPException):
            return False

    def is_up(self) -> bool:
        try:
            self.ask("/health", 5)
            return True
        except OSError:
            return False

    def wait_for_end(self, seconds: float) -> int:
        """The exit code of a server that ends by itself. Raises TimeoutExpired."""
        return self._process.wait(seconds)


@contextmanager
def serve(
    where: Environment, model: Path, *options: str, before: Sequence[object] = (), **variables: str
) -> Iterator[Server]:
    """Start a server, wait until it is healthy, and end all its processes afterwards. ``before``: a launcher."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*before, where.python, *SERVE, model, "--host", "127.0.0.1", "--port", port, *OPTIONS, *options]
    log = where.folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd="/",
            env=settings(where, **variables),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log)
    try:
        deadline = time.monotonic() + START
        while not server.is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not come up ({process.poll()}):\n{server.log[-6000:]}")
            time.sleep(0.5)
        yield server
    finally:
        end(process)


def settings(where: Environment, **variables: str) -> dict[str, str]:
    """The environment variables of a server, and of a doctor that judges it."""
    folders = {name: str(where.folder / "cache") for name in ("XDG_CACHE_HOME", "HF_HOME", "VLLM_CACHE_ROOT")}
    return environment(**folders, **VARIABLES, VLLM_CONFIG_ROOT=str(where.folder / "config"), **variables)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End the processes of a session: first politely, as an operator does."""
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
