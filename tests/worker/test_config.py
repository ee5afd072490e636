from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from farspark.errors import ConfigError
from farspark.transport import parse_endpoint
from farspark.wire import layout
from farspark.worker.config import WorkerConfig

CONFIG = WorkerConfig(checkpoint=Path("drafter"))


def test_the_defaults_are_sound_and_listen_on_loopback() -> None:
    assert CONFIG.listen.is_loopback
    assert (CONFIG.slots, CONFIG.context, CONFIG.device, CONFIG.dtype) == (8, 4096, "cpu", "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "--slots 0: expected 1 to 4096"),
        ({"slots": 4097}, "--slots 4097"),
        ({"context": 0}, "--context 0: expected 1 to"),
        ({"num_drafts": 0}, "--drafts 0: expected 1 to 64"),
        ({"num_drafts": 65}, "--drafts 65"),
        ({"max_rows": 0}, "--max-rows 0: expected 1 to"),
        ({"max_connections": 0}, "--max-connections 0: expected 1 to"),
        ({"drain_s": -1.0}, "--drain-s -1: expected seconds, 0 to 3600"),
        ({"drain_s": float("nan")}, "--drain-s nan"),
        ({"device": "gpu"}, "--device 'gpu': expected cpu, cuda or cuda:0"),
        ({"device": "cuda:"}, "--device 'cuda:'"),
        ({"dtype": "float16"}, "--dtype 'float16': expected bfloat16 or float32"),
        ({"follow": "deepspec"}, "--follow 'deepspec': expected vllm or training"),
        ({"name": ""}, "--name ''"),
        ({"name": "n" * 257}, "expected 1 to 256 bytes"),
    ],
)
def test_a_value_out_of_range_names_the_option_the_value_and_what_is_expected(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(CONFIG, **change)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_the_network_needs_words_that_say_so() -> None:
    network = parse_endpoint("tcp://0.0.0.0:18620")
    with pytest.raises(
        ConfigError, match=r"--listen tcp://0\.0\.0\.0:18620: not a loopback.*--allow-unauthenticated-network"
    ):
        dataclasses.replace(CONFIG, listen=network)
    assert dataclasses.replace(CONFIG, listen=network, allow_unauthenticated_network=True).listen == network


def test_a_token_opens_the_network_and_is_never_shown() -> None:
    network = parse_endpoint("tcp://0.0.0.0:18620")
    with pytest.raises(ConfigError, match=r"has no token.*--token-file.*or add --allow-unauthenticated-network"):
        dataclasses.replace(CONFIG, listen=network)
    config = dataclasses.replace(CONFIG, listen=network, token=b"a secret of the two")
    assert config.token == b"a secret of the two"
    assert "secret" not in repr(config)


def test_rows_per_step_never_exceed_what_a_frame_may_hold() -> None:
    assert CONFIG.rows_per_step(24_576) == 4096
    wide = CONFIG.rows_per_step(1_000_000)
    assert wide < 300
    assert CONFIG.frame_bytes(1_000_000) <= layout.MAX_FRAME_BYTES
    # One row more than is allowed still passes the transport, so that it can be answered with a sentence.
    one_more = layout.HEADER.size + layout.STEP.size + layout.ENTRY.size + 4097 * 24_576
    assert one_more <= CONFIG.frame_bytes(24_576)
