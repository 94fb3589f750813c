"""A GPU that is not there: its tensors lie in host memory, but to mix them with others is an error, as it would be there.

What torch itself allows between devices is allowed here: copies, numbers of no dimension, and host indices into a tensor.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

COPIES = {"cpu", "to", "copy_", "tolist", "item", "numpy"}
TO_HOST = {"cpu"}
INDEXED = {"__getitem__", "__setitem__"}


class PretendGpu(TorchFunctionMode):
    """While entered, on this thread: `device` behaves as a device of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.made = 0
        """Tensors made on it from nothing."""

    def there(self, x: Tensor) -> bool:
        """Whether a tensor is to be taken as one of the GPU's."""
        return getattr(x, "_pretended", False)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if name == "__get__" and func == Tensor.device.__get__:
            return self.device if self.there(args[0]) else func(*args, **kwargs)
        if name == "__get__" and func == Tensor.is_cpu.__get__:
            return not self.there(args[0])
        named = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
        asked = any(device.type == self.device.type for device in named)
        tensors = list(_tensors((args, kwargs)))
        if name in INDEXED:
            tensors = [args[0], *(x for x in tensors if x.dtype not in (torch.int64, torch.bool))]
        elif name not in COPIES:
            there = {self.there(x) for x in tensors if x.dim() > 0}
            if len(there) > 1:
                raise RuntimeError(f"{resolve_name(func) or name} of tensors on {self.device} and in host memory")
        result = func(*self._on_host(args), **{key: self._on_host([value])[0] for key, value in kwargs.items()})
        if name == "to" and named:
            is_there = asked
        elif asked:
            is_there, self.made = True, self.made + 1
        else:
            is_there = name not in TO_HOST and any(self.there(x) for x in tensors)
        if name == "copy_":
            is_there = self.there(args[0])
        if isinstance(result, Tensor) and any(result is x for x in tensors) and self.there(result) != is_there:
            result = result.detach()  # a copy that was none: host memory both times
        for x in _tensors(result):
            x._pretended = is_there  # type: ignore[attr-defined]
        return result

    def _on_host(self, values: Sequence[Any]) -> list[Any]:
        mine = self.device.type
        return [torch.device("cpu") if isinstance(x, torch.device) and x.type == mine else x for x in values]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
