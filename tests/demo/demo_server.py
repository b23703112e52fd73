"""Serve the demo, and note every attempt to reach another machine: ``python demo_server.py LOG [arguments]``."""

from __future__ import annotations

import ipaddress
import sys


def is_here(host: object) -> bool:
    """``host`` is this machine."""
    if host in (None, "", "localhost", b"localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.decode() if isinstance(host, bytes) else str(host))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def watch(path: str) -> None:
    """Write what leaves the machine to a file, a line each."""

    def hook(event: str, arguments: tuple) -> None:
        if event in ("socket.connect", "socket.sendto"):
            host = arguments[1][0] if isinstance(arguments[1], tuple) else None  # else a socket of the file system
        elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
            host = arguments[0]
        else:
            return
        if not is_here(host):
            with open(path, "a") as log:
                log.write(f"{event} {host}\n")

    sys.addaudithook(hook)


if __name__ == "__main__":
    log, *rest = sys.argv[1:]
    watch(log)
    from demo.__main__ import Options, arguments, serve

    raise SystemExit(serve(Options(**vars(arguments().parse_args(rest)))))
