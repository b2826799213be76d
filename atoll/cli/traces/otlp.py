"""Exports a job's spans to a collector by OTLP over HTTP, or as OTLP JSON. No other module imports OpenTelemetry."""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from atoll.cli.render import terminal
from atoll.cli.traces.spans import JobSpan, span_id, trace_id
from atoll.errors import AtollError, BadInput
from atoll.v1 import jobs_pb2 as pb

_DEFAULT: Final = "http://localhost:4318"
_LIBRARY: Final = logging.getLogger("opentelemetry")
_IDS: Final = ("traceId", "spanId", "parentSpanId")


class CollectorFailed(AtollError):
    """A collector did not answer, or took no spans."""


def traces_url(endpoint: str | None) -> str:
    """Return the URL of spans: under `endpoint`, else that of OpenTelemetry's variables. Raises BadInput."""
    if endpoint is None and (url := os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT)):
        return _checked(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, url)
    if endpoint is None:
        base = _checked(OTEL_EXPORTER_OTLP_ENDPOINT, os.environ.get(OTEL_EXPORTER_OTLP_ENDPOINT) or _DEFAULT)
    else:
        base = _checked("--endpoint", endpoint)
    return f"{base.removesuffix('/')}/v1/traces"


def _checked(name: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket or a port
        good = False
    if not good:
        raise BadInput(f"{name} {url!r} is no URL of a collector. Give one like {_DEFAULT}")
    return url


def send(job: pb.Job, spans: Sequence[JobSpan], url: str) -> None:
    """Export the spans; headers, certificates and deadline (10 s) as OpenTelemetry's variables say. Raises
    CollectorFailed."""
    exporter, message = OTLPSpanExporter(endpoint=url), _FirstMessage()
    _LIBRARY.addHandler(message)
    propagated, _LIBRARY.propagate = _LIBRARY.propagate, False
    try:
        sent = exporter.export(_readable(job, spans))
    finally:
        exporter.shutdown()
        _LIBRARY.propagate = propagated
        _LIBRARY.removeHandler(message)
    if sent is not SpanExportResult.SUCCESS:
        why = terminal.shortened(message.first or "it did not say why", 300)
        raise CollectorFailed(f"{url}: {why}. Is a collector there? --endpoint names another, -o FILE needs none")


def as_otlp_json(job: pb.Job, spans: Sequence[JobSpan]) -> dict[str, Any]:
    """Return the document that a collector accepts as JSON, and its file receiver reads as a line."""
    document: dict[str, Any] = MessageToDict(encode_spans(_readable(job, spans)), use_integers_for_enums=True)
    for of_resource in document.get("resourceSpans", []):
        for of_scope in of_resource["scopeSpans"]:
            for span in of_scope["spans"]:  # ids are hexadecimal in OTLP, unlike other bytes in protobuf's JSON
                span.update({name: base64.b64decode(span[name]).hex() for name in _IDS if name in span})
    return document


def _readable(job: pb.Job, spans: Sequence[JobSpan]) -> list[ReadableSpan]:
    resource = Resource({SERVICE_NAME: "atoll"}).merge(OTELResourceDetector().detect())
    scope, trace = InstrumentationScope("atoll"), trace_id(job)

    def context(key: str) -> SpanContext:
        return SpanContext(trace, span_id(job, key), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    return [
        ReadableSpan(
            span.name,
            context(span.key),
            context(span.parent) if span.parent else None,
            resource,
            span.attributes,
            [Event(moment.name, moment.attributes, _ns(moment.unix_s)) for moment in span.moments],
            status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(),
            start_time=_ns(span.start_unix_s),
            end_time=_ns(span.end_unix_s or span.start_unix_s),
            instrumentation_scope=scope,
        )
        for span in spans
    ]


def _ns(unix_s: float) -> int:
    """Whole microseconds: a float of today's seconds has no more."""
    return round(unix_s * 1e6) * 1000


class _FirstMessage(logging.Handler):
    """Keep the first message of the library in place of printing it: the cause, before the library retries."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first = ""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().rstrip(".")
        if str(record.msg).startswith("Transient error %s") and isinstance(record.args, tuple):
            text = str(record.args[0]).rpartition(": ")[2].strip("'\")")  # what is behind all that wraps it
        self.first = self.first or text
