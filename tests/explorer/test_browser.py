"""The kept page in a browser: every view is drawn, links restore what they show, and its own numbers are right."""

import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from common.experiments.collect import collect
from common.experiments.definitions import ROOT
from common.experiments.quantities import QUANTITIES
from common.experiments.tables import load_table
from common.explorer import clusters
from common.explorer.page import read_page, render
from common.report.statistics import difference

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium")]
VIEWS = ("scoreboard", "compare", "curves", "gap", "rates", "topology", "planner")
LIVE = {
    "run": "runs/a/seed_1",
    "state": "running",
    "step": 20,
    "share": 0.25,
    "seconds_left": 5000,
    "loss": 2.5,
    "validation": {"loss": 2.6},
    "written": "2026-01-02T03:04:05+00:00",
    "curve": [[10, 3.0], [20, 2.5]],
}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    """The kept page's numbers, with the scripts as they are now."""
    path = tmp_path_factory.mktemp("page") / "explorer.html"
    path.write_text(render(read_page(ROOT / "results" / "explorer.html")[0], None, str(ROOT / "results")))
    return path


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def window(browser, page_file):
    """The opened page, and what it has complained of on its console."""
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": 1280, "height": 900}, offline=True)
    page.set_default_timeout(120_000)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(page_file.as_uri())
    yield page, complaints
    page.close()


@pytest.fixture
def tab(window):
    """A function that shows a fragment on the page; complaints fail the test."""
    page, complaints = window

    def opened(fragment: str):
        page.evaluate("(fragment) => { location.hash = fragment; }", fragment)
        return drawn(page)

    complaints.clear()
    yield opened
    assert complaints == []


def drawn(page):
    """Wait until all charts of the state are drawn."""
    page.wait_for_function(
        "document.body.dataset.shows === location.hash && "
        "[...document.querySelectorAll('section.shown .chart')].every((chart) => chart.dataset.drawn)"
    )
    return page


def signed(text: str) -> list[float]:
    """Return the numbers with a sign."""
    return [float(number.replace("−", "-")) for number in re.findall(r"[−+][\d.]+", text)]


@pytest.mark.parametrize("view", VIEWS)
def test_each_view_is_drawn(tab, view):
    page = tab(f"view={view}")
    assert page.locator("section.shown").get_attribute("id") == view
    assert page.locator("nav a[aria-current]").count() == 1
    if view != "scoreboard":
        assert page.locator("section.shown .chart svg.marks").count() >= 1
        assert page.locator("section.shown .panel table tr").count() >= 2
        assert page.locator("[role=img] summary").count() == 0  # whose content the keyboard could not reach


@pytest.mark.parametrize(
    "fragment",
    [
        "view=curves&table=gpt2_gap&metric=validation_loss&x=samples&logx=1&logy=1&seeds=1",
        "view=curves&rows=-",
        "view=gap&x=local_over_noise&mode=given&logy=1",
        "view=rates&table=gpt2_short&method=dadam_complete",
        "view=topology&family=aer&n=32&L=4",
        "view=planner&hosts=16&per_host=1&mbit=100&jitter=0.3",
        "view=compare&mode=given&table=gpt2_gap",
        "view=compare&table=none&a=none&mode=none",
        "view=none",
        "view=toString",
        "view=planner&per_host=3",
        "view=scoreboard&claim=length",
        "view=topology&family=constructor",
        "view=compare&table=constructor",
    ],
)
def test_settings_are_drawn(tab, fragment):
    tab(fragment)


DIGITS = "view=compare&table=steps_to_target_digits&a=gossip_diloco&b=allreduce"


@pytest.mark.parametrize(
    ("fragment", "shown"),
    [
        (f"{DIGITS}&quantity=steps_to_target", "steps_to_target: no mean: of 16 seeds, 1 and 16 have a number."),
        (f"{DIGITS}&quantity=learning_rate", " in every seed, 16 seeds."),
        ("view=topology&family=aer&n=8", "A period of 6 rounds, from its first on, averages exactly."),
    ],
)
def test_answers_claim_no_more_than_the_numbers_say(tab, fragment, shown):
    assert shown in tab(fragment).inner_text("section.shown .answer")


