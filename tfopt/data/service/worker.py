"""One worker of a tf.data service: `python -m tfopt.data.service.worker DISPATCHER ADDRESS`.

It ends when the process that started it has ended.
"""

from __future__ import annotations

import os
import sys
import time

HEARTBEAT_MS = 500


def main(dispatcher: str, address: str) -> None:
    """Serves until the parent process ends."""
    import tensorflow as tf  # here: its import takes seconds, and the parent may have ended meanwhile

    from tfopt.compat.listening import address_of, listen_only_on

    parent = os.getppid()
    service = tf.data.experimental.service
    host, _, port = address.rpartition(":")
    config = service.WorkerConfig(
        dispatcher_address=dispatcher,
        worker_address=address,
        port=int(port),
        heartbeat_interval_ms=HEARTBEAT_MS,
    )
    server = service.WorkerServer(config)
    listen_only_on(address_of(host), int(port))
    print("ready", flush=True)  # noqa: T201 - the parent waits for this line
    while os.getppid() == parent:
        time.sleep(0.5)
    del server


if __name__ == "__main__":
    main(*sys.argv[1:])
