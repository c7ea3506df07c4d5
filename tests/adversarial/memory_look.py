"""Look at a slot without a hold, as steps of the model of memory: see rule 10 of `memory_model`."""

from __future__ import annotations

from tests.adversarial.memory_world import Saver, Step, World, with_saver
from tests.adversarial.search import Broken

LOOKS = 1
"""Looks in a turn before the slot is held. They are independent, so that one is enough for the search."""
MUTANTS = {
    "a look is not judged": "a look",
    "a look takes its slot for unchanged because it is current": "a look",
    "a look does not ask for the counter of moments": "a look",
    "a look does not ask for its slot's moment again": "a look",
    "a slot has its moment before its name": "a look",
    "a slot loses its name before the moment is counted": "a look",
    "a flip ends a look": "a look",
    "a restart counts from the current slot on": "a look and a restart",
}
"""Rules left out, and the scenario that shows the consequence."""


class Looking:
    """Part of `tests.adversarial.memory_steps.Model`."""

    mutant: str

    def _choose(self, world: World, k: int, saver: Saver) -> World:
        raise NotImplementedError

    def _may_look(self, saver: Saver) -> bool:
        return saver.todo[0].endswith("*") and saver.looks < LOOKS

    def _look(self, world: World, k: int, saver: Saver) -> Step:
        chosen = saver._replace(at="note", slot=world.current)
        return f"saver {k} begins a look at slot {world.current}", with_saver(world, k, chosen)

    def _save_note(self, world: World, k: int, saver: Saver) -> Step:
        """Note the moment of the slot, which may be written by now."""
        noted = saver._replace(at="low", since=world.slots[saver.slot].moment)
        return f"notes moment {noted.since}", self._choose(world, k, noted)

    def _save_glance(self, world: World, k: int, saver: Saver) -> Step:
        """Ask which slot is current, after the last byte."""
        return "asks which slot is current", with_saver(
            world, k, saver._replace(at="judge", seen=world.current)
        )

    def _save_judge(self, world: World, k: int, saver: Saver) -> Step:
        """Read the moments and their counter, each of which only grows: to read them one by one finds no more."""
        slot, seen = world.slots[saver.slot], world.slots[saver.seen]
        same = slot.moment == saver.since
        newest = seen.moment == world.begun
        if self.mutant == "a look is not judged":
            lasts = True
        elif self.mutant == "a look takes its slot for unchanged because it is current":
            lasts = saver.seen == saver.slot or (same and newest)
        elif self.mutant == "a flip ends a look":
            lasts = saver.seen == saver.slot and same
        elif self.mutant == "a look does not ask for the counter of moments":
            lasts = same
        elif self.mutant == "a look does not ask for its slot's moment again":
            lasts = newest if saver.seen != saver.slot else same
        else:
            lasts = same and (saver.seen == saver.slot or newest)
        if lasts:
            return "has looked", with_saver(world, k, saver._replace(at="record"))
        told = world.history[slot.moment - 1]
        untouched = all(row.low == row.high == told.rows[i] for i, row in enumerate(slot.rows))
        if same and untouched and slot.extras == told.extras and slot.moment <= seen.moment:
            raise Broken(f"saver {k} has looked in vain at slot {saver.slot}, which is as it was")
        return "has looked in vain", with_saver(
            world, k, Saver(saver.todo, "idle", saver.life, looks=saver.looks + 1)
        )
