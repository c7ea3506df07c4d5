"""Let the next forward pass of DistributedDataParallel begin before all gradients have arrived.

The elastic scheduler of Nadiradze et al., "Elastic Consistency" (AAAI 2021), section 5 and appendix B.5:

    elastic = schedule(ddp, optimizer, beta=0.8)

A rank steps once its backward pass is over and a fraction `beta` of its gradient's norm has arrived. Its own gradient
takes the place of what is missing: it is lent. The next step adds what has arrived meanwhile, minus the rank's own. So
a rank's parameters differ from the common ones by gradients of one step at most.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from scarctl.errors import UsageError

log = logging.getLogger("scarctl")

_FIRST = 2
"""Steps in which nothing is lent: DDP makes its buckets anew after the first backward pass."""
_LAST_SECONDS = 5.0
"""Longest wait at exit for one bucket, which never arrives if another rank has died."""
_SAMPLE = 16
"""Elements of each gradient that are compared."""


@dataclass(slots=True)
class _Bucket:
    """One bucket of gradients of one step."""

    parameters: list[torch.Tensor]
    views: list[torch.Tensor]
    """Each parameter's part of DDP's flat memory."""
    own: torch.Tensor
    """This rank's gradients, flat. Until they are lent, the memory is DDP's."""
    square: float
    """Squared norm of `own`."""
    mean: torch.Tensor
    """The mean of all ranks' gradients, once `arrived` is set."""
    result: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    arrived: bool = False
    lent: bool = False
    rates: list[float] = field(default_factory=list)
    """Learning rate of each parameter in the step that used `own`."""
    work: Any = None
    released: threading.Event = field(default_factory=threading.Event)
    """Set when the process group's thread has ended its call of `Elastic._arrive`."""

    def owed(self) -> torch.Tensor:
        """Wait for all ranks' gradients; return their mean minus this rank's own, flat."""
        self.work.wait()
        return self.mean - self.own

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of memory that is laid out like the bucket."""
        start = self.views[0].storage_offset()
        return [
            flat.as_strided(view.size(), view.stride(), view.storage_offset() - start) for view in self.views
        ]


class Elastic:
    """The schedule of one model. Made by `schedule`."""

    def __init__(
        self, ddp: DistributedDataParallel, optimizer: Optimizer, beta: float, resync: int | None
    ) -> None:
        """See `schedule`."""
        self._group, self._optimizer, self._beta, self._resync = ddp.process_group, optimizer, beta, resync
        self._share = 1.0 / dist.get_world_size(self._group)
        self._lock = threading.Lock()
        self._buckets: list[_Bucket] = []  # buckets of the newest backward pass
        self._over = False  # whether the newest backward pass is over
        self._owed: list[_Bucket] = []  # buckets lent in the last step, and not corrected yet
        self._stray = False  # whether ranks may differ by more than the owed gradients
        self._clipped = False
        self.steps = 0
        """Steps of the optimizer."""
        self.lent_steps = 0
        """Steps in which a gradient was lent."""
        self.constant = 0.0
        """Largest ‖mean - own‖ that one step lent: with SGD, the B of elastic consistency that was observed."""
        self._called: list[_Bucket] = []  # buckets whose `_arrive` may still run
        weakref.finalize(self, _await_calls, self._called)  # at exit, too
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        ddp.register_comm_hook(self, lambda elastic, bucket: elastic.reduce(bucket))

    @property
    def settled(self) -> bool:
        """Whether nothing has been lent since `settle`, so that the parameters of all ranks are equal."""
        return not self._owed and not self._stray

    def settle(self) -> None:
        """Correct what the last step lent, and make all ranks equal. All ranks call it after the same step.

        Waits for the gradients on their way. If any rank has lent, parameters and the optimizer's slots are averaged.
        """
        if self._buckets:
            raise UsageError("settle() between a backward pass and its step", hint="call it after the step")
        for owed in self._collect():
            self._correct(*owed)
        stray = torch.tensor([float(self._stray)])
        dist.all_reduce(stray, dist.ReduceOp.MAX, self._group)
        if stray.item():
            with torch.no_grad():
                for tensor in self._tensors():
                    dist.all_reduce(tensor, group=self._group)
                    tensor.mul_(self._share)
        self._stray = False

    def _tensors(self) -> list[torch.Tensor]:
        """Return the parameters and floating-point slots, in an order that all ranks share."""
        found: list[Any] = []
        for parameter in self._rates():
            slots = self._optimizer.state.get(parameter, {})
            found += [parameter.detach(), *(slots[name] for name in sorted(slots))]
        return [t for t in found if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]

    # -- the backward pass ---------------------------------------------------------------------------------------

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Begin to reduce a `torch.distributed.GradBucket`. Returns the future that DDP waits for."""
        if bucket.index() == 0:
            if self._buckets:
                raise UsageError(
                    "two backward passes without an optimizer's step between them, in an elastic schedule",
                    hint="accumulate in ddp.no_sync(), and do not skip steps",
                )
            self._over = False
        own = bucket.buffer()
        square = float(torch.linalg.vector_norm(own)) ** 2 if self._lends else 0.0
        entry = _Bucket(bucket.parameters(), bucket.gradients(), own, square, own * self._share)
        with self._lock:
            self._buckets.append(entry)
        entry.work = dist.all_reduce(entry.mean, group=self._group, async_op=True)
        self._called[:] = [one for one in self._called if not one.released.is_set()]
        self._called.append(entry)

        def arrive(future: Any) -> None:
            self._arrive(entry, future)

        weakref.finalize(arrive, entry.released.set).atexit = False
        entry.work.get_future().add_done_callback(arrive)
        if bucket.is_last():
            with self._lock:
                self._over = True
                ready = self._to_lend()
            _lend(ready)
        return entry.result

    def _arrive(self, entry: _Bucket, future: Any) -> None:
        """Take a bucket's mean gradient. Called in a thread of the process group."""
        try:
            future.value()
        except Exception as error:  # DDP raises it where it waits
            if not entry.lent:
                entry.result.set_exception(error)  # type: ignore[arg-type]
            return
        with self._lock:
            entry.arrived = True
            ready = self._to_lend()
        if not entry.lent:
            entry.result.set_result(entry.mean)
        _lend(ready)

    def _to_lend(self) -> list[_Bucket]:
        """Return the buckets that have not arrived, if enough of the gradient has. From now on they are lent."""
        late = [entry for entry in self._buckets if not entry.arrived and not entry.lent]
        if not (late and self._over and self._lends):
            return []
        whole = math.fsum(entry.square for entry in self._buckets)
        there = math.fsum(entry.square for entry in self._buckets if entry.arrived)
        # A gradient that is zero or not finite says nothing about the others'.
        if not 0 < whole < math.inf or not there >= self._beta**2 * whole:
            return []
        for entry in late:
            entry.lent, entry.own = True, entry.own.clone()
        return late

    # -- the step ------------------------------------------------------------------------------------------------

    def _before(self, *_: object) -> None:
        """Add what the last step owes to the gradients of this one."""
        lent = [entry for entry in self._buckets if entry.lent]
        self._check_clipped(lent)
        rates = self._rates()
        for parameter, part, rate in self._collect():
            now = rates.get(parameter, 0.0)
            if parameter.grad is None or not now:
                self._correct(parameter, part, rate)
            else:
                parameter.grad.add_(part, alpha=rate / now)
        self._buckets, self._owed = [], lent
        for entry in lent:
            entry.rates = [rates.get(parameter, 0.0) for parameter in entry.parameters]
        self.lent_steps += bool(lent)
        self._stray = self._stray or bool(lent)

    def _after(self, *_: object) -> None:
        self.steps += 1
        if self._resync and self.steps % self._resync == 0:
            self.settle()

    @torch.no_grad()
    def _collect(self) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
        """Return (parameter, mean - own, learning rate) of all that the last step lent. It is owed no longer."""
        found, square = [], 0.0
        for entry in self._owed:
            flat = entry.owed()
            square += float(torch.linalg.vector_norm(flat)) ** 2
            found += list(zip(entry.parameters, entry.parts(flat), entry.rates, strict=True))
        self.constant = max(self.constant, math.sqrt(square))
        self._owed = []
        return found

    @torch.no_grad()
    def _correct(self, parameter: torch.Tensor, part: torch.Tensor, rate: float) -> None:
        """Change what a step of SGD has made of a gradient as if `part` had been added to it. Others are averaged."""
        if not isinstance(self._optimizer, SGD):
            return
        group = next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))
        momentum, kept, scale = group["momentum"], 1.0 - group["dampening"], 1.0
        velocity = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
        if momentum and velocity is not None:
            velocity.add_(part, alpha=-kept if group["maximize"] else kept)
            scale = 1.0 + momentum * kept if group["nesterov"] else kept
        parameter.add_(part, alpha=rate * scale if group["maximize"] else -rate * scale)

    def _check_clipped(self, lent: list[_Bucket]) -> None:
        """Warn once if gradients were changed after the backward pass: what is owed was not, and so ranks differ."""
        if self._clipped or self._resync:
            return
        pairs = [pair for e in lent for pair in zip(e.parameters, e.parts(e.own), strict=True)]
        here = [
            (p.grad.flatten()[:_SAMPLE], own.flatten()[:_SAMPLE]) for p, own in pairs if p.grad is not None
        ]
        self._clipped = not all(torch.equal(grad, own) for grad, own in here)
        if self._clipped:
            log.warning(
                "gradients are changed between the backward pass and the step (clipped?), and the elastic "
                "schedule corrects what they were before: pass resync=, which averages the ranks"
            )

    @property
    def _lends(self) -> bool:
        return self._beta < 1 and self.steps >= _FIRST

    def _rates(self) -> dict[torch.Tensor, float]:
        return {p: float(group["lr"]) for group in self._optimizer.param_groups for p in group["params"]}


