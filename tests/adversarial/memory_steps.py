"""Take the steps of `tests.adversarial.memory_model`: training, the copier, savers, and crashes."""

from __future__ import annotations

from collections.abc import Iterator

from tests.adversarial.memory_look import Looking
from tests.adversarial.memory_world import (
    NONE,
    ROWS,
    Copy,
    Hold,
    Lost,
    Marks,
    Row,
    Saver,
    Slot,
    Step,
    Target,
    Told,
    World,
    check,
    put,
    with_saver,
)
from tests.adversarial.search import Broken

INTERVAL = 1
"""A hold lasts for one memory interval."""
CHOSEN_BEFORE = (
    "the slot is chosen before the hold is taken",
    "the slot is chosen before, and looked at again",
)
OWN_WORDS = (
    "each saver has a hold of its own",
    "each saver has a hold of its own, chooses before, and looks again",
)


class Model(Looking):
    """`mutant`: the rule that is left out."""

    def __init__(self, mutant: str = "") -> None:
        self.mutant = mutant
        self.own_words = mutant in OWN_WORDS

    def steps(self, world: World) -> Iterator[Step]:
        check(world)
        yield from self._train(world)
        if world.copy.at != "idle":
            yield getattr(self, f"_copy_{world.copy.at}")(world, world.copy, 1 - world.current)
        for k, saver in enumerate(world.savers):
            yield from self._save(world, k, saver)
            if world.deaths and saver.at not in ("idle", "start"):
                dead = Saver(saver.todo, "start", saver.life + 1)
                yield f"saver {k} dies", with_saver(world._replace(deaths=world.deaths - 1), k, dead)
        if world.kills:
            yield "kill -9, and a restart", self._restart(world)

    # -- training -------------------------------------------------------------------------------------------------

    def _train(self, world: World) -> Iterator[Step]:
        if world.due:
            if world.copy.at == "idle":
                yield self._begin(world)
            return
        if not world.todo:
            return
        word, rest = world.todo[0], world._replace(todo=world.todo[1:])
        if word == "mark":
            found = max((row.version for row in _copies(world, world.before)), default=0)
            yield "marks row 0 as lost", rest._replace(lost=Lost(world.before, found))
        elif word == "recover":
            if world.copy.at == "idle" or self.mutant == "copying goes on after a part was marked as lost":
                yield self._recover(rest)
        elif word == "flush":
            yield "SIGTERM", rest._replace(due="flush")
        elif (
            world.copy.at in ("idle", "stamp", "name", "flip", "extras")
            or self.mutant == "training does not wait"
        ):
            yield f"trains {word}", self._change(rest, word)

    def _change(self, world: World, word: str) -> World:
        """Change the rows of `word`, those in capitals to a value that is not finite; "rot" is damage to row 0.

        "=" in front: without a step. "." behind: no memory checkpoint is due.
        """
        before = world.moment if word == "rot" else world.before
        letters = "a" if word == "rot" else word.strip("=.0")
        live, fresh = world.live, world.fresh
        for letter in letters:
            fresh += 1
            live = put(live, "ab".index(letter.lower()), -fresh if letter.isupper() else fresh)
        step = world.step + (not word.startswith("="))
        due = "" if word.endswith(".") else "copy"
        changed = frozenset("ab".index(letter.lower()) for letter in letters)
        return world._replace(
            live=live,
            fresh=fresh,
            step=step,
            extras=fresh * 10 + len(world.todo),
            due=due,
            before=before,
            marks=(world.marks[0] | changed, world.marks[1] | changed),
        )

    def _recover(self, world: World) -> Step:
        if world.lost is None:
            return "has nothing to recover", world  # a restart came between
        before = world.moment if self.mutant == "the newest copy is taken" else world.lost.before
        found = max(_copies(world, before), default=None)
        if found is None:
            if world.lost.best:
                raise Broken(f"the copy of moment {world.lost.best} was there when row 0 was marked as lost")
            return "no copy is early enough", world._replace(lost=None)
        if found.version > world.lost.before:
            raise Broken(f"a copy of moment {found.version} is taken, and {world.lost.before} was asked for")
        if found.version in world.dropped:
            raise Broken(f"the copy of moment {found.version} is taken, which a restart has given up")
        if not found.low == found.high == world.history[found.version - 1].rows[0]:
            raise Broken("a torn copy is taken")
        if found.version < world.lost.best:
            raise Broken(f"the copy of moment {world.lost.best} was there when row 0 was marked as lost")
        live, marks = put(world.live, 0, found.high), (world.marks[0] | {0}, world.marks[1] | {0})
        return "recovers row 0", world._replace(live=live, marks=marks, lost=None, due="copy")

    def _restart(self, world: World) -> World:
        """Model a process that is killed, and the next one, which believes the current slot. Savers go on."""
        slot, s = world.slots[world.current], 1 - world.current
        dropped = world.dropped | set(range(slot.moment + 1, world.moment + 1))
        for i in ROWS:
            row = world.slots[s].rows[i]
            if row.version > slot.moment and self.mutant != "a restart leaves copies that are too new":
                world = _row(world, s, i, row._replace(version=0))
        differ = frozenset(i for i in ROWS if slot.rows[i].version != world.slots[s].rows[i].version)
        if self.mutant == "a restart takes the slots for equal":
            differ = NONE
        return world._replace(
            live=(slot.rows[0].high, slot.rows[1].high),
            extras=slot.extras,
            step=world.history[slot.moment - 1].step,
            due="",
            marks=put((NONE, NONE), s, differ),
            copy=Copy(),
            lost=None,
            kills=world.kills - 1,
            begun=slot.moment if self.mutant == "a restart counts from the current slot on" else world.begun,
            dropped=dropped,
        )

    # -- the copier -----------------------------------------------------------------------------------------------

    def _begin(self, world: World) -> Step:
        """Begin a memory checkpoint, into the slot that is not current. The extras are copied at once."""
        s, moment, flush = 1 - world.current, world.moment + 1, world.due == "flush"
        told, before = Told(world.live, world.extras, world.step), world
        world = world._replace(moment=moment, due="", history=(*world.history[: moment - 1], told))
        holds = [hold for hold in world.holds if hold and (flush or hold.slot == s)]
        if any(self._respects(world, hold) for hold in holds) and not flush:
            return f"moment {moment} is left out", world._replace(waited=world.waited + 1)
        keeps = self.mutant in ("the copier ignores a hold", "the copier writes before it ends a hold")
        if not keeps and not (flush and self.mutant == "a flush does not end the hold"):
            world = world._replace(holds=tuple(None if hold in holds else hold for hold in world.holds))
        if world.slots[s].name and self.mutant == "a slot loses its name before the moment is counted":
            return "clears a name", _slot(before, s, before.slots[s]._replace(name=0))
        slot, current = world.slots[s]._replace(name=0), world.slots[world.current]
        if self.mutant != "the extras are written after the flip":
            slot = slot._replace(extras=world.extras)
        left, changed, rows = world.marks[s], world.marks[world.current], slot.rows
        if self.mutant == "what changed since the last checkpoint is copied":
            left = changed
        elif self.mutant == "a row that differs between the slots is taken for equal":
            for i in left - changed:
                rows = put(rows, i, rows[i]._replace(version=current.rows[i].version))
            left = changed
        elif self.mutant == "a row that did not change gets a new version":
            for i in set(ROWS) - left:
                rows = put(rows, i, rows[i]._replace(version=moment))
        made = _slot(world, s, slot._replace(rows=rows))
        at = "low" if left else "name"
        return (
            f"{'flushes' if flush else 'copies'} moment {moment} into slot {s}",
            made._replace(
                copy=Copy(at, moment, tuple(sorted(left)), NONE, changed),
                begun=moment,
                waited=0,
                flushed=flush or world.flushed,
            ),
        )

    def _respects(self, world: World, hold: Hold) -> bool:
        if self.mutant == "the copier ignores a hold":
            return False
        dead = all(world.savers[k].life != life for k, life in hold.members)
        if self.mutant == "a hold does not end" or (
            dead and self.mutant == "a dead saver's hold does not end"
        ):
            return True
        return world.moment <= hold.deadline

    def _copy_low(self, world: World, copy: Copy, s: int) -> Step:
        if world.lost and self.mutant != "copying goes on after a part was marked as lost":
            return self._abandon(world, copy, s)
        if (
            self.mutant == "the flip comes before the last row"
            and len(copy.left) == 1
            and world.flipped != copy.moment
        ):
            slot = world.slots[s]._replace(moment=copy.moment)
            return "flips", _slot(world, s, slot)._replace(current=s, flipped=copy.moment)
        i, row = copy.left[0], world.slots[s].rows[copy.left[0]]
        version = row.version if self.mutant == "a row keeps its version while it is written" else 0
        made = _row(world, s, i, row._replace(version=version, low=world.live[i]))
        return f"copies half of row {i}", made._replace(copy=copy._replace(at="high"))

    def _copy_high(self, world: World, copy: Copy, s: int) -> Step:
        i = copy.left[0]
        made = _row(world, s, i, world.slots[s].rows[i]._replace(high=world.live[i]))
        bad = world.live[i] < 0 <= world.slots[world.current].rows[i].high
        if bad and self.mutant != "a copy that is not finite is flipped":
            return self._abandon(made, copy._replace(taken=copy.taken | {i}), s)
        return f"copies row {i}", made._replace(copy=copy._replace(at="version"))

    def _copy_version(self, world: World, copy: Copy, s: int) -> Step:
        i, rest = copy.left[0], copy.left[1:]
        always = self.mutant == "a row that is copied gets a new version"
        version = copy.moment if i in copy.changed or always else world.slots[world.current].rows[i].version
        if self.mutant == "the version is the step":
            version = world.history[copy.moment - 1].step
        made = _row(world, s, i, world.slots[s].rows[i]._replace(version=version))
        if self.mutant != "marks are cleared at the flip":
            made = _mark(made, s, made.marks[s] - {i})
        at = "low" if rest else "name"
        return f"versions row {i}", made._replace(
            copy=copy._replace(at=at, left=rest, taken=copy.taken | {i})
        )

    def _copy_name(self, world: World, copy: Copy, s: int) -> Step:
        if not any(turn.endswith("*") for saver in world.savers for turn in saver.todo):
            return self._copy_stamp(world, copy, s)  # a hold keeps both words as they are
        slot = world.slots[s]
        if self.mutant == "a slot has its moment before its name":
            made = _slot(world, s, slot._replace(moment=copy.moment))
        else:
            made = _slot(world, s, slot._replace(name=copy.moment))
        return "writes the first word", made._replace(copy=copy._replace(at="stamp"))

    def _copy_stamp(self, world: World, copy: Copy, s: int) -> Step:
        made = _slot(world, s, world.slots[s]._replace(moment=copy.moment, name=copy.moment))
        return "stamps", made._replace(copy=copy._replace(at="flip"))

    def _copy_flip(self, world: World, copy: Copy, s: int) -> Step:
        if world.lost and self.mutant != "copying goes on after a part was marked as lost":
            return self._abandon(world, copy, s)
        if self.mutant == "marks are cleared at the flip":
            world = _mark(world, s, NONE)
        if self.mutant == "the copier writes before it ends a hold":
            holds = tuple(None if hold and hold.slot == s else hold for hold in world.holds)
            world = world._replace(holds=holds)
        after = Copy("extras") if self.mutant == "the extras are written after the flip" else Copy()
        return "flips", world._replace(current=s, flipped=copy.moment, copy=after)

    def _copy_extras(self, world: World, copy: Copy, s: int) -> Step:
        slot = world.slots[1 - s]._replace(extras=world.extras)
        return "copies the extras", _slot(world, 1 - s, slot)._replace(copy=Copy())

    def _abandon(self, world: World, copy: Copy, s: int) -> Step:
        """Leave a copy: the slot is not flipped, and all that was copied is copied again the next time."""
        if self.mutant == "an abandoned copy's rows count as copied":
            made = _mark(world, s, world.marks[s] - copy.taken)
        else:
            made = _mark(world, s, world.marks[s] | copy.taken)
        return "abandons the copy", made._replace(copy=Copy())

    # -- savers ---------------------------------------------------------------------------------------------------

    def _save(self, world: World, k: int, saver: Saver) -> Iterator[Step]:
        if saver.at != "idle":
            what, after = getattr(self, f"_save_{saver.at}")(world, k, saver)
            yield f"saver {k} {what}", after
        elif saver.todo and self._nothing(world, k, saver):
            rest = saver._replace(todo=saver.todo[1:], looks=0)
            yield f"saver {k} has nothing to do", with_saver(world, k, rest)
        elif saver.todo and self._may_look(saver):
            yield self._look(world, k, saver)
        elif saver.todo and self.mutant in (*CHOSEN_BEFORE, OWN_WORDS[1]):
            chosen = saver._replace(at="take", slot=world.current)
            yield f"saver {k} chooses slot {world.current}", with_saver(world, k, chosen)
        elif saver.todo:
            what, after = self._save_take(world, k, saver._replace(slot=world.current))
            yield f"saver {k} {what}", after

    def _nothing(self, world: World, k: int, saver: Saver) -> bool:
        slot = world.slots[world.current]
        full = saver.full
        return not _pending(world, k, slot, saver) and not (full and world.targets[k].moment != slot.moment)

    def _save_take(self, world: World, k: int, saver: Saver) -> Step:
        """Take the hold of the current slot, or join the hold that there is, which gets no other deadline."""
        word = k if self.own_words else 0
        hold, now, me = world.holds[word], world.moment, (k, saver.life)
        over = hold is not None and now > hold.deadline and self.mutant != "a hold does not end"
        if hold is None or over or self.own_words or self.mutant == "two holds at once":
            hold = Hold(world.taken + 1, saver.slot, now + INTERVAL, frozenset({me}))
            world, what = world._replace(taken=hold.number), "holds"
        else:
            hold, what = hold._replace(members=hold.members | {me}), "joins the hold of"
            if self.mutant == "a hold that is joined lasts longer":
                hold = hold._replace(deadline=now + INTERVAL)
        world = world._replace(holds=put(world.holds, word, hold))
        looks = self.mutant in (CHOSEN_BEFORE[1], OWN_WORDS[1])
        at = "again" if looks and what == "holds" else "low"
        saver = saver._replace(at=at, slot=hold.slot, hold=hold.number, deadline=hold.deadline)
        return f"{what} slot {hold.slot}", self._choose(world, k, saver)

    def _save_again(self, world: World, k: int, saver: Saver) -> Step:
        """Look at the current slot again, after the hold was taken."""
        if saver.slot == world.current:
            return "looks at the current slot", self._choose(world, k, saver._replace(at="low"))
        saver = Saver(saver.todo, "idle", saver.life, looks=saver.looks)
        return "finds another current slot", with_saver(self._let_go(world, k, saver), k, saver)

    def _choose(self, world: World, k: int, saver: Saver) -> World:
        got = {i for i, _ in saver.segment}
        left = tuple(i for i in _pending(world, k, world.slots[saver.slot], saver) if i not in got)
        if saver.at == "low" and not left:
            saver = saver._replace(at="extras")
        return with_saver(world, k, saver._replace(left=left))

    def _save_low(self, world: World, k: int, saver: Saver) -> Step:
        row = world.slots[saver.slot].rows[saver.left[0]]
        segment = (*saver.segment, (saver.left[0], Row(row.version, row.low)))
        return "copies half a row", with_saver(world, k, saver._replace(at="high", segment=segment))

    def _save_high(self, world: World, k: int, saver: Saver) -> Step:
        i, half = saver.segment[-1]
        row = half._replace(high=world.slots[saver.slot].rows[i].high)
        at, rest = "low" if saver.left[1:] else "extras", saver.left[1:]
        saver = saver._replace(at=at, left=rest, segment=(*saver.segment[:-1], (i, row)))
        return f"copies row {i}", with_saver(world, k, saver)

    def _save_extras(self, world: World, k: int, saver: Saver) -> Step:
        slot = world.slots[saver.slot]
        if saver.full and not saver.moment:
            saver = saver._replace(moment=slot.moment, name=slot.name, extras=slot.extras)
        at = "look" if saver.hold else "glance"
        return "reads the extras", with_saver(world, k, saver._replace(at=at))

    def _save_look(self, world: World, k: int, saver: Saver) -> Step:
        """Look at the hold after the last byte and before the record, and let go."""
        hold = world.holds[k if self.own_words else 0]
        mine = hold is not None and hold.number == saver.hold and (k, saver.life) in hold.members
        if self.mutant == "a hold is known by its slot and process":
            mine = hold is not None and hold.slot == saver.slot
        if not mine and world.moment <= saver.deadline and not world.flushed:
            raise Broken(f"saver {k} has lost its hold before the deadline")
        if mine or self.mutant == "a saver does not look at the hold":
            made = with_saver(self._let_go(world, k, saver), k, saver._replace(at="record"))
            return "finds its hold, and lets go", made
        again = Saver(saver.todo, "idle", saver.life, looks=saver.looks)
        if self.mutant == "a saver keeps its segment when it begins again":
            again = again._replace(
                segment=saver.segment, moment=saver.moment, name=saver.name, extras=saver.extras
            )
        return "has lost its hold", with_saver(world, k, again)

    def _let_go(self, world: World, k: int, saver: Saver) -> World:
        word = k if self.own_words else 0
        hold = world.holds[word]
        if hold is None or (k, saver.life) not in hold.members:
            return world
        left = hold.members - {(k, saver.life)}
        return world._replace(holds=put(world.holds, word, hold._replace(members=left) if left else None))

    def _save_record(self, world: World, k: int, saver: Saver) -> Step:
        target = world.targets[k]
        rows = target.rows
        for i, row in saver.segment:
            if row.version < rows[i].version:
                raise Broken(f"target {k} goes back to moment {row.version} of row {i}")
            rows = put(rows, i, row)
        made = world._replace(
            targets=put(world.targets, k, Target(rows, saver.moment, saver.name, saver.extras))
        )
        return "puts its record", with_saver(made, k, saver._replace(at="durable"))

    def _save_durable(self, world: World, k: int, saver: Saver) -> Step:
        known = world.durable[k]
        for i, row in saver.segment:
            present = world.slots[world.current].rows[i].version
            known = put(
                known, i, present if self.mutant == "the present version is called durable" else row.version
            )
        made = world._replace(durable=put(world.durable, k, known))
        return "notes what is durable", with_saver(made, k, Saver(saver.todo[1:], "idle", saver.life))

    def _save_start(self, world: World, k: int, saver: Saver) -> Step:
        """Model a new saver, which asks its target what is durable."""
        known = tuple(row.version for row in world.targets[k].rows)
        made = world._replace(durable=put(world.durable, k, (known[0], known[1])))
        return "starts", with_saver(made, k, saver._replace(at="idle"))


def _pending(world: World, k: int, slot: Slot, saver: Saver) -> tuple[int, ...]:
    chosen = ROWS if saver.full else ("ab".index(saver.todo[0][0]),)
    return tuple(i for i in chosen if slot.rows[i].version != world.durable[k][i])


def _copies(world: World, before: int) -> list[Row]:
    """Return the copies of row 0 not later than `before`, of memory and of all targets."""
    rows = [slot.rows[0] for slot in world.slots] + [target.rows[0] for target in world.targets]
    return [row for row in rows if 0 < row.version <= before]


def _slot(world: World, s: int, slot: Slot) -> World:
    return world._replace(slots=put(world.slots, s, slot))


def _row(world: World, s: int, i: int, row: Row) -> World:
    return _slot(world, s, world.slots[s]._replace(rows=put(world.slots[s].rows, i, row)))


def _mark(world: World, s: int, marks: Marks) -> World:
    return world._replace(marks=put(world.marks, s, marks))
