from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspark.errors import ConfigError
from farspark.transport import Endpoint, parse_endpoint, parse_endpoints


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://10.0.0.2:18620", Endpoint("tcp", "10.0.0.2", 18620)),
        ("  tcp://spark-2.local:1 ", Endpoint("tcp", "spark-2.local", 1)),
        ("tcp://localhost:0", Endpoint("tcp", "localhost", 0)),
        ("ucx://h:65535?bind=10.0.0.1", Endpoint("ucx", "h", 65535, "10.0.0.1")),
        ("o1rdma://h:2", Endpoint("o1rdma", "h", 2)),
        ("o1tcp://h:2", Endpoint("o1tcp", "h", 2)),
        ("tcp://[::1]:5", Endpoint("tcp", "::1", 5)),
        ("tcp://[fe80::1%eth0]:5", Endpoint("tcp", "fe80::1%eth0", 5)),
        ("tcp://[fe80::1%25eth0]:5", Endpoint("tcp", "fe80::1%eth0", 5)),
        ("tcp://[fe80::1%eth0]:5?bind=[fe80::2%eth0]", Endpoint("tcp", "fe80::1%eth0", 5, "fe80::2%eth0")),
        ("tcp://h:5?spin_us=0", Endpoint("tcp", "h", 5, spin_us=0)),
        ("tcp://h:5?bind=::1&spin_us=300", Endpoint("tcp", "h", 5, "::1", 300)),
        (
            "o1rdma://h:5?ucx_dir=/opt/ucx/lib&bind=10.0.0.1",
            Endpoint("o1rdma", "h", 5, "10.0.0.1", ucx_dir="/opt/ucx/lib"),
        ),
        ("memory://two-ends", Endpoint("memory", "two-ends")),
    ],
)
def test_an_address_is_parsed_and_printed_ADDR(text: str, endpoint: Endpoint) -> None:
    assert parse_endpoint(text) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no scheme"),
        ("10.0.0.2:18620", "no scheme"),
        ("http://h:1", "unknown scheme 'http'"),
        ("tpc://h:1", "did you mean 'tcp'"),
        ("tcp://h", "missing port"),
        ("tcp://h:", "missing port"),
        ("tcp://[::1]", "missing port"),
        ("tcp://[::1]5", "after ']'"),
        ("tcp://h:port", "port 'port' is not a number"),
        ("tcp://h:-1", "port '-1' is not a number"),
        ("tcp://h:+1", "port '\\+1' is not a number"),
        ("tcp://h:1²", "is not a number"),
        ("tcp://h:65536", "port 65536 is out of range 0 to 65535"),
        ("tcp://h:99999999999999999999", "out of range"),
        ("tcp://:1", "empty host"),
        ("tcp://[]:1", "empty host"),
        ("tcp://", "empty host"),
        ("tcp://::1", "brackets"),
        ("tcp://fe80::1%eth0:5", "brackets"),
        ("tcp://[::1:5", "'\\[' without '\\]'"),
        ("tcp://[10.0.0.1]:5", "not an IPv6 address"),
        ("tcp://[::g]:5", "not an IPv6 address"),
        ("tcp://10.0.0.256:5", "not an IPv4 address"),
        ("tcp://10.0.1:5", "not an IPv4 address"),
        ("tcp://a b:5", "neither a name nor an address"),
        ("tcp://a/b:5", "neither a name nor an address"),
        ("tcp://h:5?", "unknown option ''"),
        ("tcp://h:5?bnd=1", "unknown option 'bnd'.*did you mean 'bind'"),
        ("tcp://h:5?bind", "option 'bind' has no value"),
        ("tcp://h:5?bind=", "option 'bind' has no value"),
        ("tcp://h:5?bind=eth0", "bind=eth0: expected an IP address"),
        ("tcp://h:5?bind=1.2.3.4&bind=1.2.3.4", "given twice"),
        ("tcp://10.0.0.1:5?bind=::1", "not of the same address family"),
        ("tcp://h:5?spin_us=-1", "spin_us=-1: expected whole microseconds"),
        ("tcp://h:5?spin_us=1.5", "spin_us=1.5"),
        ("tcp://h:5?spin_us=2000000", "0 to 1000000"),
        ("tcp://h:5?ucx_dir=/opt/ucx", "option 'ucx_dir' is for ucx, o1rdma, o1tcp only"),
        ("ucx://h:5?ucx_dir=lib", "ucx_dir=lib: expected an absolute path"),
        ("memory://", "empty name"),
        ("memory://a:1", "expected memory://name"),
        ("memory://a?bind=1.2.3.4", "without bind"),
        ("tcp://h:1,", "no scheme"),
    ],
)
def test_a_malformed_address_says_what_is_wrong_ADDR(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse_endpoints(text)
    assert str(caught.value).startswith("endpoint '")


def test_several_endpoints_are_tried_in_the_order_given() -> None:
    assert parse_endpoints("tcp://a:1, ucx://b:2?bind=1.2.3.4,tcp://[::1]:3") == (
        Endpoint("tcp", "a", 1),
        Endpoint("ucx", "b", 2, "1.2.3.4"),
        Endpoint("tcp", "::1", 3),
    )


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.8.8:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("memory://x", True),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://10.0.0.1:1", False),
        ("tcp://localhost.example:1", False),
    ],
)
def test_loopback_is_told_from_the_network(text: str, is_loopback: bool) -> None:
    assert parse_endpoint(text).is_loopback is is_loopback


def test_several_where_one_is_expected_are_called_several() -> None:
    """As `farspark probe --endpoint` with what the engine is given."""
    with pytest.raises(ConfigError, match="one endpoint is expected here, not several"):
        parse_endpoint("tcp://10.0.0.2:18620,tcp://10.0.0.3:18620")


@given(st.text(max_size=40))
def test_any_text_is_an_endpoint_or_a_config_error(text: str) -> None:
    for candidate in (text, "tcp://" + text, "tcp://h:1?" + text, "memory://" + text):
        try:
            endpoint = parse_endpoint(candidate)
        except ConfigError:
            continue
        assert parse_endpoint(str(endpoint)) == endpoint
