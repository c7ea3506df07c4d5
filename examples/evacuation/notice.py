"""Wait until this machine's cloud gives notice of its end, then run a command. Needs Python only.

python notice.py aws|gcp|azure [--metadata URL] [--every SECONDS] -- COMMAND...
"""

import argparse
import http.client
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

METADATA = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}
SECONDS = 5.0
MOST = 1 << 20
FAILURES = (OSError, ValueError, TypeError, http.client.HTTPException)
# The service is on this machine: a proxy from the environment would answer for another one.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Return a page's text, None if there is no such page. Raises OSError, ValueError, HTTPException."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with DIRECT.open(request, timeout=SECONDS) as answer:
            text: str = answer.read(MOST).decode()
            return text
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 404:
                return None
            raise OSError(f"{url}: {error}") from None


def is_going(cloud: str, base: str) -> bool:
    """Return whether the cloud has given notice."""
    if cloud == "aws":
        # A new token for each look, so that none expires.
        token = fetch(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        url = f"{base}/latest/meta-data/spot/instance-action"
        page = fetch(url, {"X-aws-ec2-metadata-token": token} if token else {})
        return page is not None and "action" in fields(page)
    if cloud == "gcp":
        page = fetch(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return (page or "").strip() == "TRUE"
    page = fetch(f"{base}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    events = fields(page or "{}").get("Events")
    ending = [
        event
        for event in (events if isinstance(events, list) else [])
        if isinstance(event, dict) and event.get("EventType") in ("Preempt", "Terminate")
    ]
    if not ending:
        return False
    # All machines of a scale set get the events of each. Without this one's name, an event counts as its own.
    url = f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    try:
        name = (fetch(url, {"Metadata": "true"}) or "").strip()
    except FAILURES as error:
        print(f"this machine's name is unknown: {error!r}", file=sys.stderr, flush=True)
        name = ""
    return any(not name or name in event.get("Resources", [name]) for event in ending)


def fields(page: str) -> dict[str, object]:
    """Return a page's JSON object. Raises ValueError for anything else."""
    found = json.loads(page)
    if not isinstance(found, dict):
        raise ValueError(f"not an object: {page[:80]!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cloud", choices=sorted(METADATA))
    parser.add_argument("--metadata", help="address of the metadata service, for tests")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    base, going = given.metadata or METADATA[given.cloud], False
    while not going:
        try:
            going = is_going(given.cloud, base)
        except FAILURES as error:
            print(f"the metadata service does not answer: {error!r}", file=sys.stderr, flush=True)
        if not going:
            time.sleep(given.every)
    return subprocess.run(given.command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
