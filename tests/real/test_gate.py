"""D3: on SM12x cuDNN leaves the auto-tuned fp8 and bf16 lists, through FlashInfer's real dispatch and tuner."""

import contextlib
import json
import logging
from unittest import mock

import pytest
import torch
from flashinfer_wsfix import guards
from flashinfer_wsfix.sites import CUDNN_FIXED

import fakes
import gemms

SM12X, OTHERS = [(12, 0), (12, 1)], [(10, 0), (10, 3), (9, 0), (8, 9)]
GEMMS = {"fp8": gemms.bmm_fp8, "bf16": gemms.mm_bf16}
RUNNER = {"fp8": "CudnnFp8GemmRunner", "bf16": "CudnnBf16GemmRunner"}
TINYGEMM_ALONE = ("0.6.12", "0.6.13", "0.6.14")  # is what these have for bf16 on SM12x besides cuDNN, which so stays

pytestmark = [pytest.mark.affected, pytest.mark.usefixtures("guard")]


@pytest.fixture(autouse=True)
def unfixed(monkeypatch):
    """No cuDNN is fixed, so that bf16's gate acts where upstream's own, for fp8, does not."""
    monkeypatch.setattr(guards, "CUDNN_FIXED", (9, 99, 0))


@pytest.fixture(params=GEMMS)
def kind(request):
    """The gate's name of a data type."""
    return request.param


@pytest.fixture
def acting(release):
    """The gates that have another runner to leave on SM12x."""
    return tuple(name for name in GEMMS if name == "fp8" or release not in TINYGEMM_ALONE)


@pytest.fixture
def acts(kind, acting):
    if kind not in acting:
        pytest.skip("in this release bf16 has tinygemm alone besides cuDNN")


@pytest.fixture
def graph(cudnn, gemm_base, monkeypatch):
    """The one graph of cuDNN, twice as fast as any other kernel: it wins wherever it may compete."""
    monkeypatch.setattr(gemm_base, "DEFAULT_WORKSPACE_SIZE", 1 << 20)  # the tuner fills its copies with random numbers
    graph = fakes.Graph(1 << 20, cost=0.5, look=False)
    cudnn.make_graph = lambda: graph
    return graph


@pytest.fixture
def on():
    """Make the device one of a capability, with FlashInfer's other kernels stubbed; what is returned records them."""
    with contextlib.ExitStack() as undo:

        def become(capability):
            undo.enter_context(fakes.capability(*capability))
            return undo.enter_context(fakes.stub_runners())

        yield become


@pytest.fixture
def offered(gemm_base):
    """The class names of the runners that the real tuner chose from, one list for each call."""
    lists, choose_one = [], gemm_base.AutoTuner.choose_one

    def spy(self, custom_op, runners, *args, **kwargs):
        lists.append([type(runner).__name__ for runner in runners])
        return choose_one(self, custom_op, runners, *args, **kwargs)

    with mock.patch.object(gemm_base.AutoTuner, "choose_one", spy):
        yield lists


def switch(guard, monkeypatch, value):
    """Set FLASHINFER_WSFIX_GATE and activate anew: settings are read then."""
    guard.deactivate()
    monkeypatch.setenv("FLASHINFER_WSFIX_GATE", value)
    guard.activate()


def cache_won_by_cudnn(guard, flashinfer, gemm, graph, path):
    """Let FlashInfer tune without us and write its cache file; return the names of the winners in it."""
    guard.deactivate()
    with flashinfer.autotune(True, cache=str(path)):
        gemm(flashinfer)
    guard.activate()
    flashinfer.autotuner.AutoTuner.get().clear_cache()
    graph.executions.clear()
    return [value[0] for key, value in json.loads(path.read_text()).items() if not key.startswith("_")]


