"""vLLM's half, against the real `SM100Workspace` and `kernel_warmup` of three releases, each in a fresh process.

Stubbed are the op that says how much is needed, and the device.
"""

import importlib.util
from pathlib import Path

import pytest

import fresh
import hosts
from hosts import VLLM_RELEASES
from test_hosts import EACH_VLLM, TESTS, inherited

PACKAGE = Path(importlib.util.find_spec("flashinfer_wsfix").origin).parents[1]
MLA = "vllm/v1/attention/backends/mla/cutlass_mla.py"
LATEST = VLLM_RELEASES[-1]

PRELUDE = """
import sys, torch, fakes, memory
MIB = 1 << 20
torch.set_deterministic_debug_mode("error")  # what is not zeroed is full of ones
fakes.install()
hm.vllm("{release}")
sys.path.insert(0, {folder!r})  # of another cutlass_mla.py than the release's
"""
WARMUP = "import vllm.model_executor.warmup.kernel_warmup as warmup\n"
BEFORE = "import flashinfer_wsfix\nmla = hm.cutlass_mla()\n"
AFTER = "mla = hm.cutlass_mla()\nimport flashinfer_wsfix\n"
# ask(n): have a workspace of n bytes, as forward_mqa does, and return the buffer that the kernel would get.
WORKSPACE = """
import logging
said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append((record.levelname, record.getMessage().partition(": ")[2]))
logging.getLogger("flashinfer_wsfix").addHandler(Keep())
workspace = mla.g_sm100_workspace
def make(nbytes):
    with hm.cuda_is():
        return mla.SM100Workspace(nbytes)
def ask(nbytes, workspace=workspace):
    workspace.ensure_size(hm.metadata(nbytes), 1)
    return workspace.get_buf()
def lanes():
    return {lane.name: lane for lane in flashinfer_wsfix.status().lanes}
def vllm_target():
    return flashinfer_wsfix.status().targets[1]
"""
GROWS = """
old = memory.Handed.of(workspace.get_buf())
size = old.nbytes
assert ask(size).data_ptr() == old.address
old.write(b"semaphor")
new = ask(size + 256)
assert type(new) is torch.Tensor and new is workspace.get_buf()
assert new.data_ptr() != old.address and new.numel() == 2 * size and not new.any()
assert old.is_alive() and old.read() == {b"semaphor"}
assert ask(2 * size) is new is ask(1), "what fits changes nothing"
lane = lanes()["SM100Workspace"]
assert (lane.generation, lane.nbytes, lane.retired_nbytes) == (2, 2 * size, size)
assert (lane.address, lane.high_water) == (new.data_ptr(), size + 256)
assert flashinfer_wsfix.status().growths == 1
"""


def run(code, **environment):
    """Run `code` in a fresh process that has torch already, with `host_modules` as `hm`; the completed process."""
    return fresh.script(f"import host_modules as hm\n{code}", TESTS, PACKAGE, **{**inherited(), **environment})


