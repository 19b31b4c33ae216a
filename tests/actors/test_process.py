"""What actor processes set up."""

import gc

from expertmesh.actors.process import keep_heap


def test_full_collections_leave_out_what_was_loaded() -> None:
    loaded = [[] for _ in range(1000)]  # type: ignore[var-annotated]
    before = gc.get_freeze_count()
    try:
        keep_heap()
        assert gc.get_freeze_count() >= before + 1000
        assert not any(one is loaded for one in gc.get_objects())
    finally:
        gc.unfreeze()