@pytest.mark.usefixtures("acts")
@pytest.mark.parametrize("tune", [False, True], ids=["untuned", "tuning"])
@pytest.mark.parametrize("capability", SM12X)
def test_on_sm12x_cudnn_is_left_out_and_the_order_kept(
    capability, kind, tune, guard, flashinfer, gemm_base, graph, on, offered
):
    """The others stay, in FlashInfer's own order; in tuning mode cuDNN is not even measured."""
    gemm = GEMMS[kind]
    kernels = on(capability)
    guard.deactivate()
    gemm(flashinfer)
    guard.activate()
    graph.executions.clear()
    kernels.launches.clear()
    with flashinfer.autotune(tune):
        gemm(flashinfer)
    stock, gated = offered
    assert RUNNER[kind] in stock
    assert gated == [name for name in stock if name != RUNNER[kind]] != []
    assert graph.executions == [] and kernels.launches
    assert all(key[1] != RUNNER[kind] for key in map(_fields, gemm_base.AutoTuner.get().profiling_cache))


def _fields(key):
    """A key of the tuner, a tuple up to 0.6.14 and a record later."""
    return key if isinstance(key, tuple) else (key.custom_op, key.runner_class_name)


@pytest.mark.parametrize("capability", OTHERS)
def test_other_architectures_are_untouched(capability, kind, guard, flashinfer, gemm_base, graph, on, offered):
    """fp8 starts with SM89."""
    on(capability)
    GEMMS[kind](flashinfer)
    guard.deactivate()
    GEMMS[kind](flashinfer)
    assert offered[0] == offered[1] and RUNNER[kind] in offered[0]
    assert guard.status().gated_calls == 0


def test_an_explicit_cudnn_is_honoured(kind, guard, flashinfer, graph, on, offered):
    on((12, 0))
    GEMMS[kind](flashinfer, backend="cudnn")
    assert offered == [[RUNNER[kind]]] and len(graph.executions) == 1
    assert guard.status().gated_calls == 0


def test_a_list_of_cudnn_alone_is_never_emptied(guard, flashinfer, graph, on, offered):
    """On SM12x bmm_bf16 has nothing else, so its workspace is presized there too."""
    from flashinfer_wsfix.sites import LANES

    on((12, 0))
    gemms.bmm_bf16(flashinfer)
    assert offered == [["CudnnBf16GemmRunner"]] and len(graph.executions) == 1
    assert LANES["bmm_bf16_workspace"] is None


@pytest.mark.parametrize("style", ["positional", "keyword"])
def test_direct_callers_are_covered_and_their_list_is_not_changed(style, flashinfer, gemm_base, graph, on, offered):
    """vLLM and others may call fp8_gemm_sm100 past bmm_fp8's heuristic, which upstream's own gate is in."""
    on((12, 0))
    a, b = torch.zeros(1, 1, 64).to(torch.float8_e4m3fn), torch.zeros(1, 32, 64).to(torch.float8_e4m3fn).mT
    arguments = {
        "a": a, "b": b, "scale_a": torch.ones(1), "scale_b": torch.ones(1),
        "out": torch.empty(1, 1, 32, dtype=torch.bfloat16), "workspace_buffer": torch.zeros(1 << 20, dtype=torch.uint8),
        "runner_names": ["cudnn", "cublas", "cutlass_sm12x"],
    }  # fmt: skip
    if style == "keyword":
        gemm_base.fp8_gemm_sm100(**arguments)
    else:
        gemm_base.fp8_gemm_sm100(*arguments.values())
    assert [name for name in offered[0] if "Cudnn" in name] == [] and len(offered[0]) == 2
    assert arguments["runner_names"] == ["cudnn", "cublas", "cutlass_sm12x"]
    assert graph.executions == []


