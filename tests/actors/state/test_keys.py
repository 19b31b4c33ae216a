"""Names of state: the same for the same bits everywhere, and for nothing else."""

import subprocess
import sys

from expertmesh.actors.state.keys import chain, extend, named_key, root_key
from expertmesh.actors.state.tip import Tip

ROOT = root_key(b"model", "tenant")
TOKENS = list(range(300))


def test_keys_are_chained_and_whole_pages_only() -> None:
    keys = chain(ROOT, TOKENS)
    assert len(keys) == 4 and len(set(keys)) == 4 and all(len(key) == 32 for key in keys)
    assert keys[0] == extend(ROOT, TOKENS[:64], 64)
    assert keys[1] == extend(keys[0], TOKENS[64:128], 128)
    early = chain(ROOT, [9, *TOKENS[1:]])
    assert not set(early) & set(keys)  # the first token is in all of them


def test_a_tip_takes_the_keys_that_there_are() -> None:
    """Of more pages than it has, or of fewer; a path that changes behind it is not its own."""
    known = chain(ROOT, TOKENS, [100, 280])
    for position in (63, 64, 250, 256, 300):
        tip = Tip.of(ROOT, TOKENS, position, [100])
        assert list(tip.keys) == known[: position // 64]
        for count in (0, 1, 4):
            assert Tip.of(ROOT, TOKENS, position, [100], known[:count]) == tip


def test_a_key_says_where_the_path_changed_and_only_what_has_passed() -> None:
    keys, decoded = chain(ROOT, TOKENS), chain(ROOT, TOKENS, [128])
    assert decoded[:2] == keys[:2] and not set(decoded[2:]) & set(keys[2:])
    assert chain(ROOT, TOKENS, [200])[2] == keys[2] and chain(ROOT, TOKENS, [190])[2] != keys[2]
    # A switch is not a token, and one switch is not two.
    assert extend(ROOT, [1, 2], 66, [5]) != extend(ROOT, [1, 2, 5], 67)
    assert extend(ROOT, [], 64, [1, 2]) != extend(ROOT, [], 64, [1])


def test_roots_differ_by_model_tenant_and_mode() -> None:
    roots = {
        root_key(b"model"), root_key(b"model2"), root_key(b"model", "a"), root_key(b"model", "b"),
        root_key(b"model", "a", "select"), root_key(b"mod", "elA"), root_key(b"", "modela"),
    }  # fmt: skip
    assert len(roots) == 7
    assert named_key(ROOT, b"session", "x") != named_key(ROOT, b"session", "y")
    assert named_key(ROOT, b"a", "bc") != named_key(ROOT, b"ab", "c")


def test_another_process_finds_the_same_names() -> None:
    """No process seed, address or order of a set is in a name."""
    code = (
        "from expertmesh.actors.state.keys import chain, root_key;"
        "print(chain(root_key(b'model', 'tenant'), list(range(300)), [128])[3].hex())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == chain(ROOT, TOKENS, [128])[3].hex()
