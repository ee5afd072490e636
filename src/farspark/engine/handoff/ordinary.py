"""Rounds in which nothing is out of the ordinary, each in one native call without the GIL.

All that can be known of a round before its data is there is laid ready. The call waits for the data, reads the metadata, sends,
waits for the answer and publishes the result, with no Python in between; `RemoteRound` keeps the books behind it, when no
stream waits any more. Whatever is not ordinary is handed to it as it is then, and goes on as every other round does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from farspark.engine.client import Answered, Client, Connection
from farspark.engine.handoff.region import Region
from farspark.engine.round import Foreseen, MetaColumn, RoundRequest
from farspark.engine.talker import Talker
from farspark.native import HostPage, Reply, Status
from farspark.native.round_calls import UNPUBLISHED, OrdinaryRound, RoundCalls, head_room, pack_round, ready_round_calls

# Beyond these the native call takes no round.
_MAX_REQUESTS: Final = 64
_MAX_DRAFTS: Final = 64


@dataclass(frozen=True, slots=True)
class Ready:
    """Laid ready for one round."""

    round: int
    record: bytes  # what the host says of it
    connection: Connection
    packed: bytes
    meta: npt.NDArray[np.int32]  # [n, 4], to be filled
    head: bytearray  # to be filled


@dataclass(frozen=True, slots=True)
class Served:
    answered: Answered
    meta: npt.NDArray[np.int32]
    is_published: bool | None  # None: it is not ordinary, and the result is still to be made; False: it was too late
    gathered_ns: int
    ended_ns: int


class OrdinaryRounds:
    """Owned by the thread that serves rounds."""

    def __init__(
        self,
        page: HostPage,
        region: Region,
        talker: Talker,
        reply: Reply,
        calls: RoundCalls,
        *,
        spin_ns: int,
        nap_ns: int,
    ) -> None:
        """`spin_ns` and `nap_ns` are of the wait for a round's data."""
        self._region = region
        self._talker = talker
        self._client: Client = talker.client
        self._reply = reply
        self._publish, self._wait, self._page = page.native_calls()
        self._spin_ns, self._nap_ns = spin_ns, nap_ns
        self._serve = calls.serve

    def lay_ready(self, round_: int, record: bytes, requests: Sequence[RoundRequest]) -> Ready | None:
        """None where the round will not be ordinary."""
        foreseen = self._talker.round.foresee(requests)
        if foreseen is None or self._talker.capture is not None:
            return None
        n = len(requests)
        return Ready(
            round_,
            record,
            foreseen.connection,
            pack_round(self._values(round_, n, foreseen), foreseen.requests),
            np.empty((n, len(MetaColumn)), dtype=np.int32),
            bytearray(head_room(n)),
        )

    def _values(self, round_: int, n: int, foreseen: Foreseen) -> OrdinaryRound:
        region, model, welcome = self._region, self._region.shape.model, foreseen.connection.welcome
        return OrdinaryRound(
            session=foreseen.connection.session,
            step_id=foreseen.step_id,
            at_publish=self._publish,
            at_wait=self._wait,
            at_page=self._page,
            at_record=region.record_address(round_),
            at_meta=region.meta_address(round_),
            at_rows=region.rows_address,
            at_reply=self._reply.address,
            rows_room=len(region.rows),
            timeout_ns=int(foreseen.timeout_s * 1e9),
            wait_spin_ns=self._spin_ns,
            wait_nap_ns=self._nap_ns,
            round=round_,
            requests=n,
            row_bytes=model.row_bytes,
            context=min(model.context, welcome.context),
            max_rows=foreseen.max_rows,
            slots=model.slots,
            num_drafts=model.num_drafts,
            n_out=foreseen.n_out,
            vocab_size=model.vocab_size,
            depth=foreseen.depth,
            reply_bytes=self._reply.size,
            reserved=0,
        )

    def serve(self, ready: Ready, wait_until_ns: int) -> Served | Status | None:
        """Wait for the round's data and serve it. What was served goes to `RemoteRound.finish`, and then to `settle`.

        Else nothing was done: a status is how the wait ended (OK: the data is there, and something is out of the ordinary); None:
        nobody waited. While it waits nobody else has the connection.
        """
        connection = ready.connection
        lent = self._client.lend(connection)
        if lent is None:
            return None
        descriptor, memory, limit, spin_ns = lent
        served: tuple[Any, ...] | int = 0
        try:
            served = self._serve(
                ready.packed,
                ready.record,
                ready.meta,
                ready.head,
                memory,
                connection.sequence + 1,
                descriptor,
                limit,
                spin_ns,
                wait_until_ns,
            )
        finally:
            if isinstance(served, int):
                self._client.end_loan(connection)
        if isinstance(served, int):
            return Status(served)
        head_bytes, gathered_ns, sent_ns, answered_ns, ended_ns, status, got = served
        is_published = None if status == UNPUBLISHED else status == Status.OK
        answered = Answered(
            connection,
            memoryview(ready.head)[:head_bytes],
            sent_ns / 1e9,
            None if is_published is None else answered_ns / 1e9,
            got,
        )
        return Served(answered, ready.meta, is_published, gathered_ns, ended_ns)

    def settle(self, served: Served) -> None:
        """`finish` is over, however it ended."""
        if not served.answered.is_taken:
            connection = served.answered.connection
            self._client.end_loan(connection)
            self._client.drop(connection, "what came of a STEP was lost")


def open_ordinary_rounds(
    page: HostPage, region: Region, talker: Talker, reply: Reply, *, spin_ns: int, nap_ns: int
) -> OrdinaryRounds | None:
    """None where no round of this engine's can be ordinary."""
    model, calls = region.shape.model, ready_round_calls()
    if calls is None or model.support or model.slots > _MAX_REQUESTS or model.num_drafts > _MAX_DRAFTS:
        return None
    return OrdinaryRounds(page, region, talker, reply, calls, spin_ns=spin_ns, nap_ns=nap_ns)
