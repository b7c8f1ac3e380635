"""The course of memory over a step, in a bounded number of points."""

from __future__ import annotations

import weakref

from training.metering.places import Places


class Timeline:
    """At most `limit` points of a curve of any length: each the highest of a stretch of it."""

    def __init__(self, limit: int) -> None:
        self.kept: list[tuple[int, str, weakref.ref | None, int]] = []
        self._limit = limit // 2 * 2  # they are merged in pairs
        self._stretch = 1
        self._count = 0

    def add(self, phase: str, places: Places, live_bytes: int) -> None:
        count, self._count = self._count, self._count + 1
        if count % self._stretch:
            if live_bytes > self.kept[-1][3]:
                self.kept[-1] = (count, phase, places.now()[0], live_bytes)
            return
        if len(self.kept) == self._limit:
            pairs = zip(self.kept[::2], self.kept[1::2], strict=False)
            self.kept = [max(pair, key=lambda point: point[3]) for pair in pairs]
            self._stretch *= 2
        self.kept.append((count, phase, places.now()[0], live_bytes))
