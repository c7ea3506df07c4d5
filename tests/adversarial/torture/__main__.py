"""Run the torture; prints a table of what was done. See the package."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.adversarial.torture.episode import KINDS, ROUNDS_PER_EPISODE, Episode, Round
from tests.adversarial.torture.rack import Rack
from tests.adversarial.torture.witness import Failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversarial.torture", description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end when this time is over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="go on from this round: its episode's first")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--keep", action="store_true", help="keep the folders of episodes that failed")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    args = parser.parse_args()

    base = Path(tempfile.mkdtemp(prefix="scarctl-torture-", dir=args.folder))
    started = time.monotonic()
    rounds: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    failures: list[dict[str, object]] = []
    counts: Counter[str] = Counter()
    number = args.first - args.first % ROUNDS_PER_EPISODE
    while number < args.rounds and time.monotonic() - started < args.seconds:
        episode = Episode.draw(args.seed, number // ROUNDS_PER_EPISODE)
        rack = Rack(episode, base / str(episode.number))
        kind = "the end of an episode"
        try:
            last = min(args.rounds, number + ROUNDS_PER_EPISODE)
            while number < last and time.monotonic() - started < args.seconds:
                event = Round.draw(args.seed, number)
                kind = event.kind
                rounds[kind] += 1
                rack.play(event)
                number += 1
            kind = "the end of an episode"
            rounds[kind] += 1
            rack.finish()
        except Failed as failure:
            failed[kind] += 1
            failures.append({"round": number, "kind": kind, "episode": str(episode), "reason": str(failure)})
            print(f"round {number}, {kind}: {failure}", file=sys.stderr, flush=True)  # noqa: T201
            number = (episode.number + 1) * ROUNDS_PER_EPISODE
        finally:
            rack.end()
        counts["processes"] += rack.starts
        counts["copies"] += rack.copies.count
        counts["gave up"] += len(rack.witness.gave_up)
        for trace in rack.witness.gave_up:
            print(trace, file=sys.stderr, flush=True)  # noqa: T201
        if not (args.keep and failures and failures[-1]["episode"] == str(episode)):
            shutil.rmtree(rack.folder)
    if not any(base.iterdir()):
        base.rmdir()
    seconds = time.monotonic() - started
    done = sum(n for kind, n in rounds.items() if kind in KINDS)
    if args.json:
        document = {
            "seed": args.seed,
            "rounds": done,
            "seconds": seconds,
            "kinds": rounds,
            "failures": failures,
        }
        print(json.dumps({**document, **counts}))  # noqa: T201
        return bool(failures)
    lines = [("kind", "rounds", "failures")]
    lines += [(kind, str(rounds[kind]), str(failed[kind])) for kind in [*KINDS, "the end of an episode"]]
    lines.append(("all", str(sum(rounds.values())), str(sum(failed.values()))))
    for row in lines:
        print(f"{row[0]:42}{row[1]:>8}{row[2]:>10}")  # noqa: T201
    print(  # noqa: T201
        f"seed {args.seed}, {done} rounds in {seconds:.0f} s, {counts['processes']} training processes "
        f"({counts['gave up']} gave up because the daemon had died), "
        f"{counts['copies']:,} copies read back and whole"
    )
    for failure in failures:
        first = f"--seed {args.seed} --first {failure['round']}"
        print(f"again: python -m tests.adversarial.torture {first} --rounds {int(str(failure['round'])) + 1}")  # noqa: T201
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
