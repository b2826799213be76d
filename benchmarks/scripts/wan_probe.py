"""Measures a link with one TCP stream: python wan_probe.py receive | python wan_probe.py send ADDRESS SECONDS

The receiver prints a line when it listens, and then {"rtt_ms": median of 11 round trips on the idle link, "mbit_s":
goodput after the first third of the time}."""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time

PORT = 5077
PINGS = 11
CHUNK = 1 << 18
DEADLINE_S = 20.0


def receive() -> None:
    with socket.create_server(("", PORT)) as server:
        server.settimeout(DEADLINE_S)
        print("listening", flush=True)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(DEADLINE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            before = time.perf_counter()
            stream.sendall(b"?")
            if stream.recv(1) != b"!":
                raise SystemExit("the sender went away")
            trips.append(time.perf_counter() - before)
        seconds = float(stream.recv(64).decode())
        stream.sendall(b"!")
        began = time.perf_counter()
        count, now, counted_from = 0, began, None
        while chunk := stream.recv(CHUNK):
            now = time.perf_counter()
            if counted_from is not None:
                count += len(chunk)
            elif now - began > seconds / 3:
                counted_from = now
    took = now - (counted_from if counted_from is not None else now)
    mbit_s = count * 8 / 1e6 / took if took > 0 else 0.0
    print(json.dumps({"rtt_ms": statistics.median(trips) * 1e3, "mbit_s": mbit_s}), flush=True)


def send(address: str, seconds: float) -> None:
    with socket.create_connection((address, PORT), timeout=DEADLINE_S) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            stream.recv(1)
            stream.sendall(b"!")
        stream.sendall(f"{seconds}".encode())
        stream.recv(1)
        ends, chunk = time.monotonic() + seconds, bytes(CHUNK)
        while time.monotonic() < ends:
            stream.sendall(chunk)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], float(sys.argv[3]))
