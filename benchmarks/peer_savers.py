"""Define one class per way to save a training state, all with the same four calls; `peers.py` measures them.

What a user would write in the training loop is the class's `lines`. Every class imports its library when it is made.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from training import tensors, wait_durable, whole_state

PARTS = 8
Timed = Callable[[], object]


def timed(call: Timed) -> float:
    """Return the seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Saver:
    """Saves the state of a model and its optimizer into `folder`, whole."""

    lines: ClassVar[str]
    """Lines that a user adds to a training loop, to save and to continue after a failure."""
    parts = 1
    """Checkpoints that are as many bytes as the state."""

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        self.model, self.optimizer, self.folder = model, optimizer, folder
        self.held = 0.0
        """Seconds that the training thread was held since `begin`."""

    def begin(self, steps: int) -> None:
        """Begin a cycle of so many steps."""
        self.held = 0.0
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def iteration(self, number: int, work: Timed) -> None:
        """Make one iteration of a cycle, the first of which begins with a checkpoint."""
        if number == 0:
            self.held += timed(self.save)
        work()
        self.held += timed(self.before_step)
        self.optimizer.step()

    def end(self) -> int:
        """End the cycle: wait until everything is saved. Returns bytes written."""
        self.wait()
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def save(self) -> None:
        """Begin a checkpoint."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Wait for what must not be changed yet."""

    def wait(self) -> None:
        """Wait until the checkpoint is complete, as far as the library says."""

    def save_now(self) -> None:
        """Make a checkpoint from beginning to end."""
        self.save()
        self.before_step()
        self.wait()

    save_whole = save_now

    def load(self) -> None:
        """Bring the whole state back, into the live tensors."""
        raise NotImplementedError

    def load_part(self) -> None:
        """Do the same where 1/8 of it is lost: load all of it if there is no other way."""
        self.load()

    def close(self) -> None:
        """Release everything."""

    def _copy(self, found: dict[str, Any]) -> None:
        for name, tensor in tensors(self.model, self.optimizer):
            tensor.copy_(torch.as_tensor(np.asarray(found[name])))


