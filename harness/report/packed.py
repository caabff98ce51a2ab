"""Long tables travel deflated in report.html, and packed.js sets them: a run of thousands of rows stays a file one can mail.

Rows repeat each other's names, words and tags: deflated they take a fifteenth. Short ones stay as they are, so that a page
of an ordinary run has no need of JavaScript.
"""

from __future__ import annotations

import base64
import re
import zlib

from markupsafe import Markup

#: What is longer is packed: some 600 rows of cases. A page has five such parts, 1.3 MB at most of what is not.
PLAIN_BYTES = 250_000
_PACKED = re.compile(r'<template class="packed">([\w+/=]*)</template>\n<noscript>.*?</noscript>', re.DOTALL)
_WITHOUT = "These rows are packed and need JavaScript; report.md and records.jsonl beside this page hold their numbers."


def packed(block: str) -> Markup:
    """Return a block of finished HTML, itself or packed; for blocks that may stand wherever a <div> may."""
    data = block.encode("utf-8", "backslashreplace")  # as write_report has it
    if len(data) <= PLAIN_BYTES:
        return Markup(block)
    text = base64.b64encode(zlib.compress(data, 9)).decode("ascii")
    return Markup(f'<template class="packed">{text}</template>\n<noscript><p class="note">{_WITHOUT}</p></noscript>')


def unpacked(page: str) -> str:
    """Return the page as packed.js leaves it."""
    return _PACKED.sub(lambda found: zlib.decompress(base64.b64decode(found[1])).decode(), page)