def passes(code, release=LATEST, order=BEFORE, folder="/nowhere", **environment):
    """Run `code`, which asserts, in a fresh interpreter that guards this release of vLLM; return what was logged."""
    ran = run(PRELUDE.format(release=release, folder=str(folder)) + order + WORKSPACE + code, **environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr  # vLLM's own handler writes to the one, ours to the other


# --- SM100Workspace ---------------------------------------------------------------------------------------------------


@EACH_VLLM
@pytest.mark.parametrize("order", [BEFORE, AFTER], ids=["before-vllm", "after-vllm"])
def test_growth_keeps_the_old_buffer_and_zeroes_the_new_one(release, order):
    """D4: the instance made on import grows by a new, zeroed buffer, and the old one stays at its address."""
    logged = passes(GROWS, release, order)
    assert "SM100Workspace is guarded" in logged
    assert logged.count("generation 2: lane SM100Workspace on cpu") == 1


def test_a_reload_is_guarded_again():
    passes(GROWS, order=BEFORE + "import importlib\nwith hm.cuda_is(): importlib.reload(mla)\n")


def test_a_call_through_the_class_and_by_keyword_grows_too():
    passes("""
own = memory.Handed.of(workspace.get_buf())
mla.SM100Workspace.ensure_size(workspace, attn_metadata=hm.metadata(own.nbytes + 1), num_kv_splits=1)
assert workspace.get_buf().numel() == 2 * own.nbytes and own.is_alive()
""")


def test_instances_that_share_a_buffer_have_it_once_each():
    """A copy, and another view of the same memory put back: no call adds a generation."""
    passes("""
import copy
small = make(MIB)
ask(1, small)
other = copy.copy(small)
for _ in range(5):
    small._workspace_buf = small._workspace_buf.detach()
    assert ask(1, small).data_ptr() == ask(1, other).data_ptr()
assert [(lane.generation, lane.retired_nbytes) for lane in lanes().values()] == [(1, 0), (1, 0)]
""")


def test_growth_is_geometric():
    """Whatever the order of sizes, all retired buffers together are smaller than the current one."""
    passes("""
small = make(MIB)
handed = []
for size in [MIB + 1, MIB + 2, 5 * MIB, 5 * MIB + 1, 3, 40 * MIB, 41 * MIB, 39 * MIB]:
    before = small.get_buf()
    buffer = ask(size, small)
    assert buffer.numel() >= size
    if buffer is not before:
        assert buffer.numel() >= 2 * before.numel() and buffer.numel() % (2 * MIB) == 0 and not buffer.any()
        handed.append(memory.Handed.of(buffer))
    lane, = lanes().values()
    assert lane.retired_nbytes < lane.nbytes
assert [at.nbytes // MIB for at in handed] == [2, 6, 40, 80]
del buffer, before
assert all(at.is_alive() for at in handed)
""")


def test_two_instances_have_a_lane_each():
    passes("""
one, two = make(MIB), make(MIB)
first, second = ask(2 * MIB, one), ask(2 * MIB, two)
assert first.data_ptr() != second.data_ptr()
assert sorted(lanes()) == ["SM100Workspace", "SM100Workspace.1"]
assert [lane.address for lane in lanes().values()] == [first.data_ptr(), second.data_ptr()]
""")


def test_a_buffer_outlives_its_instance():
    """A graph may hold the address after the object is gone."""
    passes("""
import gc
small = make(MIB)
at = [memory.Handed.of(small.get_buf()), memory.Handed.of(ask(2 * MIB, small))]
del small
gc.collect()
assert at[0].is_alive() and at[1].is_alive()
""")


def test_an_instance_is_copied_and_pickled_as_vllms_own():
    passes("""
import copy, pickle
small = make(MIB)
buffer = ask(2 * MIB, small)
assert set(vars(small)) == set(vars(make(1)))
for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
    assert other.get_buf().numel() == 2 * MIB and other.get_buf().data_ptr() != buffer.data_ptr()
    assert ask(4 * MIB, other).numel() == 4 * MIB and small.get_buf() is buffer
""")


def test_nothing_is_published_under_capture():
    """A captured call gets a zeroed buffer of its own; the next eager one sees the published buffer, unchanged."""
    passes("""
small = make(MIB)
published = ask(3 * MIB, small)
with fakes.capturing():
    local = ask(30 * MIB, small)
    assert local.numel() == 30 * MIB and not local.any()
    assert ask(2 * MIB, small) is published, "what fits uses the published buffer, under capture too"
    again = ask(30 * MIB, small)
    assert again.data_ptr() != local.data_ptr(), "each captured call has its own"
assert lanes()["SM100Workspace"].generation == 2
assert ask(1, small) is published
status = flashinfer_wsfix.status()
assert (status.growths, status.capture_overflows) == (1, 2)
(level, sentence), = [line for line in said if line[0] == "WARNING"]
assert "31457280 bytes of SM100Workspace on cpu while a CUDA graph was being captured" in sentence
assert "Run that shape once before capture" in sentence and "WORKSPACE_MIB" not in sentence
at = memory.Handed.of(local)
del local, again
assert not at.is_alive(), "the graph's pool takes it back"
assert ask(30 * MIB, small).numel() == 30 * MIB and lanes()["SM100Workspace"].generation == 3
""")


def test_where_memory_runs_out_the_lane_stays_as_it_was():
    passes("""
small = make(MIB)
own = small.get_buf()
try:
    ask(1 << 60, small)
    raise SystemExit("no error")
except RuntimeError:
    pass
assert small.get_buf() is own and lanes()["SM100Workspace"].generation == 1
assert ask(2 * MIB, small).numel() == 2 * MIB
""")


@pytest.mark.parametrize("ours", ["_lane_of", "_Asking", "_publish"])
def test_an_error_of_ours_leaves_vllms_own_growth(ours):
    """vLLM has what it asked for, and one warning says that it is unguarded."""
    logged = passes(f"""
def fail(*args):
    raise LookupError("ours")
sys.modules["flashinfer_wsfix.vllm"].{ours} = fail
size = workspace.get_buf().numel()
assert ask(size + 1).numel() == size + 1 and ask(2 * size).numel() == 2 * size
""")
    assert logged.count("WARNING") == logged.count("SM100Workspace ran UNGUARDED") == 1


@pytest.mark.parametrize("made_in, grown_in", [(True, False), (False, True), (True, True)])
def test_inference_mode_does_not_matter(made_in, grown_in):
    """The stock class fails where a buffer made in inference mode grows outside of it."""
    passes(f"""
with torch.inference_mode({made_in}):
    small = make(MIB)
with torch.inference_mode({grown_in}):
    buffer = ask(2 * MIB, small)
assert buffer.numel() == 2 * MIB and not buffer.is_inference()
buffer[0] = 1
""")


def test_threads_that_grow_one_instance_at_once():
    """No thread is left with a buffer that is too small, and no address dies."""
    passes("""
import threading
sys.setswitchinterval(1e-6)
for turn in range(20):
    small = make(1 << 16)
    start, handed, wrong = threading.Barrier(8), [memory.Handed.of(small.get_buf())], []
    def grow(size):
        start.wait()
        buffer = ask(size, small)
        handed.append(memory.Handed.of(buffer))
        if buffer.numel() < size:
            wrong.append((buffer.numel(), size))
    threads = [threading.Thread(target=grow, args=(MIB * (3 * n % 8 + 1),)) for n in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and len(handed) == 9 and all(at.is_alive() for at in handed)
    assert small.get_buf().data_ptr() == list(lanes().values())[-1].address
assert len(lanes()) == 20
""")


def test_a_thread_that_comes_late_does_not_bring_a_smaller_buffer_back():
    """Between a thread's growth and its publishing, another one grows the lane further."""
    passes("""
from unittest import mock
from flashinfer_wsfix.workspace import Lane
real = Lane.buffer_for
def overtaken(lane, size, tensor):
    buffer = real(lane, size, tensor)
    lane.grow(20 * MIB)
    return buffer
small = make(MIB)
with mock.patch.object(Lane, "buffer_for", overtaken):
    assert ask(2 * MIB, small).numel() == 20 * MIB
""")


@EACH_VLLM
def test_deactivate_puts_vllms_own_method_back_and_it_works(release):
    """What a guarded instance holds is an ordinary tensor, and vLLM's own resize_ works on it."""
    passes("""
assert flashinfer_wsfix.deactivate() == ()
function = vars(mla.SM100Workspace)["ensure_size"]
assert function is stock, function
small = make(MIB)
flashinfer_wsfix.activate()
buffer = ask(3 * MIB, small)
flashinfer_wsfix.deactivate()
assert small.get_buf() is buffer and "resize_" not in vars(buffer)
assert ask(4 * MIB + 1, small).numel() == 4 * MIB + 1 and small.get_buf() is buffer
flashinfer_wsfix.activate()
moved = memory.Handed.of(buffer)
del buffer
assert ask(20 * MIB, small).numel() == 20 * MIB and moved.is_alive()
assert vllm_target().state == "guarded"
""", release, AFTER.replace("import", "stock = vars(mla.SM100Workspace)['ensure_size']\nimport"))  # fmt: skip


# --- a vLLM of another shape ------------------------------------------------------------------------------------------

RESIZE = "            self._workspace_buf.resize_(workspace_size)\n"
METHOD = "    def ensure_size(self"
CLASS = "class SM100Workspace:"


@pytest.fixture
def changed(tmp_path):
    """Put a changed copy of the latest release's cutlass_mla.py into a folder."""

    def change(old, new):
        source = Path(hosts.vllm(LATEST), MLA).read_text()
        assert source.count(old) == 1
        (tmp_path / MLA).parent.mkdir(parents=True)
        (tmp_path / MLA).write_text(source.replace(old, new))
        return tmp_path

    return change


def test_a_vllm_that_never_resizes_is_left_alone(changed):
    retire = "            self._retired, self._workspace_buf = self._workspace_buf, torch.zeros(workspace_size)\n"
    passes("""
assert type(vars(mla.SM100Workspace)["ensure_size"]).__name__ == "function"
assert (vllm_target().state, vllm_target().sites) == ("not-needed", ())
assert "its SM100Workspace is never resized" in vllm_target().reason
""", folder=changed(RESIZE, retire))  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param(RESIZE, RESIZE + "            self.grown = True\n", id="sets-an-attribute"),
        pytest.param(RESIZE, "            self.buffers[0].resize_(workspace_size)\n", id="another-buffer"),
        pytest.param(RESIZE, RESIZE + RESIZE, id="resizes-twice"),
        pytest.param(METHOD, "    @torch.no_grad()\n" + METHOD, id="decorated"),
        pytest.param(METHOD, "    @staticmethod\n" + METHOD, id="static"),
        pytest.param(METHOD, METHOD.replace("ensure_size", "make_room"), id="renamed"),
        pytest.param(CLASS, CLASS.replace("SM", "Sm"), id="another-class"),
    ],
)
def test_an_unknown_shape_is_unsupported_and_nothing_of_vllm_is_wrapped(changed, old, new):
    """Not even the warm-up, whether it was imported before or comes after: never half a patch."""
    folder = changed(old, new)
    if old == CLASS:
        path = folder / MLA
        path.write_text(path.read_text().replace("g_sm100_workspace = SM", "g_sm100_workspace = Sm"))
    logged = passes(WARMUP + """
assert type(warmup.kernel_warmup).__name__ == "function"
assert "Guard" not in {type(member).__name__ for member in vars(type(workspace)).values()}
assert (vllm_target().state, vllm_target().sites) == ("unsupported", ())
""", order=WARMUP * (old == RESIZE) + BEFORE, folder=folder)  # fmt: skip
    assert logged.count("nothing of vLLM is guarded, and CUDA graphs with CUTLASS MLA may replay against freed") == 1


