"""Any text as an address, or as several: endpoints that say themselves what they are, or an error for a person."""

from __future__ import annotations

import sys

from farspark.errors import ConfigError
from farspark.transport.endpoint import MAX_SPIN_US, Endpoint, parse_endpoint, parse_endpoints
from fuzz.driver import reproduce


def run(data: bytes) -> None:
    text = data.decode(errors="replace")
    try:
        check(parse_endpoint(text))
    except ConfigError:
        pass
    try:
        several = parse_endpoints(text)
    except ConfigError:
        return
    for endpoint in several:
        check(endpoint)


def check(endpoint: Endpoint) -> None:
    assert parse_endpoint(str(endpoint)) == endpoint
    assert 0 <= endpoint.port <= 65535
    assert endpoint.spin_us is None or 0 <= endpoint.spin_us <= MAX_SPIN_US
    assert endpoint.is_loopback in (True, False)


if __name__ == "__main__":
    sys.exit(reproduce(run))
