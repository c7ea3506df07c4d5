"""Test the callback with a trainer: what it refuses, what it leaves untouched, and that it leaves nothing behind."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader

from scarctl.errors import UsageError
from tests.support.lazy import Lazy

if TYPE_CHECKING:
    import lightning.pytorch as pl
    import pytorch_lightning
    from lightning.pytorch import callbacks as others
    from lightning.pytorch import strategies

    from scarctl_adapters.lightning import callback as adapter
    from tests.adapters.lightning import fits
else:
    pl, pytorch_lightning = Lazy("lightning.pytorch"), Lazy("pytorch_lightning")
    others, strategies = Lazy("lightning.pytorch.callbacks"), Lazy("lightning.pytorch.strategies")
    adapter, fits = Lazy("scarctl_adapters.lightning.callback"), Lazy("tests.adapters.lightning.fits")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def trainer_with(*callbacks: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(**{**fits.QUIET, "max_epochs": 1, **options}, callbacks=list(callbacks))


def test_a_fit_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    without, trainer = fits.fit(fits.Net, None)
    expected = fits.outcome(without, trainer)
    net, trainer = fits.fit(fits.Net, tmp_path / "store")
    assert net.seen == without.seen
    assert net.validated == without.validated
    assert fits.differing(fits.outcome(net, trainer), expected) == []


def test_a_fit_that_is_over_is_over(tmp_path: Path) -> None:
    first, trainer = fits.fit(fits.Net, tmp_path / "store")
    expected = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    net, trainer = fits.fit(fits.Net, tmp_path / "store")
    assert net.seen == net.validated == []
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
    longer, trainer = fits.fit(fits.Net, tmp_path / "store", max_epochs=3)
    whole, straight = fits.fit(fits.Net, None, max_epochs=3)
    assert longer.seen == whole.seen[12:]
    assert fits.differing(fits.outcome(longer, trainer), fits.outcome(whole, straight)) == []


def test_other_callbacks_go_on_with_their_state(tmp_path: Path) -> None:
    def usual() -> list[Any]:
        best = others.ModelCheckpoint(tmp_path / "best", monitor="validation", save_top_k=2, save_last=True)
        return [best, others.EarlyStopping("validation", patience=2)]

    options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 8}
    _whole, trainer = fits.fit(fits.Net, None, callbacks=usual(), **options)
    wanted, stopped = trainer.callbacks[-1].best_model_score, trainer.current_epoch
    for path in (tmp_path / "best").iterdir():
        path.unlink()
    with pytest.raises(fits.Interrupted):
        fits.fit(fits.Net, tmp_path / "store", ("train", 1, 3), callbacks=usual(), **options)
    _net, trainer = fits.fit(fits.Net, tmp_path / "store", callbacks=usual(), **options)
    assert trainer.callbacks[-1].best_model_score == wanted
    assert trainer.current_epoch == stopped
    assert len(trainer.callbacks[-1].best_k_models) == 2
    assert Path(trainer.callbacks[-1].best_model_path).exists()


def test_a_checkpoint_of_the_users_wins_over_the_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = others.ModelCheckpoint(tmp_path / "mine", every_n_epochs=1, save_top_k=-1, filename="{epoch}")
    fits.fit(fits.Net, tmp_path / "store", callbacks=[mine], enable_checkpointing=True, max_epochs=3)
    checkpoint = tmp_path / "mine" / "epoch=0.ckpt"
    straight, trainer = fits.fit(fits.Net, None, ckpt_path=checkpoint)
    expected = {name: tensor.clone() for name, tensor in straight.state_dict().items()}
    with caplog.at_level(logging.WARNING, "scarctl"):
        net, trainer = fits.fit(fits.Net, tmp_path / "store", ckpt_path=checkpoint)
    assert "epoch=0.ckpt, at step 3: the first step replaces" in caplog.text
    assert trainer.callbacks[0].resumed is None
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
    # The store now has this state.
    again, trainer = fits.fit(fits.Net, tmp_path / "store")
    assert trainer.callbacks[0].resumed.consistent
    assert trainer.global_step == 6
    assert again.seen == []
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_two_fits_with_one_callback(tmp_path: Path) -> None:
    callback = adapter.ScarCallback(tmp_path / "store", **fits.EXACT)
    pl.seed_everything(1)
    net, trainer = fits.Net(), trainer_with(callback)
    trainer.fit(net, fits.loader())
    trainer.fit_loop.max_epochs = 2
    with torch.no_grad():
        net.embed.weight.add_(1.0)
    moved = net.embed.weight.clone()
    trainer.validate(net, DataLoader(fits.numbers(11), batch_size=4), verbose=False)
    trainer.fit(net, fits.loader())
    assert callback.resumed is None
    assert trainer.global_step == 12
    assert (net.embed.weight - moved).abs().max() < 0.5
    assert len(net.seen) == 12
    fresh, trainer = (
        fits.Net(),
        trainer_with(adapter.ScarCallback(tmp_path / "store", **fits.EXACT), max_epochs=2),
    )
    trainer.fit(fresh, fits.loader())
    assert fresh.seen == []
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), fresh.parameters(), strict=True))


def test_nothing_happens_outside_of_fit(tmp_path: Path) -> None:
    callback, net = adapter.ScarCallback(tmp_path / "store"), fits.Net()
    trainer = trainer_with(callback)
    data = DataLoader(fits.numbers(11), batch_size=4)
    trainer.validate(net, data, verbose=False)
    trainer_with(callback, fast_dev_run=True).fit(net, fits.loader())
    assert not (tmp_path / "store").exists()
    with pytest.raises(UsageError, match="no fit is running"):
        _ = callback.session


# -- refused -----------------------------------------------------------------------------------------------------


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UsageError, match="no option 'intervall'"):
        adapter.ScarCallback("x", intervall=3)
    ungrouped = {"policy": "full"}
    with pytest.raises(UsageError, match="no option 'policy'"):
        adapter.ScarCallback("x", **ungrouped)
    with pytest.raises(UsageError, match="all ranks of a fit save together"):
        adapter.ScarCallback("x", ranks=False)
    with pytest.raises(UsageError, match="schedulers comes from the Trainer"):
        adapter.ScarCallback("x", schedulers=[])
    with pytest.raises(UsageError, match="scarctl's own"):
        adapter.ScarCallback("x", extras={"lightning": {}})
    with pytest.raises(UsageError):
        adapter.ScarCallback("x", mode="sometimes")


def test_two_callbacks_are_refused(tmp_path: Path) -> None:
    one = adapter.ScarCallback(tmp_path / "store")
    for callbacks in ([one, one], [one, adapter.ScarCallback(tmp_path / "other")]):
        net = fits.Net()
        with pytest.raises(UsageError, match="more than one ScarCallback"):
            trainer_with(*callbacks).fit(net, fits.loader())
        assert net.seen == []
    assert list(tmp_path.iterdir()) == []


def test_a_module_without_optimizer_is_refused(tmp_path: Path) -> None:
    class Frozen(fits.Net):
        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(UsageError, match=r"Frozen\.configure_optimizers returns no optimizer"):
        fits.fit(Frozen, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_shorter_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fits.Interrupted):
        fits.fit(fits.Net, tmp_path / "store", ("train", 1, 5))
    short = DataLoader(fits.numbers(8), batch_size=4, shuffle=True)
    with pytest.raises(UsageError, match="ends before batch 4"):
        fits.fit(fits.Net, tmp_path / "store", train=short)


def test_strategies_that_scarctl_cannot_see_into_are_refused(tmp_path: Path) -> None:
    class OwnStrategy(strategies.ParallelStrategy):
        root_device = None

    OwnStrategy.__abstractmethods__ = frozenset()
    for kind, hint in (
        (strategies.DeepSpeedStrategy, "ddp"),
        (strategies.FSDPStrategy, "fully_shard"),
        (OwnStrategy, "DDPStrategy"),
    ):
        with pytest.raises(UsageError, match=f"{kind.__name__} keeps .*{hint}"):
            adapter._check_strategy(kind.__new__(kind))  # properly made ones need a GPU, or a package
    adapter._check_strategy(strategies.DDPStrategy.__new__(strategies.DDPStrategy))


# -- faults ------------------------------------------------------------------------------------------------------


def test_a_callback_with_a_state_that_cannot_be_saved_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(pl.Callback):
        state_key = "Odd"

        def state_dict(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    with caplog.at_level(logging.WARNING, "scarctl"), pytest.raises(fits.Interrupted):
        fits.fit(fits.Net, tmp_path / "store", ("train", 1, 2), callbacks=[Odd()])
    assert "the state of Odd is not saved" in caplog.text
    _, trainer = fits.fit(fits.Net, tmp_path / "store", callbacks=[Odd()])
    assert trainer.callbacks[0].resumed.step == 4


def test_the_other_lightning(tmp_path: Path) -> None:
    """The same class works as a callback of a trainer from the other distribution."""

    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.layer(batch[0].float()[:, None]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    def run(epochs: int) -> tuple[Other, Any]:
        pytorch_lightning.seed_everything(1)
        net, callback = Other(), adapter.ScarCallback(tmp_path / "store", **fits.EXACT)
        trainer = pytorch_lightning.Trainer(**fits.QUIET, max_epochs=epochs, callbacks=[callback])
        trainer.fit(net, fits.loader())
        return net, callback

    run(1)
    _net, callback = run(2)
    assert callback.resumed.step == 6
    assert callback.resumed.consistent


def test_which_lightning_it_is_a_callback_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adapter._callback_classes() == (pl.Callback, pytorch_lightning.Callback)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    assert adapter._callback_classes() == (pytorch_lightning.Callback,)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match=r"scarctl\[lightning\]"):
        adapter._callback_classes()
