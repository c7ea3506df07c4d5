"""Wrong inputs of every command: the exit code, and a phrase of the message.

Those that start other processes run in one that is forked, without torch: no wrong input may need it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from scarctl.cli.main import COMMANDS, cli
from scarctl.store import Store
from tests.cli.conftest import fresh
from tests.support import forkserver

IMPORTS = (
    "scarctl.cli.main",
    "scarctl.ops.survey",
    "scarctl.ops.recover",
    "scarctl.ops.export",
    "scarctl.store",
)
PROGRAM = "import sys; sys.modules['torch'] = None; from scarctl.cli.main import main; main()"

NO_STORE = (10, "nowhere: there is no store here")
A_FILE = (10, "this is a file, not a store's folder")
MISSING = (2, "Missing option '--store'")
NEITHER = (2, "name a store or a checkpoint")
NO_ARGUMENT = (2, "Missing argument 'STORE'")

TABLE: dict[str, dict[str, tuple[int, str]]] = {
    "": {
        "verfy --store run": (2, "there is no command 'verfy'; did you mean verify?"),
        "restore": (2, "did you mean recover?"),
        "xyzzy": (2, "there is no command 'xyzzy'"),
        "--store run verify": (2, "No such option '--store'"),
    },
    "help": {"verfy": (2, "did you mean verify?"), "verify x": (2, "has no commands of its own")},
    "version": {"x": (2, "unexpected extra argument"), "--store x": (2, "No such option")},
    "checkpoint": {
        "": (2, "Missing argument 'STATE'"),
        "state.safetensors": (2, "Missing option"),
        "state.safetensors --store new --step x": (2, "'x' is not a valid integer"),
        "state.safetensors --store new --step -1": (2, "step is -1"),
        "state.safetensors --store ckpt --step 1 --fraction 2": (2, "the fraction is '2'"),
        "state.safetensors --store ckpt --step 1 --fraction 150%": (2, "the fraction is '150%'"),
        "state.safetensors --store ckpt --step 1 --policy full --fraction 1/4": (
            2,
            "--fraction has no effect",
        ),
        "state.safetensors --store new --step 0 --partition-bytes 4XB": (2, "'4XB' is not a number of bytes"),
        "state.safetensors --store new --step 0 --partition-bytes 0": (2, "not a number of bytes above 0"),
        "state.safetensors --store new --step 0 --shards 0": (2, "shards is 0"),
        "state.safetensors --store ckpt --step 1 --shards 9": (2, "shards"),
        "state.safetensors --store page.html --step 0": A_FILE,
        "state.safetensors --store dangling/new --step 0": (10, "this symbolic link leads to nothing"),
        "missing.safetensors --store new --step 0": (2, "missing.safetensors does not exist"),
        "x.npz --store new --step 0": (2, "x.npz is an archive of numpy arrays (.npz)"),
        "page.html --store new --step 0": (2, "page.html is a web page"),
        "folder --store new --step 0": (2, "a folder without a .metadata file"),
        "ckpt --store new --step 0": (2, "ckpt is a store, not a state file"),
    },
    "daemon": {
        "": (2, "Missing argument"),
        "strat": (2, "'strat' is not one of"),
        "start --reap": (2, "--reap requires stop, not start"),
        "status --timeout 3": (2, "--timeout requires stop"),
        "stop --timeout -1": (2, "-1"),
        "status": (17, "no daemon is running on this host"),
    },
    "diff": {
        "": (2, "Missing argument 'A'"),
        "ckpt": (2, "Missing argument 'B'"),
        "ckpt nowhere": (2, "nowhere does not exist"),
        "ckpt ckpt@best": (2, "no snapshot 'best'"),
        "ckpt ckpt@77": (16, "no sealed state of step 77"),
        "ckpt page.html": (2, "a web page"),
        "ckpt state.safetensors --rtol -1": (2, "-1"),
    },
    "doctor": {
        "": (2, "either STORE or --peer"),
        "--store ckpt --peer west:4": (2, "either STORE or --peer"),
        "--peer west": (2, "HOST:PORT"),
        "--peer west:0": (2, "HOST:PORT"),
        "--peer west:4 --peer-tls host.pem,host.key": (2, "peer_tls is not three paths"),
        "--peer west:4 --peer-tls a.pem,a.key,ca.pem": (2, "a.pem"),
        "--peer 127.0.0.1:1": (17, "cannot be reached"),
        "--store ckpt --rounds 0": (2, "--rounds"),
        "--store page.html": A_FILE,
        "--store folder": (10, "this folder holds other files ('file'), but no store"),
        "--store dangling": (10, "dangling: this symbolic link leads to nothing"),
    },
    "evacuate": {
        "": (2, "Missing option '--deadline'"),
        "--deadline soon": (2, "'soon'"),
        "--deadline 5s": (2, "no run is here"),
        "--deadline 5s --store nowhere": NO_STORE,
        "--deadline 5s --store nowhere --dry-run": NO_STORE,
        "--deadline 5s --store ckpt": (2, "no running session saves to this store"),
        "--deadline 5s --store ckpt --all": (2, "--all acts on every run"),
    },
    "export": {
        "out": MISSING,
        "--store ckpt": (2, "Missing argument 'OUTPUT'"),
        "--store nowhere out": NO_STORE,
        "--store empty out": (16, "empty"),
        "--store ckpt folder": (2, "folder already exists"),
        "--store ckpt out --snapshot best": (2, "no snapshot 'best'"),
        "--store ckpt out --format zip": (2, "'zip' is not one of"),
        "--store ckpt out --max-shard-size 5QB": (2, "not a number of bytes"),
        "--store ckpt out.pt --format pt --max-shard-size 4KiB": (
            2,
            "--max-shard-size splits the files of a folder",
        ),
    },
    "inspect": {
        "": NEITHER,
        "--store nowhere": NO_STORE,
        "--store page.html": A_FILE,
        "--store ckpt --limit -3": (2, "'-3' is neither a number"),
        "--store ckpt --limit 3": (2, "--limit requires --json"),
        "--store ckpt extra": (2, "give a CHECKPOINT or --store, not both"),
        "--store ckpt --values": (2, "--values is for a CHECKPOINT"),
        "x.npz": (2, "an archive of numpy arrays"),
        "folder": (2, "without a checkpoint"),
        "ckpt@best": (2, "no snapshot 'best'"),
        "ckp": (2, "check the path; did you mean ckpt?"),
        "ckpt/layout": (2, "did you mean the store ckpt?"),
        "ckpt/scarctl.json": (2, "did you mean the store ckpt?"),
        ".": (2, "stores in .: ckpt, empty"),
    },
    "live": {
        "": (2, "Usage:"),
        "chekpoint": (2, "did you mean checkpoint?"),
        "checkpoint": NO_ARGUMENT,
        "checkpoint --store nowhere": NO_STORE,
        "checkpoint --store ckpt": (2, "no running session saves to this store"),
        "checkpoint --store ckpt --timeout -1": (2, "-1"),
        "recover --store ckpt": (2, "Missing option '--lost'"),
        "recover --store ckpt --lost 0": (2, "no running session saves to this store"),
    },
    "plan": {
        "": (2, "Missing option"),
        "--bandwidth 2GB --mtbf 6h": (2, "give --state-bytes and --step-time"),
        "--bandwidth 2XB --mtbf 6h": (2, "'2XB' is not a number of bytes"),
        "--bandwidth 2GB --mtbf 6y": (2, "'6y' is not a time"),
        "--bandwidth 2GB --mtbf 6h --from nowhere": NO_STORE,
        "--bandwidth 2GB --mtbf 6h --from empty": (2, "empty"),
    },
    "prune": {
        "": NO_ARGUMENT,
        "ckpt --store ckpt --dry-run": (2, "--store is given twice"),
        "--store nowhere": NO_STORE,
        "--store ckpt --keep-last -1": (2, "keep"),
        "--store ckpt --keep best --yes": (2, "best"),
        "--store ckpt --no-writer --yes": (2, "--no-writer applies to remote stores"),
        "--store ckpt --dry-run --yes": (2, "--yes deletes, and --dry-run deletes nothing"),
    },
    "recover": {
        "--store ckpt": (2, "Missing option '--lost'"),
        "--lost 0": NO_ARGUMENT,
        "ckpt --store ckpt --lost 0": (2, "--store is given twice"),
        "--store nowhere --lost 0 --output o.safetensors": NO_STORE,
        "nowhere --lost 0 --output o.safetensors": NO_STORE,
        "ckp --lost 0 --output o.safetensors": (10, "ckpt?"),
        "ckpt/lanes --lost 0 --output o.safetensors": (10, "did you mean the store"),
        "--store empty --lost all --output o.safetensors": (16, "empty"),
        "--store ckpt --lost 99 --output o.safetensors": (2, "99"),
        "--store ckpt --lost nothing.like.it --output o.safetensors": (2, "nothing.like.it"),
        "--store ckpt --lost 0": (2, "this host has no arena of a stopped run"),
        "--store ckpt --lost 0 --into state.safetensors --output o.pt": (2, "exclude each other"),
        "--store ckpt --lost 0 --output o.npz": (2, "scarctl writes no .npz files"),
        "--store ckpt --lost 0 --output folder": (2, "not a regular file"),
        "--store ckpt --lost 0 --output ckpt/o.safetensors": (2, "inside the store"),
        "--store ckpt --lost 0 --into folder": (2, "without a .metadata file"),
        "--store ckpt --lost 0 --into missing.safetensors": (2, "does not exist"),
        "--store ckpt --lost all --snapshot best": (2, "use --mode rollback"),
        "--store ckpt --lost all --mode sideways": (2, "'sideways' is not one of"),
        "--store ckpt --lost all --mode rollback --snapshot best --output o.pt": (2, "no snapshot 'best'"),
        "--store ckpt --lost 0 --max-rework -1": (2, "-1"),
    },
    "rehearse": {
        "": (2, "Missing argument 'CMD...'"),
        "--": (2, "Missing argument 'CMD...'"),
        "--steps 3 -- true": (2, "--steps"),
        "--steps many -- true": (2, "'many' is not a valid integer"),
        "--timeout -1 -- true": (2, "-1"),
        "--store ckpt -- true": (2, "No such option '--store'"),
        "-- there-is-no-such-command": (2, "there-is-no-such-command: No such file"),
        "-- ./notes.txt": (2, "Permission denied"),
        "-- true": (1, "exit code 0, and never called scarctl.attach"),
        "-- false": (1, "exit code 1, and never called scarctl.attach"),
    },
    "report": {
        "--output r.html": NO_ARGUMENT,
        "ckpt --store ckpt": (2, "--store is given twice"),
        "nowhere": NO_STORE,
        "--store ckpt --output folder": (2, "folder cannot be written as a file"),
        "--store ckpt --output gone/r.html": (2, "cannot be written as a file"),
    },
    "run": {
        "": (125, "Missing argument"),
        "--store tape://0 -- true": (125, "tape"),
        "--restarts -1 -- true": (125, "-1"),
        "--stroe ckpt -- true": (125, "--store"),
        "-- there-is-no-such-command": (127, "No such file"),
        "-- ./notes.txt": (126, "Permission denied"),
    },
    "simulate": {
        "": (2, "Missing argument 'WORKLOAD'"),
        "nowhere:build --trials 0": (2, "--trials"),
        "no-colon": (2, "no-colon"),
        "a.b:c --lost 2": (2, "'2' is not a share"),
        "a.b:c --fraction 120%": (2, "'120%' is not a share"),
        "a.b:c --policy best": (2, "unknown policy 'best'"),
        "a.b:c --failure-rate 0.5 --fail-after 3": (2, "iteration 3"),
        "a.b:c --plot x.jpg": (2, "a picture is SVG or PNG"),
    },
    "snapshot": {
        "": (2, "Usage:"),
        "lst --store ckpt": (2, "did you mean list?"),
        "list": NO_ARGUMENT,
        "list --store nowhere": NO_STORE,
        "create best --store ckpt --step 3": (2, "--step requires STATE"),
        "create best --store ckpt --partition-bytes 4KiB": (2, "--partition-bytes requires STATE"),
        "create best state.safetensors --store ckpt": (2, "give --step with STATE"),
        "create best state.safetensors --store ckpt --step 3 --timeout 3": (
            2,
            "--timeout cannot be combined",
        ),
        "create best --store ckpt": (2, "no running session"),
        "create a/b state.safetensors --store ckpt --step 1": (2, "a/b"),
        "delete --store ckpt": (2, "Missing argument 'NAME...'"),
        "delete best --store ckpt --yes": (2, "best"),
    },
    "status": {
        "": (10, "no run on this host saves to a store"),
        "ckpt --store ckpt": (2, "--store is given twice"),
        "ckpt --every 3": (2, "--every requires --watch"),
    },
    "verify": {
        "": NEITHER,
        "--store nowhere": NO_STORE,
        "--store page.html": A_FILE,
        "--store folder": (10, "folder"),
        "--store empty": (16, "nothing has been saved to this store yet"),
        "--store ckpt --finite": (2, "--finite is for a CHECKPOINT"),
        "state.safetensors --read-data-subset 1/2": (2, "--read-data-subset is for stores"),
        "--store ckpt --read-data-subset 8/7": (2, "'8/7' is not a part of the data"),
        "--store ckpt --read-data-subset 1/2 --no-read-data": (2, "--no-read-data"),
        "--store unheard-of://bucket/x": (2, "unheard-of"),
    },
}
"""By command: arguments, exit code, and a phrase of stderr."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, template: Path) -> Path:
    """Return a folder with stores and files of all kinds, which wrong inputs do not change."""
    folder = tmp_path_factory.mktemp("wrong")
    fresh(folder / "state.safetensors")
    shutil.copytree(template, folder / "ckpt")
    Store.create(str(folder / "empty"))
    np.savez(folder / "x.npz", a=np.ones(3))
    (folder / "page.html").write_text("\n<!DOCTYPE html><html><body>404</body></html>")
    (folder / "empty.safetensors").touch()
    (folder / "notes.txt").write_text("just text")
    (folder / "dangling").symlink_to("gone")
    (folder / "folder").mkdir()
    (folder / "folder" / "file").touch()
    return folder


