"""Stop strings found in a stream of text, however the stream is cut."""

from collections.abc import Sequence


class StopStrings:
    """Watches text for the first stop string to be completed; ties go to the longest.

    Each string is matched by its own prefix automaton (Knuth–Morris–Pratt), so that a character costs the same wherever it
    stands in the output, and text is held back only while it may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        """Per string: length of its longest prefix, short of the whole, that the text so far ends with."""
        self._held = ""
        self.stopped = False

    def feed(self, text: str, armed: bool = True) -> str:
        """The text that is now certain to belong to the output; `stopped` tells whether a stop string was completed.

        Text before the stop string is returned, the stop string and what follows are dropped. Unarmed, a stop string that is
        completed in this text is text like any other; one that is only begun in it still counts once it is completed.
        """
        if self.stopped:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        for seen, character in enumerate(text, start=len(self._held) + 1):
            completed = self._advance(character)
            if completed and armed:
                self.stopped = True
                self._held = ""
                return pending[: seen - completed]
        certain = len(pending) - max(self._matched)
        self._held = pending[certain:]
        return pending[:certain]

    def flush(self) -> str:
        """The text still held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Length of the longest stop string that this character completes, or 0."""
        completed = 0
        for index, stop in enumerate(self._stops):
            borders, matched = self._borders[index], self._matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                completed = max(completed, matched)
                matched = borders[-1]
            self._matched[index] = matched
        return completed


def _borders(text: str) -> list[int]:
    """Per position i: length of the longest proper prefix of text[: i + 1] that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
