"""Attributes of a model that are replaced together and restored together."""
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ['Replacements', 'image_size', 'resize_again']


class _Absent:
    """Stands for an attribute that was absent; a class, because a copy of a class is the class itself."""


class Replacements:
    """Replacements of attributes: either all of them are made, or none.

    Args:
        wanted: Owner, attribute name and new value of each.

    Attributes:
        before: The previous values, in the same order.
    """

    def __init__(self, wanted: Sequence[tuple[Any, str, Any]]) -> None:
        self._wanted = list(wanted)
        self.before: list[Any] = [_own(owner, name) for owner, name, _ in self._wanted]

    def put(self) -> None:
        """Make the replacements; if interrupted, undo those already made."""
        try:
            for owner, name, value in self._wanted:
                setattr(owner, name, value)
        except BaseException:
            self._put_back()
            raise

    @property
    def in_place(self) -> bool:
        """Whether the attributes have the new values."""
        return all(_own(owner, name) is value for owner, name, value in self._wanted)

    def undo(self, then: Callable[[], Any] = lambda: None) -> None:
        """Restore the attributes as they were at construction, and call `then`; if interrupted, replace them again."""
        try:
            self._put_back()
            then()
        except BaseException:
            for owner, name, value in self._wanted:
                setattr(owner, name, value)
            raise

    def _put_back(self) -> None:
        for (owner, name, _), before in zip(self._wanted, self.before, strict=True):
            if before is not _Absent:
                setattr(owner, name, before)
            elif _own(owner, name) is not _Absent:
                delattr(owner, name)


def image_size(model: Any) -> Any:
    """What `set_input_size` sets outside of a model's blocks: the sizes of the images, of the grid and of windows."""
    embed = getattr(model, 'patch_embed', None)
    return tuple(getattr(of, name, None) for of, name in (
        (embed, 'img_size'), (embed, 'grid_size'), (model, '_ref_window_sizes')))


def resize_again(model: Any, size: Any) -> None:
    """Let blocks that are put back follow a change of the image size, from `size`, that they missed."""
    if image_size(model) != size:
        model.set_input_size(img_size=model.patch_embed.img_size)


def _own(owner: Any, name: str) -> Any:
    """An attribute of the object itself, not of its class."""
    children = owner._modules if isinstance(owner, nn.Module) else {}
    return children.get(name, owner.__dict__.get(name, _Absent))
