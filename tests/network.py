"""Machines on one switch: network namespaces of this machine, each with a host name of its own. Needs root and `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

HOSTS = Path("/etc/netns")  # where `ip netns exec` finds a machine's own /etc/hosts
START = 'hostname "$1" && shift && exec "$@"'


def ip(*arguments: str) -> None:
    """Run one command of iproute2.

    Raises:
        subprocess.CalledProcessError: with what it said.
    """
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Return why this machine cannot have such machines; None if it can."""
    if missing := [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]:
        return f"no command {', '.join(missing)} (iproute2, util-linux, hostname)"
    try:
        with Network("one", "two"):
            return None
    except (subprocess.CalledProcessError, OSError) as error:
        why = getattr(error, "stderr", None) or str(error)
        return f"network namespaces are not permitted here: {why.strip()}"


class Network:
    """Some machines that reach each other by their names; use it as a context.

    Args:
        hosts: their names, at most 15 characters each.
    """

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self._own = f"agentrl-{os.getpid()}"
        self._switch = f"{self._own}-switch"

    def space(self, host: str) -> str:
        return f"{self._own}-{host}"

    def address(self, host: str) -> str:
        return f"10.77.0.{1 + self.hosts.index(host)}"

    def __enter__(self) -> Network:
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self._switch, "link", "set", "br0", "up")
            for host in self.hosts:
                self._add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: str) -> None:
        space = self.space(host)
        ip("netns", "add", space)
        names = ["127.0.0.1 localhost", *(f"{self.address(name)} {name}" for name in self.hosts)]
        (HOSTS / space).mkdir(parents=True)
        (HOSTS / space / "hosts").write_text("\n".join(names) + "\n")
        ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", host, "netns", self._switch)
        ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", space, "link", "set", device, "up")
        ip("-n", self._switch, "link", "set", host, "up")
        # As docs/many_devices.md says: who waits for a machine that is gone learns it in two minutes.
        ip("netns", "exec", space, "sh", "-c", "echo 8 > /proc/sys/net/ipv4/tcp_retries2")
        self.mend(host)

    def __exit__(self, *_: object) -> None:
        """End what still runs on the machines, and remove them."""
        for space in (self._switch, *map(self.space, self.hosts)):
            running = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
            if running:
                subprocess.run(["kill", "-KILL", *running], capture_output=True)
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)
            shutil.rmtree(HOSTS / space, ignore_errors=True)

    def cut(self, host: str) -> None:
        """Lose everything that goes to a machine or comes from it, without a word to anybody."""
        ip("-n", self._switch, "link", "set", host, "nomaster")

    def mend(self, host: str) -> None:
        """Plug its cable in."""
        ip("-n", self._switch, "link", "set", host, "master", "br0")

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command as it is run on a machine."""
        return [
            *("ip", "netns", "exec", self.space(host), "unshare", "--uts", "sh", "-c", START, "sh", host),
            *command,
        ]
