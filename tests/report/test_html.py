"""report.html: complete, true to the records, safe, self-contained. test_browser.py has it come alive."""

import html.parser
import itertools
import re
from dataclasses import replace

import pytest

from harness.record import STATUSES
from harness.report import write_report
from harness.report.html import html as page_of


class Page(html.parser.HTMLParser):
    """What a page holds: tags with attributes, ids, and the text of each table row by the id of its section."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.ids, self.rows, self.section = [], [], [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "br", "wbr", "input", "img"):
            self.open.append(tag)
        if "id" in dict(attributes):
            self.ids.append(dict(attributes)["id"])
        if tag == "section":
            self.section = dict(attributes)["id"]
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open) and "code" not in self.open:
            self.rows[self.section][-1][-1] += data


def test_a_case_table_equals_its_records(gpu_run):
    """Parsed back, the times and shares of a case are those of its records, fastest first."""
    wanted = {r.row: r for r in gpu_run if r.case == "facts.a" and r.launch_s}
    heads, *lines = Page(page_of(gpu_run)).rows["case-0"]
    lines = [line for line in lines if len(line) == len(heads)]
    times = [float(line[1]) for line in lines]

    assert {line[0] for line in lines} == set(wanted)
    assert times == sorted(times)
    for line in lines:
        record, cells = wanted[line[0]], dict(zip(heads, line, strict=True))
        assert float(cells["time µs"]) == pytest.approx(record.launch_s.median * 1e6, rel=5e-4)
        assert float(cells["of ceiling"].rstrip("%")) == pytest.approx(100 * record.ceiling_share, abs=0.06)
        low, high = map(float, cells["interval µs"].split(" to "))
        assert (low, high) == pytest.approx((record.launch_s.low * 1e6, record.launch_s.high * 1e6), rel=5e-4)


def test_every_row_is_there_with_its_command(gpu_run):
    """Each record, whatever became of it, is a row of its case with the command that runs it again."""
    text = page_of(gpu_run)

    assert text.count("<code>pagedbench run --impl ") == len(gpu_run)
    assert "<code>pagedbench run --impl &#39;cuda.split_kv[NHD]&#39; --case facts.a --set splits=0 --set warps=8</code>" in text
    for status in STATUSES[1:]:
        assert f'<span class="badge {status}">{status}</span>' in text
    assert "worst [seq 2, head 5, dim 17]: got 0.4131" in text


def test_the_page_needs_nothing_else(gpu_run, cpu_run):
    """No address of any network, no file, no script or style from outside; links lead to places on the page."""
    for records in (gpu_run, cpu_run):
        text = page_of(records)
        page = Page(text)
        targets = [attributes[name] for _, attributes in page.tags for name in ("src", "href", "action") if name in attributes]

        assert not re.search(r"https?://|url\(|@import", text)
        assert set(targets) - {"data:,"} <= {f"#{name}" for name in page.ids}
        assert len(page.ids) == len(set(page.ids))


def test_the_page_can_be_heard(gpu_run):
    """Language, skip link and headings; boxes that take the focus and pictures have names, heads of tables a scope."""
    tags = Page(page_of(gpu_run)).tags
    boxes = [attributes for _, attributes in tags if attributes.get("tabindex") == "0"]
    levels = [int(tag[1]) for tag, _ in tags if tag in ("h1", "h2", "h3", "h4")]

    assert next(attributes for tag, attributes in tags if tag == "html")["lang"] == "en"
    assert next(attributes for tag, attributes in tags if tag == "a")["href"] == "#main"
    assert len(boxes) > 20
    assert all(box["role"] == "region" and box["aria-label"].strip() for box in boxes)
    assert all(attributes.get("scope") for tag, attributes in tags if tag == "th")
    assert all(attributes.get("aria-label") or attributes.get("aria-hidden") for tag, attributes in tags if tag == "svg")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_names_cannot_break_out(hostile_run):
    """Markup in any text of a record stays text: the page has its own script and no other tag of a record's making."""
    page = Page(page_of(hostile_run))

    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]


