"""Test examples/evacuation/notice.py with metadata services that fail, are slow, answer nonsense, or mean others."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NOTICE = Path(__file__).parents[2] / "examples" / "evacuation" / "notice.py"
PAGES = {
    "aws": "/latest/meta-data/spot/instance-action",
    "gcp": "/computeMetadata/v1/instance/preempted",
    "azure": "/metadata/scheduledevents",
}
NAME, TOKEN = "/metadata/instance/compute/name", "/latest/api/token"
QUIET = {"aws": None, "gcp": "FALSE", "azure": '{"Events": []}'}
OWN = "group_0"


def preempts(*machines: str) -> str:
    return json.dumps({"Events": [{"EventType": "Preempt", "Resources": machines}]})


GOES = {"aws": '{"action": "stop"}', "gcp": "TRUE", "azure": preempts("group_7", OWN)}


@dataclass
class Service:
    """What the metadata service answers: for each path, one answer for each look; the last one stays.

    An answer is text, None (there is no such page), the code of another error, or bytes in place of any HTTP.
    """

    answers: dict[str, list[Any]]
    tokens: list[str] = field(default_factory=list)
    looks: list[str] = field(default_factory=list)
    """The pages that were requested, in this order."""
    address: str = ""


@pytest.fixture
def service() -> Iterator[Service]:
    known = Service({TOKEN: ["a token"], NAME: [OWN]})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            known.looks.append(path)
            queue = known.answers.get(path, [None])
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
            if (
                path == PAGES["aws"]
                and known.tokens
                and self.headers["X-aws-ec2-metadata-token"] not in known.tokens
            ):
                answer = 401
            if path == TOKEN and isinstance(answer, str):
                answer = f"{answer} {len(known.looks)}"
                known.tokens[:] = [answer]  # an earlier one has expired
            if isinstance(answer, bytes):
                self.wfile.write(answer)
                self.close_connection = True
                return
            data = answer.encode() if isinstance(answer, str) else b""
            self.send_response(answer if isinstance(answer, int) else 404 if answer is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        known.address = f"http://127.0.0.1:{server.server_address[1]}"
        yield known
        server.shutdown()
        thread.join()


def notice(service: Service, cloud: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Wait for a notice, and return the end of the command, which prints "goes" and ends with 3."""
    words = [sys.executable, str(NOTICE), cloud, "--metadata", service.address, "--every", "0.01", "--"]
    leave = [sys.executable, "-c", "print('goes'); raise SystemExit(3)"]
    done = subprocess.run(
        [*words, *leave],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **variables},
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "goes\n"), done.stderr
    return done


TROUBLES = [503, 404, 429, b"\0\1\2 nonsense\r\n\r\n", b"", "", "[]", "{not json", "null", "\u2603" * 100]


@pytest.mark.parametrize("cloud", PAGES)
def test_a_service_that_is_in_trouble_is_asked_again(service: Service, cloud: str) -> None:
    """Errors, garbage and ends of the connection are no notice, and do not end the wait for one."""
    troubles = [one for one in TROUBLES if not (cloud == "aws" and one == 404)]
    service.answers[PAGES[cloud]] = [QUIET[cloud], *troubles, QUIET[cloud], GOES[cloud]]
    done = notice(service, cloud)
    assert service.looks.count(PAGES[cloud]) == len(troubles) + 3
    assert "the metadata service does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_token_that_expires_is_renewed(service: Service) -> None:
    """Each token is good until the next one; one that the service refuses to make is asked for again."""
    service.answers[TOKEN] = ["first", 503, "second"]
    service.answers[PAGES["aws"]] = [None, None, GOES["aws"]]
    notice(service, "aws")
    assert service.looks.count(TOKEN) == 4


def test_a_proxy_of_the_environment_is_not_asked(service: Service) -> None:
    """It has a metadata service of its own, or none."""
    service.answers[PAGES["gcp"]] = [GOES["gcp"]]
    nowhere = "http://127.0.0.1:9"
    done = notice(
        service, "gcp", http_proxy=nowhere, HTTP_PROXY=nowhere, all_proxy=nowhere, no_proxy="", NO_PROXY=""
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    "events",
    [
        preempts("group_7"),
        '{"Events": [{"EventType": "Reboot", "Resources": ["group_0"]}, 5]}',
        '{"Events": 5}',
    ],
)
def test_an_event_of_another_machine_or_kind_is_no_notice(service: Service, events: str) -> None:
    """All machines of a scale set get each other's events."""
    service.answers[PAGES["azure"]] = [events, GOES["azure"]]
    notice(service, "azure")
    assert service.looks.count(PAGES["azure"]) == 2


@pytest.mark.parametrize("name", [None, b"nonsense"])
def test_an_event_is_ones_own_if_the_machines_name_is_unknown(service: Service, name: Any) -> None:
    service.answers[NAME] = [name]
    service.answers[PAGES["azure"]] = [preempts("group_7")]
    notice(service, "azure")


def test_a_service_without_tokens(service: Service) -> None:
    service.answers[TOKEN] = [None]
    service.answers[PAGES["aws"]] = [GOES["aws"]]
    notice(service, "aws")
