"""report.html in a browser: it loads in silence, and people can sort, filter, look, copy and print, with a mouse or without."""

import re
from dataclasses import replace

import pytest

from harness.audit import audit
from harness.commands.compare import compared
from harness.history import points
from harness.report import Beside
from harness.report.html import html as page_of
from tests.report.browser import CHROMIUM, MISSING, chromium
from tests.report.conftest import slowed

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)

PHONE, DESK = 390, 1280
CASE = "document.querySelector('#case-0')"
FIRST = f"{CASE}.querySelector('tbody summary').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory, gpu_run):
    """A report of everything, on the disk."""
    old = [replace(r, launch_s=None) if r.case == "facts.e" else r for r in slowed(gpu_run, "cuda.split_kv", 0.97)]
    history = [point for n in range(10)
               for point in points([replace(r, run=f"r{n}") for r in slowed(gpu_run, "cuda.split_kv", 0.9 if n < 5 else 1.0)])]
    beside = Beside(
        comparisons=[compared(old, gpu_run, (name, "this run"), None, "geomean") for name in ("yesterday", "the baseline")],
        history=history, audit=audit(gpu_run), facts={"command": "run", "device": {"memory_bytes": 150e9}},
    )
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page_of(gpu_run, beside), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """One browser for all tests: it takes longer to start than to load a page."""
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(started):
    """A browser in which nothing may be complained of, and nothing be fetched but the file itself."""
    started.complaints.clear()
    started.fetched.clear()
    yield started

    assert started.complaints == []
    assert [url for url in started.fetched if not url.startswith(("file:", "data:"))] == []


WINDOWS = {"phone": (PHONE, False), "phone, dark": (PHONE, True), "desk": (DESK, False), "desk, dark": (DESK, True)}


@pytest.fixture(params=WINDOWS.values(), ids=WINDOWS)
def opened(request, browser, page):
    """The report on a phone and on a desk, light and dark."""
    width, dark = request.param
    browser.open(page, width, dark=dark)
    return browser


def shown(browser, section):
    """The rows of a section that are not hidden."""
    rows = f"[...document.querySelectorAll('#{section} tbody tr')]"
    return browser.value(f"{rows}.filter(row => row.checkVisibility()).length")


def colour(browser, expression, name="color"):
    """A computed colour as (red, green, blue)."""
    text = browser.value(f"getComputedStyle({expression}).{name}")
    return tuple(float(number) for number in re.findall(r"[\d.]+", text)[:3])


def luminance(rgb):
    """Relative luminance, as WCAG 2 has it."""
    parts = [value / 255 for value in rgb]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    """Contrast ratio of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_nothing_is_wider_than_the_window(opened):
    """Wide tables scroll in their own boxes; the page itself scrolls downwards only."""
    assert opened.value("document.documentElement.scrollWidth") <= opened.value("innerWidth")


def test_the_smallest_phone_has_room(browser, page):
    """At 360 pixels nothing sticks out either."""
    browser.open(page, 360)

    assert browser.value("document.documentElement.scrollWidth") == 360


def test_a_click_sorts_and_another_turns_it_round(opened):
    """By name from a to z, by energy from most to least; the head says how, and no other head does."""
    head = f"[...{CASE}.querySelectorAll('thead th')].find(head => head.textContent === '%s')"
    opened.click(f"{head % 'implementation'}.querySelector('button')")

    assert opened.value(FIRST) == "control.base2_lse[HND]"
    opened.click(f"{head % 'energy'}.querySelector('button')")
    opened.click(f"{head % 'energy'}.querySelector('button')")
    assert opened.value(FIRST) == "numpy.dense[HND]"
    assert opened.value(f"{head % 'energy'}.ariaSort") == "descending"
    assert opened.value(f"{CASE}.querySelectorAll('[aria-sort]').length") == 1


@pytest.mark.parametrize("key", ["Enter", "Space"])
def test_keys_sort_too_and_keep_their_place(opened, key):
    """A head is a button: Enter and Space sort, and the focus stays where it is and can be seen."""
    opened.value(f"{CASE}.querySelector('thead button').focus()")
    opened.press(key)

    assert opened.value(FIRST) == "control.base2_lse[HND]"
    assert opened.value("document.activeElement.textContent") == "implementation"
    assert opened.value("document.activeElement.matches(':focus-visible')")
    assert opened.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_changes_are_sorted_by_their_size(browser, page):
    """"+12%", "-3%" and "2.5 times" are one scale."""
    browser.open(page)
    cells = "[...document.querySelectorAll('.sides tbody tr')].map(row => row.cells[4].textContent)"
    browser.value(f"{cells.replace('.map', '.slice(0, 3).map')} && [...document.querySelectorAll('.sides tbody tr')]"
                  ".slice(0, 3).forEach((row, i) => row.cells[4].textContent = ['2.50 times', '+12.00%', '-3.00%'][i])")
    browser.click("document.querySelectorAll('.sides thead tr:last-child button')[4]")
    found = [text for text in browser.value(cells) if text != "-"]
    numbers = [100 * (float(text.split()[0]) - 1) if "times" in text else float(text.rstrip("%")) for text in found]

    assert {"2.50 times", "+12.00%", "-3.00%"} <= set(found)
    assert numbers == sorted(numbers)


def test_typing_filters_every_table_of_a_section(opened):
    """All words must occur, in the row or in its case's name; how many are left is announced; emptied, all are back."""
    every = shown(opened, "cases")
    opened.click("document.querySelector('#cases input')")
    opened.type("facts.F wrong nhd")

    assert shown(opened, "cases") == 1
    assert opened.value("document.querySelector('#cases [role=status]').textContent") == f"1 of {every} rows"
    opened.value("document.querySelector('#cases input').select()")
    opened.type(" ")
    assert shown(opened, "cases") == every


