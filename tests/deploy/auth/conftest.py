"""Servers that need keys, over the scripted client."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from expertmesh.deploy.auth.keys import hash_key
from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import http_server

KEY, TOKEN = "em-a-key-of-the-tests", "an admin token of the tests"

Serve = Callable[..., AbstractContextManager[Door]]


@pytest.fixture(scope="session")
def serve(served: ServedModel) -> Serve:
    """serve(admin, client, **sections of the edge's settings): a door to a server that wants KEY.

    The door itself sends none.
    """

    @contextmanager
    def start(
        admin: Admin | None = None, client: FakeEngineClient | None = None, **sections: Any
    ) -> Iterator[Door]:
        sections = {"auth": {"key_hashes": [hash_key(KEY)]}} | sections
        edge = EdgeSettings.model_validate(sections)
        front = Front(client or FakeEngineClient(), served, edge)
        with http_server(build_app(front, admin=admin)) as url, Door(url) as door:
            yield door

    return start


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
