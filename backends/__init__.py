"""Real execution: vLLM engines, KV over Redis, run state. The only importer of vllm, torch, ray and redis."""
