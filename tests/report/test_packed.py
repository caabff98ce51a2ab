"""Long parts of report.html travel deflated: what comes out is what went in, and short ones stay as they are."""

import pytest

from harness.report.html import html as page_of
from harness.report.packed import PLAIN_BYTES, packed, unpacked
from tests.report.conftest import HOSTILE


@pytest.mark.parametrize("more", [0, 1, 5 * PLAIN_BYTES], ids=["at the limit", "beyond it", "far beyond it"])
def test_what_comes_out_is_what_went_in(more):
    """To the byte, letters beyond ASCII included; from the limit on it is much shorter."""
    block = ("<p>µ \N{RIGHTWARDS ARROW} " * PLAIN_BYTES)[: PLAIN_BYTES // 2 + more]
    block += "-" * (PLAIN_BYTES + more - len(block.encode()))
    text = packed(block)

    assert unpacked(f"<main>{text}</main>") == f"<main>{block}</main>"
    assert (text == block) == (more == 0)
    assert more == 0 or len(text) < len(block) / 20


def test_what_cannot_be_written_is_escaped_as_elsewhere():
    """A lone surrogate in a record's text, which no encoding has, reads \\\\udc80 as in the rest of the page."""
    assert unpacked(packed("x" * PLAIN_BYTES + "\udc80")).endswith("x\\udc80")


def test_an_ordinary_run_is_plain(gpu_run):
    """Some three hundred rows need no JavaScript."""
    assert '<template class="packed">' not in page_of(gpu_run)


def test_markup_of_names_stays_text_when_unpacked(hostile_run):
    """What is packed has been escaped before."""
    text = page_of(hostile_run * 12)

    assert '<template class="packed">' in text
    assert HOSTILE not in unpacked(text)
