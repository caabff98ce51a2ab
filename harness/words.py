"""Words of others, made fit to be shown: what an exception says, a long reason, a name with codes that steer a terminal."""

from __future__ import annotations

import signal

#: Characters of one reason, at most: a message of megabytes floods the terminal and every record.
MOST = 4000


def of_error(error: BaseException) -> str:
    """Return "TypeName: message", shortened, whatever the exception does when it is asked for its message."""
    return f"{type(error).__name__}: {message(error)}"


def message(error: BaseException) -> str:
    """Return what the exception says, shortened; its `__str__` is the user's code and may raise."""
    try:
        return shortened(str(error))
    except Exception:
        return "its message cannot be shown"


def of_value(value: object) -> str:
    """Return the value's repr, shortened; its `__repr__` is the user's code and may raise."""
    try:
        return shortened(repr(value), 200)
    except Exception:
        return f"a {type(value).__name__} that cannot be shown"


def shortened(text: str, most: int = MOST) -> str:
    """Return `text` with its middle left out, and how much that is, where it has more than `most` characters."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    return f"{text[: most // 2]} ... {left_out} characters left out ... {text[-(most // 2) :]}"


def printable(text: object, keep: str = "") -> str:
    """Return `text` with "?" for what would steer a terminal, line ends included unless they are in `keep`."""
    return "".join(char if char.isprintable() or char in keep else "?" for char in str(text))


def signal_name(number: int) -> str:
    """Return the name of a signal; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
