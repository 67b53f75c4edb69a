"""How hosts of a rendezvous know each other, with synthetic names and routes."""

import socket

import pytest
from torch.distributed.launcher.api import LaunchConfig

from dlrm_sharded.files.errors import ConfigError
from dlrm_sharded.ranks import rendezvous
from dlrm_sharded.ranks.rendezvous import adapt_rendezvous

HERE, THERE, LOOPBACK = "10.0.0.1", "10.0.0.2", "127.0.1.1"


def config(endpoint: str, **options: object) -> LaunchConfig:
    return LaunchConfig(
        2, 2, 1, run_id="job", rdzv_backend="c10d", rdzv_endpoint=f"{endpoint}:29500", **options
    )


@pytest.mark.parametrize(
    ("endpoint", "way", "is_named", "address", "options"),
    [
        ("a", (HERE, HERE), False, "a", {"is_host": True}),
        (HERE, (HERE, HERE), None, HERE, {"is_host": True}),
        ("a", ("127.0.0.1", LOOPBACK), True, "a", {}),
        ("a", ("127.0.0.1", LOOPBACK), False, "named", {}),
        ("a", ("127.0.0.1", LOOPBACK), None, "a", {}),
        ("b", (HERE, THERE), True, HERE, {"is_host": False}),
    ],
)
def test_the_address_of_this_host(endpoint, way, is_named, address, options, monkeypatch):
    """By routes, as what the system says of its own name is of no use on other hosts."""

    def matches(host: str) -> bool:
        if is_named is None:
            raise socket.gaierror("unknown name")
        return is_named

    monkeypatch.setattr(rendezvous.utils, "_matches_machine_hostname", matches)
    monkeypatch.setattr(rendezvous, "source_towards", lambda host: way)
    monkeypatch.setattr(socket, "getfqdn", lambda: "named")
    made = config(endpoint)
    made.rdzv_configs.clear()
    adapt_rendezvous(made)
    assert (made.local_addr, made.rdzv_configs) == (address, options)


def test_options_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "source_towards", lambda host: (HERE, HERE))
    made = config("a", local_addr="mine", rdzv_configs={"is_host": 0})
    adapt_rendezvous(made)
    assert made.local_addr == "mine"
    assert made.rdzv_configs["is_host"] == 0


def test_a_name_that_is_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "RESOLVE_S", 0.0)
    with pytest.raises(ConfigError, match=r"--rdzv-endpoint is a\.invalid:29500, but .* resolve"):
        adapt_rendezvous(config("a.invalid"))


def test_hosts_are_ordered_by_names_that_have_their_addresses(monkeypatch: pytest.MonkeyPatch):
    """Numbers come before names, so that the first host would have the last rank."""
    monkeypatch.setattr(rendezvous, "source_towards", lambda host: (HERE, THERE))
    monkeypatch.setattr(socket, "getfqdn", lambda: "node2")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (HERE, 0))])
    made = config("node1")
    adapt_rendezvous(made)
    assert made.local_addr == "node2"
