"""Adapt one tree of immutable arrays, which the loop replaces in every iteration.

The live state is the tree that the loop passed last. Its arrays are read in place. A recovery cannot write into them.
It writes into private copies of the restored groups (`writable`), and `tree` makes arrays from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch

from scarctl.adapter import StateGroup, Watching
from scarctl.errors import UsageError
from scarctl.state.caveats import Caveats
from scarctl.stateful import check_names
from scarctl_adapters.jax.arrays import Kept, check, in_host, is_deleted, leaf_of, restored, view
from scarctl_adapters.jax.tree import Plan, divide
from scarctl_adapters.loop import LoopAdapter

HINT = "use `session = scarctl_adapters.jax.attach(state, store=...)`: see docs/jax.md"


class Tree:
    """The state of a training: the tree that the loop passed last."""

    def __init__(self, tree: Any, parameters: str | None, *, donated: bool) -> None:
        """Prepare with the first tree, and the arguments of `attach`. Raises UsageError for a tree that cannot be
        saved.
        """
        self.donated = donated
        self.plan: Plan = divide(tree, parameters)
        self.leaves, self.structure = jax.tree_util.tree_flatten(tree)
        self.tree = tree
        self.optimizer = "+".join(dict.fromkeys(_classes(tree)))
        for name, leaf in zip(self.plan.names, self.leaves, strict=True):
            check(name, leaf)


def _classes(tree: Any) -> list[str]:
    """Return the names of the classes of an optax state: tuples with named fields, in order."""
    found: list[str] = []

    def look(node: Any) -> bool:
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            found.append(type(node).__name__)
        return False

    jax.tree_util.tree_flatten(tree, is_leaf=look)
    return found


class JaxAdapter(LoopAdapter):
    """The `Adapter` of a tree. `TreeSession` passes new trees, and takes the current one."""

    def __init__(self, tree: Tree, extras: Mapping[str, Any] | None) -> None:
        super().__init__(extras)
        self._tree = tree
        self._groups: list[StateGroup] | None = None
        self._written: dict[str, dict[str, torch.Tensor]] = {}
        """Private copies by group and slot, which have taken the place of leaves."""
        self._dirty = False
        """Whether leaves were replaced since the tree was built."""
        self._hooks: list[tuple[Callable[[], None], Callable[[], None] | None]] = []
        self._caveats: Caveats | None = None

    @classmethod
    def build(
        cls,
        model: Any,
        optimizers: Sequence[Any],
        *,
        schedulers: Sequence[Any] = (),
        scaler: Any = None,
        extras: Mapping[str, Any] | None = None,
        replicated: Sequence[str] = (),
    ) -> JaxAdapter:
        """Make an adapter. Raises UsageError for a bare tree, whose recovered values could not be given back."""
        if not isinstance(model, Tree):
            raise UsageError("arrays of JAX cannot be restored in place", hint=HINT)
        if optimizers or schedulers or scaler is not None:
            raise UsageError("the tree has the optimizer's state", hint="put opt_state into the tree")
        return cls(model, extras)

    # -- trees ----------------------------------------------------------------------------------------------------

    def leaves_of(self, tree: Any) -> list[Any]:
        """Return the leaves of a new tree. Raises UsageError if it is not built like the first, or was donated."""
        leaves: list[Any]
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != self._tree.structure:
            paths = jax.tree_util.tree_flatten_with_path(tree)[0]
            first = jax.tree_util.tree_flatten_with_path(self._tree.tree)[0]
            if [path for path, _ in paths] != [path for path, _ in first]:
                raise UsageError(
                    "the state is not built like the one that was attached",
                    hint="pass the same tree to every step; to train another one, use a new store",
                )
        if any(map(is_deleted, leaves)):
            name = next(n for n, leaf in zip(self._tree.plan.names, leaves, strict=True) if is_deleted(leaf))
            raise UsageError(
                f"leaf {name!r} of the state was donated to a function",
                hint="pass what that function returned to session.step",
            )
        return leaves

    def adopt(self, tree: Any, leaves: list[Any]) -> None:
        """Make these leaves the live ones. The former ones must not be read from now on."""
        if self.automatic and self._caveats is not None and any(map(is_deleted, self._tree.leaves)):
            self._caveats.say(
                "donated",
                "the state is donated in the step (donate_argnums), but the session does not know it: a signal that "
                "ends the process in a step loses that step and those since the last checkpoint. Attach with "
                "donated=True",
            )
        self.release()
        self._written.clear()
        self._dirty = False
        self._tree.leaves, self._tree.structure = leaves, jax.tree_util.tree_structure(tree)
        self._tree.tree = tree

    def release(self) -> None:
        """Stop referring to the memory of the live leaves, so that JAX may use it again."""
        for group in self._groups or ():
            if group.name not in self._written:
                for tensor in group.tensors.values():
                    tensor.data = tensor.new_empty(
                        0
                    )  # the core may still have the tensor, but no longer reads it
        self._groups = None

    def tree(self) -> Any:
        """Return the live tree: the one that was passed last, or another one if a recovery has replaced leaves."""
        state = self._tree
        for name, tensors in self._written.items():
            for slot, tensor in tensors.items():
                n = state.plan.groups[name][slot]
                state.leaves[n] = leaf_of(tensor, state.leaves[n])
            self._groups = None
        if self._written or self._dirty:
            state.tree = jax.tree_util.tree_unflatten(state.structure, state.leaves)
        self._written.clear()
        self._dirty = False
        return state.tree

    def before(self) -> None:
        """Report that an iteration is about to end: a running copy of the former tree is finished first."""
        for before, _ in list(self._hooks):
            before()

    def after(self) -> None:
        """Report the end of an iteration."""
        for _, after in list(self._hooks):
            if after is not None:
                after()

    # -- the protocol -----------------------------------------------------------------------------------------------

    @property
    def automatic(self) -> bool:
        """Whether `TreeSession.step` calls hooks: not between two steps, if the state is donated then."""
        return not self._tree.donated

    @property
    def optimizer(self) -> str:
        """Names of the classes in the optimizer's state, such as "ScaleByAdamState+EmptyState"."""
        return self._tree.optimizer

    def groups(self) -> list[StateGroup]:
        """Return the live arrays. Waits until they are computed. Raises UsageError if they were donated."""
        if self._groups is None:
            plan, leaves = self._tree.plan, self._tree.leaves
            for n, leaf in enumerate(leaves):
                if is_deleted(leaf):
                    raise UsageError(
                        f"leaf {plan.names[n]!r} of the newest state was donated, and no next state exists yet",
                        hint="attach with donated=True",
                    )
            self._groups = [
                StateGroup(
                    name,
                    "parameter",
                    self._written.get(name)
                    or {slot: view(plan.names[n], leaves[n]) for slot, n in slots.items()},
                )
                for name, slots in plan.groups.items()
            ]
        return list(self._groups)

    def writable(self, name: str) -> Mapping[str, torch.Tensor]:
        """See `scarctl.adapter.ReplacesArrays`."""
        if name not in self._written:
            group = next(group for group in self.groups() if group.name == name)
            self._written[name] = {slot: tensor.clone() for slot, tensor in group.tensors.items()}
            self._groups = [
                StateGroup(name, "parameter", self._written[name]) if each is group else each
                for each in self._groups or ()
            ]
        return self._written[name]

    def capture(self) -> dict[str, Any]:
        """Return the values that are saved whole: leaves, Python's and numpy's global random generators, the user's
        extras.
        """
        state = self._tree
        leaves = Kept({state.plan.names[n]: state.leaves[n] for n in state.plan.whole})
        return {"leaves": leaves, **super().capture()}

    def restore(self, state: Any) -> None:
        """Restore `capture`."""
        tree = self._tree
        check_names("extras", state["extras"], self._extras)
        check_names("leaves", state["leaves"], {tree.plan.names[n]: n for n in tree.plan.whole})
        for n in tree.plan.whole:
            tree.leaves[n] = restored(state["leaves"][tree.plan.names[n]], tree.leaves[n])
        self._dirty = True
        super().restore(state)

    def install(self, before: Callable[[], None], after: Callable[[], None] | None) -> Callable[[], None]:
        """See `Adapter`. `TreeSession.step` calls the hooks."""
        hooks = (before, after)
        self._hooks.append(hooks)
        return lambda: self._hooks.remove(hooks) if hooks in self._hooks else None

    def watch(self, caveats: Caveats) -> Watching:
        """See `scarctl.adapter.KnowsCaveats`."""
        self._caveats = caveats
        self._warn_of_devices()
        return _Watching(self)

    def _warn_of_devices(self) -> None:
        away = [
            name
            for name, leaf in zip(self._tree.plan.names, self._tree.leaves, strict=True)
            if isinstance(leaf, jax.Array) and not in_host(leaf)
        ]
        if away and self._caveats is not None:
            self._caveats.say(
                "copied-whole",
                f"{len(away)} leaves of the state, such as {away[0]!r}, are on an accelerator or on several devices: "
                "every checkpoint copies all of the state to the host first, while the loop waits. This was tested "
                "only with several devices of a CPU",
            )


class _Watching:
    def __init__(self, adapter: JaxAdapter) -> None:
        self._adapter = adapter

    def stepped(self) -> None:
        pass

    def end(self) -> None:
        self._adapter._caveats = None
