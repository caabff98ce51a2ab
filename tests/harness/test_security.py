"""Results are read from strangers: nothing in them is run, everything is escaped, and what is no record is told and skipped."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cases.parse import load_case_file
from harness.cli import main
from harness.names import UsageError
from harness.record import parse_line
from harness.store import RECORDS, load

HOUSE = Path(__file__).parents[2]

#: each would leave a file named "pwned" where it was evaluated, by whatever evaluates it
PAYLOADS = {
    "python": "__import__('pathlib').Path('pwned').touch()",
    "template": "{{ cycler.__init__.__globals__.os.system('touch pwned') }}{% raw %}",
    "shell": "$(touch pwned)`touch pwned`; touch pwned #",
    "yaml": "!!python/object/apply:os.system ['touch pwned']",
    "path": "../../../pwned",
    "script": "</script></style></title><script>document.title='pwned'</script><img src=x onerror=alert(1)>",
    "attribute": "\" onmouseover=\"alert(1)\" x='",
    "link": "[pwned](javascript:alert(1)) ![x](http://198.51.100.1/x.png)",
    "terminal": "\x1b]0;pwned\x07\x1b[2J\x1b[31mred\x9b31m\r\n\b\u202epwned",
    "surrogate": "\ud800 half a pair",
    "long": "x" * 20_000,
}


class _Touch:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def record(payload="fine", **fields):
    """A record whose every text is the payload."""
    texts = dict.fromkeys(
        ("run", "suite", "started_at", "op", "case", "case_digest", "impl", "layout", "device", "device_kind", "reason",
         "ceiling_by", "role"), payload,
    )  # fmt: skip
    samples = {"median": 1e-5, "low": 9e-6, "high": 2e-5, "samples": [1e-5, 9e-6, 2e-5]}
    return {
        "schema": 1, **texts, "status": "ok", "shape": {payload: payload}, "toolchain": {payload: payload},
        "params": {payload: payload}, "flags": [payload], "check": {payload: {"ratios": {payload: 0.5}, "reason": payload}},
        "ledger": {payload: payload}, "kernels": [{"name": payload, "registers": payload}], "launch_s": samples,
        "traffic_bytes": 1000, "flops": 1000, **fields,
    }  # fmt: skip


def nested(depth):
    return json.dumps(record()).replace('"shape": {"fine": "fine"}', '"shape": ' + '{"a": ' * depth + "1" + "}" * depth)


#: lines that are no records, whatever they hold
GARBAGE = {
    "pickle": pickle.dumps(_Touch()),
    "binary": bytes(range(256)).replace(b"\n", b"").replace(b"\r", b""),
    "python": b"__import__('os').system('touch pwned')",
    "nested past all bounds": b"[" * 100_000,
    "an endless number": b'{"schema": 1, "flops": ' + b"9" * 10_000 + b"}",
    "a number no float holds": json.dumps(record(traffic_bytes=10**400)).encode(),
    "samples no float holds": json.dumps(record(launch_s={"median": 10**400, "low": 1, "high": 1, "samples": [1]})).encode(),
    "not a number": json.dumps(record(flops=float("nan"))).encode(),
    "infinite": json.dumps(record(ceiling_s=float("inf"))).encode(),
    "wrong types": json.dumps(record(impl=["a"])).encode(),
    "another schema": json.dumps(record(schema="x" * 100_000)).encode(),
    "an unknown status": json.dumps(record(status="x" * 100_000)).encode(),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder, in an otherwise empty working folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    return folder


class _Tags(HTMLParser):
    """Tags with their attributes, and all links."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.links = [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "data")]


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
def test_a_hostile_record_is_shown_and_nothing_else(run, payload, capsys):
    """Report and terminal show it as text; two files are made, where they belong."""
    (run / RECORDS).write_text(json.dumps(record(payload)) + "\n" + json.dumps(record(payload, status="wrong")) + "\n")
    assert main(["report", str(run)]) == 0

    page = _Tags((run / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("script") == 1
    assert {"img", "iframe", "object", "embed", "base", "form"} & set(page.tags) == set()
    assert [name for name in page.attributes if name.startswith("on")] == []
    assert [link for link in page.links if not link.startswith(("#", "data:"))] == []  # the second is the page's own icon
    said = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in said)
    files = {path.relative_to(run.parents[1]) for path in run.parents[1].rglob("*") if path.is_file()}
    assert files == {Path("runs/one") / name for name in (RECORDS, "report.md", "report.html")}


def test_markdown_carries_no_markup_of_a_record(run):
    """Who renders report.md gets neither tags nor links of a stranger's making."""
    lines = [json.dumps(record(PAYLOADS[name])) for name in ("script", "attribute", "link")]
    (run / RECORDS).write_text("\n".join(lines))
    main(["report", str(run)])

    text = (run / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"(`+)[^`].*?\1", "", text)  # code spans show everything as it is
    assert not re.search(r"<(script|img|/style)", outside)
    assert not re.search(r"(?<!\\)\]\(\s*(javascript|http)", outside)


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_told_and_skipped(run, line, capsys):
    """One short line each, with its place; the records around it are kept."""
    good = json.dumps(record()).encode()
    (run / RECORDS).write_bytes(b"\n".join([good, line, good]) + b"\n")
    records, problems = load(run)

    assert len(records) == 2
    assert len(problems) == 1
    assert problems[0].startswith(f"{run / RECORDS}:2: skipped, ")
    assert len(problems[0]) < 1000
    assert problems[0].isprintable()
    assert main(["report", str(run)]) == 0
    assert not Path("pwned").exists()


@pytest.mark.parametrize("depth", [3, 49, 50, 400, 900, 100_000])
def test_deep_nesting_breaks_nothing(run, depth):
    """A record within bounds is shown, one past them is skipped; neither ends the report."""
    (run / RECORDS).write_text(json.dumps(record()) + "\n" + nested(depth) + "\n")
    records, problems = load(run)

    assert (len(records), len(problems)) == ((2, 0) if depth < 50 else (1, 1))
    assert all(parse_line(one.to_line()) == one for one in records)
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize(
    "text",
    ['{"a": ' + "[" * 900 + "]" * 900 + "}", '{"x_bytes": 1' + "0" * 400 + "}", '{"run": "\x1b[31m', '["\x1b[31m"]'],
    ids=["deep", "a long number", "torn", "no object"],
)
def test_facts_that_are_none_break_no_report(run, text, capsys):
    """One line on standard error names the file, and the records are shown."""
    (run / RECORDS).write_text(json.dumps(record()) + "\n")
    (run / "run.json").write_text(text)

    assert main(["report", str(run)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pagedbench: {run / 'run.json'}: skipped, ")
    assert line.isprintable()


def test_a_resumed_run_reads_records_as_data(run, capsys):
    """What --resume finds decides which rows are missing, and nothing more."""
    lines = [json.dumps(record(payload, device="cpu")) for payload in PAYLOADS.values()]
    (run / RECORDS).write_text("\n".join(lines) + "\n")
    (run / "run.json").write_text("[" * 100_000)
    words = ["check", "--impl", "numpy.dense[HND]", "--case", "edges.length_1", "--device", "cpu", "--in-process"]

    assert main([*words, "--resume", str(run)]) == 2
    told = capsys.readouterr().err
    assert f"{run / 'run.json'}: skipped, not JSON: " in told
    assert "was begun on cpu, this is cpu-" in told
    assert not Path("pwned").exists()


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/b", "..", "A", "", "a\nb", "x" * 10 + "\x1b[2J", "a;b", "<b>"])
def test_a_case_s_name_is_no_path_and_no_markup(tmp_path, name):
    """Names become file names, keys and cells: small letters, digits and three marks."""
    path = tmp_path / "cases.json"
    case = {"name": name, "num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 1, "seq_lens": [1]}
    path.write_text(json.dumps([case]))

    with pytest.raises(UsageError, match="name must be lower-case words"):
        load_case_file(str(path))


@pytest.mark.parametrize("ending", ["json", "toml", "py"])
def test_a_case_file_is_never_executed(tmp_path, monkeypatch, ending):
    """Not even one that is Python."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"cases.{ending}"
    path.write_text(PAYLOADS["python"])

    with pytest.raises(UsageError, match=r"not (JSON|TOML)"):
        load_case_file(str(path))
    assert not Path("pwned").exists()


# Everything that Python can do to the world announces itself to an audit hook.
WATCHED = """
import sys, runpy
seen = set()
WATCH = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "ctypes.dlopen")
sys.addaudithook(lambda event, _: seen.add(event) if event in WATCH else None)
import matplotlib, tabulate, jinja2, harness.report, harness.commands.report  # what they load is not the records' doing
seen.clear()
from harness.cli import main
code = main(["report", sys.argv[1]])
print("audited", code, *sorted(seen))
"""


def test_a_report_of_hostile_records_starts_unpickles_and_calls_nobody(run):
    """No process, no pickle, no connection, no library."""
    lines = [json.dumps(record(payload)).encode() for payload in PAYLOADS.values()] + list(GARBAGE.values())
    (run / RECORDS).write_bytes(b"\n".join(lines))
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(run)], capture_output=True, text=True, errors="replace",
        env={**os.environ, "PYTHONPATH": str(HOUSE)}, timeout=120,
    )  # fmt: skip

    assert done.stdout.splitlines()[-1] == "audited 0", done.stderr
    assert not Path("pwned").exists()


@pytest.mark.parametrize("words", [["list", "--json"], ["list", "--suite", "smoke"]], ids=" ".join)
def test_only_the_file_that_is_named_is_executed(tmp_path, words):
    """Python files that lie about, in the working folder or beside results, stay unread."""
    for name in ("impls.py", "cases.py", "conftest.py", "sitecustomise.py", "mine.py", "results/runs/one/records.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open('{path.stem}.ran', 'w')\nIMPLS = ()\n")
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from harness.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", start, str(HOUSE), *words]

    def ran(*more):
        done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return {path.name for path in tmp_path.glob("*.ran")}

    assert ran() == set()
    assert ran("--impl-file", "mine.py") == {"mine.ran"}