# --- switches ---------------------------------------------------------------------------------------------------------

STOCK = """
own = workspace.get_buf()
at, size = own.data_ptr(), own.numel()
assert ask(size + 256) is own and own.data_ptr() != at and own.numel() == size + 256
assert flashinfer_wsfix.status().lanes == () and flashinfer_wsfix.status().growths == 0
assert type(warmup.kernel_warmup).__name__ == "function"
"""


@pytest.mark.parametrize("variable", ["FLASHINFER_WSFIX", "FLASHINFER_WSFIX_VLLM"])
def test_off_leaves_vllm_alone(variable):
    logged = passes(f"{STOCK}\nassert vllm_target().state == 'disabled'", order=BEFORE + WARMUP, **{variable: "0"})
    assert "generation" not in logged and "MOVED" not in logged


def test_observe_logs_vllms_moves_and_changes_nothing():
    passes(STOCK + """
assert vllm_target().state == "observing"
assert vllm_target().sites == ("vllm.v1.attention.backends.mla.cutlass_mla.SM100Workspace.ensure_size",)
(level, sentence), = [line for line in said if "MOVED" in line[1]]
assert level == "WARNING"
assert sentence.startswith(f"MOVED by vLLM: lane SM100Workspace on cpu, {size} bytes at {at:#x} ->"), sentence
assert f"{own.data_ptr():#x}, capturing no" in sentence
""", order=BEFORE + WARMUP, FLASHINFER_WSFIX="observe")  # fmt: skip


