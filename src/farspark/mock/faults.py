"""What can go wrong with an answer: the table of faults, and answers with a fault in them."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

from farspark.errors import ConfigError
from farspark.mock.arrays import array
from farspark.wire import codec, layout
from farspark.wire.layout import FrameStatus, Operation, StepFlag
from farspark.wire.messages import EntryReply, Judgement, SampledDrafts, StepReply

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to fail. `argument` names what follows the colon; empty: nothing does."""

    name: str
    argument: str
    sentence: str
    default: str = ""  # the argument where none is given; empty: it must be


KINDS: Final = (
    Kind("delay", "MS", "the answer comes MS milliseconds later"),
    Kind("silence", "", "no answer, now or later"),
    Kind("late", "", "the answer comes only after the next request"),
    Kind("half", "", "half of the frame comes, then nothing more on this connection"),
    Kind("close", "BYTES", "the connection is closed after BYTES bytes of the answer, its length included", "0"),
    Kind("garbage", "", "bytes that are no frame, with a length above every limit"),
    Kind("magic", "", "a whole frame that does not start with the magic"),
    Kind("lengths", "", "the header announces one payload byte too many"),
    Kind("frame-status", "STATUS", "a frame status and a sentence in place of the answer; wire.md has the numbers"),
    Kind("version", "N", "the answer is of protocol version N", "99"),
    Kind("session", "", "the answer is of another session"),
    Kind("sequence", "", "the answer is to a request that was never sent"),
    Kind("operation", "", "the answer is to another operation"),
    Kind("step-id", "", "the answer is to the step before"),
    Kind("counts", "", "the answer has one request too many"),
    Kind("drafts", "", "the answer has one draft per request too few"),
    Kind("slot", "", "the first answer is for another slot"),
    Kind("generation", "", "the first answer is for another generation of its slot"),
    Kind("window", "ROWS", "the first answer reports a window of ROWS rows", str(2**32 - 1)),
    Kind("request-status", "STATUS", "every request has this status, its drafts stay; wire.md has the numbers"),
    Kind("id", "ID", "the first draft is ID: a number, V for the vocabulary's size, or V+1"),
    Kind("confidence", "VALUE", "the first confidence is VALUE", "nan"),
    Kind("q", "VALUE", "the first probability of the first sampled draft is VALUE: nan, below 0, or above 1", "nan"),
    Kind("support", "ID", "the last id that the first sampled draft could have been is ID: a number, V or V+1", "V"),
    Kind("unsampled", "", "the drafts that were drawn are said to be greedy"),
    Kind("undrawn", "", "the first sampled draft is the least probable id of its support"),
    Kind("no-probabilities", "", "a sampled answer without its probabilities"),
    Kind("routing", "VALUE", "the first routing margin of a judgement is VALUE: nan, below 0, or inf", "nan"),
    Kind("no-routing", "", "a judgement without its routing margins"),
)
_KINDS = {kind.name: kind for kind in KINDS}
# These spoil what only the answer to a STEP has.
STEP_ONLY = frozenset(
    (
        *("step-id", "counts", "drafts", "slot", "generation", "window", "request-status", "id", "confidence"),
        *("q", "support", "unsampled", "undrawn", "no-probabilities"),
    )
)
JUDGE_ONLY = frozenset(("routing", "no-routing"))


@dataclass(frozen=True, slots=True)
class Fault:
    """A parsed `--fault`. `number` is the argument; 0 where the kind has none."""

    kind: str
    number: float = 0

    @classmethod
    def parse(cls, text: str, vocab_size: int) -> Fault:
        """Raises ConfigError with the kinds there are, or what the argument must be."""
        name, colon, argument = text.partition(":")
        kind = _KINDS.get(name)
        if kind is None:
            raise ConfigError(f"--fault {text!r}: unknown; expected one of {', '.join(_KINDS)}")
        if not kind.argument:
            if colon:
                raise ConfigError(f"--fault {text!r}: {name} takes no argument")
            return cls(name)
        argument = argument or kind.default
        if not argument:
            raise ConfigError(f"--fault {text!r}: expected {name}:{kind.argument}")
        return cls(name, _argument(text, name, argument, vocab_size))


def _argument(text: str, name: str, argument: str, vocab_size: int) -> float:
    if name in ("confidence", "q", "routing"):
        try:
            value = float(argument)
            # As the wire holds it; a finite number that float32 does not reach is an OverflowError.
            struct.pack("<f", value)
        except (ValueError, OverflowError):
            raise ConfigError(f"--fault {text!r}: expected a number, nan or inf") from None
        return value
    named = {"V": vocab_size, "V+1": vocab_size + 1} if name in ("id", "support") else {}
    low, high = {
        "delay": (0, 3_600_000),
        "close": (0, layout.MAX_REPLY_BYTES),
        "id": (-(2**31), 2**31 - 1),
        "support": (-(2**31), 2**31 - 1),
        "window": (0, 2**32 - 1),
    }.get(name, (0, 2**16 - 1))
    try:
        number = named[argument] if argument in named else int(argument)
    except ValueError:
        number = high + 1
    if not low <= number <= high:
        raise ConfigError(f"--fault {text!r}: expected {name}:{_KINDS[name].argument} of {low} to {high}")
    return number


