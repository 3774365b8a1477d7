"""OpenTelemetry spans of requests, made when a request has ended from times that the engine measures in any case.

A request that generates is a SERVER span with the attributes of the semantic conventions for generative AI. Its
parent is the caller's span if the request has a `traceparent` header (W3C Trace Context). For each prompt it has
children:

| span | from | to |
|---|---|---|
| queued | the prompt reaches the engine | it first gets blocks of the cache |
| prefill | then | the first token |
| decode | then | the last token |
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

import paged
from paged.executors.requests.output import RequestOutput
from paged.executors.requests.sampling_params import SamplingParams
from paged.serving.http.gate import Generation, RequestLog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue
    from starlette.types import Scope

# Route -> value of gen_ai.operation.name. Other routes have no span.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
# Parameter -> its attribute below gen_ai.request.
_PARAMS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "n": "choice.count",
}
# How a request ends whose answer did not arrive as a whole; see `Gate`.
_FAILURES = ("error", "left", "shutdown", "slow")


class RequestSpans:
    """Writes the spans of requests to a provider. model_name: in the API, for requests that name no adapter."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider, self._model_name = provider, model_name
        self._tracer = provider.get_tracer("paged", paged.__version__)
        self._propagator = TraceContextTextMapPropagator()
        # It would log a malformed tracestate as the client wrote it, up to 64 KiB a request.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)

    @classmethod
    def to_endpoint(cls, endpoint: str, model_name: str) -> RequestSpans:
        """Return spans that a thread sends to a collector by OTLP over HTTP, such as http://localhost:4318/v1/traces.

        OpenTelemetry's own variables apply, such as OTEL_SERVICE_NAME and OTEL_TRACES_SAMPLER.
        """
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model_name)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def end(self, scope: Scope, log: RequestLog) -> None:
        """Write the spans of a request that has ended. scope: ASGI's, with the state that the gate makes."""
        operation = _OPERATIONS.get(log.path)
        if operation is None or log.method != "POST":
            return
        state = scope["state"]
        parent = self._propagator.extract(_trace_headers(scope))
        generation: Generation | None = state.get("generation")
        model = self._model_name
        if generation is not None:
            model = generation.model
        attributes = _attributes(operation, model, log, generation)
        began_ns = int(state["began"] * 1e9)
        name, kind = f"{operation} {model}", SpanKind.SERVER
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=began_ns)
        if log.status >= 500 or log.end in _FAILURES:  # an error of the client, 4xx, is none of a server's span
            error_type = str(log.status)
            if log.end in _FAILURES:
                error_type = log.end
            span.set_attribute("error.type", error_type)
            span.set_status(Status(StatusCode.ERROR, log.end))
        if span.is_recording() and generation is not None:
            to_ns = began_ns - int(state["arrived"] * 1e9)  # from seconds of perf_counter to the time of day
            for number, output in generation.outputs.items():
                self._phases(span, output, to_ns, generation.asked, generation.times[number])
        span.end(began_ns + int(log.seconds * 1e9))

    def _phases(self, request: Span, output: RequestOutput, to_ns: int, asked: float, ended: float) -> None:
        """Write the phases of a prompt, as far as it came. asked, ended: in seconds of perf_counter."""
        metrics = output.metrics
        moments = [asked]
        for seconds in (metrics.queued_s, metrics.first_token_s):
            if seconds is not None:
                moments.append(asked + seconds)
        if len(moments) == 3:
            moments.append(max(ended, moments[-1]))
        usage = {
            "queued": {},
            "prefill": {
                "gen_ai.usage.input_tokens": len(output.prompt),
                "gen_ai.usage.cache_read.input_tokens": output.num_cached_tokens,
            },
            "decode": {
                "gen_ai.usage.output_tokens": sum(part.mark.token_ids for part in output.outputs),
                "paged.preemptions": metrics.preemptions,
            },
        }
        context = set_span_in_context(request)
        for (name, attributes), begin, end in zip(usage.items(), moments, moments[1:], strict=False):
            span = self._tracer.start_span(name, context, attributes=attributes, start_time=to_ns + int(begin * 1e9))
            span.end(to_ns + int(end * 1e9))


def _attributes(
    operation: str, model: str, log: RequestLog, generation: Generation | None
) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "paged",
        "gen_ai.request.model": model,
        "gen_ai.response.id": log.id,
        "http.request.method": log.method,
        "url.path": log.path,
    }
    if log.status:
        attributes["http.response.status_code"] = log.status
    if generation is None:
        return attributes
    attributes |= _of_params(generation.params)
    reasons, preemptions, recomputed = [], 0, 0
    for output in generation.outputs.values():
        reasons += [part.finish_reason for part in output.outputs if part.finish_reason is not None]
        preemptions += output.metrics.preemptions
        recomputed += output.metrics.recomputed_tokens
    attributes |= {
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": log.prompt_tokens,
        "gen_ai.usage.output_tokens": log.new_tokens,
        "gen_ai.usage.cache_read.input_tokens": log.cached_tokens,
        "paged.preemptions": preemptions,
        "paged.recomputed_tokens": recomputed,
    }
    return attributes


def _of_params(params: SamplingParams) -> dict[str, Any]:
    """Return the attributes of parameters that differ from the defaults."""
    attributes: dict[str, Any] = {}
    default = SamplingParams()
    for name, attribute in _PARAMS.items():
        value = getattr(params, name)
        if value is not None and value != getattr(default, name):
            attributes[f"gen_ai.request.{attribute}"] = value
    if params.stop_strings:
        attributes["gen_ai.request.stop_sequences"] = params.stop_strings
    return attributes


def _trace_headers(scope: Scope) -> dict[str, str]:
    """Return the headers of W3C Trace Context in a request. Lines of tracestate are one list; two parents are none."""
    headers = Headers(scope=scope)
    parents, states = headers.getlist("traceparent"), headers.getlist("tracestate")
    if len(parents) != 1:
        return {}
    return {"traceparent": parents[0], "tracestate": ",".join(states)}