# --- kernel_warmup ----------------------------------------------------------------------------------------------------

FLASHINFER = """
import contextlib, releases
def import_flashinfer(release):
    sys.path.insert(0, str(releases.fetch(release)))
    sys.modules["cudnn"], sys.modules["cutlass"] = fakes.cudnn, None
    import flashinfer, flashinfer.gemm
    fakes.install(flashinfer)
    return flashinfer
"""
USED = """
flashinfer = import_flashinfer("0.6.14")
FP8, BF16, FP4, MXFP8 = "bmm_fp8_workspace", "mm_bf16_workspace", "mm_fp4_workspace", "mm_mxfp8_workspace"
cpu = torch.device("cpu")
fakes.cudnn.backend = 92000  # so that both gates act
for name in (FP8, BF16, FP4):  # as they are when FlashInfer made them before us: no lane began with them
    dict.__setitem__(flashinfer.utils._cache_buf, (name, cpu), torch.zeros(32 * MIB, dtype=torch.uint8))
def presized():
    return {lane.name: lane.nbytes // MIB for lane in flashinfer_wsfix.status().lanes if lane.generation}
"""
RUN = """
import vllm.v1.worker.gpu_worker as gpu_worker
assert gpu_worker.kernel_warmup is warmup.kernel_warmup and type(warmup.kernel_warmup).__name__ == "Guard"
with fakes.available():
    assert gpu_worker.kernel_warmup(hm.worker(cpu)) is None
"""
FIRST = FLASHINFER + "import flashinfer_wsfix\n" + USED + WARMUP
LATE = FLASHINFER + WARMUP + "import vllm.v1.worker.gpu_worker\n" + USED + "import flashinfer_wsfix\n"


