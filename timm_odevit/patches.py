"""Attributes of a model that are replaced together, and put back together."""
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Sequence, Tuple

from torch import nn

__all__ = ['Patches', 'evaluating', 'hooked', 'surely']


class _Absent:
    """Stands for an attribute that was not there: a class, since a copy of it is itself."""


class Patches:
    """Replacements of attributes: all of them are made, or none.

    Args:
        wanted: Owner, name of the attribute, and its new value, for each.

    Attributes:
        before: What was there, in the same order.
    """

    def __init__(self, wanted: Sequence[Tuple[Any, str, Any]]) -> None:
        self._wanted = list(wanted)
        self.before: List[Any] = [_own(owner, name) for owner, name, _ in self._wanted]

    def put(self) -> None:
        """Make the replacements; an interrupt in between takes those that were made off again."""
        try:
            for owner, name, value in self._wanted:
                setattr(owner, name, value)
        except BaseException:
            self._put_back()
            raise

    def take_off(self) -> None:
        """Put the attributes back as they were when this was made; an interrupt in between replaces them again."""
        try:
            self._put_back()
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


def _own(owner: Any, name: str) -> Any:
    """An attribute of the object itself, not of its class."""
    children = owner._modules if isinstance(owner, nn.Module) else {}
    return children.get(name, owner.__dict__.get(name, _Absent))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode meanwhile, and every module's own mode after it. What is in eval mode already is not touched."""
    training = [module for module in model.modules() if module.training]

    def put_back() -> None:
        for module in training:
            module.training = True
    try:
        if training:
            model.eval()
        yield
    finally:
        surely(put_back)


@contextmanager
def hooked(*hooks: Tuple[nn.Module, str, Callable[..., Any]]) -> Iterator[None]:
    """Hooks on modules meanwhile.

    Args:
        hooks: Module, kind ('before', 'before with keywords' or 'after' its forward) and function, for each. What is
            taken off again is found by the function, so each needs one of its own.
    """
    def take_off() -> None:
        for module, _, function in hooks:
            for kind in ('_forward_pre_hooks', '_forward_hooks'):
                for key, found in list(getattr(module, kind).items()):
                    if found is function:
                        getattr(module, kind).pop(key, None)
                        getattr(module, f'{kind}_with_kwargs').pop(key, None)
    try:
        for module, kind, function in hooks:
            if kind == 'after':
                module.register_forward_hook(function)
            else:
                module.register_forward_pre_hook(function, with_kwargs=kind == 'before with keywords')
        yield
    finally:
        surely(take_off)


def surely(clean_up: Callable[[], Any]) -> None:
    """Clean up, which may be done twice; an interrupt in the middle of it comes after all is done."""
    try:
        clean_up()
    except BaseException:
        clean_up()
        raise