@pytest.mark.usefixtures("acts")
@pytest.mark.parametrize("tune", [False, True], ids=["loaded", "loaded-and-tuning"])
def test_a_persisted_cache_that_cudnn_won_does_not_bring_it_back(
    kind, tune, guard, flashinfer, gemm_base, graph, on, offered, tmp_path, monkeypatch
):
    """FlashInfer's own file, written by its own tuner. Without the gate the very same file runs cuDNN."""
    on((12, 0))
    path, copy = tmp_path / "tuned.json", tmp_path / "copy.json"
    assert set(cache_won_by_cudnn(guard, flashinfer, GEMMS[kind], graph, path)) == {RUNNER[kind]}
    copy.write_text(path.read_text())  # tuning adds to the file
    with flashinfer.autotune(tune, cache=str(path)):
        GEMMS[kind](flashinfer)
    assert graph.executions == [] and RUNNER[kind] not in offered[-1]

    gemm_base.AutoTuner.get().clear_cache()
    switch(guard, monkeypatch, "off")
    with flashinfer.autotune(False, cache=str(copy)):
        GEMMS[kind](flashinfer)
    assert len(graph.executions) == 1


def test_the_list_that_is_handed_on_keeps_its_order():
    """FlashInfer asks only what is in the list; whoever else reads it finds the order that the caller gave."""
    handed = []
    wrapper = guards.gate("fp8", 1, "a")
    with mock.patch("torch.cuda.get_device_capability", return_value=(12, 0)):
        for names in (["b", "cudnn", "a", "c"], ("cudnn", "z", "y"), ["cudnn"], [], None):
            wrapper(lambda a, names: handed.append(names), None, (torch.zeros(1), names), {})
    assert handed == [["b", "a", "c"], ["z", "y"], ["cudnn"], [], None]


def test_the_list_may_come_by_keyword_and_what_comes_after_it_is_passed_on():
    handed = []
    wrapper = guards.gate("fp8", 1, "a")
    a, names = torch.zeros(1), ["cudnn", "b"]
    with mock.patch("torch.cuda.get_device_capability", return_value=(12, 0)):
        for args, kwargs in (((a, names, 1, 2), {"last": 3}), ((a,), {"runner_names": names, "last": 3})):
            wrapper(lambda *args, **kwargs: handed.append((args, kwargs)), None, args, kwargs)
    assert handed == [((a, ["b"], 1, 2), {"last": 3}), ((a,), {"runner_names": ["b"], "last": 3})]


def test_the_device_of_a_decides(kind, guard, gemm_base):
    function = {"fp8": gemm_base.fp8_gemm_sm100, "bf16": gemm_base.bf16_gemm_sm100}[kind]
    tensors, names, handed = [torch.zeros(1), torch.zeros(1, device="meta")], ["cudnn", "b"], []
    with mock.patch("torch.cuda.get_device_capability", lambda device: (12 if device.type == "cpu" else 9, 0)):
        for a, b in (tensors, tensors[::-1]):
            kwargs = {"a": a, "b": b, "runner_names": names}
            function._self_wrapper(lambda a, b, runner_names: handed.append(runner_names), None, (), kwargs)
    assert handed == [["b"], names]


def test_it_is_said_once_for_each_data_type_and_counted(acting, guard, flashinfer, graph, on, caplog):
    on((12, 0))
    for _ in range(3):
        for gemm in GEMMS.values():
            gemm(flashinfer)
    said = [record for record in caplog.records if "gate: cuDNN is left out" in record.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO] * len(acting)
    assert ["FlashInfer's fp8" in record.getMessage() for record in said] == [True, False][: len(acting)]
    assert "FLASHINFER_WSFIX_GATE=off" in said[0].getMessage()
    status = guard.status()
    assert (status.gates, status.gated_calls) == (("fp8", "bf16"), 3 * len(acting))


