"""Whatever a server does, in whatever order: the contract's invariants, on the real sites of one release.

Hypothesis makes up sequences of calls, captures, replays, races, displacements, failures and switches; a small model
says what each call must be given. An address that was handed to a cuDNN execute is checked by what is written there,
for as long as the sequence lasts. ``--hypothesis-profile long`` makes 50,000 sequences, on whichever release is named.
"""

import contextlib
import functools
import logging
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import flashinfer_wsfix
import pytest
import torch
from flashinfer_wsfix import allocation, lanes, workspace
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import arguments
import fakes
from memory import Handed, forget_lanes

RELEASE = "0.6.18.post1"
SEQUENCES, STEPS = 2_000, 20

KIB, MIB = 1 << 10, 1 << 20
OWN, FIRST, STEP = 64 * KIB, 2 * MIB, 2 * MIB
NAMES = ("bmm_fp8_workspace", "mm_bf16_workspace")
KEYS = [(name, torch.device(*device)) for name in NAMES for device in (("cpu",), ("cpu", 0))]
ZEROS = bytes(8)

keys = st.sampled_from(KEYS)
numbers = st.integers(0, 7)
# Around each threshold: FlashInfer's own buffer, the first generation, and the next ones.
sizes = st.sampled_from([0, KIB, OWN, OWN + 256, FIRST, FIRST + 256, 3 * MIB, 4 * MIB, 4 * MIB + 1, 6 * MIB])
failures = st.sampled_from([None] * 6 + ["query", "requery", "execute"])
shortages = st.sampled_from([()] * 4 + [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)])

pool = ThreadPoolExecutor(4)


class Interrupt(BaseException):
    """Not an Exception, as KeyboardInterrupt is not."""


class Failing:
    """A plan's size query that raises when it is asked for the n-th time."""

    def __init__(self, size, error, when):
        self.size, self.error, self.left = size, error, when

    def __call__(self, plan):
        self.left -= 1
        if not self.left:
            raise self.error
        return self.size


