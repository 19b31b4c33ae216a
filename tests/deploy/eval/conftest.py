from pathlib import Path

import pytest

from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.filler import Prose
from expertmesh.deploy.eval.subject import Subject


@pytest.fixture(scope="session")
def subject(checkpoint: Path) -> Subject:
    """A tiny model of random weights: it knows nothing, but all of its engine is there."""
    return Subject(checkpoint, 2048)


@pytest.fixture(scope="session")
def maker(subject: Subject) -> Maker:
    """In the tiny model's tokens, which are bytes."""
    return Maker(subject.tokenizer, Prose())