@pytest.mark.parametrize(
    ("value", "gates"),
    [
        ("fp8", ("fp8",)),
        ("bf16", ("bf16",)),
        ("bf16, FP8", ("fp8", "bf16")),
        ("off", ()),
        ("0", ()),
        ("", ("fp8", "bf16")),
        ("nonsense", ("fp8", "bf16")),
        ("fp8,fp4", ("fp8", "bf16")),
    ],
)
def test_setting(value, gates, acting, guard, flashinfer, graph, on, offered, monkeypatch, caplog):
    """What makes no sense is named in one warning, and the default used."""
    on((12, 0))
    switch(guard, monkeypatch, value)
    for gemm in GEMMS.values():
        gemm(flashinfer)
    closed = tuple(kind for kind, names in zip(GEMMS, offered, strict=True) if RUNNER[kind] not in names)
    assert closed == tuple(name for name in gates if name in acting)
    assert (guard.status().gates, guard.status().gated_calls) == (gates, len(closed))
    complaints = [record for record in caplog.records if "makes no sense" in record.getMessage()]
    assert len(complaints) == (value in ("nonsense", "fp8,fp4"))


def test_deactivate_opens_the_gate(kind, guard, flashinfer, graph, on, offered):
    on((12, 0))
    guard.deactivate()
    GEMMS[kind](flashinfer)
    assert RUNNER[kind] in offered[0]


@pytest.mark.parametrize("backend", [92000, 92301, None], ids=["cudnn-9.20", "cudnn-9.23.1", "unknown"])
def test_both_gates_together(backend, kind, acting, release, guard, flashinfer, graph, cudnn, on, offered, monkeypatch):
    """From 0.6.18 on upstream leaves cuDNN out of bmm_fp8 before 9.23.1; ours for bf16 before it, for fp8 always."""
    monkeypatch.setattr(guards, "CUDNN_FIXED", CUDNN_FIXED)
    on((12, 0))
    cudnn.backend = backend or 92301
    upstream = kind == "fp8" and backend == 92000 and release.startswith("0.6.18")
    GEMMS[kind](flashinfer)  # FlashInfer asks for the version too, and keeps the answer
    offered.clear()
    gated = guard.status().gated_calls
    if backend is None:
        monkeypatch.setattr(type(cudnn), "backend_version", lambda self: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        GEMMS[kind](flashinfer)
    ours = not upstream and kind in acting and (kind == "fp8" or backend != 92301)
    if offered:
        assert (RUNNER[kind] not in offered[0]) == (upstream or ours)
        assert guard.status().gated_calls - gated == ours
    cudnn.backend = backend or 92301
    monkeypatch.undo()
    guard.deactivate()
    GEMMS[kind](flashinfer)
    assert (RUNNER[kind] not in offered[-1]) == upstream


def test_tinygemm_alone_is_not_left(guard, flashinfer, graph, on, offered):
    """With a bias, FlashInfer may have nothing else on SM12x: it takes few rows, and K a multiple of 8."""
    on((12, 0))
    a, b = (torch.zeros(size, 64, dtype=torch.bfloat16) for size in (512, 32))
    flashinfer.mm_bf16(a, b.t(), bias=torch.zeros(32, dtype=torch.bfloat16), backend="auto")
    assert "CudnnBf16GemmRunner" in offered[0] and len(graph.executions) == 1
    assert guard.status().gated_calls == 0
    handed = []
    wrapper = guards.gate("bf16", 1, "a")
    for names in (["cudnn", "tinygemm"], ["cudnn", "tinygemm", "cublaslt"]):
        wrapper(lambda a, names: handed.append(names), None, (a, names), {})
    assert handed == [["cudnn", "tinygemm"], ["tinygemm", "cublaslt"]]


@pytest.mark.parametrize("broken", [RuntimeError("no device"), AssertionError("no CUDA")])
def test_a_device_that_does_not_answer_is_not_ours_to_judge(broken, kind, guard, flashinfer, graph, on, offered):
    on((12, 0))
    unanswered = mock.patch("torch.cuda.get_device_capability", side_effect=broken)
    with unanswered, contextlib.suppress(type(broken)):
        GEMMS[kind](flashinfer)
    assert guard.status().gated_calls == 0
