"""A port for ranks that meet on this machine."""

import errno
import random
import socket

# Below the ports that Linux and others give to whoever asks for any, and below the NodePorts of Kubernetes.
PORTS = range(20_000, 29_000)
TRIES = 100


def free_port() -> int:
    """A port that is free at all IPv4 addresses of this machine.

    Seconds pass until rank 0 listens there, and another program may get a port meanwhile that the system chooses, as
    torch's launcher lets it do.

    Raises:
        OSError: the ports that were tried are all in use.
    """
    chance = random.SystemRandom()  # a launcher beside this one may be seeded alike
    for port in chance.sample(PORTS, TRIES):
        try:
            with socket.create_server(("", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"{TRIES} ports from {PORTS[0]} to {PORTS[-1]} are in use")