def warms_up(code, release=LATEST, order=FIRST, **environment):
    """As `passes`, with FlashInfer 0.6.14 and three of its workspaces in use, and without cutlass_mla."""
    ran = run(PRELUDE.format(release=release, folder="/nowhere") + order + code, **environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout + ran.stderr


@EACH_VLLM
@pytest.mark.parametrize("order", [FIRST, LATE], ids=["before-vllm", "after-vllm"])
def test_warm_up_presizes_the_lanes_in_use(release, order):
    """On SM12x, without those where the gate leaves cuDNN out: that would be memory for nothing. 40 MiB each."""
    warms_up(RUN + "assert presized() == {FP4: 40}, presized()\n", release, order)


def test_lanes_that_the_gate_does_not_close_are_presized():
    warms_up("with fakes.capability(10, 0):" + RUN.replace("\n", "\n    ")
             + "\nassert presized() == {FP8: 40, BF16: 40, FP4: 40}, presized()")  # fmt: skip
    warms_up(RUN + "assert presized() == {FP8: 40, FP4: 40}", FLASHINFER_WSFIX_GATE="bf16")


def test_presize_setting():
    """It names lanes, or says all, used or off; the default is used where it makes no sense."""
    logged = warms_up("""
import os
from flashinfer_wsfix.sites import LANES
for chosen, lanes in [
    ("off", set()),
    ("used", {FP4}),
    ("nonsense", {FP4}),
    ("mm_mxfp8_workspace, mm_fp4_workspace", {MXFP8, FP4}),
    ("all", {*LANES} - {FP8, BF16}),
]:
    os.environ["FLASHINFER_WSFIX_PRESIZE"] = chosen
    flashinfer_wsfix.deactivate()
    flashinfer_wsfix.activate()
    with fakes.available():
        warmup.kernel_warmup(hm.worker(cpu))
    assert set(presized()) == lanes, (chosen, presized())
""")
    assert logged.count("FLASHINFER_WSFIX_PRESIZE='nonsense' makes no sense") == 1


def test_warm_up_takes_what_vllm_gives_it():
    """By keyword, with the second parameter that 0.28 added, and on a worker that has no device."""
    warms_up("""
with fakes.available():
    warmup.kernel_warmup(hm.worker(None))
    assert presized() == {}
    warmup.kernel_warmup(worker=hm.worker("cpu"), process_local_only=True)
assert presized() == {FP4: 40}
""")


def test_the_copy_of_elastic_scaling_is_rebound():
    """vLLM's elastic_execute imports kernel_warmup by name as gpu_worker does."""
    copies = "import types\nelastic = sys.modules['elastic'] = types.ModuleType('elastic')\n"
    copies += "elastic.kernel_warmup = warmup.kernel_warmup\n"
    warms_up("""
with fakes.available():
    elastic.kernel_warmup(hm.worker(cpu), process_local_only=True)
assert presized() == {FP4: 40}
plain = warmup.kernel_warmup.__wrapped__
assert flashinfer_wsfix.deactivate() == ()
assert elastic.kernel_warmup is warmup.kernel_warmup is plain
""", order=LATE.replace("import flashinfer_wsfix\n", copies + "import flashinfer_wsfix\n"))  # fmt: skip


def test_an_error_of_presize_does_not_reach_vllm():
    """One warning, and an error of vLLM's own comes out unchanged."""
    logged = warms_up("""
with fakes.available(), fakes.out_of_memory(*range(9)):
    for _ in range(3):
        assert warmup.kernel_warmup(hm.worker(cpu)) is None
assert presized() == {}
def get_model():
    raise LookupError("vLLM's own")
try:
    warmup.kernel_warmup(hm.worker(cpu, get_model=get_model, model_runner=None))
    raise SystemExit("no error")
except (LookupError, AttributeError) as error:
    assert "wsfix" not in str(error)
""")
    assert logged.count("could not be presized before capture") == 1


def test_without_flashinfer_the_warm_up_runs_as_ever():
    warms_up("""
with fakes.available():
    assert warmup.kernel_warmup(hm.worker("cpu")) is None
assert "flashinfer" not in sys.modules
""", order="import flashinfer_wsfix\n" + WARMUP)  # fmt: skip


# --- both hosts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [
        'import_flashinfer("0.7.4")\nimport flashinfer_wsfix\nmla = hm.cutlass_mla()\n',
        'import flashinfer_wsfix\nmla = hm.cutlass_mla()\nimport_flashinfer("0.7.4")\n',
        'mla = hm.cutlass_mla()\nimport_flashinfer("0.7.4")\nimport flashinfer_wsfix\n',
    ],
    ids=["flashinfer-first", "vllm-first", "both-before"],
)
def test_a_fixed_flashinfer_does_not_disable_the_vllm_half(order):
    """FlashInfer 0.7.4 is not-needed and vLLM 0.33.0 is guarded; whichever is judged last says to keep the package."""
    logged = passes("""
first, second = flashinfer_wsfix.status().targets
assert (first.name, first.version, first.state) == ("flashinfer", "0.7.4", "not-needed")
assert (second.name, second.state) == ("vllm", "guarded")
assert flashinfer_wsfix.status().gates == ()
""" + GROWS, order=FLASHINFER + order)  # fmt: skip
    sentences = [line for line in logged.splitlines() if "keep flashinfer-wsfix" in line]
    assert len(sentences) == 1
    assert logged.rstrip().index(sentences[0]) > logged.find("can be removed")