def test_a_learning_rate_with_a_diverged_seed_has_no_mean(tab, browser, tmp_path):
    data, _ = read_page(ROOT / "results" / "explorer.html")
    data["sweeps"]["table3_fair"]["trials"][0][3] = "nan"  # one of two seeds
    (tmp_path / "diverged.html").write_text(render(data))
    fragment, other = "view=rates&table=table3_fair&method=allreduce", browser.new_page()
    other.goto(f"{(tmp_path / 'diverged.html').as_uri()}#{fragment}", timeout=120_000)
    lines, trials = ".mark-line.role-mark path", ".mark-symbol.role-mark path"
    before, after = (
        (drawn(page).locator(f"#rates {lines}").get_attribute("d").count("L"), page.locator(f"#rates {trials}").count())
        for page in (tab(fragment), other)
    )
    assert [one - two for one, two in zip(before, after, strict=True)] == [1, 1]
    other.close()


def test_on_a_phone_no_view_is_wider_than_the_window_and_claims_are_read_downwards(tab):
    for view in VIEWS:
        page = tab(f"view={view}")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    tab("view=scoreboard")
    claim, verdict = (page.locator("#claims tr[data-claim='0'] > *").nth(place).bounding_box() for place in (0, 1))
    assert verdict["y"] >= claim["y"] + claim["height"]
    page.set_viewport_size({"width": 1280, "height": 900})


def test_the_scoreboard_counts_its_verdicts(tab):
    page = tab("view=scoreboard")
    counts = Counter(page.locator("#claims tr[data-verdict]").evaluate_all("rows => rows.map(r => r.dataset.verdict)"))
    shown = re.findall(r"(\w+) (\d+)", page.inner_text("#claims caption").partition(": ")[2])
    assert {verdict: int(count) for verdict, count in shown} == counts


def test_a_row_of_several_horizons_is_one_series_beside_the_others(tab):
    page = tab("view=gap&x=horizon&mode=tuned")
    legend = page.locator("#gap svg.marks .role-legend").text_content()
    assert "gpt2_horizon: DAdam, aer" in legend
    assert "gpt2_horizon: DAdam, complete" in legend
    assert "gpt2_horizon_10" not in legend
    marks = page.locator("#gap svg.marks .mark-symbol.role-mark path")
    labels = marks.evaluate_all("marks => marks.map(mark => mark.ariaLabel)")
    ours = [re.search(r"tokens per parameter: ([\d.]+)", label)[1] for label in labels if "gpt2_horizon: " in label]
    assert len(set(ours)) == len(ours) > 1
    assert "view=compare" in page.locator("#gap th a").first.get_attribute("href")  # for those without a mouse


def test_a_click_on_a_claim_leads_to_its_evidence_and_that_to_its_seeds(tab):
    page = tab("")
    page.click("#claims tr[data-claim='0'] a")
    evidence = drawn(page).locator("#evidence")
    assert "AER is as accurate as the complete graph" in evidence.inner_text()
    assert evidence.locator("svg.marks").count() == 1
    assert page.evaluate("document.activeElement.id") == "evidence"
    low, high = evidence.locator("tr:nth-child(2) td.n").all_inner_texts()[1:3]
    evidence.locator("a", has_text="seed by seed").first.click()
    answer = drawn(page).locator("#answer").inner_text()
    assert "DAdam, aer minus DAdam, complete" in answer
    assert signed(answer)[1:] == pytest.approx([float(low), float(high)], rel=5e-3)
    assert page.locator("section.shown .panel table tr").count() == 1 + len(load_table("table3_seeds").seeds)


def test_claims_on_benchmarks_show_their_record(tab):
    page = tab("view=scoreboard&claim=6")
    assert "Record scaling" in page.locator("#evidence").inner_text()
    assert page.locator("#evidence details table tr").count() > 5


