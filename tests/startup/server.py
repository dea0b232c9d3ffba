"""A stand-in for a server: is activated by a route, imports FlashInfer, and asks each kind of child for its state.

``server.py before|after ROUTE [NAME=VALUE ...]`` prints JSON. `before`: activated before the import of FlashInfer.
ROUTE: "import", a release of vLLM or SGLang whose plugin loader is run, or "-": it has been activated on its way here.
Settings are set in between, as a script would. What is at module level also runs in spawned children.
"""

import gc
import json
import multiprocessing
import os
import subprocess
import sys
import types

import fresh

ORDER, ROUTE, *SETTINGS = [word for word in sys.argv[1:] if word != "--state"]
METHODS = ("fork", "spawn", "forkserver")


def activate():
    if ROUTE == "import":
        import flashinfer_wsfix  # noqa: F401
    elif ROUTE.startswith("vllm"):
        import host_modules

        host_modules.vllm(ROUTE.removeprefix("vllm-"))
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        load_general_plugins()
    elif ROUTE.startswith("sglang"):
        import host_modules

        host_modules.sglang(ROUTE.removeprefix("sglang-"))
        from sglang.srt.plugins import load_plugins

        load_plugins()


def import_flashinfer():
    import fakes

    sys.modules["cudnn"] = fakes.cudnn
    sys.modules["cutlass"] = None
    from flashinfer.gemm import gemm_base, gemm_bf16_fp4_cudnn  # noqa: F401  # imported by FlashInfer when it needs it

    global copied
    copied = gemm_base.execute_cudnn_gemm_fp8_graph


def state():
    """What this process can say of itself, without an import of ours if nobody else imported us."""
    sites = vars(sys.modules["flashinfer.gemm.gemm_base"]) | vars(sys.modules["flashinfer.gemm.gemm_bf16_fp4_cudnn"])
    sites = {value for name, value in sites.items() if name.startswith("execute_cudnn_")}
    guarded = [site for site in sites if type(site).__name__ == "Guard"]
    said = {
        "guarded": len(guarded),
        "unguarded": len(sites) - len(guarded),
        "twice": sum(not isinstance(site.__wrapped__, types.FunctionType) for site in guarded),
        "copied": any(copied is site for site in guarded),  # `in` asks the wrapped functions for equality
        "torch": "torch" in sys.modules,
        "routes": None,
    }
    if "flashinfer_wsfix" in sys.modules:
        status = sys.modules["flashinfer_wsfix"].status()
        said |= {"routes": list(status.routes), "state": status.targets[0].state, "gates": list(status.gates)}
    return said


def settle():
    os.environ.update(setting.split("=") for setting in SETTINGS)


gc.disable()  # what is imported here is no garbage
if ORDER == "after":
    import_flashinfer()
activate()
settle()
if ORDER == "before":
    import_flashinfer()
fresh.has_imported()

if __name__ == "__main__":
    if "--state" in sys.argv:
        print(json.dumps(state()))
        sys.exit()
    # All at once: most of the time is torch's import.
    child = subprocess.Popen([sys.executable, *sys.argv, "--state"], stdout=subprocess.PIPE)
    pools = {method: multiprocessing.get_context(method).Pool(1) for method in METHODS}
    answers = {method: pool.apply_async(state) for method, pool in pools.items()}
    states = {"main": state(), **{method: answer.get(120) for method, answer in answers.items()}}
    for pool in pools.values():
        pool.terminate()
    states["subprocess"] = json.loads(child.communicate()[0])
    print(json.dumps(states))
