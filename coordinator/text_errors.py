"""Refusals of the text edge."""


class TextRefused(ValueError):
    """A text prompt or conversation cannot become tokens; names the field, the value (shortened) and what is accepted."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = str(value)
        self.field = field
        self.value = shown if len(shown) <= 64 else shown[:63] + "…"
        self.limit = limit
        super().__init__(f"{field} = {self.value}: the limit is {limit}")
