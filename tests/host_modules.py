"""Import the real modules of vLLM and SGLang where neither is installed.

`vllm(release)` or `sglang(release)` makes the kept files importable under their real names, by the ordinary import
system: they sit on sys.path, and a finder at the end of sys.meta_path answers for what is missing. It may be called
before or after `import flashinfer_wsfix`, and is for processes that end with the test: nothing is undone.

Stubbed by hand is only what `_BY_HAND` lists and, in `cutlass_mla()`, the device "cuda". Every other missing
`vllm.*` or `sglang.*` module is empty: its attributes are made when asked for, are false, and do nothing (`Nothing`).
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

import hosts

_BY_HAND = {
    # One byte per request: a test says what the kernel wants with metadata(nbytes).
    "vllm._custom_ops": {
        "sm100_cutlass_mla_get_workspace_size": lambda max_seq_len, num_batches, sm_count, num_kv_splits: num_batches
    },
    "vllm.utils.platform_utils": {"num_compute_units": lambda device_id=0: 148},
    # For the real logger's info_once.
    "vllm.distributed.parallel_state": {
        "is_global_first_rank": lambda: True,
        "is_local_first_rank": lambda: True,
    },
}


def vllm(release):
    """Make the real files of this vLLM release importable; return their folder."""
    return _install(hosts.vllm(release), "vllm", "regex")


def sglang(release):
    """Make the real files of this SGLang release importable; return their folder."""
    return _install(hosts.sglang(release), "sglang")


def cuda_is(device="cpu"):
    """A context in which the device "cuda" is `device`, as far as torch's functions are concerned."""
    from torch.overrides import TorchFunctionMode

    class CudaIs(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = device
            return func(*args, **kwargs)

    return CudaIs()


def cutlass_mla(device="cpu"):
    """Import the real `cutlass_mla`, whose global 128 MiB workspace is made on import, on `device`."""
    with cuda_is(device):
        return importlib.import_module("vllm.v1.attention.backends.mla.cutlass_mla")


def metadata(nbytes):
    """Attention metadata for which the stubbed op asks for `nbytes`."""
    return types.SimpleNamespace(num_reqs=nbytes, max_query_len=1)


def worker(device, **attributes):
    """A real, uninitialised `gpu_worker.Worker` on `device`; what else it is asked for is `Nothing`."""
    gpu_worker = importlib.import_module("vllm.v1.worker.gpu_worker")
    made = object.__new__(gpu_worker.Worker)
    vars(made).update(attributes, device=device)
    return made


class _Nothing(type):
    """The type of `Nothing`: false, empty, callable, a decorator, a context manager, a base class, a generic alias."""

    def __getattr__(cls, name):
        return _make(cls, name)

    def __call__(cls, *args, **kwargs):
        if not _is_nothing(cls):
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]
        return cls

    def __bool__(cls):
        return not _is_nothing(cls)

    def __getitem__(cls, item):
        return cls

    def __iter__(cls):
        return iter(())

    def __gt__(cls, other):
        return False

    def __enter__(cls):
        return cls

    def __exit__(cls, *error):
        return None


class Nothing(metaclass=_Nothing):
    """What a stub module is full of. A real class that derives from it is a real class, and true."""

    def __getattr__(self, name):
        return _make(self, name)


class _StubModule(types.ModuleType):
    def __getattr__(self, name):
        return _make(self, name)


def _make(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    made = _Nothing(name, (Nothing,), {"_made_on_demand": True})
    setattr(owner, name, made)
    return made


def _is_nothing(cls):
    return "_made_on_demand" in vars(cls)


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots):
        self.roots = roots

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.roots:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StubModule(spec.name)

    def exec_module(self, module):
        vars(module).update(_BY_HAND.get(module.__name__, {}))


def _install(folder, *roots):
    sys.path.insert(0, str(folder))
    sys.meta_path.append(_StubFinder(roots))
    importlib.invalidate_caches()
    return folder
