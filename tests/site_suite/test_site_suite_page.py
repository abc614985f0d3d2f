from __future__ import annotations

from stoker.manager.cli.site_suite import PromiseVerdict, SiteReport, TriedPromise, render_report

HOLDS = TriedPromise("a pilot starts", PromiseVerdict.HOLDS, 1.2)
FAILS = TriedPromise(
    "files travel", PromiseVerdict.FAILS, 61.0, "no byte came\nin detail", "open the ports", "/logs/k3v9"
)
NOT_TRIED = TriedPromise("the ledger agrees", PromiseVerdict.NOT_TRIED, why="no GPU here")


def page(*promises: TriedPromise, interrupted: bool = False) -> SiteReport:
    return SiteReport("lab", "Slurm", ("n1", "n2"), ("2 x cpu with 4.0 GB",), promises, 74.0, interrupted)


def test_page_lists_passes_then_failures_then_other_results():
    assert render_report(page(NOT_TRIED, FAILS, HOLDS)) == [
        "site lab · Slurm · n1, n2 · 2 x cpu with 4.0 GB",
        "",
        "  ok    a pilot starts · 1.2 s",
        "  fails files travel · 1 min 1 s",
        "        no byte came",
        "        in detail",
        "        open the ports",
        "        log: /logs/k3v9",
        "  no    the ledger agrees: not tried: no GPU here",
        "",
        "1 promise holds, 1 does not, 1 could not be tried; in 1 min 14 s",
    ]


def test_page_of_a_working_site_says_that_no_promise_fails():
    assert render_report(page(HOLDS, HOLDS))[-1] == "2 promises hold, none fails; in 1 min 14 s"


def test_page_of_an_interrupted_run_reports_the_interruption():
    assert (
        render_report(page(HOLDS, interrupted=True))[-1] == "1 promise holds, none fails; interrupted after 1 min 14 s"
    )


def test_site_passes_if_a_promise_holds_and_no_promise_fails():
    assert page(HOLDS, NOT_TRIED).has_passed
    assert not page(HOLDS, FAILS).has_passed
    assert not page(NOT_TRIED).has_passed
    assert not page(HOLDS, interrupted=True).has_passed
