"""What a process runs of a checkout of which it was to run another state: found in what it has loaded.

A path written out in a kernel's file, a link, an editable or a plain installation: each leads both arms of a comparison to
the same code, and a gate that finds it SAME as itself has looked at nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from harness.rooms import HOUSE

#: Rooms of ours that both arms have in common, whichever tree an arm's implementations are of.
INSTRUMENT = ("harness", "cases", "runtime")
#: Words in the names of variables that say where libraries keep what they compile: TRITON_CACHE_DIR, TORCH_EXTENSIONS_DIR.
CACHES = ("CACHE", "EXTENSIONS", "TRITON_HOME")
_ENVIRONMENT = ("site-packages", "dist-packages")


def strays(state: Path, root: Path, tree: Path) -> list[Path]:
    """Files of the checkout `root`, or installed from it, that this process has loaded, and that are not of `state`.

    tree    whose table of implementations it runs: ours or another checkout's

    Environments and caches of compiled kernels that lie within `root`, hidden folders and the harness are no part of it.
    """
    rooms = [HOUSE / room for room in INSTRUMENT] + [HOUSE / "impls"] * (tree == HOUSE)
    caches = [folder for name, folder in os.environ.items() if any(word in name for word in CACHES) and folder]
    apart = [Path(folder).resolve() for folder in (sys.prefix, sys.base_prefix, *caches)]
    apart = [*rooms, *(folder for folder in apart if _is_of(folder, root, state) and folder != root)]
    copies: set[Path] | None = None
    found = []
    for file in dict.fromkeys(_loaded()):
        if _is_of(file, root, state):
            is_hidden = any(part.startswith(".") for part in file.relative_to(root).parts[:-1])
            if not is_hidden and not _is_installed(file) and not any(file.is_relative_to(place) for place in apart):
                found.append(file)
        elif _is_installed(file):
            copies = set(_copies_of(root)) if copies is None else copies
            found += [file] * (file in copies)
    return found


def _is_of(file: Path, root: Path, state: Path) -> bool:
    """Whether a file is of `root` and not of `state`; either may be a folder of the other."""
    is_deeper = state.is_relative_to(root) and file.is_relative_to(state)
    return file.is_relative_to(root) and not is_deeper


def _is_installed(file: Path) -> bool:
    return any(part in _ENVIRONMENT for part in file.parts)


def _loaded() -> Iterator[Path]:
    """Files of Python modules and, on Linux, of libraries."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str):
            yield Path(file).resolve()
    maps = Path("/proc/self/maps")
    for line in maps.read_text(errors="replace").splitlines() if maps.exists() else ():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
            yield Path(fields[5])


def _copies_of(root: Path) -> Iterator[Path]:
    """Installed files of distributions that were built from a folder or a file within `root`, as PEP 610 has it noted.

    Of an editable one they only lead to `root`, whose files are found there.
    """
    for found in importlib.metadata.distributions():
        noted = json.loads(found.read_text("direct_url.json") or "{}")
        url, is_editable = urllib.parse.urlsplit(noted.get("url", "")), noted.get("dir_info", {}).get("editable", False)
        place = Path(urllib.request.url2pathname(url.path)).resolve()
        if url.scheme == "file" and place.is_relative_to(root) and not is_editable and found.name != "pagedbench":
            yield from (Path(str(found.locate_file(file))).resolve() for file in found.files or ())