def test_a_check_alone_makes_a_page(gpu_run):
    """Without any time there are verdicts and reasons, and no empty pictures."""
    text = page_of([replace(r, launch_s=None, plan_s=None, ceiling_share=None, ceiling_s=None) for r in gpu_run[:40]])

    assert "of what is allowed" in text
    assert re.search(r"\d\d rows without a time: \d\d ok", text)
    assert 'id="curves"' not in text


def marks_of(text):
    """The heat map's numbers, as a reader sees them."""
    return [cell for line in Page(text).rows["heat"][1:] for cell in line[1:]]


def test_doubted_times_are_marked_wherever_they_stand(gpu_run):
    """A flagged row is marked in the heat map and in the overview, and is the best of its case only without doubt."""
    best = next(r for r in gpu_run if r.row == "cuda.split_kv[NHD]" and r.launch_s)
    share, time = f"{100 * best.ceiling_share:.0f}", f"{1e6 * best.launch_s.median:.1f} µs"
    text = page_of([replace(best, flags=("never converged: one visit, which has no interval",))])
    flagged = page_of([replace(best, flags=("workspace: declares 0 bytes, holds 4 bytes",))])

    assert marks_of(text) == [f"{share}*"]
    assert f'>{time}</span><span class="mark-doubt">*</span>' in text
    assert '<tr class="best">' not in text
    assert marks_of(flagged) == [f"{share}†"]
    assert '<tr class="best">' in flagged


def test_rows_that_run_nowhere_are_named_once(gpu_run):
    """A row that the device bars from every case is named with the reason and stands in no table."""
    barred = [replace(r, status="unsupported", reason="runs on cpu only (got cuda)", launch_s=None)
              for r in gpu_run if r.impl == "numpy.dense"]
    text = page_of([*barred, *(r for r in gpu_run if r.impl != "numpy.dense")])

    assert text.count("numpy.dense") == 1
    assert f"numpy.dense[HND] in {len(barred)} cases" in text


def test_a_case_bound_by_arithmetic_is_held_against_the_fastest(gpu_run):
    """Its row of the heat map says so, its rates are FLOPs a second, and no share of the ceiling of reading shows."""
    records = [replace(r, flops=200 * r.traffic_bytes) if r.case == "facts.a" else r for r in gpu_run]
    page = Page(page_of(records))
    line = next(line for line in page.rows["heat"] if line[0].startswith("facts.a"))

    assert line[0] == "facts.a of fastest"
    assert "100" in line
    assert page.rows["case-0"][0][2] == "TFLOP/s"
    assert "of ceiling" not in page.rows["case-0"][0]
    assert "of ceiling" in page.rows["case-1"][0]


def test_a_long_reason_is_folded(gpu_run):
    """Its first and last line show at once, the source between them when it is opened."""
    lines = ["prepare: CompilationError: at 17:4:", *(f"    line {n}" for n in range(20)), "AssertionError: in loop"]
    text = page_of([replace(gpu_run[0], status="failed", reason="\n".join(lines), launch_s=None)])

    assert "<code>prepare: CompilationError: at 17:4:\nAssertionError: in loop</code></summary>" in text
    assert text.count("line 13") == 1


def test_no_records_make_a_page():
    """An empty run is a page that says so."""
    assert "Nothing ran" in page_of([])


def test_more_than_the_ceiling_is_marked(gpu_run):
    """A share over 100% is a failure of the measurement: the number stays and its cell is marked."""
    record = next(r for r in gpu_run if r.launch_s)
    text = page_of([replace(record, ceiling_share=1.042)])

    assert '<td class="bar over" style="--share:1.000">104.2%</td>' in text


def test_both_pages_are_written(tmp_path, gpu_run):
    """write_report leaves report.md and report.html and says where."""
    made = write_report(gpu_run, tmp_path)

    assert [path.name for path in made] == ["report.md", "report.html"]
    assert all(path.stat().st_size > 1000 for path in made)

