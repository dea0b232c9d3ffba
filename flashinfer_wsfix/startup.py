"""What the plugin loaders of vLLM and SGLang call, and Ray: in processes that may never import FlashInfer."""

from .activation import activate


def vllm_plugin() -> None:
    """Activate from vLLM's plugin loader, which calls this bare in each of its processes, some more than once."""
    activate("vLLM plugin")


def sglang_plugin() -> None:
    """Activate from SGLang's plugin loader, which its scheduler runs after it has imported FlashInfer."""
    activate("SGLang plugin")


def ray_worker() -> None:
    """Activate in a Ray worker, with ``{"worker_process_setup_hook": "flashinfer_wsfix.startup.ray_worker"}``."""
    activate("Ray")