class Scarctl(Saver):
    lines = "session = scarctl.attach(model, optimizer, store=folder)\nsession.resume()"
    parts = PARTS

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        import scarctl

        self.session = scarctl.attach(
            model,
            optimizer,
            store=folder / "store",
            fraction=1 / PARTS,
            partitioning=scarctl.Partitioning(shards=PARTS),
            settings=scarctl.Settings(on_error="raise"),
        )
        optimizer.step()  # its checkpoint is the whole initial state, once in a run
        optimizer.step()
        wait_durable(self.session, self.session.head_step - 1)

    def begin(self, steps: int) -> None:
        # The first iteration of a cycle, and every eighth part of it after that, has a checkpoint.
        self._interval(steps // PARTS)
        while (self.session.head_step + 1) % (steps // PARTS):
            self.optimizer.step()
        self.wait()
        self.before = self.session.stats.stall_seconds, self.session.stats.saved_bytes

    def iteration(self, number: int, work: Timed) -> None:
        work()
        self.optimizer.step()

    def end(self) -> int:
        self.optimizer.step()  # the last checkpoint is queued at the beginning of a step
        self._interval(1 << 30)
        self.wait()
        stats = self.session.stats
        self.held = stats.stall_seconds - self.before[0]
        return stats.saved_bytes - self.before[1]

    def save_now(self) -> None:
        self.optimizer.step()
        self.session.checkpoint(wait=True)

    def save_whole(self) -> None:
        self.session.checkpoint(full=True, wait=True)

    def wait(self) -> None:
        assert self.session._engine is not None
        self.session._engine.saver.drain(300)

    def load(self) -> None:
        self._recover("all")

    def load_part(self) -> None:
        self._recover(3)

    def _recover(self, lost: str | int) -> None:
        # No public call loses what is in memory.
        engine = self.session._engine
        assert engine is not None
        ids = np.arange(engine.layout.partitions)
        engine.arena.begin(ids if lost == "all" else ids[engine.shard_of == lost])
        self.session.recover(lost)

    def _interval(self, steps: int) -> None:
        # Cycles without checkpoints are wanted, and a session has one interval.
        assert self.session._engine is not None
        self.session._engine.cadence.interval = steps

    def close(self) -> None:
        self.session.close(seal=False)


class TorchSave(Saver):
    lines = "torch.save(state, path)\nload(torch.load(path))"

    def save(self) -> None:
        torch.save(whole_state(self.model, self.optimizer), self.folder / "state.pt")

    def load(self) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=True)
        for number, (name, parameter) in enumerate(self.model.named_parameters()):
            parameter.detach().copy_(state["model"][name])
            for slot in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[parameter][slot].copy_(state["optimizer"]["state"][number][slot])


class Safetensors(Saver):
    lines = "save_file(tensors, path)\nload(load_file(path))"

    def save(self) -> None:
        from safetensors.torch import save_file

        save_file(dict(tensors(self.model, self.optimizer)), self.folder / "state.safetensors")

    def load(self) -> None:
        from safetensors.torch import load_file

        self._copy(load_file(self.folder / "state.safetensors"))


class Dcp(Saver):
    """The name says how: plain, in a thread, in a process, with staging in a thread of its own."""

    lines = "dcp.save(state, checkpoint_id=path)\ndcp.load(state, checkpoint_id=path)"
    process = staged = False

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        self.dcp = dcp
        if self.process and not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(self) -> None:
        self.dcp.save(
            dict(tensors(self.model, self.optimizer)), checkpoint_id=self.folder / "dcp", no_dist=True
        )

    def load(self) -> None:
        self.dcp.load(
            dict(tensors(self.model, self.optimizer)), checkpoint_id=self.folder / "dcp", no_dist=True
        )


class DcpThread(Dcp):
    lines = "saved = dcp.async_save(state, checkpoint_id=path)\nsaved.result()\ndcp.load(state, checkpoint_id=path)"

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        pinned = isinstance(self, DcpPinned)
        self.stager = DefaultStager(StagingOptions(pinned, self.process, self.process or self.staged, pinned))
        self.pending: Any = None

    def save(self) -> None:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self.pending = self.dcp.async_save(
            dict(tensors(self.model, self.optimizer)),
            checkpoint_id=self.folder / "dcp",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS
            if self.process
            else AsyncCheckpointerType.THREAD,
            async_stager=self.stager,
            no_dist=not self.process,
        )

    def before_step(self) -> None:
        # Both with staging in a thread: it reads the state.
        if hasattr(self.pending, "staging_completion"):
            self.pending.staging_completion.result()
            self.pending = self.pending.upload_completion

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def close(self) -> None:
        self.stager.close()


class DcpStaged(DcpThread):
    staged = True


class DcpProcess(DcpThread):
    process = True


class DcpPinned(DcpThread):
    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        if not torch.cuda.is_available():
            raise ImportError("there is no GPU: pinned memory is for copies from one")
        super().__init__(model, optimizer, folder)


class Torchsnapshot(Saver):
    lines = (
        "snapshot = Snapshot.async_take(path, app_state)\nsnapshot.wait()\nSnapshot(path).restore(app_state)"
    )

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        self.library = importlib.import_module("torchsnapshot")
        self.pending: Any = None

    def _state(self) -> dict[str, Any]:
        return {"state": self.library.StateDict(**dict(tensors(self.model, self.optimizer)))}

    def save(self) -> None:
        path = self.folder / "snapshot"
        self.pending = self.library.Snapshot.async_take(str(path), self._state())

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None

    def load(self) -> None:
        self.library.Snapshot(str(self.folder / "snapshot")).restore(self._state())


class Orbax(Saver):
    lines = (
        "checkpointer.save(path, state)\ncheckpointer.wait_until_finished()\nload(checkpointer.restore(path))"
    )

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        library = importlib.import_module("orbax.checkpoint")
        self.checkpointer = library.AsyncCheckpointer(library.StandardCheckpointHandler())

    def _state(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in tensors(self.model, self.optimizer)}

    def save(self) -> None:
        self.checkpointer.save(self.folder / "orbax", self._state(), force=True)

    def wait(self) -> None:
        self.checkpointer.wait_until_finished()

    def load(self) -> None:
        self._copy(self.checkpointer.restore(self.folder / "orbax"))

    def close(self) -> None:
        self.checkpointer.close()


class Dlrover(Saver):
    lines = (
        "checkpointer.save_checkpoint(step, state, storage_type=DISK)\nload(checkpointer.load_checkpoint())"
    )

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        library = importlib.import_module("dlrover.trainer.torch.flash_checkpoint.ddp")
        # Names its sockets and memory, next to those that a killed run has left. Without its launcher it starts the
        # process that saves alone.
        os.environ["TORCHELASTIC_RUN_ID"] = f"scarctl-benchmark-{os.getpid()}"
        # Forked from a process with threads that one hangs now and then.
        multiprocessing.set_start_method("spawn")
        self.checkpointer = library.DdpCheckpointer(str(folder / "flash"))
        constants = importlib.import_module("dlrover.python.common.constants")
        self.newest = constants.CheckpointConstant.TRACER_FILE_NAME
        self.storage = importlib.import_module(
            "dlrover.trainer.torch.flash_checkpoint.checkpointer"
        ).StorageType.DISK
        self.step = 0

    def save(self) -> None:
        self.step += 1
        self.checkpointer.save_checkpoint(
            self.step, dict(tensors(self.model, self.optimizer)), storage_type=self.storage
        )

    def wait(self) -> None:
        # What it waits with itself looks every three seconds.
        newest = self.folder / "flash" / self.newest
        end = time.monotonic() + 300
        while not newest.exists() or newest.read_text().strip() != str(self.step):
            if time.monotonic() > end:
                raise TimeoutError(f"step {self.step} is not saved")
            time.sleep(0.01)

    def load(self) -> None:
        self._copy(self.checkpointer.load_checkpoint())  # from its shared memory

    def close(self) -> None:
        self.checkpointer._engine._shm_handler.unlink()


class TorchCheckpointing(Saver):
    lines = "saved = manager.save(path, state)\nwith manager.lock(): optimizer.step()\nmanager.load(path, into=state)"

    def __init__(self, model: Any, optimizer: Any, folder: Path) -> None:
        super().__init__(model, optimizer, folder)
        library = importlib.import_module("torch_checkpointing")
        staging = importlib.import_module("torch_checkpointing.staging").CheckpointStagerConfig()
        config = importlib.import_module("torch_checkpointing.config")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        self.manager = library.CheckpointManager(
            library.CheckpointManager.Config(
                save=config.AsyncCheckpointSaverConfig(staging_config=staging),
                # Direct I/O fails where a file's length is not a multiple of a block.
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self.pending: Any = None
        self.number = 0

    def _path(self, number: int) -> Path:
        return self.folder / f"checkpoint-{number}"

    def _state(self) -> dict[str, Any]:
        return {"state": dict(tensors(self.model, self.optimizer))}

    def save(self) -> None:
        self.number += 1  # it refuses to replace one
        self.pending = self.manager.save(str(self._path(self.number)), self._state())

    def before_step(self) -> None:
        with self.manager.lock():
            pass

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None
            shutil.rmtree(self._path(self.number - 1), ignore_errors=True)

    def load(self) -> None:
        self._copy(self.manager.load(str(self._path(self.number)), into=self._state())["state"])

    def close(self) -> None:
        self.manager.close()


SAVERS: dict[str, Callable[[Any, Any, Path], Saver]] = {
    "scarctl": Scarctl,
    "torch.save": TorchSave,
    "safetensors": Safetensors,
    "DCP save": Dcp,
    "DCP async, thread": DcpThread,
    "DCP async, staged in a thread": DcpStaged,
    "DCP async, process": DcpProcess,
    "DCP async, pinned": DcpPinned,
    "torchsnapshot": Torchsnapshot,
    "Orbax": Orbax,
    "torch_checkpointing": TorchCheckpointing,
    "DLRover flash": Dlrover,
}
