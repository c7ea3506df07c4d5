"""Make the pictures of the documents from a real run: a report, its status, and the live view. `make pictures`.

It trains the quickstart's model, kills it with -9 three times, and photographs what the commands show.
It needs Chromium.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SCARCTL = [sys.executable, "-m", "scarctl"]
TRAIN = [
    sys.executable,
    str(ROOT / "examples" / "quickstart" / "train.py"),
    "--store",
    "run",
    "--iterations",
    "100000",
]
LINES, COLUMNS = 24, 80
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Rich's own, without the font that it loads from elsewhere, and without a window's frame.
SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px monospace; line-height: {line_height}px; }}
{styles}</style>
<defs>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<g transform="translate({terminal_x}, 24)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


def main() -> None:
    """Write docs/report.png, docs/report-dark.png, docs/status.svg and docs/live.svg."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"no browser: one of {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory(prefix="scarctl-pictures-") as folder:
        os.chdir(folder)
        os.environ["SCARCTL_ARENA_DIR"] = str(Path(folder, "arena").resolve())
        Path("arena").mkdir()
        try:
            _photograph(browser)
        finally:
            subprocess.run([*SCARCTL, "daemon", "stop", "--all"], check=False)


def _photograph(browser: str) -> None:
    for until in (150, 300, 500):
        training = subprocess.Popen(TRAIN, stdout=subprocess.DEVNULL)
        _wait_for(until)
        if until == 500:
            terminal("live", ["status", "run", "--watch", "--every", "1"], seconds=6)
        training.kill()
        training.wait()
    time.sleep(2)
    terminal("status", ["status", "run"], seconds=60)
    subprocess.run([*SCARCTL, "report", "run", "-o", "report.html"], check=True)
    photograph(browser, Path("report.html"), DOCS / "report.png", 980, 1240)
    photograph(browser, Path("report.html"), DOCS / "report-dark.png", 980, 1240, dark=True)


def _wait_for(step: int) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        done = subprocess.run(
            [*SCARCTL, "inspect", "--store", "run", "--json"], capture_output=True, check=False
        )
        if done.returncode == 0 and (json.loads(done.stdout)["step"] or 0) >= step:
            return
        time.sleep(0.5)
    sys.exit(f"the run did not come to step {step}")


def terminal(name: str, arguments: list[str], seconds: float) -> None:
    """Run a command on a terminal of 24 x 80, and write its last screen as docs/<name>.svg."""
    child, master = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [*SCARCTL, *arguments])
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    shown, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([master], [], [], 0.2)[0]:
            try:
                piece = os.read(master, 1 << 16)
            except OSError:  # the command has ended
                break
            shown += piece
    os.kill(child, 2)
    os.waitpid(child, 0)
    os.close(master)
    screens = [screen for screen in re.split(r"\x1b\[H", shown.decode()) if len(screen) > 100]
    screen = re.sub(r"\x1b\[\??\d*[A-Zhl]|\r", "", screens[-1])
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(f"$ scarctl {' '.join(arguments)}\n{screen.rstrip()}"))
    (DOCS / f"{name}.svg").write_text(console.export_svg(code_format=SVG, unique_id=name), encoding="utf-8")


def photograph(
    browser: str, page: Path, picture: Path, width: int, height: int, *, dark: bool = False
) -> None:
    """Write what a browser shows of a page as PNG, `width` x `height` pixels. dark: as on a dark system."""
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--screenshot={picture}",
    ]
    command += [
        f"--window-size={width},{height}",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]
    subprocess.run([*command, page.resolve().as_uri()], check=True, capture_output=True, timeout=100)


if __name__ == "__main__":
    main()
