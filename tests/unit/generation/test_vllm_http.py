"""The client of vLLM servers against a small HTTP server that answers as vLLM does: choice of server, and error words."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_asyncrl.errors import ConfigurationError, EngineError, WeightSyncError
from lit_asyncrl.generation.vllm_http import ServerConnection, events_of, reason_of, sampled_from
from lit_asyncrl.generation.vllm_server import ServerClient, VLLMServerEngine
from lit_asyncrl.generation.vllm_server_checks import Expected
from lit_asyncrl.types import GenerationRequest, SamplingParams

VOCAB_SIZE = 20
PROBE = (3, 4, 5)
Answer = tuple[int, Any]


class FakeServer:
    """The routes of a vLLM server. `answers` replaces what a route says; `calls` holds what was asked, in order."""

    def __init__(self) -> None:
        self.version = "default"
        self.paused = False
        self.shift = 0.0
        self.calls: list[tuple[str, Any]] = []
        self.headers: list[Any] = []
        self.answers: dict[str, Answer] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.config: dict[str, Any] = {
            "model_config": {
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
                "skip_tokenizer_init": False,
                "max_model_len": 64,
            },
            "scheduler_config": {"max_num_seqs": 9},
            "weight_transfer_config": {"backend": "shared_memory"},
        }
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._handle(None)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                self._handle(json.loads(self.rfile.read(length)) if length else None)

            def _handle(self, body: Any) -> None:
                route = self.path.split("?")[0]
                fake.calls.append((self.path, body))
                fake.headers.append(self.headers)
                status, answer = fake.answers.get(route) or fake.answer(route, body)
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def answer(self, route: str, body: Any) -> Answer:
        if route == "/finish_weight_update" and body:
            self.version = body["weight_version"]
        if route in ("/pause", "/resume"):
            self.paused = route == "/pause"
        known = {
            "/version": {"version": "0.32.0"},
            "/server_info": {"vllm_config": self.config},
            "/get_world_size": {"world_size": 2},
            "/is_paused": {"is_paused": self.paused},
            "/weight_info": {"weight_version": self.version},
        }
        return self._generate(body) if route == "/inference/v1/generate" else (200, known.get(route, ""))

    def _generate(self, body: Any) -> Answer:
        if max(body["token_ids"]) >= VOCAB_SIZE:
            return 400, {"error": {"message": "Token id is out of vocabulary"}}
        if not body.get("stream"):
            scores = [None, *({str(token): {"logprob": -1.0 - self.shift}} for token in body["token_ids"][1:])]
            return 200, {"prompt_logprobs": scores}
        self.entered.release()
        assert self.gate.wait(10.0)
        # The likeliest tokens are 1 nat apart at temperature 1.
        top = [{"token_id": i, "logprob": -i / body["sampling_params"]["temperature"]} for i in range(5)]
        spans = [{"version": self.version, "start": 0, "end": 1}]
        content = [top[0] | {"top_logprobs": top}]
        choice = {"token_ids": [0], "logprobs": {"content": content}, "weight_versions": spans, "finish_reason": "length"}
        return 200, f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"

    def routes(self) -> list[str]:
        return [path.split("?")[0] for path, _ in self.calls]

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def other() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


@pytest.fixture
def policy(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    return str(tmp_path)


@contextmanager
def _started(policy: str, *servers: FakeServer, **settings: Any) -> Iterator[VLLMServerEngine]:
    arguments = {"num_slots": 8, "start_timeout_s": 5.0, "response_timeout_s": 5.0} | settings
    engine = VLLMServerEngine(urls=[server.url for server in servers], **arguments)
    engine.start(policy, eos_token_ids=(1,), probe_ids=PROBE, max_model_len=32)
    try:
        yield engine
    finally:
        engine.stop()


def _run(use: Callable[[ServerClient], Coroutine[Any, Any, Any]], *servers: FakeServer) -> Any:
    """Use a client of the servers in an event loop of its own."""
    expected = Expected(dtype="float32", transport="shared_memory", vocab_size=VOCAB_SIZE, max_model_len=32, num_slots=4)

    async def body() -> Any:
        client = ServerClient([ServerConnection(server.url, None, 5.0) for server in servers], expected, 5.0)
        await client.start()
        try:
            return await use(client)
        finally:
            await client.stop()

    return asyncio.run(asyncio.wait_for(body(), 20.0))


def _refused(policy: str, *servers: FakeServer, **settings: Any) -> str:
    with pytest.raises((EngineError, ConfigurationError)) as caught, _started(policy, *servers, **settings):
        pass
    return str(caught.value)


def _generate(client: ServerClient, name: str) -> "asyncio.Task[Any]":
    return asyncio.get_running_loop().create_task(client.generate(name, PROBE, {"temperature": 1.0, "max_tokens": 1}, None))


# ---------------------------------------------------------------- several servers


def test_each_request_goes_to_the_server_with_the_fewest_in_flight(fake: FakeServer, other: FakeServer):
    async def use(client: ServerClient) -> None:
        other.gate.clear()
        fake.calls.clear()
        other.calls.clear()
        await _generate(client, "1")  # to the first of two idle ones, which answers at once
        fake.gate.clear()
        tasks = [_generate(client, str(number)) for number in range(2, 5)]  # first, second, first
        await asyncio.to_thread(_enter, fake, 3)
        fake.gate.set()
        await asyncio.gather(tasks[0], tasks[2])  # now 0 and 1 in flight
        await _generate(client, "5")
        other.gate.set()
        await asyncio.gather(*tasks)
        assert sorted(body["request_id"] for _, body in fake.calls) == ["1", "2", "4", "5"]
        assert [body["request_id"] for _, body in other.calls] == ["3"]

    _run(use, fake, other)


def _enter(server: FakeServer, times: int) -> None:
    for _ in range(times):
        assert server.entered.acquire(timeout=10.0)


def test_an_update_reaches_every_server_in_order(policy: str, fake: FakeServer, other: FakeServer):
    with _started(policy, fake, other) as engine:
        for server in (fake, other):
            server.calls.clear()
        engine.begin_update(7, {"weight": torch.ones(3)})
        report = engine.finish_update(10.0)
    assert (report.version, list(report.probe_logprobs)) == (7, [-1.0, -1.0])
    expected = ["/pause", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    for server in (fake, other):
        asked = [route for route in server.routes() if route != "/weight_info"]  # the heartbeat's
        assert asked[:6] == [*expected, "/resume"]


def test_servers_that_report_different_versions_report_none(policy: str, fake: FakeServer, other: FakeServer):
    with _started(policy, fake, other) as engine:
        other.answers["/weight_info"] = (200, {"weight_version": "6"})
        engine.begin_update(7, {"weight": torch.ones(3)})
        assert engine.finish_update(10.0).version == -1


def test_servers_that_score_the_probe_differently_are_named(policy: str, fake: FakeServer, other: FakeServer):
    with _started(policy, fake, other) as engine:
        other.shift = 0.01
        engine.begin_update(7, {"weight": torch.ones(3)})
        with pytest.raises(WeightSyncError, match=f"-1.0.* from {fake.url} and -1.01.* from {other.url}"):
            engine.finish_update(10.0)


def test_a_server_that_refuses_a_chunk_is_named_with_its_reason(policy: str, fake: FakeServer, other: FakeServer):
    with _started(policy, fake, other) as engine:
        other.answers["/update_weights"] = (500, {"error": {"message": "the checksum of weight must be 0x1, got 0x2"}})
        engine.begin_update(7, {"weight": torch.ones(3)})
        with pytest.raises(WeightSyncError, match=f"version 7.*{other.url} refused POST /update_weights .500.: the checksum"):
            engine.finish_update(10.0)
        assert not fake.paused and not other.paused


def test_nccl_ranks_follow_on_from_server_to_server(fake: FakeServer, other: FakeServer):
    _run(lambda client: client.init_transfer({"rank_offset": 1, "world_size": 5}), fake, other)
    sent = [server.calls[server.routes().index("/init_weight_transfer_engine")][1] for server in (fake, other)]
    # Two workers each: ranks 1 and 2, then 3 and 4.
    assert [body["init_info"]["rank_offset"] for body in sent] == [1, 3]


def test_a_request_still_on_its_way_is_aborted_when_it_has_arrived(fake: FakeServer):
    """The first abort finds nothing: the client asks again until the response has ended."""

    async def use(client: ServerClient) -> None:
        fake.gate.clear()
        task = _generate(client, "late")
        abort = asyncio.get_running_loop().create_task(client.abort(["late"]))
        while fake.routes().count("/abort_requests") < 3:
            await asyncio.sleep(0.005)
        assert not abort.done()
        fake.gate.set()
        await asyncio.gather(task, abort)

    _run(use, fake)
    asked = next(body for route, body in fake.calls if route == "/abort_requests")
    assert asked == {"request_ids": ["generate-tokens-late"]}


# ---------------------------------------------------------------- what a server must be


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("model_config", "dtype"), "torch.bfloat16", "engine.dtype must be that of the server, got float32 and bfloat16"),
        (("model_config", "logprobs_mode"), "raw_logprobs", "--logprobs-mode processed_logprobs"),
        (("model_config", "skip_tokenizer_init"), True, "without --skip-tokenizer-init"),
        (("model_config", "max_model_len"), 31, "--max-model-len 32"),
        (("scheduler_config", "max_num_seqs"), 8, "--max-num-seqs 9, or lower engine.num_slots"),
        (("weight_transfer_config",), None, '--weight-transfer-config \'{"backend": "shared_memory"}\''),
    ],
    ids=["dtype", "log-probs", "tokenizer", "length", "slots", "no transport"],
)
def test_a_setting_that_does_not_fit_is_refused_with_the_option_that_mends_it(
    policy: str, fake: FakeServer, path: tuple[str, ...], value: Any, words: str
):
    *parents, name = path
    section = fake.config
    for parent in parents:
        section = section[parent]
    section[name] = value
    message = _refused(policy, fake)
    assert words in message and fake.url in message


@pytest.mark.parametrize(
    ("route", "answer", "words"),
    [
        ("/version", (200, {"version": "0.33.1"}), "vLLM 0.32.*, got {url} with 0.33.1. Install vllm==0.32.0"),
        ("/version", (404, {"detail": "Not Found"}), "route /version, got {url} (404). Is it a vLLM server?"),
        ("/version", (200, "<html>"), "must answer with JSON, got '<html>'"),
        ("/server_info", (404, {"detail": "Not Found"}), "Start it with the environment variable VLLM_SERVER_DEV_MODE=1"),
        ("/server_info", (401, {"error": "Unauthorized"}), "name that in engine.api_key_env"),
        ("/inference/v1/generate", (401, {"error": "Unauthorized"}), "name that in engine.api_key_env"),
        ("/inference/v1/generate", (404, {"detail": "Not Found"}), "Start it with --enable-scale-out"),
        ("/inference/v1/generate", (200, {}), "vocabulary of 20 ids, got {url}, which knows id 20"),
        ("/inference/v1/generate", (400, {}), "vocabulary of 20 ids, got {url}, which does not know id 19"),
        (
            "/inference/v1/generate",
            (500, {"error": {"message": "head_dim=16"}}),
            "refused POST /inference/v1/generate (500): head_dim",
        ),
        ("/health", (503, ""), "servers that are up, got {url}"),
    ],
    ids=[
        "another release",
        "no vLLM",
        "no JSON",
        "no development mode",
        "no key",
        "no key to sample",
        "no scale-out",
        "larger vocabulary",
        "smaller vocabulary",
        "unsupported model",
        "dead engine",
    ],
)
def test_a_server_that_answers_otherwise_is_refused_with_a_remedy(
    policy: str, fake: FakeServer, route: str, answer: Answer, words: str
):
    fake.answers[route] = answer
    assert words.format(url=fake.url) in _refused(policy, fake, start_timeout_s=0.3)


def test_a_server_that_is_down_is_refused_with_a_remedy(policy: str):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(ConfigurationError, match=rf"got {url}, not healthy within 0\.3 s\. Start it \(tools/serve_vllm\.py"):
        VLLMServerEngine(urls=[url], start_timeout_s=0.3).start(policy, eos_token_ids=(1,), probe_ids=PROBE, max_model_len=32)


def test_a_server_that_still_loads_is_waited_for(policy: str, fake: FakeServer):
    fake.answers["/health"] = (503, "")
    threading.Timer(0.3, lambda: fake.answers.pop("/health")).start()
    with _started(policy, fake):
        assert fake.routes().count("/health") > 1


def test_a_server_left_in_an_update_is_put_in_order_before_it_is_asked_to_generate(policy: str, fake: FakeServer):
    fake.paused = True
    with _started(policy, fake):
        routes = fake.routes()
    assert routes.index("/finish_weight_update") < routes.index("/resume") < routes.index("/inference/v1/generate")


def test_logprobs_without_temperature_are_found_by_asking(policy: str, fake: FakeServer, monkeypatch: pytest.MonkeyPatch):
    generate = fake._generate
    monkeypatch.setattr(
        fake, "_generate", lambda body: generate(body | {"sampling_params": body["sampling_params"] | {"temperature": 1.0}})
    )
    assert "logprobs_mode must be processed_logprobs" in _refused(policy, fake)


# ---------------------------------------------------------------- faults while it runs


def test_an_answer_that_does_not_come_is_an_error_that_names_server_and_time(fake: FakeServer):
    async def use(client: ServerClient) -> None:
        fake.gate.clear()
        connection = client._servers[0]
        with pytest.raises(EngineError, match=rf"{fake.url} must answer POST /inference/v1/generate within 0\.1 s"):
            body = {"token_ids": [1], "stream": True, "sampling_params": {"temperature": 1.0}}
            await connection.call("POST", "/inference/v1/generate", body, timeout_s=0.1)

    _run(use, fake)


def test_a_response_that_fails_ends_the_run_with_the_servers_reason(policy: str, fake: FakeServer):
    with _started(policy, fake) as engine:
        fake.answers["/inference/v1/generate"] = (200, 'data: {"error": {"message": "EngineCore died"}}\n\ndata: [DONE]\n\n')
        engine.submit([GenerationRequest(1, (3,), SamplingParams(max_new_tokens=4), 0)])
        with pytest.raises(EngineError, match=f"{fake.url} refused POST /inference/v1/generate.*EngineCore died"):
            engine.completions(10.0)


def test_a_dead_server_is_noticed_although_nobody_waits_for_a_token(policy: str, fake: FakeServer):
    with _started(policy, fake) as engine:
        fake.answers["/weight_info"] = (500, {"error": {"message": "EngineCore died"}})
        with pytest.raises(EngineError, match="EngineCore died"):
            engine.completions(10.0)


def test_stop_resumes_the_server(policy: str, fake: FakeServer):
    with _started(policy, fake):
        fake.paused = True
    assert not fake.paused


def test_after_a_failed_update_every_server_is_put_in_order_before_it_generates_again(
    policy: str, fake: FakeServer, other: FakeServer
):
    with _started(policy, fake, other) as engine:
        other.answers["/update_weights"] = (500, {"error": {"message": "boom"}})
        fake.calls.clear()
        engine.begin_update(7, {"weight": torch.ones(3)})
        with pytest.raises(WeightSyncError):
            engine.finish_update(10.0)
        routes = fake.routes()
    # vLLM ends a half-sent update by finishing it, and by a chunk that cannot be read where it refuses to finish.
    opened = routes.index("/update_weights")
    assert [route for route in routes[opened + 1 :] if route != "/weight_info"][:4] == [
        "/update_weight_version",
        "/finish_weight_update",
        "/update_weights",
        "/resume",
    ]


# ---------------------------------------------------------------- arguments, keys, forms of answers


def test_the_key_goes_to_the_server_and_into_no_message(policy: str, fake: FakeServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVER_KEY", "secret-1")
    fake.answers["/version"] = (500, {"error": {"message": "no"}})
    assert "secret-1" not in _refused(policy, fake, api_key_env="SERVER_KEY")
    assert fake.headers[-1]["Authorization"] == "Bearer secret-1"


def test_a_key_variable_that_is_not_set_is_refused(policy: str, fake: FakeServer):
    assert "engine.api_key_env must name" in _refused(policy, fake, api_key_env="NO_SUCH_VARIABLE")


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        ([], "at least one server"),
        ("http://127.0.0.1:8000", "must be a list"),
        (["127.0.0.1:8000"], "addresses of servers, got '127.0.0.1:8000'"),
        (["http://127.0.0.1:8000", "http://127.0.0.1:8000/"], "each server once"),
        (["http://me:word@host:8000"], "must not hold a user or a password, got one for host"),
    ],
    ids=["none", "text", "no scheme", "twice", "password"],
)
def test_bad_addresses_are_refused_when_the_engine_is_made(urls: Any, words: str):
    with pytest.raises(ConfigurationError) as caught:
        VLLMServerEngine(urls=urls)
    assert words in str(caught.value) and "word@" not in str(caught.value)


def test_servers_on_other_hosts_need_a_shared_folder(policy: str):
    engine = VLLMServerEngine(urls=["http://127.0.0.1:1", "http://10.0.0.7:1"])
    with pytest.raises(ConfigurationError, match=r"engine\.shared_folder must be given .*\['http://10\.0\.0\.7:1'\]"):
        engine.start(policy, eos_token_ids=(1,), probe_ids=PROBE, max_model_len=32)


def test_a_shared_folder_that_does_not_exist_is_refused(policy: str, fake: FakeServer):
    assert "engine.shared_folder must be a folder" in _refused(policy, fake, shared_folder="/no/such/folder")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"error": {"message": "boom", "code": 500}}', "boom"),
        ('{"error": "boom"}', "boom"),
        ('{"detail": "boom"}', "boom"),
        ("boom", "boom"),
        ("", "no reason given"),
        ('{"error": {"message": "Call failed: Worker failed with error \'no \'x\'\', please check the stack trace"}}', "no 'x'"),
    ],
)
def test_the_reason_is_found_in_every_form_of_an_error(body: str, reason: str):
    assert reason_of(body) == reason


def test_two_events_make_one_response():
    def event(tokens: list[int], spans: Any, reason: Any) -> str:
        content = [{"token_id": t, "logprob": -float(t), "top_logprobs": [{"token_id": t, "logprob": -float(t)}]} for t in tokens]
        choice = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans, "finish_reason": reason}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    spans = [{"version": "4", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 3}]
    sampled = sampled_from(events_of(event([9], None, None) + event([8, 7], spans, "stop") + "data: [DONE]\n\n"))
    assert (sampled.token_ids, sampled.logprobs) == ([9, 8, 7], [-9.0, -8.0, -7.0])
    assert (sampled.versions, sampled.finish_reason, sampled.top_logprobs) == ([4, 4, 5], "stop", {9: -9.0})


def test_a_response_without_an_end_is_refused():
    with pytest.raises(ValueError, match="finish_reason"):
        sampled_from([])


def test_neither_vllm_nor_the_http_library_is_imported_with_the_engine():
    code = "import sys, lit_asyncrl.generation.vllm_server; print([m for m in ('vllm', 'aiohttp') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "[]"