def test_a_filter_opens_what_it_finds(browser, tmp_path, gpu_run):
    """A case without any time is folded; the words that a row in it has show that row."""
    file = tmp_path / "report.html"
    file.write_text(page_of([replace(r, launch_s=None) if r.case == "facts.i" else r for r in gpu_run]), encoding="utf-8")
    browser.open(file, PHONE)
    before = shown(browser, "cases")
    browser.click("document.querySelector('#cases input')")
    browser.type("facts.i torch.gather[NHD]")

    assert before < len(gpu_run)
    assert shown(browser, "cases") == 1


@pytest.mark.parametrize(("section", "words", "left"), [
    ("overview", "facts.f", 1), ("against", "slower split_kv HND facts.a", 1), ("history", "facts.a cuda.split_kv[HND]", 1),
])
def test_other_sections_have_filters_of_their_own(browser, page, section, words, left):
    """Fastest by case, the rows beside other runs, the history: each by its own words, the others left alone."""
    browser.open(page)
    browser.value(f"document.querySelectorAll('#{section} details').forEach(details => details.open = true)")
    cases = shown(browser, "cases")
    browser.click(f"document.querySelector('#{section} input')")
    browser.type(words)

    assert shown(browser, section) >= left
    rows = f"[...document.querySelectorAll('#{section} tbody tr')].filter(row => !row.hidden)"
    texts = browser.value(f"{rows}.map(row => row.textContent.toLowerCase())")
    assert all(word in text for word in words.lower().split() for text in texts)
    assert shown(browser, "cases") == cases


def test_a_mark_says_its_value_at_once(opened):
    """Under the mouse a mark of a curve shows its row, place and rate; away from it, nothing."""
    opened.hover("document.querySelector('#curves .plot .mark')")

    assert re.search(r"context \d+: .* TB/s", opened.value("document.querySelector('#tip').textContent"))
    assert not opened.value("document.querySelector('#tip').hidden")
    opened.hover("document.querySelector('#curves h2')")
    assert opened.value("document.querySelector('#tip').hidden")


def test_arrows_go_from_mark_to_mark(opened):
    """One Tab stop a picture; arrows move on and show the value; Escape hides it; so in maps, by row as well."""
    opened.value("document.querySelector('#curves .plot .mark').focus()")
    first = opened.value("document.querySelector('#tip').textContent")
    opened.press("ArrowRight")

    assert opened.value("document.querySelector('#tip').textContent") not in ("", first)
    assert opened.value("document.querySelectorAll('#curves .plot:first-of-type .mark[tabindex=\"0\"]').length") >= 1
    opened.press("Escape")
    assert opened.value("document.querySelector('#tip').hidden")
    opened.value("document.querySelector('.heat td').focus()")
    opened.press("ArrowDown")
    assert opened.value("document.activeElement.parentNode.rowIndex") == 2
    assert opened.value("document.activeElement.cellIndex") == 1
    assert re.fullmatch(r"[\w.]+\[\w+\]: [\d.]+ TB/s", opened.value("document.querySelector('#tip').textContent"))


def test_tab_comes_to_the_skip_link_first(opened):
    """The first Tab shows it, and Enter leads past the links to what the page says."""
    opened.press("Tab")

    assert opened.value("document.activeElement.className") == "skip"
    assert opened.value("document.activeElement.getBoundingClientRect().top") >= 0
    opened.press("Enter")
    assert opened.value("document.activeElement.id") == "main"


