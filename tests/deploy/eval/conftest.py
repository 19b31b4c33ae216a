from pathlib import Path

import pytest

from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.filler import Prose
from expertmesh.deploy.eval.subject import Subject
from tests.support.wordy import write_wordy


@pytest.fixture(scope="session")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wordy(tmp_path_factory.mktemp("wordy"))


@pytest.fixture(scope="session")
def subject(wordy: Path) -> Subject:
    """A tiny model of random weights: it knows nothing, but all of its engine is there."""
    return Subject(wordy, 2048)


@pytest.fixture(scope="session")
def maker(subject: Subject) -> Maker:
    return Maker(subject.tokenizer, Prose())