def schedule(
    ddp: DistributedDataParallel, optimizer: Optimizer, *, beta: float = 0.8, resync: int | None = None
) -> Elastic:
    """Make an elastic schedule for a model. All ranks call it, before `scarctl.attach` and before the first step.

    beta: Share of the norm of a rank's own gradient that has to arrive before it steps, in (0, 1]. With 1 nothing is
        lent, and the parameters are those of DDP without a schedule, bit for bit.
    resync: Steps between calls of `Elastic.settle`. Without it, SGD without momentum and weight decay is corrected but
        for rounding. With momentum it is in the limit. Other optimizers need it.

    Memory: one copy of the gradients, and one more of what is lent. Raises UsageError for a process group other than
    gloo's: those order their work by streams, and do not say when it has arrived. Also for an optimizer that needs
    `resync`, or lacks parameters of the model.

    A gradient scaler that skips steps is not supported: the next backward pass raises UsageError.
    """
    if not 0 < beta <= 1:
        raise UsageError(f"beta is {beta}, not in (0, 1]")
    if resync is not None and resync < 1:
        raise UsageError(f"resync is {resync}, not at least 1")
    backend = dist.get_backend(ddp.process_group)
    if backend != "gloo":
        raise UsageError(f"an elastic schedule needs a process group of gloo, not {backend}")
    known = {p for group in optimizer.param_groups for p in group["params"]}
    if any(p.requires_grad and p not in known for p in ddp.parameters()):
        raise UsageError("the optimizer does not have all parameters of the model", hint="use one optimizer")
    if beta < 1 and resync is None and type(optimizer) is not SGD:
        raise UsageError(
            f"{type(optimizer).__name__} does not correct a gradient that arrives a step late",
            hint="pass resync=k: the ranks are averaged every k steps",
        )
    return Elastic(ddp, optimizer, beta, resync)


