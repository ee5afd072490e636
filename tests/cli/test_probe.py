"""`farspark probe` against real workers with a drafter that needs no torch, and against everything that is no worker."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.drafters import INFO, ArithmeticDrafter, info
from tests.fakes.served import served
from tests.fakes.shape import shape_for
from tests.transport.ucx import needs_ucx

from farspark.cli.main import main
from farspark.clock import Deadline
from farspark.errors import ConfigError
from farspark.probe.metrics import requests_in_engine
from farspark.probe.preflight import Shape, read_shape
from farspark.transport import connect, parse_endpoint
from farspark.wire import codec
from farspark.wire.layout import Operation
from farspark.wire.messages import Header
from farspark.worker.batch import DrafterInfo
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

SRC = Path(__file__).parent.parent.parent / "src"
QUICK = ["--pings", "5", "--rounds", "6", "--timeout-s", "5"]


@contextlib.contextmanager
def worker(
    drafter_info: DrafterInfo = INFO,
    *,
    listen: str = "tcp://127.0.0.1:0",
    max_rows: int = 4096,
    max_connections: int = 8,
    token: bytes | None = None,
) -> Iterator[tuple[str, ArithmeticDrafter, Server]]:
    drafter = ArithmeticDrafter(drafter_info)
    config = WorkerConfig(
        checkpoint=Path("none"),
        listen=parse_endpoint(listen),
        max_rows=max_rows,
        max_connections=max_connections,
        token=token,
    )
    with served(Server(drafter, config)) as server:
        yield server.endpoint, drafter, server


@contextlib.contextmanager
def metrics_page(page: str, status: int = 200) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def listener(says: bytes = b"") -> Iterator[str]:
    """Somebody who listens, says `says` and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                sock, _ = server.accept()
                with sock:
                    sock.sendall(says)
                    while sock.recv(65536):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join()


def page(running: float, waiting: float) -> str:
    return (
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="a model"}} {running:.1f}\n'
        f'vllm:num_requests_waiting{{engine="0",model_name="a model"}} {waiting:.1f}\n'
        f'vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 7.0\n'
    )


