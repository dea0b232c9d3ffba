"""A random walk: calls, captures and replays between other tensors, streams, threads, pools and `empty_cache`."""

import random
import threading
from collections.abc import Callable

import gemm
import torch
from gemm import Gemm, captured

SIZES = (1, 31, 32, 33, 40, 41, 56, 64, 96, 130, 200)  # MiB that a plan asks for, at first the small ones
STEPS = 40
OVERWRITTEN = "another tensor was overwritten"


class Walk:
    """Checks that no other tensor was harmed; with `zeroed` also that no call found what was left over."""

    def __init__(self, seed: int, zeroed: bool) -> None:
        self.random, self.zeroed = random.Random(seed), zeroed
        devices = torch.cuda.device_count()
        self.plans = [Gemm(f"cuda:{index}") for index in range(devices)]
        self.streams = [torch.cuda.Stream(index) for index in range(devices) for _ in range(2)]
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[tuple[torch.cuda.CUDAGraph, Gemm]] = []
        self.others: list[torch.Tensor] = []
        self.told: list[str] = []

    def step(self) -> None:
        often = (self.call, self.replay, self.take)
        doing = self.random.choice((*often, *often, self.capture, self.give, self.empty))
        self.told.append(doing.__name__)
        doing()
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)

    def check_others(self) -> None:
        assert gemm.unharmed(self.others), (OVERWRITTEN, self.told)

    def sizes(self) -> tuple[int, ...]:
        return SIZES[: 3 + len(self.told) // 3]

    def call(self) -> None:
        plan, mib = self.random.choice(self.plans), self.random.choice(self.sizes())
        self.told[-1] += f" {mib}"
        where = self.random.choice(("here", "thread", "stream"))
        if where == "here":
            plan.call(mib)
        elif where == "thread":
            thread = threading.Thread(target=plan.call, args=[mib])
            thread.start()
            thread.join()
        else:
            device = plan.own.device
            with torch.cuda.stream(self.random.choice([one for one in self.streams if one.device == device])):
                plan.call(mib)
        self.check(plan)

    def check(self, plan: Gemm) -> None:
        """What is not zeroed, or another owner's, is full of larger bytes than the adding of a whole walk makes."""
        found = plan.found()
        assert not self.zeroed or found <= 4 * STEPS, (found, self.told)

    def capture(self) -> None:
        plan, sizes = self.random.choice(self.plans), self.random.choices(self.sizes(), k=self.random.choice((1, 2)))
        self.told[-1] += f" {sizes}"
        pool = self.random.choice(({}, {"pool": self.pool})) if plan is self.plans[0] else {}

        def calls() -> None:
            for mib in sizes:
                plan.call(mib)

        with torch.cuda.device(plan.own.device):
            # By itself torch captures on the device of the first capture.
            self.graphs.append((captured(calls, stream=torch.cuda.Stream(), **pool), plan))

    def replay(self) -> None:
        if self.graphs:
            graph, plan = self.random.choice(self.graphs)
            with torch.cuda.device(plan.own.device):
                graph.replay()
            self.check(plan)
            self.check_others()

    def take(self) -> None:
        if len(self.others) < 8:
            self.others.append(gemm.sentinel(self.random.choice((1, 16, 20, 32, 40))))

    def give(self) -> None:
        if self.others:
            self.check_others()
            self.others.pop(self.random.randrange(len(self.others)))

    def empty(self) -> None:
        torch.cuda.empty_cache()


def question(seed: int, zeroed: bool) -> Callable[[], None]:
    def walk() -> None:
        steps = Walk(seed, zeroed)
        for _ in range(STEPS):
            steps.step()
        steps.check_others()

    return walk