def elastic_constant(distances: Sequence[ArrayLike], rates: ArrayLike) -> float:
    """Return the least B for which observed mixed-step states are elastically consistent: E‖x_t - v_t‖² <= α_t² B².

    Nadiradze et al., "Elastic Consistency" (AAAI 2021), (12): v_t is the state after a recovery at time t, x_t the
    state without it. B is the largest over all t, since the definition holds for every t.

    distances: for each t the distances of the restored partitions from the live ones, of shape (partitions,) or
        (samples, partitions). The sum of squares over the partitions is ‖x_t - v_t‖²; the mean over samples is E.
    rates: the learning rates α_t, above 0, one for each t.
    """
    alphas = np.asarray(rates, dtype=np.float64).reshape(-1)
    if len(alphas) != len(distances) or not len(alphas):
        raise UsageError(
            f"{len(distances)} distances and {len(alphas)} learning rates: give one rate for each"
        )
    if not (np.isfinite(alphas) & (alphas > 0)).all():
        raise UsageError("a learning rate is not a number above 0")
    squares = [
        float(np.mean(np.sum(np.square(np.atleast_2d(np.asarray(d, np.float64))), axis=1))) for d in distances
    ]
    return max(math.sqrt(square) / alpha for square, alpha in zip(squares, alphas.tolist(), strict=True))


def _lend(ready: list[_Bucket]) -> None:
    for entry in ready:
        entry.result.set_result(entry.own)


def _await_calls(called: list[_Bucket]) -> None:
    """Wait for the process group's threads. A call of Python that ends with the interpreter aborts the process."""
    for entry in called:
        entry.released.wait(_LAST_SECONDS)
