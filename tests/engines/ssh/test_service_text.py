"""What service drivers write for systemd, and what they let through of a service's log."""

from __future__ import annotations

from typing import Any

import pytest

from phases.engines.ssh.host import Host
from phases.engines.ssh.services import DockerDriver, ProcessDriver, ServiceDriver, SystemdDriver

LOG = "server_args=ServerArgs(api_key='sk-123456', port=1)\nAuthorization: Bearer abcdef\n"
KEPT = "server_args=ServerArgs(api_key='***', port=1)\nAuthorization: Bearer ***\n"


class Answering:
    """A session whose host gives this log."""

    host = Host("w", "node", "/srv/w")

    def do(self, *operations: dict[str, Any], **_: object) -> list[Any]:
        return [{"text": LOG, "out": LOG, "err": ""} for _ in operations]


@pytest.mark.parametrize(
    "driver", [ProcessDriver(), SystemdDriver("u"), DockerDriver("c")], ids=["process", "systemd", "docker"]
)
def test_no_secret_of_a_log_gets_into_a_checkpoint(driver: ServiceDriver) -> None:
    assert driver.logs(Answering()) == KEPT


@pytest.mark.parametrize(
    ("root", "word"),
    [
        ("/srv/w", "/srv/w"),
        ("/srv/my w", '"/srv/my w"'),
        ("/srv/100%", "/srv/100%%"),
        ("/srv/$HOME", "/srv/$$HOME"),
        ('/srv/a"b\\', '"/srv/a\\"b\\\\"'),
    ],
)
def test_a_root_is_one_argument_of_the_unit_whatever_is_in_it(root: str, word: str) -> None:
    assert (
        SystemdDriver("u")
        .unit_text(Host("w", "node", root))
        .split("ExecStart=")[1]
        .split("\n")[0]
        .endswith(f" exec {word}")
    )
