"""Two rounds over whatever is found as the CUDA driver, each answered by a thread; prints what the stream says of itself."""

from __future__ import annotations

import threading

import numpy as np
from tests.fakes.async_world import make_info, talker_spec

from farspark.engine.handoff.cuda_stream import CudaStream
from farspark.engine.handoff.region import Region, RegionShape
from farspark.native import HostPage, Status, load


def main() -> None:
    library = load()
    spec = talker_spec(make_info(), "tcp://127.0.0.1:1")
    size = 4 * RegionShape(spec.shape, 40, 0).result.size
    with Region(RegionShape(spec.shape, 40, HostPage.bytes_needed(library, size))) as region:
        page = HostPage.format(library, region.memory, region.page_offset, size)
        stream = CudaStream(region, page, lambda: 0)
        print(stream.mechanism, flush=True)
        for round_ in (1, 2):
            result, reply = np.zeros(size, dtype=np.uint8), page.make_reply()
            rows = np.full(64, round_, dtype=np.uint8)
            reply.memory[:] = bytes((i + round_) % 251 for i in range(size))

            def answer(round_: int = round_, reply: object = reply) -> None:
                assert page.wait_gathered(round_, spin_ns=0, nap_ns=1000, deadline_ns=1 << 62) is Status.OK
                assert bytes(region.rows[:64]) == bytes([round_] * 64)
                assert page.publish(round_, reply) is Status.OK  # type: ignore[arg-type]

            thread = threading.Thread(target=answer)
            thread.start()
            copy = region.rows_address, rows.ctypes.data, 64
            launch = stream.stores(*copy) if round_ == 2 else None
            stream.submit(round_, () if launch else copy, result.ctypes.data, launch.address if launch else 0)
            thread.join()
            assert bytes(result) == bytes(reply.memory)
            assert page.words().consumed == page.words().gathered == round_
        there = np.zeros(64, dtype=np.uint8)
        stream.to_device(there.ctypes.data, region.rows_address, 64)
        region.rows[:64] = bytes(64)
        stream.to_host(region.rows_address, there.ctypes.data, 64)
        assert bytes(region.rows[:64]) == bytes([2] * 64)
        assert stream.wait_idle(1.0)
        stream.close()
        page.close()


if __name__ == "__main__":
    main()
