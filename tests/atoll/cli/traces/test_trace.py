"""atoll trace: what a collector gets, what a file holds, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from held_ports import free_port
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as StatusCodes
from recorded import CANCELLED, DONE, FAILED, IN_PLACE, SUBMITTED_UNIX_S, TWICE, Recorded, recorded_events, recorded_job
from scripted_controller import ScriptedController
from shown_job import atoll
from typer.testing import CliRunner

from atoll.cli.traces.spans import trace_id
from atoll.v1 import jobs_pb2 as pb

JOB = "vit-3f9a"
TRACE = f"{trace_id(recorded_job()):032x}"


class Collector:
    """Takes spans by OTLP over HTTP and keeps what it got."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []
        self.answers = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                request = ExportTraceServiceRequest.FromString(body)
                collector.got.append((self.path, {k.lower(): v for k, v in self.headers.items()}, request))
                self.send_response(collector.answers)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Not to stderr."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = False
        self.thread = threading.Thread(target=self.server.serve_forever, name="collector")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for _, _, request in self.got
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    made.thread.start()
    yield made
    made.server.shutdown()
    made.thread.join(60)
    made.server.server_close()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "HEADERS", "TIMEOUT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)


def tell(controller: ScriptedController, told: list[Recorded], phase: pb.Phase.ValueType = pb.PHASE_DONE) -> None:
    job = controller.script.add(JOB, phase)
    job.submitted_unix_s = SUBMITTED_UNIX_S
    controller.script.events = recorded_events(told)


