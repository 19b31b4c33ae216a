"""What `expertmesh serve` can be told about cached state. Imports only typer, as cli.py must."""

from functools import partial

from expertmesh.deploy.command import option

_state = partial(option, rich_help_panel="State")

PREFIX_CACHE = _state(help="Whether prompts that begin alike share what was computed for them.")
SNAPSHOTS = _state(
    min=1,
    help="Places for KDA snapshots on the device per replica: from how many prompts can go on, and "
    "from more while there are pages that nobody needs.",
)
HOST_CACHE = _state(
    min=0,
    help="Host memory per replica for pages and snapshots that leave the device. With "
    "--state-dir at least 0.067, or two snapshots: what is written there passes through.",
)
DIR = _state(
    file_okay=False,
    help="Folder for pages, snapshots and sessions that outlive the process; the replicas of a "
    "node share it. Default: none.",
)
DIR_SIZE = _state(min=0, help="Most of its disk that --state-dir may take.")
DIR_RATE = _state(
    help="Most that a replica writes to --state-dir per second for the cache alone; what sessions "
    "save goes at once."
)
READ_SECONDS = _state(
    help="Cached state that takes longer to read is a miss: its tokens are computed again."
)
CHECKPOINTS = _state(
    min=64,
    help="With --state-dir: a running answer's state is saved every so many tokens, a multiple of "
    "64; its heir computes at most these again.",
)
SESSIONS = _state(min=1, help="Most sessions of one API key.")
SESSION_TTL = _state(
    min=1, max=10**9, help="A session that nobody has used for so long is dropped."
)
MODE = _state(
    help="How requests that do not say read old tokens: exact (on the device), offload (from host "
    "memory, to the same bits) or select (those that matter; an estimate).",
)
OFFLOAD = _state(
    min=0,
    help="Host memory per replica, beside --host-cache-gb, for old pages of running requests in "
    "modes offload and select; who finds none left waits.",
)
OFFLOAD_DISK = _state(
    min=0,
    help="Disk per replica under --state-dir, beside --state-dir-gb, for the oldest of those pages "
    "when that memory is filled. It is free again when the request ends.",
)
WINDOW = _state(
    min=64,
    help="Last tokens that stay on the device in modes offload and select, a multiple of 64.",
)
SINKS = _state(min=64, help="First tokens that stay there too, a multiple of 64.")
SELECT_PAGES = _state(
    min=1, help="Old pages that a step of mode select reads exactly, per layer, at most."
)
SELECT_MASS = _state(
    max=1,
    help="Attention mass that these should hold, by estimate. With int8 or int4, 1 minus this is "
    "the proven relative error that an attention output may have.",
)
CODEC = _state(
    help="How pages are packed off the device: raw, lossless, int8 or int4. Of the latter two, "
    "host memory keeps estimates and --state-dir, which they need, the exact bytes, which every "
    "load reads there. What they are for: mode select proves bounds by them.",
)
