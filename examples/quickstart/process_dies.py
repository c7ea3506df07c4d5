"""Show act two: kill the training process, look at its copies, start it again. Commands are as users type them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors import safe_open

HERE = Path(__file__).resolve().parent
SHOWN = 8


def play(store: Path, data: Path | None, images: int, iterations: int, kill_after: int) -> None:
    """Run act two and print it. The store is left in `store`."""
    print("Act two: the process dies.\n")
    started = time.perf_counter()
    train = ["python", str(HERE / "train.py"), "--store", str(store), "--iterations", str(iterations)]
    train += ["--images", str(images)] + ([] if data is None else ["--data", str(data)])
    _train_and_kill(train, kill_after)
    _command(["scarctl", "inspect", "--store", str(store)])
    _command(train)
    output = store.parent / "lost.safetensors"
    _command(["scarctl", "recover", "--store", str(store), "--lost", "0,1", "--output", str(output)])
    _show_file(output)
    _command(["scarctl", "verify", "--store", str(store)])
    print(f"Act two took {time.perf_counter() - started:.0f} s.\n", flush=True)


def _train_and_kill(command: list[str], kill_after: int) -> None:
    """Start training, and kill it without warning when it says that it has done so many iterations."""
    print(f"$ {_typed(command)}", flush=True)
    with subprocess.Popen(_real(command), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(f"  {line}", end="", flush=True)
            if line.startswith("iteration") and int(line.split()[1].rstrip(":")) >= kill_after:
                child.send_signal(signal.SIGKILL)
                break
        else:
            sys.exit("the training ended before it could be killed")
    print(f"  kill -9 {child.pid}\n", flush=True)


def _command(command: list[str]) -> None:
    """Run a command that has to succeed, and show what it prints."""
    print(f"$ {_typed(command)}", flush=True)
    done = subprocess.run(
        _real(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    print("".join(f"  {line}\n" for line in done.stdout.splitlines()), flush=True)
    if done.returncode:
        sys.exit(f"that failed with exit code {done.returncode}")


def _show_file(path: Path) -> None:
    """Print the tensors that any safetensors library finds in a file of restored partitions."""
    with safe_open(path, framework="np") as file:
        names = list(file.keys())
        print(f"{path.name} is an ordinary safetensors file with {len(names)} tensors, such as")
        for name in names[:SHOWN]:
            print(f"  {name}  {tuple(file.get_slice(name).get_shape())}")
    print(flush=True)


def _typed(command: list[str]) -> str:
    """Return the command as a user would type it here: paths below the current folder are relative to it."""
    words = []
    for word in command:
        relative = os.path.relpath(word) if os.path.isabs(word) else word
        words.append(word if relative.startswith("..") else relative)
    return shlex.join(words)


def _real(command: list[str]) -> list[str]:
    """Return the same with this interpreter and the `scarctl` of its installation."""
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    beside = Path(sys.executable).with_name(command[0])
    found = str(beside) if beside.exists() else shutil.which(command[0])
    return [found, *command[1:]] if found else [sys.executable, "-m", command[0], *command[1:]]