def test_a_collector_gets_the_job_as_one_trace(
    runner: CliRunner, controller: ScriptedController, collector: Collector
) -> None:
    """1. A job that was cancelled is sent. 2. Its spans have names, parents, times, attributes and moments. 3. Sent
    again, it is the same to the byte."""
    tell(controller, CANCELLED, pb.PHASE_CANCELLED)
    code, out, err = atoll(runner, controller, "trace", "vit", "--endpoint", collector.url)
    assert (code, err) == (2, "error: job vit: no job 'vit'. See `atoll jobs -a`\n")
    code, out, err = atoll(runner, controller, "trace", JOB, "--endpoint", f"{collector.url}/")
    assert (code, out, err) == (0, f"{collector.url}/v1/traces: 13 spans of {JOB}, trace {TRACE}\n", "")
    ((path, headers, request),) = collector.got
    assert (path, headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
    resource = request.resource_spans[0].resource.attributes
    assert [(each.key, each.value.string_value) for each in resource] == [("service.name", "atoll")]
    root, queued, run, starting, *_ = spans = collector.spans
    assert [span.name for span in (root, queued, run, starting)] == [f"job {JOB}", "queued", "run 1", "starting"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert (root.parent_span_id, queued.parent_span_id, starting.parent_span_id) == (b"", root.span_id, run.span_id)
    assert root.start_time_unix_nano == int(SUBMITTED_UNIX_S) * 10**9
    assert root.end_time_unix_nano - root.start_time_unix_nano == 18_450_000_000
    assert {each.key: each.value.int_value for each in run.attributes}["atoll.run"] == 1
    assert [(event.name, event.time_unix_nano) for event in starting.events] == [
        ("plan_issued", root.start_time_unix_nano + 20_000_000)
    ]
    assert {span.status.code for span in spans} == {StatusCodes.STATUS_CODE_UNSET}
    atoll(runner, controller, "trace", JOB, "--endpoint", collector.url)
    assert collector.got[1][2] == request


def test_a_failure_is_an_error(runner: CliRunner, controller: ScriptedController, collector: Collector) -> None:
    tell(controller, FAILED, pb.PHASE_FAILED)
    assert atoll(runner, controller, "trace", JOB, "--endpoint", collector.url)[0] == 0
    failed = {span.name: span.status for span in collector.spans if span.status.code == StatusCodes.STATUS_CODE_ERROR}
    assert list(failed) == [f"job {JOB}", "run 1", "run 2"]
    assert failed[f"job {JOB}"].message == TWICE


def test_opentelemetry_s_variables_count(
    runner: CliRunner, controller: ScriptedController, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint of all signals, that of traces before it, headers, the service's name."""
    tell(controller, DONE)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=lab")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    assert atoll(runner, controller, "trace", JOB)[0] == 0
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/tenant/traces")
    assert atoll(runner, controller, "trace", JOB)[0] == 0
    assert [path for path, _, _ in collector.got] == ["/v1/traces", "/tenant/traces"]
    assert collector.got[0][1]["x-tenant"] == "lab"
    assert "training" in str(collector.got[0][2].resource_spans[0].resource)


def test_json_needs_no_collector_and_says_the_same(
    runner: CliRunner, controller: ScriptedController, collector: Collector, tmp_path: Path
) -> None:
    tell(controller, DONE)
    code, out, _ = atoll(runner, controller, "trace", JOB, "--json")
    assert (code, out.count("\n")) == (0, 1)
    path = tmp_path / "trace.json"
    code, told, _ = atoll(runner, controller, "trace", JOB, "-o", str(path))
    assert (code, told) == (0, f"{path}: 12 spans of {JOB}, trace {TRACE}\n")
    assert path.read_text() == out
    assert collector.got == []
    atoll(runner, controller, "trace", JOB, "--endpoint", collector.url)
    ((_, _, request),) = collector.got
    document = json.loads(out)
    (sent,) = MessageToDict(request, use_integers_for_enums=True)["resourceSpans"]
    (written,) = document["resourceSpans"]
    assert written["resource"] == sent["resource"]
    spans = written["scopeSpans"][0]["spans"]
    assert [bytes.fromhex(span["spanId"]) for span in spans] == [span.span_id for span in collector.spans]
    assert [bytes.fromhex(s.get("parentSpanId", "")) for s in spans] == [s.parent_span_id for s in collector.spans]
    assert {span["traceId"] for span in spans} == {TRACE}
    ids = ("traceId", "spanId", "parentSpanId")
    for span, of_sent in zip(spans, sent["scopeSpans"][0]["spans"], strict=True):
        assert {k: v for k, v in span.items() if k not in ids} == {k: v for k, v in of_sent.items() if k not in ids}


def test_of_a_job_that_lives_what_is_over_is_sent(
    runner: CliRunner, controller: ScriptedController, collector: Collector
) -> None:
    """1. The spans that are open are left out, and named. 2. With --follow the command waits for its end, and sends
    everything."""
    tell(controller, IN_PLACE, pb.PHASE_RUNNING)
    code, _, err = atoll(runner, controller, "trace", JOB, "--endpoint", collector.url)
    assert (code, err) == (
        0,
        f"not over, so left out: job {JOB}, run 1, running. The same command adds them later, or --follow\n",
    )
    before = {span.span_id for span in collector.spans}
    asked = controller.script.calls.count("Events")

    def end() -> None:
        controller.wait_for(lambda script: script.calls.count("Events") > asked)
        controller.script.events = recorded_events(DONE)
        controller.script.change(JOB, phase=pb.PHASE_DONE)

    ends = threading.Thread(target=end, name="end of the job")
    ends.start()
    code, _, err = atoll(runner, controller, "trace", JOB, "--follow", "--endpoint", collector.url)
    ends.join(60)
    assert (code, err, len(collector.got)) == (0, "", 2)
    after = {span.span_id for span in collector.spans}
    assert before < after
    assert len(after) == 12


@pytest.mark.parametrize(("status", "says"), [(404, "404"), (400, "400")])
def test_a_collector_that_takes_none_is_told_of_in_one_line(
    runner: CliRunner, controller: ScriptedController, collector: Collector, status: int, says: str
) -> None:
    tell(controller, DONE)
    collector.answers = status
    code, out, err = atoll(runner, controller, "trace", JOB, "--endpoint", collector.url)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {collector.url}/v1/traces: ")
    assert says in err


def test_a_collector_that_is_not_there_is_told_of_in_one_line(
    runner: CliRunner, controller: ScriptedController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What listens there is a gRPC server: it ends the connection, which is tried again until the deadline."""
    tell(controller, DONE)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    code, out, err = atoll(runner, controller, "trace", JOB, "--endpoint", f"http://{controller.address}")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "Is a collector there? --endpoint names another, -o FILE needs none" in err
    nobody = f"http://127.0.0.1:{free_port()}"
    code, out, err = atoll(runner, controller, "trace", JOB, "--endpoint", nobody)
    assert (code, out) == (1, "")
    assert err == (
        f"error: {nobody}/v1/traces: [Errno 111] Connection refused. Is a collector there? --endpoint names "
        "another, -o FILE needs none\n"
    )


def test_bad_input_is_refused_before_anything_is_asked(
    runner: CliRunner, controller: ScriptedController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: str) -> str:
        code, out, err = atoll(runner, controller, "trace", JOB, *args)
        assert (code, out, err.count("\n"), controller.script.calls) == (2, "", 1, [])
        return err

    assert "--endpoint, --output and --json exclude each other" in refused("--json", "-o", "trace.json")
    assert "exclude each other" in refused("--json", "--endpoint", "http://localhost:4318")
    assert f"--output {tmp_path} is no file" in refused("-o", str(tmp_path))
    assert "is no file in a folder that is there" in refused("-o", str(tmp_path / "no-such" / "trace.json"))
    for wrong in ("localhost:4318", "grpc://localhost:4317", "http://", "http://[::1", "http://a:x", ""):
        assert f"--endpoint {wrong!r} is no URL of a collector" in refused("--endpoint", wrong)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nowhere")
    assert "OTEL_EXPORTER_OTLP_ENDPOINT 'nowhere' is no URL" in refused()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "here")
    assert "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT 'here' is no URL" in refused()


def test_what_cannot_be_written_is_said(runner: CliRunner, controller: ScriptedController) -> None:
    tell(controller, DONE)
    code, out, err = atoll(runner, controller, "trace", JOB, "-o", "/dev/full")
    assert (code, out) == (2, "")
    assert err == "error: --output /dev/full: No space left on device. Name a file that you may write\n"
