"""Asynchronous RL post-training of language models: Lightning trainer, TorchRL pool, embedded or vLLM generation."""
