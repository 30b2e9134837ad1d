"""Who made a forward pass fail: those it was for are tried in ever smaller groups, until the guilty one is alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from cbgen.engine.requests import RequestState
from cbgen.engine.scheduler import ScheduledBatch


@dataclass(frozen=True)
class Suspect:
    """A request for which a pass failed that was to bring its computed tokens to `kv_length`."""

    request: RequestState
    kv_length: int


class Suspects:
    """The groups still to be tried, the one whose turn it is last.

    a pass fails      [ a b c d e f g ]     all start over, since it may have written anything in their blocks
    first half        [ a b c ]     passes: each of them got past the tokens that failed, and waits for the rest
    second half       [ d e f g ]   fails
                      [ d e ]       passes
                      [ f g ]       fails
                      [ f ]         fails: guilty
                      [ g ]         passes, and all go on together

    Every failed pass makes a group smaller, and every other one brings a suspect forward, so that this ends.
    """

    def __init__(self) -> None:
        self._groups: list[dict[int, Suspect]] = []

    def __bool__(self) -> bool:
        return any(self._groups)

    def accuse(self, suspects: Iterable[Suspect]) -> Suspect | None:
        """A pass for these failed. Returns the guilty one, who is no suspect any more, when it was alone."""
        accused = {}
        for suspect in suspects:
            before = self._forget(suspect.request.request_id)
            kv_length = max(suspect.kv_length, before.kv_length if before else 0)
            accused[suspect.request.request_id] = Suspect(suspect.request, kv_length)
        members = list(accused.items())
        if len(members) == 1:
            return members[0][1]
        middle = len(members) // 2
        self._groups += [dict(members[middle:]), dict(members[:middle])]
        return None

    def add(self, suspect: Suspect) -> None:
        """One more to be tried, alone and first: who takes the place of a guilty one."""
        self._groups.append({suspect.request.request_id: suspect})

    def acquit(self, batch: ScheduledBatch) -> None:
        """A pass went well: who was in it with the tokens that failed is no suspect any more."""
        for entry in batch.scheduled if self._groups else ():
            suspect = self._groups[-1].get(entry.request.request_id)
            if suspect is not None and entry.kv_length >= suspect.kv_length:
                self._forget(entry.request.request_id)

    def drop(self, requests: Iterable[RequestState]) -> None:
        """These are not coming back."""
        for request in requests:
            self._forget(request.request_id)

    @property
    def turn(self) -> frozenset[int] | None:
        """The requests that are tried next; None: there is nobody to try."""
        while self._groups and not self._groups[-1]:
            self._groups.pop()
        return frozenset(self._groups[-1]) if self._groups else None

    def _forget(self, request_id: int) -> Suspect | None:
        found = [group.pop(request_id) for group in self._groups if request_id in group]
        return found[0] if found else None