def spoiled(fault: Fault, frame: memoryview) -> bytes:
    """The answer `frame` with `fault` in it: a frame of its own, to be sent whole.

    Faults of time and of the connection, and those that cut a frame, are the relay's.
    """
    header, payload = codec.decode_frame(frame)
    number = int(fault.number) if math.isfinite(fault.number) else 0
    match fault.kind:
        case "magic":
            return b"HTTP" + frame[4:]
        case "lengths":
            return bytes(frame[:28]) + _LENGTH.pack(len(payload) + 1) + payload
        case "frame-status":
            header = header._replace(status=number)
            return codec.encode_frame(header, codec.encode_message("the mock worker was told to refuse"))
        case "version":
            header = header._replace(version=number)
        case "session":
            header = header._replace(session=header.session ^ 1)
        case "sequence":
            header = header._replace(sequence=header.sequence + 1000)
        case "operation":
            header = header._replace(
                operation=Operation.PING if header.operation != Operation.PING else Operation.STATS
            )
        case "routing" | "no-routing":
            if header.operation != Operation.JUDGE or header.status != FrameStatus.OK:
                return bytes(frame)
            judgement = _spoiled_judgement(fault, codec.decode_judgement(payload))
            return codec.encode_frame(header, codec.encode_judgement(judgement))
        case _:
            if header.operation != Operation.STEP or header.status != FrameStatus.OK:
                return bytes(frame)  # a refusal has nothing that could be spoiled so
            reply = _spoiled_step(fault, number, codec.decode_step_reply(payload))
            return codec.encode_frame(header, codec.encode_step_reply(reply))
    return codec.encode_frame(header, bytes(payload))


def _spoiled_step(fault: Fault, number: int, reply: StepReply) -> StepReply:
    match fault.kind:
        case "step-id":
            return reply._replace(step_id=(reply.step_id - 1) % 2**64)
        case "counts":
            return _resized(
                reply, [*reply.entries, EntryReply(0xFFFF, 1, 0, layout.RequestStatus.NOT_NEEDED)], reply.num_drafts
            )
        case "drafts":
            return _resized(reply, reply.entries, reply.num_drafts - 1)
        case "request-status":
            # A status that is none of ours is what a worker of another build would send.
            status = cast(layout.RequestStatus, number)
            return reply._replace(entries=[entry._replace(status=status) for entry in reply.entries])
        case "id":
            return reply._replace(tokens=_with_first(reply.tokens, "i", number))
        case "confidence":
            return reply._replace(confidences=_with_first(reply.confidences, "f", fault.number))
        case "no-probabilities":
            return reply._replace(sampled=None, flags=int(reply.flags) & ~int(StepFlag.SAMPLED))
        case "q" | "support" | "unsampled" | "undrawn":
            return reply if reply.sampled is None else _spoiled_draw(fault, number, reply, reply.sampled)
    if not reply.entries:
        return reply
    first = reply.entries[0]
    changed = {
        "slot": first._replace(slot=first.slot ^ 1),
        "generation": first._replace(generation=first.generation ^ 1),
        "window": first._replace(window_rows=number),
    }[fault.kind]
    return reply._replace(entries=[changed, *reply.entries[1:]])


def _spoiled_draw(fault: Fault, number: int, reply: StepReply, sampled: SampledDrafts) -> StepReply:
    """With a fault in what the first request that was sampled drew its first draft from."""
    mask = sampled.mask.tolist()
    if 1 not in mask:
        return reply
    draft = mask.index(1) * reply.num_drafts
    first, last = draft * layout.SUPPORT_IDS, (draft + 1) * layout.SUPPORT_IDS - 1
    match fault.kind:
        case "unsampled":
            return reply._replace(sampled=sampled._replace(mask=array("i", [0] * len(mask))))
        case "q":
            return reply._replace(sampled=sampled._replace(q=_with_value(sampled.q, "f", first, fault.number)))
        case "undrawn":
            return reply._replace(tokens=_with_value(reply.tokens, "i", draft, sampled.support[last]))
    return reply._replace(sampled=sampled._replace(support=_with_value(sampled.support, "i", last, number)))


def _spoiled_judgement(fault: Fault, judgement: Judgement) -> Judgement:
    if judgement.routing is None:
        return judgement
    routing = _with_first(judgement.routing, "f", fault.number) if fault.kind == "routing" else None
    return judgement._replace(routing=routing)


def _resized(reply: StepReply, entries: Sequence[EntryReply], num_drafts: int) -> StepReply:
    """The reply with other counts, zeros in its arrays; in itself a reply as it should be."""
    return reply._replace(
        entries=entries,
        num_drafts=num_drafts,
        tokens=array("i", [0] * (len(entries) * num_drafts)),
        confidences=array("f", [0.0] * (len(entries) * num_drafts)),
        margins=None,
        flags=StepFlag(0),
        sampled=None,
    )


def _with_first(array: memoryview, kind: str, value: float) -> memoryview:
    return _with_value(array, kind, 0, value) if len(array) else array


def _with_value(array: memoryview, kind: str, at: int, value: float) -> memoryview:
    changed = bytearray(array.cast("B"))
    struct.pack_into(f"<{kind}", changed, 4 * at, value)
    return cast(memoryview, memoryview(changed).cast(kind))  # type: ignore[call-overload]
