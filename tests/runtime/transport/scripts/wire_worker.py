"""A rank of a run, told on stdin what to do: connect ENDPOINT..., send KIND BYTES COUNT, goodbye, close, leave."""

from __future__ import annotations

import json
import os
import sys

from atoll.agent.runtime.transport.endpoint import Endpoint
from atoll.agent.runtime.transport.frames import Frame
from atoll.agent.runtime.transport.keys import Keys
from atoll.agent.runtime.transport.limits import Limits
from atoll.agent.runtime.transport.topology import members_of
from atoll.agent.runtime.transport.transport import Transport
from atoll.errors import AtollError

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from wire_rig import Out, Source


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    told = json.loads(sys.argv[1])
    keys = None
    if told["secret"]:
        public = {rank: bytes.fromhex(key) for rank, key in enumerate(told["public"])}
        keys = Keys(bytes.fromhex(told["secret"]), public[told["me"]], public)
    transport = Transport(
        told["me"],
        members_of(told["nodes"], told["islands"]),
        run=told["run"],
        keys=keys,
        host="127.0.0.1",
        deadline_s=told.get("deadline_s", 30.0),
        limits=Limits(**told.get("limits", {})),
    )
    source = Source()

    def deliver(frame: Frame) -> str | None:
        say(f"heard {frame.kind.name} {frame.origin} {len(frame.payload)}")
        return None

    say(str(transport.bind()))
    for line in sys.stdin:
        match line.split():
            case ["connect", *endpoints]:
                try:
                    transport.connect(
                        [Endpoint.parse(one.replace("|", " ")) for one in endpoints],
                        source,
                        deliver,
                        lambda reason: say(f"lost {reason}"),
                    )
                    say("connected")
                except AtollError as error:
                    say(f"{type(error).__name__} {error}")
            case ["send", kind, size, count]:
                payload = os.urandom(int(size))
                source.put(*(Out(int(kind), 1, tensor, tensor, 1, payload) for tensor in range(int(count))))
            case ["goodbye"]:
                transport.goodbye()
            case ["close"]:
                transport.close()
                say("closed")
            case ["leave"]:  # as a script does that ends without closing anything
                sys.exit(0)
            case other:
                raise ValueError(other)


if __name__ == "__main__":
    main()
