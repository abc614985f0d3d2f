"""What a scheduler that thinks in rounds remembers between them: who waits for which pool, and what was promised.

Both its parts, dispatch and residency, keep one set of books and tell it what has changed. Everything in them can be
found out again from the view, and is, when they are new.

A context has a book as soon as a call wants it by a deadline, or as a gang. While such calls wait, all waiting calls of
the context are in its line, and rounds decide; else its other calls go the default way.
"""

from __future__ import annotations

import msgspec

from stoker.manager.core.nouns import Call, Context, Pilot
from stoker.manager.core.phases import CallState, LibraryState, PilotState
from stoker.manager.core.seams import Changes, View
from stoker.manager.policies.warm_pool_book import Book, Ordered, in_rounds
from stoker.manager.policies.warm_pool_lines import Job
from stoker.manager.protocol.ids import LibraryId, PilotId


class Books:
    """Those of all contexts that have one."""

    def __init__(self, *, cut_s: float = 3.0, learn: bool = True) -> None:
        self.all: dict[str, Book] = {}
        self.cut_s = cut_s
        """Replicas that are warmed on a pilot that is cut off are given up after so long: it may be a blip."""
        self._learn = learn
        self._of: dict[int, Book] = {}
        """Where each waiting job is."""
        self._cut: dict[PilotId, float] = {}
        self._new = True

    def of(self, context: Context) -> Book | None:
        """A context's, if it has one."""
        return self.all.get(context.recipe.key)

    def take(self, view: View, changes: Changes) -> None:
        """Bring them up to date."""
        if self._new:
            self._new = False
            for context in view.hungry.values():
                self._open(view, context)
        fresh: dict[Book, list[Job]] = {}
        for id in changes.calls:
            call, book = view.calls.get(id), self._of.get(id)
            if call is None or call.state is not CallState.WAITING:
                if book is not None:
                    self.forget(id)
            elif book is None:
                self._note(view, call, fresh)
        for book, jobs in fresh.items():
            book.line.put(jobs, now=view.now)
            book.touch()
        for id in sorted(changes.libraries):
            library = view.libraries.get(LibraryId(id))
            self._touch(library.context if library is not None else None)
        if changes.pilots:
            self._touch(None)
        for book in self.all.values():
            if book.line and book.rate(view.now):
                self._rate(view, book)
        self._keep_promises(view)

    def forget(self, id: int) -> None:
        """A job waits no more."""
        book = self._of.pop(id, None)
        if book is None:
            return
        book.line.remove(id)
        book.promises.pop(id, None)
        book.held.pop(id, None)
        book.touch()
        if id in book.others:
            book.others.remove(id)
            return
        book.asked -= 1
        if not book.asked:
            book.left_over = bool(book.others)
            for other in sorted(book.others):
                del self._of[other]
                book.line.remove(other)
            book.others.clear()

    def _touch(self, context: Context | None) -> None:
        """Libraries of a context have changed; None: of any."""
        for book in self.all.values():
            if context is None or book.context is context:
                book.touch()
            book.walk_due = True  # devices may have come free

    def _open(self, view: View, context: Context) -> None:
        """From now on all that waits there is in line, if rounds are asked to decide about any of it."""
        calls = list(context.queue)
        others: set[int] = {call.id for call in calls if not in_rounds(call)}
        if len(others) == len(calls):
            return
        book = self.all.get(context.recipe.key)
        if book is None:
            book = self.all[context.recipe.key] = Book(context, learn=self._learn)
        book.asked, book.others = len(calls) - len(others), others
        self._of.update(dict.fromkeys((call.id for call in calls), book))
        book.line.put([_job(view, book, call) for call in calls], now=view.now)
        book.touch()

    def _note(self, view: View, call: Call, fresh: dict[Book, list[Job]]) -> None:
        """A call waits."""
        book = self.of(call.group.context)
        if book is None or not book.asked:
            if in_rounds(call):
                self._open(view, call.group.context)
            return
        if in_rounds(call):
            book.asked += 1
        else:
            book.others.add(call.id)
        self._of[call.id] = book
        fresh.setdefault(book, []).append(_job(view, book, call))

    def _rate(self, view: View, book: Book) -> None:
        calls = [call for id in book.line.jobs if (call := view.calls.get(id)) is not None]
        book.line.put([book.job(call, view.reports.get(call.id)) for call in calls], now=view.now)
        book.touch()

    # ---- promises

    def _keep_promises(self, view: View) -> None:
        """Note which promised replicas have come, and which never will. Who is late anyway is promised nothing."""
        self._cut = {
            id: self._cut.get(id, view.now) for id, pilot in view.pilots.items() if pilot.state is PilotState.CUT
        }
        for book in self.all.values():
            if book.line.advance(view.now):
                book.touch()
            if not book.walk_due and not self._cut:
                continue
            for id, ordered in tuple(book.promises.items()):
                if not book.line.is_hopeful(id):
                    del book.promises[id]
                    book.touch()
                else:
                    self._look(view, book, ordered)

    def may_return(self, pilot: Pilot, now: float) -> bool:
        """Whether a pilot that is cut off has been so for a moment only."""
        return now - self._cut.get(pilot.id, now) <= self.cut_s

    def _look(self, view: View, book: Book, ordered: Ordered) -> None:
        here, ordered.lost, ordered.loading = 0, [], set()
        for place in ordered.places:
            pilot = view.pilots.get(place[0])
            device = pilot.devices.get(place[1][0]) if pilot is not None else None
            there = device.libraries.values() if device is not None else ()
            library = next((x for x in there if x.context is book.context), None)
            if library is None or pilot is None or library.state not in (LibraryState.LOADING, LibraryState.READY):
                ordered.lost.append(place)
            elif pilot.state is PilotState.CUT and self.may_return(pilot, view.now):
                ordered.loading.add(library.id)
            elif pilot.state is not PilotState.HERE:
                ordered.lost.append(place)
            elif library.state is LibraryState.READY:
                here += 1
            else:
                ordered.loading.add(library.id)
        if here != ordered.promise.here:
            ordered.promise = msgspec.structs.replace(ordered.promise, here=here)
            book.touch()


def _job(view: View, book: Book, call: Call) -> Job:
    return book.job(call, view.reports.get(call.id) if call.spec.progress else None)