def test_a_guarded_flashinfer_is_never_advised_away():
    """vLLM alone may need nothing, as long as FlashInfer does."""
    logged = passes("""
assert [target.state for target in flashinfer_wsfix.status().targets] == ["guarded", "guarded"]
""", order=FLASHINFER + 'import flashinfer_wsfix\nimport_flashinfer("0.6.14")\nmla = hm.cutlass_mla()\n')  # fmt: skip
    assert "can be removed" not in logged and "keep flashinfer-wsfix" not in logged


def test_a_lane_that_flashinfer_opens_after_us_is_there_before_any_warm_up():
    """Its buffer is the beginning of generation 1; the warm-up finds it large enough."""
    warms_up(
        """
flashinfer.utils._cache_buf.clear()
own = flashinfer.utils._get_cache_buf(FP4, 32 * MIB, cpu)
assert presized() == {FP4: 40} and flashinfer_wsfix.status().lanes[0].address == own.data_ptr()
"""
        + RUN
        + "assert presized() == {FP4: 40} and flashinfer_wsfix.status().growths == 0"
    )


def test_a_buffer_that_somebody_else_put_there_is_taken_over():
    """Too small, it is replaced and kept; larger than ours, it is the newest generation."""
    passes("""
small = make(MIB)
ask(3 * MIB, small)
held = [memory.Handed.of(small.get_buf())]
for size, asked, found in ((MIB, 3 * MIB, 4 * MIB), (9 * MIB, 5 * MIB, 9 * MIB), (MIB, 20 * MIB, 20 * MIB)):
    small._workspace_buf = torch.zeros(size, dtype=torch.uint8)
    held.append(memory.Handed.of(small.get_buf()))
    assert ask(asked, small).numel() == found, (size, asked, small.get_buf().numel())
    held.append(memory.Handed.of(small.get_buf()))
assert all(at.is_alive() for at in held)
""")


def test_an_error_of_ours_at_the_warm_up_is_told_and_strict_raises_it():
    code = """
def fail(*args, **kwargs):
    raise LookupError("ours")
sys.modules["flashinfer_wsfix.vllm"].presize = fail
with fakes.available():
    try:
        warmup.kernel_warmup(hm.worker(cpu))
    except LookupError:
        assert STRICT
    else:
        assert not STRICT and flashinfer_wsfix.status().unguarded_calls == 1
"""
    warms_up(code.replace("STRICT", "False"))
    warms_up(code.replace("STRICT", "True"), FLASHINFER_WSFIX_STRICT="1")
