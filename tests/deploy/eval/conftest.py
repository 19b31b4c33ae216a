from pathlib import Path

import pytest

from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.filler import Prose
from expertmesh.deploy.eval.subject import Subject

NANO = Path(__file__).resolve().parents[3] / "deploy" / "models" / "nano"


@pytest.fixture(scope="session")
def subject() -> Subject:
    return Subject(NANO, 2048)


@pytest.fixture(scope="session")
def maker(subject: Subject) -> Maker:
    return Maker(subject.tokenizer, Prose())
