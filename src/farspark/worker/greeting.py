"""What a worker says to HELLO: whether an engine can be served, why not, and what it is offered. No socket, no session."""

from __future__ import annotations

from farspark.wire import codec, layout
from farspark.wire.layout import FrameStatus, HelloFlag, StepFlag
from farspark.wire.messages import Hello, Welcome
from farspark.worker.batch import DrafterInfo

_NO_CHECK = bytes(layout.IDENTITY_BYTES)


def judge_hello(info: DrafterInfo, session: int, hello: Hello) -> tuple[FrameStatus, str]:
    """Whether this engine can be served; everything that differs, with both values and what to do about it."""
    if hello.identity != info.identity:
        return FrameStatus.IDENTITY, _differs(
            "drafter identity",
            hello.identity.hex(),
            info.identity.hex(),
            "serve the checkpoint that the engine names",
        )
    if hello.markov_identity not in (_NO_CHECK, info.markov_identity):
        return FrameStatus.MARKOV_IDENTITY, _differs(
            "Markov identity", hello.markov_identity.hex(), info.markov_identity.hex(), "use equal Markov heads"
        )
    differences = [
        _differs(what, ours, theirs, remedy)
        for what, ours, theirs, remedy in (
            ("dtype", hello.dtype, int(layout.Dtype.BF16), "rows are sent as bf16"),
            ("taps", hello.taps, info.taps, "the target must tap the layers that the drafter was trained on"),
            ("hidden size", hello.hidden_size, info.hidden_size, "the drafter is of another target"),
            ("row bytes", hello.row_bytes, info.row_bytes, "the drafter is of another target"),
            ("vocabulary", hello.vocab_size, info.vocab_size, "the drafter is of another target"),
            ("N", hello.num_drafts, info.num_drafts, f"start the worker with --drafts {hello.num_drafts}"),
        )
        if ours != theirs
    ]
    if not 1 <= hello.slots <= info.slots:
        differences.append(_differs("slots", hello.slots, info.slots, f"start the worker with --slots {hello.slots}"))
    if hello.flags & HelloFlag.SAMPLED:
        differences += _why_no_samples(info, hello)
    if hello.context < 1:
        differences.append(_differs("context", hello.context, info.context, "ask for at least 1 position"))
    if not session:
        differences.append("session 0 is not a session: the engine makes a random one")
    if differences:
        return FrameStatus.CONFIG, "; ".join(differences)
    if hello.context > info.context:
        return FrameStatus.OK, f"context: engine {hello.context}, worker {info.context}; the smaller one is used"
    return FrameStatus.OK, ""


def granted_context(info: DrafterInfo, hello: Hello) -> int:
    """How many of a request's newest positions a session keeps."""
    return min(hello.context, info.context)


def make_welcome(
    info: DrafterInfo, hello: Hello, message: str, *, worker: str, max_rows: int, lease_s: float
) -> Welcome:
    """The answer to a HELLO, granted or not. `message`: as `judge_hello` says it."""
    says_router = info.has_router and bool(hello.flags & HelloFlag.ROUTING)
    return Welcome(
        worker=worker,
        kind=info.kind,
        identity=info.identity,
        markov_identity=info.markov_identity,
        vocab_size=info.vocab_size,
        context=granted_context(info, hello),
        window=info.window,
        slots=info.slots,
        max_rows=max_rows,
        num_drafts=info.num_drafts,
        flags=hello.flags | HelloFlag.ROUTER if says_router else hello.flags,
        message=message,
        lease_s=lease_s,
    )


def _why_no_samples(info: DrafterInfo, hello: Hello) -> list[str]:
    """Why sampled drafts cannot be granted."""
    if info.support != layout.SUPPORT_IDS:
        return [
            f"sampled drafts: they are drawn from {layout.SUPPORT_IDS} ids, and this drafter ({info.kind}, "
            f"{info.vocab_size} ids) does not draw; unset VLLM_DSPARK_SAMPLED_TOP32"
        ]
    size = codec.step_reply_bytes(hello.slots, info.num_drafts, int(StepFlag.MARGINS | StepFlag.SAMPLED))
    if size > layout.MAX_REPLY_BYTES:
        return [
            f"sampled drafts: a reply for {hello.slots} slots of {info.num_drafts} drafts has {size} bytes, at most "
            f"{layout.MAX_REPLY_BYTES}; serve fewer requests at once, or unset VLLM_DSPARK_SAMPLED_TOP32"
        ]
    return []


def _differs(what: str, engines: object, workers: object, remedy: str) -> str:
    return f"{what}: engine {engines}, worker {workers} ({remedy})"