def probed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = main(["probe", *QUICK, *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_ping_and_stats_are_shown_without_a_session(capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as (endpoint, drafter, server):
        code, report, err = probed(capsys, "--endpoint", endpoint)
        assert (code, err, report["usable"], report["why"]) == (0, "", True, None)
        assert report["connection"]["lane"].startswith("tcp 127.0.0.1:")
        assert report["ping"]["count"] == 5
        assert 0 < report["ping"]["p50_us"] <= report["ping"]["p99_us"]
        shown = report["worker"]
        assert shown["identity"] == INFO.identity.hex()
        assert shown["markov_identity"] == INFO.markov_identity.hex()
        assert (shown["kind"], shown["num_drafts"], shown["context"]) == ("ArithmeticDrafter", 5, 8)
        assert (shown["slots"], shown["slots_in_use"], shown["device"], shown["context_bytes"]) == (4, 0, "cpu", 512)
        assert "session" not in report
        assert drafter.calls == 0
        assert server.snapshot()["counters"] == {}


def test_the_engines_in_a_session_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    hello = shape_for(INFO, slots=2).hello(
        engine="spark-7", identity=INFO.identity, markov_identity=bytes(32), want_margin=False
    )
    with worker() as (endpoint, _, _), contextlib.closing(connect(endpoint, Deadline.after(5))) as channel:
        channel.send(
            [codec.encode_frame(Header(Operation.HELLO, 5, 1, 0), codec.encode_hello(hello))], Deadline.after(5)
        )
        channel.recv(Deadline.after(5))
        _, report, _ = probed(capsys, "--endpoint", endpoint)
        (session,) = report["worker"]["sessions"]
        assert (session["engine"], session["slots_in_use"], session["rounds"]) == ("spark-7", 0, 0)
        assert main(["probe", "--endpoint", endpoint, "--no-metrics-check", *QUICK]) == 0
        assert "  engine          'spark-7': 0 slots, 0 rounds, p50 0.0 µs, p99 0.0 µs\n" in capsys.readouterr().out


def test_hello_makes_real_steps_and_leaves_no_slot_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as (endpoint, drafter, server):
        arguments = ["--hello", "--no-metrics-check", "--identity", INFO.identity.hex(), "--rows", "3"]
        code, report, _ = probed(capsys, "--endpoint", endpoint, *arguments)
        assert code == 0
        assert report["session"]["hello"] == "OK"
        assert report["session"]["identity"] == "equal"
        assert report["step"]["status"] == {"OK": 6}
        assert report["step"]["bytes"] == 3 * INFO.row_bytes
        assert report["step"]["round_trip"]["count"] == report["step"]["worker"]["count"] == 6
        assert report["step"]["worker"]["p50_us"] <= report["step"]["round_trip"]["p50_us"]
        assert drafter.calls == 6
        assert server.slots_in_use == 0
        assert server.snapshot()["counters"]["rows"] == 18


def test_a_slot_begins_again_where_positions_end(capsys: pytest.CaptureFixture[str]) -> None:
    with worker(info(max_position=10)) as (endpoint, drafter, _):
        code, report, _ = probed(capsys, "--endpoint", endpoint, "--hello", "--no-metrics-check", "--rows", "4")
        assert code == 0, report
        assert report["step"]["status"] == {"OK": 6}
        assert drafter.calls == 6


def test_the_text_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as (endpoint, _, _):
        assert main(["probe", *QUICK, "--endpoint", endpoint, "--hello", "--no-metrics-check", "--context", "99"]) == 0
        out = capsys.readouterr().out
        for said in (
            "connected         tcp 127.0.0.1:",
            "(of 5)",
            f"  identity        {INFO.identity.hex()}",
            "ArithmeticDrafter, 5 drafts, vocabulary 1000",
            "0 of 4 in use",
            "not compared (no --identity)",
            "context: engine 99, worker 8; the smaller one is used",
            "6 of 4 rows (64 bytes): OK 6",
            "worker's own    p50 ",
        ):
            assert said in out
        assert out.endswith("\nusable\n")
        assert main(["probe", *QUICK, "--endpoint", endpoint]) == 0
        assert "--hello says whether an engine can draft with it" in capsys.readouterr().out


@pytest.mark.parametrize("hello", [["--hello", "--no-metrics-check"], []])
def test_another_identity_is_said_with_both_values(hello: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as (endpoint, drafter, _):
        code, report, err = probed(capsys, "--endpoint", endpoint, *hello, "--identity", "ab" * 32)
        assert code == 1
        assert not report["usable"]
        assert err.startswith("farspark: cannot be used: ")
        assert f"drafter identity: engine {'ab' * 32}, worker {INFO.identity.hex()}" in err
        assert ("answered HELLO with IDENTITY" in err) == bool(hello)
        assert drafter.calls == 0
        code, _, err = probed(capsys, "--endpoint", endpoint, *hello, "--markov-identity", "cd" * 32)
        assert code == 1
        assert f"Markov identity: engine {'cd' * 32}, worker {INFO.markov_identity.hex()}" in err


def test_HELLO_LIMITS_what_the_engine_needs_and_the_worker_lacks_is_said_with_both_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"block_size": 5, "vocab_size": 1000, "hidden_size": 4, "dflash_config": {"target_layer_ids": [1, 5]}}
        )
    )
    with worker() as (endpoint, _, _):
        hello = ["--endpoint", endpoint, "--hello", "--no-metrics-check"]
        assert probed(capsys, *hello, "--checkpoint-config", str(tmp_path))[0] == 0
        code, _, err = probed(capsys, *hello, "--slots", "16", "--drafts", "7")
        assert code == 1
        assert "answered HELLO with CONFIG" in err
        assert "N: engine 7, worker 5" in err
        assert "slots: engine 16, worker 4" in err
        config.write_text(config.read_text().replace('"vocab_size": 1000', '"vocab_size": 1024'))
        code, _, err = probed(capsys, *hello, "--checkpoint-config", str(config))
        assert code == 1
        assert "vocabulary: engine 1024, worker 1000" in err
    with worker(max_rows=20) as (endpoint, _, _):
        hello = ["--endpoint", endpoint, "--hello", "--no-metrics-check"]
        code, _, err = probed(capsys, *hello, "--slots", "4")
        assert (code, "rows per STEP: engine 24, worker 20 (start it with --max-rows 24)" in err) == (1, True)
        code, _, err = probed(capsys, *hello, "--rows", "21")
        assert (code, "--rows 21: this worker takes at most 20 in a STEP" in err) == (1, True)


def test_a_step_that_fails_is_not_usable(capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as (endpoint, drafter, _):
        drafter.fail_next = 1
        code, report, err = probed(capsys, "--endpoint", endpoint, "--hello", "--no-metrics-check")
        assert code == 1
        assert "STEP 1 of 4 rows: status INTERNAL, no drafts" in err
        assert report["session"]["hello"] == "OK"
        assert "step" not in report


def test_hello_is_refused_while_the_engine_has_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as (endpoint, drafter, server):
        for running, waiting in ((2, 0), (0, 3)):
            with metrics_page(page(running, waiting)) as url:
                code, report, err = probed(capsys, "--endpoint", endpoint, "--hello", "--metrics", url)
                assert code == 1
                assert f"not probed: {url}: the engine has {running} requests running and {waiting} waiting" in err
                assert "connection" not in report
        assert drafter.calls == 0
        assert "sessions" not in server.snapshot()["counters"]
        with metrics_page(page(0, 0)) as url:
            assert probed(capsys, "--endpoint", endpoint, "--hello", "--metrics", url)[0] == 0
        assert drafter.calls == 6


def test_an_engine_that_cannot_be_asked_counts_as_busy(capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as (endpoint, drafter, _):
        hello = ["--endpoint", endpoint, "--hello", "--metrics"]
        with metrics_page("not here", 404) as url:
            code, _, err = probed(capsys, *hello, url)
            assert (code, "Not Found, so nobody can say" in err) == (1, True)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            free = closed.getsockname()[1]
        code, _, err = probed(capsys, *hello, f"http://127.0.0.1:{free}/metrics")
        assert (code, "Connection refused" in err, "--no-metrics-check" in err) == (1, True, True)
        with listener() as silent:
            began = time.monotonic()
            code, _, err = probed(capsys, *hello, silent.replace("tcp", "http"), "--timeout-s", "0.2")
            assert code == 1
            assert "no answer within 0.2 s" in err or "timed out" in err
            assert time.monotonic() - began < 3
        with metrics_page("some_other_metric 1\n") as url:
            assert main(["probe", *hello, url]) == 2
            assert "no vllm:num_requests_running; is it the /metrics of vLLM?" in capsys.readouterr().err
        assert drafter.calls == 0


def test_the_metrics_are_summed_over_engines_and_nothing_else_is_counted() -> None:
    assert requests_in_engine(page(1, 2) + page(3, 4)) == (4, 6)
    assert requests_in_engine("vllm:num_requests_running 0\nvllm:num_requests_waiting 0 1700000000\n") == (0, 0)
    for bad in ("NaN", "-1", "many"):
        with pytest.raises(ConfigError, match="expected a number of requests"):
            requests_in_engine(f"vllm:num_requests_running {bad}\n")


@pytest.mark.parametrize(
    ("says", "said"),
    [
        (b"", "no answer to PING within 0.3 s"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is none of a Farspark worker"),
        (b"\x04\x00\x00\x00FSPK", "is none of a Farspark worker: frame of 4 bytes"),
        (b"\x20\x00\x00", "no answer to PING within 0.3 s"),
    ],
)
def test_a_peer_that_is_no_worker_is_one_sentence_within_the_deadline(
    says: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with listener(says) as endpoint:
        began = time.monotonic()
        code, report, err = probed(capsys, "--endpoint", endpoint, "--timeout-s", "0.3")
        assert time.monotonic() - began < 3
        assert (code, said in err) == (1, True), err
        assert "connection" in report


def test_nobody_listening_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    assert main(["probe", "--endpoint", f"tcp://127.0.0.1:{free}"]) == 1
    assert "cannot be used" in (err := capsys.readouterr().err)
    assert "nothing listens there" in err


def test_a_full_worker_says_that_it_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    with worker(max_connections=1) as (endpoint, _, _):
        host, _, port = endpoint.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))):
            time.sleep(0.1)
            code, _, err = probed(capsys, "--endpoint", endpoint)
        assert (code, "answered PING with BUSY: 1 connections are open" in err) == (1, True), err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--endpoint", "nonsense"], "it has no scheme"),
        (["--rows", "0"], "--rows 0: expected 1 to"),
        (["--rounds", "0"], "--rounds 0: expected 1 to"),
        (["--pings", "0"], "--pings 0: expected 1 to"),
        (["--drafts", "65"], "--drafts 65: expected 1 to 64"),
        (["--slots", "0"], "--slots 0: expected 1 to 4096"),
        (["--timeout-s", "nan"], "--timeout-s nan: expected seconds"),
        (["--timeout-s", "-1"], "--timeout-s -1: expected seconds"),
        (["--identity", "abcd"], "--identity 'abcd': expected 64 hex digits"),
        (["--markov-identity", "x" * 64], "expected 64 hex digits"),
        (["--hello", "--metrics", "nonsense"], "--metrics 'nonsense': expected something like http://"),
        (["--metrics", "http://x:1/", "--no-metrics-check"], "give one of them"),
        (["--checkpoint-config", "/no/such/config.json"], "/no/such/config.json: No such file"),
    ],
)
def test_wrong_usage_is_one_sentence_and_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = [] if "--endpoint" in arguments else ["--endpoint", "tcp://127.0.0.1:1"]
    assert main(["probe", *endpoint, *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"vocab_size": 8, "hidden_size": 4, "block_size": 2}', "no list of target layers"),
        ('{"target_layer_ids": [1], "hidden_size": 4, "block_size": 2}', "vocab_size is None"),
        ('{"target_layer_ids": [1], "hidden_size": 4, "vocab_size": "8", "block_size": 2}', "vocab_size is '8'"),
    ],
)
def test_a_config_that_does_not_describe_a_drafter_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_shape(tmp_path)


