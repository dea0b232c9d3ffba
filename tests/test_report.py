"""What people see: `status()`, and log lines that come once, on the right logger, at the right level."""

import importlib
import io
import json
import logging
import os
import sys
import types

import pytest

import fresh
from activated import LATE, UTILS, lines


def test_what_is_loaded_late_is_listed_as_well():
    import flashinfer_wsfix

    assert set(flashinfer_wsfix.__all__) <= set(dir(flashinfer_wsfix))


def start():
    """FlashInfer, guarded."""
    fresh.flashinfer("0.6.14")
    package = importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    return package


@fresh.process
def test_status_is_frozen_and_plain():
    package = start()
    status = package.status()
    with pytest.raises(AttributeError):
        status.pid = 0
    record = json.loads(json.dumps(status.as_dict()))
    assert record["targets"][0]["sites"] == list(status.targets[0].sites) and record["pid"] == os.getpid()
    assert (status.version, status.pid, status.routes) == (package.__version__, os.getpid(), ("import",))
    flashinfer, vllm = status.targets
    assert (flashinfer.name, flashinfer.version, flashinfer.state) == ("flashinfer", "0.6.14", "guarded")
    assert (vllm.name, vllm.version, vllm.state, vllm.sites) == ("vllm", None, "pending", ())
    assert status.gates == ("fp8", "bf16")
    worker = importlib.import_module("flashinfer_wsfix.report").WorkerStatus()
    assert worker.flashinfer_wsfix_status() == status.as_dict()
    assert (status.growths, status.capture_overflows, status.gated_calls, status.displaced_buffers) == (0, 0, 0, 0)


@fresh.process
def test_status_counts():
    """A lane's generations, sizes and address, and each counter, as they are."""
    package = start()
    import torch

    import arguments
    import fakes

    device = torch.device("cpu")
    cache = sys.modules[UTILS]._get_cache_buf
    with fakes.install(sys.modules["flashinfer"]):
        own, graph = (cache("bmm_fp8_workspace", 1 << 20, device), fakes.Graph((32 << 20) + 256))
        arguments.call(arguments.SITES[4], graph, own)
        graph.workspace_bytes = (40 << 20) + 1
        arguments.call(arguments.SITES[4], graph, own)
        graph.workspace_bytes = 500 << 20
        with fakes.capturing():
            arguments.call(arguments.SITES[4], graph, own)
        graph.workspace_bytes = 0
        arguments.call(arguments.SITES[4], graph, own)
        cache("bmm_fp8_workspace", 2 << 20, device)
        status = package.status()
    (lane,) = status.lanes
    assert (lane.name, lane.device, lane.generation) == ("bmm_fp8_workspace", "cpu", 2)
    assert (lane.nbytes, lane.retired_nbytes, lane.high_water) == (80 << 20, 40 << 20, 500 << 20)
    assert lane.address == graph.last.data_ptr
    assert (status.growths, status.capture_overflows, status.displaced_buffers) == (1, 1, 1)


@fresh.process
def test_status_before_anything_is_pending():
    package = importlib.import_module("flashinfer_wsfix")
    assert [target.state for target in package.status().targets] == ["pending", "pending"]


@fresh.process
def test_status_answers_while_flashinfer_is_half_imported():
    package = start()
    for incomplete in (types.ModuleType(UTILS), None):
        sys.modules[UTILS] = incomplete
        assert package.status().lanes == ()


@fresh.process
def test_looking_does_not_activate():
    """The class for --worker-extension-cls tells the state of a process that it did not change."""
    fresh.flashinfer("0.6.14")
    worker = importlib.import_module("flashinfer_wsfix.report").WorkerStatus()
    importlib.import_module("flashinfer")
    found = worker.flashinfer_wsfix_status()
    assert (found["routes"], found["targets"][0]["state"]) == ((), "disabled")
    assert not any(type(finder).__module__.startswith("flashinfer_wsfix") for finder in sys.meta_path)


@fresh.process
def test_the_route_that_is_said_is_the_one_that_activated():
    """Also where FlashInfer came first, as in SGLang's scheduler: the plugin's import is no route of its own."""
    fresh.flashinfer("0.6.14")
    importlib.import_module("flashinfer")
    said = fresh.listen()
    importlib.import_module("flashinfer_wsfix.startup").sglang_plugin()
    assert "(activated by SGLang plugin)" in said.getvalue() and said.getvalue().count("\n") == 1
    assert importlib.import_module("flashinfer_wsfix").status().routes == ("SGLang plugin",)


