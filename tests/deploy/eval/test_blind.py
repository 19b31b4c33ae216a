"""The control: nothing of old tokens is left, all else is as it was, and nobody finds it later."""

import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.eval.asking import Asker
from expertmesh.deploy.eval.blind import Blind
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.longcontext import Mode, cell
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.tasks import make

STATE = StateSettings(sink_tokens=64, window_tokens=128)
MODE = Mode("blind", state=STATE, blind=True)


class Eyes:
    """What pages hold while a probe is answered."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._blind = engine, Blind(STATE.sink_tokens, STATE.window_tokens)
        self.empty: set[tuple[int, ...]] = set()
        self.shared = False

    def __call__(self) -> None:
        engine, running = self._engine, self._engine.scheduler.running
        self._blind(engine)
        latents = engine.state.latents
        pages = latents.view(len(latents), -1, PAGE_TOKENS, latents.shape[2])
        for seq in running:
            if seq.generated:
                zero = (pages[:, seq.pages] == 0).all(dim=(0, 2, 3))
                self.empty.add(tuple(torch.nonzero(zero[: seq.computed // 64]).flatten().tolist()))
        self.shared |= len(running) > 1 and running[0].pages[0] == running[1].pages[0]


def test_old_pages_are_empty_while_it_is_asked_and_forgotten_afterwards(
    subject: Subject, maker: Maker
) -> None:
    case = make("multikey", maker, 512, 0, 0)
    with subject.engine(MODE.engine_settings(512)) as engine:
        eyes = Eyes(engine)
        blind = list(Asker(engine, watch=eyes).ask([(0, case)]))
        assert engine.stats().cache.cached_pages == 0
    assert eyes.shared  # the probes go on from the same pages
    # Page 0 are the sinks; 512 - 128 is where the window begins.
    assert eyes.empty == {(1, 2, 3, 4, 5)}
    with subject.engine(Mode("exact", state=STATE).engine_settings(512)) as engine:
        full = list(Asker(engine).ask([(0, case)]))
    control = cell("multikey", 512, "blind", blind, full)
    assert control.divergence > 0
    assert cell("multikey", 512, "exact", full, full).divergence == 0
