"""`--worker-extension-cls flashinfer_wsfix.report.WorkerStatus` tells each worker's state and does not change it."""

import json

import pytest
import serving

from startup.environments import run

STATUS = "flashinfer_wsfix.report.WorkerStatus"
ROUTES = {"the plugin": ({}, ["vLLM plugin"]), "nothing": ({"VLLM_PLUGINS": ""}, [])}

# Asks, then has the worker import FlashInfer, then asks again: was it activated by the asking?
LLM = f"""
import json, sys
from vllm import LLM

def sites(worker):
    from flashinfer.gemm import gemm_base
    found = [value for name, value in vars(gemm_base).items() if name.startswith("execute_cudnn_")]
    return [len(found), sum(type(site).__name__ == "Guard" for site in found)]

if __name__ == "__main__":
    llm = LLM(sys.argv[1], load_format="dummy", dtype="float32", enforce_eager=True, max_model_len=256,
              worker_extension_cls="{STATUS}")
    ask = lambda: llm.collective_rpc("flashinfer_wsfix_status")
    print("answer:" + json.dumps([ask(), llm.collective_rpc(sites), ask()]))
"""


@pytest.mark.parametrize("activated_by", ROUTES)
def test_asked_over_http(tmp_path, wheel, model, activated_by):
    """One dictionary per worker."""
    variables, routes = ROUTES[activated_by]
    where = serving.make_environment(tmp_path / "environment", wheel)
    with serving.serve(where, model, "--worker-extension-cls", STATUS, **variables) as server:
        (status,) = server.workers("flashinfer_wsfix_status")
        assert server.complete("Hello", 4)
    assert status["routes"] == routes
    assert status["targets"][0]["state"] == ("pending" if routes else "disabled")


@pytest.mark.parametrize("activated_by", ROUTES)
def test_asked_through_llm(tmp_path, wheel, model, activated_by):
    """The sites of a FlashInfer that comes after the question are guarded by a plugin, and by nothing else not."""
    variables, routes = ROUTES[activated_by]
    where = serving.make_environment(tmp_path / "environment", wheel)
    script = tmp_path / "ask.py"
    script.write_text(LLM)
    allowed = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # for `sites`, a function of ours
    ran = run([where.python, script, model], **serving.settings(where, **variables, **allowed))
    assert ran.returncode == 0, ran.stderr[-6000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("answer:")]
    (before,), (sites,), (after,) = json.loads(line.removeprefix("answer:"))
    assert before["routes"] == after["routes"] == routes
    assert sites == [8, 8 if routes else 0]
    assert after["targets"][0]["state"] == ("guarded" if routes else "disabled")
