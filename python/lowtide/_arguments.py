"""Checks of arguments, with errors that say what was wanted."""

from ._errors import LowtideError


def checked_name(name: str) -> str:
    """``name``, if it can name a region; raises as :class:`OffloadRegion` does otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"a region's name is a string, not {type(name).__name__}")
    if not name:
        raise LowtideError("a region needs a name")
    if "\0" in name:
        raise ValueError("a region's name has no NUL character")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a region's name is text that UTF-8 can hold: {error}") from None
    return name


def checked_bytes(what: str, size: int) -> int:
    """``size``, if it is a number of bytes; ``what`` names it in the error."""
    if not isinstance(size, int):
        raise TypeError(f"{what} is a whole number of bytes, not {type(size).__name__}")
    if size < 0:
        raise ValueError(f"{what} is in bytes and may not be negative")
    if size >= 1 << 63:
        raise ValueError(f"{what} is in bytes; {size} is more than any machine has")
    return size