def answer(words: list[str], folder: Path) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    if words[:1] in (["run"], ["rehearse"]):
        done = forkserver.run(["-c", PROGRAM, *words], timeout=60, cwd=folder, imports=IMPORTS)
        return done.returncode, done.stdout, done.stderr
    result = CliRunner().invoke(cli, words)
    return result.exit_code, result.stdout, result.stderr


def content(folder: Path) -> dict[str, int]:
    """Return the sizes of all files below a folder. A lock has the process id of its last owner."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


@pytest.mark.parametrize("command", TABLE)
def test_wrong_inputs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before, wrong = content(folder), []
    for arguments, (code, phrase) in TABLE[command].items():
        words = [*command.split(), *arguments.split()]
        found, stdout, stderr = answer(words, folder)
        said = " ".join(stderr.split())
        if found != code or phrase not in said or "unexpected " in said.replace("unexpected extra", ""):
            wrong.append(f"scarctl {' '.join(words)}\n    exit code {found}, not {code}: {said}\n")
        elif stdout and command not in ("verify", "status"):
            wrong.append(f"scarctl {' '.join(words)}\n    stdout: {stdout}\n")
    assert not wrong, "\n" + "\n".join(wrong)
    assert content(folder) == before


def test_a_current_folder_that_was_deleted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in ("status ../ckpt", "verify --store ckpt", f"export --store {folder / 'ckpt'} out"):
        code, stdout, stderr = answer(words.split(), folder)
        assert (code, stdout, "the current folder no longer exists" in stderr) == (2, "", True), stderr
    assert answer(["verify", "--store", str(folder / "ckpt")], folder)[0] == 0


def test_the_table_has_every_command() -> None:
    assert set(TABLE) == {"", "help", "version", *COMMANDS}
