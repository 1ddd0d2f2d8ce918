"""Settings: frozen dataclasses that define each name, default, allowed value and error message in one place."""
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from typing_extensions import Self

# takes a name and a value; returns the value to keep, or raises ValueError; allows None if `none` says what it means
Check = Callable[[str, Any], Any]


def setting(default: Any, check: Check) -> Any:
    return field(default=default, metadata={'check': check})


@dataclass(frozen=True, repr=False)
class Settings:
    """Settings, each checked on its own at construction."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if check := f.metadata.get('check'):
                vars(self)[f.name] = check(f.name, getattr(self, f.name))  # a frozen dataclass refuses assignments
        self._check()

    def _check(self) -> None:
        """Conditions on several settings."""

    def changed(self) -> dict[str, Any]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.changed().items())})"

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @classmethod
    def about(cls) -> dict[str, str]:
        """A one-line description of each setting, from the docstring (empty under `python -OO`)."""
        entries = dict(re.findall(r'^ {4}(\w+): (.*(?:\n {8}.*)*)', inspect.getdoc(cls) or '', re.M))
        return {name: ' '.join(entries.get(name, '').split()) for name in cls.names()}

    @classmethod
    def from_keywords(cls, config: Self | None, given: Mapping[str, Any], caller: str) -> Self:
        """The settings that a function was given, as `config` or as keywords; TypeError for both, or for others."""
        refuse_unknown(given, cls.names(), caller)
        if config is None:
            return cls(**given)
        if given:
            raise TypeError(f"{caller} got both config and '{next(iter(given))}', which is part of it. Give only one.")
        if not isinstance(config, cls):
            raise TypeError(f'config of {caller} must be of type {cls.__name__}; got {type(config).__name__}.')
        return config


def refuse_unknown(given: Iterable[str], known: Sequence[str], caller: str) -> None:
    for key in given:
        if key not in known:
            raise TypeError(f"{caller} got an unknown argument '{key}'. {suggest(str(key), known)}Arguments: "
                            f"{', '.join(known)}.")


def _kept(allowed: str, keep: Callable[[Any], Any], none: str = '') -> Check:
    """A check by a function that gives the value to keep; it raises an error, or gives None, for what is refused."""
    allowed += f', or None for {none}' if none else ''

    def check(name: str, value: Any) -> Any:
        if value is None and none:
            return None
        try:
            kept = keep(value)
        except (OverflowError, TypeError, ValueError):
            kept = None
        if kept is None:
            raise ValueError(f'{name} must be {allowed}; got {shown(value)}.')
        return kept
    return check


def integer(least: int | None, none: str = '', most: float = math.inf) -> Check:
    def keep(value: Any) -> int | None:
        whole = isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's too
        return int(value) if whole and (least is None or value >= least) and value <= most else None
    inside = '' if least is None else f' of at least {least}' if most == math.inf else f' from {least} to {most}'
    return _kept(f'a whole number{inside}', keep, none)


def number(most: float = math.inf, *, open: str = '', none: str = '') -> Check:
    """A finite number from 0 to `most`, without 0 if `open` is '(', without `most` if ')', or '()'.

    None is allowed, too, if `none` says what it stands for.
    """
    allowed = f"a number {'above' if '(' in open else 'of at least'} 0"
    if most < math.inf:
        allowed = {'': f'a number from 0 to {most:g}', '()': f'a number between 0 and {most:g}'}.get(
            open, f"{allowed} and {'below' if ')' in open else 'at most'} {most:g}")

    def keep(value: Any) -> float | None:
        real = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        inside = (0 < real if '(' in open else 0 <= real) and (real < most if ')' in open else real <= most)
        return real if inside and math.isfinite(real) else None  # NaN is not inside
    return _kept(allowed, keep, none)


def one_of(allowed: Iterable[Any], none: str = '') -> Check:
    def check(name: str, value: Any) -> Any:
        names = [*allowed]  # may have grown
        if (value is not None or not none) and value not in names:
            words = ', '.join(names) + (f', or None for {none}' if none else '')
            raise ValueError(f"Unknown {name} '{value}'. {suggest(str(value), names)}Allowed: {words}.")
        return value
    return check


flag = _kept('True or False', lambda value: value if isinstance(value, bool) else None)


def many(each: Check, what: str) -> Check:
    return _kept(what, lambda values: tuple(each('', value) for value in values))


def one_line(error: BaseException | str) -> str:
    """A message on one line that a terminal shows, cut after 400 characters."""
    text = ''.join(c if printable(c) else '?' for c in ' '.join(str(error).split())) or type(error).__name__
    text = re.sub('^Caught .*?Error: ', '', text)  # in a worker of a loader
    text = re.sub('(("[^"]+", ){2})("[^"]+", )*"[^"]+"', r'\1...', text)  # of many keys, the first two
    return text if len(text) <= 400 else f'{text[:400]} ...'


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:60]}...'


def printable(text: str) -> bool:
    """Whether text has nothing that a terminal would obey, but for lines."""
    return re.sub('[\n\u00a0\u200c-\u200f\u3000]', '', text).isprintable()


def suggest(word: str, allowed: Iterable[str]) -> str:
    """A sentence naming the closest allowed word, with a trailing space; empty if none is close."""
    close = [each for each in allowed if each.startswith(word)] or get_close_matches(word, allowed, n=1, cutoff=0.75)
    return f"Did you mean '{close[0]}'? " if close else ''
