"""Wait until this machine's cloud gives notice of its end, then run a command. Needs Python only.

python notice.py aws|gcp|azure [--metadata URL] [--every SECONDS] -- COMMAND...
"""

import argparse
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


def fetch(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Return a page's text, None if there is no such page."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def is_going(cloud: str, base: str) -> bool:
    """Return whether the cloud has given notice."""
    if cloud == "aws":
        token = fetch(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
        url = f"{base}/latest/meta-data/spot/instance-action"
        return fetch(url, {"X-aws-ec2-metadata-token": token or ""}) is not None
    if cloud == "gcp":
        page = fetch(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
        return (page or "").strip() == "TRUE"
    page = fetch(f"{base}/metadata/scheduledevents?api-version=2020-07-01", {"Metadata": "true"})
    events = json.loads(page or "{}").get("Events", [])
    return any(event.get("EventType") in ("Preempt", "Terminate") for event in events)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cloud", choices=sorted(METADATA))
    parser.add_argument("--metadata", help="address of the metadata service, for tests")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two looks")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    while True:
        try:
            if is_going(given.cloud, given.metadata or METADATA[given.cloud]):
                return subprocess.run(given.command, check=False).returncode
        except (OSError, ValueError) as error:
            print(f"the metadata service does not answer: {error}", file=sys.stderr)
        time.sleep(given.every)


if __name__ == "__main__":
    sys.exit(main())
