"""Dashboards, rules and the live page of a real mesh: real Prometheus, real browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from expertmesh.deploy.observability.generate import BOARDS
from tests.support.browser import browser
from tests.support.mixed_load import mixed_load
from tests.support.prometheus import Prometheus, prometheus
from tests.support.server_process import wait_for
from tests.support.tools import require_tool
from tests.system import dashboards

LOAD_S = 10.0
# Panels that show nothing here; on each the definition says why it may.
EMPTY = {"Last recovery", "Speed of a tier", "Time of a load"}


@pytest.fixture(scope="module")
def server() -> Iterator[dashboards.Server]:
    for tool in ("prometheus", "chromium", "chromedriver"):
        require_tool(tool)
    with dashboards.serving(replicas=1) as server:
        yield server


@pytest.fixture(scope="module")
def scraped(server: dashboards.Server) -> Iterator[Prometheus]:
    with prometheus(server.url, dashboards.RULES, server.key) as scraped:
        yield scraped


@pytest.mark.timeout(400)
def test_every_panel_shows_something_after_a_short_load(
    server: dashboards.Server, scraped: Prometheus
) -> None:
    dashboards.load(server, LOAD_S)
    results = dashboards.shown(scraped)
    assert len(results) == sum(len(board.panels) for board in BOARDS)
    empty = {one.panel.title for one in results if one.empty}
    assert empty <= EMPTY, empty
    assert all(one.panel.may_be_empty for one in results if one.panel.title in EMPTY)
    (target,) = scraped.targets()
    assert target["health"] == "up", target
    assert scraped.rule_errors() == []
    assert scraped.firing() == set()


@pytest.mark.timeout(200)
def test_the_page_shows_the_load_as_it_comes(server: dashboards.Server, tmp_path: Path) -> None:
    origin = server.url + "/"
    with browser() as page:
        page.authorize(server.key)
        page.driver.get(f"{server.url}/dashboard")
        wait_for(lambda: page.text("#state") == "ready", 20)
        assert page.text("#model") == "nano"
        # What the load before has left is there from the start.
        points = page.run("return document.querySelectorAll('.tile').length")
        assert points >= 6
        with mixed_load(server.url, key=server.key):
            wait_for(lambda: page.value("Generated") > 0, 20)
            first = page.pixels("#tokens")
            wait_for(lambda: page.pixels("#tokens") != first, 20)
            wait_for(lambda: "actors per token" in page.text("#heat-readout"), 30)
        seats = page.run("return [...document.querySelectorAll('#experts tbody tr td:first-child')]"
                         ".map((cell) => cell.textContent)")  # fmt: skip
        assert seats == ["expert-0", "expert-1"]
        page.driver.save_screenshot(str(tmp_path / "page.png"))
        assert page.complaints() == []
        assert [one for one in page.requests() if not one.startswith(origin)] == []
        wait_for(lambda: page.value("Running") == 0, 30)
