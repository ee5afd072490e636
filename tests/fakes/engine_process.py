"""`python -m tests.fakes.engine_process ENDPOINT SESSION SECONDS`: an engine of its own process, without vLLM and torch.

It takes two slots, says `drafted` after the first step, then steps every 20 ms for SECONDS, says how many steps were answered
and ends, without BYE, when the worker wants it to move or SECONDS are over. With 0 seconds it only falls silent.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field

from farspark.clock import Deadline
from farspark.errors import TransportError
from farspark.transport import Channel, connect
from farspark.wire import codec
from farspark.wire.layout import EntryFlag, FrameStatus, Operation
from farspark.wire.messages import Entry, Header, Hello

SLOTS, CONTEXT = 2, 16


@dataclass
class Engine:
    channel: Channel
    session: int
    sequence: int = 0
    at: int = 0
    row_bytes: int = field(default=0, init=False)

    def ask(self, operation: Operation, payload: bytes = b"") -> tuple[Header, memoryview]:
        self.sequence += 1
        frame = codec.encode_frame(Header(operation, self.session, self.sequence, 0), payload)
        self.channel.send([frame], Deadline.after(10))
        return codec.decode_frame(self.channel.recv(Deadline.after(10)))

    def hello(self) -> None:
        """As the worker says that it must be."""
        drafter = json.loads(bytes(self.ask(Operation.STATS)[1]))["drafter"]
        self.row_bytes = drafter["row_bytes"]
        hello = Hello(
            engine=f"engine-{self.session}",
            identity=bytes.fromhex(drafter["identity"]),
            markov_identity=bytes(32),
            row_bytes=self.row_bytes,
            taps=drafter["taps"],
            hidden_size=drafter["hidden_size"],
            dtype=1,
            ring=CONTEXT,
            context=CONTEXT,
            num_drafts=drafter["num_drafts"],
            slots=SLOTS,
            vocab_size=drafter["vocab_size"],
        )
        header, payload = self.ask(Operation.HELLO, codec.encode_hello(hello))
        assert header.status == FrameStatus.OK, codec.decode_refusal(Operation.HELLO, payload)

    def step(self) -> Header:
        self.sequence += 1
        flags = EntryFlag.NEED_DRAFT if self.at else EntryFlag.NEED_DRAFT | EntryFlag.NEW_GEN
        entries = [Entry(slot, 1, self.at, 1, 5, self.at + 1, flags) for slot in range(SLOTS)]
        self.at += 1
        rows = bytes(SLOTS * self.row_bytes)
        self.channel.send(
            [codec.encode_step_head(self.session, self.sequence, self.at, entries, len(rows)), rows], Deadline.after(10)
        )
        header, payload = codec.decode_frame(self.channel.recv(Deadline.after(30)))
        assert header.status == FrameStatus.OK, codec.decode_message(payload)
        reply = codec.decode_step_reply(payload)
        assert all(entry.status.has_drafts for entry in reply.entries)
        return header


def main(endpoint: str, session: str, seconds: str) -> None:
    engine = Engine(connect(endpoint, Deadline.after(10)), int(session))
    engine.hello()
    engine.step()
    print("drafted", flush=True)
    if not float(seconds):
        time.sleep(600)
    why = "time is over"
    end = Deadline.after(float(seconds))
    while not end.has_passed():
        try:
            if engine.step().is_draining:
                why = "told to move"
                break
        except TransportError as error:
            why = str(error)
            break
        time.sleep(0.02)
    print(f"{engine.at} steps, {why}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
