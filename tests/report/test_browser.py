"""The page in a real browser: loads nothing, fits a phone, readable in both schemes, on paper, by keyboard and by screen reader."""

from __future__ import annotations

import dataclasses

import pytest

from phases.base.verdict import Verdict
from phases.gate.outcome import GateOutcome, RuleOutcome
from phases.report.anchors import Anchor
from phases.report.page import render
from tests.report.browser import Browser, find
from tests.report.test_page import view

PROGRAM = find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"),
]

LONG = "a-very-long-name-without-any-place-to-break-it-" * 6

# Contrast of every visible text against what is painted behind it (WCAG 2.2, 1.4.3): [ratio, wanted, text] of those below.
CONTRAST = """(() => {
  const parse = c => { const n = c.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n.length > 3 ? n[3] : 1]; };
  const light = c => { const f = v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
                       return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0) return c; } return [255, 255, 255, 1]; };
  const bad = []; let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, style = getComputedStyle(element);
    if (!walk.currentNode.textContent.trim() || ['STYLE', 'TITLE'].includes(element.tagName.toUpperCase())) continue;
    const svg = element.closest('svg'), a = light(parse(svg ? style.fill : style.color)), b = light(behind(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), size = parseFloat(style.fontSize);
    const wanted = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    seen += 1;
    if (ratio < wanted) bad.push([ratio.toFixed(2), wanted, walk.currentNode.textContent.trim().slice(0, 40)]);
  }
  return {seen, bad};
})()"""

# Colours that carry meaning in charts against the page (WCAG 2.2, 1.4.11).
SERIES = """(() => {
  const style = getComputedStyle(document.documentElement), value = name => style.getPropertyValue(name).trim();
  const light = hex => { const c = hex.length === 4 ? [...hex.slice(1)].map(d => d + d) : hex.slice(1).match(/../g);
    const f = v => { v = parseInt(v, 16) / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * f(c[0]) + 0.7152 * f(c[1]) + 0.0722 * f(c[2]); };
  const paper = light(value('--paper'));
  return ['--series-0', '--series-1', '--series-2', '--series-3', '--series-4', '--series-5', '--pass', '--fail', '--hold', '--link'].map(name => {
    const l = light(value(name)); return [name, (Math.max(l, paper) + 0.05) / (Math.min(l, paper) + 0.05)]; });
})()"""

HEADINGS = "[...document.querySelectorAll('h1,h2,h3,h4,h5,h6')].map(h => Number(h.tagName[1]))"
FOCUSED = """(() => { const e = document.activeElement, s = getComputedStyle(e), b = e.getBoundingClientRect();
  return {name: e.getAttribute('aria-label') || e.textContent.trim().slice(0, 60), tag: e.tagName, outline: s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2,
          seen: b.width > 0 && b.left >= -1 && b.top < innerHeight}; })()"""
FOCUSABLE = "[...document.querySelectorAll('a[href], summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility({contentVisibilityAuto: true})).length"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One page with everything on it, one with names that are too long, one with nothing measured."""
    folder = tmp_path_factory.mktemp("pages")
    whole = view(text="kernel")
    case = whole.results.benchmark[0].case.key
    made = {
        "whole": dataclasses.replace(whole, anchors=(Anchor(case, "other", 2e-3, True),), anchors_about="elsewhere"),
        "long": view(text=LONG),
        "bare": dataclasses.replace(
            whole,
            gate=GateOutcome("build-parity", (RuleOutcome("parity", Verdict.ERROR, "nothing was measured"),)),
            tables={},
            change=None,
            results=dataclasses.replace(whole.results, benchmark=(), facts={}),
        ),
    }
    for name, one in made.items():
        (folder / f"{name}.html").write_text(render(one), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("name", ["whole", "long", "bare"])
def test_nothing_is_asked_of_the_network_and_nothing_is_complained_of(browser, pages, name):
    browser.open(pages[name])
    assert browser.run("document.querySelector('h1').innerText")
    assert browser.requests() == [] and browser.complaints() == []


@pytest.mark.parametrize("width", [320, 390, 768])
@pytest.mark.parametrize("name", ["whole", "long", "bare"])
def test_it_fits_the_width(browser, pages, name, width):
    browser.open(pages[name], width=width, height=844)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    outside = "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, svg, .skip') && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    assert browser.run(outside) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_has_contrast(browser, pages, dark):
    browser.open(pages["whole"], dark=dark)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    found = browser.run(CONTRAST)
    assert found["seen"] > 150 and found["bad"] == []
    assert [(name, ratio) for name, ratio in browser.run(SERIES) if ratio < 3] == []
    assert (browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)") is not dark


def test_the_contrast_test_finds_a_pale_text(browser, pages):
    browser.open(pages["whole"])
    browser.run("document.querySelector('h1').style.color = '#bbb'")
    assert [text for _, _, text in browser.run(CONTRAST)["bad"]] == ["0003-build-parity-FAIL"]


def test_a_screen_reader_meets_landmarks_headings_and_charts_in_words(browser, pages):
    browser.open(pages["whole"])
    levels = browser.run(HEADINGS)
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))
    nodes = [n for n in browser.call("Accessibility.getFullAXTree")["nodes"] if not n.get("ignored")]
    roles = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes]
    counted = {role: sum(r == role for r, _ in roles) for role in ("banner", "navigation", "main", "contentinfo")}
    assert counted == {"banner": 1, "navigation": 1, "main": 1, "contentinfo": 1}
    charts = [name for role, name in roles if role in ("image", "img", "graphics-document")]
    assert len(charts) >= 6 and all(len(name) > 20 for name in charts), charts
    assert any("decided FAIL at 80 s" in name for name in charts) and any("traffic safe" in name for name in charts)
    assert all(name for role, name in roles if role == "region")
    assert browser.run("document.documentElement.lang") == "en" and browser.run("document.title")


def test_the_keyboard_reaches_everything_in_order(browser, pages):
    browser.open(pages["whole"])
    count, stops = browser.run(FOCUSABLE), []
    for _ in range(count):
        browser.press("Tab", 9)
        stops.append(browser.run(FOCUSED))
    assert stops[0]["name"] == "Skip to the rules" and all(stop["outline"] and stop["seen"] for stop in stops), stops
    order = "[...document.querySelectorAll('a[href], summary, [tabindex=\"0\"]')].filter(e => e.checkVisibility({contentVisibilityAuto: true})).map(e => e.getAttribute('aria-label') || e.textContent.trim().slice(0, 60))"
    assert [stop["name"] for stop in stops] == browser.run(order)
    summary = next(n for n, stop in enumerate(stops) if stop["tag"] == "SUMMARY")
    browser.open(pages["whole"])
    for _ in range(summary + 1):
        browser.press("Tab", 9)
    before = browser.run("document.activeElement.parentElement.open")
    browser.press("Enter", 13)
    assert browser.run("document.activeElement.parentElement.open") is not before


def test_paper_gets_what_is_folded_away(browser, pages, tmp_path):
    browser.open(pages["whole"], width=794, media="print")
    closed = "[...document.querySelectorAll('details:not([open])')].map(d => d.lastElementChild.getBoundingClientRect().height)"
    heights = browser.run(closed)
    assert heights and min(heights) > 10
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF-") and (tmp_path / "page.pdf").stat().st_size > 20_000
    browser.open(
        pages["whole"], width=794, media="print", dark=True
    )  # a dark screen prints on white paper all the same
    assert browser.run("getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()") == "#fff"
