"""Somebody on the network who is no part of a run, and wants it to fail. Run as a program, in a network namespace.

``python stranger.py record FILE``: write the beginning of every TCP connection to this namespace, after the port it is
to, to a file, until standard input ends. ``python stranger.py attack``: do what the JSON object on standard input says,
then print what came of it: ``targets``, pairs of address and port; ``seconds``; ``idle``, how many connections to open
to the targets ``flooded`` and to hold; ``recorded``, the beginnings of connections, in hexadecimal digits.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from datetime import timedelta
from typing import Any

_ETH_P_ALL, _IPV4, _TCP = 3, 0x0800, 6
_KEPT_BYTES = 512
_HOLDERS = 8
_STOP = json.dumps({"cause": "completed", "why": "", "at": 1.0, "node": 0, "signal": None})
_KEYS = ("agents/0/stop", "0/stop", "stop", "agents/beat/0", "agents/0/next", "0/next")


def record(path: str) -> None:
    """Record what others send to this namespace, by connection."""
    connections: dict[tuple[bytes, bytes], bytes] = {}
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as sniffer:
        sniffer.settimeout(0.1)
        ended = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        print("recording", flush=True)
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                packet, (_, protocol, kind, *_) = sniffer.recvfrom(65536)
                if protocol != _IPV4 or kind == socket.PACKET_OUTGOING or packet[23] != _TCP:
                    continue
                at = 14 + (packet[14] & 15) * 4
                end = 14 + struct.unpack(">H", packet[16:18])[0]
                data = packet[at + (packet[at + 12] >> 4) * 4 : end]
                key = (packet[26:34], packet[at : at + 4])
                connections[key] = (connections.get(key, b"") + data)[:_KEPT_BYTES]
    with open(path, "w") as file:  # noqa: PTH123
        ports = [int.from_bytes(key[1][2:4], "big") for key in connections]
        json.dump([[port, data.hex()] for port, data in zip(ports, connections.values(), strict=True) if data], file)


class Attack:
    """Everything at once; ``counts`` says how often each was done."""

    def __init__(self, plan: dict[str, Any]) -> None:
        # Torch takes long to import.
        from torch.distributed import TCPStore

        self._open_store = TCPStore
        self._targets = [(str(address), int(port)) for address, port in plan["targets"]]
        self._flooded = [(str(address), int(port)) for address, port in plan["flooded"]]
        self._idle = int(plan["idle"])
        self._recorded = [bytes.fromhex(data) for data in plan["recorded"]]
        self._until = time.monotonic() + plan["seconds"]
        self._held: list[socket.socket] = []
        self.counts = {"garbage": 0, "replayed": 0, "store": 0, "idle": 0}

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._send_garbage),
            threading.Thread(target=self._replay),
            *(threading.Thread(target=self._hold, args=(first,)) for first in range(_HOLDERS)),
        ]
        # These end with the process: torch may wait for ever for an answer of what is no store.
        writers = [threading.Thread(target=self._write, args=(target,), daemon=True) for target in self._targets]
        for thread in [*threads, *writers]:
            thread.start()
        for thread in threads:
            thread.join()
        self.counts["idle"] = len(self._held)

    def _send_garbage(self) -> None:
        while time.monotonic() < self._until:
            self._send("garbage", random.randbytes(random.randrange(1, 5000)))

    def _replay(self) -> None:
        while time.monotonic() < self._until:
            self._send("replayed", random.choice(self._recorded))

    def _send(self, name: str, data: bytes) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(random.choice(self._targets), timeout=1) as connection,
        ):
            connection.sendall(data)
            self.counts[name] += 1
            connection.settimeout(0.05)
            connection.recv(4096)

    def _write(self, target: tuple[str, int]) -> None:
        """Write to a store of torch's, if there is one, what would end a run if agents read it there."""
        while time.monotonic() < self._until:
            with contextlib.suppress(RuntimeError):
                store = self._open_store(*target, None, False, timedelta(seconds=1), wait_for_workers=False)
                for key in _KEYS:
                    for value in (_STOP, "junk", _STOP):
                        store.set(key, value)
                        self.counts["store"] += 1

    def _hold(self, first: int) -> None:
        for number in range(first, self._idle, _HOLDERS):
            if time.monotonic() < self._until:
                with contextlib.suppress(OSError):
                    target = self._flooded[number % len(self._flooded)]
                    self._held.append(socket.create_connection(target, timeout=1))


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(sys.argv[2])
    else:
        attack = Attack(json.load(sys.stdin))
        attack.run()
        print(json.dumps(attack.counts), flush=True)
        os._exit(0)
