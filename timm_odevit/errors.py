"""Wording that messages share."""
from difflib import get_close_matches
from typing import Any, Iterable

__all__ = ['one_line', 'shown', 'suggest']


def one_line(error: BaseException) -> str:
    """An error's message on one line, cut after 400 characters."""
    text = ' '.join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else f'{text[:400]} ...'


def shown(value: Any) -> str:
    """A value as code, cut off after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f'{text[:60]}...'


def suggest(word: str, allowed: Iterable[str]) -> str:
    """A sentence naming the closest allowed word, with a trailing space; empty if none is close."""
    close = get_close_matches(word, list(allowed), n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'? " if close else ''
