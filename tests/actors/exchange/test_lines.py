"""One connection of the direct layout, that several threads write to."""

import socket
import threading

from expertmesh.actors.exchange.direct import Line

FRAME, EACH = 40_000, 300  # far more than the kernel's buffers hold


def test_two_threads_queue_whole_frames() -> None:
    """A farewell may come while a step is under way."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    line, errors = Line(ours), list[Exception]()

    def write(content: bytes) -> None:
        try:
            for _ in range(EACH):
                line.queue(memoryview(content * FRAME))
        except Exception as error:
            errors.append(error)

    def read() -> None:
        while len(came) < 2 * EACH * FRAME:
            came.extend(theirs.recv(1 << 20))

    came = bytearray()
    threads = [threading.Thread(target=write, args=(content,)) for content in (b"a", b"b")]
    reader = threading.Thread(target=read, daemon=True)
    for each in (*threads, reader):
        each.start()
    for each in threads:
        each.join(30)
    line.flush(30)
    reader.join(30)
    assert not errors and len(came) == 2 * EACH * FRAME
    frames = [came[at : at + FRAME] for at in range(0, len(came), FRAME)]
    assert all(frame.count(frame[0]) == FRAME for frame in frames)
    assert sum(frame[0] == ord("a") for frame in frames) == EACH
    ours.close()
    theirs.close()
