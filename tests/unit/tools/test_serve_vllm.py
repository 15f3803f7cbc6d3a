"""tools/serve_vllm.py: the key with which a server is asked for its first token."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from serve_vllm import answers, key_of


@pytest.mark.parametrize(
    ("arguments", "variable", "key"),
    [
        ([], None, None),
        ([], "from-environment", "from-environment"),
        (["--api-key", "given"], "from-environment", "given"),
        (["--seed", "1", "--api-key=given"], None, "given"),
        (["--api-key", "first", "second", "--seed", "1"], None, "first"),
    ],
)
def test_the_key_is_found_where_vllm_looks_for_it(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str | None, key: str | None
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    assert key_of(arguments) == key


@pytest.fixture
def guarded() -> Iterator[str]:
    """A server that answers with 200 to the right key alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer right" else 401)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("key", "answered"), [("right", True), ("wrong", False), (None, False)])
def test_the_key_goes_with_the_request(guarded: str, key: str | None, answered: bool) -> None:
    assert answers(guarded, {}, key) is answered
