"""Requests of other sites' pages: by names that were made to mean this machine, and across origins."""

import http.client
import random
from pathlib import Path
from typing import Any

import pytest

from paged import InvalidInputError
from paged.serving.http.config import ServeConfig
from paged.serving.http.errors import ApiError
from paged.serving.http.hosts import HostRules
from tests.serving.served import Served, serving

HOME = ["localhost", "LocalHost", "localhost.", "app.localhost", "127.0.0.1", "127.9.8.7", "[::1]", "[0:0:0:0:0:0:0:1]"]
OTHERS = ["evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "notlocalhost", "10.0.0.1", "0.0.0.0", "[::2]"]
OTHERS += ["", "localhost,evil.example", "localhost evil.example", "evil@localhost", "[::1", "::1", "a:b:c", "127.1"]


def status_of(served: Served, method: str, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
    body = b'{"prompt": "kite"}' if method == "POST" else None
    connection.request(method, path, body, {"content-type": "application/json", **headers})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, text


def refusal(rules: HostRules, address: str = "127.0.0.1", **headers: str) -> int | None:
    """Status of the answer to a request that is refused, None if it is not."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    try:
        rules.check({"type": "http", "server": (address, 8000), "headers": pairs})
    except ApiError as error:
        return error.status
    return None


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/"), ("GET", "/metrics"), ("GET", "/health"), ("POST", "/tokenize")]
)
def test_other_sites_neither_read_nor_post(served: Served, method: str, path: str) -> None:
    assert status_of(served, method, path)[0] == 200
    port = served.port
    for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert status_of(served, method, path, host=host, origin=f"http://{host}")[0] == 200
    for host in ("evil.example", f"evil.example:{port}"):
        status, text = status_of(served, method, path, host=host)
        assert status == 421
        assert b"--allowed-hosts" in text
    for origin in ("https://evil.example", f"http://evil.example:{port}", "null", "file://", "localhost"):
        assert status_of(served, method, path, origin=origin)[0] == 403
    assert status_of(served, "OPTIONS", path, origin="https://evil.example")[0] == 403


def test_what_the_loopback_allows() -> None:
    rules = HostRules(ServeConfig())
    for host in HOME:
        for text in (host, f"{host}:8000", f"{host}:"):
            assert refusal(rules, host=text) is None, text
            assert refusal(rules, origin=f"http://{text}") is None, text
    for host in OTHERS:
        for text in (host, f"{host}:8000"):
            assert refusal(rules, host=text) == 421, text
            assert refusal(rules, origin=f"http://{text}") == 403, text
    assert refusal(rules) is None
    choices = random.Random(4)
    letters = "abcl0127.:[]-localhost"
    for _ in range(2000):
        text = "".join(choices.choices(letters, k=choices.randrange(12)))
        is_home = refusal(rules, host=text) is None
        assert is_home == (refusal(rules, origin=f"https://{text}") is None)
        assert not is_home or "localhost" in text or text.startswith(("127.", "[::1]"))


def test_allowed_hosts() -> None:
    rules = HostRules(ServeConfig(allowed_hosts="API.example, [2001:DB8::1], proxy.example:8443,fe80::1"))
    for host in (*HOME, "api.example", "Api.Example.:80", "[2001:db8:0::1]:9", "proxy.example:8443", "[fe80::1]"):
        assert refusal(rules, host=host) is None, host
        assert refusal(rules, origin=f"https://{host}") is None, host
    for host in (*OTHERS, "proxy.example", "proxy.example:443", "www.api.example", "[2001:db8::2]"):
        assert refusal(rules, host=host) == 421, host
        assert refusal(rules, origin=f"https://{host}") == 403, host
    assert refusal(rules, "10.0.0.1", host="10.0.0.1:8000") is None  # where the connection has come in
    for host in ("http://a", "a/b", "a b", "a:b", "[::1"):
        with pytest.raises(InvalidInputError, match="--allowed-hosts"):
            HostRules(ServeConfig(allowed_hosts=f"x.example,{host}"))


def test_servers_for_other_machines_are_checked_if_hosts_are_named(chat_folder: Path) -> None:
    for address in ("0.0.0.0", "::", "192.168.1.5", "gpu.example"):
        assert refusal(HostRules(ServeConfig(host=address)), host="any.example", origin="https://any.example") is None
        rules = HostRules(ServeConfig(host=address, allowed_hosts="a.example"))
        assert refusal(rules, host="b.example") == 421
        assert refusal(rules, host=address if ":" not in address else f"[{address}]") is None
    assert refusal(HostRules(ServeConfig(allowed_hosts="a.example,*")), host="any.example") is None
    options: dict[str, Any] = {"host": "0.0.0.0", "allowed_hosts": "a.example"}
    with serving(chat_folder, **options) as served:
        assert status_of(served, "GET", "/version", host="a.example")[0] == 200
        assert status_of(served, "GET", "/version", host="b.example")[0] == 421