def test_the_theme_can_be_turned(opened):
    """The button makes a dark page light and a light one dark."""
    before = luminance(colour(opened, "document.body", "backgroundColor"))
    opened.click("document.querySelector('#theme')")
    after = luminance(colour(opened, "document.body", "backgroundColor"))

    assert (before > 0.5) != (after > 0.5)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read_in_both_themes(browser, page, dark):
    """Every text colour has a contrast of 4.5 to the page, and every colour of a line 3, as WCAG AA asks."""
    names = dict.fromkeys(("ink", "soft", "link", "good", "bad"), 4.5) | {f"c{n}": 3.0 for n in range(8)}
    browser.open(page, dark=dark)
    browser.value("document.body.append(Object.assign(document.createElement('i'), {id: 'probe'}))")
    probe = "document.querySelector('#probe')"
    for ground in ("paper", "band"):
        browser.value(f"{probe}.style.background = 'var(--{ground})'")
        behind = colour(browser, probe, "backgroundColor")
        for name, least in names.items():
            browser.value(f"{probe}.style.color = 'var(--{name})'")
            assert contrast(colour(browser, probe), behind) >= least, f"{name} on {ground}"


def test_a_command_is_copied(browser, page):
    """Opened, a name shows its command and a button that copies it, or selects it where the page may not."""
    browser.open(page)
    browser.click(f"{CASE}.querySelector('tbody summary')")
    browser.click(f"{CASE}.querySelector('tbody .copy')")
    told = browser.value("new Promise(done => setTimeout(() => done(document.querySelector('.copy').textContent), 200))")

    assert told in ("copied", "selected")
    if told == "selected":
        assert browser.value("getSelection().toString()").startswith("pagedbench run --impl ")


def test_without_javascript_the_page_is_whole(browser, page):
    """Every row stands there, pictures are images whose marks have titles, and there is no button that would do nothing."""
    browser.open(page)
    rows = browser.value("document.querySelectorAll('tbody tr').length")
    browser.open(page, script=False)

    assert browser.value("document.querySelectorAll('tbody tr').length") == rows
    assert browser.value("document.querySelectorAll('.plot[role=img] .mark > title').length") > 100
    assert browser.value("[...document.querySelectorAll('.heat td.h9')].every(cell => cell.title)")
    assert browser.value("document.querySelectorAll('button, input').length") == 0


@pytest.fixture(scope="module")
def long_page(tmp_path_factory, gpu_run):
    """A report of so many rows that its cases are packed."""
    many = [replace(r, case=f"{r.case}.{n}", case_digest=f"{r.case_digest}{n}") for n in range(4) for r in gpu_run]
    file = tmp_path_factory.mktemp("long") / "report.html"
    file.write_text(page_of(many), encoding="utf-8")
    assert '<template class="packed">' in file.read_text(encoding="utf-8")
    return file, many


def test_what_is_packed_is_there(browser, long_page):
    """Every row with its command, to be sorted and filtered; links lead into it."""
    file, many = long_page
    browser.open(file)
    browser.wait("document.querySelectorAll('template').length === 0 && document.querySelector('#theme') !== null")
    cases = "document.querySelectorAll('#cases tbody tr').length"

    assert browser.value("document.querySelectorAll('#cases tbody th code').length") == len(many)
    assert browser.value(cases) == len(many)
    assert browser.value("[...document.querySelectorAll('a[href^=\"#\"]')].every(a => document.querySelector(a.hash))")
    browser.click(f"{CASE}.querySelector('thead button')")
    assert browser.value(FIRST) == "control.base2_lse[HND]"
    browser.click("document.querySelector('#cases input')")
    browser.type("facts.F.2 wrong nhd")
    assert shown(browser, "cases") == 1


def test_an_address_leads_into_what_is_packed(browser, long_page, tmp_path):
    """A link to a case, opened anew, shows that case and not the top."""
    file = tmp_path / "another.html"  # to an address of the page that is open a browser only scrolls
    file.write_bytes(long_page[0].read_bytes())
    browser.open(file, place="#case-9")
    browser.wait("document.querySelector('#case-9') !== null")

    assert browser.value("Math.abs(document.querySelector('#case-9').getBoundingClientRect().top)") < 100


def test_without_javascript_what_is_packed_is_told_of(browser, long_page):
    """The verdict and the pictures stand there, and a line says where the rows are."""
    browser.open(long_page[0], script=False)

    assert "report.md" in browser.value("document.querySelector('#cases noscript').textContent")
    assert browser.value("document.querySelectorAll('.plot[role=img] .mark > title').length") > 100


def test_it_prints_on_white(browser, page):
    """From a dark phone, too: on paper the page is light, and all of its tables are in some dozens of pages."""
    browser.open(page, PHONE, dark=True)
    made = browser.pdf()

    assert made.startswith(b"%PDF")
    assert 10 <= len(re.findall(rb"/Type\s*/Page\b", made)) <= 80
    browser.media("print")
    assert colour(browser, "document.body", "backgroundColor") == (255, 255, 255)
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    boxes = "[...document.querySelectorAll('.scroll')]"
    assert browser.value(f"{boxes}.every(box => getComputedStyle(box).overflowX === 'visible')")
