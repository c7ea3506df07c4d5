"""Test `scarctl report`: the page loads nothing, hides nothing, and survives hostile names; a real browser shows it."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from scarctl.cli.report_charts import text
from tests.cli.conftest import Model, Run
from tests.support.logs import records

BROWSERS = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
HOSTILE = "</script><img src=x onerror=alert(1)>'\"&amp;" + "w" * 200


class Page(html.parser.HTMLParser):
    """Elements of a page, its texts, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.data: dict[str, Any] = json.loads(data)
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def report(run: Run, *options: object) -> Page:
    run("report", "--store", "ckpt", "-o", "report.html", *options)
    return Page(Path("report.html").read_text(encoding="utf-8"))


def test_the_page_says_what_inspect_says(run: Run, saved: Model) -> None:
    saved.train("layers.5.w")
    run("checkpoint", saved.path, "--store", "ckpt", "--step", 6, "--fraction", "0.05")
    document = run("inspect", "--store", "ckpt", "--json", "--limit", 0).document
    page = report(run)
    now = page.data["now"]
    same = document.keys() - {"schema_version", "command", "saved_seconds_ago"}
    assert {name: now[name] for name in same} == {name: document[name] for name in same}
    assert "6 or later" in page.text
    assert "no running process says how far the run is" in page.text
    assert page.data["layers"][0]["name"] == "emb"
    assert page.data["history"]["commits"] == 2  # one log for all shards
    assert page.data["history"]["damage"] is None


def test_the_page_loads_nothing_and_runs_nothing(run: Run, saved: Model) -> None:
    page = report(run)
    names = {name for name, _ in page.elements}
    assert names.isdisjoint({"img", "link", "iframe", "object", "embed", "form", "a", "base"})
    scripts = [attributes for name, attributes in page.elements if name == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}]
    assert not any(
        key.startswith("on") or key in ("src", "href") for _, found in page.elements for key in found
    )
    text = Path("report.html").read_text(encoding="utf-8")
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_a_hostile_name_stays_a_text(run: Run, tmp_path: Path) -> None:
    save_file({HOSTILE: np.zeros((8, 4), np.float32)}, tmp_path / "state.safetensors")
    run("checkpoint", "state.safetensors", "--store", "ckpt", "--step", 0)
    page = report(run)
    assert not [name for name, _ in page.elements if name == "img"]
    assert "</script><img src=x" in page.text
    assert page.data["layers"][0]["name"] == HOSTILE


def test_control_characters_of_foreign_texts_are_shown_as_such() -> None:
    assert text("a\x1b[31m\u202e<b>") == "a\\x1b[31m\\u202e&lt;b&gt;"


def test_ten_thousand_partitions_and_hundreds_of_layers_fit_a_page(run: Run, tmp_path: Path) -> None:
    tensors = {f"blocks.{k}.weight": np.zeros((20, 64), np.float32) for k in range(500)}
    save_file(tensors, tmp_path / "state.safetensors")
    run("checkpoint", "state.safetensors", "--store", "ckpt", "--step", 0, "--partition-bytes", 256)
    page = report(run)
    assert page.data["now"]["total_partitions"] == 10_000
    assert Path("report.html").stat().st_size < 1 << 20
    assert len(page.data["layers"]) + page.data["more_layers"] == 500


def test_damage_that_hides_the_history_is_told(run: Run, saved: Model) -> None:
    for record in records("ckpt")[:1]:
        record.write_bytes(b"{}")
    done = run("report", "--store", "ckpt", "-o", "report.html", code=3)
    assert "warning: the history cannot be shown" in done.stderr
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert page.data["history"]["damage"] in page.text
    assert page.data["now"]["step"] == 0


def test_json_prints_the_data_of_the_page(run: Run, saved: Model) -> None:
    done = run("report", "--store", "ckpt", "-o", "report.html", "--json").document
    data = Page(Path("report.html").read_text(encoding="utf-8")).data
    assert done.pop("output") == "report.html"
    assert done == data


def _pixels(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode a PNG of 8 bits per channel: uint8 of shape (height, width, channels)."""
    raw, at, data, head = path.read_bytes(), 8, b"", b""
    while at < len(raw):
        (length,), kind = struct.unpack(">I", raw[at : at + 4]), raw[at + 4 : at + 8]
        content = raw[at + 8 : at + 8 + length]
        head, data = (content if kind == b"IHDR" else head), (data + content if kind == b"IDAT" else data)
        at += 12 + length
    width, height, depth, colour = struct.unpack(">IIBB", head[:10])
    channels = {2: 3, 6: 4}[colour]
    assert depth == 8
    lines = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width * channels), np.uint8)
    for y in range(height):
        kind, line = int(lines[y, 0]), lines[y, 1:].copy()
        above = out[y - 1] if y else np.zeros_like(line)
        if kind in (0, 2):
            out[y] = line + above if kind else line
            continue
        if kind == 1:
            out[y] = np.cumsum(line.reshape(width, channels), axis=0, dtype=np.uint8).reshape(-1)
            continue
        for x in range(line.size):
            left = int(out[y, x - channels]) if x >= channels else 0
            up, corner = int(above[x]), int(above[x - channels]) if x >= channels else 0
            guess = left + up - corner
            near = min((left, up, corner), key=lambda value: abs(guess - value))
            out[y, x] = (int(line[x]) + {3: (left + up) // 2, 4: near}[kind]) & 255
    return out.reshape(height, width, channels)


@pytest.mark.skipif(BROWSER is None, reason=f"no Chromium on this machine: none of {', '.join(BROWSERS)}")
@pytest.mark.parametrize(
    ("width", "height", "dark", "rows"),
    [
        (500, 500, True, 8),
        pytest.param(1200, 1800, False, 10_000, marks=pytest.mark.long),
    ],
)
def test_a_browser_shows_it_without_a_sideways_scroll(
    run: Run, tmp_path: Path, width: int, height: int, dark: bool, rows: int
) -> None:
    """The name is hostile, and 200 characters long; rows: partitions of one row each."""
    save_file({HOSTILE: np.zeros((rows, 4), np.float32)}, tmp_path / "state.safetensors")
    run("checkpoint", "state.safetensors", "--store", "ckpt", "--step", 0, "--partition-bytes", 16)
    report(run)
    shot = tmp_path / "shot.png"
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},{height}",
        f"--screenshot={shot}",
    ]
    command += ["--blink-settings=preferredColorScheme=0"] if dark else []
    done = subprocess.run(
        [*command, (tmp_path / "report.html").as_uri()], capture_output=True, timeout=90, check=False
    )
    assert shot.exists(), done.stderr.decode()
    pixels = _pixels(shot)[..., :3].astype(int)
    page = (0x14, 0x17, 0x1B) if dark else (255, 255, 255)
    css = re.findall(r"--page: #(\w+)", Path("report.html").read_text(encoding="utf-8"))
    assert css[:2] == ["ffffff", "14171b"]
    # The margins are empty on both sides, whatever the names are, and something is drawn between them.
    for margin in (pixels[:, :4], pixels[:, -4:]):
        assert (margin == page).all()
    assert (pixels != page).any(axis=2).mean() > 0.01
