"""The one kind of refusal this package knows."""


class ModelRefused(ValueError):
    """A model cannot be served: one sentence that names the file, tensor or setting and the numbers involved."""