@fresh.process
def test_that_it_is_off_is_said_once_for_both_hosts():
    os.environ["FLASHINFER_WSFIX"] = "0"
    said = fresh.listen()
    package = start()
    patching = importlib.import_module("flashinfer_wsfix.patching")
    patching.refresh("vllm")
    assert [target.state for target in package.status().targets] == ["disabled", "disabled"]
    assert said.getvalue().count("nothing is guarded") == 1


@fresh.process
def test_a_verdict_is_said_once():
    said = fresh.listen()
    package = start()
    for _ in range(3):
        package.activate()
        importlib.reload(sys.modules[UTILS])
    assert len(lines(said)) == 1
    assert package.status().targets[0].reason in lines(said)[0]


@pytest.mark.parametrize("release", ["0.6.11.post3", "0.7.4"])
@fresh.process
def test_where_nothing_is_to_do_the_log_says_once_that_it_can_go(release):
    fresh.flashinfer(release)
    said = fresh.listen()
    package = importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    package.activate()
    assert len(lines(said)) == 1
    assert lines(said)[0].startswith("INFO ") and "can be removed" in lines(said)[0]


@fresh.process
def test_an_applications_own_logging_is_used():
    """Where the root logger has a handler, a record arrives there and nothing is printed."""
    said = fresh.listen()
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record)

    logging.getLogger().addHandler(Keep())
    start()
    assert not said.getvalue()
    assert [(record.name, record.levelname) for record in records] == [("flashinfer_wsfix", "INFO")]


@fresh.process
def test_an_applications_filter_on_our_logger_is_respected():
    said = fresh.listen()
    logging.getLogger("flashinfer_wsfix").addFilter(lambda record: False)
    start()
    assert not said.getvalue()


@fresh.process
def test_an_applications_handler_on_our_logger_is_enough():
    said, records = fresh.listen(), io.StringIO()
    logging.getLogger("flashinfer_wsfix").addHandler(logging.StreamHandler(records))
    start()
    assert "guarded: all" in records.getvalue() and not said.getvalue()


@fresh.process
def test_that_vllm_is_left_alone_says_nothing_of_removal():
    fresh.flashinfer("0.7.4")
    os.environ["FLASHINFER_WSFIX_VLLM"] = "0"
    said = fresh.listen()
    importlib.import_module("flashinfer_wsfix")
    importlib.import_module("flashinfer")
    importlib.import_module("flashinfer_wsfix.patching").refresh("vllm")
    assert said.getvalue().count("can be removed") == 1
    assert "vLLM is left alone." in said.getvalue()


@fresh.process
def test_a_level_that_the_application_set_is_respected():
    said = fresh.listen()
    logging.getLogger("flashinfer_wsfix").setLevel(logging.ERROR)
    start()
    assert not said.getvalue()


@pytest.mark.parametrize(("level", "said_by_us"), [("INFO", 1), ("debug", 1), ("WARNING", 0), ("ERROR", 0)])
@fresh.process
def test_the_level_of_the_variable(level, said_by_us):
    os.environ["FLASHINFER_WSFIX_LOG"] = level
    said = fresh.listen()
    start()
    assert len(lines(said)) == said_by_us


@fresh.process
def test_vllms_logger_is_used_where_it_has_a_handler():
    """Only what is below vLLM's logger is shown there; ours would be lost."""
    said = fresh.listen()
    records = []

    class Keep(logging.Handler):
        def emit(self, record):
            records.append(record.name)

    vllm = logging.getLogger("vllm")
    vllm.addHandler(Keep())
    vllm.setLevel(logging.INFO)
    vllm.propagate = False
    start()
    assert records == ["vllm.flashinfer_wsfix"]
    assert not said.getvalue()


@fresh.process
def test_a_handler_that_raises_breaks_nothing():
    class Broken(logging.Handler):
        def emit(self, record):
            raise RuntimeError("disk full")

    logging.getLogger().addHandler(Broken())
    package = start()
    importlib.import_module(LATE)
    assert len(package.status().targets[0].sites) == 10
