"""What an arm has loaded of a checkout of which it is to run another state."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from harness import arm
from harness.names import UsageError
from harness.rooms import HOUSE, load_room
from harness.strays import strays


@pytest.fixture
def root(tmp_path):
    """A checkout, with an environment and another state of it inside."""
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def loaded(monkeypatch, file):
    """Let a module have been loaded from `file`, which is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    module = types.ModuleType("kernel_of_a_state")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(
    ("file", "state", "is_stray"),
    [
        ("root/src/kernel.py", "state", True),
        ("state/src/kernel.py", "state", False),
        ("root/before/kernel.py", "root/before", False),
        ("root/kernel.py", "root/before", True),
        ("root/.venv/lib/site-packages/kernel.py", "state", False),
        ("root/.cache/launcher.py", "state", False),
        ("root/build/launcher.py", "state", False),
        ("elsewhere/kernel.py", "state", False),
    ],
)
def test_a_file_of_the_checkout_and_not_of_the_state_is_one(tmp_path, monkeypatch, root, file, state, is_stray):
    """What lies in the checkout and is none of it: environments, and what the arm itself may have compiled into a cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root / "build"))
    loaded(monkeypatch, tmp_path / file)

    assert strays(tmp_path / state, root, HOUSE) == [tmp_path / file] * is_stray


def test_a_link_is_what_it_leads_to(tmp_path, monkeypatch, root):
    """Installed by a link, say."""
    (root / "kernel.py").touch()
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/kernel.py").symlink_to(root / "kernel.py")
    loaded(monkeypatch, tmp_path / "site-packages/kernel.py")

    assert strays(tmp_path / "state", root, HOUSE) == [root / "kernel.py"]


@pytest.mark.parametrize(("of", "is_editable"), [("root", False), ("root", True), ("elsewhere", False)])
def test_what_was_installed_from_the_checkout_is_one(tmp_path, monkeypatch, root, of, is_editable):
    """Both arms import the one copy that pip has made, and has noted of what; an editable one's own files do no work."""
    place = tmp_path / "site-packages"
    loaded(monkeypatch, place / "mine/kernel.py")
    notes = place / "mine-1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (notes / "RECORD").write_text("mine/kernel.py,,\n")
    (notes / "direct_url.json").write_text(json.dumps({"url": (tmp_path / of).as_uri(), "dir_info": {"editable": is_editable}}))
    monkeypatch.syspath_prepend(place)

    assert strays(tmp_path / "state", root, HOUSE) == [place / "mine/kernel.py"] * ((of, is_editable) == ("root", False))


def test_another_worktree_of_the_repository_is_no_old_state_either(tmp_path, monkeypatch, root):
    """From which a package is installed to be edited, say: both arms of another worktree import it from there."""
    other, who = tmp_path / "other", ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"], ["worktree", "add", "-q", other]):
        subprocess.run(["git", "-C", root, *who, *words], check=True, capture_output=True)
    loaded(monkeypatch, other / "src/kernel.py")
    session = object.__new__(arm._ArmSession)
    session._tree, session._state = HOUSE, [str(tmp_path / "state"), str(root)]

    with pytest.raises(UsageError, match=r"has loaded .*other/src/kernel\.py, which is of .*other: both sides would"):
        session._require_own()


def test_the_instrument_is_of_both_arms(tmp_path):
    """Of our own checkout the harness is no stray; a table of implementations is one, where the arm's is another's."""
    table = Path(load_room("impls").__file__)

    assert table not in strays(tmp_path, HOUSE, HOUSE)
    found = strays(tmp_path, HOUSE, tmp_path)
    assert table in found
    assert not any(file.is_relative_to(HOUSE / "harness") for file in found)
