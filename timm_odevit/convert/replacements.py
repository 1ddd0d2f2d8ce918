"""Attributes of a model that are replaced together and restored together."""
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ['Replacements']


class _Absent:
    """Stands for an attribute that was absent; a class, because a copy of a class is the class itself."""


class Replacements:
    """Replacements of attributes of a model and of its parts: either all of them are made, or none.

    Args:
        model: The model.
        wanted: Owner, attribute name and new value of each.

    Attributes:
        modules: Of the replacements of modules, the previous and the new one, in the same order.
    """

    def __init__(self, model: nn.Module, wanted: Sequence[tuple[Any, str, Any]]) -> None:
        self._model: Any = model
        self._wanted = list(wanted)
        self._before = [_own(owner, name) for owner, name, _ in self._wanted]
        self._training, self._size = model.training, _image_size(model)
        self.modules: list[tuple[nn.Module, nn.Module]] = [
            (before, value) for before, (_, _, value) in zip(self._before, self._wanted, strict=True)
            if isinstance(value, nn.Module)]

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
        """Whether the model still has the new modules."""
        return all(_own(owner, name) is value for owner, name, value in self._wanted if isinstance(value, nn.Module))

    def restore(self, new: str, previous: str) -> None:
        """Undo the replacements; what is put back follows the model's device, its mode and its image size.

        Args:
            new: What the new modules are, for error messages.
            previous: What the previous ones are.

        Raises:
            ValueError: The model no longer has the new modules, or its dtype has changed.
        """
        if not self.in_place:
            raise ValueError(f'This model no longer holds {new}: it was restored or changed.')
        then, now = _first_of_each(*self.modules[0])
        if now.dtype != then.dtype:
            raise ValueError(
                f'The model is now {now.dtype}, its {previous} {then.dtype}. Call model.to({then.dtype}) first.')
        for before, _ in self.modules:
            if not now.is_meta:
                before.to(now.device)
            if self._model.training != self._training:
                before.train(self._model.training)
        self.undo(self._resize)

    def undo(self, then: Callable[[], Any] = lambda: None) -> None:
        """Restore the attributes as they were at construction, and call `then`; if interrupted, replace them again."""
        try:
            self._put_back()
            then()
        except BaseException:
            for owner, name, value in self._wanted:
                setattr(owner, name, value)
            raise

    def _resize(self) -> None:
        """Let blocks that were put back follow a change of the image size that they missed."""
        if _image_size(self._model) != self._size:
            self._model.set_input_size(img_size=self._model.patch_embed.img_size)

    def _put_back(self) -> None:
        for (owner, name, _), before in zip(self._wanted, self._before, strict=True):
            if before is not _Absent:
                setattr(owner, name, before)
            elif _own(owner, name) is not _Absent:
                delattr(owner, name)


def _image_size(model: Any) -> Any:
    """What `set_input_size` sets outside of a model's blocks: the sizes of the images, of the grid and of windows."""
    embed = getattr(model, 'patch_embed', None)
    return tuple(getattr(of, name, None) for of, name in (
        (embed, 'img_size'), (embed, 'grid_size'), (model, '_ref_window_sizes')))


def _first_of_each(a: nn.Module, b: nn.Module) -> tuple[nn.Parameter, nn.Parameter]:
    """The first floating-point parameters of two modules that are not in both."""
    ours, theirs = list(a.parameters()), list(b.parameters())
    common = set(ours) & set(theirs)
    first, second = (next(p for p in parameters if p not in common and p.is_floating_point())
                     for parameters in (ours, theirs))
    return first, second


def _own(owner: Any, name: str) -> Any:
    """An attribute of the object itself, not of its class."""
    children = owner._modules if isinstance(owner, nn.Module) else {}
    return children.get(name, owner.__dict__.get(name, _Absent))