class Server(RuleBasedStateMachine):
    """A process that uses FlashInfer, and the model of what it was promised."""

    def __init__(self):
        super().__init__()
        forget_lanes()
        self.sites = arguments.present()
        self.own = {}  # key -> weak reference to FlashInfer's own buffer, its address, its size
        self.own_size = dict.fromkeys(KEYS, OWN)
        self.generations = {}  # key -> (address, size) of each generation
        self.refused = {}  # key -> [size that did not fit, calls that wanted as much since]
        self.handed = {}  # address -> Handed, and what is written there
        self.graphs = []  # addresses that each captured graph holds
        self.captured = []  # those of the capture in progress
        self.depth = 0
        self.written = 0
        self.counters = {"growths": 0, "capture_overflows": 0, "displaced_buffers": 0}
        self.was_off = False
        self.less_than_twice = False  # there was no memory for it

    def teardown(self):
        fakes.clock.capturing = 0
        forget_lanes()

    # --- what is called ---

    @property
    def cache(self):
        return sys.modules["flashinfer.utils"]._cache_buf

    def own_buffer(self, key):
        """FlashInfer's own buffer, from its own function and outside of a capture; the model notices when it is new."""
        name, device = key
        with mock.patch.object(fakes.clock, "capturing", 0):
            tensor = sys.modules["flashinfer.utils"]._get_cache_buf(name, self.own_size[key], device)
        if key not in self.own:
            made = self.generations.setdefault(key, [])
            if not made or made[-1][1] < tensor.numel():
                self.grown(key, self.next_sizes(key, tensor.numel())[0])
                self.settle(key)
            assert tensor.data_ptr() == made[-1][0], "not the beginning of the newest generation"
            self.own[key] = (weakref.ref(tensor), tensor.data_ptr(), tensor.numel())
        return tensor

    def enter(self, graph, tensor, number, inference=False):
        style = "keyword" if number % 2 else "positional"
        with torch.inference_mode() if inference else contextlib.nullcontext():
            arguments.call(self.sites[number % len(self.sites)], graph, tensor, style)

    # --- what must come of it ---

    def expect(self, key, size, capturing, failure, shortage):
        """Say what a call is given, as (kind, bytes), or that it raises ("raises", None); bring the model forward."""
        if failure == "query":
            return "raises", None
        if self.generations[key][-1][1] >= size:
            return "generation", self.generations[key][-1][1]
        tries = [] if capturing else self.next_sizes(key, size)
        refused = self.refused.get(key)
        if refused and size >= refused[0] and not capturing:
            refused[1] += 1
            tries = tries if refused[1] in lanes.TRIES else []
        for number, nbytes in enumerate(tries):
            if number not in shortage:
                self.less_than_twice |= number > 0
                self.grown(key, nbytes)
                return "generation", nbytes
        if tries:
            self.refused[key] = [size, refused[1] if refused else 0]
        self.counters["capture_overflows"] += capturing
        return ("out of memory", None) if len(tries) in shortage else ("call-local", size)

    def next_sizes(self, key, size):
        """What the next generation may have, the first that fits: twice, half as much again, or what was asked for."""
        made = self.generations[key]
        wanted = [2 * made[-1][1], made[-1][1] * 3 // 2, size] if made else [FIRST, size]
        return sorted({-(-max(size, each) // STEP) * STEP for each in wanted}, reverse=True)

    def grown(self, key, nbytes):
        self.counters["growths"] += bool(self.generations[key])
        self.generations[key].append((None, nbytes))
        self.refused.pop(key, None)

    def settle(self, key):
        """Fill in the address of a generation that the model foresaw."""
        made = self.generations[key]
        if made and made[-1][0] is None:
            made[-1] = (lanes._lanes[key].generations[-1].data_ptr(), made[-1][1])

    def look_again(self, key, generations, counters):
        """Take back what did not happen: how often a plan is asked for its size is not promised, so its error may come
        before the lane has grown or after."""
        if len(lanes._lanes[key].generations) == len(generations):
            self.generations[key] = generations
            self.counters["growths"] = counters["growths"]
        if flashinfer_wsfix.status().capture_overflows == counters["capture_overflows"]:
            self.counters = {**self.counters, "capture_overflows": counters["capture_overflows"]}

    def keep(self, tensor):
        """Note that a cuDNN execute was handed this memory for good, and leave a kernel's left-overs there."""
        handed = Handed.of(tensor)
        if handed.address not in self.handed:
            assert not tensor.any(), "dirty at first sight"
            self.apart(handed)
            self.handed[handed.address] = (handed, ZEROS)
        assert self.handed[handed.address][0].nbytes == handed.nbytes, (
            "another buffer at an address that was handed out"
        )
        self.write(handed.address)

    def apart(self, new):
        for old, _ in self.handed.values():
            assert new.address + new.nbytes <= old.address or old.address + old.nbytes <= new.address, (
                "memory handed out twice"
            )

    def write(self, address):
        self.written += 1
        content = self.written.to_bytes(8, "little")
        self.handed[address][0].write(content)
        self.handed[address] = (self.handed[address][0], content)

    # --- rules ---

    @rule(key=keys, size=sizes, number=numbers, failure=failures, shortage=shortages, worker=st.booleans())
    def call(self, key, size, number, failure, shortage, worker):
        """A site is called: in this thread or another, in inference mode or not; anything may fail at any point."""
        tensor = self.own_buffer(key)
        capturing = bool(self.depth) and not worker
        error = Interrupt() if number % 3 else ValueError("plan")
        graph = fakes.Graph(size, look=False, error=error if failure == "execute" else None)
        if failure in ("query", "requery"):
            graph.workspace_bytes = Failing(size, error, 1 if failure == "query" else 2)
            shortage = ()
        before = list(self.generations[key]), dict(self.counters)
        kind, given = self.expect(key, size, capturing, failure, shortage)
        raised = None
        try:
            with fakes.out_of_memory(*shortage):
                run = functools.partial(self.enter, graph, tensor, number, inference=number > 3)
                pool.submit(run).result() if worker else run()
        except (Interrupt, ValueError, torch.OutOfMemoryError) as caught:
            raised = caught
        if failure == "requery" and raised is not None:
            self.look_again(key, *before)
        self.settle(key)
        if kind == "out of memory":
            assert type(raised) is torch.OutOfMemoryError
        elif failure != "requery":
            assert raised is (error if failure else None)
        assert raised is None or raised.__context__ is None
        if kind == "out of memory" or (raised is not None and failure != "execute"):
            assert graph.executions == []
            return
        [execution] = graph.executions
        passed = execution.workspace
        assert type(passed) is torch.Tensor
        assert passed.numel() == given
        if kind == "call-local":
            assert not passed.any(), "dirty at first sight"
            self.apart(Handed.of(passed))
            return
        address = self.generations[key][-1][0]
        assert passed.data_ptr() == address, "not the lane's newest generation"
        self.keep(passed)
        if capturing:
            self.captured.append(address)

    @rule(key=keys, wanted=st.lists(sizes, min_size=2, max_size=4))
    def race(self, key, wanted):
        """Several threads use one lane at once, outside of any capture."""
        tensor = self.own_buffer(key)
        graphs = [fakes.Graph(size, look=False) for size in wanted]
        barrier = threading.Barrier(len(graphs))

        def enter(number):
            barrier.wait(20)
            self.enter(graphs[number], tensor, number)

        before = self.generations[key]
        for future in [pool.submit(enter, number) for number in range(len(graphs))]:
            future.result(20)
        made = [(buffer.data_ptr(), buffer.numel()) for buffer in lanes._lanes[key].generations]
        assert made[: len(before)] == before
        self.counters["growths"] += len(made) - len(before)
        self.generations[key] = made
        for graph in graphs:
            [execution] = graph.executions
            place = (execution.data_ptr, execution.numel)
            assert place in made or key in self.refused, "neither a generation nor what there is where memory was short"
            if place in made:
                self.keep(execution.workspace)
        lane = lanes._lanes[key]
        if lane.refused != lanes.NEVER:
            self.refused[key] = [lane.refused, lane.waited]
        else:
            self.refused.pop(key, None)

    @rule()
    def begin_capture(self):
        """Captures nest: a graph inside a graph's warm-up."""
        if self.depth < 2:
            self.depth += 1
            fakes.clock.capturing += 1

    @precondition(lambda self: self.depth)
    @rule(fails=st.booleans())
    def end_capture(self, fails):
        """A captured graph holds its addresses for good; of one that failed nothing is left."""
        self.depth -= 1
        fakes.clock.capturing -= 1
        if not self.depth:
            if not fails:
                self.graphs.append(self.captured)
            self.captured = []

    @precondition(lambda self: self.graphs)
    @rule(number=numbers)
    def replay(self, number):
        """A graph writes through every address that it holds."""
        for address in self.graphs[number % len(self.graphs)]:
            self.write(address)

    @rule(key=keys)
    def displace(self, key):
        """Somebody asks FlashInfer for a larger buffer of the same lane."""
        self.own_size[key] += 4 * KIB
        self.counters["displaced_buffers"] += self.own.pop(key, None) is not None
        self.own_buffer(key)

    @precondition(lambda self: self.own)
    @rule(key=keys, how=st.sampled_from(["clear", "pop", "popitem", "del", "set"]))
    def leave(self, key, how):
        """A buffer leaves FlashInfer's cache, in whichever way."""
        before = len(self.own)
        if how == "clear":
            self.cache.clear()
        elif how == "popitem":
            self.cache.popitem()
        elif how in ("pop", "del") and key in self.own:
            self.cache.pop(key) if how == "pop" else self.cache.__delitem__(key)
        elif how == "set":
            with mock.patch.object(fakes.clock, "capturing", 0):
                self.cache[key] = torch.zeros(self.own_size[key], dtype=torch.uint8)
        self.own = {key: own for key, own in self.own.items() if self.cache.get(key) is own[0]()}
        self.counters["displaced_buffers"] += before - len(self.own)
        if how == "set":
            self.own_buffer(key)

    @precondition(lambda self: not self.was_off)
    @rule(key=keys, size=sizes, number=numbers)
    def switch_off_and_on(self, key, size, number):
        """Stock code runs in between and moves its own buffer; what was handed out is still there after."""
        self.was_off = True
        tensor = self.own_buffer(key)
        nbytes = self.own.pop(key)[2]
        assert flashinfer_wsfix.deactivate() == ()
        assert type(self.cache) is dict
        graph = fakes.Graph(size, look=False)
        self.enter(graph, tensor, number)
        assert graph.last.workspace is tensor
        assert tensor.numel() == max(size, nbytes)
        if size > self.generations[key][-1][1]:
            self.grown(key, self.next_sizes(key, size)[0])
            self.settle(key)
        if size > nbytes:
            assert tensor.data_ptr() == self.generations[key][-1][0], "not the beginning of the newest generation"
        flashinfer_wsfix.activate("test")
        self.own_size[key] = tensor.numel()
        self.own[key] = (weakref.ref(tensor), tensor.data_ptr(), tensor.numel())

    # --- after every step ---

    @invariant()
    def no_address_dies(self):
        for handed, content in self.handed.values():
            assert handed.is_alive(), "memory that was handed out is freed"
            assert handed.read() == {content}, "memory that was handed out is somebody else's"

    @invariant()
    def flashinfers_buffers_are_as_they_were(self):
        assert self.cache.keys() == self.own.keys()
        for key, (reference, address, nbytes) in self.own.items():
            tensor = self.cache[key]
            assert tensor is reference()
            assert (tensor.data_ptr(), tensor.numel()) == (address, nbytes)

    @invariant()
    def generations_are_as_foreseen(self):
        status = flashinfer_wsfix.status()
        for lane in status.lanes:
            assert self.less_than_twice or lane.retired_nbytes < lane.nbytes, "more retired than current"
        assert {name: getattr(status, name) for name in self.counters} == self.counters
        assert {key: [(buffer.data_ptr(), buffer.numel()) for buffer in lane.generations]
                for key, lane in lanes._lanes.items()} == self.generations  # fmt: skip

    @invariant()
    def what_a_site_gets_next_is_the_newest_generation(self):
        for lane in lanes._lanes.values():
            assert lane.current is lane.generations[-1]


@pytest.fixture
def quick(guard, monkeypatch, caplog):
    """First generations of 2 MiB, no log, inputs made once, and memory that is dirty wherever it is not zeroed."""
    monkeypatch.setenv("FLASHINFER_WSFIX_WORKSPACE_MIB", "2")
    guard.activate()
    caplog.set_level(logging.CRITICAL, "flashinfer_wsfix")
    torch.set_deterministic_debug_mode("error")
    with mock.patch.object(arguments, "tensors", functools.cache(arguments.tensors)):
        yield
    torch.set_deterministic_debug_mode("default")


def test_whatever_happens_the_contract_holds(quick, release):
    long = settings.default.max_examples > SEQUENCES
    if release != RELEASE and not long:
        pytest.skip(f"runs on {RELEASE}, or with --hypothesis-profile long")
    run_state_machine_as_test(
        Server,
        settings=settings(
            max_examples=settings.default.max_examples if long else SEQUENCES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=not long,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.affected
def test_a_lane_settles_on_no_buffer_once_another_thread_has_made_a_generation(quick, sites):
    """Growing fails in one thread; before that one takes FlashInfer's own buffer instead, another publishes."""
    name, device = KEYS[0]
    tensor = torch.zeros(OWN, dtype=torch.uint8)
    dict.__setitem__(sys.modules["flashinfer.utils"]._cache_buf, (name, device), tensor)  # it was there before us
    lane, arm = workspace.lane_of(tensor), allocation.arm

    def overtaken(buffer):
        with mock.patch.object(lanes, "arm", arm):
            pool.submit(lane.grow, KIB).result(20)
        return arm(buffer)

    graph = fakes.Graph(KIB, look=False)
    with fakes.out_of_memory(0), mock.patch.object(lanes, "arm", overtaken):
        arguments.call(sites[0], graph, tensor)
    assert graph.last.data_ptr == tensor.data_ptr()
    [generation] = lane.generations
    assert lane.current is generation
    arguments.call(sites[0], graph, tensor)
    assert graph.last.workspace is generation
