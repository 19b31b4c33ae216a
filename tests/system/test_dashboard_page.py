"""The live page in a real browser, over a mesh that is made up: every state it can be in."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.front import Front
from expertmesh.deploy.observability import page as page_module
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from tests.support.browser import Browser, browser
from tests.support.fake_client import FakeEngineClient
from tests.support.fake_control import FakeControl
from tests.support.http_server import http_server
from tests.support.server_process import wait_for

PERIOD_S = 0.1
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "PERIOD_S", PERIOD_S)


@contextmanager
def opened(chromium: Browser, mesh: FakeControl | None) -> Iterator[Browser]:
    """The page, as soon as it shows data."""
    client = FakeEngineClient(vocab_size=320)
    client.counters.page_bytes, client.counters.slot_bytes = 4096, 65536
    served = ServedModel("kimi-k3", "/m", 1000, 320, None)
    with http_server(build_app(Front(client, served), admin=Admin(mesh))) as url:
        chromium.requests(), chromium.complaints()
        chromium.driver.get(f"{url}/dashboard")
        wait_for(lambda: chromium.text("#model") == "kimi-k3", 20)
        yield chromium
        if not chromium.run("return document.hidden"):
            assert all(one.startswith(url) for one in chromium.requests()), "an outside request"
        chromium.driver.get("about:blank")


def big_mesh() -> FakeControl:
    mesh = FakeControl(layers=92, experts=896, actors=64, replicas=8)
    mesh.step = 1
    return mesh


def test_the_largest_mesh_is_drawn_and_follows_its_load(chromium: Browser, quick: None) -> None:
    mesh = FakeControl(layers=4, experts=8, actors=4)
    with opened(chromium, mesh) as page:
        assert "No hits yet" in page.text("#heat-readout")
        mesh.step = 1
        wait_for(lambda: "actors per token" in page.text("#heat-readout"), 10)
        before = page.pixels("#heat")
        mesh.layers = tuple(range(1, 93))
        mesh.experts, mesh.actors, mesh.step = 896, 64, 2
        wait_for(lambda: page.pixels("#heat") != before, 10)
        wait_for(lambda: page.count("#heat-table tr") == 1 + 92, 10)
        assert page.count("#experts tbody tr") == 64
        assert page.complaints() == []


def test_trouble_is_seen_at_once(chromium: Browser, quick: None) -> None:
    mesh = FakeControl(actors=3)
    mesh.step = 1
    with opened(chromium, mesh) as page:
        assert page.text("#state") == "ready"
        mesh.state, mesh.reason = "recovering", "lost expert-1"
        mesh.down = {"expert-1"}
        wait_for(lambda: page.text("#state") == "recovering", 10)
        wait_for(lambda: "down" in page.text("#experts"), 10)
        assert "lost expert-1" in page.text("#reason")
        mesh.epoch += 1
        wait_for(lambda: "epoch 4 began" in page.text("#events"), 10)
        assert page.value("Epoch") == 4
        mesh.silent = EngineUnavailable("the keeper is gone")
        wait_for(lambda: page.count("#experts tbody tr") == 0, 10)
        assert page.complaints() == []


def test_what_the_mesh_says_is_text_and_never_markup(chromium: Browser, quick: None) -> None:
    mesh = FakeControl(actors=2)
    with opened(chromium, mesh) as page:
        mesh.state = "unserviceable"
        mesh.reason = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
        mesh.epoch += 1
        wait_for(lambda: "<img" in page.text("#reason"), 10)
        wait_for(lambda: "<img" in page.text("#events"), 10)
        assert page.count("img") == 0
        assert "unserviceable" in page.driver.title
        assert page.complaints() == []


def test_a_hidden_page_asks_for_nothing(chromium: Browser, quick: None) -> None:
    hide = """
        Object.defineProperty(document, "hidden", { value: arguments[0], configurable: true });
        document.dispatchEvent(new Event("visibilitychange"));"""
    mesh = FakeControl()
    with opened(chromium, mesh) as page:
        page.run(hide, True)
        threading.Event().wait(3 * PERIOD_S)  # what was on its way has come
        page.requests()
        threading.Event().wait(5 * PERIOD_S)
        assert page.requests() == []
        page.run(hide, False)
        wait_for(lambda: page.requests() != [], 10)


def test_a_server_that_goes_away_is_said_to_be_gone(chromium: Browser, quick: None) -> None:
    mesh = FakeControl()
    with opened(chromium, mesh) as page:
        address = page.driver.current_url
        page.run("window.fetch = () => Promise.reject(new TypeError('refused'))")
        wait_for(lambda: page.text("#state").startswith("no answer for"), 10)
        assert page.text("#reason") == "the server cannot be reached"
        page.driver.get(address)
        wait_for(lambda: page.text("#state") == "ready", 10)


def test_one_process(chromium: Browser, quick: None) -> None:
    with opened(chromium, None) as page:
        assert "one process" in page.text("#heat-readout")
        assert page.run("return document.querySelector('#heat').clientHeight") == 0
        assert page.run("return document.querySelector('#experts').hidden")
        assert page.complaints() == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_legible_in_any_light_and_on_a_phone(
    chromium: Browser, quick: None, scheme: str, size: str
) -> None:
    with opened(chromium, big_mesh()) as page:
        page.resize(*SIZES[size])
        page.scheme(scheme)
        wait_for(lambda: page.run("return innerWidth") == SIZES[size][0], 10)
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        for text in ("text", "quiet", "good", "warn", "bad"):
            assert contrast(page, text, "panel") >= 4.5, text
        small = """
            return [...document.querySelectorAll("p, td, th, h2, span, li, summary")]
              .filter((one) => one.textContent && parseFloat(getComputedStyle(one).fontSize) < 11)
              .length"""
        assert page.run(small) == 0
        page.resize(*SIZES["desktop"])


def contrast(page: Browser, front: str, back: str) -> float:
    """WCAG's ratio of two of the page's colours: 4.5 is asked for text."""

    def luminance(name: str) -> float:
        script = "return getComputedStyle(document.documentElement).getPropertyValue(arguments[0])"
        text = str(page.run(script, f"--{name}")).strip().lstrip("#")
        channels = [int(text[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(front), luminance(back)), reverse=True)
    return (high + 0.05) / (low + 0.05)
