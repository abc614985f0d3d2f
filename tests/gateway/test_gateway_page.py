"""The page at / in a real browser: figures, keys, and a restarted gateway."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if not all(map(find_spec, ("openai", "httpx", "starlette", "uvicorn", "prometheus_client", "torch", "transformers"))):
    pytest.skip("needs the extras serve, models and test", allow_module_level=True)

import openai
from gateway.browser import browser_path, headless
from gateway.running import LIMIT_S, keys, until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not browser_path(), reason="no chromium is installed")]
QUESTION = [{"role": "user", "content": "?"}]
OVERFLOW = "document.documentElement.scrollWidth - innerWidth"


def text_of(page, place):
    return page.value(f"document.querySelector('{place}').innerText")


def row_of(page, model):
    return page.value(
        f"[...document.querySelectorAll('#models tr')].map(r => r.innerText).find(t => t.startsWith('{model}')) || ''"
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with headless(tmp_path_factory.mktemp("profile")) as page:
        yield page


def test_the_page_shows_models_devices_queues_and_rates_live(gateway, page, tmp_path):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0) as client:
        page.open(gateway.url)
        until(lambda: "cold" in row_of(page, "small"), why="a model that is cold")
        assert "cannot be used" in row_of(page, "gone")
        options = {"model": "small", "messages": QUESTION, "temperature": 0, "stream": True}
        with client.chat.completions.create(**options, max_tokens=1900) as stream:
            next(iter(stream))
            until(lambda: "1 hot" in row_of(page, "small"), why="the model is hot, without another load of the page")
            until(lambda: page.value("rates.at(-1)") > 0, why="tokens a second")
            until(lambda: "1 call running, 0 waiting" in text_of(page, "#calls"), why="the call is counted")
        assert "cpu:0" in text_of(page, "#pilots")
        assert "small (ready)" in text_of(page, "#pilots")
    for width in (1280, 390):
        page.resize(width=width)
        until(lambda: page.value(OVERFLOW) <= 0, why=f"nothing beside a window of {width} pixels")
        assert page.screenshot(tmp_path / f"{width}.png").stat().st_size > 5_000
    page.darken(True)
    dark = page.screenshot(tmp_path / "dark.png").read_bytes()
    page.darken(False)
    assert dark != page.screenshot(tmp_path / "light.png").read_bytes()
    assert page.errors == []


@pytest.mark.long
def test_the_page_asks_for_a_key_and_keeps_it_out_of_addresses(gateway, page, world):
    key = keys(world, "add", "ana")
    try:
        page.open(gateway.url)
        until(lambda: page.value("document.readyState") == "complete", why="the page")
        until(lambda: "a key is wanted" in text_of(page, "#about"), why="the form")
        assert page.value("document.getElementById('main').hidden")
        page.value("document.getElementById('key').value = 'sk-wrong'; document.querySelector('#ask button').click()")
        until(lambda: "not valid" in text_of(page, "#about"), why="a wrong key is told")
        page.value(f"document.getElementById('key').value = '{key}'; document.querySelector('#ask button').click()")
        until(lambda: row_of(page, "small"), why="the figures")
        assert key not in page.value("location.href")
    finally:
        (world.home / "serve" / "keys.json").unlink()
    assert page.errors == []


@pytest.mark.long
def test_the_page_goes_on_when_its_gateway_was_killed(gateway, page):
    page.open(gateway.url)
    until(lambda: row_of(page, "small"), why="the figures")
    gateway.kill()
    until(lambda: "does not answer" in text_of(page, "#said"), why="the page says so")
    gateway.start()
    until(lambda: text_of(page, "#said") == "", why="the page goes on")
    assert row_of(page, "small")