def test_a_shared_link_shows_the_same(tab, browser):
    page = tab("view=curves")
    page.select_option("#set-table:visible", "gpt2_fair")
    page.select_option("#set-x:visible", "megabytes")
    page.check("#set-logx:visible")
    page.uncheck("#row-allreduce")
    assert page.evaluate("document.activeElement.id") == "row-allreduce"  # the keyboard stays where it was
    address = drawn(page).url
    other = browser.new_page(viewport={"width": 1280, "height": 900})
    other.goto(address, timeout=120_000)
    drawn(other)
    for what in ("#set-table:visible", "#set-x:visible"):
        assert page.input_value(what) == other.input_value(what)
    assert other.is_checked("#set-logx:visible")
    assert not other.is_checked("#row-allreduce")
    texts = [one.locator("#curves .panel").inner_text() for one in (page, other)]
    assert texts[0] == texts[1]
    other.close()


def test_unfinished_runs_are_shown_and_the_page_loads_itself_anew(browser, tmp_path):
    data, _ = read_page(ROOT / "results" / "explorer.html")
    made = tmp_path / "explorer.html"
    made.write_text(render(data | {"tables": {}, "sweeps": {}, "distances": []}, [LIVE]))
    page = browser.new_page()
    page.clock.install()
    page.goto(f"{made.as_uri()}#view=live", timeout=120_000)
    assert "runs/a/seed_1" in page.inner_text("#live table")
    assert "83 min" in page.inner_text("#live table")
    made.write_text(made.read_text().replace("runs/a/seed_1", "runs/b/seed_1"))
    page.clock.fast_forward(31_000)
    page.wait_for_function("document.querySelector('#live table')?.innerText.includes('runs/b/seed_1')")
    page.close()


def test_search_finds_rows_and_the_keyboard_reaches_them(tab):
    page = tab("")
    page.keyboard.press("/")
    page.keyboard.type("beta2 = 0.999 clip = none gpt2_gap")
    hits = page.locator("#hits a")
    assert 0 < hits.count() < 20
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**view=curves**")
    assert drawn(page).input_value("#set-table:visible") == "gpt2_gap"


def test_differences_are_those_of_the_tables(tab):
    for name, pairs in {"table3_fair": [("dadam_aer", "allreduce")], "muon": None}.items():
        table = load_table(name)
        collection = collect(table, ROOT / "results" / "runs")
        rows = [row.name for row in table.rows]
        metric = QUANTITIES[table.metric]
        values = {row: {run.config["seed"]: metric.of(run) for run in collection.of(row)} for row in rows}
        for a, b in pairs or [(rows[0], rows[1]), (rows[2], rows[0])]:
            page = tab(f"view=compare&table={name}&a={a}&b={b}")
            expected = difference(values[a], values[b])
            shown = [
                float(text.replace("−", "-"))
                for text in re.findall(r"[−+][\d.]+", page.inner_text("#answer b >> nth=2"))
            ]
            assert shown == pytest.approx([expected.mean, expected.low, expected.high], rel=6e-3)


def test_predictions_are_those_of_the_planner(tab):
    """On the examples, and on clusters of all sizes with random settings."""
    page, drawn_at = tab("view=planner"), random.Random(0)
    for hosts, per_host in [(2, 1), (4, 2), (16, 1), (8, 4), (2, 8), (32, 2)]:
        settings = {"hosts": hosts, "per_host": per_host, "mbit": 10 ** drawn_at.uniform(1, 5)}
        settings |= {"delay": 10 ** drawn_at.uniform(-2.5, 1), "million": 10 ** drawn_at.uniform(-0.5, 3)}
        settings |= {"compute": 10 ** drawn_at.uniform(1, 3), "jitter": drawn_at.choice([0, 0.05, 0.3])}
        found = page.evaluate("(settings) => window.explorer.predictions(settings)", settings)
        expected = [*clusters._predictions(settings)]
        assert [line["method"] for line in found] == [line["method"] for line in expected]
        for one, other in zip(found, expected, strict=True):
            numbers = [(line["step"], line["compute"]) for line in (one, other)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-6), (settings, one["method"])


def test_without_scripts_all_numbers_are_in_tables(browser, page_file):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    for view in VIEWS:
        assert page.locator(f"#{view} table").count() >= 1
        assert page.locator(f"#{view} > h2").is_visible()
    assert page.locator("noscript").count() == 1
    page.locator("#planner summary").click()
    assert page.locator("#planner table").first.is_visible()
    context.close()
