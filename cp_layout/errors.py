"""The one kind of refusal that arithmetic knows."""


class LayoutError(ValueError):
    """A law of the layout or of the configuration is broken; the message names the values and the law."""
