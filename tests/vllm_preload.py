"""Imported once by the process from which tests fork those that run an engine: they start in 2 s instead of 12."""

import contextlib
import gc
import importlib

from backends.environment import prepare

prepare("cpu")
gc.disable()
with contextlib.suppress(ImportError):  # without vLLM the tests that need it are skipped
    for name in ("transformers.models.qwen2.modeling_qwen2", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(name)
gc.freeze()  # a collection would write to every page, and so copy what the children share
gc.enable()