def test_the_shape_is_read_as_the_engine_reads_it(tmp_path: Path) -> None:
    keys = {
        "hidden_size": 64,
        "target_hidden_size": 32,
        "vocab_size": 9,
        "dspark_block_size": 3,
        "target_layer_ids": [2],
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    shape = read_shape(tmp_path / "config.json")
    assert shape == Shape(num_drafts=3, vocab_size=9, hidden_size=32, taps=1)
    assert shape.row_bytes == 64


@pytest.mark.parametrize(("is_anchor_first", "drafts"), [(True, 7), (False, 6)])
def test_LAYOUT_1N_the_shape_of_a_drafter_in_speculators_format(
    tmp_path: Path, is_anchor_first: bool, drafts: int
) -> None:
    keys = {
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 7,
        "sample_from_anchor": is_anchor_first,
        "target_hidden_size": None,
        "transformer_layer_config": {"hidden_size": 64, "vocab_size": 9},
    }
    (tmp_path / "config.json").write_text(json.dumps(keys))
    assert read_shape(tmp_path) == Shape(num_drafts=drafts, vocab_size=9, hidden_size=64, taps=3)


def test_the_probe_runs_on_a_bare_python_without_site_packages() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.modules.update(dict.fromkeys(['numpy', 'torch', 'rich', "
        "'safetensors', 'vllm'])); from farspark.cli.main import main; sys.exit(main())"
    )
    with worker() as (endpoint, drafter, _):
        command = [sys.executable, "-I", "-S", "-W", "error", "-c", code, str(SRC), "probe", "--endpoint", endpoint]
        done = subprocess.run(
            [*command, *QUICK, "--hello", "--no-metrics-check"], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("usable\n")
        assert drafter.calls == 6


TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    "hello", [[], ["--hello", "--no-metrics-check"], ["--hello", "--no-metrics-check", "--identity"]]
)
def test_with_the_token_the_probe_sees_a_worker_that_demands_it(
    hello: list[str], token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*hello, INFO.identity.hex()] if "--identity" in hello else hello
    with worker(token=TOKEN.encode()) as (endpoint, drafter, server):
        code, found, err = probed(capsys, "--endpoint", endpoint, "--token-file", str(token_file), *options)
        assert (code, found["usable"], err) == (0, True, "")
        assert drafter.calls == (6 if hello else 0)
        assert server.snapshot()["connections"]["auth_failures"] == 0
    assert TOKEN not in json.dumps(found)


def test_without_the_workers_token_the_probe_says_what_to_do(
    token_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker(token=TOKEN.encode()) as (endpoint, drafter, _):
        for hello in ([], ["--hello", "--no-metrics-check"]):
            code, found, err = probed(capsys, "--endpoint", endpoint, *hello)
            assert code == 1
            assert f"{endpoint} answered PING with AUTH: " in err
            assert "set --token-file to a file with the worker's token" in err
            assert set(found) == {"endpoint", "usable", "why", "connection"}
        token_file.write_text("another token of some length")
        code, found, err = probed(capsys, "--endpoint", endpoint, "--token-file", str(token_file))
        assert code == 1
        assert "answered PROVE with AUTH: the proof is wrong; --token-file here and --token-file there" in err
        assert "another token" not in err
        assert drafter.calls == 0
    with worker() as (endpoint, _, _):
        code, _, err = probed(capsys, "--endpoint", endpoint, "--token-file", str(token_file))
        assert code == 1
        assert "cannot be used: the worker has no token" in err


def test_a_token_file_that_others_can_read_is_wrong_usage(token_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token_file.chmod(0o644)
    assert main(["probe", "--endpoint", "tcp://127.0.0.1:1", "--token-file", str(token_file)]) == 2
    assert "others may read or change it (mode 0644); chmod 600" in capsys.readouterr().err


@needs_ucx
@pytest.mark.parametrize("scheme", ["ucx", "o1tcp"])
def test_the_probe_runs_over_ucx_on_a_bare_python_and_says_the_lane_UCX_LANE(scheme: str) -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from farspark.cli.main import main; sys.exit(main())"
    with worker(listen="ucx://127.0.0.1:0") as (listening, drafter, server):
        assert "tcp/lo" in server.snapshot()["lanes"]
        endpoint = f"{scheme}://{listening.partition('://')[2]}"
        command = [sys.executable, "-I", "-S", "-W", "error", "-c", code, str(SRC), "probe", "--endpoint", endpoint]
        done = subprocess.run(
            [*command, "--hello", "--no-metrics-check", "--json", *QUICK], capture_output=True, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["connection"]["lane"].startswith("ucx tcp/lo 127.0.0.1:")
    assert drafter.calls == 6


def test_the_probe_proves_itself_on_a_bare_python(token_file: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); sys.modules.update(dict.fromkeys(['numpy', 'torch', 'rich', "
        "'safetensors', 'vllm'])); from farspark.cli.main import main; sys.exit(main())"
    )
    with worker(token=TOKEN.encode()) as (endpoint, _, _):
        command = [sys.executable, "-I", "-S", "-W", "error", "-c", code, str(SRC), "probe", "--endpoint", endpoint]
        options = [*QUICK, "--hello", "--no-metrics-check", "--token-file", str(token_file)]
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("usable\n")
