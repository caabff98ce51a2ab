"""Words of others: whatever an exception or a name does, it is shown, short enough and on its line."""

from __future__ import annotations

import pytest

from harness import words


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")

    __repr__ = __str__


def test_an_exception_that_cannot_be_shown_is_named():
    """Its `__str__` and `__repr__` raise: the type is still known."""
    assert words.of_error(Unspeakable()) == "Unspeakable: its message cannot be shown"
    assert words.of_value(Unspeakable()) == "a Unspeakable that cannot be shown"
    assert words.of_error(ValueError("no luck")) == "ValueError: no luck"


def test_a_message_of_megabytes_is_cut_in_its_middle():
    """Begin and end stay, and it says how much does not."""
    said = words.of_error(ValueError("begin" + "x" * 2_000_000 + "end"))

    assert said.startswith("ValueError: begin")
    assert said.endswith("end")
    assert "... 1996008 characters left out ..." in said
    assert len(said) < words.MOST + 100


@pytest.mark.parametrize(
    ("text", "shown"), [("a\x1b[31m\nb", "a?[31m?b"), ("\udcff", "?"), ("fine name", "fine name")], ids=ascii
)
def test_a_name_cannot_steer_the_terminal(text, shown):
    """Escape codes, line ends and halves of characters."""
    assert words.printable(text) == shown
    assert words.printable("a\nb", keep="\n") == "a\nb"
