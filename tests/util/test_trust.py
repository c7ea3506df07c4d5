"""Test settings files that others may write, and options of the command line alone, through the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scarctl.store import Store
from scarctl.util.trust import why_untrusted

NOBODY = 65534

only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of this user's with a scarctl.toml that names a store."""
    work = tmp_path / "work"
    work.mkdir(mode=0o755)
    Store.create(str(tmp_path / "planted")).close()
    (work / "scarctl.toml").write_text(f'store = "{tmp_path / "planted"}"\n')
    (work / "scarctl.toml").chmod(0o644)
    return work


def scarctl(folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scarctl", *arguments],
        cwd=folder,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_users_own_file_counts(folder: Path) -> None:
    done = scarctl(folder, "inspect")
    assert (done.returncode, done.stderr) == (0, "")
    assert str(folder.parent / "planted") in done.stdout


def _chmod(name: str, mode: int) -> Callable[[Path], None]:
    return lambda folder: (folder / name).chmod(mode)


def _chown(name: str) -> Callable[[Path], None]:
    return lambda folder: os.chown(folder / name, NOBODY, NOBODY)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_chmod("scarctl.toml", 0o666), "every user may write to it"),
        (_chmod("", 0o777), "every user may write to its folder"),
        pytest.param(_chown("scarctl.toml"), f"it belongs to user {NOBODY}", marks=only_root),
        pytest.param(_chown(""), f"its folder belongs to user {NOBODY}", marks=only_root),
    ],
)
def test_one_that_others_may_write_is_ignored(folder: Path, change: Callable[[Path], None], why: str) -> None:
    change(folder)
    done = scarctl(folder, "inspect")
    assert done.returncode == 2, "no store is given"
    assert done.stderr.count(f"{folder / 'scarctl.toml'} is ignored: {why}") == 1
    assert "chmod go-w" in done.stderr


@only_root
def test_a_group_of_others(folder: Path) -> None:
    os.chown(folder / "scarctl.toml", -1, NOBODY)
    (folder / "scarctl.toml").chmod(0o664)
    assert f"group {NOBODY} may write to it" in scarctl(folder, "inspect").stderr


@only_root
def test_a_link_of_somebody_else(folder: Path) -> None:
    (folder / "scarctl.toml").rename(folder / "mine")
    (folder / "scarctl.toml").symlink_to("mine")
    assert scarctl(folder, "inspect").returncode == 0
    os.chown(folder / "scarctl.toml", NOBODY, NOBODY, follow_symlinks=False)
    assert f"it belongs to user {NOBODY}" in scarctl(folder, "inspect").stderr


def test_where_others_may_make_files_and_replace_none(folder: Path) -> None:
    folder.chmod(0o1777)
    path = folder / "scarctl.toml"
    assert why_untrusted(path, path.stat()) is None


def test_what_to_do_comes_from_the_command_line_only(folder: Path) -> None:
    done = scarctl(folder, "prune", SCARCTL_KEEP="first", SCARCTL_YES="1")
    assert done.returncode == 0, "there is no such snapshot, and nobody asked for it"
    assert "SCARCTL_KEEP has no effect: give --keep on the command line" in done.stderr
    assert "SCARCTL_YES has no effect" in done.stderr
    with (folder / "scarctl.toml").open("a") as file:
        file.write("[prune]\nyes = true\n")
    done = scarctl(folder, "prune")
    assert done.returncode == 2
    assert "'yes', which is not a setting" in done.stderr
