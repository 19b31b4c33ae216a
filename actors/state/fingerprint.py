"""Which model's state this is, by everything that decides about its bits and nothing else."""

from hashlib import blake2b
from pathlib import Path

from expertmesh.actors.model.loading import LoadSettings, OpenModel
from expertmesh.kernels.registry import resolve

# Files up to this size are read whole; of larger ones a sample.
WHOLE_BYTES = 64 << 20
SAMPLES, SAMPLE_BYTES = 16, 4096
# Everything of a checkpoint folder that changes what tokens mean or what is computed of them.
PATTERNS = ("*.safetensors", "*.json", "*.model", "*.tiktoken", "*.jinja")


def fingerprint(opened: OpenModel, load: LoadSettings) -> bytes:
    """32 bytes that are equal on every replica and after every restart (kv-state 3.1).

    Of weights too large to read again only sizes, headers and a sample of the bytes count: another
    training run differs everywhere, and nobody edits single tensors of a checkpoint in use.
    """
    digest = blake2b(digest_size=32)
    folder = Path(load.model)
    for path in sorted({path for pattern in PATTERNS for path in folder.glob(pattern)}):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            head = file.read(8)
            digest.update(head + file.read(min(int.from_bytes(head, "little"), WHOLE_BYTES)))
            for sample in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    backends = sorted(resolve(load.kernels, opened.device.type, opened.dtype).items())
    digest.update(f"{opened.device.type} {opened.dtype} {backends}".encode())
    return digest.digest()
