"""OpenTelemetry spans of requests, by the SDK's exporter in memory and by OTLP."""

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import paged
from paged.executors.requests.output import RequestMetrics
from paged.serving.command_line import cli
from paged.serving.command_line.serve import spans_to
from paged.serving.http.gate import Generation, RequestLog
from paged.serving.http.spans import RequestSpans
from tests.deadline import HANG_S
from tests.serving.served import Served, serving

PROMPT = "finch: drum; " * 5 + "otter: brass lantern; wren: kite; otter:"  # more than a block
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
Spans = Callable[[int], list[ReadableSpan]]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(chat_folder: Path, exporter: InMemorySpanExporter) -> Iterator[Served]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(chat_folder, spans=RequestSpans(provider, "recall")) as served:
        yield served


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Spans:
    """Wait for a number of spans, which are written behind the answer, and return them."""
    exporter.clear()

    def finished(number: int) -> list[ReadableSpan]:
        deadline = time.monotonic() + HANG_S
        while len(exporter.get_finished_spans()) < number and time.monotonic() < deadline:
            time.sleep(0.01)
        return list(exporter.get_finished_spans())

    return finished


def test_a_chat_continues_its_callers_trace(traced: Served, spans: Spans, exporter: InMemorySpanExporter) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 4}
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
    for _ in range(2):  # the second finds the prompt in the cache
        exporter.clear()
        answer = httpx.post(f"{traced.url}/v1/chat/completions", json=body, headers=headers)
        queued, prefill, decode, request = spans(4)
    usage = answer.json()["usage"]
    assert (request.name, request.kind) == ("chat recall", SpanKind.SERVER)
    assert request.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    attributes = dict(request.attributes or {})
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "paged",
        "gen_ai.request.model": "recall",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.id": answer.headers["x-request-id"],
        "gen_ai.response.model": "recall",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": cached,
        "paged.preemptions": 0,
        "paged.recomputed_tokens": 0,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
    }
    assert [span.name for span in (queued, prefill, decode)] == ["queued", "prefill", "decode"]
    assert {span.parent.span_id for span in (queued, prefill, decode) if span.parent} == {request.context.span_id}
    moments = [request.start_time, queued.start_time, prefill.start_time, decode.start_time, decode.end_time]
    moments.append(request.end_time)
    assert moments == sorted(moments, key=int)  # type: ignore[arg-type]
    assert (queued.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert dict(prefill.attributes or {})["gen_ai.usage.cache_read.input_tokens"] == cached


def test_every_prompt_has_its_phases(traced: Served, spans: Spans) -> None:
    body = {"prompt": [PROMPT, PROMPT], "max_tokens": 3, "n": 2, "temperature": 0}
    httpx.post(f"{traced.url}/v1/completions", json=body).raise_for_status()
    *phases, request = spans(7)
    assert sorted(span.name for span in phases) == sorted(["queued", "prefill", "decode"] * 2)
    attributes = dict(request.attributes or {})
    assert request.name == "text_completion recall"
    assert request.parent is None
    assert attributes["gen_ai.request.choice.count"] == 2
    assert len(attributes["gen_ai.response.finish_reasons"]) == 4  # type: ignore[arg-type]


def test_failures(traced: Served, spans: Spans) -> None:
    """An error of the client is none of the server's; a wrong traceparent begins a trace."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 0}
    headers = {"traceparent": "00-wrong"}
    answer = httpx.post(f"{traced.url}/v1/completions", json=body, headers=headers)
    httpx.get(f"{traced.url}/v1/models")
    (refused,) = spans(1)
    assert (answer.status_code, refused.parent) == (400, None)
    assert refused.status.status_code == StatusCode.UNSET
    assert dict(refused.attributes or {})["http.response.status_code"] == 400
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{traced.url}/v1/completions", json=body) as streamed:
        next(streamed.iter_bytes())
    *_, left = spans(5)
    assert left.status.status_code == StatusCode.ERROR
    assert dict(left.attributes or {})["error.type"] == "left"


PARENT = ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")


@pytest.mark.parametrize(
    ("headers", "parent_id", "state"),
    [
        ([PARENT, ("tracestate", "a=1"), ("tracestate", "b=2")], PARENT_ID, {"a": "1", "b": "2"}),
        ([PARENT, ("tracestate", "\x1b[31m==")], PARENT_ID, {}),
        ([PARENT, ("traceparent", f"00-{TRACE_ID[::-1]}-{PARENT_ID}-01")], None, {}),
        ([("traceparent", f"ff-{TRACE_ID}-{PARENT_ID}-01")], None, {}),
        ([("traceparent", f"00-{'0' * 32}-{PARENT_ID}-01"), ("tracestate", "a=1")], None, {}),
        ([("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00")], "not sampled", {}),
    ],
)
def test_headers_of_trace_context(
    headers: list[tuple[str, str]],
    parent_id: str | None,
    state: dict[str, str],
    exporter: InMemorySpanExporter,
    spans: Spans,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two parents, or a malformed one, begin a trace; the caller's decision to sample is kept; no text is logged."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    scope = {"headers": [(name.encode(), text.encode()) for name, text in headers]}
    scope |= {"type": "http", "state": {"began": 1e9, "arrived": 0.0}}  # type: ignore[dict-item]
    RequestSpans(provider, "recall").end(scope, RequestLog("a", "POST", "/v1/messages", 200))
    assert not caplog.records
    if parent_id == "not sampled":
        assert not exporter.get_finished_spans()
        return
    (request,) = spans(1)
    assert request.context is not None
    parent = None
    if request.parent is not None:
        parent = f"{request.parent.span_id:016x}"
    assert (parent, dict(request.context.trace_state)) == (parent_id, state)


def test_preemptions_are_counted(exporter: InMemorySpanExporter, spans: Spans) -> None:
    """Of a request that ended in the queue, too, which has that phase alone."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    outputs = {}
    for number, metrics in enumerate((RequestMetrics(0.1, 0.3, None, 2, 33), RequestMetrics(0.2, preemptions=1))):
        outputs[number] = paged.RequestOutput(f"request-{number}", (1, 2, 3), [], metrics=metrics)
    generation = Generation("an adapter", paged.SamplingParams(), 50.0, outputs, {0: 51.0, 1: 51.0})
    log = RequestLog("a", "POST", "/v1/messages", 200, seconds=2.0)
    scope = {"type": "http", "headers": [], "state": {"began": 1e9, "arrived": 49.5, "generation": generation}}
    RequestSpans(provider, "recall").end(scope, log)
    *phases, request = spans(5)
    attributes = dict(request.attributes or {})
    assert (attributes["paged.preemptions"], attributes["paged.recomputed_tokens"]) == (3, 33)
    assert (request.name, attributes["gen_ai.request.model"]) == ("chat an adapter", "an adapter")
    assert [span.name for span in phases] == ["queued", "prefill", "decode", "queued"]
    seconds = [(span.start_time or 0) / 1e9 - 1e9 for span in phases]
    assert seconds == pytest.approx([0.5, 0.6, 0.8, 0.5], abs=1e-6)


def test_spans_go_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        spans = spans_to(f"http://127.0.0.1:{collector.server_port}/v1/traces", "recall")
        state = {"began": time.time(), "arrived": time.perf_counter()}
        spans.end({"type": "http", "headers": [], "state": state}, RequestLog("a", "POST", "/v1/messages", 503))
        spans.close()
        collector.shutdown()
        thread.join(HANG_S)
    ((path, body),) = bodies
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert path == "/v1/traces"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["chat recall"]


@pytest.mark.thorough
def test_nothing_is_imported_without_the_option() -> None:
    """FastAPI imports OpenTelemetry's interface where it is installed."""
    unused = ("opentelemetry.sdk", "opentelemetry.exporter", "paged.serving.http.spans")
    code = f"import sys, paged.serving.http.app; assert not {{*{unused}}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "paged.serving.http.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(paged.UnsupportedError, match=r"needs opentelemetry.trace: pip install 'paged\[otel\]'"):
        spans_to("http://localhost:4318/v1/traces", "recall")


def test_an_endpoint_without_a_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "--otlp-traces-endpoint", "localhost:4318"])
    assert "'localhost:4318', expected a URL" in capsys.readouterr().err
